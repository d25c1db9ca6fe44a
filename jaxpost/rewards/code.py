"""The reward of programs: a completion's Python passes the row's tests.

It runs in the sandbox of sandbox.py. A row has

  tests                 Python text, or a list of such texts
  test_list             the same (MBPP), with test_setup_code and test_imports
  inputs and outputs    lists of texts for stdin and what stdout should be
"""

import concurrent.futures
import math
import re

from jaxpost.errors import InputError
from jaxpost.rewards.format import text_of
from jaxpost.workers import call, sandbox

_FENCE = re.compile(r'\s*(`{3,}|~{3,})\s*(\S*)\s*$')
_PYTHON = ('python', 'python3', 'py')
_SLACK = 1 << 16  # bytes that a wrong output may have beyond the right one


class Code:
  """1 where every test passes, else 0; `share`: the share that passes.

  The program is the completion's last fenced block of Python (or, without one,
  of no language), or with fenced=false all of it. No program, a crash, too
  much time or memory fail the tests; a sandbox that cannot be made is an error
  and never a 0. None where the row has no readable tests.

  Args:
    timeout: seconds for one completion, all its tests together.
    memory_mb: of each process; files may take `disk_mb`, also of memory.
    packages: shows site-packages of this interpreter to the program.
    parallel: completions at a time in each worker.
    insecure: runs programs without namespaces where they are not allowed:
      they can then read, delete and send what this process can.
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
  ):
    if timeout <= 0 or memory_mb < 32 or disk_mb < 1 or parallel < 1:
      raise InputError(
        f'options timeout={timeout:g}, memory_mb={memory_mb},'
        f' disk_mb={disk_mb}, parallel={parallel}: want timeout > 0,'
        ' memory_mb >= 32, disk_mb >= 1, parallel >= 1'
      )
    self._limits = sandbox.Limits(
      timeout_s=timeout, memory_mb=memory_mb, disk_mb=disk_mb, packages=packages, insecure=insecure
    )
    self._share, self._fenced, self._parallel = share, fenced, parallel
    self.needs_columns = ('tests|test_list|inputs',)
    sandbox.probe(self._limits)

  def __call__(
    self,
    completions,
    tests=None,
    test_list=None,
    inputs=None,
    outputs=None,
    test_setup_code=None,
    test_imports=None,
    time_limit_s=None,
  ):
    size = len(completions)
    self._check_time(size, time_limit_s)
    columns = [c or [None] * size for c in (tests or test_list, inputs, outputs, test_setup_code, test_imports)]
    with concurrent.futures.ThreadPoolExecutor(self._parallel) as threads:
      return list(threads.map(self._grade, completions, *columns))

  def _check_time(self, size, time_limit_s):
    needed = math.ceil(size / self._parallel) * self._limits.timeout_s
    if time_limit_s is not None and needed > time_limit_s:
      raise call.RewardError(
        f'{size} completions of {self._limits.timeout_s:g} s each,'
        f' {self._parallel} at a time, may take {needed:g} s, more than'
        f' config.rewards.timeout_s={time_limit_s:g}: raise it, or parallel,'
        ' or lower timeout'
      )

  def _grade(self, completion, tests, inputs, outputs, setup, imports):
    tests = [tests] if isinstance(tests, str) else tests
    # A blank test would pass whatever the program is.
    tested = _texts(tests) and all(test.strip() for test in tests)
    if not tested and not (_texts(inputs) and _texts(outputs) and len(inputs) == len(outputs)):
      return None
    text = text_of(completion)
    program = last_block(text) if self._fenced else text
    if not program.strip():
      return 0.0
    if tested:
      before = '\n'.join([*(imports or ()), setup or ''])
      tests = [f'{before}\n{test}' for test in tests]
      passed = sandbox.run_tests(program, tests, self._limits)
    else:
      most = max(len(o.encode(errors='replace')) for o in outputs)
      given = sandbox.run_inputs(program, inputs, self._limits, 2 * most + _SLACK)
      passed = [g is not None and _lines(g) == _lines(o) for g, o in zip(given, outputs, strict=True)]
    share = sum(passed) / len(passed)
    return share if self._share else float(share == 1)


def last_block(text):
  """The program of a completion, '' if it has none.

  A block that is never closed, as of a completion that was cut, is one.
  """
  blocks, fence = {True: '', False: ''}, None
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


def _texts(value):
  return bool(value) and isinstance(value, list) and all(isinstance(v, str) for v in value)


def _lines(text):
  """Lines without the white space at their ends and at the end of all."""
  return [line.rstrip() for line in text.rstrip().split('\n')]
