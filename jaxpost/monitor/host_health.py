"""What the processes of a run tell each other as they go: metrics of hosts.

Who holds back the others shows in the time that a process spends on neither
devices nor waiting: reading data, grading, packing, garbage collection. What
must be equal everywhere, the replicas of parameters, is compared bit by bit.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from jaxpost.distributed import coordination
from jaxpost.distributed.transfer import to_host
from jaxpost.programs import replicas

if TYPE_CHECKING:
  from jaxpost.programs.compile import Ledger
  from jaxpost.roles import Roles

# Phases in which the host waits for devices, and so for all hosts.
_DEVICES = ('update', 'sample', 'reshard', 'score', 'eval', 'wait')
_SHOW = 0.1  # share of a step by which the slowest has to be behind


@dataclasses.dataclass
class Peers:
  """Asked each step, speaks every `every` steps; the same on all processes.

  digests: {role: programs.replicas.make_digest}.
  note: (text) -> prints it for people.
  """

  every: int
  digests: dict
  note: Callable
  _own: float = 0.0  # seconds since the last word, and of how many steps
  _step: float = 0.0
  _steps: int = 0
  _waited: float = 0.0

  def begin(self, step: int, roles: Roles):
    """After an update was dispatched; what `finish` takes a step later."""
    if step % self.every:
      return None
    found = {}
    for name, digest in self.digests.items():
      params = roles.trainable[name].state.params
      # Shapes and shardings: the next update takes the buffers.
      found[name] = (
        digest(params),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params),
      )
    return found

  def finish(self, pending, times: dict) -> dict:
    """More of the row of that step.

    Raises:
      RuntimeError: replicas differ; names parameter, device and process.
    """
    waited = coordination.seconds_waited() - self._waited
    self._own += max(0.0, times['time/step'] - waited - sum(times.get(f'time/{phase}', 0.0) for phase in _DEVICES))
    self._step, self._steps = self._step + times['time/step'], self._steps + 1
    self._waited += waited
    if pending is None:
      return {}
    row = self._speed()
    for name, (digest, params) in pending.items():
      digest = to_host(digest)
      row[f'param_hash/{name}'] = replicas.combined(digest)
      wrong = replicas.differing(digest, params)
      if wrong:
        self._stop(wrong)
    return row

  def _speed(self) -> dict:
    hosts, own = zip(*coordination.all_gather([socket.gethostname(), self._own / self._steps]))
    step = self._step / self._steps
    slowest = own.index(max(own))
    skew = max(own) - statistics.median_low(own)
    if skew > _SHOW * step:
      self.note(
        f'process {slowest} on {hosts[slowest]} is the slowest: it works '
        f'{skew:.3f} s a step longer than the others, of {step:.3f} s'
      )
    self._own = self._step = self._steps = 0
    return {'time/host_skew': skew, 'time/slowest_process': slowest}

  def _stop(self, wrong: list):
    hosts = coordination.all_gather(socket.gethostname())
    path, device = wrong[0]
    place = f'{device} of process {device.process_index}'
    raise RuntimeError(
      f'replicas of the parameters differ: {path} on {place} on host '
      f'{hosts[device.process_index]} (and {len(wrong) - 1} more shards); '
      'memory or a device is faulty, or programs differ: take that host out '
      'and start again from the last checkpoint'
    )


def make_peers(roles: Roles, every: int, ledger: Ledger, note: Callable):
  """Those of a run, with the programs that they need."""
  digests = {}
  for name, role in roles.trainable.items():
    params = role.state.params
    digests[name] = replicas.make_digest(jax.tree.map(lambda x: x.sharding, params), ledger)
    digests[name].compile(params)
  return Peers(every, digests, note)
