"""Runs programs written by a model in a sandbox; this is the outer, trusted side.

Threat model: the program is hostile. It must not read the user's files, variables or processes, reach the network,
outlive its time limit, or use more memory and disk than its limits. The sandbox consists of

  namespaces        user, mount, pid, network, ipc and uts, created without privileges (namespaces.py)
  file system       a new root with the system's and Python's files, read-only, and an empty working directory in memory
  credentials       an unprivileged user, no capabilities, no_new_privs
  resource limits   CPU and wall time, memory per process, processes, files, output (jail.py)

Not covered: the kernel is shared with the host; there is no seccomp filter; memory is limited per process, not in
total. With `insecure=True` only the resource limits apply.

For each solution a new process runs jail.py, which builds the sandbox and reports one JSON line per program. Only the
standard library is imported here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

from jaxpost.errors import InputError
from jaxpost.workers import call

_GRACE_S = 5.0  # seconds to start and end the sandbox, beyond the time limit of the programs
_OUTPUT = 1 << 20  # upper limit of `output_bytes`
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
    memory_mb: address space of each process.
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


def run_tests(solution: str, tests: Iterable[str], limits: SandboxLimits) -> list[bool]:
  """Runs each test (Python source) after the solution, in its namespace; returns which tests passed.

  Raises:
    RewardError: if the sandbox cannot be created.
  """
  lines = _run(limits, solution=solution, tests=list(tests), inputs=[], output_bytes=0)
  return [line['passed'] for line in lines]


def run_inputs(
  solution: str, inputs: Iterable[str], limits: SandboxLimits, output_bytes: int = _OUTPUT
) -> list[str | None]:
  """Runs the solution once per input, as a program; returns what it wrote to stdout for each text on stdin.

  The result is None where the program failed, took too long or printed more than `output_bytes` (at most 1 MiB). The
  expected output never enters the sandbox, so it cannot be copied from there.

  Raises:
    RewardError: if the sandbox cannot be created.
  """
  lines = _run(limits, solution=solution, tests=None, inputs=list(inputs), output_bytes=min(output_bytes, _OUTPUT))
  return [line['output'] for line in lines]


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


def _run(limits: SandboxLimits, **job) -> list[dict]:
  """Runs jail.py on a job; returns its report, one dict per program. RewardError if it could not finish."""
  count = len(job['inputs'] if job['tests'] is None else job['tests'])
  # A lone surrogate cannot be encoded in UTF-8; it becomes a question mark.
  job['solution'] = job['solution'].encode(errors='replace').decode()
  folder = tempfile.mkdtemp() if limits.insecure else None
  job = json.dumps(
    {
      **job,
      **dataclasses.asdict(limits),
      'python': _python(),
      'path': _packages() if limits.packages else [],
      'binds': _binds(limits.packages),
      'folder': folder,
    }
  )
  process = subprocess.Popen(
    [_python(), '-sSP', '-m', 'jaxpost.workers.jail'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    # The only variable: nothing of this process's environment reaches the sandbox.
    env={'PYTHONPATH': str(pathlib.Path(__file__).resolve().parents[2])},
  )
  try:
    process.stdin.write(job.encode())
    process.stdin.close()
    lines = _lines(process, time.monotonic() + limits.timeout_s + _GRACE_S)
  except BrokenPipeError:
    lines = []
  finally:
    process.kill()
    process.wait()
    stderr = _read_stderr(process)
    process.stdout.close()
    process.stderr.close()
    if folder:
      shutil.rmtree(folder, ignore_errors=True)
  setup = [line['setup'] for line in lines if 'setup' in line]
  if setup or len(lines) != 1 + count:
    why = (setup or [f'it ended after {len(lines)} of {1 + count} lines{stderr}'])[0]
    raise call.RewardError(f'the sandbox cannot be set up: {why}')
  return lines[1:]


def _lines(process: subprocess.Popen, deadline: float) -> list[dict]:
  """Reads the JSON lines on stdout until the process ends or the deadline passes."""
  pipe = process.stdout.fileno()
  data = b''
  while True:
    left = deadline - time.monotonic()
    if left <= 0 or not select.select([pipe], [], [], left)[0]:
      break
    part = os.read(pipe, 1 << 16)
    if not part:
      break
    data += part
  return [json.loads(line) for line in data.split(b'\n')[:-1]]


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
  wanted = {
    os.path.realpath(sys.base_prefix),
    sys.base_exec_prefix,
    os.path.dirname(_python()),
    os.path.dirname(os.__file__),
  }
  if packages:
    wanted.update(_packages())
  out = []
  for path in sorted(wanted):
    inside = (*out, '/usr', '/nix/store', '/gnu/store')
    if not path.startswith(tuple(f'{folder}/' for folder in inside)):
      out.append(path)
  return [path for path in out if path not in ('/', '/usr')]
