"""A completion that its verifier would compute on without end gets 0 and is counted; the others are judged."""

import os
import time

import pytest

from jaxpost.rewards import bounded, format, length, math
from jaxpost.workers import call

ITEMS = ','.join(f'{{"a": {i}}}' for i in range(20_000))


def graded(reward, completions, **columns):
  logged = []
  return reward(completions, time_limit_s=2.0, log_metric=lambda *pair: logged.append(pair), **columns), logged


def test_a_pattern_that_backtracks_without_end():
  reward = format.RegexMatch(pattern='(a+)+b$')
  assert graded(reward, ['a' * 40, 'aab', 'x']) == ([0.0, 1.0, 0.0], [('regex_match_late', 1 / 3)])


def test_json_that_takes_quadratic_time_or_has_numbers_beyond_floats():
  pytest.importorskip('jsonschema')
  schemas = [{'uniqueItems': True}] * 2 + [{'multipleOf': 0.5}] * 3
  texts = [f'[{ITEMS}]', '[1, 2]', '1e400', '1' + '0' * 400, '1.5']
  assert graded(format.JsonSchema(), texts, schema=schemas) == ([0.0, 1.0, 0.0, 0.0, 1.0], [('json_schema_late', 0.2)])


def test_powers_of_powers():
  pytest.importorskip('math_verify')
  texts, answers = ['$\\boxed{9^{9^{9^{9}}}}$', '$\\boxed{5}$', '$\\boxed{5}$'], ['5', '5', '$9^{9^{9^{9}}}$']
  assert graded(math.MathVerify(), texts, answer=answers) == ([0.0, 1.0, None], [('math_verify_late', 2 / 3)])
  cosine = length.CosineLength(max=4)
  rewards, logged = graded(cosine, texts[:2], answer=answers[:2], completion_ids=[[1] * 4, []])
  assert rewards == pytest.approx([-0.5, 1.0]) and logged == [('math_verify_late', 0.5)]


def test_a_process_that_ends_or_fails_is_replaced_and_leaves_nothing():
  def act(what):
    if what == 'exit':
      os._exit(0)
    if what == 'memory':
      raise MemoryError
    if what == 'refuse':
      raise call.RewardError('no verdict')
    if what == 'bug':
      raise ValueError('odd')
    return os.getpid()

  function = bounded.Bounded(act)
  first, *others, last = function.each([('pid',), ('memory',), ('exit',), ('pid',)])
  assert others == [bounded.LATE] * 2 and len({os.getpid(), first, last}) == 3
  for what, text in (('refuse', 'no verdict'), ('bug', 'raised ValueError: odd at .*test_rewards_bounded.py')):
    with pytest.raises(call.RewardError, match=text):
      function.each([(what,)])
  begin = time.monotonic()
  function.close()
  with pytest.raises(ProcessLookupError):
    os.kill(last, 0)
  assert time.monotonic() - begin < 5
