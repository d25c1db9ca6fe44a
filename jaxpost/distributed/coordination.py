"""Several processes, one run: how they meet, agree and part.

Small values of the host travel through JAX's coordination service and not
over the devices: nothing waits for a program, and who waits for a process
that has failed hears of it. Every process calls these functions, from its
main thread and in one order; with one process they return at once.
"""

import atexit
import contextlib
import itertools
import json
import os
import sys
import time

import jax
from jax._src import distributed  # the service has no public name

from jaxpost import errors

_ROOT = 'jaxpost'
_POLL_MS = 1000  # between two looks at whether a peer has failed
_PART_MS = 10_000  # for the peers to hear of a failure
_PART_GONE_MS = 3000  # ... when one of them is gone: they know
_LAG = 64  # steps; far more than two processes are ever apart
_LETTER = 1 << 21  # bytes of a value of the service
_KINDS = {
  kind.exit_code: kind for kind in (errors.InputError, errors.NoCheckpointError, errors.Preempted, errors.PeerError)
}

_rounds, _looks, _letters = (itertools.count() for _ in range(3))
# Stops and runs so far; the exit code of a run that failed.
_state = {
  'stops': 0,
  'runs': 0,
  'failed': None,
  'gone': False,
  'waited': 0.0,
  'letters': [],  # keys of those that this process sent
  # () -> which process is gone, in words; a moment later, or ''.
  'who_is_gone': lambda: '',
}


def on_connected(who_is_gone):
  """After `cluster.connect`; `who_is_gone` explains a lost connection."""
  _state['who_is_gone'] = who_is_gone
  atexit.register(_part)  # runs before JAX's own, which waits for the peers


def process_count() -> int:
  """How many processes run this; asks no device."""
  return distributed.global_state.num_processes if _client() else 1


def process_index() -> int:
  return distributed.global_state.process_id if _client() else 0


def all_gather(value) -> list:
  """What each process holds, in their order; JSON values."""
  if process_count() == 1:
    return [value]
  client, at = _client(), next(_rounds)
  here = f'{_ROOT}/round/{at}/'
  client.key_value_set(f'{here}{process_index()}', json.dumps(value))
  if process_index() == 0:
    texts = [_wait_for(f'{here}{i}') for i in range(process_count())]
    client.key_value_set(f'{here}all', f'[{",".join(texts)}]')
    if at:  # who is in this round has read the one before
      client.key_value_delete(f'{_ROOT}/round/{at - 1}/')
  return json.loads(_wait_for(f'{here}all'))


def broadcast(value):
  """The value of process 0, of JSON."""
  return all_gather(value if process_index() == 0 else None)[0]


def broadcast_bytes(sender: int, data: bytes | None) -> bytes:
  """Bytes that one process has, on all; those of the others are not read."""
  if process_count() == 1:
    return data
  client, at = _client(), next(_letters)
  here = f'{_ROOT}/letter/{at}/'
  if process_index() != sender:
    parts = int(_wait_for(f'{here}parts'))
    return b''.join(_wait_for(f'{here}{i}', True) for i in range(parts))
  parts = range(0, len(data), _LETTER)
  for i, start in enumerate(parts):
    client.key_value_set_bytes(f'{here}{i}', data[start : start + _LETTER])
  client.key_value_set(f'{here}parts', str(len(parts)))
  # Whoever sends again hears of the others in between, each step.
  _state['letters'].append(here)
  if len(_state['letters']) > _LAG:
    client.key_value_delete(_state['letters'].pop(0))
  return data


def shard(items: range) -> range:
  """Those of some numbered things that this process sees to."""
  return items[process_index() :: process_count()]


def check_same(values: dict, hint: str):
  """InputError on every process where one holds another value than the first.

  Args:
    values: what it is -> JSON; the first that differs is named.
  """
  all_values = all_gather(values)
  for name, first in all_values[0].items():
    for i, other in enumerate(all_values):
      if other.get(name) != first:
        shown = lambda x: f' ({x})' if len(str(x)) < 80 else ''
        raise errors.InputError(
          f'{name} of process {i}{shown(other.get(name))} differs from that of process 0{shown(first)}; {hint}'
        )


def any_process(told: bool) -> bool:
  """Whether some process was told (to stop): one answer for all, each step.

  Process 0 decides from what it has heard by then.
  """
  if process_count() == 1:
    return told
  client, at = _client(), next(_looks)
  heard = f'{_ROOT}/told/{_state["stops"]}/'
  if told:
    client.key_value_set(f'{heard}{process_index()}', '1', allow_overwrite=True)
  if process_index() == 0:
    answer = told or bool(client.key_value_dir_get(heard))
    client.key_value_set(f'{_ROOT}/stop/{at}', json.dumps(answer))
    if at >= _LAG:
      client.key_value_delete(f'{_ROOT}/stop/{at - _LAG}')
  else:
    answer = json.loads(_wait_for(f'{_ROOT}/stop/{at}'))
  _state['stops'] += answer
  return answer


@contextlib.contextmanager
def fail_together():
  """Around a run: its processes fail together, for the reason of the first."""
  _state.update(runs=_state['runs'] + 1, failed=None)
  try:
    yield
  except BaseException as error:
    if process_count() > 1:
      known = isinstance(error, tuple(_KINDS.values()))
      # An error of ours may be that of a connection to who is gone.
      gone = '' if known or failed_process() else _state['who_is_gone']()
      first = failed_process() or (errors.PeerError(gone) if gone else None)
      _state['failed'] = error.exit_code if known else 1
      _state['gone'] = bool(gone)
      if first is None:
        # With process 0 the service may have gone; `error` counts.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
          _client().key_value_set(
            f'{_ROOT}/failed/{_state["runs"]}/{process_index()}',
            json.dumps([_state['failed'], str(error) or repr(error)]),
          )
      elif not known:  # what happened here followed from that
        _state['failed'] = vars(type(first)).get('exit_code', 1)
        raise first from error
    raise


def _client():
  return distributed.global_state.client


def seconds_waited() -> float:
  """Seconds that this process has waited for others so far."""
  return _state['waited']


def _wait_for(key: str, binary=False):
  """The value of a key once it is there; raises what a peer failed of."""
  read = _client().blocking_key_value_get_bytes if binary else (_client().blocking_key_value_get)
  while True:
    start = time.perf_counter()
    try:
      return read(key, _POLL_MS)
    except jax.errors.JaxRuntimeError as error:
      if 'DEADLINE_EXCEEDED' not in str(error):
        raise
    finally:
      _state['waited'] += time.perf_counter() - start
    if failure := failed_process():
      raise failure


def failed_process() -> Exception | None:
  """What the first of the other processes that failed said of it."""
  here = f'{_ROOT}/failed/{_state["runs"]}/'
  try:
    failed = sorted(_client().key_value_dir_get(here))
  except jax.errors.JaxRuntimeError:  # with process 0 the service went, too
    return None
  for key, text in failed:
    code, message = json.loads(text)
    return _KINDS.get(code, errors.PeerError)(f'process {key.removeprefix(here)}: {message}')
  return None


def _part():
  """At exit after a failure: does not wait long for peers that go on."""
  if _state['failed'] is None:
    return
  try:
    _client().wait_at_barrier(f'{_ROOT}/part', _PART_GONE_MS if _state['gone'] else _PART_MS)
  except jax.errors.JaxRuntimeError:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_state['failed'])
