"""The reward for programs: 1 if a completion's Python code passes the tests of its row.

The code runs in the sandbox (workers/sandbox.py). A row has one of

  tests                 Python source, or a list of sources
  test_list             the same, with test_setup_code and test_imports (MBPP)
  inputs and outputs    lists of texts for stdin and of the expected stdout
  with entry_point      lists of arguments, and of the values that the function entry_point has to return

A test is judged in this process, which asks the sandbox for the values that the solution returns (workers/dialog.py):
neither the test nor an expected value enters the process of the solution.
"""

import concurrent.futures
import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterator

from jaxpost.errors import InputError
from jaxpost.rewards.format import text_of
from jaxpost.workers import call, checks, sandbox

# The marks, the language, and further words as in ```python title="a.py".
# Possessive: a long run of spaces or marks must not be divided in every way.
_FENCE = re.compile(r'\s*+(`{3,}+|~{3,}+)\s*+([^\s`]*+)[^`]*+$')
_PYTHON = ('python', 'python3', 'py')
_DEFINES_CHECK = re.compile(r'^def check\(', re.M)
_CALLS_CHECK = re.compile(r'^check\(', re.M)
_MAX_OUTPUT = 1 << 22  # bytes of an expected output
_SLACK = 1 << 16  # bytes to read beyond twice the length of the expected output

# (program, limits) -> for each test of a row, whether the program passes it.
JudgeProgram = Callable[[str, sandbox.SandboxLimits], list[bool]]


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
    self._share = share
    self._fenced = fenced
    self._parallel = parallel
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
    columns = (tests, test_list, inputs, outputs, test_setup_code, test_imports, entry_point)
    tests, test_list, *others = (column or [None] * size for column in columns)
    # Rows of several files may have both columns, each row with null in one of them.
    tests = [test or listed for test, listed in zip(tests, test_list)]
    rows = list(zip(tests, *others))
    refused: dict[int, str] = {}  # completion -> why its row cannot be judged
    late = []

    def grade(i: int) -> float | None:
      begin = time.monotonic()
      try:
        reward = self._grade(completions[i], _judge_of(*rows[i]))
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

  def _grade(self, completion: str | list[dict], judge: JudgeProgram | None) -> float | None:
    """Returns the reward of one completion; None if nothing judges it."""
    if judge is None:
      return None
    text = text_of(completion)
    program = last_block(text) if self._fenced else text
    if not program.strip():
      return 0.0
    passed = judge(program, self._limits)
    share = sum(passed) / len(passed)
    return share if self._share else float(share == 1)


def _judge_of(tests, inputs, outputs, setup, imports, entry_point) -> JudgeProgram | None:
  """Returns the function that judges programs by the columns of a row; None if these have no tests.

  It is made without the completion, because whether a row can be judged must not depend on that.
  """
  tests = [tests] if isinstance(tests, str) else tests
  # Any program passes a blank test, so a row that has one is unreadable.
  if _is_texts(tests) and all(test.strip() for test in tests):
    complete = [checks.read(_complete(test, setup, imports, entry_point)) for test in tests]
    return functools.partial(_passed_tests, complete)
  if not (isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs)):
    return None
  if entry_point:
    examples = [_example(entry_point, i, o) for i, o in zip(inputs, outputs)]
    return functools.partial(_passed_tests, examples)
  # If all outputs were blank, a program that prints nothing would pass.
  if _is_texts(inputs) and _is_texts(outputs) and any(text.strip() for text in outputs):
    return functools.partial(_printed_outputs, inputs, outputs, 2 * _longest_output(inputs, outputs) + _SLACK)
  return None


def _passed_tests(tests: list[checks.Test], program: str, limits: sandbox.SandboxLimits) -> list[bool]:
  return sandbox.run_tests(program, tests, limits)


def _printed_outputs(
  inputs: list[str], outputs: list[str], output_bytes: int, program: str, limits: sandbox.SandboxLimits
) -> list[bool]:
  printed = sandbox.run_inputs(program, inputs, limits, output_bytes)
  return [text is not None and _lines(text) == _lines(output) for text, output in zip(printed, outputs, strict=True)]


def _complete(test: str, setup: str | None, imports: list[str] | None, entry_point: str | None) -> str:
  """Returns a test after the imports and setup of its row, and before HumanEval's call of check(candidate)."""
  source = '\n'.join(part for part in (*(imports or ()), setup, test) if part)
  if entry_point and _DEFINES_CHECK.search(test) and not _CALLS_CHECK.search(test):
    source += f'\ncheck({entry_point})'
  return source


def _example(entry_point: str, arguments: object, expected: object) -> checks.Test:
  """Returns the test that a function returns `expected`; texts are parsed as JSON, one argument a line."""
  try:
    if isinstance(arguments, str):
      arguments = [json.loads(line) for line in arguments.split('\n') if line.strip()]  # a text may hold U+2028
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
  """Returns the last fenced block of Python, else the last block without a language, else ''."""
  last = {'python': '', '': ''}
  for language, block in _blocks(text):
    last['python' if language in _PYTHON else language] = block
  return last['python'] or last['']


def _blocks(text: str) -> Iterator[tuple[str, str]]:
  """Yields the language, in lower case, and the content of each fenced block.

  A block that is never closed counts: the completion may have been cut.
  """
  opening = language = ''
  lines: list[str] = []
  for line in text.split('\n'):
    fence = _FENCE.match(line)
    if not opening:
      if fence:
        opening, language = fence[1], fence[2].lower()
        lines = []
    elif fence and fence[1].startswith(opening) and not fence[2]:
      yield language, '\n'.join(lines)
      opening = ''
    else:
      lines.append(line)
  if opening:
    yield language, '\n'.join(lines)


def _longest_output(inputs: list[str], outputs: list[str]) -> int:
  """Returns the bytes of the longest output; UnreadableTest if no program can read or print one of the texts."""
  try:
    sizes = [len(text.encode()) for text in (*inputs, *outputs)]
  except UnicodeEncodeError as error:
    raise checks.UnreadableTest(f'inputs or outputs hold a text that UTF-8 cannot encode: {error}') from error
  longest = max(sizes[len(inputs) :])
  if longest > _MAX_OUTPUT:
    raise checks.UnreadableTest(f'outputs hold a text of {longest} bytes, more than {_MAX_OUTPUT}')
  return longest


def _is_texts(value: object) -> bool:
  return bool(value) and isinstance(value, list) and all(isinstance(v, str) for v in value)


def _lines(text: str) -> list[str]:
  """Returns the lines without trailing whitespace, and without blank lines at the end."""
  return [line.rstrip() for line in text.rstrip().split('\n')]
