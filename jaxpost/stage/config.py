"""Reads the config of a run, checks it against the schema, and compares configs.

`defaults()` returns the nested dict that config files start from. `parse()` turns a user's config into one frozen
`Config` per stage, or raises InputError with the key, the value and the fix.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from jaxpost.data import messages
from jaxpost.errors import InputError
from jaxpost.stage.schema import Config
from jaxpost.storage import seals

if TYPE_CHECKING:
  from etils import epath


def defaults() -> dict:
  """Returns the default of every field, as nested dicts that config files start from."""
  return dataclasses.asdict(Config())


def parse(config: Mapping) -> dict[str, Config]:
  """Returns {stage name: Config}, in order; a run without `stages` has one stage."""
  config = dict(config)
  for name in config:
    if not isinstance(name, str):
      raise InputError(f'config.{name!r}: the name of a field must be a string')
  names = _check('config.stages', config.get('stages') or (), tuple, Config.__dataclass_fields__['stages'].metadata)
  blocks = {k: v for k, v in config.items() if k not in _FIELDS and isinstance(v, Mapping)}
  for name in names:
    _check_name(name, 'config.stages')
    if name in _FIELDS:
      raise InputError(f'config.stages: {name!r} is a field of every config; give the stage another name')
    if name not in blocks:
      raise InputError(f'config.stages: there is no block config.{name}; blocks: {", ".join(blocks) or "none"}')
    if names.count(name) > 1:  # the name of a stage identifies its checkpoints, metrics and weights
      raise InputError(f'config.stages: names {name!r} twice; give each stage a name and a block of its own')
    if blocks[name].get('stages'):
      raise InputError(f'config.{name}.stages: a stage has no stages of its own; name all of them in config.stages')
  if names:  # blocks that config.stages does not name are allowed, and checked below
    config = {k: v for k, v in config.items() if k not in blocks}
  base = _build(Config, config, 'config')
  if not names:
    target = base.algorithm.partition(':')[0]  # 'sft', or the file or module of the user
    name = pathlib.PurePath(target).stem if target.endswith('.py') else target.rpartition('.')[2]
    _check_name(name, 'config.algorithm')
    return {name: base}
  plain = dataclasses.asdict(base)
  stages = {}
  for name, block in blocks.items():
    _build(Config, block, f'config.{name}')  # only for its errors, which name the block
    stages[name] = _build(Config, merge(plain, block), 'config')
  return {name: stages[name] for name in names}


def parse_saved(path: epath.Path) -> dict[str, Config]:
  """Returns the stages of a run's config.json, as `parse` does.

  Raises:
    InputError: the file is damaged, or has fields this version does not have.
  """
  raw = seals.read_json(path)
  try:
    return parse(raw)
  except InputError as e:
    raise InputError(
      f'{path}: was written by another version of jaxpost ({e}); start a new run in another --workdir, '
      'or install that version'
    ) from e


def resolve(config: Config, defaults: Mapping) -> Config:
  """Returns the config with the algorithm's values for the fields that the user has left open.

  Args:
    defaults: {section: {field: value, or a function of the config}}.
  """
  sections: dict[str, Any] = {name: value for name, value in vars(config).items() if dataclasses.is_dataclass(value)}
  for name, section in sections.items():
    algorithm_defaults = defaults.get(name, {})
    changes = {}
    for field in dataclasses.fields(section):
      auto = field.metadata.get('auto')
      if auto is not None and vars(section)[field.name] == field.default:
        value = algorithm_defaults.get(field.name, auto)
        changes[field.name] = value(config) if callable(value) else value
    config = dataclasses.replace(config, **{name: dataclasses.replace(section, **changes)})
  return config


def spelled(value: Any) -> Any:
  """Returns a config as it reads back from JSON; functions become their names, which are the same in every process."""

  def to_json(item: Any) -> Any:
    if dataclasses.is_dataclass(item):
      return vars(item)
    named = item if hasattr(item, '__qualname__') else type(item)
    return f'{named.__module__}:{named.__qualname__}' if callable(item) else str(item)

  return json.loads(json.dumps(value, default=to_json))


def changes(raw: dict) -> dict[str, dict]:
  """Returns {stage: {field: value}} of the fields that are not at their defaults."""
  out = {}
  for name, config in parse(raw).items():
    out[name] = {key: value for key, (_, value) in difference(Config(), config).items() if key != 'stages'}
  return out


def difference(old: Any, new: Any) -> dict[str, tuple]:
  """Returns {dotted key: (old, new)} of the fields in which two configs, or parts of them, differ, as in JSON."""

  def compare(old: Any, new: Any, prefix: str) -> dict[str, tuple]:
    if not isinstance(old, dict) or not isinstance(new, dict):
      return {} if old == new else {prefix[:-1]: (old, new)}
    out: dict[str, tuple] = {}
    for key in sorted({*old, *new}):
      out |= compare(old.get(key), new.get(key), f'{prefix}{key}.')
    return out

  return compare(spelled(old), spelled(new), '')


_SECRET = r'\w*(secret|password|passwd|credential|(api|access|private)_?key)\w*(?<!_env)'
# A password in a URL, or an option of a reward.
_SECRET_IN_TEXT = re.compile(rf'://[^/@\s]*:[^/@\s]+@|[?&]{_SECRET}=', re.I)
_MAX_NUMBER = 10**12  # a number field without limits of its own lies in [-_MAX_NUMBER, _MAX_NUMBER]
_FIELDS = frozenset(f.name for f in dataclasses.fields(Config))
_shown = functools.partial(messages.shown, limit=200)


def _check_name(name: str, key: str) -> None:
  """Raises InputError unless a stage's name can be used in file names, columns and on the command line."""
  if not re.fullmatch(r'\w[\w+-]*([ .][\w+-]+)*', name) or len(name) > 100:
    raise InputError(
      f'{key}: {_shown(name)} cannot name a stage and its files; use at most 100 letters, digits, _ and -'
    )


