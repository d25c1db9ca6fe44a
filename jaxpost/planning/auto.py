"""Resolves `config.mesh.train=auto` and `config.mesh.rollout=auto`: the fastest mesh that fits.

The update is compiled for each candidate of `meshes`, with everything but the
mesh as the config has it; the run then takes the chosen program from JAX's
compilation cache. The same devices get the same mesh, so a run resumes
exactly; other devices may get another.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from jaxpost.distributed import coordination
from jaxpost.errors import InputError
from jaxpost.planning import aot, defaults, dry_run, machines, meshes, nearest, search, stage
from jaxpost.stage import batch_shape
from jaxpost.stage.records import PreparedStage

AUTO = 'auto'


def resolve(prepared: list[PreparedStage], note: Callable[[str], None]) -> list[PreparedStage]:
  """Returns the stages with meshes for the devices of this run in place of 'auto', and with defaults that fit them.

  Args:
    prepared: the stages of a run.
    note: (text) -> prints it for people.
  """
  here = machines.here(jax.devices())
  out = []
  for p in prepared:
    if AUTO in (p.config.mesh.train, p.config.mesh.rollout):
      dry = dry_run.with_made_up_data(p.inputs)  # the shapes of its weights are known, whatever names them
      p = search.vary(p, coordination.broadcast(choose(dry, here, note)))
    p = defaults.fitted(p, here, note)
    nearest.check_state(p, here)
    out.append(dataclasses.replace(p, check_fits=functools.partial(nearest.check_programs, p, here)))
  return out


def planned(p: PreparedStage, options: stage.Options) -> dict:
  """Returns the plan of a stage with the nearest that fits; InputError with it where XLA refuses a program."""
  try:
    return nearest.of_plan(p, options.topology, stage.plan(p, options))
  except aot.TooLargeError as e:
    raise InputError(f'{p.name}: {e}; {nearest.advice(p, options.topology, e.program, e.needed)}') from e


def choose(p: PreparedStage, topology: machines.Topology, note: Callable[[str], None]) -> dict[str, str]:
  """Returns {'mesh.train': mesh, 'mesh.rollout': mesh}, those of them that are 'auto' in the config.

  Args:
    p: a stage without data or weights; see `dry_run`.
    topology: the machine.
    note: (text) -> prints it for people.

  Raises:
    InputError: the update fits on no mesh.
  """
  found = {}
  if p.config.mesh.train == AUTO:
    other = p.config.mesh.rollout.replace(AUTO, 'data=-1')
    found['mesh.train'] = _train(search.vary(p, {'mesh.rollout': other}), topology, note)
    note(f'config.mesh.train of {p.name}: {found["mesh.train"]}')
  if p.config.mesh.rollout == AUTO:
    found['mesh.rollout'] = _rollout(search.vary(p, found), topology)
    note(f'config.mesh.rollout of {p.name}: {found["mesh.rollout"]}')
  return found


def _train(p: PreparedStage, topology: machines.Topology, note: Callable) -> str:
  found = list(meshes.training(p.inputs, topology, fixed=True))
  if not found:
    # Raises the error that names what does not divide.
    batch_shape.batch_shape(p.config, p.inputs.algorithm.on_policy, meshes.train_devices(p.inputs, topology))
  if len(found) == 1 or not topology.chip.memory:
    return found[0]
  times = {}
  errors = []
  for mesh in found:
    settings = {'mesh.train': mesh}
    try:
      plan = _plan(p, settings, topology, 'update')
    except InputError as error:  # not every stage supports every axis
      errors.append(error)
      note(f'{mesh}: {error}')
      continue
    if plan['fits']:
      times[mesh] = search.seconds_a_token(search.Candidate(settings, search.timed(plan)))
  if len(errors) == len(found):
    raise errors[0]
  if not times:
    near = nearest.advice(search.vary(p, {'mesh.train': 'fsdp=-1'}), topology)
    raise InputError(
      f'config.mesh.train: the update of {p.name} fits on no mesh of {topology.text}; '
      + (near or 'take more chips, shorter rows, a smaller config.train.micro_batch_size or config.model.remat=full')
    )
  return min(times, key=times.__getitem__)


def _rollout(p: PreparedStage, topology: machines.Topology) -> str:
  """Returns the mesh that splits the sampler's weights least and fits."""
  found = meshes.sampling(p.inputs, topology)
  if not p.inputs.algorithm.on_policy or not topology.chip.memory:
    return found[0]
  for mesh in found:
    if _plan(p, {'mesh.rollout': mesh}, topology, 'generate')['fits']:
      return mesh
  raise InputError(
    f'config.mesh.rollout: the sampler of {p.name} fits on no mesh of {topology.text}; lower config.rollout.slots'
  )


def _plan(p: PreparedStage, settings: dict, topology: machines.Topology, program: str) -> dict:
  p = search.vary(p, settings)
  # Each process compiles, so no process waits for another here.
  try:
    return stage.plan(search.vary(p, defaults.choose(p, topology)), stage.Options(topology, (program,)))
  except aot.TooLargeError:
    return {'fits': False}
