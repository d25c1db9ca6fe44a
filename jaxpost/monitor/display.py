"""How metrics are displayed: their titles, the most important ones, and their charts in a report. Imports no JAX.

titles.toml has the titles, and curves.toml the metrics by which each algorithm is judged.
"""

import fnmatch
import functools
import itertools
import math
import pathlib
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any


def _table(name: str) -> dict[str, Any]:
  """Returns a TOML file of this folder."""
  return tomllib.loads(pathlib.Path(__file__).with_name(name).read_text('utf-8'))


_PLACES = {'NAME': '([^/]+)', 'ROLE': '([^/]+)', 'N': r'(\d+)'}
_PLACE = re.compile('NAME|ROLE|(?<![A-Za-z])N(?![A-Za-z])')  # placeholders in keys of titles.toml
_CURVES = _table('curves.toml')
HEADLINES: tuple[str, ...] = tuple(_CURVES['every'])


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
  exact, patterns = {}, []
  for key, text in _table('titles.toml').items():
    if places := _PLACE.findall(key):
      pattern = _PLACE.sub(lambda match: _PLACES[match[0]], re.escape(key))
      patterns.append((re.compile(pattern), places, text))
    else:
      exact[key] = text
  return exact, patterns


def chosen(algorithm: str, keys: Collection[str]) -> list[str]:
  """Returns the most important of `keys`: first those that the algorithm is judged by, then HEADLINES."""
  return list(dict.fromkeys([*judged_by(algorithm, keys), *(key for key in HEADLINES if key in keys)]))


def judged_by(algorithm: str, keys: Collection[str]) -> list[str]:
  """Returns those of `keys` that curves.toml lists for the algorithm, in its order."""
  matched = next((patterns for names, patterns in _CURVES['methods'].items() if algorithm in names.split()), ())
  return list(itertools.chain(*(fnmatch.filter(sorted(keys), pattern) for pattern in matched)))


def _ticks(low: float, high: float, count: int) -> list[float]:
  """Returns about `count` round numbers within [low, high]."""
  raw = (high - low) / count
  unit = 10.0 ** math.floor(math.log10(raw))
  step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
  first = math.ceil(low / step - 1e-9)
  return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: list[float]) -> tuple[float, float]:
  """Returns limits of the y axis that leave out single spikes, which would flatten the curve."""
  ordered = sorted(values)
  low, high = ordered[0], ordered[-1]
  if len(ordered) >= 20:
    spikes = len(ordered) // 50 + 1  # values at each end that may be spikes
    low_bulk, high_bulk = ordered[spikes], ordered[-spikes - 1]
    if low_bulk < high_bulk:
      low = max(low, low_bulk - 2 * (high_bulk - low_bulk))
      high = min(high, high_bulk + 2 * (high_bulk - low_bulk))
  if 0 < low < 0.4 * high:
    low = 0.0
  flat = high - low < 1e-9 * abs(high)
  pad = (0.1 * abs(high) if flat else 0.06 * (high - low)) or 1.0
  return (low if low == 0 else low - pad), high + pad


def smooth(values: list[float]) -> list[float]:
  """Returns the mean over a window around each point."""
  half = len(values) // 25
  windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
  return [sum(window) / len(window) for window in windows]


def pick(items: list, most: int) -> list:
  """Returns at most `most` items, evenly spaced, with the first and the last."""
  last, count = len(items) - 1, min(most, len(items))
  return [items[i * last // max(1, count - 1)] for i in range(count)]


def chart(key: str, series: Mapping[str, list[tuple]], most: int) -> dict[str, Any] | None:
  """Returns a chart with one line per split, of which at most `most` points can be hovered; None without finite values.

  Every x and y is a share of the frame: (0, 0) is its upper left corner, (1, 1) its lower right.
  """
  steps = [step for points in series.values() for step, _ in points]
  nonfinite_steps = [step for points in series.values() for step, value in points if value is None]
  finite = {split: [(step, value) for step, value in points if value is not None] for split, points in series.items()}
  finite = {split: points for split, points in finite.items() if points}
  if not finite:
    return None
  first_step, last_step = min(steps), max(max(steps), min(steps) + 1)
  low, high = _range([value for points in finite.values() for _, value in points])

  def x(step: float) -> float:
    return (step - first_step) / (last_step - first_step)

  def y(value: float) -> float:
    return (high - value) / (high - low)

  lines, outside = [], 0
  for split, points in finite.items():
    inside = [(step, value) for step, value in points if low <= value <= high]
    outside += len(points) - len(inside)
    heights = [min(max(value, low), high) for _, value in points]
    heights = heights if key == 'lr' else smooth(heights)
    path = [(x(step), y(height)) for (step, _), height in zip(points, heights)]
    hovered = [(x(step), y(value), step, value) for step, value in pick(inside, most)]
    lines.append(dict(split=split, last=points[-1][1], few=len(inside) < 40, path=pick(path, 160), points=hovered))
  return dict(
    key=key,
    rules=[(y(value), float(f'{value:.6g}')) for value in _ticks(low, high, 4)],
    steps=[(x(step), int(step)) for step in _ticks(first_step, last_step, 6) if step == int(step)],
    lines=lines,
    lost=[(x(step), step) for step in pick(nonfinite_steps, 40)],
    notes={'beyond the frame': outside, 'not finite': len(nonfinite_steps)},
  )
