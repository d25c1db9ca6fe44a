"""Adds the defaults of another library to a converted config, by convert_defaults.toml, where ours differ."""

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
  """Returns (config, settings, defaults): as `convert.convert`, and the defaults of the library that the config has.

  A default gives way to a setting of the file for the same field, and is left out where ours is equal.
  """
  tables = DEFAULTS.get(library, {})
  method = algorithm or convert.method_of(library, tables.get('RL', {}) | given)
  if method not in algorithms.ALGORITHMS:
    return *convert.convert(library, given, algorithm), []
  switched = [kind for kind in tables if '=' in kind and _is_on(kind, given)]
  kinds = ('every', *['RL'] * convert.learns_from_rewards(method), method, *switched)
  defaults = {name: value for kind in kinds for name, value in tables.get(kind, {}).items() if name not in given}
  settings, plain = convert.settings_of(library, defaults | given, method), convert.plain(method)
  taken = {field for s in settings if s.name in given for field in s.fields}

  def stays(setting: Setting) -> bool:
    differs = any(ours(setting.name, f, setting.value) != operator.attrgetter(f)(plain) for f in setting.fields)
    return setting.name in given or (differs and taken.isdisjoint(setting.fields))

  config, left = convert.read_by(method, [s for s in settings if stays(s)])
  return config, [s for s in left if s.name in given], [s for s in left if s.name in defaults and s.fields]


def _is_on(switch: str, given: dict[str, Any]) -> bool:
  """Returns whether a file has the setting NAME=VALUE."""
  name, _, value = switch.partition('=')
  return spelled(named(given, name)) == value
