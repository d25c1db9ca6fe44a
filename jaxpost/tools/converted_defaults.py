"""Adds those defaults of another library, from convert_defaults.toml, that differ from ours to a converted config."""

from __future__ import annotations

import operator
import pathlib
import tomllib
from typing import Any

from jaxpost.stage import algorithms
from jaxpost.tools import convert
from jaxpost.tools.converted_value import Setting, named, ours, spelled

DEFAULTS = tomllib.loads(pathlib.Path(__file__).with_name('convert_defaults.toml').read_text('utf-8'))


def convert_with_defaults(
  library: str, given: dict[str, Any], algorithm: str = ''
) -> tuple[dict[str, Any], list[Setting], list[Setting]]:
  """Returns (config, settings, defaults): as `convert.convert`, and the library's defaults that the config has.

  A default is left out if the file has a setting for the same field, or if our default is equal.
  """
  tables = DEFAULTS.get(library, {})
  method = algorithm or convert.method_of(library, tables.get('RL', {}) | given)
  if method not in algorithms.ALGORITHMS:
    return *convert.convert(library, given, algorithm), []
  has_rewards = convert.learns_from_rewards(method)
  switched = [name for name in tables if '=' in name and _is_on(name, given, has_rewards)]
  table_names = ('every', *['RL'] * has_rewards, method, *switched)
  defaults = {k: v for name in table_names for k, v in tables.get(name, {}).items() if k not in given}
  settings, plain = convert.settings_of(library, defaults | given, method), convert.plain(method)
  set_fields = {field for s in settings if s.name in given for field in s.fields}

  def is_kept(setting: Setting) -> bool:
    differs = any(ours(setting.name, f, setting.value) != operator.attrgetter(f)(plain) for f in setting.fields)
    return setting.name in given or (differs and set_fields.isdisjoint(setting.fields))

  config, kept = convert.read_by(method, [s for s in settings if is_kept(s)])
  return config, [s for s in kept if s.name in given], [s for s in kept if s.name in defaults and s.fields]


def _is_on(switch: str, given: dict[str, Any], has_rewards: bool) -> bool:
  """Returns whether a file has the setting NAME=VALUE, or for NAME=*@RL any value and a method with rewards."""
  name, _, value = switch.partition('=')
  if value == '*@RL':
    return has_rewards and named(given, name) is not None
  return spelled(named(given, name)) == value
