"""The reward for programs: 1 if a completion's Python code passes the tests of its row.

The code runs in the sandbox (workers/sandbox.py). A row has one of

  tests                 Python source, or a list of sources
  test_list             the same, with test_setup_code and test_imports (MBPP)
  inputs and outputs    lists of texts for stdin and of the expected stdout
  with entry_point      lists of arguments, and of the values that the function entry_point has to return

A test is judged in this process, which asks the sandbox for the values that the solution returns (workers/dialog.py):
neither the test nor an expected value is where the solution runs.
"""

import concurrent.futures
import json
import math
import re
import time
from collections.abc import Callable

from jaxpost.errors import InputError
from jaxpost.rewards.format import text_of
from jaxpost.workers import call, checks, sandbox

# Possessive: a long run of spaces or marks must not be divided in every way.
_FENCE = re.compile(r'\s*+(`{3,}+|~{3,}+)\s*+(\S*+)\s*+$')
_PYTHON = ('python', 'python3', 'py')
_DEFINES_CHECK = re.compile(r'^def check\(', re.M)
_CALLS_CHECK = re.compile(r'^check\(', re.M)
_LONGEST = 1 << 22  # bytes of an expected output
_SLACK = 1 << 16  # bytes to read beyond twice the length of the expected output


class Code:
  """1 if every test passes, else 0; with `share`, the fraction of tests that pass.

  The program is the completion's last fenced block of Python (if there is none, the last block without a language), or
  with fenced=false the whole completion. A missing program, a crash, and exceeded time or memory fail the tests. A
  sandbox that cannot be created is an error, never a 0. None if the row has no tests, or one that cannot be judged from
  outside; if no row of a call can be judged, RewardError says why and what to write instead.

  Args:
    timeout: seconds for one completion, all its tests together.
    memory_mb: memory of each process.
    disk_mb: size of the working directory, which is also held in memory.
    share: return the fraction of tests that pass.
    fenced: run a fenced block, not the whole completion.
    packages: let the program import this interpreter's site-packages.
    parallel: completions that each worker runs at a time.
    insecure: run programs without namespaces, where those are not allowed. They can then read, delete and send whatever
      this process can.
  """

  def __init__(
    self,
    timeout: float = 5.0,
    memory_mb: int = 512,
    disk_mb: int = 64,
    share: bool = False,
    fenced: bool = True,
    packages: bool = False,
    parallel: int = 4,
    insecure: bool = False,
  ) -> None:
    if timeout <= 0 or memory_mb < 32 or disk_mb < 1 or parallel < 1:
      raise InputError(
        f'options timeout={timeout:g}, memory_mb={memory_mb},'
        f' disk_mb={disk_mb}, parallel={parallel}: want timeout > 0,'
        ' memory_mb >= 32, disk_mb >= 1, parallel >= 1'
      )
    self._limits = sandbox.SandboxLimits(
      timeout_s=timeout, memory_mb=memory_mb, disk_mb=disk_mb, packages=packages, insecure=insecure
    )
    self._share, self._fenced, self._parallel = share, fenced, parallel
    self.needs_columns = ('tests|test_list|inputs',)
    sandbox.probe(self._limits)
    if lacks := sandbox.lacks(self._limits):
      print(f'reward code: {lacks}')

  def __call__(
    self,
    completions: list,
    tests: list | None = None,
    test_list: list | None = None,
    inputs: list | None = None,
    outputs: list | None = None,
    test_setup_code: list | None = None,
    test_imports: list | None = None,
    entry_point: list | None = None,
    time_limit_s: float | None = None,
    log_metric: Callable | None = None,
  ) -> list[float | None]:
    """Returns one reward per completion; RewardError if `time_limit_s` may not suffice or no row can be judged."""
    size = len(completions)
    self._check_time(size, time_limit_s)
    given = (tests or test_list, inputs, outputs, test_setup_code, test_imports, entry_point)
    columns = [c or [None] * size for c in given]
    refused, late = {}, []

    def grade(i: int) -> float | None:
      begin = time.monotonic()
      try:
        reward = self._grade(completions[i], *(column[i] for column in columns))
      except checks.UnreadableTest as error:
        refused[i] = str(error)
        return None
      if reward != 1 and time.monotonic() - begin > self._limits.timeout_s:
        late.append(i)
      return reward

    with concurrent.futures.ThreadPoolExecutor(self._parallel) as threads:
      rewards = list(threads.map(grade, range(size)))
    if log_metric:
      log_metric('code_unreadable', len(refused) / size)
      log_metric('code_late', len(late) / size)
    if refused and len(refused) == size:
      raise call.RewardError(f'a test of this row cannot be judged: {next(iter(refused.values()))}')
    for text in sorted(set(refused.values())):
      print('reward code: a test cannot be judged:', text)
    return rewards

  def _check_time(self, size: int, time_limit_s: float | None) -> None:
    needed = math.ceil(size / self._parallel) * self._limits.timeout_s
    if time_limit_s is not None and needed > time_limit_s:
      raise call.RewardError(
        f'{size} completions of {self._limits.timeout_s:g} s each,'
        f' {self._parallel} at a time, may take {needed:g} s, more than'
        f' config.rewards.timeout_s={time_limit_s:g}: raise it, or parallel,'
        ' or lower timeout'
      )

  def _grade(self, completion, tests, inputs, outputs, setup, imports, entry_point) -> float | None:
    """Returns the reward of one completion; the other arguments are its row's columns."""
    tests = [tests] if isinstance(tests, str) else tests
    # Any program passes a blank test, so a row that has one is unreadable.
    has_tests = _is_texts(tests) and all(test.strip() for test in tests)
    lists = isinstance(inputs, list) and isinstance(outputs, list) and bool(inputs) and len(inputs) == len(outputs)
    # A program that does nothing prints what is blank.
    prints = lists and _is_texts(inputs) and _is_texts(outputs) and any(text.strip() for text in outputs)
    if not has_tests and not (lists and entry_point) and not prints:
      return None
    # Read before the program is looked at: whether a row can be judged must not depend on the completion.
    if has_tests:
      judged = [checks.read(_complete(test, setup, imports, entry_point)) for test in tests]
    elif entry_point:
      judged = [_example(entry_point, i, o) for i, o in zip(inputs, outputs)]
    else:
      output_bytes = 2 * _longest(inputs, outputs) + _SLACK
    text = text_of(completion)
    program = last_block(text) if self._fenced else text
    if not program.strip():
      return 0.0
    if has_tests or entry_point:
      passed = sandbox.run_tests(program, judged, self._limits)
    else:
      given = sandbox.run_inputs(program, inputs, self._limits, output_bytes)
      passed = [g is not None and _lines(g) == _lines(o) for g, o in zip(given, outputs, strict=True)]
    share = sum(passed) / len(passed)
    return share if self._share else float(share == 1)


