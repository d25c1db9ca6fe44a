"""Resolves `config.mesh.train=auto` and `config.mesh.rollout=auto`: the fastest mesh that fits.

The update is compiled for each candidate of `meshes`, with all other fields as in the config. The run then takes the
chosen program from JAX's compilation cache. The same devices always get the same mesh, so a run resumes exactly; other
devices may get another mesh.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxpost.distributed import coordination
from jaxpost.errors import InputError
from jaxpost.planning import defaults, dry_run, machines, meshes, nearest, stage
from jaxpost.planning.tables import gib
from jaxpost.programs.compile import TooLargeError
from jaxpost.stage import batch_shape, place
from jaxpost.stage.place import PlacedStage
from jaxpost.stage.records import PreparedStage

AUTO = 'auto'


def resolve(prepared: list[PreparedStage], note: Callable[[str], None]) -> list[PreparedStage]:
  """Returns the stages with meshes for the devices of this run instead of 'auto', and with defaults that fit.

  note(text) prints a message.
  """
  machine = machines.here(jax.devices())
  resolved = []
  for p in prepared:
    if AUTO in (p.config.mesh.train, p.config.mesh.rollout):
      without_data = dry_run.with_made_up_data(p.inputs)  # the shapes of its weights are known, whatever names them
      p = stage.vary(p, coordination.broadcast(choose(without_data, machine, note)))
    p = defaults.fitted(p, machine, note)
    nearest.check_state(p, machine)
    resolved.append(dataclasses.replace(p, choose_smaller=functools.partial(choose_smaller, machine, note)))
  return resolved


def choose_smaller(
  machine: machines.Topology, note: Callable[[str], Any], placed: PlacedStage, error: TooLargeError
) -> PlacedStage:
  """Places a stage again, with smaller settings of fields that its config leaves open; InputError if none fit."""
  smaller = _smaller(placed, machine, note, error)
  return place.place_stage(smaller, ledger=dataclasses.replace(placed.ledger, rows=[], begun=[]))


def _smaller(
  p: PreparedStage, machine: machines.Topology, note: Callable[[str], Any], error: TooLargeError
) -> PreparedStage:
  p = nearest.counted(p, machine, error)
  if smaller := nearest.smaller(p, machine, error, note):
    return smaller
  hint = nearest.advice(p, machine) or 'take config.model.remat=full, smaller micro-batches or more devices'
  raise InputError(f'{p.name}: {error}; {hint}') from error


def planned(p: PreparedStage, options: stage.Options, note: Callable[[str], Any] = str) -> dict:
  """Returns the plan of a stage; its 'nearest' says what to change if it does not fit, and is '' if it does.

  Like a run, it plans again with smaller settings of fields that the config leaves open if a program is too large.

  Raises:
    InputError: a program is so large that XLA does not compile it.
  """
  machine = options.topology
  while True:
    try:
      plan = stage.plan(p, options)
    except TooLargeError as error:
      p = _smaller(p, machine, note, error)
      continue
    if plan['fits'] is not False:
      return plan | {'nearest': ''}
    worst = max(plan['programs'], key=lambda row: row['bytes_per_chip']['total'])
    name, needed = worst['program'], worst['bytes_per_chip']['total']
    too_large = TooLargeError(name, needed, f' of {gib(machine.memory)} a device')
    p = nearest.counted(p, machine, too_large)
    smaller = nearest.smaller(p, machine, too_large, note)
    if not smaller:
      return plan | {'nearest': nearest.advice(p, machine)}
    p = smaller


def choose(p: PreparedStage, topology: machines.Topology, note: Callable[[str], None]) -> dict[str, str]:
  """Returns {'mesh.train': mesh, 'mesh.rollout': mesh} for those of the two that are 'auto' in the config.

  Args:
    p: a stage without data or weights; see `dry_run`.

  Raises:
    InputError: the update fits on no mesh.
  """
  chosen = {}
  if p.config.mesh.train == AUTO:
    rollout = p.config.mesh.rollout.replace(AUTO, 'data=-1')
    chosen['mesh.train'] = _train(stage.vary(p, {'mesh.rollout': rollout}), topology, note)
    note(f'config.mesh.train of {p.name}: {chosen["mesh.train"]}')
  if p.config.mesh.rollout == AUTO:
    chosen['mesh.rollout'] = _rollout(stage.vary(p, chosen), topology)
    note(f'config.mesh.rollout of {p.name}: {chosen["mesh.rollout"]}')
  return chosen


def _train(p: PreparedStage, topology: machines.Topology, note: Callable) -> str:
  candidates = list(meshes.training(p.inputs, topology, fixed=True))
  if not candidates:
    # Raises the error that names what does not divide.
    batch_shape.batch_shape(p.config, p.inputs.algorithm.on_policy, meshes.train_devices(p.inputs, topology))
  if len(candidates) == 1 or not topology.chip.memory:
    return candidates[0]
  seconds_per_token = {}
  errors = []
  for mesh in candidates:
    settings = {'mesh.train': mesh}
    try:
      plan = _plan(p, settings, topology, 'update')
    except InputError as error:  # not every stage supports every axis
      errors.append(error)
      note(f'{mesh}: {error}')
      continue
    if plan['fits']:
      seconds_per_token[mesh] = stage.seconds_a_token(stage.with_step(plan))
  if len(errors) == len(candidates):
    raise errors[0]
  if not seconds_per_token:
    near = nearest.advice(stage.vary(p, {'mesh.train': 'fsdp=-1'}), topology)
    raise InputError(
      f'config.mesh.train: the update of {p.name} fits on no mesh of {topology.text}; '
      + (near or 'take more chips, shorter rows, a smaller config.train.micro_batch_size or config.model.remat=full')
    )
  return min(seconds_per_token, key=seconds_per_token.__getitem__)


def _rollout(p: PreparedStage, topology: machines.Topology) -> str:
  """Returns the mesh that fits with the least split of the sampler's weights."""
  candidates = meshes.sampling(p.inputs, topology)
  if not p.inputs.algorithm.on_policy or not topology.chip.memory:
    return candidates[0]
  for mesh in candidates:
    if _plan(p, {'mesh.rollout': mesh}, topology, 'generate')['fits']:
      return mesh
  raise InputError(
    f'config.mesh.rollout: the sampler of {p.name} fits on no mesh of {topology.text}; lower config.rollout.slots'
  )


def _plan(p: PreparedStage, settings: dict, topology: machines.Topology, program: str) -> dict:
  p = stage.vary(p, settings)
  # Each process compiles on its own, so this is not a collective.
  try:
    return stage.plan(stage.vary(p, defaults.choose(p, topology)), stage.Options(topology, (program,)))
  except TooLargeError:
    return {'fits': False}
