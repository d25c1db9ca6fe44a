"""Bytes between a thread of each process."""

import itertools
import threading
import time

from jaxpost.distributed import coordination

_HERE = 'jaxpost/channel/'
_CHUNK = 1 << 21  # bytes of a value of the service
_channels = itertools.count()


class Closed(Exception):
  """A wait ended because its channel was closed."""


class Channel:
  """Joins bytes of all processes; their main threads make their channels in the same order, for one thread each.

  Attributes:
    waited: seconds that its thread has waited for other processes.
  """

  def __init__(self):
    self.count, self.index = coordination.process_count(), coordination.process_index()
    self.closed = threading.Event()  # ends a wait
    self.waited = 0.0
    self._here = f'{_HERE}{next(_channels)}/'
    self._round = 0

  def join(self, data: bytes) -> bytes:
    """Returns the bytes of all processes, one after the other; raises Closed once the channel is closed."""
    here, before = (f'{self._here}{n}/' for n in (self._round, self._round - 1))
    self._round += 1
    self._send(f'{here}{self.index}/', data)
    if self.index == 0:
      self._send(f'{here}all/', b''.join([self._receive(f'{here}{i}/') for i in range(self.count)]))
      coordination.service().key_value_delete(before)  # a process in this round has read the one before
    return self._receive(f'{here}all/')

  def _send(self, to: str, data: bytes) -> None:
    client, starts = coordination.service(), range(0, len(data), _CHUNK)
    for i, start in enumerate(starts):
      client.key_value_set_bytes(f'{to}{i}', data[start : start + _CHUNK])
    client.key_value_set_bytes(f'{to}parts', str(len(starts)).encode())

  def _receive(self, sent: str) -> bytes:
    parts = int(self._wait_for(f'{sent}parts'))
    return b''.join(self._wait_for(f'{sent}{i}') for i in range(parts))

  def _wait_for(self, key: str) -> bytes:
    start = time.perf_counter()
    try:
      return coordination.wait_for(key, binary=True, poll=self._check)
    finally:
      self.waited += time.perf_counter() - start

  def _check(self) -> None:
    if self.closed.is_set():
      raise Closed
