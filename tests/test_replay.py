"""config.rl.replay: groups without a right sample get an earlier right one; its gradient, metrics, and resuming."""

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
from jaxpost.programs import train as programs
from jaxpost.rl import batching
from jaxpost.rollout import rollout_codec
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Experience, Prompt, Rollout, RowShape


@pytest.mark.parametrize(
  'rl',
  [
    dict(old_policy='sampler', clip_low=0.99, clip_high=99.0),
    dict(importance=('sequence_truncated',), importance_cap=1e6),
  ],
  ids=['sampler', 'weights'],
)
def test_gradient_of_a_replayed_group_is_the_exact_one(rl):
  """A group has a sample y of the policy pi, and a replayed sample y* of an older policy mu.

  The gradient is that of E[A(y)], plus A* pi(y*) / mu(y*) grad log pi(y*).
  """
  answers, values, star = exact.completions(1), np.array([0.0, 0, 1, 0]), 2
  policy, older = (np.asarray(exact.logprobs(exact.params(kind), 1)) for kind in ('policy', 'sampler'))
  wrong = np.flatnonzero(values == 0)  # only wrong answers y, as groups with a right sample replay none
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
  batch = batching.to_batch(rollout, range(len(index)), weights.astype(np.float32), credit.arrays, RowShape(1, 16))
  loss = programs.make_loss(exact.model(), grpo.objective(config), tiny.one_device(), tiny.EXACT)
  micro_batches = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
  actual = jax.jit(lambda p, b: programs.accumulate(loss, p, b)[1])(exact.params('policy'), micro_batches)

  def expected(w):
    probability = jnp.exp(exact.logprobs(w, 1)[:, 0])
    # The advantages are -1 for y and 1 for y*; the loss is the mean over both.
    return (-probability[wrong].sum() + chance.sum() * probability[star] / math.exp(older[star, 0])) / 2

  exact.close(actual, (-1, jax.grad(expected)(exact.params('policy'))))


def seldom(completion_ids, **columns):
  """Rewards one in five completions with 1."""
  del columns
  return [float(sum(ids) % 5 == 0) for ids in completion_ids]


def config_of(folder, **fields):
  """Returns a config whose every step samples all four rows of the data."""
  base = dict(
    data=dict(path='generated:arithmetic:max=99,ops=+,size=4'), rl=dict(replay=2), rollout=dict(prompts=4, group_size=2)
  )
  return tiny.grpo_config(folder, reward=seldom, **tiny.merged(base, fields))


def items_of_stream(folder, steps=6, state=None, **fields):
  """Returns [(state before the item, item)] of a stream whose policy is never updated."""
  stream = jaxpost.policy_and_stream(config_of(folder, **fields))[1]
  try:
    if state:
      stream.restore(json.loads(json.dumps(state)))
    items = []
    for _ in range(steps):
      before = stream.state()
      items.append((before, next(stream)))
    return items
  finally:
    stream.close()


@pytest.fixture(scope='module')
def steps(nano):
  return items_of_stream(nano)


def test_wrong_groups_replay_the_last_right_sample_of_their_prompt(steps):
  """The sample keeps its tokens and log-probs, and is at most two steps old. Groups with a right sample replay none."""
  stored, used = {}, 0
  for step, (_, item) in enumerate(steps):
    experience, rollout = item.experience, item.experience.rollout
    replayed = np.zeros(8, bool) if rollout.replayed is None else rollout.replayed
    stored = {key: entry for key, entry in stored.items() if step - entry[0] <= 2}
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
        length = rollout.lengths[pair[1]]
        assert experience.rewards[pair[1]] == 1 and (rollout.versions[pair[1]] == sampled_in)[:length].all()
        assert (item.credit.arrays['advantages'][pair[1]][:length] > 0).all()
        used += 1
    assert item.info['replay/used'] == replayed.sum() and item.info['replay/stored'] == len(stored)
    assert item.info.get('replay/wrong', 0) == 0 and 0 <= item.info.get('replay/age', 1) <= 2
    assert [row.get('replayed', False) for row in item.samples()] == replayed.tolist()
  assert used > 3


