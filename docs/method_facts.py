"""Collects the facts of each method from code and pages, for docs/methods.md and the pages below docs/methods/."""

import dataclasses
import json
import pathlib
import re
from typing import Any

from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib

DOCS = pathlib.Path(__file__).resolve().parent
TABLE = DOCS / 'methods.md'
CURVES = DOCS / 'method_curves.json'
KEPT = '<!-- measured '
SECTIONS = 'rl', 'reference', 'preference', 'critic', 'distill', 'reward_model'
_DEFAULTS = (DOCS / 'defaults.md').read_text('utf-8')

# Method -> (learning rate, where it and the other defaults come from).
SOURCES = {
  name: (lr, source) for name, lr, source in re.findall(r'^\| `(\w+)` \| (\S+) \| .*? ?\| (.+) \|$', _DEFAULTS, re.M)
}
# (names of the methods, what is computed here, what the paper has).
DIFFERENCES = [
  tuple(cell.strip() for cell in row.strip('|').split(' | '))
  for row in _DEFAULTS.partition('## Where a method differs from its paper')[2].splitlines()
  if row.startswith('| ') and not row.startswith('| algorithm')
]


def measured() -> dict:
  """Returns the figures that docs/methods.md holds: {case: metric, before and after of each seed, steps}."""
  for line in TABLE.read_text('utf-8').splitlines() if TABLE.exists() else ():
    if line.startswith(KEPT):
      return json.loads(line[len(KEPT) : -len(' -->')])
  return {}


def curves() -> dict:
  """Returns {case: metric of its train rows, steps, values of each seed}, of the cases that have been drawn."""
  return json.loads(CURVES.read_text('utf-8')) if CURVES.exists() else {}


def resolved(name: str, **over: Any) -> Any:
  """Returns the config of a method with all of its defaults; `over` has fields that are set."""
  (config,) = config_lib.parse(dict(algorithm=name, reward='x', **over)).values()
  return config_lib.resolve(config, algorithms.load_algorithm(name).defaults)


def value(config: Any, path: str) -> Any:
  """Returns the field `path`, such as 'rl.clip_low', of a config; AttributeError if there is none."""
  for part in path.split('.'):
    config = getattr(config, part)
  return config


def brought(name: str) -> dict[str, Any]:
  """Returns {field: value} of what a method replaces in the defaults of all methods, without the learning rate."""
  config, own = resolved(name), algorithms.load_algorithm(name).defaults
  found = {}
  for section in SECTIONS:
    for field in dataclasses.fields(vars(config)[section]):
      path = f'{section}.{field.name}'
      if field.name in own.get(section, ()) and value(config, path) != field.metadata['auto']:
        found[path] = value(config, path)
  return found
