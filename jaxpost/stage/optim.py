"""Optimizers and schedules of optax, by name."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import jax
import optax

from jaxpost.errors import InputError

# Line searches and the like: their update takes more than the gradient.
_NEED_THE_LOSS = ('lbfgs', 'polyak_sgd')


def make_schedule(kind: str, lr: float, steps: int, warmup: int, end: float) -> optax.Schedule:
  """Returns step -> learning rate: linear warm-up, then constant, linear or cosine."""
  rest = max(1, steps - warmup)
  main = {
    'constant': optax.constant_schedule(lr),
    'linear': optax.linear_schedule(lr, end, rest),
    'cosine': optax.cosine_decay_schedule(lr, rest, alpha=end / lr if lr else 0.0),
  }[kind]
  if not warmup:
    return main
  ramp = optax.linear_schedule(lr / warmup, lr, warmup)
  return optax.join_schedules([ramp, main], [warmup])


def make_optimizer(name: str, schedule: optax.Schedule, options: dict, decay_mask: Any) -> optax.GradientTransformation:
  """Returns `optax.<name>` with those of `options` that it takes.

  Args:
    options: values by optax's argument names (b1, b2, eps, weight_decay).
    decay_mask: tree of bool, the parameters that weight decay applies to.
  """
  check(name, options['weight_decay'])
  make = vars(optax)[name]
  takes = inspect.signature(make).parameters
  chosen = {k: v for k, v in options.items() if k in takes}
  for mask in ('mask', 'weight_decay_mask'):
    if mask in takes and 'weight_decay' in takes:
      chosen[mask] = decay_mask
  return make(schedule, **chosen)


def check(name: str, weight_decay: float) -> None:
  """Raises InputError where there is no such optimizer, or it takes no decay."""
  public = [
    n
    for n, v in vars(optax).items()
    if not n.startswith('_') and inspect.isfunction(v) and 'learning_rate' in inspect.signature(v).parameters
  ]
  if name not in public:
    near = difflib.get_close_matches(name, public, 3)
    raise InputError(
      f'config.optim.name: optax has no optimizer {name!r}; '
      + (f'did you mean {", ".join(near)}?' if near else f'known: {", ".join(sorted(public))}')
    )
  takes = inspect.signature(vars(optax)[name]).parameters
  more = [k for k, v in takes.items() if v.default is v.empty and k != 'learning_rate']
  if more or name in _NEED_THE_LOSS:
    raise InputError(
      f'config.optim.name: optax.{name} needs {", ".join(more) or "the loss"}'
      ' in each update, which no config gives; use adamw'
    )
  if weight_decay and 'weight_decay' not in takes:
    raise InputError(f'config.optim.weight_decay: optax.{name} takes none; use adamw')


def decayed(axes: dict) -> dict:
  """Returns a tree of bool: weight decay is for matrices and embeddings, not for norms."""

  def is_matrix(names: tuple[str, ...]) -> bool:
    return len(set(names) - {'layers', 'expert'}) > 1

  return jax.tree.map(is_matrix, axes, is_leaf=lambda x: isinstance(x, tuple))
