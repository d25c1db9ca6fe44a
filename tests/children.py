"""Child processes: their variables and devices, running a test file as a script, and how long they wait for a core."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterable

CLONE = pathlib.Path(__file__).resolve().parents[1]
PATH = os.pathsep.join(map(str, (CLONE, CLONE / 'tests')))


def environment(devices: int = 1, **variables: str) -> dict[str, str]:
  """Returns the variables of a child process with this many virtual CPU devices.

  Args:
    devices: length of `jax.devices()` in the child process.
    variables: further environment variables, which override the others.
  """
  flags = os.environ.get('XLA_FLAGS', '').split()
  other_flags = [flag for flag in flags if not flag.startswith('--xla_force_host_platform_device_count')]
  device_count = f'--xla_force_host_platform_device_count={devices}'
  flags = ' '.join([*other_flags, device_count])
  return os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': PATH, 'XLA_FLAGS': flags} | variables


def run(file: str, *arguments: str, devices: int = 1, timeout: int = 400, **more: str) -> subprocess.CompletedProcess:
  """Runs a test file as a script with `environment(devices, **more)`; asserts success, showing the end of its stderr.

  Args:
    file: the test file, or '-c', with the program as the first of the `arguments`.

  Returns:
    The finished process, with `stdout` and `stderr` as text.
  """
  process = subprocess.run(
    [sys.executable, file, *arguments],
    capture_output=True,
    text=True,
    timeout=timeout,
    cwd=CLONE,
    env=environment(devices, **more),
  )
  assert process.returncode == 0, process.stderr[-3000:]
  return process


def printed(file: str, *arguments: str, **options):
  """Returns what the last line of `run` with these arguments says as JSON."""
  return json.loads(run(file, *arguments, **options).stdout.splitlines()[-1])


def free_address() -> str:
  """Returns the host and a free port of this machine, at which processes can meet."""
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    return f'localhost:{probe.getsockname()[1]}'


class RunDelay:
  """How long the threads of some processes have waited for a core since this object was made.

  Tests add this delay to their deadlines, because a busy machine postpones everything by about as much.
  """

  def __init__(self, pids: Iterable[int]):
    self._pids = list(pids)
    self._start = self._read()
    self._longest = 0.0

  def seconds(self) -> float:
    """Returns the longest wait of any thread so far; 0 if it is unknown."""
    waits = [ns - self._start.get(task, 0) for task, ns in self._read().items()]
    self._longest = max(self._longest, *(ns / 1e9 for ns in waits), 0.0)
    return self._longest

  def _read(self) -> dict[pathlib.Path, int]:
    """Returns the nanoseconds that each thread has waited on a run queue: the second field of its schedstat."""
    delays = {}
    for pid in self._pids:
      for task in pathlib.Path(f'/proc/{pid}/task').glob('*'):
        with contextlib.suppress(OSError, IndexError, ValueError):
          delays[task] = int((task / 'schedstat').read_text().split()[1])
    return delays
