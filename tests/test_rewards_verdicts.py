"""Verdicts of the code reward on edge cases of tests and answers.

A completion can make its verdict 0 or 1; it can never make the verdict be missing.
"""

import os
import signal
import threading
import time

import pytest
from sandboxes import needs_namespaces

from jaxpost.rewards import code
from jaxpost.workers import call, checks, namespaces, runner, sandbox

PATIENT = sandbox.SandboxLimits(timeout_s=60.0)

# (solution, test, whether it passes): values of a type or size that the author of the test did not think of
CASES = [
  ('def f(n): return "x"', 'assert f(10) % 2 == 0', False),
  ('def f(n): return b"x"', 'assert f(10).title() == "x"', False),
  ('def tree(): return []', 't = tree()\nt.insert(5)\nassert t.search(5)', False),
  ('def f(n): return []', 'assert sum([1, 2], f(1)) == 3', False),
  ('def f(n): return 0.5', 'assert f(1) in range(10**18)', False),
  ('def f(n): return -10**12', 'assert round(12345, f(2)) == 3', False),
  ('def f(n): return -10**12', 'assert round(12345, ndigits=f(2)) == 3', False),
  ('def f(n): return 10**10', 'assert bytes(f(2)) == 3', False),
  ('def f(n): return "%(((a)))999999999d"', 'assert f(1) % {"((a))": 1} == ""', False),
  ('def f(n): return "%*.999999999d"', 'assert f(1) % (1, 1) == ""', False),
  ('def f(n): return "%*d"', 'assert f(1) % (10**9, 1) == ""', False),
  ('def f(n): return "%(a)s" * 10**5', 'assert f(1) % {"a": "a" * 10**6} == ""', False),
  ('def f(n): return 0.5', 'assert range(10**18).count(f(1)) == 0', False),
  ('def f(n): return n', 'assert round(f(2.5), None) == 2 and round(f(2.55), ndigits=1) == 2.5', True),
  ('def f(n): return n', 'fmt = "x%d"\nassert fmt % f(3) == "x3" and ("a" + "b%d") % f(3) == "ab3"', True),
  (
    'def f(n): return n',
    'for fmt, n in [("%-5s|", "a"), ("%(k)08.3f%%", {"k": 0.5}), (b"%x", 255), ("5551234567 %r", [1])]:\n'
    '  assert fmt % f(n) in ("a    |", "0000.500%", b"ff", "5551234567 [1]")',
    True,
  ),
  ('def f(n): return n', 'def check(g: callable) -> object:\n  assert g(1) == 1, hex(g(1))\ncheck(f)', True),
  ('def f(n): return n', 's = {1, 2}\ns.difference_update({1})\nassert s == f({2})', True),
  ('def f(n): return n', 'assert f([1, 2]).__len__() == 2 and f(3).numerator == 3 and range(9).index(f(4)) == 4', True),
  ('def f(n): return n', 'assert f(b"ab").upper().center(4) == b" AB " and f(True).bit_length() == 1', True),
  ('def f(n): return 10**4200', 'assert pow(f(1), f(2) - 1, f(3) - 3) == 3', False),
  ('def f(n): return n', 'assert f(2) == pow(2, 10, mod=7) and f(1024) == pow(base=2, exp=10)', True),
  ('def f(n): return "a" * 2000000', 'assert "".join([f(1)] * 1000) == "a"', False),
  ('import os\ndef f(n): os._exit(1)', 'def g():\n  try:\n    assert f(1) == 2\n  finally:\n    return\ng()', False),
  ('import math\ndef f(n): return math.factorial(n)', 'import math\nassert f(2000) == math.factorial(2000)', True),
  ('def f(n): return -n % 7', 'assert f(2 ** 20000) == -2 ** 20000 % 7', True),
  ('def f(n): return [[n], [2]]', 'assert sum(f(1), []) == [1, 2]', True),
  ('def f(n): return n', 'assert f(3) in range(2, 9) and f(3.0) in range(9) and f(9) not in range(9)', True),
  ('def f(n): return 1.5', 'assert f(1).hex() == "0x1.8000000000000p+0" and f(1).real == 1.5', True),
  ('def f(n): return n', 'assert type(f(1)).__name__ == "int" and f("a").__class__ == str', True),
  # Slices of objects of the solution, which need not be lists.
  ('def f(n):\n  yield from range(n)', 'assert f(5)[:2] == [0, 1]', False),
  ('import collections\ndef f(n): return collections.deque(range(n))', 'assert f(5)[:2] == [0, 1]', False),
  ('class A:\n  pass\ndef f(n): return A()', 'assert f(5)[::-1] == [0, 1]', False),
  (
    'class A:\n  __getitem__ = lambda a, k: [k.start, k.stop, k.step]\nf = A()',
    'assert f[1:-2] == [1, -2, None]',
    True,
  ),
  (
    'class S:\n  def __init__(s): s.n, s.l = 0, []\n  def get(s):\n    s.n += 1\n    return s.l',
    's = S()\ns.get().append(1)\nassert s.n == 1',
    True,
  ),
]


