"""`rl.curriculum`: solved prompts are retired, or drawn less the more they are solved; rates are in the checkpoint."""

import collections
import json
import types

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.errors import InputError
from jaxpost.rl import curriculum
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Prompt

ROWS = 6


class Stream:
  """Rows in the order of their numbers."""

  def __len__(self):
    return ROWS

  def row(self, index):
    return index % ROWS


def make(kind, rates, **fields):
  """A curriculum in which row i has the pass rate rates[i]."""
  return curriculum.Curriculum(kind, 0, 1.0, Stream(), dict(enumerate(rates)), **fields)


def drawn(chosen, epochs):
  """The rows that the curriculum draws in so many epochs, in order."""
  rows = []
  for n in range(ROWS * epochs):
    if chosen.draws(n % ROWS, n):
      chosen.drawn += 1
      rows.append(n % ROWS)
  return rows


def test_solved_rows_are_retired():
  chosen = make('retire', [1.0, 0.5, 0.0, 1.0])  # two rows were never sampled
  assert [n for n in range(ROWS) if chosen.draws(n, n)] == [1, 2, 4, 5]
  assert chosen.passed_over == 2


def test_prioritized_rows_are_drawn_with_probability_one_minus_pass_rate():
  rates = [0.0, 0.25, 0.5, 0.75, 1.0, 0.9]
  chosen = make('prioritized', rates)
  epochs = 4000
  counts = collections.Counter(drawn(chosen, epochs))
  for row, rate in enumerate(rates):
    error = np.sqrt(rate * (1 - rate) / epochs)  # standard deviation of the share
    assert abs(counts[row] / epochs - (1 - rate)) <= 4 * error


def test_all_are_drawn_again_when_all_are_solved(caplog):
  chosen = make('retire', [1.0] * ROWS)
  assert not any(chosen.draws(n, n) for n in range(ROWS))
  assert chosen.draws(0, ROWS) and 'drawn again' in caplog.text


@pytest.mark.parametrize('kind', ['retire', 'prioritized'])
def test_step_does_not_repeat_an_unsolved_prompt(kind, caplog):
  """One row of six is not solved, and a step takes three."""
  chosen = make(kind, [1.0, 1.0, 0.0, 1.0, 1.0, 1.0], per_step=3)
  steps = np.array(drawn(chosen, 8)[:12]).reshape(4, 3)
  assert max(np.bincount(step).max() for step in steps) == 1 and '1 of 6 prompts' in caplog.text
  again = make(kind, [], per_step=3)
  again.restore(chosen.state())
  assert again.state() == chosen.state()


def test_groups_dropped_by_dynamic_sampling_update_pass_rates():
  """Samples without a verdict do not count, and a group without any verdict changes no rate."""
  from jaxpost.rewards.groups import Graded

  def prompts(*indices):
    rollout = types.SimpleNamespace(prompts=[Prompt(i, None, '', {}) for i in indices])
    return types.SimpleNamespace(rollout=rollout, from_earlier_step=False)

  def graded(*values):
    return Graded(list(values), {'right': list(values)}, None)

  chosen = make('retire', [])
  pending = types.SimpleNamespace(
    rounds=[prompts(0, 1), prompts(8, 9)], grader=types.SimpleNamespace(correct_by='right'), info={}
  )
  results = [graded(1.0, 1.0), graded(1.0, 0.0), graded(1.0, None), graded(None, None)]
  rollout = types.SimpleNamespace(demonstration=None)
  chosen.observe(pending, types.SimpleNamespace(rollout=rollout, verdicts=None, sampled=results))
  assert chosen.rates == {0: 1.0, 1: 0.5, 2: 1.0}
  assert pending.info['curriculum/solved'] == 2 and pending.info['curriculum/seen'] == 3


