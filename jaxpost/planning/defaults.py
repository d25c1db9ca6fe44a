"""Chooses what a config leaves open by memory: recomputation, rows at a time, sequences sampled at a time.

By arithmetic, in a second, for accelerators whose memory is known. The programs are compiled after it,
and a run whose programs need more than there is, by XLA's own account, is refused before step 0.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxpost.distributed import coordination
from jaxpost.distributed import mesh as mesh_lib
from jaxpost.distributed.mesh import BATCH_AXES
from jaxpost.matmul import compute_for
from jaxpost.models.config import CustomConfig
from jaxpost.planning import arithmetic, meshes, search
from jaxpost.planning.tables import gib
from jaxpost.stage import batch_shape, checks
from jaxpost.stage.records import PreparedStage

if TYPE_CHECKING:
  from jaxpost.planning.machines import Topology

_USABLE = 0.9  # of the memory: the rest is for fragments, and for what arithmetic leaves out
_OF_A_GPU = 0.92  # that JAX takes of a described GPU; a real one says it itself
_FEWEST = 8  # sequences at a time
_MICRO_TOKENS = compute_for('gpu', 'auto', 'auto').micro_tokens  # of any accelerator
# Rates of a chip that is unknown: updates are only compared with each other, so ratios count.
_UNKNOWN = dict(flops=312e12, bandwidth=2e12, link=1e11, network=1e10)


def fitted(p: PreparedStage, topology: Topology, note: Callable[[str], None] = str) -> PreparedStage:
  """Returns the stage with what `choose` finds, the same on all processes."""
  found = coordination.broadcast(choose(p, topology))
  if found:
    what = ', '.join(f'config.{k}={v}' for k, v in found.items())
    note(f'{p.name}: {what}, by arithmetic for {gib(topology.chip.memory)} GiB a device')
  return dataclasses.replace(search.vary(p, found), by_memory=tuple(found))


def choose(p: PreparedStage, topology: Topology) -> dict[str, Any]:
  """Returns {'section.field': value} in place of fields that the config leaves open and that would need too much.

  Args:
    p: a stage whose meshes are given, of a run or of a plan.
    topology: the machine.

  Returns:
    The fastest `model.remat` and `train.micro_batch_size` that fit, and the most of `rollout.slots`; {} where
    the platform's own values fit, or where the memory of the chip is unknown. Where nothing fits it is what
    needs least.
  """
  memory = topology.chip.memory
  if topology.local or not memory or isinstance(p.inputs.model.config, CustomConfig):  # of unknown layers
    return {}
  chip = topology.chip
  if not chip.flops:
    chip = dataclasses.replace(chip, **_UNKNOWN)
  machine = dataclasses.replace(topology, chip=chip)
  usable = _USABLE * memory * (_OF_A_GPU if topology.gpu and not topology.owned else 1)
  found = {}
  if checks.samples(p.config, p.inputs.algorithm) and not p.config.rollout.slots and not p.config.rollout.page_size:
    found |= _slots(p, machine, usable)
  if p.config.model.remat != 'none':
    found |= _update(p, machine, usable)
  return found


def _estimate(p: PreparedStage, machine: Topology, settings: dict[str, Any]) -> arithmetic.Estimate:
  """Estimates a step with settings {'section.field': value}."""
  mesh, batch = p.config.mesh, p.data.first_batch
  train = mesh_lib.parse_mesh(mesh.train, meshes.train_devices(p.inputs, machine), 'config.mesh.train')
  rollout = mesh_lib.parse_mesh(mesh.rollout, meshes.rollout_devices(p.inputs, machine), 'config.mesh.rollout')
  branches = batch is not None and batch.branch_ids is not None
  return arithmetic.estimate(search.vary(p, settings).inputs, machine, train, rollout, branches=branches)


def _slots(p: PreparedStage, machine: Topology, usable: float) -> dict[str, Any]:
  """Returns {'rollout.slots': the most that fit}, halved as often as needed; {} for as many as there are without."""
  most, _ = arithmetic.slots(p.inputs)
  slots, elsewhere = most, ()  # what is not on the devices that sample
  if p.config.mesh.rollout_devices:
    elsewhere = ('parameters', 'optimizer', 'critic', 'frozen')
  elif p.config.rollout.offload:
    elsewhere = ('optimizer', 'frozen')
  while slots > _FEWEST:
    needed = _estimate(p, machine, {'rollout.slots': slots, 'model.remat': 'full'}).sampling
    if sum(n for k, n in needed.items() if k not in elsewhere) <= usable:
      break
    slots = math.ceil(slots / 2)
  return {} if slots == most else {'rollout.slots': slots}


@dataclasses.dataclass(frozen=True)
class _Tried:
  """Settings {'section.field': value} of an update, with its memory and time on a device."""

  settings: dict[str, Any]
  bytes: float
  seconds: float


def _update(p: PreparedStage, machine: Topology, usable: float) -> dict[str, Any]:
  """Returns the settings of the fastest update that fits, or of the one that needs least."""
  given, tried = p.config.model.remat, []
  for remat in ('dots', 'full') if given == 'auto' else (given,):
    for rows in _rows(p, machine):
      settings = {'model.remat': remat} if remat != ('dots' if given == 'auto' else given) else {}
      settings |= {'train.micro_batch_size': rows} if rows else {}
      estimate = _estimate(p, machine, settings)
      tried.append(_Tried(settings, sum(estimate.updating.values()), estimate.seconds['update']))
      if tried[0].bytes <= usable:  # as the platform has it
        return {}
  fitting = [x for x in tried if x.bytes <= usable]
  if not fitting:
    return min(tried, key=operator.attrgetter('bytes')).settings
  return min(fitting, key=operator.attrgetter('seconds')).settings  # of equal ones the first, with most rows


def _rows(p: PreparedStage, machine: Topology) -> Iterator[int]:
  """Yields rows at a time over all devices, the most first; 0: those of the config, or of the platform."""
  yield 0
  if p.config.train.micro_batch_size:
    return
  on_policy = p.inputs.algorithm.on_policy
  sizes = mesh_lib.parse_mesh(p.config.mesh.train, meshes.train_devices(p.inputs, machine), 'config.mesh.train')
  shards = math.prod(sizes[a] for a in BATCH_AXES)
  most = batch_shape.batch_shape(p.config, on_policy, shards, tokens=_MICRO_TOKENS).micro_rows // shards
  # Rows of data are as many as the config says: a part of them divides them.
  yield from (shards * n for n in range(most - 1, 0, -1) if on_policy or most % n == 0)
