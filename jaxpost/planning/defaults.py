"""Chooses what a config leaves open by memory: recomputation, rows at a time, sequences sampled at a time.

By arithmetic, in a second, for accelerators whose memory is known. The programs are compiled after it,
and a run whose programs need more than there is, by XLA's own account, is refused before step 0.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jaxpost.distributed import coordination
from jaxpost.distributed.mesh import BATCH_AXES
from jaxpost.distributed.phases import parse_mesh
from jaxpost.hardware import memory as memory_lib
from jaxpost.models.config import CustomConfig
from jaxpost.planning import arithmetic, meshes, sampling_arithmetic, search
from jaxpost.planning.tables import gib
from jaxpost.stage import batch_shape, checks
from jaxpost.stage.records import PreparedStage, has_branches

if TYPE_CHECKING:
  from jaxpost.planning.machines import Topology

_FEWEST = 8  # sequences at a time, before optimizer states leave the device
# Rates of a chip that is unknown: updates are only compared with each other, so ratios count.
_UNKNOWN: dict[str, Any] = dict(flops=312e12, bandwidth=2e12, link=1e11, network=1e10)


@dataclasses.dataclass(frozen=True)
class Room:
  """The memory that the programs of a stage may take on a machine.

  usable: bytes of a device.
  scale: by how much XLA's account of an update, and of sampling, exceeds arithmetic where it is known.
  """

  machine: Topology
  usable: float
  scale: tuple[float, float] = (1.0, 1.0)

  def needs(self, p: PreparedStage, settings: dict[str, Any] | None = None) -> Needs:
    """Returns what a step needs with settings {'section.field': value}; InputError where its rows do not split."""
    mesh = p.config.mesh
    train = parse_mesh(mesh.train, meshes.train_devices(p.inputs, self.machine), 'config.mesh.train')
    rollout = parse_mesh(mesh.rollout, meshes.rollout_devices(p.inputs, self.machine), 'config.mesh.rollout')
    varied = search.vary(p, settings or {})
    branches = has_branches(p.inputs, p.data)
    found = arithmetic.estimate(varied.inputs, self.machine, train, rollout, branches=branches)
    elsewhere: tuple[str, ...] = ()  # what is not on the devices that sample
    if mesh.rollout_devices:
      elsewhere = ('parameters', 'optimizer', 'critic', 'frozen')
    elif varied.config.rollout.offload and p.inputs.algorithm.on_policy:
      # A reward model and teachers stay.
      others = p.inputs.sources.keys() - {'policy', 'critic', 'reference'}
      elsewhere = ('optimizer', 'critic') + ('frozen',) * (not others)
    updating, sampling = self.scale
    return Needs(
      updating=updating * sum(found.updating.values()),
      sampling=sampling * sum(n for k, n in found.sampling.items() if k not in elsewhere),
      held=sum(found.updating.get(k, 0.0) for k in ('parameters', 'optimizer', 'critic', 'frozen')),
      update_s=found.seconds['update'],
      scoring=found.scoring,
    )

  def fits(self, p: PreparedStage, settings: dict[str, Any] | None = None) -> bool:
    """Returns whether an update, sampling, and frozen models on devices of their own fit."""
    needs = self.needs(p, settings)
    return max(needs.updating, needs.sampling, needs.scoring) <= self.usable


class Needs(NamedTuple):
  """Bytes of a device during an update and while sampling (0: nothing is sampled), and seconds of a step's updates.

  held: bytes of weights and optimizer states, whose sizes are exact.
  scoring: bytes of frozen models on a device of `mesh.score_devices`, exact, too.
  """

  updating: float
  sampling: float
  held: float
  update_s: float
  scoring: float


def room(p: PreparedStage, topology: Topology) -> Room | None:
  """Returns the memory for a stage; None where that of the chip is unknown, or what its layers need."""
  if topology.local or not topology.memory or isinstance(p.inputs.model.config, CustomConfig):  # of unknown layers
    return None
  chip = topology.chip
  if not chip.flops:
    chip = dataclasses.replace(chip, **_UNKNOWN)
  machine = dataclasses.replace(topology, chip=chip)
  return Room(machine, arithmetic.USABLE * topology.memory)


def fitted(p: PreparedStage, topology: Topology, note: Callable[[str], Any] = str) -> PreparedStage:
  """Returns the stage with what `choose` finds, the same on all processes."""
  found = coordination.broadcast(choose(p, topology))
  if not found:
    return p
  limits = room(p, topology)
  assert limits is not None
  given = {} if p.config.model.remat in arithmetic.ESTIMATED else {'model.remat': 'full'}
  before, after = (limits.needs(p, x) for x in (given, given | found))
  phases = {'updating': (before.updating, after.updating), 'sampling': (before.sampling, after.sampling)}
  less = {phase: x for phase, x in phases.items() if x[1] < x[0]}
  what = ', '.join(f'config.{k}={v}' for k, v in found.items())
  parts = [f'{phase} takes {gib(now)} GiB instead of {gib(was)}' for phase, (was, now) in less.items()]
  note(f'{p.name}: {what}: {", ".join(parts)}, of {gib(topology.memory)} a device (by arithmetic)')
  most = gib(max(was for was, _ in less.values()))
  why = f'memory: else {most} of {gib(topology.memory)} GiB'
  return dataclasses.replace(search.vary(p, found), by_memory=dict.fromkeys(found, why))


def choose(p: PreparedStage, topology: Topology) -> dict[str, Any]:
  """Returns {'section.field': value} in place of fields that the config leaves open and that would need too much.

  Args:
    p: a stage whose meshes are given, of a run or of a plan.
    topology: the machine.

  Returns:
    The fastest `model.remat` and `train.micro_batch_size` that fit, the most of `rollout.slots`, and
    `rollout.offload` where no more than a few sequences fit without it; {} where the platform's own values fit,
    or where the memory of the chip is unknown. Where nothing fits it is what needs least.
  """
  limits = room(p, topology)
  return choose_in(p, limits) if limits else {}


def choose_in(p: PreparedStage, limits: Room) -> dict[str, Any]:
  """Returns what `choose` does, for memory that is known."""
  found: dict[str, Any] = {}
  if checks.samples(p.config, p.inputs.algorithm) and not p.config.rollout.slots and not p.config.rollout.page_size:
    found |= _slots(p, limits)
  if p.config.model.remat != 'none':
    found |= _update(p, limits)
  return found


def may_offload(p: PreparedStage, machine: Topology) -> bool:
  """Returns whether optimizer states can wait in the memory of the host while completions are sampled."""
  config = p.config
  if not p.inputs.algorithm.on_policy or config.rollout.staleness or config.mesh.rollout_devices:
    return False
  if config.reference.every or config.train_on_rollouts:
    return False
  mine = [d for d in machine.owned if d.process_index == jax.process_index()]
  return not machine.owned or bool(mine) and memory_lib.can_offload(mine[0])


def _slots(p: PreparedStage, limits: Room) -> dict[str, Any]:
  """Returns the most `rollout.slots` that fit, halved as often as needed; {} for as many as there are without.

  Where fewer than 8 fit beside the optimizer, it waits on the host meanwhile. Pages and shorter blocks are
  no way to make it fit: fewer slots always take less.
  """
  most, _ = sampling_arithmetic.slots(p.inputs)
  halves = [n for i in range(most.bit_length()) if (n := math.ceil(most / 2**i)) > 1 or most == 1]
  many = [n for n in halves if n >= _FEWEST] or halves[:1]
  few = [n for n in halves if n not in many]
  offloads = [False]  # whether optimizer states wait on the host
  if not p.config.rollout.offload and may_offload(p, limits.machine):
    offloads.append(True)
  settings: dict[str, Any] = {}
  for slots, offload in [(n, offload) for numbers in (many, few) for offload in offloads for n in numbers]:
    settings = {'rollout.slots': slots} if slots < most else {}
    if offload:
      settings['rollout.offload'] = True
    if limits.needs(p, settings | {'model.remat': 'full'}).sampling <= limits.usable:
      return settings
  return settings  # the last one needs least


def _update(p: PreparedStage, limits: Room) -> dict[str, Any]:
  """Returns the settings of the fastest update that fits, or of the one that needs least."""
  given = p.config.model.remat
  tried: list[tuple[Needs, dict[str, Any]]] = []
  choices = ('dots', 'full') if given == 'auto' else (given,)  # the first one is what the platform does by itself
  for remat in choices:
    for rows in _rows(p, limits.machine):
      settings: dict[str, Any] = {'model.remat': remat} if remat != choices[0] else {}
      settings |= {'train.micro_batch_size': rows} if rows else {}
      tried.append((limits.needs(p, settings), settings))
      if tried[0][0].updating <= limits.usable:  # as the platform has it
        return {}
  fitting = [(needs.update_s, settings) for needs, settings in tried if needs.updating <= limits.usable]
  least = [(needs.updating, settings) for needs, settings in tried]
  return min(fitting or least, key=operator.itemgetter(0))[1]  # of equal ones the first, with most rows


def _rows(p: PreparedStage, machine: Topology) -> Iterator[int]:
  """Yields rows at a time over all devices, the most first; 0: those of the config, or of the platform."""
  yield 0
  if p.config.train.micro_batch_size:
    return
  on_policy = p.inputs.algorithm.on_policy
  sizes = parse_mesh(p.config.mesh.train, meshes.train_devices(p.inputs, machine), 'config.mesh.train')
  shards = math.prod(sizes[a] for a in BATCH_AXES)
  most = batch_shape.batch_shape(p.config, on_policy, shards).micro_rows // shards
  # Rows of data are as many as the config says: a part of them divides them.
  yield from (shards * n for n in range(most - 1, 0, -1) if on_policy or most % n == 0)
