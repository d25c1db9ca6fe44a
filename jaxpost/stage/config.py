"""Reads the config of a run and checks it against the schema.

`defaults()` returns the nested dict that config files start from. `parse()` turns a user's config into one frozen
`Config` per stage, or raises InputError with the key, the value and the fix.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from jaxpost.errors import InputError, did_you_mean, type_of
from jaxpost.stage.schema import Config
from jaxpost.storage import seals

if TYPE_CHECKING:
  from etils import epath


def defaults() -> dict:
  """Returns every field at its default, as nested dicts; config files start from them."""
  return dataclasses.asdict(Config())


def parse(config: Mapping) -> dict[str, Config]:
  """Returns {stage name: Config}, in order; a run without `stages` has one stage."""
  config = dict(config)
  for name in config:
    if not isinstance(name, str):
      raise InputError(f'config.{name!r}: names of fields are text')
  names = _check('config.stages', config.get('stages') or (), tuple, Config.__dataclass_fields__['stages'].metadata)
  blocks = {k: v for k, v in config.items() if k not in _FIELDS and isinstance(v, Mapping)}
  for name in names:
    _check_name(name, 'config.stages')
    if name in _FIELDS:
      raise InputError(f'config.stages: {name!r} is a field of every config; give the stage another name')
    if name not in blocks:
      raise InputError(f'config.stages: there is no block config.{name}; blocks: {", ".join(blocks) or "none"}')
    if names.count(name) > 1:  # checkpoints, metrics and weights are known by the name of their stage
      raise InputError(f'config.stages: names {name!r} twice; give each stage a name and a block of its own')
    if blocks[name].get('stages'):
      raise InputError(f'config.{name}.stages: a stage has no stages of its own; name all of them in config.stages')
  if names:  # a block that no stage names may wait for its turn
    config = {k: v for k, v in config.items() if k not in blocks}
  base = _build(Config, config, 'config')
  if not names:
    name = stage_name(base.algorithm)
    _check_name(name, 'config.algorithm')
    return {name: base}
  plain = dataclasses.asdict(base)
  stages = {}
  for name, block in blocks.items():
    _build(Config, block, f'config.{name}')  # names the block in its errors
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


def stage_name(algorithm: str) -> str:
  """Returns the name of the only stage of a run: 'sft', or the stem of a user's file."""
  target = algorithm.partition(':')[0]
  if target.endswith('.py'):
    return pathlib.PurePath(target).stem
  return target.rpartition('.')[2]


def resolve(config: Config, defaults: Mapping) -> Config:
  """Returns the config with the algorithm's values for fields that are left to it.

  Args:
    defaults: {section: {field: value, or a function of the config}}.
  """
  sections: dict[str, Any] = {name: x for name, x in vars(config).items() if dataclasses.is_dataclass(x)}
  for section, block in sections.items():
    given = defaults.get(section, {})
    new = {}
    for field in dataclasses.fields(block):
      auto = field.metadata.get('auto')
      if auto is not None and vars(block)[field.name] == field.default:
        value = given.get(field.name, auto)
        new[field.name] = value(config) if callable(value) else value
    config = dataclasses.replace(config, **{section: dataclasses.replace(block, **new)})
  return config


_SECRET = r'\w*(secret|password|passwd|credential|(api|access|private)_?key)\w*(?<!_env)'
# A password in a URL, or an option of a reward.
_SECRET_IN_TEXT = re.compile(rf'://[^/@\s]*:[^/@\s]+@|[?&]{_SECRET}=', re.I)
_MOST = 10**12  # and -10**12: the range of a number without one of its own
_FIELDS = frozenset(f.name for f in dataclasses.fields(Config))


def _check_name(name: str, key: str) -> None:
  """InputError unless a stage's name is good for files, columns and the command line."""
  if not re.fullmatch(r'\w[\w+-]*([ .][\w+-]+)*', name) or len(name) > 100:
    raise InputError(
      f'{key}: {_shown(name)} is no name of a stage, which names files; use at most 100 letters, digits, _ and -'
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
    where: what errors call it, such as 'config.grpo.optim'.
    path: dotted name of the section, such as 'optim'; '' is the whole config.
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
  """Returns the value as the type of its field; InputError if it is out of range."""
  if isinstance(value, str):
    _check_text(name, value)
  if kind is Any:
    _check_free(name, value)
    return value
  if kind is float and type(value) is int and value.bit_length() < 64:  # of more bits, float() may overflow
    value = float(value)
  if kind is tuple and isinstance(value, list):
    value = tuple(value)
  if type(value) is not kind:
    raise InputError(f'{name}: want {kind.__name__}, got {_shown(value)} ({type(value).__name__})')
  if kind is tuple:
    limits = {**meta, 'each': None}
    return tuple(_check(f'{name}[{i}]', x, meta['each'], limits) for i, x in enumerate(value))
  if kind is float and not math.isfinite(value):
    raise InputError(f'{name}: {value!r} is not a finite number')
  if meta['choices'] and value not in meta['choices']:
    hint = did_you_mean(str(value), meta['choices'], 0.5)  # fp16 is float16
    raise InputError(f'{name}: {_shown(value)} is not one of {", ".join(meta["choices"])}; {hint}'.rstrip('; '))
  if kind in (int, float):
    lo = -_MOST if meta['lo'] is None else meta['lo']
    hi = _MOST if meta['hi'] is None else meta['hi']
    if value < lo:
      raise InputError(f'{name}: {_shown(value)} is below {lo!r}')
    if value > hi:
      raise InputError(f'{name}: {_shown(value)} is above {hi!r}')
  return value


def _check_free(name: str, value: Any) -> None:
  """InputError for what no free field may hold: text that is none, or a secret."""
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
    f'{name}: looks like a secret, which would stand in config.json; put it into an environment variable, and the '
    'name of that here (in a field or option called *_env) or in config.rewards.env_vars'
  )


def _check_text(name: str, value: str) -> None:
  """InputError for text that can be no path, and no line of a file."""
  if '\0' in value or any('\ud800' <= c <= '\udfff' for c in value):
    raise InputError(f'{name}: {value[:40]!r} has a character that is no text (NUL, or half of a surrogate pair)')
  if _SECRET_IN_TEXT.search(value):
    raise _secret(name)


def _shown(value: Any) -> str:
  """A value as text; Python refuses to print the digits of a very large integer."""
  try:
    return repr(value)[:200]
  except (ValueError, RecursionError):
    return f'{type_of(value)} that is too long to show'
