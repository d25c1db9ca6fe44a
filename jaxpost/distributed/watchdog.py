"""Ends a run in which a process hangs or dies, and says which one and where.

Each process sends a heartbeat to JAX's coordination service every second, with the operation that it is in. A process
without heartbeats is gone; one whose operation takes too long is stuck. JAX itself notices dead processes but never
stuck ones, and names neither.

  start_operation('step 3 of sft', 60.0)   the main thread: at most a minute
  pause()                                  no operation is timed
"""

import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

HEARTBEAT_S = 1.0  # interval between two heartbeats of a process
_ROOT = 'jaxpost/beat/'
_QUICK = 3  # missed heartbeats: gone, where another failure is known already
_BACKSTOP_S = 4.5  # then faulthandler ends the process: Python itself may hang
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (
  '<',
  sysconfig.get_path('stdlib') + os.sep,
  sysconfig.get_path('purelib') + os.sep,
  sysconfig.get_path('platlib') + os.sep,
)
# Modules in which this library waits for other processes and for devices.
_WAITING = (
  f'{_HERE}distributed{os.sep}coordination.py',
  f'{_HERE}distributed{os.sep}transfer.py',
  f'{_HERE}distributed{os.sep}mesh.py',
)
_JAX = f'{os.sep}jax{os.sep}', f'{os.sep}jaxlib{os.sep}'
# The exit code of the reason that this process has printed; empty before.
_printed: list[int] = []


class _State:
  """State of the watchdog, shared by the main thread and the watching thread.

  operation, since, limit: what the main thread is in, its start by the
    monotonic clock, and the seconds it may take (0: any).
  client: JAX's coordination service; None in a run of one process.
  failure: () -> the exception that another process ended with, or None.
  index, count: of this process, and how many there are.
  timeout: seconds without heartbeats after which a process is gone.
  last: {process: its last heartbeat}; missed: {process: heartbeats since}.
  sent: heartbeats sent so far. left: set once this process ends normally.
  """

  operation = 'the start'
  since = 0.0
  limit = 0.0
  client: Any = None
  failure: Callable[[], Exception | None] | None = None
  thread: threading.Thread | None = None
  index = 0
  count = 1
  timeout = 0.0
  last: dict[int, dict] = {}
  missed: dict[int, int] = {}
  sent = 0
  left = threading.Event()


def start_operation(operation: str, limit_s: float) -> None:
  """Names what the main thread does from now on; the run ends after `limit_s` of it (0: never)."""
  _State.operation = operation
  _State.since = time.monotonic()
  _State.limit = limit_s
  faulthandler.cancel_dump_traceback_later()
  if limit_s:
    _start()
    faulthandler.dump_traceback_later(limit_s + _BACKSTOP_S, exit=True, file=sys.__stderr__)


def pause() -> None:
  """Stops timing, until the next `start_operation`."""
  _State.limit = 0.0
  faulthandler.cancel_dump_traceback_later()


def watch_peers(client: Any, index: int, count: int, timeout_s: float, failure: Callable[[], Exception | None]) -> None:
  """Exchanges heartbeats with the other processes from now on.

  Args:
    client: JAX's coordination service.
    index: of this process; count: of all processes.
    timeout_s: without heartbeats for so long, a process is gone.
    failure: () -> the exception that another process ended with, or None.
  """
  _State.client = client
  _State.failure = failure
  _State.index = index
  _State.count = count
  _State.timeout = timeout_s
  _State.missed = dict.fromkeys(range(count), 0)
  on_abort(lambda: gone(_QUICK) or _suspect())
  _start()


def leave() -> None:
  """Sends a final heartbeat, so that peers do not report this process as dead."""
  import jax

  if _State.client is not None and not _State.left.is_set():
    _State.left.set()
    _State.thread.join(2 * HEARTBEAT_S)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has gone
      _send({'left': True})


def gone(beats: int) -> str:
  """Names a process that has missed `beats` heartbeats, in a sentence; '' if there is none."""
  for i, missed in sorted(_State.missed.items()):
    if i != _State.index and missed >= beats:
      last = _State.last.get(i)
      was_in = f'; it was in {last["doing"]}, at {last["at"]}' if last else ''
      return f'{_name(i)} is gone: not heard of for {missed * HEARTBEAT_S:.0f} s{was_in}'
  return ''


def who_is_gone() -> str:
  """Names the process behind a lost connection; waits until heartbeats are missed.

  '' if none is gone, or if another process failed with an error of its own.
  """
  end = time.monotonic() + (_QUICK + 2) * HEARTBEAT_S
  while time.monotonic() < end:
    if text := gone(_QUICK):
      return text
    if _State.failure and _State.failure():
      return ''
    time.sleep(HEARTBEAT_S / 5)
  return ''


def place() -> tuple[str, bool]:
  """('FILE:LINE in FUNCTION' of the main thread, whether it waits for JAX).

  Where it waits for a thread that runs a user's code (a reward), the place in that thread.
  """
  frames = sys._current_frames()
  inner, waits = _own(frames.pop(threading.main_thread().ident, None))
  if inner is None:
    return 'no line of Python', waits
  if not waits and inner.f_code.co_filename.startswith(_HERE):
    for frame in frames.values():
      other, _ = _own(frame)
      if other and not other.f_code.co_filename.startswith(_HERE):
        inner = other
  code = inner.f_code
  return f'{code.co_filename}:{inner.f_lineno} in {code.co_name}', waits


