"""Titles of metrics, from titles.toml, which the report and the console show instead of keys. Imports no JAX."""

from __future__ import annotations

import functools
import pathlib
import re
import tomllib
from collections.abc import Mapping

_PLACES = {'NAME': '([^/]+)', 'ROLE': '([^/]+)', 'N': r'(\d+)'}
_PLACE = re.compile('NAME|ROLE|(?<![A-Za-z])N(?![A-Za-z])')  # placeholders in keys of titles.toml


def title(key: str) -> str:
  """Returns the title of a metric; for an unknown key, its words."""
  exact, patterns = _known()
  if key in exact:
    return exact[key]
  for prefix, form in (('eval_', '{}, held out'), ('critic/', 'Critic: {}')):
    if key.startswith(prefix):
      return form.format(title(key.removeprefix(prefix)))
  if key.endswith('/unfiltered'):
    return f'{title(key.removesuffix("/unfiltered"))}, before dynamic sampling'
  for pattern, places, text in patterns:
    if match := pattern.fullmatch(key):
      for place, value in zip(places, match.groups()):
        text = re.sub(rf'\b{place}\b', value.replace('\\', r'\\').replace('_', ' '), text)
      return text.replace('@N', f'@{match[1]}')
  words = key.replace('_', ' ').replace('/', ', ')
  return words[:1].upper() + words[1:]


def says_nothing_new(key: str, values: Mapping[str, float]) -> bool:
  """Returns whether a line with all other values can omit this one, because it is repeated or rarely of interest.

  With a single reward, its mean is the reward and pass@k by it is pass@k. The NLL is the loss of SFT. Standard
  deviations, and counts of failures that are 0, are left to metrics.jsonl.
  """
  if key.endswith('/std') or (key == 'ungraded_prompts' and not values[key]):
    return True
  same = 'reward' if key.startswith('rewards/') else 'loss' if key == 'nll' else key.partition('/')[0]
  return same != key and values.get(same) == values[key]


@functools.cache
def _known() -> tuple[dict[str, str], list[tuple[re.Pattern, list[str], str]]]:
  """Returns titles of keys without placeholders, and (pattern, placeholders, title) of the others."""
  table = tomllib.loads(pathlib.Path(__file__).with_suffix('.toml').read_text('utf-8'))
  exact, patterns = {}, []
  for key, text in table.items():
    if places := _PLACE.findall(key):
      pattern = _PLACE.sub(lambda match: _PLACES[match[0]], re.escape(key))
      patterns.append((re.compile(pattern), places, text))
    else:
      exact[key] = text
  return exact, patterns
