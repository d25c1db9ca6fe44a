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
_PARSERS = {
  bool: flags.BooleanParser(),
  int: flags.IntegerParser(),
  float: flags.FloatParser(),
  tuple: tuple_parser.TupleParser(),
}

flags.disclaim_key_flags()  # --config belongs to the command that defines it


def define_config() -> flags.FlagHolder:
  """Defines --config; its value is the config with all overrides applied."""
  # Given an empty sys_argv, ml_collections applies no overrides itself: `parse` does.
  return config_flags.DEFINE_config_file(
    'config', None, 'Config file with its arguments: FILE.py[:args], or FILE.yaml.', lock_config=True, sys_argv=[]
  )


def parse(argv: Sequence[str]) -> list[str]:
  """Parses flags as absl does, and applies the overrides to --config."""
  if 'config' not in flags.FLAGS:
    return flags.FLAGS(argv)
  argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
  rest, given = split(argv)
  words = flags.FLAGS([_read_yaml(word) for word in joined(rest)])
  if flags.FLAGS['config'].value is None:
    if given:
      raise InputError(f'--config.{next(iter(given))}: there is no config to change; give --config=FILE, too')
    return words
  _check_file(flags.FLAGS['config'].config_filename.partition(':')[0])
  config = flags.FLAGS['config'].value
  assert config.keys  # an error of the file is raised by the first access
  for line in apply(config, given):
    print(line, file=sys.stderr)
  return words


def joined(argv: Sequence[str]) -> list[str]:
  """Returns the words of a command line with --config FILE as the one word --config=FILE; those after -- stay."""
  words = []
  left = list(argv)
  while left and left[0] != '--':
    word = left.pop(0)
    alone = word in ('--config', '-config') and left
    words.append(f'{word}={left.pop(0)}' if alone else word)
  return words + left


def _read_yaml(word: str) -> str:
  """--config=FILE.yaml, or the config.json of a run, as the config file that reads it; other words as they are."""
  flag, _, path = word.partition('=')
  if flag not in ('--config', '-config') or not path.endswith(('.yaml', '.yml', '.json')):  # JSON is YAML
    return word
  _check_file(path)
  return f'{flag}={pathlib.Path(__file__).with_name("yaml_config.py")}:{path}'


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
  """Splits a command line into (the rest, {path: values as text, in order}).

  Overrides are written as absl accepts flags: --config.a=v, --config.a v, and
  for booleans --config.a or --noconfig.a. Words after -- are left alone.
  """
  rest: list[str] = []
  given: dict[str, list[str]] = {}
  left = list(argv)
  while left:
    word = left.pop(0)
    if word == '--':
      return [*rest, word, *left], given
    if not (found := _OVERRIDE.fullmatch(word)):
      rest.append(word)
      continue
    path, value = found['path'], found['value']
    if found['no'] and value:
      raise InputError(f'{word}: write --config.{path}{value}, or --noconfig.{path} for False')
    if value:
      value = value[1:]
    elif found['no'] or _stands_alone(path, left):
      value = 'false' if found['no'] else 'true'
    elif left:
      value = left.pop(0)
    else:
      raise InputError(f'--config.{path}: needs a value; write --config.{path}=VALUE')
    for other in given:
      if other.startswith(f'{path}.'):
        raise InputError(f'--config.{path}: would undo --config.{other} before it; put it first')
    given[path] = [*given.pop(path, ()), value]  # the last one counts
  return rest, given


def _stands_alone(path: str, following: list[str]) -> bool:
  """Returns whether --config.path without = is a boolean and takes no value."""
  kind = field_names.field_type(path) or field_names.field_type(path.partition('.')[2])
  if kind in (None, Any):  # the type depends on the config
    return not following or following[0].startswith('-')
  return kind is bool