def _own(frame):
  """(innermost frame outside of installed libraries, whether a frame of JAX is below it)."""
  waits = False
  while frame and _of_library(frame.f_code.co_filename):
    waits |= any(part in frame.f_code.co_filename for part in _JAX)
    frame = frame.f_back
  return frame, waits or bool(frame) and frame.f_code.co_filename in _WAITING


def _of_library(file: str) -> bool:
  return file.startswith(_LIBRARIES) and not file.startswith(_HERE)


# --------------------------------------------------------- the watching thread


def _start():
  if _State.thread is None:
    _State.thread = threading.Thread(target=_watch, daemon=True)
    _State.thread.start()


def _watch():
  failed = 0
  while not _State.left.wait(HEARTBEAT_S):
    if _State.limit and time.monotonic() - _State.since > _State.limit:
      _end(_late())
    if _State.client is None:
      continue
    _exchange()
    if text := gone(max(_QUICK, round(_State.timeout / HEARTBEAT_S))):
      _end(text)
    # A main thread that waits for a device cannot see that another process failed.
    failure = _State.limit and _State.failure()
    failed = failed + 1 if failure else 0
    if failed >= 2 * _QUICK:
      code = vars(type(failure)).get('exit_code', 1)
      _end(str(failure), code, stacks=code == 1)


def _exchange():
  """Sends this process's heartbeat and reads those of the others."""
  import jax

  at, waits = place()
  _State.sent += 1
  try:
    _send(
      dict(beat=_State.sent, host=socket.gethostname(), pid=os.getpid(), doing=_State.operation, at=at, waits=waits)
    )
    found = {int(key.removeprefix(_ROOT)): json.loads(text) for key, text in _State.client.key_value_dir_get(_ROOT)}
  except jax.errors.JaxRuntimeError:  # the service is part of process 0
    found = {i: last for i, last in _State.last.items() if i}
  for i in _State.missed:
    last = found.get(i)
    new = last and (last.get('left') or last != _State.last.get(i))
    # Counted in heartbeats of this process, not in seconds: a process that was
    # itself suspended has not waited for the others meanwhile.
    _State.missed[i] = 0 if new else _State.missed[i] + 1
    if last:
      _State.last[i] = _State.last.get(i, {}) | last


def _send(heartbeat: dict):
  _State.client.key_value_set(f'{_ROOT}{_State.index}', json.dumps(heartbeat), allow_overwrite=True)


def _name(i: int) -> str:
  last = _State.last.get(i, {})
  return f'process {i}' + (f' on {last["host"]} (pid {last["pid"]})' if 'host' in last else '')


def _late() -> str:
  """Why this process is late: it is stuck itself, or waits for a process that is."""
  at, waits = place()
  operation = _State.operation
  limit = f'for more than {_State.limit:g} s (config.log.watchdog_s)'
  if _State.client is not None:
    # The others come to the same end: give them time to read this heartbeat,
    # as the service ends with process 0.
    _exchange()
    time.sleep((1.5 if waits else 0.5) * HEARTBEAT_S)
  if not waits:
    return f'{_me()} is stuck in {operation}, at {at}, {limit}'
  stuck = [
    f'{_name(i)}, which is stuck in {last["doing"]}, at {last["at"]}'
    for i, last in _State.last.items()
    if i != _State.index and not last.get('waits', True)
  ]
  return f'{_me()} waits in {operation} for ' + ('; '.join(stuck) or f'its devices, at {at},') + f' {limit}'


def _me() -> str:
  return f'process {_State.index} on {socket.gethostname()} (pid {os.getpid()})'


def _suspect() -> str:
  """Why JAX ends this process: another one died, or the service of process 0 is gone."""
  at, waits = place()
  if not waits:
    return f'{_me()} is stuck in {_State.operation}, at {at}; another one gave up'
  return (
    f'{_me()} ends in {_State.operation}: {_name(0) if _State.index else "another process"} is gone (JAX says so above)'
  )


def print_reason(message: str, code: int, stream: TextIO | None = None) -> int:
  """Prints the one line that says why this process ends, and returns the exit code to end with.

  While a process ends, the watchdog, a signal or an abort by JAX may find a reason of
  their own; only the first is the cause, so a later one is not printed and its code does not count.

  Args:
    stream: where the line goes; None: file descriptor 2, for threads and signal handlers.
  """
  if not _printed:
    if stream is None:
      os.write(2, f'jaxpost: {message}\n'.encode())
    else:
      print(f'jaxpost: {message}', file=stream, flush=True)
    _printed.append(code)
  return _printed[0]


def forget_reason() -> None:
  """At the start of a command: a notebook or a test runs several in one process."""
  _printed.clear()


def _end(text: str, code: int = 1, stacks: bool = True):
  """Prints the reason and all stacks, unless a reason was printed, then ends the process.

  In the watching thread an exception would reach no caller.
  """
  stacks &= not _printed
  code = print_reason(text, code)
  if stacks:
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
  os._exit(code)


@functools.cache
def _libc():
  return ctypes.CDLL(None)


def on_abort(explain: Callable[[], str], stacks: bool = True) -> None:
  """Prints `explain()` before JAX ends this process by abort(), as it does when another one died.

  JAX's own callback cannot be used: it takes no Python function (std::bad_cast). Should the aborting thread deadlock
  with Python here, the limit of `start_operation` ends the process.
  """

  def print_reason(signal_number):
    del signal_number
    _end(explain(), stacks=stacks)

  handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(print_reason)
  on_abort.keep = handler  # as long as the process lives
  _libc().signal(signal.SIGABRT, handler)
