"""`rl.keep_surplus`: groups that dynamic sampling drew beyond the need of a step are kept, aged, counted, resumed."""

import json

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.errors import InputError
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib


def parity(completion_ids, **columns):
  """A reward that differs within many groups: whether the sum of the tokens is odd."""
  del columns
  return [float(sum(ids) % 2) for ids in completion_ids]


def stream_of(folder, **over):
  base = dict(rl=dict(dynamic_sampling=4, keep_surplus=2), rollout=dict(prompts=3, group_size=2))
  return jaxpost.policy_and_stream(tiny.grpo_config(folder, reward=parity, **tiny.merged(base, over)))[1]


def take_steps(stream, steps):
  """Returns [(indices of prompts, advantages, metrics)] of the next steps of a stream."""
  taken = []
  for _ in range(steps):
    item = next(stream)
    rollout = item.experience.rollout
    taken.append(([p.index for p in rollout.prompts], item.credit.arrays['advantages'].tolist(), item.info))
  return taken


@pytest.fixture(scope='module')
def steps(nano):
  stream = stream_of(nano)
  try:
    yield take_steps(stream, 8)
  finally:
    stream.close()


def test_each_group_is_trained_at_most_once_and_before_it_expires(steps):
  """A waiting group is trained in a later step or counted as expired; no prompt is trained twice."""
  trained = [i for prompts, _, _ in steps for i in prompts]
  assert len(set(trained)) == len(trained)
  prompts_drawn = np.cumsum([3 * info['dynamic_sampling/rounds'] for _, _, info in steps])
  ages = [
    step - np.searchsorted(prompts_drawn, i, side='right')
    for step, (prompts, _, _) in enumerate(steps)
    for i in prompts
  ]
  assert min(ages) == 0 and 0 < max(ages) <= 2
  waiting = 0
  for _, _, info in steps:
    assert info['dynamic_sampling/waiting'] + info['dynamic_sampling/expired'] == waiting
    waiting = info['dynamic_sampling/surplus']
    assert waiting < 3 or info['dynamic_sampling/rounds'] == 1
  assert any(info['dynamic_sampling/surplus'] for _, _, info in steps)


def test_surplus_groups_are_dropped_without_keep_surplus(nano, steps):
  """The first step is the same; later steps train other prompts and need at least as many rounds."""
  stream = stream_of(nano, rl=dict(keep_surplus=0))
  try:
    dropped = take_steps(stream, 8)
  finally:
    stream.close()
  assert dropped[0][0] == steps[0][0] and 'dynamic_sampling/surplus' not in dropped[0][2]
  assert [prompts for prompts, _, _ in dropped] != [prompts for prompts, _, _ in steps]
  assert sum(info['dynamic_sampling/rounds'] for *_, info in dropped) >= sum(
    info['dynamic_sampling/rounds'] for *_, info in steps
  )


@pytest.mark.long
@pytest.mark.parametrize('staleness', [0, 1])
def test_resume_with_waiting_groups_is_bitwise(nano, staleness):
  """A stream restored while groups wait yields the same prompts, advantages and metrics."""
  uninterrupted, restored = (stream_of(nano, rollout=dict(staleness=staleness)) for _ in range(2))

  def without_times(steps):
    return [
      (prompts, advantages, {k: v for k, v in info.items() if not k.startswith('time/') and '_per_s' not in k})
      for prompts, advantages, info in steps
    ]

  try:
    states, expected = [], []
    for _ in range(6):
      states.append(json.loads(json.dumps(uninterrupted.state())))
      expected += take_steps(uninterrupted, 1)
    with_surplus = next(n for n, state in enumerate(states) if state.get('surplus'))
    restored.restore(states[with_surplus])
    resumed = take_steps(restored, 6 - with_surplus)
    np.testing.assert_equal(without_times(resumed), without_times(expected[with_surplus:]))
  finally:
    uninterrupted.close()
    restored.close()


@pytest.mark.parametrize(
  'over', [dict(rl=dict(keep_surplus=2)), dict(algorithm='dapo', rl=dict(keep_surplus=2, advantage='remax'))]
)
def test_keep_surplus_is_refused_for_methods_without_surplus(over):
  over = tiny.merged(dict(algorithm='grpo', reward='x'), over)
  method = algorithms.load_algorithm(over['algorithm'])
  with pytest.raises(InputError, match='rl.keep_surplus'):
    method.check(config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults))


def test_keep_surplus_turns_on_importance_correction():
  over = dict(algorithm='dapo', reward='x', rl=dict(keep_surplus=1))
  method = algorithms.load_algorithm('dapo')
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults)
  method.check(config)
  assert config.rl.importance == ('token_truncated',)
