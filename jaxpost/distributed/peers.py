"""Heartbeats between the processes of a run show which process is gone, and the operation that each is in.

Each process sends a heartbeat to JAX's coordination service every second, with the operation that it is in. A process
without heartbeats is gone. If an operation takes too long, the watchdog reads from them which process it waits for.
"""

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
_QUICK = 3  # missed heartbeats after which a process is gone if another failure is already known


class Peers:
  """The heartbeats of all processes, as this one knows them.

  Args:
    client: JAX's coordination service.
    timeout_s: seconds without a heartbeat after which a process is gone.
    failure: () -> the exception that another process has ended with, or None.
  """

  def __init__(self, client: Any, index: int, count: int, timeout_s: float, failure: Callable[[], Exception | None]):
    self.index = index
    self._client = client
    self._timeout_s = timeout_s
    self._failure = failure
    self._last: dict[int, dict] = {}  # {process: its last heartbeat}
    self._missed = dict.fromkeys(range(count), 0)  # {process: heartbeats that it has missed}
    self._sent = 0
    self._failed = 0  # heartbeats of this process since another process has failed

  def watch(self) -> None:
    """Starts sending heartbeats; if JAX aborts this process, the process at fault is named."""
    on_abort(lambda: self.gone(_QUICK) or self._suspect())
    watchdog.watch_peers(self)

  def leave(self) -> None:
    """Sends a final heartbeat, so that the others do not report this process as dead."""
    if watchdog.leave():
      with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone with process 0
        self._send({'left': True})

  def gone(self, beats: int) -> str:
    """Returns a sentence about a process that has missed `beats` heartbeats; '' if there is none."""
    for i, missed in sorted(self._missed.items()):
      if i != self.index and missed >= beats:
        last = self._last.get(i)
        was_in = f'; it was in {last["doing"]}, at {last["at"]}' if last else ''
        return f'{self._name(i)} is gone: no heartbeat for {missed * watchdog.INTERVAL_S:.0f} s{was_in}'
    return ''

  def who_is_gone(self) -> str:
    """Returns a sentence about the process that a lost connection led to, after waiting for missed heartbeats.

    It is '' if no process is gone, or if another process has failed with an error of its own.
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
      entries = self._client.key_value_dir_get(_ROOT)
      heartbeats = {int(key.removeprefix(_ROOT)): json.loads(text) for key, text in entries}
    except jax.errors.JaxRuntimeError:  # the service is gone with process 0
      heartbeats = {i: last for i, last in self._last.items() if i}
    for i in self._missed:
      last = heartbeats.get(i)
      is_new = last and (last.get('left') or last != self._last.get(i))
      # Count heartbeats of this process, not seconds: while this process is suspended, the others miss none.
      self._missed[i] = 0 if is_new else self._missed[i] + 1
      if last:
        self._last[i] = self._last.get(i, {}) | last

  def end_if_gone(self, also_failed: bool) -> None:
    """Ends this process if another one is gone or, with `also_failed`, if it has not noticed the failure of another."""
    if text := self.gone(max(_QUICK, round(self._timeout_s / watchdog.INTERVAL_S))):
      watchdog.end(text)
    failure = self._failure() if also_failed else None
    self._failed = self._failed + 1 if failure else 0
    if self._failed >= 2 * _QUICK:
      code = vars(type(failure)).get('exit_code', 1)
      watchdog.end(str(failure), code, stacks=code == 1)

  def stuck(self) -> list[str]:
    """Returns a phrase for each other process that does not wait for devices or processes."""
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
    """Returns why JAX ends this process: another one has died, or the service of process 0 is gone."""
    at, waits = watchdog.place()
    process, doing = watchdog.name_of_process(), watchdog.operation()
    if not waits:
      return f'{process} is stuck in {doing}, at {at}; another one gave up'
    other = self._name(0) if self.index else 'another process'
    return f'{process} ends in {doing}: {other} is gone (JAX says so above)'


def on_abort(explain: Callable[[], str], stacks: bool = True) -> None:
  """Prints `explain()` before JAX ends this process by abort(), as it does after the death of another one.

  JAX's own callback cannot be used, as it takes no Python function (std::bad_cast). If the aborting thread deadlocks
  with Python here, the limit of `watchdog.start_operation` ends the process.
  """
  handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda signal_number: watchdog.end(explain(), stacks=stacks))
  on_abort.keep = handler  # a reference, so that it is not freed
  ctypes.CDLL(None).signal(signal.SIGABRT, handler)