def apply(config: Any, given: Mapping[str, list[str]]) -> list[str]:
  """Applies overrides to the config; returns the lines to print about them.

  Args:
    config: the config of a file: a ConfigDict, or nested dicts.
    given: {path: values as text, in order}, as `split` returns it.
  """
  raw = config.to_dict() if isinstance(config, ConfigDict) else config
  changes = {}
  for path in sorted(given, key='stages'.__ne__):  # which decides what a stage is
    changes[path] = _value(raw, path, given[path])
    if path == 'stages':
      raw = {**raw, 'stages': changes[path]}
  lines = check_reach(raw, changes) + clear_epochs(raw, changes)
  for path, value in changes.items():
    _put(config, path.split('.'), value)
  return lines


def _value(raw: dict, path: str, texts: list[str]) -> Any:
  """The text of an override as the type of its field."""
  stage, field = locate(raw, path)
  kind = field_names.field_type(field) if field else dict
  if kind is Any:
    kind = _type_of_free_field(raw, stage, field)
    if kind is str and _SEVERAL.fullmatch(texts[-1]):  # a path or several
      kind = tuple
  if dataclasses.is_dataclass(kind) or kind in (dict, object):
    return _literal(path, texts[-1], kind)
  kind = tuple if kind is list else kind
  if kind is tuple:
    return tuple(x for text in texts for x in _items(path, text))
  try:
    return _PARSERS[kind].parse(texts[-1]) if kind in _PARSERS else texts[-1]
  except ValueError:
    raise InputError(f'config.{path}: want {kind.__name__}, got {texts[-1]!r}') from None


def _items(path: str, text: str) -> tuple:
  found = _PARSERS[tuple].parse(text)
  if found == (text,) and _SEVERAL.fullmatch(text):
    raise InputError(f"config.{path}: {text} cannot be read; quote each text in it, as in \"('a', 'b')\"")
  return found


def _type_of_free_field(raw: dict, stage: str, field: str) -> type:
  """The type of a field that takes any value: that of the present value, if any."""
  paths = [f'{stage}.{field}', field] if stage else [field]
  for path in paths:
    if (present := value_at(raw, path)) is not None:
      return type(present)
  return str if field in field_names.FIELDS else object


def _literal(path: str, text: str, kind: type) -> Any:
  """The text as a Python literal; a dict unless `kind` is object."""
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
    own = {stage: _value_in_block(changes, raw, stage, path) for stage in stages}
    kept = {stage: found for stage, found in own.items() if found is not None}
    # A stage that has an override of its own needs no warning.
    unset = [stage for stage in kept if f'{stage}.{path}' not in given]
    if kept and len(kept) == len(stages):
      commands = ' '.join(f'--config.{stage}.{path}={shlex.quote(_as_written(value, ""))}' for stage in unset)
      values = ', '.join(f'{stage}: {_as_written(found)}' for stage, found in kept.items())
      raise InputError(
        f'config.{path}={_as_written(value)}: would change nothing, every stage sets its own ({values}); '
        + (f'write {commands}' if commands else 'leave it out')
      )
    for stage in unset:
      lines.append(
        f'config.{path}={_as_written(value)}: stage {stage} keeps its own {_as_written(kept[stage])}; '
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


def _as_written(value, empty="''") -> str:
  """The value as it would be written on a command line."""
  return (value or empty) if isinstance(value, str) else str(value)


def _check_file(name: str):
  """Raises InputError with the nearest file name if the config file is missing."""
  path = pathlib.Path(name)
  if path.is_file():
    return
  if path.is_dir():
    raise InputError(f'--config: {name} is a folder; name a file in it')
  folder = path.parent
  files = {f.name: f for where in (pathlib.Path('configs'), folder) if where.is_dir() for f in _configs(where)}
  wanted = path.name if path.suffix in ('.py', '.yaml', '.yml') else f'{path.name}.py'
  near = difflib.get_close_matches(wanted, files, 1)
  hint = f'did you mean {files[near[0]]}?' if near else f'{folder} has {", ".join(sorted(files)[:8]) or "no config"}'
  if not folder.is_dir():
    hint = f'nor is there a folder {folder}' + (f'; {hint}' if near else '')
  raise InputError(f'--config: {name}: no such file; {hint}')


def _configs(folder: pathlib.Path) -> list[pathlib.Path]:
  return [f for pattern in ('*.py', '*.yaml', '*.yml') for f in folder.glob(pattern)]
