"""Calls a function on what a model wrote in a process of its own, which is killed when the call takes too long.

No signal interrupts a computation in C, such as that of 9 ** 9 ** 9, and a limit of memory is one of a process. The
process is a fork, made at the first call and again after a kill; calls and results are JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxpost.workers import call, namespaces

LATE = object()  # the result of a call that took too long, or too much memory
_LIMIT_S = 5.0  # of one call
_LEAST_S = 0.1
_MEMORY = 8 << 30  # bytes of address space
_BUGS = ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError


class Bounded:
  """A function whose calls end within their time; arguments and results are what JSON can carry.

  Args:
    function: raises RewardError where there is no verdict on any completion.
  """

  def __init__(self, function: Callable[..., float | None]) -> None:
    self._function = function
    self._pid = self._owner = 0
    self._channel: socket.socket | None = None

  def each(self, rows: Sequence[tuple], time_limit_s: float | None = None) -> list[Any]:
    """Returns the result of each row, or LATE: after 5 s, or its share of what is left of 0.8 `time_limit_s`."""
    end = time.monotonic() + 0.8 * (time_limit_s or float('inf'))
    results = []
    for i, row in enumerate(rows):
      share = (end - time.monotonic()) / (len(rows) - i)
      results.append(self._call(row, max(min(_LIMIT_S, share), _LEAST_S)))
    return results

  def close(self) -> None:
    """Ends the process; the next call starts one."""
    if self._pid and self._owner == os.getpid():  # and not in a fork of this process
      os.kill(self._pid, signal.SIGKILL)
      os.waitpid(self._pid, 0)
      self._channel.close()
    self._pid = 0

  __del__ = close

  def _call(self, row: tuple, limit_s: float) -> Any:
    if not self._pid or self._owner != os.getpid():
      self._start()
    deadline = time.monotonic() + limit_s
    line = bytearray()
    try:
      self._channel.settimeout(limit_s)
      self._channel.sendall(json.dumps(row).encode() + b'\n')
      while not line.endswith(b'\n'):
        self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (part := self._channel.recv(1 << 16)):
          raise ConnectionResetError  # The kernel has killed it.
        line += part
    except OSError:
      self.close()
      return LATE
    kind, value = json.loads(line)
    if kind == 'error':
      raise call.RewardError(value)
    return LATE if kind == 'late' else value

  def _start(self) -> None:
    self._channel, theirs = socket.socketpair()
    self._owner = os.getpid()
    self._pid = os.fork()
    if not self._pid:
      self._serve(theirs)
    theirs.close()

  def _serve(self, channel: socket.socket) -> NoReturn:
    """Answers calls in the forked process, until its owner ends."""
    try:
      namespaces.die_with_parent()
      self._channel.close()
      with contextlib.suppress(ValueError, OSError):  # The limit is lower already.
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
      for line in channel.makefile('rb'):
        channel.sendall(json.dumps(self._answer(json.loads(line))).encode() + b'\n')
    finally:
      os._exit(1)

  def _answer(self, row: list) -> tuple[str, Any]:
    try:
      return 'value', self._function(*row)
    except call.RewardError as error:
      return 'error', str(error)
    except (MemoryError, RecursionError):
      return 'late', None
    except _BUGS as error:
      return 'error', call.describe(error)


def scores(
  function: Bounded, rows: Sequence[tuple], name: str, time_limit_s: float | None, log_metric: Callable | None
) -> list[float | None]:
  """Returns the result of each row, 0 where it is late, and logs the fraction of these."""
  results = function.each(rows, time_limit_s)
  if log_metric:
    log_metric(name, results.count(LATE) / len(rows))
  return [0.0 if result is LATE else result for result in results]
