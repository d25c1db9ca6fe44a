"""Tests of completions of the data in groups of samples (LUFFY): their gradient, records and metrics.

Legend: N sequences, G samples per prompt.
"""

import itertools
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
from jaxpost.programs import train as programs
from jaxpost.rl import batching
from jaxpost.rollout import rollout_codec
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Experience, Prompt, Rollout, RowShape


@pytest.mark.parametrize('loss', ['clip', 'gspo', 'dppo_tv'])
def test_gradient_is_the_sum_of_sample_and_expert_parts(loss):
  """A pair has a sample, with grad E[R], and the expert, with (R* - E[R]) grad f of each of its tokens."""
  answers, values, expert_index = exact.completions(2), exact.rewards_of(2, False), 6
  logp = np.asarray(exact.logprobs(exact.params('policy'), 2))
  probabilities = np.exp(logp.sum(axis=1, dtype=np.float64))
  pairs = np.array(list(itertools.product(range(len(answers)), [expert_index]))).reshape(-1)
  is_expert = np.arange(len(pairs)) % 2 == 1
  rollout = Rollout(
    prompts=tuple(Prompt(i, exact.PROMPT, '', {}) for i in range(len(answers))),
    completions=answers[pairs],
    lengths=np.full(len(pairs), 2),
    logprobs=logp[pairs] * ~is_expert[:, None],
    behavior_logprobs=logp[pairs] * ~is_expert[:, None],
    finished=np.ones(len(pairs), bool),
    demonstration=is_expert,
  )
  scores = dict(sampler_logprobs=logp[pairs], old_logprobs=logp[pairs])  # as `Controller.make_experience` gives them
  mask = np.ones((len(pairs), 2), np.float32)
  experience = Experience(rollout, values[pairs], mask, scores, verdicts=values[pairs])
  config = exact.config_of(
    'grpo', dict(advantage='leave_one_out', expert=True, expert_gamma=0.3, loss=loss, aggregate='token')
  )
  grpo.rl_fields.check(config)
  credit = grpo.credit(experience, config)
  weights = batching.token_weights(credit.mask, 'token', 2) * np.repeat(probabilities * len(probabilities), 2)[:, None]
  rows = math.ceil(len(pairs) / 16)
  batch = batching.to_batch(rollout, range(len(pairs)), weights.astype(np.float32), credit.arrays, RowShape(rows, 48))
  loss_fn = programs.make_loss(exact.model(), grpo.objective(config), tiny.one_device(), tiny.EXACT)
  split = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
  actual = jax.jit(lambda p, b: programs.accumulate(loss_fn, p, b)[1])(exact.params('policy'), split)

  def shaped_expert(w):
    p = jnp.exp(exact.logprobs(w, 2)[expert_index])
    return (p / (p + 0.3)).sum()

  gain = values[expert_index] - (probabilities * values).sum()
  # The loss is a mean over the four tokens of a pair. `exact` is a mean over the two of a completion.
  exact.close(actual, (-1 / 2, exact.exact('reward')), (-gain / 4, jax.grad(shaped_expert)(exact.params('policy'))))


def correct(completions, answer, **columns):
  """Returns 1 for completions that end with the answer, which samples of a random model never do."""
  del columns
  texts = [c if isinstance(c, str) else c[-1]['content'] for c in completions]
  return [float(text.strip().endswith(str(a))) for text, a in zip(texts, answer)]


def config_of(folder, **over):
  base = dict(
    data=dict(path='generated:arithmetic:max=99,ops=+,size=12,correct=1'),
    rl=dict(expert=True),
    rollout=dict(group_size=4),
  )
  return tiny.grpo_config(folder, reward=correct, **tiny.merged(base, over))


@pytest.fixture(scope='module')
def item(nano):
  _, stream = jaxpost.policy_and_stream(config_of(nano))
  try:
    yield next(stream)
  finally:
    stream.close()


def test_each_group_ends_with_the_answer_of_the_data(item):
  experience, rollout = item.experience, item.experience.rollout
  assert rollout.demonstration.reshape(-1, 4).tolist() == [[False] * 3 + [True]] * len(rollout.prompts)
  assert (experience.rewards[rollout.demonstration] == 1).all() and rollout.finished[rollout.demonstration].all()
  assert not rollout.logprobs[rollout.demonstration].any()
  np.testing.assert_array_equal(
    experience.arrays['sampler_logprobs'][rollout.demonstration],
    experience.arrays['old_logprobs'][rollout.demonstration],
  )
  trained = experience.mask > 0
  np.testing.assert_array_equal(item.credit.arrays['demonstration'], trained & rollout.demonstration[:, None])
  assert (item.credit.arrays['advantages'][rollout.demonstration][:, 0] > 0).all()
  assert [row.get('demonstration', False) for row in item.samples()] == rollout.demonstration.tolist()
  decoded = rollout_codec.from_text(rollout_codec.to_text(rollout))
  np.testing.assert_array_equal(decoded.demonstration, rollout.demonstration)
  old_record = rollout_codec.encode({}, dict(expert=rollout.demonstration))  # the name of the array in older files
  assert [*rollout_codec.decode(old_record)[1]] == ['demonstration']


