"""Merges the metrics of a step's updates, names what is not finite in them, and refuses to save such a state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.distributed.transfer import to_host
from jaxpost.errors import DivergedError

if TYPE_CHECKING:
  from jaxpost.roles import Roles, Trainable
  from jaxpost.types import Batch, Item, TrainState

_COUNTS = 'skipped_updates', 'empty_updates', 'overflowed_updates'


def merge_metrics(done: list[tuple[str, dict]]) -> dict[str, float]:
  """One row from the (role, metrics) of a step's updates: means, with the role as prefix except for the policy."""
  columns: dict[str, list[float]] = {}
  all_empty = all(metrics.get('empty_updates') for _, metrics in done)
  for role, metrics in done:
    for name, value in metrics.items():
      if metrics.get('empty_updates') and not all_empty and name not in _COUNTS:
        continue  # sums over no token, which are 0
      # Updates that changed nothing are counted together, of whichever role they are.
      key = name if role == 'policy' or name in _COUNTS else f'{role}/{name}'
      columns.setdefault(key, []).append(float(value))
  return {k: int(sum(v)) if k in _COUNTS else math.fsum(v) / len(v) for k, v in columns.items()}


def is_doubtful(row: dict[str, float]) -> bool:
  """Returns whether the states after a step may not be finite: only an update that is applied has shown that they are.

  A float16 update that overflows is not applied, and may overflow because of the state.
  """
  return row['skipped_updates'] + row.get('overflowed_updates', 0) > 0


def check_states(states: dict[str, TrainState], where: str) -> None:
  """Raises DivergedError with the paths of arrays that hold NaN or infinity; called before a state is saved."""

  def is_finite(x: jax.Array) -> Any:
    # isfinite of integers is a constant of this process alone; `to_host` would wait for the others to send it.
    return jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else True

  finite = to_host(jax.tree.map(is_finite, states))
  bad = [path for path, good in jax.tree_util.tree_flatten_with_path(finite)[0] if not good]
  if bad:
    names = ', '.join(jax.tree_util.keystr(path, simple=True, separator='/') for path in bad)
    raise DivergedError(f'{where}: not finite and not saved: {names}; go on from an earlier checkpoint')


def explain(item: Item, done: list[tuple[str, dict]], roles: Roles) -> str:
  """Names metrics and loss terms that are not finite, with their rows; '' if all are."""
  found = []
  for (role, batch), (_, metrics) in zip(item.updates, done):
    if bad := [k for k, v in to_host(metrics).items() if not np.isfinite(v)]:
      found += [f'{role} {k}' for k in bad] + _terms(roles.trainable[role], batch)
  return '; not finite: ' + ', '.join(dict.fromkeys(found)) if found else ''


def _terms(role: Trainable, batch: Batch) -> list[str]:
  """Names of the inputs, outputs and terms of a loss [M, B, T, ...] that are not finite, with their rows."""
  outputs, objective = role.score(batch), role.objective
  terms = {k: v for k, v in vars(outputs).items() if v is not None}
  if not objective.coupled and not objective.divergence:
    loss, metrics = objective.fn(outputs, batch.arrays)
    terms |= {'loss': loss} | metrics
  trained = to_host(batch.loss_weights) != 0
  found = []
  for name, value in {**terms, **batch.arrays}.items():
    finite = np.isfinite(to_host(value)).reshape(*trained.shape, -1)  # [M, B, T, numbers of a token]
    wrong = ~finite.all(axis=3)
    if name not in batch.arrays:  # what the model computes at a token without weight has no effect
      wrong &= trained
    rows = np.flatnonzero(wrong.any(axis=2))
    if rows.size:
      found.append(f'{name} in rows {", ".join(map(str, rows[:8]))}')
  return found