def merge(base: Mapping, over: Mapping) -> dict:
  """Returns `base` updated with `over`, recursively."""
  out = dict(base)
  for key, value in over.items():
    nested = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
    out[key] = merge(out[key], value) if nested else value
  return out


def _build(kind: type, values: Mapping, where: str, path: str = '') -> Any:
  """Makes a dataclass from a mapping, checked field by field.

  Args:
    where: how error messages name it, such as 'config.grpo.optim'.
    path: dotted name of the section, such as 'optim'; '' for the whole config.
  """
  fields = {f.name: f for f in dataclasses.fields(kind)}
  for key in values:
    if key not in fields:
      from jaxpost.stage import field_names

      raise field_names.unknown_key(where.removesuffix(f'.{path}'), f'{path}.{key}'.lstrip('.'))
  hints = get_type_hints(kind)
  out = {}
  for key, value in values.items():
    name, field = f'{where}.{key}', fields[key]
    if dataclasses.is_dataclass(hints[key]) or hints[key] is dict:
      if not isinstance(value, Mapping):
        raise InputError(f'{name}: want a block of fields, got {_shown(value)}')
      if hints[key] is dict:  # of names that the user chooses
        _check_free(name, value)
        out[key] = dict(value)
      else:
        out[key] = _build(hints[key], value, name, f'{path}.{key}'.lstrip('.'))
    else:
      out[key] = _check(name, value, hints[key], field.metadata)
  return kind(**out)


def _check(name: str, value: Any, kind: Any, meta: Mapping) -> Any:
  """Returns the value converted to the type of its field; raises InputError if it has another type or range."""
  if isinstance(value, str):
    _check_text(name, value)
  if kind is Any:
    _check_free(name, value)
    return value
  if kind is float and type(value) is int and value.bit_length() < 64:  # float() overflows for very large integers
    value = float(value)
  if kind is tuple and isinstance(value, list):
    value = tuple(value)
  if type(value) is not kind:
    hint = '; in YAML write 1.0e-3, as 1e-3 is text' if kind is float and isinstance(value, str) else ''
    raise InputError(f'{name}: want {kind.__name__}, got {_shown(value)} ({type(value).__name__}){hint}')
  if kind is tuple:
    limits = {**meta, 'each': None}
    return tuple(_check(f'{name}[{i}]', x, meta['each'], limits) for i, x in enumerate(value))
  if kind is float and not math.isfinite(value):
    raise InputError(f'{name}: {value!r} is not a finite number')
  if meta['choices'] and value not in meta['choices']:
    from jaxpost.stage import field_names

    raise field_names.unknown_value(name, value, meta['choices'])
  if kind in (int, float):
    lo = -_MAX_NUMBER if meta['lo'] is None else meta['lo']
    hi = _MAX_NUMBER if meta['hi'] is None else meta['hi']
    if value < lo:
      raise InputError(f'{name}: {_shown(value)} is below {lo!r}')
    if value > hi:
      raise InputError(f'{name}: {_shown(value)} is above {hi!r}')
  return value


def _check_free(name: str, value: Any) -> None:
  """Raises InputError if a value of a field without a schema holds a secret or invalid text."""
  if isinstance(value, str):
    _check_text(name, value)
  elif isinstance(value, Mapping):
    for key, inner in value.items():
      if re.fullmatch(_SECRET, str(key), re.I) and isinstance(inner, str) and inner:
        raise _secret(f'{name}.{key}')
      _check_free(f'{name}.{key}', inner)
  elif isinstance(value, (tuple, list)):
    for i, inner in enumerate(value):
      _check_free(f'{name}[{i}]', inner)


def _secret(name: str) -> InputError:
  return InputError(
    f'{name}: looks like a secret, which would be written to config.json; put it into an environment variable, and '
    'name the variable here (in a field or option called *_env) or in config.rewards.env_vars'
  )


def _check_text(name: str, value: str) -> None:
  """Raises InputError for text that cannot be written to a file or used as a path, and for secrets."""
  if '\0' in value or any('\ud800' <= c <= '\udfff' for c in value):
    raise InputError(f'{name}: {value[:40]!r} has a character that is no text (NUL, or half of a surrogate pair)')
  if _SECRET_IN_TEXT.search(value):
    raise _secret(name)
