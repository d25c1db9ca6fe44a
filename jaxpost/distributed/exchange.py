"""How several processes exchange values and fail together, through JAX's coordination service.

Imported where a run has several processes; `coordination.py` has the functions that every run calls.
"""

import atexit
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the service has no public name
from jax.experimental import multihost_utils

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


def service() -> Any:
  """JAX's client of the coordination service."""
  return distributed.global_state.client


def all_gather(value: Any) -> list:
  """See `coordination.all_gather`."""
  client, at = service(), next(_rounds)
  here = f'{_ROOT}/round/{at}/'
  client.key_value_set(f'{here}{_index()}', json.dumps(value))
  if _index() == 0:
    texts = [wait_for(f'{here}{i}') for i in range(distributed.global_state.num_processes)]
    client.key_value_set(f'{here}all', f'[{",".join(texts)}]')
    if at:  # a process in this round has read the one before
      client.key_value_delete(f'{_ROOT}/round/{at - 1}/')
  return json.loads(wait_for(f'{here}all'))


def broadcast_bytes(sender: int, data: bytes | None) -> bytes:
  """The bytes of process `sender`, on all processes; those of the others are not read."""
  client, at = service(), next(_broadcasts)
  here = f'{_ROOT}/broadcast/{at}/'
  if _index() != sender:
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


def to_host(tree: Any, share: bool) -> Any:
  """Device arrays as numpy arrays, see `mesh.to_host`."""
  leaves, treedef = jax.tree.flatten(tree)
  found, few = list(leaves), {}
  for i, x in enumerate(leaves):
    if not isinstance(x, jax.Array):
      found[i] = np.asarray(x)
      continue
    holders = sorted({d.process_index for d in x.sharding.device_set})
    if share and len(holders) < distributed.global_state.num_processes:
      few.setdefault(holders[0], []).append(i)
    if _index() in holders or not share:
      found[i] = _fetch(x)
  for owner, which in few.items():
    sent = None
    if _index() == owner:
      sent = b''.join(np.ascontiguousarray(found[i]).tobytes() for i in which)
    sent, at = memoryview(broadcast_bytes(owner, sent)), 0
    for i in which:
      x = leaves[i]
      found[i] = np.frombuffer(sent, x.dtype, x.size, at).reshape(x.shape) if x.size else (np.zeros(x.shape, x.dtype))
      at += x.nbytes
  return treedef.unflatten(found)


def _fetch(x: jax.Array) -> np.ndarray:
  if x.is_fully_addressable:
    return np.asarray(x)
  if x.is_fully_replicated:
    return np.asarray(x.addressable_data(0))
  return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def any_process(flag: bool) -> bool:
  """See `coordination.any_process`."""
  client, at = service(), next(_polls)
  flags = f'{_ROOT}/flags/{_state["stops"]}/'
  if flag:
    client.key_value_set(f'{flags}{_index()}', '1', allow_overwrite=True)
  if _index() == 0:
    answer = flag or bool(client.key_value_dir_get(flags))
    client.key_value_set(f'{_ROOT}/stop/{at}', json.dumps(answer))
    if at >= _KEPT:
      client.key_value_delete(f'{_ROOT}/stop/{at - _KEPT}')
  else:
    answer = json.loads(wait_for(f'{_ROOT}/stop/{at}'))
  _state['stops'] += answer
  return answer


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
  """See `coordination.fail_together`."""
  _state.update(runs=_state['runs'] + 1, failed=None)
  try:
    yield
  except BaseException as error:
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
    service().key_value_set(f'{_ROOT}/failed/{_state["runs"]}/{_index()}', json.dumps([code, message]))


def tell_end(code: int, message: str) -> None:
  """Tells the other processes why this one ends, and waits for a limited time until they have read it."""
  _state['failed'] = code
  _tell_peers(code, message)
  _exit()


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


def _index() -> int:
  return distributed.global_state.process_id


def _exit() -> None:
  """At exit after a failure: lets the peers read its reason, for a limited time."""
  if _state['failed'] is None:
    return
  try:
    service().wait_at_barrier(f'{_ROOT}/exit', _EXIT_GONE_MS if _state['gone'] else _EXIT_MS)
  except jax.errors.JaxRuntimeError:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_state['failed'])
