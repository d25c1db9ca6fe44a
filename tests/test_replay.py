"""Right samples of the policy that are used again: the gradient, the record, the metrics, the checkpoint.

Legend: N sequences, G samples a prompt.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_exact_gradients as exact
import tiny

import jaxpost
from jaxpost.algorithms import grpo
from jaxpost.errors import InputError
from jaxpost.losses import importance
from jaxpost.monitor import metrics
from jaxpost.programs import train as programs
from jaxpost.rl import batching
from jaxpost.rollout import rollout_codec
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Experience, Prompt, Rollout


@pytest.mark.parametrize(
  'rl',
  [
    dict(old_policy='sampler', clip_low=0.99, clip_high=99.0),
    dict(importance=('sequence_truncated',), importance_cap=1e6),
  ],
  ids=['sampler', 'weights'],
)
def test_the_gradient_is_that_of_both_parts(rl):
  """One sample y is drawn, and y* is an older policy's: grad E[A(y)], and A* pi(y*) / mu(y*) grad log pi(y*)."""
  answers, values, star = exact.completions(1), np.array([0.0, 0, 1, 0]), 2
  policy, older = (np.asarray(exact.logprobs(exact.params(kind), 1)) for kind in ('policy', 'sampler'))
  wrong = np.flatnonzero(values == 0)  # groups with a right sample get no other
  chance = np.exp(policy[wrong, 0].astype(np.float64))
  index = np.stack([wrong, np.full(len(wrong), star)], axis=1).reshape(-1)
  replayed = np.arange(len(index)) % 2 == 1
  sampler = np.where(replayed[:, None], older[index], policy[index])
  rollout = Rollout(
    prompts=tuple(Prompt(i, exact.PROMPT, '', {}) for i in range(len(wrong))),
    completions=answers[index],
    lengths=np.ones(len(index), int),
    logprobs=sampler,
    behavior_logprobs=sampler,
    finished=np.ones(len(index), bool),
    replayed=replayed,
  )
  scores = dict(sampler_logprobs=sampler, old_logprobs=policy[index])
  experience = Experience(rollout, values[index], np.ones((len(index), 1), np.float32), scores, verdicts=values[index])
  config = exact.config_of('grpo', dict(advantage='leave_one_out', replay=9, **rl))
  grpo.rl_fields.check(config)
  credit = grpo.credit(experience, config)
  weights = batching.token_weights(credit.mask, 'token', 1) * np.repeat(chance * len(chance), 2)[:, None]
  batch = batching.to_batch(rollout, range(len(index)), weights.astype(np.float32), credit.arrays, 1, row_length=16)
  made = programs.make_loss(exact.model(), grpo.objective(config), tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
  found = jax.jit(lambda p, b: programs.accumulate(made, p, b)[1])(exact.params('policy'), split)

  def expected(w):
    probability = jnp.exp(exact.logprobs(w, 1)[:, 0])
    # The drawn sample is worse by 1, the other better by 1; the mean is over both.
    return (-probability[wrong].sum() + chance.sum() * probability[star] / math.exp(older[star, 0])) / 2

  exact.close(found, (-1, jax.grad(expected)(exact.params('policy'))))


def seldom(completion_ids, **columns):
  """1 for one in five completions."""
  del columns
  return [float(sum(ids) % 5 == 0) for ids in completion_ids]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


def config_of(folder, **over):
  """Each step samples all four rows of the data."""
  base = dict(
    data=dict(path='generated:arithmetic:max=99,ops=+,size=4'), rl=dict(replay=2), rollout=dict(prompts=4, group_size=2)
  )
  return tiny.grpo_config(folder, reward=seldom, **tiny.merged(base, over))


def played(folder, steps=6, state=None, **over):
  """Items of a stream whose policy stays as it is, and the state before each."""
  stream = jaxpost.policy_and_stream(config_of(folder, **over))[1]
  try:
    if state:
      stream.restore(json.loads(json.dumps(state)))
    found = []
    for _ in range(steps):
      before = stream.state()
      found.append((before, next(stream)))
    return found
  finally:
    stream.close()


@pytest.fixture(scope='module')
def steps(folder):
  return played(folder)


def test_wrong_groups_get_the_last_right_sample_to_their_prompt(steps):
  """Token by token and log-prob by log-prob, at most two steps old; groups that have a right one stay as they are."""
  stored, used = {}, 0
  for step, (_, item) in enumerate(steps):
    experience, rollout = item.experience, item.experience.rollout
    replayed = np.zeros(8, bool) if rollout.replayed is None else rollout.replayed
    stored = {key: x for key, x in stored.items() if step - x[0] <= 2}
    for g, prompt in enumerate(rollout.prompts):
      pair, key = [2 * g, 2 * g + 1], prompt.tokens.tobytes()
      own = [n for n in pair if not replayed[n]]
      right = [n for n in own if experience.rewards[n] == 1]
      assert replayed[pair[1]] == (not right and key in stored) and not replayed[pair[0]]
      if right:
        best = max(right, key=lambda n: rollout.logprobs[n].sum() / rollout.lengths[n])
        stored[key] = step, rollout.completions[best], rollout.logprobs[best]
      elif key in stored:
        sampled_in, tokens, logprobs = stored[key]
        np.testing.assert_array_equal(rollout.completions[pair[1]], tokens)
        np.testing.assert_array_equal(experience.arrays['sampler_logprobs'][pair[1]], logprobs)
        assert (
          experience.rewards[pair[1]] == 1
          and (rollout.versions[pair[1]] == sampled_in)[: rollout.lengths[pair[1]]].all()
        )
        assert (item.credit.arrays['advantages'][pair[1]][: rollout.lengths[pair[1]]] > 0).all()
        used += 1
    assert item.info['replay/used'] == replayed.sum() and item.info['replay/stored'] == len(stored)
    assert item.info.get('replay/wrong', 0) == 0 and 0 <= item.info.get('replay/age', 1) <= 2
    assert [row.get('replayed', False) for row in item.samples()] == replayed.tolist()
  assert used > 3


def test_metrics_are_those_of_what_was_drawn(steps):
  for _, item in steps:
    experience, rollout = item.experience, item.experience.rollout
    own = np.ones(8, bool) if rollout.replayed is None else ~rollout.replayed
    # A replayed sample takes the place of a wrong one, so it counts 0.
    assert item.info['reward'] == pytest.approx(experience.rewards[own].sum() / 8)
    assert item.info['rewards/seldom/mean'] == item.info['reward'] and item.info['masked_samples'] == 0
    rate = np.where(own, experience.rewards, 0).reshape(4, 2).max(axis=1)
    assert item.info['pass_rate/none'] == (rate == 0).mean()


@pytest.mark.parametrize('staleness', [0, pytest.param(1, marks=pytest.mark.long)])
def test_it_resumes_to_the_bit(folder, steps, staleness):
  found = played(folder, rollout=dict(staleness=1)) if staleness else steps
  at = next(n for n, (state, _) in enumerate(found) if len(state['replay']) > 1)
  again = played(folder, steps=6 - at, state=found[at][0], rollout=dict(staleness=staleness))
  assert any(item.info['replay/used'] for _, item in again)
  for (_, one), (_, two) in zip(found[at:], again):
    for name, x in one.credit.arrays.items():
      np.testing.assert_array_equal(x, two.credit.arrays[name], err_msg=name)
    kept = [{k: v for k, v in item.info.items() if not k.startswith('time/')} for item in (one, two)]
    np.testing.assert_equal(kept[0], kept[1])
  rollout = found[-1][1].experience.rollout
  np.testing.assert_array_equal(rollout_codec.from_text(rollout_codec.to_text(rollout)).replayed, rollout.replayed)


@pytest.mark.long
@pytest.mark.parametrize(
  'over',
  [dict(), dict(rl=dict(old_policy='sampler')), dict(rl=dict(sampling_mask=True), rollout=dict(top_k=8))],
  ids=['weights', 'sampler', 'sampling_mask'],
)
def test_old_samples_are_corrected_for(folder, tmp_path, over):
  """A policy that learns: the ratio to the stored log-probs counts."""
  over = tiny.merged(dict(train=dict(steps=4), optim=dict(lr=1e-2), log=dict(rollouts_every=1)), over)
  jaxpost.run(config_of(folder, **over), tmp_path / 'run')
  rows = [row for row in metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl') if row['split'] == 'train']
  assert rows[0]['sampler_mismatch'] == pytest.approx(1, abs=1e-4)
  later = [row for row in rows if row['replay/used']]
  assert later and all(row['sampler_mismatch'] > 1.001 and row['grad_norm'] > 0 for row in later)
  assert [row['skipped_updates'] for row in rows] == [0] * 4
  name = 'ratio' if over.get('rl', {}).get('old_policy') else 'importance_weight'
  assert all(abs(row[name] - 1) > 1e-4 for row in later)
  assert all(row['staleness/max'] == row['replay/age'] or row['replay/used'] > 1 for row in later)


@pytest.mark.parametrize(
  'over, words',
  [
    (dict(rl=dict(dynamic_sampling=2)), 'replay: needs a reward function'),
    (dict(algorithm='dapo'), 'replay: needs a reward function'),
    (dict(rl=dict(expert=True)), 'replay: needs a reward function'),
    (dict(environment='x'), 'replay: needs a reward function'),
    (dict(train_on_rollouts='run'), 'replay: needs a reward function'),
    (dict(algorithm='opd', reward='', rl=dict(reference='x')), 'replay: opd without a reward'),
    (dict(rl=dict(importance=())), 'replay: its samples are those of an older policy'),
    (dict(rl=dict(importance=('token_mask',))), 'replay: its samples are those of an older policy'),
    (dict(rl=dict(importance=('opsm',))), 'replay: its samples are those of an older policy'),
    (dict(algorithm='remax'), 'replay: '),
    (dict(algorithm='ppo'), 'replay: '),
    (dict(algorithm='rft'), 'replay: '),
    (dict(algorithm='online_dpo'), 'replay: '),
  ],
)
def test_where_it_does_not_hold_it_is_refused(over, words):
  over = tiny.merged(dict(algorithm='grpo', reward='x', rl=dict(replay=5)), over)
  method = algorithms.load_algorithm(over['algorithm'])
  with pytest.raises(InputError, match=words):
    method.check(config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults))


def test_a_reward_model_grades_too_late(folder):
  from jaxpost.stage import reward_models

  config = config_lib.resolve(
    next(iter(config_lib.parse(dict(algorithm='grpo', reward=('reward_model',), rl=dict(replay=5))).values())),
    algorithms.load_algorithm('grpo').defaults,
  )
  with pytest.raises(InputError, match='config.rl.replay: groups are chosen before'):
    reward_models.check_uses(config, algorithms.load_algorithm('grpo'))


def test_the_weights_come_with_it():
  method = algorithms.load_algorithm('gspo')
  config = config_lib.resolve(
    next(iter(config_lib.parse(dict(algorithm='gspo', reward='x', rl=dict(replay=5))).values())), method.defaults
  )
  method.check(config)
  assert config.rl.importance == ('token_truncated',) and importance.METHODS['token_truncated'].weighs