def test_metrics_are_of_the_drawn_samples_only(steps):
  for _, item in steps:
    experience, rollout = item.experience, item.experience.rollout
    own = np.ones(8, bool) if rollout.replayed is None else ~rollout.replayed
    # A replayed sample counts 0, since it takes the place of a wrong one.
    assert item.info['reward'] == pytest.approx(experience.rewards[own].sum() / 8)
    assert item.info['rewards/seldom/mean'] == item.info['reward'] and item.info['masked_samples'] == 0
    rate = np.where(own, experience.rewards, 0).reshape(4, 2).max(axis=1)
    assert item.info['pass_rate/none'] == (rate == 0).mean()


@pytest.mark.parametrize('staleness', [0, pytest.param(1, marks=pytest.mark.long)])
def test_stream_with_replay_resumes_bit_for_bit(nano, steps, staleness):
  items = items_of_stream(nano, rollout=dict(staleness=1)) if staleness else steps
  start = next(n for n, (state, _) in enumerate(items) if len(state['replay']) > 1)
  resumed = items_of_stream(nano, steps=6 - start, state=items[start][0], rollout=dict(staleness=staleness))
  assert any(item.info['replay/used'] for _, item in resumed)
  for (_, before), (_, after) in zip(items[start:], resumed):
    for name, x in before.credit.arrays.items():
      np.testing.assert_array_equal(x, after.credit.arrays[name], err_msg=name)
    infos = [{k: v for k, v in item.info.items() if not k.startswith('time/')} for item in (before, after)]
    np.testing.assert_equal(infos[0], infos[1])
  rollout = items[-1][1].experience.rollout
  np.testing.assert_array_equal(rollout_codec.from_text(rollout_codec.to_text(rollout)).replayed, rollout.replayed)


@pytest.mark.long
@pytest.mark.parametrize(
  'over',
  [dict(), dict(rl=dict(old_policy='sampler')), dict(rl=dict(sampling_mask=True), rollout=dict(top_k=8))],
  ids=['weights', 'sampler', 'sampling_mask'],
)
def test_replayed_samples_are_corrected_for_the_older_policy(nano, tmp_path, over):
  """As the policy learns, its ratio to the stored log-probs differs from 1."""
  over = tiny.merged(dict(train=dict(steps=4), optim=dict(lr=1e-2), log=dict(rollouts_every=1)), over)
  jaxpost.run(config_of(nano, **over), tmp_path / 'run')
  rows = tiny.rows(tmp_path / 'run')
  assert rows[0]['sampler_mismatch'] == pytest.approx(1, abs=1e-4)
  later = [row for row in rows if row['replay/used']]
  assert later and all(row['sampler_mismatch'] > 1.001 and row['grad_norm'] > 0 for row in later)
  assert [row['skipped_updates'] for row in rows] == [0] * 4
  name = 'ratio' if over.get('rl', {}).get('old_policy') else 'importance_weight'
  assert all(abs(row[name] - 1) > 1e-4 for row in later)
  assert all(row['staleness/max'] == row['replay/age'] or row['replay/used'] > 1 for row in later)


@pytest.mark.parametrize(
  'over, message',
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
def test_replay_is_refused_where_it_does_not_apply(over, message):
  over = tiny.merged(dict(algorithm='grpo', reward='x', rl=dict(replay=5)), over)
  method = algorithms.load_algorithm(over['algorithm'])
  with pytest.raises(InputError, match=message):
    method.check(config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults))


def test_replay_with_a_reward_model_alone_is_refused(nano):
  from jaxpost.stage import reward_models

  config = config_lib.resolve(
    next(iter(config_lib.parse(dict(algorithm='grpo', reward=('reward_model',), rl=dict(replay=5))).values())),
    algorithms.load_algorithm('grpo').defaults,
  )
  with pytest.raises(InputError, match='config.rl.replay: groups are chosen before'):
    reward_models.check_uses(config, algorithms.load_algorithm('grpo'))


def test_replay_brings_token_truncated_weights_by_default():
  method = algorithms.load_algorithm('gspo')
  config = config_lib.resolve(
    next(iter(config_lib.parse(dict(algorithm='gspo', reward='x', rl=dict(replay=5))).values())), method.defaults
  )
  method.check(config)
  assert config.rl.importance == ('token_truncated',) and importance.METHODS['token_truncated'].weighs
