"""Runs programs of a model in a sandbox: the side that is outside of it.

Linux namespaces (user, mount, pid, network, ipc, uts) made without privileges,
resource limits, a root that holds only the system's and Python's files,
read-only, and an empty working directory in memory. What is inside is in
jail.py. No jax, no package but the standard library.
"""

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

from jaxpost.errors import InputError
from jaxpost.workers import call

_GRACE_S = 5.0  # for starting and ending, beyond the programs' own time
_OUTPUT = 1 << 20  # bytes of output that are ever read
_ALLOW = (
  'allow user namespaces (Ubuntu 24: sysctl'
  ' kernel.apparmor_restrict_unprivileged_userns=0; Docker: --security-opt'
  ' seccomp=unconfined --security-opt systempaths=unconfined), or take the'
  ' risk with insecure=true'
)


@dataclasses.dataclass(frozen=True)
class Limits:
  """Of one program; memory of each of its processes."""

  timeout_s: float = 5.0  # wall clock, all tests of one solution together
  memory_mb: int = 512
  disk_mb: int = 64
  processes: int = 64
  packages: bool = False  # site-packages of this interpreter, read-only
  insecure: bool = False  # limits only, no namespaces


def run_tests(solution, tests, limits):
  """[bool]: which test (Python text) passed after the solution (the same)."""
  lines = _run(limits, solution=solution, tests=list(tests), inputs=[], output_bytes=0)
  return [line['passed'] for line in lines]


def run_inputs(solution, inputs, limits, output_bytes=_OUTPUT):
  """[text or None]: what the solution printed for each text on stdin.

  None where it failed, took too long or printed more than `output_bytes`, of
  which 1 MiB is the most. What should be printed is never inside.
  """
  lines = _run(limits, solution=solution, tests=None, inputs=list(inputs), output_bytes=min(output_bytes, _OUTPUT))
  return [line['output'] for line in lines]


def probe(limits):
  """InputError if no sandbox can be made here."""
  if not limits.insecure and sys.platform != 'linux':
    raise InputError('the sandbox needs Linux; run there, or take the risk with insecure=true')
  try:
    limits = dataclasses.replace(limits, timeout_s=max(limits.timeout_s, 10.0))
    right = run_tests('x = 2', ['assert x == 2', 'assert x == 3'], limits)
    shown = run_inputs('print(input())', ['\u00e4'], limits)
  except call.RewardError as error:
    hint = '' if limits.insecure else f'; {_ALLOW}'
    raise InputError(f'{error}{hint}') from error
  if right != [True, False] or shown != ['\u00e4\n']:
    raise InputError(f'the sandbox starts no Python within memory_mb={limits.memory_mb}: {right}, {shown}')


def _run(limits, **job):
  """The lines of jail.py; RewardError where it could not do its work."""
  count = len(job['inputs'] if job['tests'] is None else job['tests'])
  # A lone surrogate, which no file can hold, becomes a question mark.
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
    said = _last_words(process)
    process.stdout.close()
    process.stderr.close()
    if folder:
      shutil.rmtree(folder, ignore_errors=True)
  setup = [line['setup'] for line in lines if 'setup' in line]
  if setup or len(lines) != 1 + count:
    why = (setup or [f'it ended after {len(lines)} of {1 + count} lines{said}'])[0]
    raise call.RewardError(f'the sandbox cannot be set up: {why}')
  return lines[1:]


def _lines(process, deadline):
  """What it reports until it ends or the time is over."""
  pipe, data = process.stdout.fileno(), b''
  while True:
    left = deadline - time.monotonic()
    if left <= 0 or not select.select([pipe], [], [], left)[0]:
      break
    part = os.read(pipe, 1 << 16)
    if not part:
      break
    data += part
  return [json.loads(line) for line in data.split(b'\n')[:-1]]


def _last_words(process):
  pipe = process.stderr.fileno()
  if not select.select([pipe], [], [], 0)[0]:
    return ''
  text = os.read(pipe, 1 << 16).decode(errors='replace')
  return ': ' + ' '.join(text.split())[-300:] if text else ''


def _python():
  """The interpreter itself, not the link to it in a virtual environment."""
  return os.path.realpath(sys.executable)


def _packages():
  return [p for p in sys.path if p.endswith('site-packages')]


def _binds(packages):
  """Folders that the interpreter needs, parents before what they hold."""
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
