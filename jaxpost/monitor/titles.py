"""Titles of metrics for people: the report and the console show no raw keys. Imports no JAX."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import pathlib
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any

_PLACES = {'NAME': '([^/]+)', 'ROLE': '([^/]+)', 'N': r'(\d+)'}


def _table(name: str) -> dict[str, Any]:
  """The values of NAME.toml in this folder."""
  return tomllib.loads(pathlib.Path(__file__).with_name(f'{name}.toml').read_text('utf-8'))


_CURVES = _table('curves')
HEADLINES: tuple[str, ...] = tuple(_CURVES['every'])


def curves(algorithm: str, keys: Collection[str]) -> list[str]:
  """Returns those of `keys` whose curves matter most: first what the algorithm is judged by, then HEADLINES."""
  return list(dict.fromkeys([*judged_by(algorithm, keys), *(key for key in HEADLINES if key in keys)]))


def judged_by(algorithm: str, keys: Collection[str]) -> list[str]:
  """Returns those of `keys` that curves.toml has for the algorithm, in its order."""
  own = next((found for names, found in _CURVES['methods'].items() if algorithm in names.split()), ())
  return list(itertools.chain(*(fnmatch.filter(sorted(keys), pattern) for pattern in own)))


def title(key: str) -> str:
  """Returns the title of a metric; of a key that is not known, its words."""
  exact, patterns = _known()
  if key in exact:
    return exact[key]
  for prefix, form in (('eval_', '{}, held out'), ('critic/', 'Critic: {}')):
    if key.startswith(prefix):
      return form.format(title(key.removeprefix(prefix)))
  if key.endswith('/unfiltered'):
    return f'{title(key.removesuffix("/unfiltered"))}, before dynamic sampling'
  for pattern, places, text in patterns:
    if found := pattern.fullmatch(key):
      for place, value in zip(places, found.groups()):
        text = re.sub(rf'\b{place}\b', value.replace('\\', r'\\').replace('_', ' '), text)
      return text.replace('@N', f'@{found[1]}')
  words = key.replace('_', ' ').replace('/', ', ')
  return words[:1].upper() + words[1:]


def says_nothing_new(key: str, values: Mapping[str, float]) -> bool:
  """Returns whether a line with all other values can do without this one.

  With one reward its mean is the reward, and pass@k by it is pass@k; the NLL is the loss of SFT; spreads, and a count
  of what went wrong where nothing did, are in metrics.jsonl.
  """
  if key.endswith('/std') or (key == 'ungraded_prompts' and not values[key]):
    return True
  whole = 'reward' if key.startswith('rewards/') else 'loss' if key == 'nll' else key.partition('/')[0]
  return whole != key and values.get(whole) == values[key]


@functools.cache
def _known() -> tuple[dict[str, str], list[tuple[re.Pattern, list[str], str]]]:
  """Returns the titles of whole keys, and (pattern, places in it, title) of the others."""
  exact, patterns = {}, []
  for key, text in _table('titles').items():
    places = re.findall('NAME|ROLE|(?<![A-Za-z])N(?![A-Za-z])', key)
    if not places:
      exact[key] = text
      continue
    pattern = re.sub('NAME|ROLE|(?<![A-Za-z])N(?![A-Za-z])', lambda found: _PLACES[found[0]], re.escape(key))
    patterns.append((re.compile(pattern), places, text))
  return exact, patterns
