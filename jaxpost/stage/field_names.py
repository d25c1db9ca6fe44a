"""Looks up config fields by dotted name, and suggests the field that an unknown name was meant for.

`field_type` returns the type of a field. `unknown_key` suggests a field for former names, misspellings, names in the
wrong section, and names of TRL, verl and Hugging Face, as `unknown_value` does for values; field_names.toml lists both.
"""

import dataclasses
import difflib
import pathlib
import tomllib
import typing
from collections.abc import Collection
from typing import Any

from jaxpost.errors import InputError, did_you_mean
from jaxpost.stage.schema import Config

_NAMES = tomllib.loads(pathlib.Path(__file__).with_suffix('.toml').read_text('utf-8'))
SYNONYMS = {name: (field,) for field, names in _NAMES['other_names'].items() for name in names.split()}
SYNONYMS |= {name: tuple(fields.split()) for name, fields in (_NAMES['several'] | _NAMES['former']).items()}
VALUES = _NAMES['values']
_MAX_SUGGESTIONS = 4


def _all_fields(section: type, prefix: str) -> dict[str, Any]:
  fields = {}
  for name, hint in typing.get_type_hints(section).items():
    fields[prefix + name] = hint
    if dataclasses.is_dataclass(hint):
      fields |= _all_fields(hint, f'{prefix}{name}.')
  return fields


FIELDS = _all_fields(Config, '')  # dotted name -> type, of fields ('optim.lr': float) and of sections


def field_type(path: str) -> Any:
  """Returns the type of a field: a dataclass for a section, None if there is no such field.

  `user` and `data.template_kwargs` may have any fields, whose type is `typing.Any`.
  """
  return Any if path.startswith(('user.', 'data.template_kwargs.')) else FIELDS.get(path)


def unknown_key(where: str, path: str) -> InputError:
  """Returns the error for `where.path`, which is not a field.

  Args:
    where: 'config', or 'config.STAGE' for a stage's block.
    path: dotted name inside it.
  """
  if not path.isprintable():  # keeps the error on one line
    path = ascii(path)[1:-1]
  parts = path.split('.')
  suggestions = _suggestions(parts)[:_MAX_SUGGESTIONS]
  if not suggestions:
    known = ', '.join(name.rpartition('.')[2] for name in _members(_known_section(parts)))
    return InputError(f'{where}.{path}: unknown key; known: {known}')
  *names, last = [name if name.startswith('--') else f'{where}.{name}' for name in suggestions]
  hint = f'{", ".join(names)} or {last}' if names else last
  return InputError(f'{where}.{path}: unknown key; did you mean {hint}?')


def unknown_value(name: str, value: Any, choices: Collection[str]) -> InputError:
  """Returns the error for a value of the field `name` that is none of its choices."""
  meant = VALUES.get(f'{name.rpartition(".")[2]}={value}')
  hint = f'did you mean {meant!r}?' if meant else did_you_mean(str(value), choices, 0.5)  # float16 is near fp16
  known = ', '.join(choice or "''" for choice in choices)
  return InputError(f'{name}: {value!r:.100} is not one of {known}; {hint}'.rstrip('; '))


def _known_section(parts: list[str]) -> str:
  """Returns the longest prefix of the path that is a section; '' for the whole config."""
  section = ''
  for count in range(1, len(parts)):
    prefix = '.'.join(parts[:count])
    if dataclasses.is_dataclass(FIELDS.get(prefix)):
      section = prefix
  return section


def _members(section: str) -> list[str]:
  return [name for name in FIELDS if name.rpartition('.')[0] == section]


def _suggestions(parts: list[str]) -> list[str]:
  """Returns the fields that were most probably meant, by the first rule that finds any."""
  tails = ['.'.join(parts[i:]) for i in range(len(parts))]  # 'a.b.c', 'b.c', 'c'
  for tail in tails:
    if tail in SYNONYMS:
      return list(SYNONYMS[tail])
  section = _known_section(parts)
  unknown_parts = parts[section.count('.') + 1 :] if section else parts
  if len(unknown_parts) > 1:  # the first of them is a misspelled section, a better clue than the field's name
    suggestions = _misspelled(section, unknown_parts) or _in_another_section(tails)
  else:
    suggestions = _in_another_section(tails) or _misspelled(section, unknown_parts)
  if suggestions:
    return suggestions
  for part in reversed(parts[:-1]):
    if part in SYNONYMS:
      return list(SYNONYMS[part])
  return _similar(section, parts[-1])


def _in_another_section(tails: list[str]) -> list[str]:
  """Returns the fields that end with the longest of `tails` that any field ends with."""
  for tail in tails:
    fields = [name for name in FIELDS if f'.{name}'.endswith(f'.{tail}')]
    if fields:
      return fields
  return []


def _misspelled(section: str, parts: list[str]) -> list[str]:
  """Returns the field that `parts` below a section stand for if the first, and then the next, is misspelled."""
  prefix = f'{section}.' if section else ''
  names = [name.removeprefix(prefix) for name in _members(section)]
  for match in difflib.get_close_matches(parts[0], names, 1):
    path = '.'.join([prefix + match, *parts[1:]])
    if field_type(path):
      return [path]
    if len(parts) > 1 and dataclasses.is_dataclass(FIELDS.get(prefix + match)):
      return _misspelled(prefix + match, parts[1:])
  return []


def _similar(section: str, name: str) -> list[str]:
  """Returns the field whose last part is most similar to `name`, inside the section or else anywhere."""
  for prefix in [f'{section}.', ''] if section else ['']:
    paths = {path.rpartition('.')[2]: path for path in reversed(FIELDS) if path.startswith(prefix)}
    for match in difflib.get_close_matches(name, paths, 1):
      return [paths[match]]
  return []
