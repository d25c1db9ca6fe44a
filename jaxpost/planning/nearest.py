"""Finds the nearest config that fits for one that does not, by the arithmetic that chooses defaults.

If possible, a step computes the same result: with smaller micro-batches, more recomputation or other meshes. Otherwise
there is one proposal that fits of each other kind.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpost.errors import InputError
from jaxpost.hardware import memory
from jaxpost.planning import arithmetic, defaults, meshes, stage
from jaxpost.planning.defaults import Room
from jaxpost.planning.tables import gib
from jaxpost.stage import checks, prepare
from jaxpost.stage.batch_shape import row_length

if TYPE_CHECKING:
  from jaxpost.planning.machines import Topology
  from jaxpost.programs.compile import TooLargeError
  from jaxpost.stage.records import PreparedStage

# Fields that do not change the result of a step -> values at which `defaults` chooses them, and the order in which sets
# of them are tried: none (only those that the config leaves open), one, several.
_SLOTS = {'rollout.slots': 0}
_ROWS = {'train.micro_batch_size': 0}
_REMAT = {'model.remat': 'auto'}
_OPENED: tuple[dict[str, Any], ...]
_OPENED = ({}, _SLOTS, _ROWS, _REMAT, _ROWS | _REMAT, _SLOTS | _ROWS, _SLOTS | _REMAT, _SLOTS | _ROWS | _REMAT)
_OPEN = _OPENED[-1]
_LORA = {'lora.rank': 16}
_HALF = {'model.param_dtype': 'bfloat16'}
_QUANTIZED = {'model.quantize': 'nf4'}
_SHORTEST = 128  # tokens of a row or completion
_MORE_DEVICES = 7  # doublings


class Proposal(NamedTuple):
  """Settings {'section.field': value} that fit, on `times` as many devices."""

  settings: dict[str, Any]
  times: int = 1


def check_state(p: PreparedStage, topology: Topology) -> None:
  """Raises InputError if weights and optimizer states alone, whose sizes are exact, exceed the memory of a device."""
  limits = defaults.room(p, topology)
  if not limits:
    return
  needs = limits.needs(p, {'model.remat': 'full'})
  if needs.held > topology.memory:
    raise InputError(
      f'{p.name}: weights and optimizer states take {gib(needs.held)} GiB of a device, which has '
      f'{gib(topology.memory)}; {advice(p, topology)}'
    )
  if needs.scoring > topology.memory:
    raise InputError(
      f'{p.name}: frozen models take {gib(needs.scoring)} GiB of a device of config.mesh.score_devices, which has '
      f'{gib(topology.memory)}; raise it, or split them further by config.mesh.score'
    )


def counted(p: PreparedStage, topology: Topology, error: TooLargeError) -> PreparedStage:
  """Returns the stage with the `memory_scale` at which its settings do not fit, because XLA says so."""
  limits = defaults.room(p, topology)
  if not limits:
    return p
  needs = limits.needs(p, {} if p.config.model.remat in arithmetic.ESTIMATED else {'model.remat': 'dots'})
  # XLA may have counted temporaries alone.
  needed = max(error.needed, 1.01 * limits.usable)
  updating, sampling = p.memory_scale
  if error.program in memory.SAMPLING and needs.sampling:
    sampling *= max(1.0, needed / needs.sampling)
  else:
    updating *= max(1.0, needed / needs.updating)
  return dataclasses.replace(p, memory_scale=(updating, sampling))


def smaller(
  p: PreparedStage, topology: Topology, error: TooLargeError, note: Callable[[str], Any]
) -> PreparedStage | None:
  """Returns a stage of `counted` with other settings of the fields that its config leaves open; None if none fit.

  note(text) prints a message.
  """
  notes: list[str] = []
  again = defaults.fitted(_opened(p), topology, notes.append)
  limits = defaults.room(again, topology)
  if not limits or not limits.fits(again):
    return None
  for line in (f'{p.name}: {error}; smaller settings are chosen', *notes):
    note(line)
  return again


def advice(p: PreparedStage, topology: Topology) -> str:
  """Returns what to change so that a stage fits, as command-line flags; '' if the memory is unknown.

  Args:
    p: the stage, with the defaults that were chosen for it.
  """
  limits = defaults.room(p, topology)
  if not limits:
    return ''
  proposals = nearest(p, limits)
  if not proposals:
    return f'nothing fits up to {2**_MORE_DEVICES} times as many devices; take a smaller model'
  prefix = f'--config.{p.name}.' if p.config.stages else '--config.'
  lines = []
  for settings, times in proposals:
    flags = ' '.join(shlex.quote(f'{prefix}{key}={value}') for key, value in settings.items())
    if times > 1:
      flags = f'{times * topology.devices} of these devices' + (f' with {flags}' if flags else '')
    lines.append(flags)
  return 'the nearest that fits, by arithmetic: ' + '; or '.join(lines)


def nearest(p: PreparedStage, limits: Room) -> list[Proposal]:
  """Returns the smallest change that fits and keeps a step's result, or else one change of each kind."""
  opened = _opened(p)
  for settings in _same(opened, limits):
    if fitting := _fitting(opened, Proposal(settings), limits):
      return [fitting]
  out = []
  for proposals in (_smaller(opened), _shorter(opened), _wider(opened, limits)):
    attempts = (_fitting(opened, x._replace(settings=_OPEN | x.settings), limits) for x in proposals)
    if first := next(filter(None, attempts), None):
      out.append(first)
  return out