def test_metrics_are_of_the_samples_without_the_expert(item):
  info, experience = item.info, item.experience
  is_sample = ~experience.rollout.demonstration
  assert info['expert/reward'] == 1
  assert info['reward'] == info['rewards/correct/mean'] == experience.rewards[is_sample].mean() < 1
  assert info['completions/mean_length'] == pytest.approx(experience.rollout.lengths[is_sample].mean())
  assert info['pass_rate/none'] == 1
  assert info['masked_samples'] == 0


def test_metrics_of_a_source_are_of_its_samples_without_the_expert(nano):
  _, stream = jaxpost.policy_and_stream(config_of(nano, rl=dict(sources=('sums',))))
  try:
    info = next(stream).info
  finally:
    stream.close()
  assert info['sources/sums/reward'] == info['reward'] == 0 < info['expert/reward']
  for name in ('mean_length', 'clipped_ratio'):
    assert info[f'sources/sums/{name}'] == pytest.approx(info[f'completions/{name}'])
  assert info['sources/sums/frac_reward_zero_std'] == 1


@pytest.mark.long
def test_run_trains_on_the_expert_where_all_samples_are_wrong(nano, tmp_path):
  """The run has staleness, dynamic sampling and minibatches. The first step is on-policy, and resuming is bitwise."""
  over = dict(
    rl=dict(minibatches=2, dynamic_sampling=2), rollout=dict(staleness=1), train=dict(steps=2), optim=dict(lr=1e-3)
  )
  jaxpost.run(config_of(nano, **over), tmp_path / 'run')
  rows = tiny.rows(tmp_path / 'run')
  assert [row['expert/reward'] for row in rows] == [1, 1]
  assert [row['skipped_updates'] for row in rows] == [0, 0] and all(row['grad_norm'] > 0 for row in rows)
  streams = [jaxpost.policy_and_stream(config_of(nano, **over))[1] for _ in range(2)]
  try:
    next(streams[0])
    streams[1].restore(json.loads(json.dumps(streams[0].state())))
    expected, resumed = (next(stream) for stream in streams)
    for name, x in expected.credit.arrays.items():
      np.testing.assert_array_equal(x, resumed.credit.arrays[name], err_msg=name)
  finally:
    for stream in streams:
      stream.close()


@pytest.mark.parametrize(
  'over',
  [
    dict(rl=dict(kl_coef=0.1)),
    dict(environment='x'),
    dict(algorithm='ppo'),
    dict(algorithm='rft'),
    dict(algorithm='online_dpo'),
    dict(train_on_rollouts='run'),
    dict(algorithm='reinforce_pp', rl=dict(kl_coef=0.0), rollout=dict(group_size=1)),
  ],
)
def test_expert_is_refused_with_incompatible_options(over):
  over = tiny.merged(dict(algorithm='grpo', reward='x', rl=dict(expert=True)), over)
  method = algorithms.load_algorithm(over['algorithm'])
  with pytest.raises(InputError, match='rl.expert'):
    method.check(config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults))


def test_rows_without_a_completion_are_refused(nano, tmp_path):
  (tmp_path / 'rows.jsonl').write_text(json.dumps(dict(prompt='1+1=', answer='2')) + '\n')
  with pytest.raises(InputError, match='completion'):
    over = dict(data=dict(path=str(tmp_path / 'rows.jsonl')), rollout=dict(max_prompt_length=64))
    jaxpost.policy_and_stream(config_of(nano, **over))


def test_chat_that_ends_with_a_user_turn_is_refused(nano, tmp_path):
  chat = [dict(role='user', content='a'), dict(role='assistant', content='b'), dict(role='user', content='c')]
  for row, message in (
    (dict(messages=chat, answer='b'), 'ends with a turn of the user, so it has no answer'),
    (dict(prompt=chat[:1], messages=chat, answer='b'), 'ends with a turn of the user'),
    (dict(prompt='a', messages='b', answer='b'), 'is a str, must be a list of messages'),
  ):
    (tmp_path / 'rows.jsonl').write_text(json.dumps(row) + '\n')
    over = dict(data=dict(path=str(tmp_path / 'rows.jsonl')), rollout=dict(max_prompt_length=64))
    with pytest.raises(InputError, match=f'rows.jsonl:1: messages: {message}'):
      jaxpost.policy_and_stream(config_of(nano, **over))
