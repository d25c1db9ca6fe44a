"""Optimizers and schedules of optax, by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import optax
from optax import contrib

from jaxpost.errors import InputError, did_you_mean
from jaxpost.models.parameters import nest

if TYPE_CHECKING:
  from jaxpost.models.model import Model
  from jaxpost.stage.schema import OptimSection

# {optimizer that is refused: what it needs that the training loop does not provide}
_NEEDS = {
  **dict.fromkeys(('lbfgs', 'polyak_sgd', 'momo', 'momo_adam', 'sophia'), 'the loss'),
  **dict.fromkeys(('schedule_free', 'schedule_free_adamw', 'schedule_free_sgd'), 'other weights for evaluation'),
  **dict.fromkeys(('sm3', 'rprop', 'optimistic_adam'), 'the same learning rate'),
  # The parameters of all layers are stacked into one array, whose single norm these would use for all layers.
  **dict.fromkeys(('lamb', 'lars', 'fromage', 'novograd'), 'the norm of each matrix of a layer'),
}
_DECAY_MASKS = ('mask', 'weight_decay_mask')


def make_schedule(kind: str, lr: float, steps: int, warmup: int, end: float) -> optax.Schedule:
  """Returns step -> learning rate: linear warm-up, then constant, linear or cosine."""
  decay_steps = max(1, steps - warmup)  # optax divides by it
  main = {
    'constant': optax.constant_schedule(lr),
    'linear': optax.linear_schedule(lr, end, decay_steps),
    'cosine': optax.cosine_decay_schedule(lr, decay_steps, alpha=end / lr if lr else 0.0),
  }[kind]
  if not warmup:
    return main
  ramp = optax.linear_schedule(lr / warmup, lr, warmup)  # the first update has a rate above 0
  return optax.join_schedules([ramp, main], [warmup])


def warmup_steps(section: OptimSection, steps: int) -> int:
  """Returns the warm-up steps of `config.optim` in a stage of `steps` steps."""
  return math.ceil(section.warmup_ratio * steps) if section.warmup_ratio else section.warmup_steps


def make_optimizer(section: OptimSection, schedule: optax.Schedule, part: Model) -> optax.GradientTransformation:
  """Returns the optimizer of optax or optax.contrib that `config.optim` names, with the options that it takes.

  Weight decay is for the matrices and embeddings of `part`, the model of the trained parameters.
  """
  options = dict(b1=section.b1, b2=section.b2, eps=section.eps, weight_decay=section.weight_decay)
  options = {name: value for name, value in options.items() if value != -1}  # -1: the optimizer's default
  if section.name == 'muon':
    from jaxpost.stage import muon

    return muon.make_muon(schedule, options, part, decayed(part))
  make = _known()[section.name]
  parameters = inspect.signature(make).parameters
  kwargs = {name: value for name, value in options.items() if name in parameters}
  for mask in _DECAY_MASKS:
    if mask in parameters and 'weight_decay' in parameters:
      kwargs[mask] = decayed(part)
  return make(schedule, **kwargs)


def _known() -> dict[str, Callable]:
  """Returns {name: function} of the functions of optax and optax.contrib that make an optimizer."""
  return {
    name: make
    for name, make in {**vars(contrib), **vars(optax)}.items()
    if not name.startswith(('_', 'scale_by'))
    and inspect.isfunction(make)
    and 'learning_rate' in inspect.signature(make).parameters
  }


def check(section: OptimSection) -> None:
  """Raises InputError if `config.optim` names no optimizer, or has values that it cannot take or would ignore."""
  for field, minimum in dict(lr=0, b1=0, b2=0, eps=1e-20).items():
    if -1 < vars(section)[field] < minimum:  # -1 stands for the optimizer's default
      raise InputError(f'config.optim.{field}: {vars(section)[field]!r} is below {minimum}')
  known, name = _known(), section.name
  if section.warmup_ratio and section.warmup_steps:
    raise InputError('config.optim.warmup_ratio: warmup_steps also sets the warm-up; leave one of them 0')
  if name not in known:
    raise InputError(
      f'config.optim.name: optax has no optimizer {name!r:.100}; {did_you_mean(name, known)}'
      f'known: {", ".join(sorted(known))}'
    )
  parameters = inspect.signature(known[name]).parameters
  required = [k for k, v in parameters.items() if v.default is v.empty and k != 'learning_rate']
  if required or name in _NEEDS:
    raise InputError(
      f'config.optim.name: optax.{name} needs {_NEEDS.get(name) or ", ".join(required)}'
      ' in each update, which no config gives; use adamw'
    )
  if section.weight_decay and 'weight_decay' not in parameters:
    raise InputError(f'config.optim.weight_decay: optax.{name} takes none; use adamw')
  if section.weight_decay and name != 'muon' and not set(_DECAY_MASKS) & set(parameters):
    raise InputError(f'config.optim.weight_decay: optax.{name} would apply it to norms and biases, too; use adamw')
  for field in ('b1', 'b2', 'eps'):
    if vars(section)[field] != -1 and field not in parameters and name != 'muon':  # AdamW, its part, takes all three
      raise InputError(f'config.optim.{field}: optax.{name} takes none; leave it -1')
  if section.end_lr and section.schedule == 'constant':
    raise InputError('config.optim.end_lr: a constant learning rate has no end; choose schedule=linear or cosine')


def decayed(model: Model) -> dict:
  """Returns a tree of bool: weight decay is for matrices and embeddings; of a custom model, for all but vectors.

  It is not for norms, biases, decays of recurrences and taps of convolutions.
  """
  return nest({path: spec.matrix or not spec.exact for path, spec in model.table.items()})