def _fitting(p: PreparedStage, proposal: Proposal, limits: Room) -> Proposal | None:
  """Returns a proposal with the defaults chosen for it and without the config's own values; None if it does not fit."""
  machine = limits.machine
  size = (*machine.size[:-1], machine.size[-1] * proposal.times)
  machine = dataclasses.replace(machine, size=size, owned=machine.owned * proposal.times)
  limits = dataclasses.replace(limits, machine=machine)
  try:
    changed = stage.vary(p, proposal.settings)
    inputs = changed.inputs
    model = prepare.make_inputs(p.name, inputs.config, inputs.algorithm, inputs.sources, inputs.tokenizer)
    changed = dataclasses.replace(changed, inputs=model)
    chosen = defaults.choose_in(changed, limits)
    if not limits.fits(changed, chosen):
      return None
  except InputError:  # not possible with the model, its method or this number of devices
    return None
  if limits.scale == (1.0, 1.0):  # a run chooses the same for fields that are open
    chosen = {key: value for key, value in chosen.items() if key in _OPEN and _value(p, key) != _OPEN[key]}
  settings = {key: value for key, value in (proposal.settings | chosen).items() if _value(p, key) != value}
  return proposal._replace(settings=settings)


def _value(p: PreparedStage, key: str) -> Any:
  section, field = key.split('.')
  return vars(vars(p.config)[section])[field]


def _opened(p: PreparedStage) -> PreparedStage:
  """Returns the stage before any of its settings was chosen to fit in memory."""
  defaults_open = _OPEN | {'rollout.offload': False}
  return stage.vary(dataclasses.replace(p, by_memory={}), {k: defaults_open[k] for k in p.by_memory})


def _same(p: PreparedStage, limits: Room) -> Iterator[dict[str, Any]]:
  """Yields settings that do not change the result of a step."""
  samples = checks.samples(p.config, p.inputs.algorithm)
  yield from (x for x in _OPENED if samples or 'rollout.slots' not in x)
  if limits.machine.devices == 1:
    return
  # All state split over the devices; then also with tensor axes, of the sampler and of training.
  tensors = meshes.tensors(p.inputs, limits.machine.devices)
  for sampler in tensors if samples else tensors[:1]:
    for tensor in tensors:
      rollout = {'mesh.rollout': f'data=-1,tensor={sampler}'} if sampler > 1 else {}
      train = f'fsdp=-1,tensor={tensor}' if tensor > 1 else 'fsdp=-1'
      yield _OPEN | {'mesh.train': train} | rollout


def _smaller(p: PreparedStage) -> Iterator[Proposal]:
  """Yields smaller dtypes of weights, and adapters."""
  yield Proposal(_HALF)
  model = p.inputs.model
  adapters = {} if model.frozen - model.mtp else _LORA  # a model with frozen weights has smaller dtypes only
  yield from (Proposal(adapters | x) for x in ({}, _HALF, _QUANTIZED) if adapters | x)


def _shorter(p: PreparedStage) -> Iterator[Proposal]:
  """Yields shorter rows of data, or completions."""
  on_policy = p.inputs.algorithm.on_policy
  name = 'rollout.max_new_tokens' if on_policy else 'train.row_length'
  tokens = p.config.rollout.max_new_tokens if on_policy else row_length(p.config, on_policy)
  while (tokens := tokens // 2) >= _SHORTEST:
    # A fixed row_length would not get shorter with completions.
    yield Proposal({name: tokens} | ({'train.row_length': 0} if on_policy else {}))


def _wider(p: PreparedStage, limits: Room) -> Iterator[Proposal]:
  """Yields larger numbers of the same devices, with all state split over them."""
  samples = checks.samples(p.config, p.inputs.algorithm)
  for times in (2**i for i in range(1, _MORE_DEVICES + 1)):
    for tensor in meshes.tensors(p.inputs, limits.machine.devices * times):
      split = f',tensor={tensor}' if tensor > 1 else ''
      rollout = {'mesh.rollout': f'data=-1{split}'} if samples and split else {}
      yield Proposal({'mesh.train': 'fsdp=-1'} | rollout, times)
      yield Proposal({'mesh.train': f'fsdp=-1{split}'} | rollout, times)
