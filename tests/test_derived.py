"""Methods of which no figure of a peer is at hand, against figures derived from the formulas of their papers.

tests/golden/derive.py holds the derivations, and says how to write tests/golden/derived.json.
"""

import json
import pathlib
import re
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpost.algorithms import distill, ppo
from jaxpost.losses import entropy_control, group_advantages, surrogates, turn_advantages
from jaxpost.rl import teachers
from jaxpost.stage import config as config_lib
from jaxpost.stage import moving_reference
from jaxpost.types import Experience, Prompt, Rollout

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


def close(ours, figures):
  np.testing.assert_allclose(ours, figures, rtol=1e-5, atol=1e-6)


def with_lost_samples(groups, *more):
  """(groups [N, G + 1], of which one sample has no reward, valid, the same of `more` arrays)."""
  groups, *more = (np.insert(np.array(x, np.float64), 1, 7.0, axis=1) for x in (groups, *more))
  valid = np.ones(groups.shape, bool)
  valid[:, 1] = False
  groups[:, 1] = np.nan
  return groups, valid, *more


def without_lost_samples(gains):
  assert not gains[:, 1].any()
  return np.delete(gains, 1, axis=1)


@pytest.mark.parametrize('lost', [False, True], ids=['all have rewards', 'one has none'])
@pytest.mark.parametrize('case', ['maxrl', 'pass_at_k/k1', 'pass_at_k/k2', 'pass_at_k/k3', 'opo', 'gdpo'])
def test_advantages_of_groups(case, lost):
  """Advantages of samples that have rewards do not depend on a sample that has none."""
  method, _, k = case.partition('/k')
  graded = list(zip(*derive['GRADED']))
  weighted = list(derive['REWARDS'].values())
  arrays = {'opo': graded, 'gdpo': [values for _, values in weighted]}.get(method, [derive['BINARY']])
  arrays = [np.array(x, np.float64) for x in arrays]
  first, valid, *more = with_lost_samples(*arrays) if lost else (arrays[0], np.ones(arrays[0].shape, bool), *arrays[1:])
  if method == 'gdpo':
    components = {str(i): (weight, x) for i, ((weight, _), x) in enumerate(zip(weighted, (first, *more)))}
    ours = group_advantages.gdpo(components, valid)
  else:
    ours = getattr(group_advantages, method)(first, valid, *more, **(dict(k=int(k)) if k else {}))
  close(without_lost_samples(ours) if lost else ours, DERIVED[case])


def tokens_with_covariance():
  """(covariance, mask) of the tokens of derive.py."""
  mask = np.array([[x is not None for x in row] for row in derive['TOKENS']])
  chance, gains = np.moveaxis(np.array([[x or (0.5, 99.0) for x in row] for row in derive['TOKENS']]), 2, 0)
  return entropy_control.covariance(np.log(chance), gains, mask), mask


def test_covariance():
  np.testing.assert_allclose(tokens_with_covariance()[0], DERIVED['covariance'], rtol=1e-12)


@pytest.mark.parametrize('fraction', [0.01, 0.2, 0.9])
def test_clip_cov(fraction):
  count, inside = DERIVED[f'clip_cov/{fraction}']
  cov, mask = tokens_with_covariance()
  drawn = set()
  for seed in range(30):
    random = np.random.default_rng(seed)
    chosen = np.argwhere(entropy_control.clip_cov(cov, mask, fraction=fraction, low=0.2, high=1.5, random=random))
    assert len(chosen) == count
    drawn |= set(map(tuple, chosen.tolist()))
  assert sorted(drawn) == [tuple(at) for at in inside]


@pytest.mark.parametrize('fraction', [0.01, 0.3])
def test_kl_cov(fraction):
  cov, mask = tokens_with_covariance()
  assert np.argwhere(entropy_control.kl_cov(cov, mask, fraction=fraction)).tolist() == DERIVED[f'kl_cov/{fraction}']


