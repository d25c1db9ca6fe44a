"""Merges the metrics of a step's updates, names non-finite values, and refuses to save non-finite states."""

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
_OF_FIRST = 'sampler_mismatch', 'sampler_kl/k1', 'sampler_kl/k3'  # before the policy moves away from the sampler


def merge_metrics(updates: list[tuple[str, dict]]) -> dict[str, float]:
  """Returns one row from the (role, metrics) of a step's updates: means, prefixed with the role unless policy."""
  columns: dict[str, list[float]] = {}
  for role, metrics in updates:
    for name, value in metrics.items():
      if metrics.get('empty_updates') and name not in _COUNTS:
        continue  # sums over no tokens are 0; a row without others has only counts
      # Updates that changed nothing are counted together for all roles.
      key = name if role == 'policy' or name in _COUNTS else f'{role}/{name}'
      columns.setdefault(key, []).append(float(value))
  columns |= {k: columns[k][:1] for k in _OF_FIRST if k in columns}
  return {k: int(sum(v)) if k in _COUNTS else math.fsum(v) / len(v) for k, v in columns.items()}


def is_doubtful(row: dict[str, float]) -> bool:
  """Returns whether the states after a step may be non-finite, because an update was not applied.

  Only an applied update proves that they are finite. A float16 update that overflows may do so because of the state.
  """
  return row['skipped_updates'] + row.get('overflowed_updates', 0) > 0


def check_states(states: dict[str, TrainState], where: str) -> None:
  """Raises DivergedError with the paths of arrays that hold NaN or infinity; called before a state is saved."""

  def is_finite(x: jax.Array) -> Any:
    # isfinite of integers is a local constant, which `to_host` would wait for other processes to send.
    return jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else True

  finite = to_host(jax.tree.map(is_finite, states))
  bad_paths = [path for path, is_good in jax.tree_util.tree_flatten_with_path(finite)[0] if not is_good]
  if bad_paths:
    names = ', '.join(jax.tree_util.keystr(path, simple=True, separator='/') for path in bad_paths)
    raise DivergedError(f'{where}: not finite and not saved: {names}; go on from an earlier checkpoint')


def explain(item: Item, updates: list[tuple[str, dict]], roles: Roles) -> str:
  """Returns text that names non-finite metrics and loss terms, with their rows; '' if all are finite."""
  names = []
  for (role, batch), (_, metrics) in zip(item.updates, updates):
    if bad_keys := [k for k, v in to_host(metrics).items() if not np.isfinite(v)]:
      names += [f'{role} {k}' for k in bad_keys] + _terms(roles.trainable[role], batch)
  return '; not finite: ' + ', '.join(dict.fromkeys(names)) if names else ''


def _terms(role: Trainable, batch: Batch) -> list[str]:
  """Returns the names of non-finite inputs, outputs and terms [M, B, T, ...] of a loss, with their rows."""
  outputs, objective = role.score(batch), role.objective
  terms = {k: v for k, v in vars(outputs).items() if v is not None}
  if not objective.coupled and not objective.divergence:
    loss, metrics = objective.fn(outputs, batch.arrays)
    terms |= {'loss': loss} | metrics
  trained = to_host(batch.loss_weights) != 0
  names = []
  for name, value in {**terms, **batch.arrays}.items():
    finite = np.isfinite(to_host(value)).reshape(*trained.shape, -1)  # [M, B, T, values per token]
    wrong = ~finite.all(axis=3)
    if name not in batch.arrays:  # outputs at tokens without weight have no effect
      wrong &= trained
    rows = np.flatnonzero(wrong.any(axis=2))
    if rows.size:
      names.append(f'{name} in rows {", ".join(map(str, rows[:8]))}')
  return names
