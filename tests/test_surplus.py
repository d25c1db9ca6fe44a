"""Groups that dynamic sampling drew beyond what a step takes: kept, aged, counted and resumed."""

import json

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.errors import InputError
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib


def some(completion_ids, **columns):
  """A function of the tokens that differs in many groups."""
  del columns
  return [float(sum(ids) % 2) for ids in completion_ids]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


def stream_of(folder, **over):
  base = dict(rl=dict(dynamic_sampling=4, keep_surplus=2), rollout=dict(prompts=3, group_size=2))
  return jaxpost.policy_and_stream(tiny.grpo_config(folder, reward=some, **tiny.merged(base, over)))[1]


def played(stream, steps):
  """[(prompts, step of each group's weights or -1, metrics)] of each step."""
  out = []
  for _ in range(steps):
    item = next(stream)
    rollout = item.experience.rollout
    out.append(([p.index for p in rollout.prompts], item.credit.arrays['advantages'].tolist(), item.info))
  return out


@pytest.fixture(scope='module')
def steps(folder):
  stream = stream_of(folder)
  try:
    yield played(stream, 8)
  finally:
    stream.close()


def test_each_group_is_trained_once_and_in_time(steps):
  """Waiting groups are trained or counted as expired; prompts of older rounds come back, none twice."""
  trained = [i for prompts, _, _ in steps for i in prompts]
  assert len(set(trained)) == len(trained)
  drawn_by = np.cumsum([3 * info['dynamic_sampling/rounds'] for _, _, info in steps])
  ages = [
    step - np.searchsorted(drawn_by, i, side='right') for step, (prompts, _, _) in enumerate(steps) for i in prompts
  ]
  assert min(ages) == 0 and 0 < max(ages) <= 2
  waiting = 0
  for _, _, info in steps:
    assert info['dynamic_sampling/waiting'] + info['dynamic_sampling/expired'] == waiting
    waiting = info['dynamic_sampling/surplus']
    assert waiting < 3 or info['dynamic_sampling/rounds'] == 1
  assert any(info['dynamic_sampling/surplus'] for _, _, info in steps)


def test_without_it_they_are_dropped(folder, steps):
  """The same groups are found first; later steps have others."""
  stream = stream_of(folder, rl=dict(keep_surplus=0))
  try:
    dropped = played(stream, 8)
  finally:
    stream.close()
  assert dropped[0][0] == steps[0][0] and 'dynamic_sampling/surplus' not in dropped[0][2]
  assert [prompts for prompts, _, _ in dropped] != [prompts for prompts, _, _ in steps]
  assert sum(info['dynamic_sampling/rounds'] for *_, info in dropped) >= sum(
    info['dynamic_sampling/rounds'] for *_, info in steps
  )


@pytest.mark.long
@pytest.mark.parametrize('staleness', [0, 1])
def test_it_resumes_to_the_bit(folder, staleness):
  """At every step, also where groups wait; metrics included."""
  first, again = (stream_of(folder, rollout=dict(staleness=staleness)) for _ in range(2))

  def comparable(found):
    return [
      (p, a, {k: v for k, v in i.items() if not k.startswith('time/') and '_per_s' not in k}) for p, a, i in found
    ]

  try:
    states, found = [], []
    for _ in range(6):
      states.append(json.loads(json.dumps(first.state())))
      found += played(first, 1)
    with_surplus = next(n for n, state in enumerate(states) if state.get('surplus'))
    again.restore(states[with_surplus])
    resumed = played(again, 6 - with_surplus)
    np.testing.assert_equal(comparable(resumed), comparable(found[with_surplus:]))
  finally:
    first.close()
    again.close()


@pytest.mark.parametrize(
  'over', [dict(rl=dict(keep_surplus=2)), dict(algorithm='dapo', rl=dict(keep_surplus=2, advantage='remax'))]
)
def test_where_there_is_no_surplus_it_is_refused(over):
  over = tiny.merged(dict(algorithm='grpo', reward='x'), over)
  method = algorithms.load_algorithm(over['algorithm'])
  with pytest.raises(InputError, match='rl.keep_surplus'):
    method.check(config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults))


def test_what_waited_is_corrected_for():
  over = dict(algorithm='dapo', reward='x', rl=dict(keep_surplus=1))
  method = algorithms.load_algorithm('dapo')
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults)
  method.check(config)
  assert config.rl.importance == ('token_truncated',)
