"""Settings of other libraries, and their values in the words and types of our fields, by convert.toml."""

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

  def unmapped(self, reason: str) -> Setting:
    """Returns the setting without fields, and the reason."""
    return self._replace(fields=(), reason=reason)


def ours(name: str, field: str, value: Any) -> Any:
  """Returns a value as our field takes it: other words, numbers from text, one path from a list of one."""
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
  """Returns trackers as a list, without the console and TensorBoard, which every run writes to."""
  return [v for v in (value if isinstance(value, list) else [value]) if v not in ('console', 'tensorboard', 'none')]


def spelled(value: Any) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


def named(given: dict[str, Any], name: str) -> Any:
  """Returns the value of the setting whose dotted name ends with `name`; None if there is none."""
  return next((value for other, value in given.items() if f'.{other}'.endswith(f'.{name}')), None)


def integer(given: dict[str, Any], name: str, default: int = 0) -> int:
  """Returns a setting that is an integer above 0; `default` if it is not set, and 0 for other values."""
  value = named(given, name)
  if value is None:
    return default
  return value if isinstance(value, int) and value > 0 else 0
