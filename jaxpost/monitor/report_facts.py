"""Facts of the report besides its curves: the machine of a run, its config changes, the distribution of its samples.

Imports no JAX.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from etils import epath

from jaxpost.monitor.metrics import read_growing

_SHARES = (0.05, 0.5, 0.95)


def start(workdir: epath.Path) -> dict[str, Any]:
  """Returns the newest start of a run: `facts` {label: text}, `changes` {stage: {field: value}}, `count` of all,
  and, of a run by a config file, its `recipe` and the `overrides` {field: text} of the command line.
  """
  rows = read_growing(workdir / 'starts.jsonl')
  if not rows:
    return {}
  last = rows[-1]
  words = list(map(str, last.get('command') or ('',)))
  devices = f'{last.get("devices")} x {last.get("device_kind")}'
  facts = {
    'started': last.get('time'),
    'machine': f'{devices}, {last.get("processes")} processes, {last.get("host")}',
    'versions': ', '.join(f'{name} {version}' for name, version in (last.get('versions') or {}).items()),
    'commit': last.get('commit'),
    'command': _command(words),
    'seed': last.get('seed'),
  }
  for name, stage in (last.get('stages') or {}).items():
    facts[name] = f'{stage.get("rows")} rows, {stage.get("steps")} steps of {stage.get("batch")}'
  shown = {label: str(value) for label, value in facts.items() if value not in (None, '')}
  recipe, overrides = _given(words)
  return dict(facts=shown, changes=last.get('changes') or {}, count=len(rows), recipe=recipe, overrides=overrides)


def _command(words: list[str]) -> str:
  """Returns a line to paste into a shell; a module of launch/ has its name there, and not the folder of a clone."""
  program = re.sub(r'.*\blaunch[/\\](\w+)\.py', r'python -m launch.\1', words[0])
  return ' '.join([program, *map(shlex.quote, words[1:])])


def algorithm(config: dict, stage: str) -> str:
  """Returns the algorithm of a stage by a run's config.json; the stage's name where that says nothing."""
  own = config[stage] if isinstance(config.get(stage), dict) else {}
  return own.get('algorithm') or config.get('algorithm') or stage


def _given(words: list[str]) -> tuple[str, dict[str, str]]:
  """Returns (config file with its arguments, {field: text of its override}) of a command line."""
  recipe, overrides = '', {}
  for i, word in enumerate(words):
    found = re.fullmatch(r'--?(no)?config(?:\.([^=]+))?(?:=(.*))?', word, re.DOTALL)
    if not found:
      continue
    no, field, value = found.groups()
    following = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith('-') else 'True'
    value = 'False' if no else following if value is None else value
    if field:
      overrides[field] = value
    else:
      recipe = value
  return recipe, overrides


def percentiles(rows: Sequence[dict]) -> dict[str, list[float]]:
  """Returns {'reward', 'length': their percentiles 5, 50 and 95} of rows of samples that have them."""
  out = {}
  for key in ('reward', 'length'):
    values = sorted(row[key] for row in rows if isinstance(row.get(key), (int, float)))
    if len(values) > 1:
      out[key] = [values[round(share * (len(values) - 1))] for share in _SHARES]
  return out
