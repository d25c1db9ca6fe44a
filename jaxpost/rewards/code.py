"""The reward for programs: 1 if a completion's Python code passes the tests of its row.

The code runs in the sandbox (workers/sandbox.py). A row has one of

  tests                 Python source, or a list of sources
  test_list             the same, with test_setup_code and test_imports (MBPP)
  inputs and outputs    lists of texts for stdin and of the expected stdout
"""

import concurrent.futures
import math
import re

from jaxpost.errors import InputError
from jaxpost.rewards.format import text_of
from jaxpost.workers import call, sandbox

_FENCE = re.compile(r'\s*(`{3,}|~{3,})\s*(\S*)\s*$')
_PYTHON = ('python', 'python3', 'py')
_SLACK = 1 << 16  # bytes to read beyond twice the length of the expected output


class Code:
  """1 if every test passes, else 0; with `share`, the fraction of tests that pass.

  The program is the completion's last fenced block of Python (if there is none, the last block without a language), or
  with fenced=false the whole completion. A missing program, a crash, and exceeded time or memory fail the tests. A
  sandbox that cannot be created is an error, never a 0. None if the row has no readable tests.

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

  def __call__(
    self,
    completions: list,
    tests: list | None = None,
    test_list: list | None = None,
    inputs: list | None = None,
    outputs: list | None = None,
    test_setup_code: list | None = None,
    test_imports: list | None = None,
    time_limit_s: float | None = None,
  ) -> list[float | None]:
    """Returns one reward per completion; RewardError if `time_limit_s` may not suffice."""
    size = len(completions)
    self._check_time(size, time_limit_s)
    columns = [c or [None] * size for c in (tests or test_list, inputs, outputs, test_setup_code, test_imports)]
    with concurrent.futures.ThreadPoolExecutor(self._parallel) as threads:
      return list(threads.map(self._grade, completions, *columns))

  def _check_time(self, size: int, time_limit_s: float | None) -> None:
    needed = math.ceil(size / self._parallel) * self._limits.timeout_s
    if time_limit_s is not None and needed > time_limit_s:
      raise call.RewardError(
        f'{size} completions of {self._limits.timeout_s:g} s each,'
        f' {self._parallel} at a time, may take {needed:g} s, more than'
        f' config.rewards.timeout_s={time_limit_s:g}: raise it, or parallel,'
        ' or lower timeout'
      )

  def _grade(self, completion, tests, inputs, outputs, setup, imports) -> float | None:
    """Returns the reward of one completion; the other arguments are its row's columns."""
    tests = [tests] if isinstance(tests, str) else tests
    # Any program passes a blank test, so a row that has one is unreadable.
    has_tests = _is_texts(tests) and all(test.strip() for test in tests)
    has_pairs = _is_texts(inputs) and _is_texts(outputs) and len(inputs) == len(outputs)
    if not has_tests and not has_pairs:
      return None
    text = text_of(completion)
    program = last_block(text) if self._fenced else text
    if not program.strip():
      return 0.0
    if has_tests:
      before = '\n'.join([*(imports or ()), setup or ''])
      tests = [f'{before}\n{test}' for test in tests]
      passed = sandbox.run_tests(program, tests, self._limits)
    else:
      most = max(len(o.encode(errors='replace')) for o in outputs)
      given = sandbox.run_inputs(program, inputs, self._limits, 2 * most + _SLACK)
      passed = [g is not None and _lines(g) == _lines(o) for g, o in zip(given, outputs, strict=True)]
    share = sum(passed) / len(passed)
    return share if self._share else float(share == 1)


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


def _is_texts(value: object) -> bool:
  return bool(value) and isinstance(value, list) and all(isinstance(v, str) for v in value)


def _lines(text: str) -> list[str]:
  """Returns the lines without trailing whitespace, and without blank lines at the end."""
  return [line.rstrip() for line in text.rstrip().split('\n')]
