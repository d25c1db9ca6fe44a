"""A setting of another library, and its value in the words and the type of our field, by the tables of convert.toml."""

from __future__ import annotations

import pathlib
import tomllib
from typing import Any, NamedTuple

from jaxpost.stage import field_names

TABLES = tomllib.loads(pathlib.Path(__file__).with_name('convert.toml').read_text('utf-8'))


class Setting(NamedTuple):
  """A setting of another library: its fields here, or why there are none."""

  name: str
  value: Any
  fields: tuple[str, ...]
  reason: str = ''


def ours(name: str, field: str, value: Any) -> Any:
  """A value as our field has it: other words for it, text for numbers, one path for a list of one."""
  words = TABLES['values'].get(field, {}) | TABLES['values'].get(name.rpartition('.')[2], {})
  if spelled(value) in words:
    value = words[spelled(value)]
  if field == 'log.trackers':
    return trackers(value)
  kind = field_names.FIELDS[field]
  if kind is tuple:
    return value if isinstance(value, list) else [value]
  if isinstance(value, list) and len(value) == 1:
    value = value[0]
  if kind in (int, float) and isinstance(value, (str, float)):
    try:
      number = float(value)
    except ValueError:
      return value
    return int(number) if kind is int and number == int(number) else number
  if kind is str and isinstance(value, list):
    return '|'.join(map(str, value))
  return value


def trackers(value: Any) -> list:
  """Returns trackers as a list, without what every run writes: lines on the console, and TensorBoard's files."""
  return [v for v in (value if isinstance(value, list) else [value]) if v not in ('console', 'tensorboard', 'none')]


def spelled(value: Any) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


def named(given: dict[str, Any], name: str) -> Any:
  """Returns the value of the setting whose name ends like this; None without one."""
  return next((value for other, value in given.items() if f'.{other}'.endswith(f'.{name}')), None)


def integer(given: dict[str, Any], name: str, default: int = 0) -> int:
  """Returns a setting that is a whole number above 0, `default` where it is not given, and 0 for another value."""
  value = named(given, name)
  if value is None:
    return default
  return value if isinstance(value, int) and value > 0 else 0
