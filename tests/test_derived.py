"""Methods that no peer has, against figures that were derived from the formulas of their papers.

tests/golden/derive.py holds the derivations, and says how to write tests/golden/derived.json.
"""

import json
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost.losses import surrogates, turn_advantages

GOLDEN = pathlib.Path(__file__).parent / 'golden'
DERIVED = json.loads((GOLDEN / 'derived.json').read_text('utf-8'))
derive = runpy.run_path(str(GOLDEN / 'derive.py'))

STATES = {'': [], 'hall': [7, 7], 'door': [8], 'lake': [7, 8]}


def test_the_file_is_up_to_date():
  assert json.loads(json.dumps(derive['figures']())) == DERIVED


def episodes():
  """(rewards [2, 3], turn_rewards, sampled, completions [6, 20]): turns of two tokens between observations."""
  flat = [episode for group in derive['EPISODES'] for episode in group]
  tokens, sampled, of_turns = (np.zeros((len(flat), 20)) for _ in range(3))
  for n, (turns, _) in enumerate(flat):
    at = 0
    for observation, reward in turns:
      seen = STATES[observation]
      tokens[n, at : at + len(seen)] = seen
      at += len(seen) + 2
      tokens[n, at - 2 : at] = n, at  # what the policy says is not part of the state
      sampled[n, at - 2 : at] = 1
      of_turns[n, at - 1] = reward
  rewards = [outcome + sum(reward for _, reward in turns) for turns, outcome in flat]
  return np.array(rewards).reshape(2, 3), of_turns, sampled, tokens.astype(np.int32)


def expected(case, sampled):
  """The figures of each turn, at its tokens."""
  out = np.zeros(sampled.shape)
  for n, of_turns in enumerate(DERIVED[case]):
    (places,) = np.nonzero(sampled[n])
    out[n, places] = np.repeat(of_turns, 2)
  return out


@pytest.mark.parametrize(
  'case, options', [('gamma1/group', {}), ('gamma0.5/none', dict(gamma=0.5, scale='none'))], ids=['default', 'options']
)
def test_mt_grpo(case, options):
  rewards, of_turns, sampled, _ = episodes()
  ours = turn_advantages.mt_grpo(rewards, np.ones((2, 3), bool), of_turns, sampled, **options)
  np.testing.assert_allclose(ours, expected(f'mt_grpo/{case}', sampled), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'case, options',
  [('gamma0.95/group', {}), ('gamma0.9/weight0.5/none', dict(gamma=0.9, weight=0.5, scale='none'))],
  ids=['default', 'options'],
)
def test_gigpo(case, options):
  rewards, of_turns, sampled, tokens = episodes()
  ours = turn_advantages.gigpo(rewards, np.ones((2, 3), bool), of_turns, sampled, tokens, **options)
  np.testing.assert_allclose(ours, expected(f'gigpo/{case}', sampled), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('gamma', [0.1, 0.5])
def test_luffy(gamma):
  chance, gains = (jnp.array(x, jnp.float32) for x in zip(*derive['LUFFY']))
  expected = np.array(DERIVED[f'luffy/gamma{gamma}'])
  loss, slope = jax.jvp(lambda logp: surrogates.expert(logp, gains, gamma), (jnp.log(chance),), (jnp.ones(6),))
  np.testing.assert_allclose(loss, expected[:, 0], rtol=1e-5)
  np.testing.assert_allclose(slope, expected[:, 1], rtol=1e-5)


@pytest.mark.parametrize('method', ['mt_grpo', 'gigpo'])
def test_a_sample_without_a_reward_is_left_out(method):
  """The others get what they get without it, and it gets nothing."""
  rewards, of_turns, sampled, tokens = episodes()
  rewards[0, 2] = np.nan
  valid = np.isfinite(rewards)
  arrays = {'mt_grpo': (of_turns, sampled), 'gigpo': (of_turns, sampled, tokens)}[method]
  ours = getattr(turn_advantages, method)(rewards, valid, *arrays)
  kept = getattr(turn_advantages, method)(rewards[:1, :2], valid[:1, :2], *(x[:2] for x in arrays))
  np.testing.assert_allclose(ours[:2], kept, rtol=1e-6)
  assert not ours[2].any() and ours[:2].any()


def test_every_figure_of_other_systems_has_a_test():
  """tests/golden/README.md names each case once, beside a test that reads the file."""
  rows = re.findall(r'^\| `(tests/\S+)` \| (.+) \|$', (GOLDEN / 'README.md').read_text(), re.M)
  named = [case for _, cases in rows for case in re.findall('`(.+?)`', cases)]
  assert sorted(named) == sorted(json.loads((GOLDEN / 'losses.json').read_text())['cases'])
  for test, _ in rows:
    assert 'golden/losses.json' in (GOLDEN.parents[1] / test).read_text().replace("' / '", '/'), test
