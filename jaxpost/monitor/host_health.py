"""Cross-host health: stragglers and replica consistency.

A straggler is a process that spends more time than others neither on devices nor waiting, but on reading data, grading,
packing or garbage collection. Replicas of parameters, which must be equal on all devices, are compared bit by bit.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxpost.distributed import coordination
from jaxpost.distributed.channel import seconds_waited
from jaxpost.distributed.transfer import to_host
from jaxpost.programs import replicas

if TYPE_CHECKING:
  from jaxpost.programs.compile import Ledger
  from jaxpost.roles import Roles

# Phases in which a host waits for devices, and so for all hosts.
_DEVICES = ('update', 'sample', 'reshard', 'score', 'eval', 'wait')
_STRAGGLES = 0.1  # of a step: larger delays of the slowest process are reported


@dataclasses.dataclass
class HostHealth:
  """Compares the hosts of a run every `every` steps, with equal results on all."""

  every: int
  digests: dict  # {role: program that hashes its parameters per device}
  note: Callable  # prints a message
  # Seconds of this host's own work, and in all, of each step since the last comparison:
  _times: list[tuple[float, float]] = dataclasses.field(default_factory=list)
  _waited_s: float = 0.0  # seconds waited for other processes since the start

  def begin(self, step: int, roles: Roles) -> dict | None:
    """Starts to hash the replicas after an update was dispatched.

    Returns the pending digests, which `finish` takes one step later, or None in steps without a comparison.
    """
    if step % self.every:
      return None
    pending = {}
    for name, digest in self.digests.items():
      params = roles.trainable[name].state.params
      # Only shapes and shardings, because the next update donates the buffers.
      pending[name] = (
        digest(params),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params),
      )
    return pending

  def finish(self, pending: dict | None, times: dict[str, float]) -> dict[str, Any]:
    """Returns the metrics of the step whose pending digests these are.

    Raises:
      RuntimeError: replicas differ; it names the parameter, device and process.
    """
    waited = seconds_waited() - self._waited_s
    on_devices = sum(times.get(f'time/{phase}', 0.0) for phase in _DEVICES)
    self._times.append((max(0.0, times['time/step'] - waited - on_devices), times['time/step']))
    self._waited_s += waited
    if pending is None:
      return {}
    own, step = map(statistics.fmean, zip(*self._times))
    self._times.clear()
    # How far the slowest process is behind the median.
    hosts, host_seconds = zip(*coordination.all_gather([socket.gethostname(), own]))
    slowest = host_seconds.index(max(host_seconds))
    skew = max(host_seconds) - statistics.median_low(host_seconds)
    if skew > _STRAGGLES * step:
      self.note(
        f'process {slowest} on {hosts[slowest]} is the slowest: it works '
        f'{skew:.3f} s a step longer than the others, of {step:.3f} s'
      )
    row = {'time/host_skew': skew, 'time/slowest_process': slowest}
    for name, (digest, params) in pending.items():
      digest = to_host(digest)
      row[f'param_hash/{name}'] = replicas.combined(digest)
      if differing := replicas.differing(digest, params):
        path, device = differing[0]
        raise RuntimeError(
          f'replicas of the parameters differ: {path} on {device} of process {device.process_index} on host '
          f'{hosts[device.process_index]} (and {len(differing) - 1} more shards); memory or a device is faulty, or '
          'programs differ: take that host out and start again from the last checkpoint'
        )
    return row


def make_host_health(roles: Roles, every: int, ledger: Ledger, note: Callable) -> HostHealth:
  """Creates the health check and compiles its digest programs."""
  digests = {}
  for name, role in roles.trainable.items():
    params = role.state.params
    digests[name] = replicas.make_digest(jax.tree.map(lambda x: x.sharding, params), ledger)
    digests[name].compile(params)
  return HostHealth(every, digests, note)
