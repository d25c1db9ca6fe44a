"""What the updates of a step say together, and what is wrong with them."""

import math

import numpy as np

from jaxpost.distributed.transfer import to_host

_COUNTS = 'skipped_updates', 'empty_updates', 'overflowed_updates'


def merge_metrics(done: list) -> dict:
  """The row of a step: means over its updates; a critic's have its name."""
  columns = {}
  for role, metrics in done:
    prefix = '' if role == 'policy' else f'{role}/'
    for name, value in metrics.items():
      known = name in _COUNTS  # of any role: counted together
      columns.setdefault(name if known else prefix + name, []).append(float(value))
  return {k: math.fsum(v) if k in _COUNTS else math.fsum(v) / len(v) for k, v in columns.items()}


def diagnosis(item, done: list, roles) -> str:
  """What is not finite: metrics of the updates, and terms with their rows."""
  found = []
  for (role, batch), (_, metrics) in zip(item.updates, done):
    bad = [k for k, v in to_host(metrics).items() if not np.isfinite(v)]
    found += [f'{role} {k}' for k in bad]
    if bad:
      found += _terms(roles.trainable[role], batch)
  return '; not finite: ' + ', '.join(dict.fromkeys(found)) if found else ''


def _terms(role, batch) -> list[str]:
  """The inputs, outputs and terms of a loss [M, B, T] that are at fault."""
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
