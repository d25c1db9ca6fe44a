"""Fields of a config by dotted name, and the field that an unknown name stands for.

`field_type` returns the type of a field. `unknown_key` says what to write in place of a name that is no field: it knows
former names, misspellings, fields of another section and the names that TRL, verl and Hugging Face use, which are
listed in field_names.toml.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import tomllib
import typing
from typing import Any

from jaxpost.errors import InputError
from jaxpost.stage.schema import Config

_NAMES = tomllib.loads(pathlib.Path(__file__).with_suffix('.toml').read_text('utf-8'))
RENAMED = _NAMES['renamed']  # former name -> field
SYNONYMS = {name: (field,) for field, names in _NAMES['other_names'].items() for name in names.split()}
SYNONYMS |= {name: tuple(fields.split()) for name, fields in _NAMES['several'].items()}
_MAX_SUGGESTIONS = 4


def _all_fields(kind, prefix: str) -> dict[str, Any]:
  found = {}
  for name, hint in typing.get_type_hints(kind).items():
    found[prefix + name] = hint
    if dataclasses.is_dataclass(hint):
      found |= _all_fields(hint, f'{prefix}{name}.')
  return found


FIELDS = _all_fields(Config, '')  # 'optim.lr' -> float; sections, too


def field_type(path: str) -> Any:
  """Returns the type of a field: a dataclass for a section, None for no field.

  Everything below `user` and `data.template_kwargs` is free: its type is `typing.Any`.
  """
  return Any if path.startswith(('user.', 'data.template_kwargs.')) else FIELDS.get(path)


def unknown_key(where: str, path: str) -> InputError:
  """Returns the error for `where.path`, where `path` is no field.

  Args:
    where: 'config', or 'config.STAGE' for a field of a stage's block.
    path: dotted name inside it.
  """
  if not path.isprintable():  # an error is one line
    path = ascii(path)[1:-1]
  if path in RENAMED:
    return InputError(f'{where}.{path}: has been renamed; write {where}.{RENAMED[path]}')
  parts = path.split('.')
  near = _suggestions(parts)[:_MAX_SUGGESTIONS]
  if not near:
    known = ', '.join(name.rpartition('.')[2] for name in _members(_known_section(parts)))
    return InputError(f'{where}.{path}: unknown key; known: {known}')
  *names, last = [name if name.startswith('--') else f'{where}.{name}' for name in near]
  hint = f'{", ".join(names)} or {last}' if names else last
  return InputError(f'{where}.{path}: unknown key; did you mean {hint}?')


def _known_section(parts: list[str]) -> str:
  """The longest prefix of the path that is a section; '' is the whole config."""
  known = ''
  for count in range(1, len(parts)):
    start = '.'.join(parts[:count])
    if dataclasses.is_dataclass(FIELDS.get(start)):
      known = start
  return known


def _members(section: str) -> list[str]:
  return [name for name in FIELDS if name.rpartition('.')[0] == section]


def _suggestions(parts: list[str]) -> list[str]:
  """The fields that were most probably meant, by the first rule that finds any."""
  tails = ['.'.join(parts[i:]) for i in range(len(parts))]
  for tail in tails:
    if tail in SYNONYMS:
      return list(SYNONYMS[tail])
  section = _known_section(parts)
  rest = parts[section.count('.') + 1 :] if section else parts
  if len(rest) > 1:  # a misspelled section says more than the name below it
    found = _misspelled(section, rest) or _in_another_section(tails)
  else:
    found = _in_another_section(tails) or _misspelled(section, rest)
  if found:
    return found
  for part in reversed(parts[:-1]):
    if part in SYNONYMS:
      return list(SYNONYMS[part])
  return _similar(section, parts[-1])


def _in_another_section(tails: list[str]) -> list[str]:
  """Fields whose path ends like this one."""
  for tail in tails:
    found = [name for name in FIELDS if f'.{name}'.endswith(f'.{tail}')]
    if found:
      return found
  return []


def _misspelled(section: str, rest: list[str]) -> list[str]:
  """The field of this section that is spelled alike, with what follows."""
  start = f'{section}.' if section else ''
  names = [name.removeprefix(start) for name in _members(section)]
  for near in difflib.get_close_matches(rest[0], names, 1):
    path = '.'.join([start + near, *rest[1:]])
    if field_type(path):
      return [path]
    if len(rest) > 1 and dataclasses.is_dataclass(FIELDS.get(start + near)):
      return _misspelled(start + near, rest[1:])
  return []


def _similar(section: str, name: str) -> list[str]:
  """The field that is spelled most alike, inside the section or anywhere."""
  for prefix in [f'{section}.', ''] if section else ['']:
    names = {path.rpartition('.')[2]: path for path in reversed(FIELDS) if path.startswith(prefix)}
    near = difflib.get_close_matches(name, names, 1)
    if near:
      return [names[near[0]]]
  return []
