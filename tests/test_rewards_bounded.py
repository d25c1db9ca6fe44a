"""`rewards.bounded`: a completion that its verifier would never finish gets 0 and is counted; others are graded."""

import concurrent.futures
import os
import signal
import sys
import time

import pytest

from jaxpost.rewards import bounded, format, length, math
from jaxpost.workers import call

ITEMS = ','.join(f'{{"a": {i}}}' for i in range(20_000))


def graded(reward, completions, **columns):
  """Returns (rewards, logged metrics) of completions that must be graded within 2 s."""
  logged, begin = [], time.monotonic()
  rewards = reward(completions, time_limit_s=2.0, log_metric=lambda *pair: logged.append(pair), **columns)
  assert time.monotonic() - begin < 2
  return rewards, logged


def test_regex_that_backtracks_without_end_gives_0_and_is_counted():
  reward = format.RegexMatch(pattern='(a+)+b$')
  assert graded(reward, ['a' * 40, 'aab', 'x']) == ([0.0, 1.0, 0.0], [('regex_match_late', 1 / 3)])


def test_json_with_quadratic_time_or_numbers_beyond_floats_gives_0():
  pytest.importorskip('jsonschema')
  schemas = [{'uniqueItems': True}] * 2 + [{'multipleOf': 0.5}] * 3
  texts = [f'[{ITEMS}]', '[1, 2]', '1e400', '1' + '0' * 400, '1.5']
  assert graded(format.JsonSchema(), texts, schema=schemas) == ([0.0, 1.0, 0.0, 0.0, 1.0], [('json_schema_late', 0.2)])


@pytest.mark.parametrize('within, why', [({'type': 'foo'}, 'UnknownType'), ({'pattern': '('}, 'error: missing')])
def test_schema_that_is_invalid_behind_a_reference_raises_reward_error(within, why):
  pytest.importorskip('jsonschema')
  with pytest.raises(call.RewardError, match=why):
    graded(format.JsonSchema(), ['"a"'], schema=[{'$ref': '#/x', 'x': within}])


def test_powers_of_powers_give_0_in_a_completion_and_none_in_an_answer():
  pytest.importorskip('math_verify')
  texts, answers = ['$\\boxed{9^{9^{9^{9}}}}$', '$\\boxed{5}$', '$\\boxed{5}$'], ['5', '5', '$9^{9^{9^{9}}}$']
  assert graded(math.MathVerify(), texts, answer=answers) == ([0.0, 1.0, None], [('math_verify_late', 2 / 3)])
  endless = dict(answer=['$9^{9^{9^{9}}}$'] * 8)
  assert graded(math.MathVerify(), ['$\\boxed{5}$'] * 8, **endless) == ([None] * 8, [('math_verify_late', 1.0)])
  cosine = length.CosineLength(max=4)
  rewards, logged = graded(cosine, texts[:2], answer=answers[:2], completion_ids=[[1] * 4, []])
  assert rewards == pytest.approx([-0.5, 1.0]) and logged == [('math_verify_late', 0.5)]


def test_process_that_ends_or_fails_is_replaced_and_none_is_left():
  class OwnError(Exception):
    """An exception class that no code outside of this test knows."""

  def run_action(action):
    if action == 'exit':
      os._exit(0)
    if action == 'memory':
      raise MemoryError
    if action == 'refuse':
      raise call.RewardError('no verdict')
    if action == 'bug':
      raise OwnError('odd')
    return os.getpid()

  function = bounded.Bounded(run_action)
  first_pid, *late, second_pid = function.each([('pid',), ('memory',), ('exit',), ('pid',)])
  assert late == [bounded.LATE] * 2 and len({os.getpid(), first_pid, second_pid}) == 3
  for action, message in (('refuse', 'no verdict'), ('bug', 'raised OwnError: odd at .*test_rewards_bounded.py')):
    with pytest.raises(call.RewardError, match=message):
      function.each([(action,)])
  os.kill(second_pid, signal.SIGKILL)  # while the process is idle
  (third_pid,) = function.each([('pid',)])
  function.close()
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    (fourth_pid,) = thread.submit(function.each, [('pid',)]).result()
  if sys.platform == 'linux':  # there, a process ends with the thread that started it
    os.waitid(os.P_PID, fourth_pid, os.WEXITED | os.WNOWAIT)
  (last_pid,) = function.each([('pid',)])
  assert len({second_pid, third_pid, fourth_pid, last_pid} - {bounded.LATE}) == (4 if sys.platform == 'linux' else 3)
  begin = time.monotonic()
  function.close()
  with pytest.raises(ProcessLookupError):
    os.kill(last_pid, 0)
  assert time.monotonic() - begin < 5
