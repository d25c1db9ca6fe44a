"""Connected processes exchange values and errors by JAX's coordination service; runs of one process never import this.

Main threads exchange small values, which wait for no program: a process that waits for one that has failed gets its
error. They call these functions in the same order (`coordination.py`). A `Channel` joins bytes of other threads.
"""

from __future__ import annotations

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
_EXIT_MS = 10_000  # a failed process waits so long for its peers to read why
_EXIT_GONE_MS = 3000  # likewise where a peer is gone, which the others notice themselves
_KEPT = 64  # rounds whose keys stay; far more than two processes are ever apart
_CHUNK = 1 << 21  # bytes of a value of the service
_KINDS = {kind.exit_code: kind for kind in errors.KNOWN}

# Numbers of the calls of `all_gather`, `any_process` and `broadcast_bytes`, and of the channels made.
_rounds, _polls, _broadcasts, _channels = (itertools.count() for _ in range(4))


class _State:
  """State of this process: counts of stops and runs, and how a failed run ended."""

  stops = 0
  runs = 0
  failed: int | None = None  # its exit code
  gone = False  # because another process was
  waited = 0.0  # seconds of the main thread
  sent: list[str] = []  # keys of the broadcasts of this process
  who_is_gone: Callable[[], str] = str  # a sentence that names the process that is gone, or ''


def on_connected(who_is_gone: Callable[[], str]) -> None:
  """Sets up the exit of a connected process; `who_is_gone` explains a lost connection."""
  _State.who_is_gone = who_is_gone
  atexit.register(_exit)  # runs before JAX's own handler, which waits for the peers


def all_gather(value: Any) -> list:
  """See `coordination.all_gather`."""
  client, at = _RUN.client, next(_rounds)
  here = f'{_ROOT}/round/{at}/'
  client.key_value_set(f'{here}{_RUN.process_id}', json.dumps(value))
  if _RUN.process_id == 0:
    texts = [wait_for(f'{here}{i}') for i in range(_RUN.num_processes)]
    client.key_value_set(f'{here}all', f'[{",".join(texts)}]')
    if at:  # a process in this round has read the one before
      client.key_value_delete(f'{_ROOT}/round/{at - 1}/')
  return json.loads(wait_for(f'{here}all'))


def broadcast_bytes(sender: int, data: bytes | None) -> bytes:
  """The bytes of process `sender`, on all processes; those of the others are not read."""
  here = f'{_ROOT}/broadcast/{next(_broadcasts)}/'
  if data is None or _RUN.process_id != sender:
    return _receive(here, wait_for)
  _send(here, data)
  # Processes meet in each step, so older broadcasts were read by all.
  _State.sent.append(here)
  if len(_State.sent) > _KEPT:
    _RUN.client.key_value_delete(_State.sent.pop(0))
  return data


def any_process(flag: bool) -> bool:
  """See `coordination.any_process`."""
  client, at = _RUN.client, next(_polls)
  flags = f'{_ROOT}/flags/{_State.stops}/'
  if flag:
    client.key_value_set(f'{flags}{_RUN.process_id}', '1', allow_overwrite=True)
  if _RUN.process_id == 0:
    answer = flag or bool(client.key_value_dir_get(flags))
    client.key_value_set(f'{_ROOT}/stop/{at}', json.dumps(answer))
    if at >= _KEPT:
      client.key_value_delete(f'{_ROOT}/stop/{at - _KEPT}')
  else:
    answer = json.loads(wait_for(f'{_ROOT}/stop/{at}'))
  if answer:
    _State.stops += 1  # the flags of a later stop have another name
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
    # The error may be that of a connection to a process that is gone.
    gone = '' if known or failed_process() else _State.who_is_gone()
    first = failed_process() or (errors.PeerError(gone) if gone else None)
    _State.failed = error.exit_code if known else 1
    _State.gone = bool(gone)
    if first is None:
      _tell_peers(_State.failed, str(error) or repr(error))
    elif not known:  # this error is a consequence of that failure
      _State.failed = vars(type(first)).get('exit_code', 1)
      raise first from error
    raise


