"""Exchanges values and errors between processes by JAX's coordination service; not imported in runs of one process.

Main threads exchange small values, without running a program on devices. A process that waits for another one that has
failed gets its error. All main threads call these functions in the same order (`coordination.py`). A `Channel`
exchanges bytes between other threads.
"""

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed  # the service has no public name

from jaxpost import errors

_RUN: Any = distributed.global_state  # the client of the service, and the number of this process and of all
_ROOT = 'jaxpost'
_POLL_MS = 1000  # how often a wait checks whether a peer has failed
_EXIT_MS = 10_000  # how long a failed process waits for its peers to read the reason
_EXIT_GONE_MS = 3000  # the same if another process is gone, which the peers notice by themselves
_KEPT = 64  # rounds whose keys are kept; two processes are never as many rounds apart
_CHUNK = 1 << 21  # largest number of bytes of a value of the service
_KINDS = {kind.exit_code: kind for kind in errors.KNOWN}

# Counters of the calls of `all_gather`, `any_process` and `broadcast_bytes`, and of channels.
_rounds, _polls, _broadcasts, _channels = (itertools.count() for _ in range(4))


class _State:
  """State of this process: counts of stops and runs, and how a failed run ended."""

  stops = 0
  runs = 0
  failed: int | None = None  # exit code of a failed run
  gone = False  # whether it failed because another process is gone
  waited = 0.0  # seconds that the main thread has waited for other processes
  sent: list[str] = []  # keys of the broadcasts of this process
  who_is_gone: Callable[[], str] = str  # returns a sentence that names the process that is gone, or ''


def on_connected(who_is_gone: Callable[[], str]) -> None:
  """Sets up the exit of a connected process; `who_is_gone` explains a lost connection."""
  _State.who_is_gone = who_is_gone
  atexit.register(_exit)  # runs before JAX's own handler, which waits for the peers


def all_gather(value: Any) -> list:
  """See `coordination.all_gather`."""
  client, number = _RUN.client, next(_rounds)
  prefix = f'{_ROOT}/round/{number}/'
  client.key_value_set(f'{prefix}{_RUN.process_id}', json.dumps(value))
  if _RUN.process_id == 0:
    texts = [wait_for(f'{prefix}{i}') for i in range(_RUN.num_processes)]
    client.key_value_set(f'{prefix}all', f'[{",".join(texts)}]')
    if number:  # all processes are in this round, so they have read the one before
      client.key_value_delete(f'{_ROOT}/round/{number - 1}/')
  return json.loads(wait_for(f'{prefix}all'))


def broadcast_bytes(sender: int, data: bytes | None) -> bytes:
  """Returns the bytes of process `sender` on all processes; `data` of the others is ignored."""
  prefix = f'{_ROOT}/broadcast/{next(_broadcasts)}/'
  if data is None or _RUN.process_id != sender:
    return _receive(prefix, wait_for)
  _send(prefix, data)
  # Processes synchronize in each step, so all have read older broadcasts.
  _State.sent.append(prefix)
  if len(_State.sent) > _KEPT:
    _RUN.client.key_value_delete(_State.sent.pop(0))
  return data


def any_process(flag: bool) -> bool:
  """See `coordination.any_process`."""
  client, number = _RUN.client, next(_polls)
  flags = f'{_ROOT}/flags/{_State.stops}/'
  if flag:
    client.key_value_set(f'{flags}{_RUN.process_id}', '1', allow_overwrite=True)
  if _RUN.process_id == 0:
    answer = flag or bool(client.key_value_dir_get(flags))
    client.key_value_set(f'{_ROOT}/stop/{number}', json.dumps(answer))
    if number >= _KEPT:
      client.key_value_delete(f'{_ROOT}/stop/{number - _KEPT}')
  else:
    answer = json.loads(wait_for(f'{_ROOT}/stop/{number}'))
  if answer:
    _State.stops += 1  # so that flags of a later stop have other keys
  return answer


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
  """See `coordination.fail_together`."""
  _State.runs += 1
  _State.failed = None
  try:
    yield
  except BaseException as error:
    known = isinstance(error, tuple(_KINDS.values()))
    # An unknown error may come from a lost connection to a process that is gone.
    gone = '' if known or failed_process() else _State.who_is_gone()
    cause = failed_process() or (errors.PeerError(gone) if gone else None)
    _State.failed = error.exit_code if known else 1
    _State.gone = bool(gone)
    if cause is None:
      _tell_peers(_State.failed, str(error) or repr(error))
    elif not known:  # the error is a consequence of `cause`
      _State.failed = vars(type(cause)).get('exit_code', 1)
      raise cause from error
    raise


