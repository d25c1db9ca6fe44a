"""Multi-process coordination: gather, broadcast, agreement and failure propagation.

Small host values go through JAX's coordination service, not over the devices:
they wait for no program, and a process that waits for one that has failed gets its error. Every process calls these
functions from its main thread and in the same order; with one process they return at once.
"""

import atexit
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax._src import distributed  # the service has no public name

from jaxpost import errors

_ROOT = 'jaxpost'
_POLL_MS = 1000  # how often a wait checks whether a peer has failed
_EXIT_MS = 10_000  # a failed process waits so long for its peers to read why
_EXIT_GONE_MS = 3000  # likewise where a peer is gone, which the others notice themselves
_KEPT = 64  # rounds whose keys stay; far more than two processes are ever apart
_CHUNK = 1 << 21  # bytes of a value of the service
_KINDS = {kind.exit_code: kind for kind in errors.KNOWN}

# Numbers of the calls of `all_gather`, `any_process` and `broadcast_bytes`.
_rounds, _polls, _broadcasts = (itertools.count() for _ in range(3))
# State of this process: counts of stops and runs, and how a failed run ended.
_state = {
  'stops': 0,
  'runs': 0,
  'failed': None,
  'gone': False,
  'waited': 0.0,
  'sent': [],  # keys of the broadcasts of this process
  'who_is_gone': lambda: '',  # a sentence that names the process that is gone, or ''
}


def on_connected(who_is_gone: Callable[[], str]) -> None:
  """Sets up the exit of a connected process; `who_is_gone` explains a lost connection."""
  _state['who_is_gone'] = who_is_gone
  atexit.register(_exit)  # runs before JAX's own handler, which waits for the peers


def process_count() -> int:
  """Number of processes of the run; touches no device."""
  return distributed.global_state.num_processes if service() else 1


def process_index() -> int:
  """Index of this process; touches no device."""
  return distributed.global_state.process_id if service() else 0


def owners(devices: Iterable[jax.Device]) -> list[int]:
  """Indices of the processes that have some of these devices, in order."""
  return sorted({d.process_index for d in devices})


def all_gather(value: Any) -> list:
  """The values of all processes, in their order; JSON values."""
  if process_count() == 1:
    return [value]
  client, at = service(), next(_rounds)
  here = f'{_ROOT}/round/{at}/'
  client.key_value_set(f'{here}{process_index()}', json.dumps(value))
  if process_index() == 0:
    texts = [wait_for(f'{here}{i}') for i in range(process_count())]
    client.key_value_set(f'{here}all', f'[{",".join(texts)}]')
    if at:  # a process in this round has read the one before
      client.key_value_delete(f'{_ROOT}/round/{at - 1}/')
  return json.loads(wait_for(f'{here}all'))


def broadcast(value: Any) -> Any:
  """The value of process 0, on all processes; a JSON value."""
  return all_gather(value if process_index() == 0 else None)[0]


def broadcast_bytes(sender: int, data: bytes | None) -> bytes:
  """The bytes of process `sender`, on all processes; those of the others are not read."""
  if process_count() == 1:
    return data
  client, at = service(), next(_broadcasts)
  here = f'{_ROOT}/broadcast/{at}/'
  if process_index() != sender:
    parts = int(wait_for(f'{here}parts'))
    return b''.join(wait_for(f'{here}{i}', True) for i in range(parts))
  parts = range(0, len(data), _CHUNK)
  for i, start in enumerate(parts):
    client.key_value_set_bytes(f'{here}{i}', data[start : start + _CHUNK])
  client.key_value_set(f'{here}parts', str(len(parts)))
  # Processes meet in each step, so older broadcasts were read by all.
  _state['sent'].append(here)
  if len(_state['sent']) > _KEPT:
    client.key_value_delete(_state['sent'].pop(0))
  return data


def shard(items: range) -> range:
  """This process's share of `items`: every n-th, from its index on."""
  return items[process_index() :: process_count()]