def leave(code: int, message: str) -> None:
  """Ends this process, once the others have had the time to read why."""
  _State.failed = code
  _tell_peers(code, message)
  _exit()


def _tell_peers(code: int, message: str) -> None:
  """Lets the other processes know how this one ends; unless the service is gone, with process 0."""
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    _RUN.client.key_value_set(f'{_ROOT}/failed/{_State.runs}/{_RUN.process_id}', json.dumps([code, message]))


def seconds_waited(more: float = 0.0) -> float:
  """Seconds that this process has waited for others since it started, after `more` are counted as well."""
  _State.waited += more
  return _State.waited


def wait_for(key: str, binary: bool = False, poll: Callable[[], None] | None = None) -> Any:
  """The value of a key once it is there; raises the error of a failed peer, or of `poll`, which threads give."""
  read = _RUN.client.blocking_key_value_get_bytes if binary else _RUN.client.blocking_key_value_get
  while True:
    start = time.perf_counter()
    try:
      return read(key, _POLL_MS)
    except jax.errors.JaxRuntimeError as error:
      if 'DEADLINE_EXCEEDED' not in str(error):
        raise
    finally:
      if not poll:  # the process itself goes on
        _State.waited += time.perf_counter() - start
    if failure := failed_process():
      raise failure
    if poll:
      poll()


def failed_process() -> Exception | None:
  """The error of the first other process that failed; None if none has."""
  here = f'{_ROOT}/failed/{_State.runs}/'
  try:
    failed = sorted(_RUN.client.key_value_dir_get(here))
  except jax.errors.JaxRuntimeError:  # the service ended with process 0
    return None
  for key, text in failed:
    code, message = json.loads(text)
    return _KINDS.get(code, errors.PeerError)(f'process {key.removeprefix(here)}: {message}')
  return None


class Closed(Exception):
  """A wait ended because its channel was closed."""


class Channel:
  """Joins bytes of all processes; their main threads make their channels in the same order, for one thread each.

  Attributes:
    waited: seconds that its thread has waited for other processes.
  """

  def __init__(self):
    self.count, self.index = _RUN.num_processes, _RUN.process_id
    self.closed = threading.Event()  # ends a wait
    self.waited = 0.0
    self._here = f'{_ROOT}/channel/{next(_channels)}/'
    self._round = 0

  def join(self, data: bytes) -> bytes:
    """Returns the bytes of all processes, one after the other; raises Closed once the channel is closed."""
    here, before = (f'{self._here}{n}/' for n in (self._round, self._round - 1))
    self._round += 1
    _send(f'{here}{self.index}/', data)
    if self.index == 0:
      _send(f'{here}all/', b''.join([_receive(f'{here}{i}/', self._wait_for) for i in range(self.count)]))
      _RUN.client.key_value_delete(before)  # a process in this round has read the one before
    return _receive(f'{here}all/', self._wait_for)

  def _wait_for(self, key: str, binary: bool) -> bytes:
    start = time.perf_counter()
    try:
      return wait_for(key, binary, poll=self._check)
    finally:
      self.waited += time.perf_counter() - start

  def _check(self) -> None:
    if self.closed.is_set():
      raise Closed


def _send(to: str, data: bytes) -> None:
  """Stores bytes in parts, and then how many there are."""
  starts = range(0, len(data), _CHUNK)
  for i, start in enumerate(starts):
    _RUN.client.key_value_set_bytes(f'{to}{i}', data[start : start + _CHUNK])
  _RUN.client.key_value_set_bytes(f'{to}parts', str(len(starts)).encode())


def _receive(sent: str, wait: Callable[[str, bool], bytes]) -> bytes:
  """Returns what `_send` has stored; `wait` is a form of `wait_for`."""
  parts = int(wait(f'{sent}parts', True))
  return b''.join(wait(f'{sent}{i}', True) for i in range(parts))


def _exit() -> None:
  """At exit after a failure: lets the peers read its reason, for a limited time."""
  if _State.failed is None:
    return
  try:
    _RUN.client.wait_at_barrier(f'{_ROOT}/exit', _EXIT_GONE_MS if _State.gone else _EXIT_MS)
  except jax.errors.JaxRuntimeError:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_State.failed)
