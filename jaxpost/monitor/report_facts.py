"""Facts of the report besides its curves: the machine of a run, its config changes, the distribution of its samples.

Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etils import epath

from jaxpost.monitor.metrics import read_growing

_SHARES = (0.05, 0.5, 0.95)


def start(workdir: epath.Path) -> dict[str, Any]:
  """Returns the newest start of a run: `facts` {label: text}, `changes` {stage: {field: value}}, `count` of all."""
  rows = read_growing(workdir / 'starts.jsonl')
  if not rows:
    return {}
  last = rows[-1]
  versions = last.get('versions') or {}
  devices = f'{last.get("devices")} x {last.get("device_kind")}'
  facts = {
    'started': last.get('time'),
    'machine': f'{devices}, {last.get("processes")} processes, {last.get("host")}',
    'versions': ', '.join(f'{name} {version}' for name, version in versions.items()),
    'commit': last.get('commit'),
    'command': ' '.join(map(str, last.get('command') or ())),
    'seed': last.get('seed'),
  }
  for name, stage in (last.get('stages') or {}).items():
    facts[name] = f'{stage.get("rows")} rows, {stage.get("steps")} steps of {stage.get("batch")}'
  shown = {label: str(value) for label, value in facts.items() if value not in (None, '')}
  return dict(facts=shown, changes=last.get('changes') or {}, count=len(rows))


def percentiles(rows: Sequence[dict]) -> dict[str, list[float]]:
  """Returns {'reward', 'length': their percentiles 5, 50 and 95} of rows of samples that have them."""
  out = {}
  for key in ('reward', 'length'):
    values = sorted(row[key] for row in rows if isinstance(row.get(key), (int, float)))
    if len(values) > 1:
      out[key] = [values[round(share * (len(values) - 1))] for share in _SHARES]
  return out