def leave(code: int, message: str) -> None:
  """Ends this process after the others have had time to read the reason."""
  _State.failed = code
  _tell_peers(code, message)
  _exit()


def _tell_peers(code: int, message: str) -> None:
  """Tells the other processes how this one ends, unless the service is gone with process 0."""
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    _RUN.client.key_value_set(f'{_ROOT}/failed/{_State.runs}/{_RUN.process_id}', json.dumps([code, message]))


def seconds_waited(more: float = 0.0) -> float:
  """Adds `more` to the seconds that this process has waited for others since it started; returns their sum."""
  _State.waited += more
  return _State.waited


def wait_for(key: str, binary: bool = False, poll: Callable[[], None] | None = None) -> Any:
  """Returns the value of a key as soon as it is set; raises the error of a failed peer, or of `poll`.

  poll: is called every `_POLL_MS`; None in the main thread, whose waiting is counted.
  """
  read = _RUN.client.blocking_key_value_get_bytes if binary else _RUN.client.blocking_key_value_get
  while True:
    start = time.perf_counter()
    try:
      return read(key, _POLL_MS)
    except jax.errors.JaxRuntimeError as error:
      if 'DEADLINE_EXCEEDED' not in str(error):
        raise
    finally:
      if not poll:
        _State.waited += time.perf_counter() - start
    if failure := failed_process():
      raise failure
    if poll:
      poll()


def failed_process() -> Exception | None:
  """Returns the error of the process with the lowest index that has failed; None if none has."""
  prefix = f'{_ROOT}/failed/{_State.runs}/'
  try:
    failed = sorted(_RUN.client.key_value_dir_get(prefix), key=lambda entry: int(entry[0].removeprefix(prefix)))
  except jax.errors.JaxRuntimeError:  # the service has ended with process 0
    return None
  for key, text in failed:
    code, message = json.loads(text)
    return _KINDS.get(code, errors.PeerError)(f'process {key.removeprefix(prefix)}: {message}')
  return None


class Closed(Exception):
  """A wait ended because its channel was closed."""


class Channel:
  """Joins bytes of all processes for one thread of each; all main threads make their channels in the same order.

  Attributes:
    waited: seconds that the thread has waited for other processes.
  """

  def __init__(self):
    self.count, self.index = _RUN.num_processes, _RUN.process_id
    self.closed = threading.Event()  # ends a wait
    self.waited = 0.0
    self._prefix = f'{_ROOT}/channel/{next(_channels)}/'
    self._round = 0

  def join(self, data: bytes) -> bytes:
    """Returns the bytes of all processes, one after the other; raises Closed once the channel is closed."""
    current, previous = f'{self._prefix}{self._round}/', f'{self._prefix}{self._round - 1}/'
    self._round += 1
    _send(f'{current}{self.index}/', data)
    if self.index == 0:
      _send(f'{current}all/', b''.join([_receive(f'{current}{i}/', self._wait_for) for i in range(self.count)]))
      _RUN.client.key_value_delete(previous)  # all processes are in this round, so they have read the one before
    return _receive(f'{current}all/', self._wait_for)

  def _wait_for(self, key: str, binary: bool) -> bytes:
    start = time.perf_counter()
    try:
      return wait_for(key, binary, poll=self._check)
    finally:
      self.waited += time.perf_counter() - start

  def _check(self) -> None:
    if self.closed.is_set():
      raise Closed


def _send(prefix: str, data: bytes) -> None:
  """Stores bytes in parts, and then the number of parts, under keys with a prefix."""
  starts = range(0, len(data), _CHUNK)
  for i, start in enumerate(starts):
    _RUN.client.key_value_set_bytes(f'{prefix}{i}', data[start : start + _CHUNK])
  _RUN.client.key_value_set_bytes(f'{prefix}parts', str(len(starts)).encode())


def _receive(prefix: str, wait: Callable[[str, bool], bytes]) -> bytes:
  """Returns the bytes that `_send` has stored; `wait` is called as `wait_for`."""
  parts = int(wait(f'{prefix}parts', True))
  return b''.join(wait(f'{prefix}{i}', True) for i in range(parts))


def _exit() -> None:
  """Waits at the exit of a failed process, for a limited time, until the peers have read the reason."""
  if _State.failed is None:
    return
  try:
    _RUN.client.wait_at_barrier(f'{_ROOT}/exit', _EXIT_GONE_MS if _State.gone else _EXIT_MS)
  except jax.errors.JaxRuntimeError:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_State.failed)