@needs_namespaces
def test_answers_of_unexpected_type_or_size_still_get_a_verdict():
  solutions, tests, passes = zip(*CASES)
  reward = code.Code(fenced=False, timeout=60.0)
  begin = time.process_time()
  assert reward(list(solutions), tests=list(tests)) == list(map(float, passes))
  assert time.process_time() - begin < 10


@needs_namespaces
def test_slow_comparison_in_a_test_is_stopped_by_its_timeout():
  test = checks.read('r = f(1)\nassert [v for v in range(1, 1000) if v in r] == [7]')
  begin = time.monotonic()
  assert (
    sandbox.run_tests('def f(n): return [0] * 500000', [test, test], sandbox.SandboxLimits(timeout_s=1)) == [False] * 2
  )
  assert time.monotonic() - begin < 30


@needs_namespaces
def test_code_late_metric_counts_programs_that_time_out():
  programs = ['import time\ntime.sleep(100)', 'raise ValueError', 'print(4)', 'import time\ntime.sleep(100)']
  logged = {}
  rewards = code.Code(fenced=False, timeout=5.0)(
    programs, inputs=[['']] * 4, outputs=[['4']] * 4, log_metric=logged.__setitem__
  )
  assert rewards == [0.0, 0.0, 1.0, 0.0] and logged['code_late'] == 0.5


@needs_namespaces
def test_programs_may_call_exit_and_start_with_clean_globals():
  exits_early = 'print(4)\nif __name__ == "__main__": exit()\nprint(5)'
  prints_globals = 'import sys\nsys.stdout.write(" ".join(sorted(n for n in globals() if n[0] != "_")))\nquit(0)'
  assert sandbox.run_inputs(exits_early, [''], PATIENT) == ['4\n']
  assert sandbox.run_inputs(prints_globals, [''], PATIENT) == ['sys']
  assert sandbox.run_inputs('import sys\nprint(len(sys.argv), __file__)\nexit(3)', [''], PATIENT) == [None]


@needs_namespaces
def test_long_blank_and_unencodable_expected_outputs():
  reward = code.Code(fenced=False, timeout=60.0)
  long = 'a\n' * 750_000
  program = 'print("a \\n" * 750000)'
  assert reward([program, 'pass'], inputs=[['']] * 2, outputs=[[long], [' \n']]) == [1.0, None]
  for outputs, why in ((['\ud800'], 'UTF-8 cannot encode'), (['a' * (1 << 22) + 'a'], '4194305 bytes')):
    with pytest.raises(call.RewardError, match=why):
      reward([program], inputs=[['']], outputs=[outputs])


@pytest.mark.parametrize(
  'arguments, expected, why',
  [
    ([eval('[' * 150 + ']' * 150)], 1, 'deeper than 100'),
    ([1], eval('[' * 150 + ']' * 150), 'deeper than 100'),
    ([1], list(range(500_000)), 'bytes, more than'),
    ([1], [float('nan')], 'NaN'),
  ],
)
def test_values_that_no_solution_can_receive_or_return_are_refused(arguments, expected, why):
  with pytest.raises(checks.UnreadableTest, match=why):
    checks.example('f', arguments, expected)


def test_long_integers_survive_encoding_and_malformed_ones_are_refused():
  for value in (0, -1, 2**63, 10**4299, 2 ** (runner.BITS - 1), -(2 ** (runner.BITS - 1))):
    assert runner.decode(runner.encode(value, len), len) == value
  for text in ('0x' + 'f' * runner.BITS, 'x', '', 7):
    with pytest.raises(ValueError):
      runner.decode(['i', text], len)


def test_signals_during_a_report_do_not_truncate_it():
  reads, writes = os.pipe()
  saved_stdout = os.dup(1)
  parts = []

  def read():
    time.sleep(0.2)  # meanwhile the pipe is full, and signals interrupt the writer
    while not parts or not parts[-1].endswith(b'\n'):
      parts.append(os.read(reads, 1 << 12))
      if not parts[-1]:
        return

  old_handler = signal.signal(signal.SIGALRM, lambda *_: None)
  thread = threading.Thread(target=read)
  try:
    os.dup2(writes, 1)
    os.close(writes)
    thread.start()
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.002)
    namespaces.report({'answer': 'a' * (1 << 18)})
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.dup2(saved_stdout, 1)  # also closes the write end of the pipe
    thread.join()
    signal.signal(signal.SIGALRM, old_handler)
    os.close(saved_stdout)
    os.close(reads)
  assert len(b''.join(parts)) == (1 << 18) + len('{"answer": ""}\n')
