"""The flag --config=FILE[:args] with its overrides --config.a.b=value.

Overrides are removed from the command line before absl parses it, and applied after the config file was read. Their
types come from the schema, so that a field need not appear in the file.

A stage's block has precedence over the config around it, so an override at the top level reaches only the stages whose
block does not name the field. `check_reach` reports the others, so that no override is lost silently.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import tuple_parser

from jaxpost.errors import InputError
from jaxpost.stage import field_names

_OVERRIDE = re.compile(r'--?(?P<no>no)?config\.(?P<path>[^=]+)(?P<value>=.*)?', re.DOTALL)
_SEVERAL = re.compile(r'\s*(\(.*\)|\[.*\])\s*', re.DOTALL)  # a tuple or list
_NAMES = re.compile(r'[\w./@+-]+(\s*,\s*[\w./@+-]+)*,?')  # words and paths, separated by commas
YAML_SUFFIXES = ('.yaml', '.yml', '.json')  # JSON is YAML
_PARSERS = {
  bool: flags.BooleanParser(),
  int: flags.IntegerParser(),
  float: flags.FloatParser(),
  tuple: tuple_parser.TupleParser(),
}

flags.disclaim_key_flags()  # --config belongs to the command that defines it


def define_config() -> flags.FlagHolder:
  """Defines --config; its value is the config with all overrides applied."""
  # ml_collections applies no overrides if sys_argv is empty; `parse` does.
  return config_flags.DEFINE_config_file(
    'config', None, 'Config file: FILE.py[:args], FILE.yaml, or config.json of a run.', lock_config=True, sys_argv=[]
  )


def parse(argv: Sequence[str]) -> list[str]:
  """Parses flags as absl does, and applies the overrides to --config."""
  if 'config' not in flags.FLAGS:
    return flags.FLAGS(argv)
  argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
  other_words, overrides = split(argv)
  words = flags.FLAGS([_read_yaml(word) for word in joined(other_words)])
  if flags.FLAGS['config'].value is None:
    if overrides:
      raise InputError(f'--config.{next(iter(overrides))}: there is no config to change; give --config=FILE as well')
    return words
  _check_file(flags.FLAGS['config'].config_filename.partition(':')[0])
  config = flags.FLAGS['config'].value
  assert config.keys  # an error of the file is raised by the first access
  for line in apply(config, overrides):
    print(line, file=sys.stderr)
  return words


def joined(argv: Sequence[str]) -> list[str]:
  """Returns the words of a command line with --config FILE as one word, --config=FILE; words after -- are unchanged."""
  words = []
  remaining = list(argv)
  while remaining and remaining[0] != '--':
    word = remaining.pop(0)
    takes_next = word in ('--config', '-config') and remaining
    words.append(f'{word}={remaining.pop(0)}' if takes_next else word)
  return words + remaining


def _read_yaml(word: str) -> str:
  """Returns --config=FILE.yaml (or a run's config.json) as the Python config that reads it; other words unchanged."""
  flag, _, path = word.partition('=')
  if flag not in ('--config', '-config') or not path.endswith(YAML_SUFFIXES):
    return word
  _check_file(path)
  return f'{flag}={pathlib.Path(__file__).with_name("yaml_config.py")}:{path}'


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
  """Splits a command line into (words that are no overrides, {path of an override: values as text, in order}).

  Overrides are written as absl accepts flags: --config.a=v, --config.a v, and
  for booleans --config.a or --noconfig.a. Words after -- are left alone.
  """
  others: list[str] = []
  overrides: dict[str, list[str]] = {}
  remaining = list(argv)
  while remaining:
    word = remaining.pop(0)
    if word == '--':
      return [*others, word, *remaining], overrides
    if not (match := _OVERRIDE.fullmatch(word)):
      others.append(word)
      continue
    path, value = match['path'], match['value']
    if match['no'] and value:
      raise InputError(f'{word}: write --config.{path}{value}, or --noconfig.{path} for False')
    if value:
      value = value[1:]
    elif match['no'] or _stands_alone(path, remaining):
      value = 'false' if match['no'] else 'true'
    elif remaining:
      value = remaining.pop(0)
    else:
      raise InputError(f'--config.{path}: needs a value; write --config.{path}=VALUE')
    for earlier in overrides:
      if earlier.startswith(f'{path}.'):
        raise InputError(f'--config.{path}: would undo --config.{earlier} before it; put it first')
    overrides[path] = [*overrides.pop(path, ()), value]  # the last one counts
  return others, overrides


def _stands_alone(path: str, following: list[str]) -> bool:
  """Returns whether --config.path without = is a boolean that takes no value."""
  kind = field_names.field_type(path) or field_names.field_type(path.partition('.')[2])
  if kind in (None, Any):  # the type depends on the config
    return not following or following[0].startswith('-')
  return kind is bool


def apply(config: Any, overrides: Mapping[str, list[str]]) -> list[str]:
  """Applies overrides to the config; returns the lines to print about them.

  Args:
    config: the config of a file: a ConfigDict, or nested dicts.
    overrides: {path: values as text, in order}, of `split`.
  """
  raw = config.to_dict() if isinstance(config, ConfigDict) else config
  changes = {}
  for path in sorted(overrides, key='stages'.__ne__):  # it decides which blocks are stages
    changes[path] = _value(raw, path, overrides[path])
    if path == 'stages':
      raw = {**raw, 'stages': changes[path]}
  lines = check_reach(raw, changes) + clear_epochs(raw, changes)
  for path, value in changes.items():
    _put(config, path.split('.'), value)
  return lines


def _value(raw: dict, path: str, texts: list[str]) -> Any:
  """Returns the value of an override with the type of its field."""
  stage, field = locate(raw, path)
  kind = field_names.field_type(field) if field else dict
  if kind is Any:
    kind = _type_of_free_field(raw, stage, field)
    if kind is str and _SEVERAL.fullmatch(texts[-1]):  # several paths
      kind = tuple
  if dataclasses.is_dataclass(kind) or kind in (dict, object):
    return _literal(path, texts[-1], kind)
  kind = tuple if kind is list else kind
  if kind is tuple:
    commas = field_names.field_type(field) is tuple and field != 'rollout.stop_strings'  # these may contain one
    return tuple(x for text in texts for x in _items(path, text, commas))
  try:
    return _PARSERS[kind].parse(texts[-1]) if kind in _PARSERS else texts[-1]
  except ValueError:
    raise InputError(f'config.{path}: want {kind.__name__}, got {texts[-1]!r}') from None


def _items(path: str, text: str, commas: bool) -> tuple:
  """Returns the members of a tuple from a flag; with `commas`, names may be separated by commas alone."""
  if not text.strip():  # clears the field
    return ()
  try:
    items = _PARSERS[tuple].parse(text)
  except ValueError:  # of numbers that Python cannot read, as in v1,3b
    items = (text,)
  if items == (text,) and _SEVERAL.fullmatch(text):
    raise InputError(f"config.{path}: {text} cannot be read; quote each text in it, as in \"('a', 'b')\"")
  if commas and items == (text,) and _NAMES.fullmatch(text.strip()):
    return tuple(name.strip() for name in text.strip().rstrip(',').split(','))
  return items


def _type_of_free_field(raw: dict, stage: str, field: str) -> type:
  """Returns the type of a field that takes any value: that of its current value, if any."""
  paths = [f'{stage}.{field}', field] if stage else [field]
  for path in paths:
    if (present := value_at(raw, path)) is not None:
      return type(present)
  return str if field in field_names.FIELDS else object


def _literal(path: str, text: str, kind: type) -> Any:
  """Returns the text as a Python literal; InputError unless it is a dict or `kind` is object."""
  try:
    value = ast.literal_eval({'true': 'True', 'false': 'False'}.get(text, text))
  except (SyntaxError, ValueError):
    value = text
  if kind is not object and not isinstance(value, dict):
    raise InputError(f'config.{path}: want a block of fields, as "{{\'name\': value}}", got {text!r}')
  return value


def _put(config: Any, parts: list[str], value: Any):
  """Sets a field of nested configs, and creates the blocks that lead to it."""
  with contextlib.ExitStack() as stack:
    if isinstance(config, ConfigDict):
      stack.enter_context(config.unlocked())
      stack.enter_context(config.ignore_type())
    if len(parts) == 1:
      config[parts[0]] = value
      return
    if not isinstance(config.get(parts[0]), (ConfigDict, dict)):
      config[parts[0]] = {}
    _put(config[parts[0]], parts[1:], value)


def locate(raw: Mapping, path: str) -> tuple[str, str]:
  """Splits a path into (stage or '', path of a field inside it).

  The second part is '' if the path names the whole block of a stage.

  Raises:
    InputError: there is no such field; the message names the nearest one.
  """
  head, _, inner = path.partition('.')
  stage, field = '', path
  if head not in field_names.FIELDS and head in blocks(raw):
    stage, field = head, inner
  elif head not in field_names.FIELDS:
    for nearest in difflib.get_close_matches(head, blocks(raw), 1):
      if field_names.field_type(inner):
        raise InputError(f'config.{path}: there is no stage {head}; did you mean config.{nearest}.{inner}?')
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
  """Returns a line for each override that has no effect on a stage because its block names the field.

  Args:
    raw: the config of the file, as nested dicts.
    changes: {path: new value}, of the config and of stages.

  Raises:
    InputError: the blocks of all stages name the field, so the override has no effect.
  """
  stages = list(changes.get('stages', raw.get('stages')) or ())
  leaves = dict(_leaves(changes))
  lines = []
  for path, value in leaves.items():
    if path.partition('.')[0] not in field_names.FIELDS:
      continue
    block_values = {stage: _value_in_block(changes, raw, stage, path) for stage in stages}
    kept_values = {stage: kept for stage, kept in block_values.items() if kept is not None}
    # A stage with its own override needs no warning.
    unaffected = [stage for stage in kept_values if f'{stage}.{path}' not in leaves]
    if kept_values and len(kept_values) == len(stages):
      commands = ' '.join(f'--config.{stage}.{path}={shlex.quote(_as_written(value, ""))}' for stage in unaffected)
      values = ', '.join(f'{stage}: {_as_written(kept)}' for stage, kept in kept_values.items())
      raise InputError(
        f'config.{path}={_as_written(value)}: would change nothing, every stage sets its own ({values}); '
        + (f'write {commands}' if commands else 'leave it out')
      )
    for stage in unaffected:
      lines.append(
        f'config.{path}={_as_written(value)}: stage {stage} keeps its own {_as_written(kept_values[stage])}; '
        f'set --config.{stage}.{path} to change it'
      )
  return lines


def clear_epochs(raw: Mapping, changes: dict[str, Any]) -> list[str]:
  """Adds `train.epochs` = 0 to changes that set `train.steps`, if the file has epochs; returns a line for each.

  Otherwise the epochs would decide the steps, and the override would have no effect.

  Raises:
    InputError: the changes set both.
  """
  lines = []
  for path in [path for path in changes if path.endswith('train.steps')]:
    field = path.removesuffix('steps') + 'epochs'
    if changes.get(field):
      raise InputError(f'config.{path}: config.{field}={changes[field]} decides the steps; leave out one of the two')
    epochs = value_at(raw, field) or value_at(raw, 'train.epochs')
    if epochs and field not in changes:
      changes[field] = 0.0
      lines.append(f'config.{path}={changes[path]}: replaces config.{field}={epochs}')
  return lines


def _value_in_block(changes: Mapping, raw: Mapping, stage: str, path: str) -> Any:
  """Returns the value of a field in the block of a stage after `changes`, or None."""
  full_path = f'{stage}.{path}'
  value = value_at(raw, full_path)
  for changed, new in changes.items():  # in the order they are made
    if full_path == changed:
      value = new
    elif full_path.startswith(f'{changed}.'):
      value = value_at(new, full_path.removeprefix(f'{changed}.'))
  return value


def _leaves(changes: Mapping, prefix='') -> Iterator[tuple[str, Any]]:
  """Yields (path, value) of each field in the changes, also inside sections."""
  for path, value in changes.items():
    if isinstance(value, Mapping):
      yield from _leaves(value, f'{prefix}{path}.')
    else:
      yield prefix + path, value


def _as_written(value, empty="''") -> str:
  """Returns the value as it is written on a command line."""
  return (value or empty) if isinstance(value, str) else str(value)


def _check_file(name: str):
  """Raises InputError with the nearest file name if the config file is missing."""
  path = pathlib.Path(name)
  if path.is_file():
    return
  if path.is_dir():
    raise InputError(f'--config: {name} is a folder; name a file in it')
  folder = path.parent
  patterns = ('*.py', '*.yaml', '*.yml', 'config.json')
  files = {f.name: f for place in (pathlib.Path('configs'), folder) for p in patterns for f in place.glob(p)}
  file_name = path.name if path.suffix in ('.py', *YAML_SUFFIXES) else f'{path.name}.py'
  near = difflib.get_close_matches(file_name, files, 1)
  nearest = ', '.join(str(files[name]) for name in difflib.get_close_matches(file_name, files, 3, 0))
  hint = f'did you mean {files[near[0]]}?' if near else f'the nearest configs are {nearest or "none"}'
  if not folder.is_dir():
    hint = f'nor is there a folder {folder}' + (f'; {hint}' if near else '')
  raise InputError(f'--config: {name}: no such file; {hint}')
