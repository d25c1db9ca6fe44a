"""Calls a function on text of a model in a separate process, which is killed if the call takes too long.

No signal interrupts a computation in C, such as 9 ** 9 ** 9, and the system limits memory by process. The
process is a fork, made at the first call and again after a kill; calls and results are JSON lines.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxpost.workers import call, namespaces, user_code

LATE = object()  # the result of a call that took too long, or too much memory
_LIMIT_S, _MIN_S = 5.0, 0.1  # longest and shortest time limit of one call, in seconds
_MEMORY = 8 << 30  # bytes of address space


class Bounded:
  """A function whose calls end within their time; arguments and results must be JSON values.

  Any exception of the function becomes a RewardError here, except that a call without enough memory or stack is LATE.

  Args:
    function: raises RewardError if there can be no verdict on any completion.
  """

  def __init__(self, function: Callable[..., float | None]) -> None:
    self._function = function
    self._pid = self._owner = 0
    self._channel: socket.socket | None = None

  def each(self, rows: Sequence[tuple], time_limit_s: float | None = None) -> list[Any]:
    """Calls the function on each row; returns the results, LATE where a call was ended.

    All calls together get 80 % of `time_limit_s`. A call is ended after 5 s, or sooner: after an equal part of the time
    that is left to it and the calls after it.
    """
    end = end_of(time_limit_s)
    return [self.ask(row, share(end, len(rows) - i)) for i, row in enumerate(rows)]

  def ask(self, row: tuple, limit_s: float) -> Any:
    """Returns the result of one call, LATE if it was ended after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    try:
      answer = self._exchange(row, deadline)
    except ConnectionError:  # The process had ended before it read the row, so the row is not the cause.
      self.close()
      answer = self._exchange(row, deadline)
    kind, value = answer
    if kind == 'error':
      raise call.RewardError(value)
    return LATE if kind == 'late' else value

  def close(self) -> None:
    """Ends the process; the next call starts one."""
    if self._pid and self._owner == os.getpid():  # A fork of this process must not end it.
      os.kill(self._pid, signal.SIGKILL)
      os.waitpid(self._pid, 0)
      self._channel.close()
    self._pid = 0

  __del__ = close

  def _exchange(self, row: tuple, deadline: float) -> list:
    """Sends a row and returns the answer; ConnectionError if the process had ended before it read the row."""
    if not self._pid or self._owner != os.getpid():
      self._start()
    received = bytearray()  # the process sends an empty line when it has read the row, then the answer
    try:
      self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
      self._channel.sendall(json.dumps(row).encode() + b'\n')
      while received.count(b'\n') < 2:
        self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (part := self._channel.recv(1 << 16)):
          # The process has ended. If it had read the row, the kernel has killed it for its memory.
          raise TimeoutError if received else ConnectionResetError
        received += part
    except TimeoutError:
      self.close()
      return ['late', None]
    return json.loads(received)

  def _start(self) -> None:
    self._channel, child_channel = socket.socketpair()
    self._owner = os.getpid()
    self._pid = os.fork()
    if not self._pid:
      self._serve(child_channel)
    child_channel.close()

  def _serve(self, channel: socket.socket) -> NoReturn:
    """Answers calls in the forked process, until its owner ends."""
    try:
      namespaces.die_with_parent()
      self._channel.close()
      with contextlib.suppress(ValueError, OSError):  # The limit is lower already.
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
      for line in channel.makefile('rb'):
        channel.sendall(b'\n')
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
    except BaseException as error:  # An error is no verdict, and must not become a reward of 0.
      return 'error', user_code.describe(error)


def end_of(time_limit_s: float | None) -> float:
  """Returns the time.monotonic() at which calls within a time limit have to end."""
  return time.monotonic() + 0.8 * (time_limit_s or float('inf'))


def share(end: float, calls: int) -> float:
  """Returns the time limit of the next call in seconds, if it and `calls` - 1 more have to end at `end`."""
  return max(min(_LIMIT_S, (end - time.monotonic()) / calls), _MIN_S)


def scores(
  function: Bounded, rows: Sequence[tuple], name: str, time_limit_s: float | None, log_metric: Callable | None
) -> list[float | None]:
  """Returns the result of each row, 0 for late ones, and logs the fraction of late rows as `name`."""
  results = function.each(rows, time_limit_s)
  if log_metric:
    log_metric(name, results.count(LATE) / len(rows))
  return [0.0 if result is LATE else result for result in results]
