"""Ends a run in which a process hangs or dies, and reports which process, and where.

If an operation of the main thread takes too long, the process ends and prints the stacks of all threads. Connected
processes also send each other heartbeats (`peers.py`). JAX itself notices dead processes but not stuck ones, and does
not name them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
  from jaxpost.distributed.peers import Peers

INTERVAL_S = 1.0  # seconds between two checks of the watching thread, and two heartbeats of a process
SLOW_S = 600.0  # lowest limit of operations that are not steps (compilation, evaluation, saving)
_BACKSTOP_S = 4.5  # seconds after the limit at which faulthandler ends the process, even if Python itself hangs
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = ('<', *(sysconfig.get_path(name) + os.sep for name in ('stdlib', 'purelib', 'platlib')))
# Modules in which this library waits for other processes or for devices.
_WAITING = tuple(f'{_HERE}distributed{os.sep}{name}.py' for name in ('channel', 'transfer', 'mesh'))
_JAX = f'{os.sep}jax{os.sep}', f'{os.sep}jaxlib{os.sep}'
# The exit code that belongs to the reason that this process has printed; empty until then.
_printed: list[int] = []


class _State:
  """State of the watchdog, shared by the main thread and the watching thread."""

  operation = 'the start'  # that the main thread is in
  since = 0.0  # its start by the monotonic clock
  limit = 0.0  # the seconds that it may take; 0 for no limit
  completes = False  # whether it is completed even if another process has failed
  peers: Peers | None = None  # the other processes; None in a run of one process
  thread: threading.Thread | None = None
  left = threading.Event()  # set when this process ends normally


def start_operation(operation: str, limit_s: float) -> None:
  """Sets the operation that the main thread is in from now on; the run ends if it takes `limit_s` (0: no limit)."""
  _State.operation = operation
  _State.since = time.monotonic()
  _State.limit = limit_s
  faulthandler.cancel_dump_traceback_later()
  if limit_s:
    _start()
    faulthandler.dump_traceback_later(limit_s + _BACKSTOP_S, exit=True, file=sys.__stderr__)


@contextlib.contextmanager
def slow_operation(operation: str, completes: bool = False) -> Iterator[None]:
  """Context, or decorator, for a part of a timed operation that takes longer, such as saving: it has at least `SLOW_S`.

  completes: whether it is completed even if another process has failed.
  """
  outer, limit = _State.operation, _State.limit
  start_operation(operation, max(SLOW_S, limit) if limit else 0.0)
  _State.completes = completes
  try:
    yield
  finally:
    _State.completes = False
    start_operation(outer, limit)


def pause() -> None:
  """Stops timing until the next `start_operation`."""
  _State.limit = 0.0
  faulthandler.cancel_dump_traceback_later()


def operation() -> str:
  """Returns the operation that the main thread is in."""
  return _State.operation


def watch_peers(peers: Peers) -> None:
  """Exchanges heartbeats with the other processes from now on, until `leave`."""
  _State.peers = peers
  _start()


def leave() -> bool:
  """Ends the watching thread when the process ends; returns False if it was ended before."""
  if _State.left.is_set():
    return False
  _State.left.set()
  if _State.thread:
    _State.thread.join(2 * INTERVAL_S)
  return True


def place() -> tuple[str, bool]:
  """Returns ('FILE:LINE in FUNCTION' of the main thread, whether it waits for JAX or for another process).

  If the main thread waits for a thread that runs a user's code (a reward), it is the place in that thread.
  """
  frames = sys._current_frames()
  inner, waits = _outside_libraries(frames.pop(threading.main_thread().ident, None))
  if inner is None:
    return 'no line of Python', waits
  if not waits and inner.f_code.co_filename.startswith(_HERE):
    others = [_outside_libraries(frame) for frame in frames.values()]
    in_user_code = [frame for frame, _ in others if frame and not frame.f_code.co_filename.startswith(_HERE)]
    inner = in_user_code[-1] if in_user_code else inner
    # The thread that reads rows together with other processes may wait for them.
    waits = not in_user_code and any(frame and frame.f_code.co_filename in _WAITING for frame, _ in others)
  code = inner.f_code
  return f'{code.co_filename}:{inner.f_lineno} in {code.co_name}', waits


def _outside_libraries(frame):
  """Returns (innermost frame outside of installed libraries, whether it has called JAX or waits for a process)."""
  waits = False
  while frame and (file := frame.f_code.co_filename).startswith(_LIBRARIES) and not file.startswith(_HERE):
    waits |= any(part in file for part in _JAX)
    frame = frame.f_back
  return frame, waits or bool(frame) and frame.f_code.co_filename in _WAITING


def _start():
  if _State.thread is None:
    _State.thread = threading.Thread(target=_watch, daemon=True)
    _State.thread.start()


def _watch():
  while not _State.left.wait(INTERVAL_S):
    if _State.limit and time.monotonic() - _State.since > _State.limit:
      end(_late())
    if _State.peers:
      _State.peers.exchange()
      # A main thread that waits for a device cannot see that another process failed.
      _State.peers.end_if_gone(also_failed=_State.limit > 0 and not _State.completes)


def _late() -> str:
  """Returns why this process is late: it is stuck itself, or waits for a process that is stuck."""
  at, waits = place()
  operation = _State.operation
  limit = f'for more than {_State.limit:g} s (config.log.watchdog_s)'
  if _State.peers:
    # The other processes will end, too: let them read this heartbeat before process 0 ends the service.
    _State.peers.exchange()
    time.sleep((1.5 if waits else 0.5) * INTERVAL_S)
  if not waits:
    return f'{name_of_process()} is stuck in {operation}, at {at}, {limit}'
  stuck = '; '.join(_State.peers.stuck() if _State.peers else [])
  return f'{name_of_process()} waits in {operation} for {stuck or f"its devices, at {at},"} {limit}'


def name_of_process() -> str:
  """Returns the index of this process, with its host and pid."""
  index = _State.peers.index if _State.peers else 0
  return f'process {index} on {socket.gethostname()} (pid {os.getpid()})'


def print_reason(message: str, code: int, stream: TextIO | None = None) -> int:
  """Prints a line about why this process ends, and returns the exit code to end with.

  While a process ends, the watchdog, a signal or an abort by JAX may have further reasons. Only the first is the cause:
  later ones are not printed, and the code of the first is returned.

  Args:
    stream: where the line is printed; None for file descriptor 2, for threads and signal handlers.
  """
  if not _printed:
    if stream is None:
      begin = '\r\x1b[K\x1b[?25h' if os.isatty(2) else ''  # removes a status line and shows the cursor
      os.write(2, f'{begin}jaxpost: {message}\n'.encode())
    else:
      print(f'jaxpost: {message}', file=stream, flush=True)
    _printed.append(code)
  return _printed[0]


def forget_reason() -> None:
  """Resets `print_reason` at the start of a command: a notebook or a test runs several in one process."""
  _printed.clear()


def end(text: str, code: int = 1, stacks: bool = True) -> None:
  """Prints the reason and all stacks, unless a reason was printed before, and ends the process, from any thread."""
  stacks &= not _printed
  code = print_reason(text, code)
  if stacks:
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
  os._exit(code)
