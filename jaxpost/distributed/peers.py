"""Heartbeats between the processes of a run: which one is gone, and what each was in.

Each process sends one to JAX's coordination service every second, with the operation that it is in. A process without
heartbeats is gone. Where an operation takes too long, its watchdog reads from them which process it waits for.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxpost.distributed import watchdog

_ROOT = 'jaxpost/beat/'
_QUICK = 3  # missed heartbeats: gone, where another failure is known already


class Peers:
  """The heartbeats of all processes, as this one knows them."""

  def __init__(self, client: Any, index: int, count: int, timeout_s: float, failure: Callable[[], Exception | None]):
    """See the class.

    Args:
      client: JAX's coordination service.
      index: of this process; count: of all processes.
      timeout_s: without heartbeats for so long, a process is gone.
      failure: () -> the exception that another process ended with, or None.
    """
    self.index = index
    self._client = client
    self._timeout_s = timeout_s
    self._failure = failure
    self._last: dict[int, dict] = {}  # {process: its last heartbeat}
    self._missed = dict.fromkeys(range(count), 0)  # {process: heartbeats since}
    self._sent = 0
    self._failed = 0  # heartbeats since another process failed

  def watch(self) -> None:
    """Starts sending heartbeats; names the process at fault where JAX aborts this one."""
    on_abort(lambda: self.gone(_QUICK) or self._suspect())
    watchdog.watch_peers(self)

  def leave(self) -> None:
    """Sends a final heartbeat, so that the others do not report this process as dead."""
    if watchdog.leave():
      with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has gone
        self._send({'left': True})

  def gone(self, beats: int) -> str:
    """Names a process that has missed `beats` heartbeats, in a sentence; '' if there is none."""
    for i, missed in sorted(self._missed.items()):
      if i != self.index and missed >= beats:
        last = self._last.get(i)
        was_in = f'; it was in {last["doing"]}, at {last["at"]}' if last else ''
        return f'{self._name(i)} is gone: not heard of for {missed * watchdog.INTERVAL_S:.0f} s{was_in}'
    return ''

  def who_is_gone(self) -> str:
    """Names the process behind a lost connection; waits until heartbeats are missed.

    '' if none is gone, or if another process failed with an error of its own.
    """
    end = time.monotonic() + (_QUICK + 2) * watchdog.INTERVAL_S
    while time.monotonic() < end:
      if text := self.gone(_QUICK):
        return text
      if self._failure():
        return ''
      time.sleep(watchdog.INTERVAL_S / 5)
    return ''

  def exchange(self) -> None:
    """Sends the heartbeat of this process and reads those of the others."""
    at, waits = watchdog.place()
    self._sent += 1
    doing, host = watchdog.operation(), socket.gethostname()
    try:
      self._send(dict(beat=self._sent, host=host, pid=os.getpid(), doing=doing, at=at, waits=waits))
      found = {int(key.removeprefix(_ROOT)): json.loads(text) for key, text in self._client.key_value_dir_get(_ROOT)}
    except jax.errors.JaxRuntimeError:  # the service is part of process 0
      found = {i: last for i, last in self._last.items() if i}
    for i in self._missed:
      last = found.get(i)
      new = last and (last.get('left') or last != self._last.get(i))
      # Counted in heartbeats of this process, not in seconds: a process that was
      # itself suspended has not waited for the others meanwhile.
      self._missed[i] = 0 if new else self._missed[i] + 1
      if last:
        self._last[i] = self._last.get(i, {}) | last

  def end_if_gone(self, also_failed: bool) -> None:
    """Ends this process if another one is gone, or, with `also_failed`, failed and this one does not notice it."""
    if text := self.gone(max(_QUICK, round(self._timeout_s / watchdog.INTERVAL_S))):
      watchdog.end(text)
    failure = self._failure() if also_failed else None
    self._failed = self._failed + 1 if failure else 0
    if self._failed >= 2 * _QUICK:
      code = vars(type(failure)).get('exit_code', 1)
      watchdog.end(str(failure), code, stacks=code == 1)

  def stuck(self) -> list[str]:
    """Returns a phrase for each other process that waits for none."""
    return [
      f'{self._name(i)}, which is stuck in {last["doing"]}, at {last["at"]}'
      for i, last in self._last.items()
      if i != self.index and not last.get('waits', True)
    ]

  def _send(self, heartbeat: dict) -> None:
    self._client.key_value_set(f'{_ROOT}{self.index}', json.dumps(heartbeat), allow_overwrite=True)

  def _name(self, i: int) -> str:
    last = self._last.get(i, {})
    return f'process {i}' + (f' on {last["host"]} (pid {last["pid"]})' if 'host' in last else '')

  def _suspect(self) -> str:
    """Why JAX ends this process: another one died, or the service of process 0 is gone."""
    at, waits = watchdog.place()
    me, doing = watchdog.name_of_process(), watchdog.operation()
    if not waits:
      return f'{me} is stuck in {doing}, at {at}; another one gave up'
    return f'{me} ends in {doing}: {self._name(0) if self.index else "another process"} is gone (JAX says so above)'


def on_abort(explain: Callable[[], str], stacks: bool = True) -> None:
  """Prints `explain()` before JAX ends this process by abort(), as it does when another one died.

  JAX's own callback cannot be used: it takes no Python function (std::bad_cast). Should the aborting thread deadlock
  with Python here, the limit of `watchdog.start_operation` ends the process.
  """

  def print_reason(signal_number):
    del signal_number
    watchdog.end(explain(), stacks=stacks)

  handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(print_reason)
  on_abort.keep = handler  # as long as the process lives
  ctypes.CDLL(None).signal(signal.SIGABRT, handler)