def _complete(test: str, setup: str | None, imports: list[str] | None, entry_point: str | None) -> str:
  """Returns a test with what its row puts before it, and with HumanEval's call of check(candidate) after it."""
  source = '\n'.join(part for part in (*(imports or ()), setup, test) if part)
  if entry_point and _DEFINES_CHECK.search(test) and not _CALLS_CHECK.search(test):
    source += f'\ncheck({entry_point})'
  return source


def _example(entry_point: str, arguments: object, expected: object) -> checks.Test:
  """Returns the test that a function returns `expected`; texts that are JSON are read, one argument a line."""
  try:
    if isinstance(arguments, str):
      arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
      expected = json.loads(expected) if isinstance(expected, str) else expected
  except ValueError as error:
    raise checks.UnreadableTest(
      f'inputs or outputs are no JSON ({error}); with entry_point, a row gives lists of arguments and of results,'
      ' or texts with one JSON value a line'
    ) from error
  if not isinstance(arguments, list):
    raise checks.UnreadableTest(f'inputs has {arguments!r:.60}; with entry_point, each is a list of arguments')
  return checks.example(entry_point, arguments, expected)


def last_block(text: str) -> str:
  """Returns the last fenced block of Python, else the last block without a language, else ''.

  A block that is never closed counts: the completion may have been cut.
  """
  blocks = {True: '', False: ''}  # the last block, by whether it names a language
  fence = None  # the mark that opened the current block
  for line in text.split('\n'):
    mark = _FENCE.match(line)
    if fence is None and mark:
      fence, language, lines = mark[1], mark[2].lower(), []
    elif fence and mark and not mark[2] and mark[1].startswith(fence):
      if language in ('', *_PYTHON):
        blocks[language != ''] = '\n'.join(lines)
      fence = None
    elif fence:
      lines.append(line)
  if fence and language in ('', *_PYTHON):
    blocks[language != ''] = '\n'.join(lines)
  return blocks[True] or blocks[False]


def _longest(inputs: list[str], outputs: list[str]) -> int:
  """Returns the bytes of the longest output; UnreadableTest if no program can read or print one of the texts."""
  try:
    sizes = [len(text.encode()) for text in (*inputs, *outputs)]
  except UnicodeEncodeError as error:
    raise checks.UnreadableTest(f'inputs or outputs hold what is no text: {error}') from error
  longest = max(sizes[len(inputs) :])
  if longest > _LONGEST:
    raise checks.UnreadableTest(f'outputs hold a text of {longest} bytes, more than {_LONGEST}')
  return longest


def _is_texts(value: object) -> bool:
  return bool(value) and isinstance(value, list) and all(isinstance(v, str) for v in value)


def _lines(text: str) -> list[str]:
  """Returns the lines without trailing whitespace, and without blank lines at the end."""
  return [line.rstrip() for line in text.rstrip().split('\n')]
