"""Runs the rows of `rows.py` in a separate process, and survives its failures.

It imports no JAX: a device that hangs or a compiler that aborts ends the worker, not the measurement.
"""

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxpost.tools.accelerator import rows as rows_lib

_GRACE = 60.0  # seconds for a row to end by itself after its limit
_START = 300.0  # seconds until a worker has found the devices


def run(
  out: str, budget: float, names: str = '', tiny: bool = False, traces: str = '', say: Callable[[str], None] = print
) -> int:
  """Measures the chosen rows and appends a line of JSON to `out` as each ends.

  A line has 'row', 'seconds' (wall time) and either the figures, or 'error', or 'skipped' with the reason.

  Args:
    budget: seconds for all rows; no row is started after them.
    names: see `rows.chosen`.
    tiny: measure at sizes for CPUs, which only tests that the code runs.
    traces: folder that keeps the profile of each row; '': none are kept.
    say: called with a line of text for each row.

  Returns:
    The number of rows with an error.
  """
  remaining = list(rows_lib.chosen(names))
  end = time.monotonic() + budget
  failed = 0
  pathlib.Path(out).parent.mkdir(parents=True, exist_ok=True)
  with open(out, 'a', encoding='utf-8') as file:

    def write(line: dict[str, Any]) -> None:
      file.write(json.dumps(line) + '\n')
      file.flush()
      os.fsync(file.fileno())
      state = line.get('error') or line.get('skipped') or 'done'
      say(f'{line["row"]}: {state} ({line.get("seconds", 0)} s)')

    while remaining and time.monotonic() < end:
      for line in _worker(remaining, end, tiny, traces):
        remaining.remove(line['row'])
        failed += 'error' in line
        write(line)
    for name in remaining:
      write(dict(row=name, skipped='the budget is used up'))
  return failed


def _worker(names: list[str], end: float, tiny: bool, traces: str) -> Iterator[dict[str, Any]]:
  """Starts a worker and yields the lines of the rows that ended in it, at least one."""
  read, write = os.pipe()
  options = dict(pipe=write, tiny=tiny, traces=traces, end=end)
  command = [sys.executable, '-m', 'jaxpost.tools.accelerator.worker', json.dumps(options), *names]
  process = subprocess.Popen(command, stdout=sys.stderr, pass_fds=(write,), start_new_session=True)
  os.close(write)
  began = time.monotonic()
  running = names[0]
  limit = min(began + _START, end)
  messages = _Messages(read)
  try:
    while (message := messages.next(limit)) is not None:
      began = time.monotonic()
      running = message.get('begin', '')
      limit = min(began + _GRACE + (rows_lib.ROWS[running].seconds if running else 0), end)
      if not running:
        yield message
    timed_out = time.monotonic() >= limit
  finally:
    messages.close()
    if process.poll() is None:
      _end(process)
  if running:
    code = process.wait()
    seconds = time.monotonic() - began
    error = f'gave no result in {seconds:.0f} s' if timed_out else f'its process ended with code {code}'
    yield dict(row=running, seconds=round(seconds, 1), error=error)


class _Messages:
  """The JSON lines that arrive at a pipe."""

  def __init__(self, fd: int):
    self._fd, self._buffer = fd, b''

  def next(self, until: float) -> dict[str, Any] | None:
    """Returns the next line; None if the pipe is closed or `time.monotonic` reaches `until`."""
    while b'\n' not in self._buffer:
      ready, _, _ = select.select([self._fd], [], [], max(0.0, until - time.monotonic()))
      chunk = os.read(self._fd, 65536) if ready else b''
      if not chunk:
        return None
      self._buffer += chunk
    line, _, self._buffer = self._buffer.partition(b'\n')
    return json.loads(line)

  def close(self) -> None:
    os.close(self._fd)


def _end(process: subprocess.Popen) -> None:
  """Ends a worker and its children: by SIGTERM, so that it can close its devices, then by SIGKILL."""
  for sign, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 30)):
    try:
      os.killpg(process.pid, sign)
      process.wait(patience)
      return
    except ProcessLookupError:
      return
    except subprocess.TimeoutExpired:
      continue
