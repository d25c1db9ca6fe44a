"""Merges the metrics of a step's updates, and refuses to save a state that is not finite."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpost.distributed.transfer import to_host
from jaxpost.errors import DivergedError

_COUNTS = 'skipped_updates', 'empty_updates', 'overflowed_updates'


def merge_metrics(done: list) -> dict:
  """One row from the (role, metrics) of a step's updates: means, with the role as prefix except for the policy."""
  columns = {}
  for role, metrics in done:
    prefix = '' if role == 'policy' else f'{role}/'
    for name, value in metrics.items():
      known = name in _COUNTS  # of any role: counted together
      columns.setdefault(name if known else prefix + name, []).append(float(value))
  return {k: int(sum(v)) if k in _COUNTS else math.fsum(v) / len(v) for k, v in columns.items()}


def is_doubtful(row: dict) -> bool:
  """Returns whether the states after a step may not be finite: only an update that is applied has shown that they are.

  A float16 update that overflows is not applied, and may overflow because of the state.
  """
  return row['skipped_updates'] + row.get('overflowed_updates', 0) > 0


def check_states(states: dict, where: str) -> None:
  """Raises DivergedError with the paths of arrays that hold NaN or infinity; called before a state is saved."""

  def is_finite(x: jax.Array) -> Any:
    # isfinite of integers is a constant of this process alone; `to_host` would wait for the others to send it.
    return jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else True

  finite = to_host(jax.tree.map(is_finite, states))
  bad = [path for path, good in jax.tree_util.tree_flatten_with_path(finite)[0] if not good]
  if bad:
    names = ', '.join(jax.tree_util.keystr(path, simple=True, separator='/') for path in bad)
    raise DivergedError(f'{where}: not finite and not saved: {names}; go on from an earlier checkpoint')
