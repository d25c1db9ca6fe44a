"""Names the metrics and the terms of a loss that are not finite, where a run has diverged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxpost.distributed.transfer import to_host

if TYPE_CHECKING:
  from jaxpost.roles import Roles
  from jaxpost.types import Item


def nonfinite(item: Item, done: list, roles: Roles) -> str:
  """Names metrics and loss terms that are not finite, with their rows; '' if all are."""
  found = []
  for (role, batch), (_, metrics) in zip(item.updates, done):
    bad = [k for k, v in to_host(metrics).items() if not np.isfinite(v)]
    found += [f'{role} {k}' for k in bad]
    if bad:
      found += _terms(roles.trainable[role], batch)
  return '; not finite: ' + ', '.join(dict.fromkeys(found)) if found else ''


def _terms(role, batch) -> list[str]:
  """Names of the inputs, outputs and terms of a loss [M, B, T] that are not finite, with their rows."""
  outputs, objective = role.score(batch), role.objective
  terms = {k: v for k, v in vars(outputs).items() if v is not None}
  if not objective.coupled and not objective.divergence:
    loss, metrics = objective.fn(outputs, batch.arrays)
    terms |= {'loss': loss} | metrics
  counts, found = to_host(batch.loss_weights) != 0, []
  for name, value in {**terms, **batch.arrays}.items():
    wrong = ~np.isfinite(to_host(value)) & (counts | (name in batch.arrays))
    rows = np.flatnonzero(wrong.any(axis=2))
    if rows.size:
      found.append(f'{name} in rows {", ".join(map(str, rows[:8]))}')
  return found