@pytest.mark.parametrize('alpha', [0.5, 0.25])
def test_vapo(alpha):
  """Both lambdas: advantages have that of the length of their sample, and returns are those of lambda 1."""
  figures = DERIVED[f'vapo/alpha{alpha}']
  lengths = np.array([len(of_tokens) for _, of_tokens in derive['VALUES']])
  shape = len(lengths), max(lengths)
  mask = np.float32(np.arange(shape[1]) < lengths[:, None])
  padded = np.full(shape, np.nan)
  padded[mask > 0] = np.concatenate([of_tokens for _, of_tokens in derive['VALUES']])
  rewards = np.array([outcome for outcome, _ in derive['VALUES']])
  zeros = np.zeros(shape, np.float32)
  prompts = tuple(Prompt(i, np.zeros(1, np.int32), '', {}) for i in range(shape[0]))
  rollout = Rollout(prompts, zeros.astype(np.int32), lengths, zeros, zeros, np.ones(shape[0], bool))
  arrays = dict(values=padded, old_logprobs=zeros, sampler_logprobs=zeros, behavior_logprobs=zeros)
  (config,) = config_lib.parse(dict(algorithm='vapo', reward='x', rl=dict(length_alpha=alpha))).values()
  config = config_lib.resolve(config, ppo.VAPO.defaults)
  found = ppo.credit(Experience(rollout, rewards, mask, arrays, verdicts=rewards), config)
  close(found.arrays['advantages'][mask > 0], np.concatenate(figures['advantages']))
  close(found.arrays['returns'][mask > 0], np.concatenate(figures['returns']))
  assert found.metrics['gae_lambda/mean'] == pytest.approx(np.mean(figures['lambda']))


@pytest.mark.parametrize('start', [0.0, 0.02])
def test_adaptive_entropy(start):
  found, coef = [], start
  for entropy in derive['ENTROPIES']:
    weight, coef = entropy_control.adaptive_coef(coef, entropy, target=0.2, step=0.005)
    found.append((weight, coef))
  np.testing.assert_allclose(found, DERIVED[f'adaptive_entropy/start{start}'], atol=1e-12)


@pytest.mark.parametrize('every, mix', [(1, 0.6), (2, 0.25), (3, 1)])
def test_moving_reference(every, mix):
  """An optimizer that adds what it is given takes the weights from one of the list to the next."""
  first, *later = np.float32(derive['WEIGHTS'])
  optimizer = moving_reference.following(optax.identity(), every, mix)
  params, found = jnp.asarray(first), []
  state = optimizer.init(params)
  for weights in later:
    updates, state = optimizer.update(weights - params, state, params)
    params = params + updates
    found.append(state.reference)
  close(np.array(found), DERIVED[f'moving_reference/every{every}/mix{mix}'])


@pytest.mark.parametrize('chosen', ['0+1', '1'])
def test_teachers_of_samples(chosen):
  """The sum that stands for one reference: its distance from the student is the advantage, the mean of it the loss."""
  student = np.array([derive['softmax'](x) for x in derive['STUDENT']])
  # Each symbol is a sequence of its own, at two tokens.
  logprobs = [np.log([derive['softmax'](x) for x in of_one]).T for of_one in derive['TEACHERS'][:2]]
  source = {} if '+' in chosen else {'teachers': [int(chosen)]}
  prompts = (Prompt(0, np.zeros(1, np.int32), '', {}, source),)
  zeros = np.zeros(logprobs[0].shape, np.float32)
  rollout = Rollout(prompts, zeros.astype(np.int32), np.full(4, 2), zeros, zeros, np.ones(4, bool))
  options = types.SimpleNamespace(teachers=('x', 'y'), weights=derive['SHARES'][:2])
  gains = teachers.combine(logprobs, rollout, types.SimpleNamespace(distill=options)).T - np.log(student)
  figures = DERIVED[f'teachers_of_samples/{chosen}']
  close(gains, [of_symbols for of_symbols, _ in figures])
  close(-(student * gains).sum(axis=1), [loss for _, loss in figures])


@pytest.mark.parametrize('form', ['T1.5', 'top2'])
@pytest.mark.parametrize('beta', [0.0, 0.3, 1.0])
def test_teachers_of_tokens(beta, form):
  logits = jnp.array(derive['STUDENT'])
  lacking = [[[-jnp.inf if x is None else x for x in row] for row in of_one] for of_one in derive['TEACHERS']]
  of_teachers = [jnp.array(x) for x in lacking]
  temperature = 1.5 if form == 'T1.5' else 1.0
  options = types.SimpleNamespace(
    teachers=('x', 'y', 'z'), weights=derive['SHARES'], beta=beta, temperature=temperature
  )
  if form == 'T1.5':
    ours = distill.from_logits(options)(logits, of_teachers, {})
  else:
    arrays = {}
    for i, x in enumerate(of_teachers):
      logprobs, ids = jax.lax.top_k(jax.nn.log_softmax(x), 2)
      arrays |= {f'teacher_{i}_ids': ids, f'teacher_{i}_logprobs': logprobs}
      arrays[f'teacher_{i}_vocab_size'] = jnp.full(ids.shape[:-1], logits.shape[-1])
    ours = distill.from_cache(options)(logits, (), arrays)
  close(ours, DERIVED[f'teachers_of_tokens/beta{beta}/{form}'])


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
