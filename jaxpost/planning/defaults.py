"""Chooses fields that a config leaves open so that a step fits: remat, micro-batch size, slots of the sampler.

This is arithmetic, which takes a second, for accelerators whose memory is known. If XLA then finds that a compiled
program needs more memory than there is, the estimate is scaled to it and smaller settings are chosen.
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
from jaxpost.planning import arithmetic, meshes, sampling_arithmetic, stage
from jaxpost.planning.tables import gib
from jaxpost.stage import batch_shape, checks
from jaxpost.stage.records import PreparedStage

if TYPE_CHECKING:
  from jaxpost.planning.machines import Topology

_FEWEST = 8  # slots; with fewer, optimizer states are offloaded instead
# Rates of unknown chips: updates are only compared with each other, so only ratios matter.
_UNKNOWN: dict[str, Any] = dict(flops=312e12, bandwidth=2e12, link=1e11, network=1e10)


@dataclasses.dataclass(frozen=True)
class Room:
  """The memory that the programs of a stage may take on a machine.

  usable: bytes of a device.
  scale: memory by XLA / by arithmetic, of an update and of sampling, where XLA's is known.
  """

  machine: Topology
  usable: float
  scale: tuple[float, float] = (1.0, 1.0)

  def needs(self, p: PreparedStage, settings: dict[str, Any] | None = None) -> Needs:
    """Returns what a step needs with settings {'section.field': value}; InputError if its rows do not split."""
    mesh = p.config.mesh
    train = parse_mesh(mesh.train, meshes.train_devices(p.inputs, self.machine), 'config.mesh.train')
    rollout = parse_mesh(mesh.rollout, meshes.rollout_devices(p.inputs, self.machine), 'config.mesh.rollout')
    varied = stage.vary(p, settings or {})
    branches = p.has_branches
    estimate = arithmetic.estimate(varied.inputs, self.machine, train, rollout, branches=branches)
    not_on_sampler: tuple[str, ...] = ()  # purposes of memory of other devices, or of the host
    if mesh.rollout_devices:
      not_on_sampler = ('parameters', 'optimizer', 'critic', 'frozen')
    elif varied.config.rollout.offload and p.inputs.algorithm.on_policy:
      # A reward model and teachers are not offloaded.
      resident_roles = p.inputs.sources.keys() - {'policy', 'critic', 'reference'}
      not_on_sampler = ('optimizer', 'critic') if resident_roles else ('optimizer', 'critic', 'frozen')
    updating, sampling = self.scale
    return Needs(
      updating=updating * sum(estimate.updating.values()),
      sampling=sampling * sum(size for purpose, size in estimate.sampling.items() if purpose not in not_on_sampler),
      held=sum(estimate.updating.get(purpose, 0.0) for purpose in ('parameters', 'optimizer', 'critic', 'frozen')),
      update_s=estimate.seconds['update'],
      scoring=estimate.scoring,
    )

  def fits(self, p: PreparedStage, settings: dict[str, Any] | None = None) -> bool:
    """Returns whether an update, sampling, and frozen models on separate devices fit."""
    needs = self.needs(p, settings)
    return max(needs.updating, needs.sampling, needs.scoring) <= self.usable


class Needs(NamedTuple):
  """Bytes on a device during an update and while sampling (0: nothing is sampled), and seconds of a step's updates.

  held: bytes of weights and optimizer states, whose sizes are exact.
  scoring: bytes of frozen models on a device of `mesh.score_devices`, also exact.
  """

  updating: float
  sampling: float
  held: float
  update_s: float
  scoring: float


def room(p: PreparedStage, topology: Topology) -> Room | None:
  """Returns the memory for a stage; None if that of the chip is unknown, or the layers of a custom model are."""
  if topology.local or not topology.memory or isinstance(p.inputs.model.config, CustomConfig):
    return None
  chip = topology.chip
  if not chip.flops:
    chip = dataclasses.replace(chip, **_UNKNOWN)
  machine = dataclasses.replace(topology, chip=chip)
  return Room(machine, arithmetic.USABLE * topology.memory, p.memory_scale)


def fitted(p: PreparedStage, topology: Topology, note: Callable[[str], Any] = str) -> PreparedStage:
  """Returns the stage with the settings of `choose`, the same on all processes."""
  chosen = coordination.broadcast(choose(p, topology))
  if not chosen:
    return p
  limits = room(p, topology)
  assert limits is not None
  baseline = {} if p.config.model.remat in arithmetic.ESTIMATED else {'model.remat': 'full'}
  before = limits.needs(p, baseline)
  after = limits.needs(p, baseline | chosen)
  phases = {'updating': (before.updating, after.updating), 'sampling': (before.sampling, after.sampling)}
  lower = {phase: x for phase, x in phases.items() if x[1] < x[0]}
  settings = ', '.join(f'config.{key}={value}' for key, value in chosen.items())
  parts = [f'{phase} takes {gib(new)} GiB instead of {gib(old)}' for phase, (old, new) in lower.items()]
  note(f'{p.name}: {settings}: {", ".join(parts)}, of {gib(topology.memory)} a device (by arithmetic)')
  needed = gib(max(old for old, _ in lower.values()))
  reason = f'memory: else {needed} of {gib(topology.memory)} GiB'
  return dataclasses.replace(stage.vary(p, chosen), by_memory=dict.fromkeys(chosen, reason))


def choose(p: PreparedStage, topology: Topology) -> dict[str, Any]:
  """Returns {'section.field': value} for fields that the config leaves open and whose own defaults need too much.

  Args:
    p: a stage whose meshes are given, of a run or of a plan.

  Returns:
    The fastest `model.remat` and `train.micro_batch_size` that fit, the largest `rollout.slots`, and
    `rollout.offload` if only a few slots fit without it; {} if the platform's own values fit or the memory of the
    chip is unknown. If nothing fits, the settings that need least.
  """
  limits = room(p, topology)
  return choose_in(p, limits) if limits else {}


def choose_in(p: PreparedStage, limits: Room) -> dict[str, Any]:
  """Returns the same as `choose`, for known memory."""
  chosen: dict[str, Any] = {}
  if checks.samples(p.config, p.inputs.algorithm) and not p.config.rollout.slots and not p.config.rollout.page_size:
    chosen |= _slots(p, limits)
  if p.config.model.remat != 'none':
    chosen |= _update(p, limits)
  return chosen


def may_offload(p: PreparedStage, machine: Topology) -> bool:
  """Returns whether optimizer states can be in host memory while completions are sampled."""
  config = p.config
  if not p.inputs.algorithm.on_policy or config.rollout.staleness or config.mesh.rollout_devices:
    return False
  if config.reference.every or config.train_on_rollouts:
    return False
  local_devices = [d for d in machine.owned if d.process_index == jax.process_index()]
  return not machine.owned or bool(local_devices) and memory_lib.can_offload(local_devices[0])


def _slots(p: PreparedStage, limits: Room) -> dict[str, Any]:
  """Returns the largest `rollout.slots` that fit, halved as often as needed; {} if the default number fits.

  If fewer than 8 fit beside the optimizer states, these are offloaded while sampling. Pages and shorter blocks are not
  tried, because fewer slots always take less memory.
  """
  default, _ = sampling_arithmetic.slots(p.inputs)
  halves = [n for i in range(default.bit_length()) if (n := math.ceil(default / 2**i)) > 1 or default == 1]
  many = [n for n in halves if n >= _FEWEST] or halves[:1]
  few = [n for n in halves if n not in many]
  offloads = [False]  # whether optimizer states are offloaded
  if not p.config.rollout.offload and may_offload(p, limits.machine):
    offloads.append(True)
  settings: dict[str, Any] = {}
  for slots, offload in [(n, offload) for numbers in (many, few) for offload in offloads for n in numbers]:
    settings = {'rollout.slots': slots} if slots < default else {}
    if offload:
      settings['rollout.offload'] = True
    if limits.needs(p, settings | {'model.remat': 'full'}).sampling <= limits.usable:
      return settings
  return settings  # the last one needs least


class _Tried(NamedTuple):
  """Settings {'section.field': value} of an update, and what it needs with them."""

  settings: dict[str, Any]
  needs: Needs


def _update(p: PreparedStage, limits: Room) -> dict[str, Any]:
  """Returns the settings of the fastest update that fits, or else of the one that needs least memory."""
  configured = p.config.model.remat
  tried = []
  choices = ('dots', 'full') if configured == 'auto' else (configured,)  # the first one is the platform's default
  for remat in choices:
    for rows in _rows(p, limits.machine):
      settings: dict[str, Any] = {'model.remat': remat} if remat != choices[0] else {}
      settings |= {'train.micro_batch_size': rows} if rows else {}
      tried.append(_Tried(settings, limits.needs(p, settings)))
      if tried[0].needs.updating <= limits.usable:  # the defaults fit
        return {}
  fitting = [x for x in tried if x.needs.updating <= limits.usable]
  if not fitting:
    return min(tried, key=operator.attrgetter('needs.updating')).settings
  return min(fitting, key=operator.attrgetter('needs.update_s')).settings  # of equal ones the first, with most rows


def _rows(p: PreparedStage, machine: Topology) -> Iterator[int]:
  """Yields micro-batch sizes over all devices, the largest first; 0: that of the config, or the platform's."""
  yield 0
  if p.config.train.micro_batch_size:
    return
  on_policy = p.inputs.algorithm.on_policy
  sizes = parse_mesh(p.config.mesh.train, meshes.train_devices(p.inputs, machine), 'config.mesh.train')
  shards = math.prod(sizes[a] for a in BATCH_AXES)
  largest = batch_shape.batch_shape(p.config, on_policy, shards).micro_rows // shards
  # The config decides the number of rows of data, which a micro-batch has to divide.
  yield from (shards * n for n in range(largest - 1, 0, -1) if on_policy or largest % n == 0)
