"""Overrides of a config with stages: which stages they reach, and which keep their value.

An override changes one field from the command line, as in `--config.optim.lr=0.5`. A stage's block has precedence over
the config around it, so an override at the top level reaches only the stages whose block does not name the field.
`check_reach` reports the others, so that no override is lost silently.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from jaxpost.errors import InputError
from jaxpost.stage import field_names


def locate(raw: Mapping, path: str) -> tuple[str, str]:
  """Splits a path into (stage or '', path of a field inside it).

  The second part is '' where the path names the whole block of a stage.

  Raises:
    InputError: there is no such field; the message names the nearest one.
  """
  head, _, rest = path.partition('.')
  if head in field_names.FIELDS:
    stage, field = '', path
  elif head in blocks(raw):
    stage, field = head, rest
  else:
    stage, field = '', path
    for near in difflib.get_close_matches(head, blocks(raw), 1):
      if field_names.field_type(rest):
        raise InputError(f'config.{path}: there is no stage {head}; did you mean config.{near}.{rest}?')
  if field and not field_names.field_type(field):
    raise field_names.unknown_key(f'config.{stage}' if stage else 'config', field)
  return stage, field


def blocks(raw: Mapping) -> list[str]:
  """Returns the names of all stages that have a block or are listed in `stages`."""
  written = [k for k, v in raw.items() if k not in field_names.FIELDS and isinstance(v, Mapping)]
  return list(dict.fromkeys([*written, *(raw.get('stages') or ())]))


def value_at(raw: Mapping, path: str) -> Any:
  """Returns the value at a dotted path of nested dicts, or None."""
  for part in path.split('.'):
    if not isinstance(raw, Mapping) or part not in raw:
      return None
    raw = raw[part]
  return raw


def check_reach(raw: Mapping, changes: Mapping) -> list[str]:
  """Returns a line for each override that a stage's block keeps from that stage.

  Args:
    raw: the config as its file gives it, as nested dicts.
    changes: {path: new value}, of the config and of stages.

  Raises:
    InputError: the blocks of all stages name the field, so that the override
      would change nothing.
  """
  stages = list(changes.get('stages', raw.get('stages')) or ())
  given = dict(_leaves(changes))
  lines = []
  for path, value in given.items():
    if path.partition('.')[0] not in field_names.FIELDS:
      continue
    kept = {}
    for stage in stages:
      found = _value_in_block(changes, raw, stage, path)
      if found is not None:
        kept[stage] = found
    # A stage that has an override of its own needs no warning.
    unset = [stage for stage in kept if f'{stage}.{path}' not in given]
    if kept and len(kept) == len(stages):
      commands = ' '.join(f'--config.{stage}.{path}={shlex.quote(_text(value, ""))}' for stage in unset)
      values = ', '.join(f'{stage}: {_text(found)}' for stage, found in kept.items())
      raise InputError(
        f'config.{path}={_text(value)}: would change nothing, every stage sets its own ({values}); '
        + (f'write {commands}' if commands else 'leave it out')
      )
    for stage in unset:
      lines.append(
        f'config.{path}={_text(value)}: stage {stage} keeps its own {_text(kept[stage])}; '
        f'set --config.{stage}.{path} to change it'
      )
  return lines


def clear_epochs(raw: Mapping, changes: dict[str, Any]) -> list[str]:
  """Adds `train.epochs` = 0 to changes that set `train.steps`, where the file has epochs; returns a line for each.

  Epochs would decide the steps, and the override change nothing.

  Raises:
    InputError: the changes set both.
  """
  lines = []
  for path in [path for path in changes if path.endswith('train.steps')]:
    field = path.removesuffix('steps') + 'epochs'
    if changes.get(field):
      raise InputError(f'config.{path}: config.{field}={changes[field]} decides the steps; leave out one of the two')
    found = value_at(raw, field) or value_at(raw, 'train.epochs')
    if found and field not in changes:
      changes[field] = 0.0
      lines.append(f'config.{path}={changes[path]}: counts in place of config.{field}={found}')
  return lines


def _value_in_block(changes: Mapping, raw: Mapping, stage: str, path: str) -> Any:
  """The value that the block of a stage has for a field after `changes`, or None."""
  whole = f'{stage}.{path}'
  value = value_at(raw, whole)
  for changed, new in changes.items():  # in the order they are made
    if whole == changed:
      value = new
    elif whole.startswith(f'{changed}.'):
      value = value_at(new, whole.removeprefix(f'{changed}.'))
  return value


def _leaves(changes: Mapping, prefix='') -> Iterator[tuple[str, Any]]:
  """Yields (path, value) of each field in the changes, also inside sections."""
  for path, value in changes.items():
    if isinstance(value, Mapping):
      yield from _leaves(value, f'{prefix}{path}.')
    else:
      yield prefix + path, value


def _text(value, empty="''") -> str:
  """The value as it would be written on a command line."""
  return (value or empty) if isinstance(value, str) else str(value)
