"""Child processes: their devices and variables, a test file that runs as one, and how long they wait for a core."""

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable

CLONE = pathlib.Path(__file__).resolve().parents[1]
PATH = os.pathsep.join(map(str, (CLONE, CLONE / 'tests')))


def environment(devices: int = 1, **more: str) -> dict[str, str]:
  """Returns the variables of a child process with this many virtual CPU devices.

  Args:
    devices: what `jax.devices()` has there.
    more: further variables, which win.
  """
  flags = os.environ.get('XLA_FLAGS', '').split()
  kept = [flag for flag in flags if not flag.startswith('--xla_force_host_platform_device_count')]
  count = f'--xla_force_host_platform_device_count={devices}'
  return os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': PATH, 'XLA_FLAGS': ' '.join([*kept, count])} | more


def run(file: str, *arguments: str, devices: int = 1, timeout: int = 400, **more: str) -> subprocess.CompletedProcess:
  """Runs a test file as a script with `environment(devices, **more)`; fails with the end of its stderr.

  Args:
    file: the test file, or '-c', with the program as the first of the `arguments`.

  Returns:
    The process, with `stdout` and `stderr` as text.
  """
  done = subprocess.run(
    [sys.executable, file, *arguments],
    capture_output=True,
    text=True,
    timeout=timeout,
    cwd=CLONE,
    env=environment(devices, **more),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done


class RunDelay:
  """How long a thread of some processes has waited for a core since this was made.

  What has to happen within some seconds may happen later by that on a busy machine.
  """

  def __init__(self, pids: Iterable[int]):
    self._pids = list(pids)
    self._first = self._read()
    self._longest = 0.0

  def seconds(self) -> float:
    """Returns the most of all threads so far; 0 if it is unknown."""
    waited = [ns - self._first.get(task, 0) for task, ns in self._read().items()]
    self._longest = max(self._longest, *(ns / 1e9 for ns in waited), 0.0)
    return self._longest

  def _read(self) -> dict[pathlib.Path, int]:
    found = {}
    for pid in self._pids:
      for task in pathlib.Path(f'/proc/{pid}/task').glob('*'):
        with contextlib.suppress(OSError, IndexError, ValueError):
          found[task] = int((task / 'schedstat').read_text().split()[1])
    return found