def any_process(flag: bool) -> bool:
  """True on all processes if `flag` was set on any of them by now.

  Process 0 decides from the flags that have reached it; a later one counts in the next step.
  """
  if process_count() == 1:
    return flag
  client, at = service(), next(_polls)
  flags = f'{_ROOT}/flags/{_state["stops"]}/'
  if flag:
    client.key_value_set(f'{flags}{process_index()}', '1', allow_overwrite=True)
  if process_index() == 0:
    answer = flag or bool(client.key_value_dir_get(flags))
    client.key_value_set(f'{_ROOT}/stop/{at}', json.dumps(answer))
    if at >= _KEPT:
      client.key_value_delete(f'{_ROOT}/stop/{at - _KEPT}')
  else:
    answer = json.loads(wait_for(f'{_ROOT}/stop/{at}'))
  _state['stops'] += answer  # the flags of a later stop have another name
  return answer


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
  """Around a run: when one process fails, all do, with the error of the first."""
  _state.update(runs=_state['runs'] + 1, failed=None)
  try:
    yield
  except BaseException as error:
    if process_count() > 1:
      known = isinstance(error, tuple(_KINDS.values()))
      # The error may be that of a connection to a process that is gone.
      gone = '' if known or failed_process() else _state['who_is_gone']()
      first = failed_process() or (errors.PeerError(gone) if gone else None)
      _state['failed'] = error.exit_code if known else 1
      _state['gone'] = bool(gone)
      if first is None:
        _tell_peers(_state['failed'], str(error) or repr(error))
      elif not known:  # this error is a consequence of that failure
        _state['failed'] = vars(type(first)).get('exit_code', 1)
        raise first from error
    raise


def _tell_peers(code: int, message: str) -> None:
  """Lets the other processes know how this one ends; unless the service is gone, with process 0."""
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    service().key_value_set(f'{_ROOT}/failed/{_state["runs"]}/{process_index()}', json.dumps([code, message]))


def leave(code: int, message: str) -> None:
  """Ends this process from any thread; the others of the run end with the same code and this message."""
  if process_count() > 1:
    _state['failed'] = code
    _tell_peers(code, message)
    _exit()
  os._exit(code)


def service() -> Any:
  """JAX's client of the coordination service; None in a run of one process."""
  return distributed.global_state.client


def seconds_waited(more: float = 0.0) -> float:
  """Seconds that this process has waited for others since it started, after `more` are counted as well."""
  _state['waited'] += more
  return _state['waited']


def wait_for(key: str, binary: bool = False, poll: Callable[[], None] | None = None) -> Any:
  """The value of a key once it is there; raises the error of a failed peer, or of `poll`, which threads give."""
  read = service().blocking_key_value_get_bytes if binary else (service().blocking_key_value_get)
  while True:
    start = time.perf_counter()
    try:
      return read(key, _POLL_MS)
    except jax.errors.JaxRuntimeError as error:
      if 'DEADLINE_EXCEEDED' not in str(error):
        raise
    finally:
      if not poll:  # the process itself goes on
        _state['waited'] += time.perf_counter() - start
    if failure := failed_process():
      raise failure
    if poll:
      poll()


def failed_process() -> Exception | None:
  """The error of the first other process that failed; None if none has."""
  here = f'{_ROOT}/failed/{_state["runs"]}/'
  try:
    failed = sorted(service().key_value_dir_get(here))
  except jax.errors.JaxRuntimeError:  # the service ended with process 0
    return None
  for key, text in failed:
    code, message = json.loads(text)
    return _KINDS.get(code, errors.PeerError)(f'process {key.removeprefix(here)}: {message}')
  return None


def _exit():
  """At exit after a failure: lets the peers read its reason, for a limited time."""
  if _state['failed'] is None:
    return
  try:
    service().wait_at_barrier(f'{_ROOT}/exit', _EXIT_GONE_MS if _state['gone'] else _EXIT_MS)
  except jax.errors.JaxRuntimeError:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_state['failed'])
