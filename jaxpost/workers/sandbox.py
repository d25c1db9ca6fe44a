"""Runs programs written by a model in a sandbox; this is the outer, trusted side.

Threat model: the program is hostile. It must not read the user's files, variables or processes, reach the network,
outlive its time limit, or use more memory and disk than its limits. The sandbox consists of

  namespaces        user, mount, pid, network, ipc and uts, created without privileges (namespaces.py)
  file system       a new root with the system's and Python's files, read-only, and an empty working directory in memory
  credentials       an unprivileged user, no capabilities, no_new_privs
  resource limits   CPU and wall time, memory per process, processes, files, output (jail.py)

  system calls      those that ordinary programs use (seccomp.py)
  total memory      of all processes of a solution, by a control group, or watched and killed (supervisor.py)

Not covered: the kernel is shared with the host. With `insecure=True` only the resource limits and that of total memory
apply; everything that a program starts still ends with it.

For each solution a new process runs jail.py, which builds the sandbox and reports one JSON line per program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

from jaxpost.errors import InputError
from jaxpost.workers import call, checks, dialog, runner, supervisor

_GRACE_S = 5.0  # seconds to start and end the sandbox, beyond the time limit of the programs
_CGROUPS = '/sys/fs/cgroup'
_EVALUATION_S = 2.0  # part of `_GRACE_S` that remains for the last answers when the evaluation of tests ends
_OUTPUT = 1 << 23  # upper limit of `output_bytes`
_ALLOW = (
  'allow user namespaces (Ubuntu 24: sysctl'
  ' kernel.apparmor_restrict_unprivileged_userns=0; Docker: --security-opt'
  ' seccomp=unconfined --security-opt systempaths=unconfined), or take the'
  ' risk with insecure=true'
)


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
  """Limits of one solution.

  Attributes:
    timeout_s: wall-clock seconds for all tests or inputs together.
    memory_mb: address space of each process, and memory of all of them.
    disk_mb: size of the working directory, and of any one file.
    processes: processes and threads at a time.
    packages: also mount this interpreter's site-packages, read-only.
    insecure: apply the limits only; create no namespaces.
  """

  timeout_s: float = 5.0
  memory_mb: int = 512
  disk_mb: int = 64
  processes: int = 64
  packages: bool = False
  insecure: bool = False


def run_tests(solution: str, tests: Iterable[str | checks.Test], limits: SandboxLimits) -> list[bool]:
  """Judges the solution by each test, each with the solution in a new process; returns which tests passed.

  Neither a test nor a value that it expects enters the sandbox: see dialog.py.

  Args:
    solution: Python source of a module.
    tests: Python sources, or tests that `checks.read` and `checks.example` return.
    limits: limits of all tests together.

  Raises:
    UnreadableTest: if a test cannot be judged from outside; the message says what to write instead.
    RewardError: if the sandbox cannot be created.
  """
  tests = [checks.read(test) if isinstance(test, str) else test for test in tests]
  with _Jail(limits, solution=solution, inputs=None, output_bytes=runner.REPLY_BYTES) as jail:
    return [dialog.passed(test, jail.new_solution(), jail.deadline - _EVALUATION_S) for test in tests]


def run_inputs(
  solution: str, inputs: Iterable[str], limits: SandboxLimits, output_bytes: int = _OUTPUT
) -> list[str | None]:
  """Runs the solution as a program, once per input on stdin; returns the stdout of each run.

  The result is None where the program failed, took too long or printed more than `output_bytes` (at most 8 MiB). The
  expected output never enters the sandbox, so it cannot be copied from there.

  Raises:
    RewardError: if the sandbox cannot be created.
  """
  inputs = list(inputs)
  with _Jail(limits, solution=solution, inputs=inputs, output_bytes=min(output_bytes, _OUTPUT)) as jail:
    return [jail.receive()['output'] for _ in inputs]


def probe(limits: SandboxLimits) -> None:
  """Runs two small programs in a sandbox; InputError if it cannot be created on this machine."""
  if not limits.insecure and sys.platform != 'linux':
    raise InputError('the sandbox needs Linux; run there, or take the risk with insecure=true')
  try:
    limits = dataclasses.replace(limits, timeout_s=max(limits.timeout_s, 10.0))
    passed = run_tests('x = 2', ['assert x == 2', 'assert x == 3'], limits)
    printed = run_inputs('print(input())', ['\u00e4'], limits)
  except call.RewardError as error:
    hint = '' if limits.insecure else f'; {_ALLOW}'
    raise InputError(f'{error}{hint}') from error
  if passed != [True, False] or printed != ['\u00e4\n']:
    raise InputError(f'the sandbox starts no Python within memory_mb={limits.memory_mb}: {passed}, {printed}')


def lacks(limits: SandboxLimits) -> str:
  """Returns one line about the parts of the sandbox that this machine or `limits` lack, '' if it is complete."""
  lacking = ['insecure=true: programs are not isolated'] if limits.insecure else []
  if sys.platform != 'linux':
    lacking.append('memory is limited for each process and not in total')
  elif reason := supervisor.why_no_cgroup(_CGROUPS):
    lacking.append(f'no control group can be made ({reason}): the memory of all processes is only watched')
  return '; '.join(lacking)


class _Jail:
  """A process that runs jail.py on one job; RewardError if it cannot set up the sandbox or ends early.

  Args:
    job: 'solution', 'inputs' (None for tests) and 'output_bytes'.
  """

  def __init__(self, limits: SandboxLimits, **job) -> None:
    # A lone surrogate cannot be encoded in UTF-8; it becomes a question mark.
    job['solution'] = job['solution'].encode(errors='replace').decode()
    self._folder = tempfile.mkdtemp() if limits.insecure else None
    self._limits = limits
    self._received = bytearray()
    self._lines = 0
    self._job = {
      **job,
      **dataclasses.asdict(limits),
      'python': _python(),
      'path': _packages() if limits.packages else [],
      'binds': _binds(limits.packages),
      'folder': self._folder,
      'cgroups': _CGROUPS,
    }

  def __enter__(self) -> _Jail:
    self._process = subprocess.Popen(
      [_python(), '-sSP', '-m', 'jaxpost.workers.jail'],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      bufsize=0,
      # The only variable: nothing of this process's environment reaches the sandbox.
      env={'PYTHONPATH': str(pathlib.Path(__file__).resolve().parents[2])},
      start_new_session=True,  # A kill of this process's group must leave it the time to end its programs.
    )
    self.deadline = time.monotonic() + self._limits.timeout_s + _GRACE_S
    try:
      self._send(self._job)
      self.receive()
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *unused) -> None:
    self._process.terminate()  # supervisor.py then ends the programs.
    try:
      self._process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
      pipe.close()
    if self._folder:
      with contextlib.suppress(OSError):
        _remove(self._folder)

  def new_solution(self) -> Callable[[str], str | None]:
    """Starts the solution in a new process; returns a function that sends it a line and returns its answer."""
    self._send(None)
    return self._ask

  def _ask(self, line: str) -> str | None:
    self._send(line)
    return self.receive()['answer']

  def _send(self, value: object) -> None:
    """Writes a JSON line to the jail; if that has ended, the next `receive` raises."""
    data = memoryview(json.dumps(value).encode() + b'\n')
    while data:
      try:
        data = data[self._process.stdin.write(data) :]
      except BrokenPipeError:
        return

  def receive(self) -> dict:
    """Returns the next report of the jail; RewardError if it cannot go on or is silent until the deadline."""
    pipe = self._process.stdout.fileno()
    searched = 0
    while self._received.find(b'\n', searched) < 0:
      searched = len(self._received)
      remaining = self.deadline - time.monotonic()
      is_ready = remaining > 0 and select.select([pipe], [], [], remaining)[0]
      part = os.read(pipe, 1 << 16) if is_ready else b''
      if not part:
        self._process.kill()
        raise call.RewardError(
          f'the sandbox cannot be set up: it ended after {self._lines} lines{_read_stderr(self._process)}'
        )
      self._received += part
    line, _, self._received = self._received.partition(b'\n')
    report = json.loads(line)
    if 'setup' in report:
      raise call.RewardError(f'the sandbox cannot be set up: {report["setup"]}')
    self._lines += 1
    return report


def _remove(folder: str) -> None:
  """Removes a folder of any depth and permissions; OSError if a part of it has moved.

  Entries that cannot be removed stay. A program without isolation may have put links in it: none is followed.
  shutil.rmtree, which is recursive, would fail on deep folders.
  """
  parent, name = os.path.split(folder)
  current = os.open(parent, os.O_DIRECTORY)
  remaining = [[name]]  # for `parent` and each folder below it down to `current`: names that are still to be removed
  entered: list[tuple[str, os.stat_result]] = []  # (name, its parent) of each of these folders
  try:
    while remaining[0] or entered:
      if remaining[-1]:
        name = remaining[-1].pop()
        try:
          child = _open_folder(name, current)
        except OSError:
          with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=current)
          continue
        entered.append((name, os.fstat(current)))
        os.close(current)
        current = child
        remaining.append(_unlink_files(current))
        continue
      remaining.pop()
      name, expected = entered.pop()
      child, current = current, os.open('..', os.O_DIRECTORY, dir_fd=current)
      os.close(child)
      if not os.path.samestat(os.fstat(current), expected):
        raise OSError(f'{name} has moved')
      with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=current)
  finally:
    os.close(current)


def _open_folder(name: str, at: int) -> int:
  """Opens a folder in the folder `at` and gives its owner all permissions; OSError for a link or a file."""
  flags = os.O_DIRECTORY | os.O_NOFOLLOW
  if sys.platform != 'linux':
    os.chmod(name, 0o700, dir_fd=at, follow_symlinks=False)
    return os.open(name, flags, dir_fd=at)
  handle = os.open(name, os.O_PATH | flags, dir_fd=at)  # needs no permission; chmod cannot refuse links on Linux
  try:
    os.chmod(f'/proc/self/fd/{handle}', 0o700)
    return os.open(f'/proc/self/fd/{handle}', os.O_DIRECTORY)
  finally:
    os.close(handle)


def _unlink_files(folder: int) -> list[str]:
  """Removes the files and links in a folder; returns the names of the folders in it."""
  names = []
  with contextlib.suppress(OSError), os.scandir(folder) as entries:
    for entry in entries:
      if entry.is_dir(follow_symlinks=False):
        names.append(entry.name)
        continue
      with contextlib.suppress(OSError):
        os.unlink(entry.name, dir_fd=folder)
  return names


def _read_stderr(process: subprocess.Popen) -> str:
  """Returns ': ' and the end of stderr, or ''; never blocks."""
  pipe = process.stderr.fileno()
  if not select.select([pipe], [], [], 0)[0]:
    return ''
  text = os.read(pipe, 1 << 16).decode(errors='replace')
  return ': ' + ' '.join(text.split())[-300:] if text else ''


def _python() -> str:
  """Returns the path of the interpreter itself, not of the link to it in a virtual environment."""
  return os.path.realpath(sys.executable)


def _packages() -> list[str]:
  """Returns the site-packages folders of this interpreter."""
  return [p for p in sys.path if p.endswith('site-packages')]


def _binds(packages: bool) -> list[str]:
  """Returns the folders to mount for the interpreter, parents first, without those below a mounted one."""
  folders = {
    os.path.realpath(sys.base_prefix),
    sys.base_exec_prefix,
    os.path.dirname(_python()),
    os.path.dirname(os.__file__),
  }
  if packages:
    folders.update(_packages())
  binds: list[str] = []
  for path in sorted(folders):
    mounted = (*binds, '/usr', '/nix/store', '/gnu/store')
    if not path.startswith(tuple(f'{folder}/' for folder in mounted)):
      binds.append(path)
  return [path for path in binds if path not in ('/', '/usr')]
