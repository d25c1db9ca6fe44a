"""Handles the signals that tell a run to save and to end."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from jaxpost.errors import Preempted

_INSISTS_S = 1.0  # seconds after which Ctrl-C counts as a second one: a signal may come twice within milliseconds
_CHECK_S = 0.05  # seconds between two checks of the watching thread


class StopSignal:
  """On SIGTERM, SIGINT and SIGHUP, the run saves after the current step and ends with exit code 42.

  The handlers set a flag that the run checks between steps, and raise nothing in the code that a signal interrupts.
  Signals after the first have no effect, except that SIGINT (Ctrl-C) at least a second later ends the process without
  saving. In a command, the second counts to the arrival of the signal, and not to its handler, which waits for C code.
  An ignored SIGHUP (nohup) stays ignored.

  Attributes:
    received: the first signal, or None.
    unsaved: whether there are steps that no checkpoint has yet.
    end: ends the process with (exit code, message), from any thread.
  """

  def __init__(self, exit_after_s: float = 0.0):
    """See the class.

    Args:
      exit_after_s: for a command: seconds after a signal, or after the save that follows it, at which a thread ends the
        process if no step is unsaved, as compilation does not check the flag. The process then ignores further signals
        until its end. 0 for neither, as in a notebook.
    """
    self.received: int | None = None
    self.unsaved = False
    self.end: Callable[[int, str], None] = _end
    self._exit_after_s = exit_after_s
    self._old: dict[int, Any] = {}
    self._since = 0.0  # the time of the first signal
    self._terminals: list[int] = []
    self._left = threading.Event()

  def __enter__(self) -> StopSignal:
    self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
    self.install()
    if self._exit_after_s:
      reader, writer = os.pipe()
      os.set_blocking(writer, False)
      signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # gets signals even while the main thread is in C code
      threading.Thread(target=self._end_if_stuck, args=(reader,), daemon=True).start()
    return self

  def install(self) -> None:
    """Sets the handlers; called again after a library (jax.distributed) may have set its own."""
    if threading.current_thread() is not threading.main_thread():
      return  # Python allows it only in the main thread, so a run in another thread receives no signals
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
      old = signal.getsignal(number)
      if not (number == signal.SIGHUP and old is signal.SIG_IGN):
        signal.signal(number, self._note)
        self._old.setdefault(number, old)

  def __exit__(self, kind: type | None, *_: object) -> None:
    self._left.set()
    for number, handler in self._old.items():
      signal.signal(number, signal.SIG_IGN if self._exit_after_s else handler)
    if kind is None and self.received and not self._exit_after_s:  # received after the last call of `reached`
      signal.raise_signal(self.received)

  def _note(self, number: int, frame: object) -> None:
    del frame
    now = time.monotonic()
    if self.received is None:
      self.received, self._since = number, now
    elif number == signal.SIGINT and not self._exit_after_s and now > self._since + _INSISTS_S:
      signal.signal(number, self._old[number])
      signal.raise_signal(number)
    if number == signal.SIGHUP:  # the terminal is gone, and writing to it would raise
      for fd in self._terminals:
        os.dup2(os.open(os.devnull, os.O_WRONLY), fd)

  def _end_if_stuck(self, reader: int) -> None:
    """Ends the process if the main thread does not end it in time after a signal, or after a second Ctrl-C."""
    while not {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} & set(os.read(reader, 4096)):
      pass
    first = saved_at = last_check = time.monotonic()
    while not self._left.wait(_CHECK_S):
      now = time.monotonic()
      arrived = os.read(reader, 4096) if select.select([reader], [], [], 0)[0] else b''
      if signal.SIGINT in arrived and last_check > first + _INSISTS_S:  # it arrived after `last_check`
        self.end(128 + signal.SIGINT, 'interrupted again; steps after the last checkpoint are lost')
      last_check = now
      if self.unsaved:
        saved_at = now
      elif now > saved_at + self._exit_after_s:
        self.end(Preempted.exit_code, 'told to stop, no step is lost; run the same command to go on')

  def reached(self) -> bool:
    """Returns True on all processes once one has received a signal; called once per step. Does not wait for devices."""
    from jaxpost.distributed import coordination

    return coordination.any_process(self.received is not None)

  def check(self, where: str) -> None:
    """Raises Preempted on all processes once one has received a signal; called if no step is unsaved."""
    if self.reached():
      self.leave(where, 'no step is lost')

  def leave(self, where: str, saved: str) -> NoReturn:
    """Raises Preempted, on a process that has no unsaved step."""
    self.unsaved = False
    raise Preempted(f'{where}: told to stop, {saved}; run the same command to go on')


def _end(code: int, message: str) -> None:
  from jaxpost.distributed import watchdog

  os._exit(watchdog.print_reason(message, code))
