"""Plans a stage: compiles its programs and returns the object of plan.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpost.errors import InputError, did_you_mean
from jaxpost.hardware import memory
from jaxpost.models import transformer
from jaxpost.planning import aot, roofline

if TYPE_CHECKING:
  from jaxpost.planning import machines
  from jaxpost.stage.records import PreparedStage


# Names of the programs that stages have.
PROGRAMS = (*memory.START, *memory.SAMPLING, 'update', 'score', 'values', 'hidden', 'topk', 'evaluate', 'digest')


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of `launch.plan`.

  only: names of the programs to plan; (): all. price: USD per chip-hour.
  """

  topology: machines.Topology
  only: tuple = ()
  price: float = 0.0
  stage: str = ''


def check_names(programs: Sequence[str]) -> None:
  """Raises InputError, with the most similar name, for a name that no program has."""
  for name in programs:
    if name not in PROGRAMS:
      hint = did_you_mean(name, PROGRAMS)
      raise InputError(f'--programs: there is no {name!r}; {hint}known: {", ".join(PROGRAMS)}')


def plan(prepared: PreparedStage, options: Options) -> dict:
  """Compiles the programs of a stage and returns their plan; InputError if none is in `options.only`."""
  topology = options.topology
  compiled = aot.compile_stage(prepared, topology, options.only)
  placed = compiled.placed
  if not compiled.rows:
    raise InputError(f'--programs: {",".join(options.only)}: {prepared.name} has none of these; --stage plans another')
  rows = roofline.programs(compiled, topology)
  step = roofline.step_of(placed)
  layouts = dict(train=placed.train)
  if placed.algorithm.on_policy:
    layouts |= dict(rollout=placed.rollout)
  if placed.config.mesh.score:
    layouts |= dict(score=placed.score)
  # Seconds of a step need all its programs; a step without sampling consists of its updates.
  timed = not options.only or ('update' in options.only and not step.sampled)
  return dict(
    stage=prepared.name,
    algorithm=placed.config.algorithm,
    topology=topology.text,
    slices=topology.slices,
    chips=topology.chips,
    devices=topology.devices,
    device_kind=placed.train.mesh.devices.flat[0].device_kind,
    memory_per_device=topology.memory,
    family=placed.model.config.family,
    parameters=transformer.num_params(placed.model.config),
    mesh={k: dict(v.mesh.shape) for k, v in layouts.items()},
    trained_tokens=step.trained,
    sampled_tokens=step.sampled,
    fits=None if not topology.memory else all(r['fits'] for r in rows),
    programs=rows,
    step=roofline.summary(placed, topology, rows, options.price) if timed else {},
  )


def with_step(plan: dict) -> dict:
  """Returns the plan of an update alone, with the seconds of a step that consists of it."""
  row = plan['programs'][0]
  step = plan['step'] or {'no_overlap': {'step_s': row['calls'] * row['seconds']['no_overlap']}}
  return plan | {'step': step}


def seconds_a_token(plan: dict) -> float:
  """Returns seconds per trained token without overlap, so that network traffic counts."""
  return plan['step']['no_overlap']['step_s'] / plan['trained_tokens']


def vary(p: PreparedStage, settings: dict) -> PreparedStage:
  """Returns the stage with {'section.field': value} in its config."""
  config = p.config
  for key, value in settings.items():
    section, field = key.split('.')
    config = dataclasses.replace(config, **{section: dataclasses.replace(vars(config)[section], **{field: value})})
  return dataclasses.replace(p, inputs=dataclasses.replace(p.inputs, config=config))
