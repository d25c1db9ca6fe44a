"""Bytes between a thread of each process."""

import itertools
import threading

import jax
from jax._src import distributed  # the service has no public name

from jaxpost.distributed import coordination

_HERE = 'jaxpost/channel/'
_POLL_MS = 100  # how often a wait checks whether the channel was closed or a peer has failed
_CHUNK = 1 << 21  # bytes of a value of the service
_channels = itertools.count()


class Closed(Exception):
  """A wait ended because its channel was closed."""


class Channel:
  """Joins bytes of all processes; their main threads make their channels in the same order, for one thread each."""

  def __init__(self):
    self.count, self.index = coordination.process_count(), coordination.process_index()
    self.closed = threading.Event()  # ends a wait
    self._here = f'{_HERE}{next(_channels)}/'
    self._round = 0

  def join(self, data: bytes) -> bytes:
    """Returns the bytes of all processes, one after the other; raises Closed once the channel is closed."""
    here, before = (f'{self._here}{n}/' for n in (self._round, self._round - 1))
    self._round += 1
    self._send(f'{here}{self.index}/', data)
    if self.index == 0:
      self._send(f'{here}all/', b''.join([self._receive(f'{here}{i}/') for i in range(self.count)]))
      distributed.global_state.client.key_value_delete(before)  # a process in this round has read the one before
    return self._receive(f'{here}all/')

  def _send(self, to: str, data: bytes) -> None:
    client, starts = distributed.global_state.client, range(0, len(data), _CHUNK)
    for i, start in enumerate(starts):
      client.key_value_set_bytes(f'{to}{i}', data[start : start + _CHUNK])
    client.key_value_set_bytes(f'{to}parts', str(len(starts)).encode())

  def _receive(self, sent: str) -> bytes:
    parts = int(self._wait_for(f'{sent}parts'))
    return b''.join(self._wait_for(f'{sent}{i}') for i in range(parts))

  def _wait_for(self, key: str) -> bytes:
    """Returns the value of a key once it is there; raises the error of a process that failed."""
    while True:
      try:
        return distributed.global_state.client.blocking_key_value_get_bytes(key, _POLL_MS)
      except jax.errors.JaxRuntimeError as error:
        if 'DEADLINE_EXCEEDED' not in str(error):
          raise
      if failure := coordination.failed_process():
        raise failure
      if self.closed.is_set():
        raise Closed
