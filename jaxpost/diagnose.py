"""What the updates of a step say together, and what is wrong with them."""

import math

import numpy as np

from jaxpost.sharding import to_host


_COUNTS = 'skipped_updates', 'empty_updates'


def merge_metrics(done: list) -> dict:
  """The row of a step: means over its updates; a critic's have its name."""
  columns = {}
  for role, metrics in done:
    prefix = '' if role == 'policy' else f'{role}/'
    for name, value in metrics.items():
      known = name in _COUNTS  # of any role: counted together
      columns.setdefault(name if known else prefix + name, []).append(
          float(value))
  return {k: math.fsum(v) if k in _COUNTS else math.fsum(v) / len(v)
          for k, v in columns.items()}


def diagnosis(item, done: list) -> str:
  """Where numbers that are not finite come from: arrays and metrics."""
  found = []
  for (role, batch), (_, metrics) in zip(item.updates, done):
    for name, value in batch.arrays.items():
      rows = ~np.isfinite(to_host(value)).all(
          axis=tuple(range(2, value.ndim)))
      if rows.any():
        found.append(f'{name} in rows {np.flatnonzero(rows.reshape(-1))[:8]}')
    bad = [k for k, v in to_host(metrics).items() if not np.isfinite(v)]
    found += [f'{role} {k}' for k in bad]
  return '; not finite: ' + ', '.join(dict.fromkeys(found)) if found else ''