def test_expert_answers_from_the_data_are_no_pass():
  """With `rl.expert` the last sample of a group is right, whatever the policy can do."""
  chosen = make('prioritized', [])
  rollout = types.SimpleNamespace(prompts=[Prompt(0, None, '', {})], demonstration=np.array([False, False, True]))
  grades = types.SimpleNamespace(rollout=rollout, verdicts=np.array([[0.0, 0.0, 1.0]]), sampled=None)
  chosen.observe(types.SimpleNamespace(info={}), grades)
  assert chosen.rates == {0: 0.0}


def is_even(answer, **columns):
  """Rewards problems with an even answer, whatever was sampled."""
  del columns
  return [float(int(x) % 2 == 0) for x in answer]


def stream_of(folder, staleness):
  over = dict(data=dict(path='generated:arithmetic:max=99,ops=+,size=12'), rollout=dict(staleness=staleness))
  return jaxpost.policy_and_stream(tiny.grpo_config(folder, reward=is_even, rl=dict(curriculum='retire'), **over))[1]


@pytest.mark.long
@pytest.mark.parametrize('staleness', [0, 1])
def test_run_retires_solved_prompts_and_resumes_exactly(nano, staleness):
  stream, resumed = stream_of(nano, staleness), stream_of(nano, staleness)
  try:
    steps, state = [], None
    for n in range(8):
      if n == 3:
        state = stream.state()
      item = next(stream)
      steps.append([(p.index, int(p.columns['answer'])) for p in item.experience.rollout.prompts])
    assert item.info['curriculum/solved'] > 0 and item.info['curriculum/passed_over'] > 0
    later = [answer for step in steps[4:] for _, answer in step]
    assert later and all(answer % 2 for answer in later)
    resumed.restore(state)
    assert [
      [(p.index, int(p.columns['answer'])) for p in next(resumed).experience.rollout.prompts] for _ in range(5)
    ] == (steps[3:])
  finally:
    stream.close()
    resumed.close()


def test_new_pass_begins_when_all_rows_are_solved_or_too_long(nano, tmp_path):
  """Rows are read when they are drawn; every other row is too long, and all others are solved."""
  texts = ['x' * 60 if n % 2 else f'{n}+1=' for n in range(16)]
  (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(dict(prompt=text, answer='1')) + '\n' for text in texts))
  data = dict(path=str(tmp_path / 'rows.jsonl'), streaming=True, shuffle=False)
  over = dict(data=data, rl=dict(curriculum='retire'), rollout=dict(prompts=4))
  _, stream = jaxpost.policy_and_stream(tiny.grpo_config(nano, reward=is_even, **over))
  try:
    prompts = stream.prompts
    assert len([next(prompts) for _ in range(2)]) == 2
    prompts.curriculum.rates |= dict.fromkeys(range(0, 16, 2), 1.0)
    assert len(next(prompts)[0]) == 4
  finally:
    stream.close()


@pytest.mark.long
@pytest.mark.parametrize('kind', ['retire', 'prioritized'])
def test_saving_a_checkpoint_does_not_change_the_draws(nano, kind):
  """Replay is included, as it needs the rewards before the prompts of the next step are drawn."""

  def sampled(saved_at):
    over = dict(data=dict(path='generated:arithmetic:max=99,ops=+,size=6'), rollout=dict(staleness=2))
    config = tiny.grpo_config(nano, reward=is_even, rl=dict(curriculum=kind, replay=50), train=dict(steps=30), **over)
    _, stream = jaxpost.policy_and_stream(config)
    try:
      steps = []
      for step in range(8):
        if step in saved_at:
          stream.state()
        steps.append([p.index for p in next(stream).experience.rollout.prompts])
      return steps
    finally:
      stream.close()

  assert sampled(()) == sampled((3,)) == sampled((4,))


def test_curriculum_without_rewards_is_refused():
  over = dict(algorithm='opd', reward='', rl=dict(reference='x', curriculum='retire'))
  method = algorithms.load_algorithm('opd')
  with pytest.raises(InputError, match='rl.curriculum'):
    method.check(config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults))
