"""Settings of TRL, verl, Tunix or MaxText as a config of ours; every one is mapped, or named as not mapped.

Names come from convert.toml and from stage/field_names.toml, which also answers misspelled
fields. A value is taken only if the field accepts it; nothing is guessed. Equal names
need not mean equal results: docs/from_trl_and_verl.md says where definitions differ.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import pathlib
import re
import shlex
import tomllib
from typing import Any, NamedTuple

import yaml

from jaxpost.errors import InputError
from jaxpost.stage import algorithms, field_names
from jaxpost.stage import config as config_lib

_TABLES = tomllib.loads(pathlib.Path(__file__).with_suffix('.toml').read_text('utf-8'))
_VALUES, _EVERY = _TABLES.pop('values'), _TABLES.pop('every')
LIBRARIES = tuple(_TABLES)
_FLAG = re.compile(r'(?:--|\+{0,2})(?P<name>[A-Za-z_][\w./@-]*)=(?P<value>.*)', re.DOTALL)
_NEGATIVE = re.compile(r'-\.?\d')
_ENDS = '\n;&|<>'  # what ends the words of a command in a shell
_STREAM = re.compile(r'(?<=\s)\d+(?=[<>])')  # as in 2>&1

_APART = {'val_kwargs': 'the evaluation', 'critic': 'the critic', 'reward_model': 'the reward model'}
NOT_NEEDED = 'is not needed here'  # the reason of a setting that asks for what is done anyway


class Setting(NamedTuple):
  """A setting of another library: its fields here, or why there are none."""

  name: str
  value: Any
  fields: tuple[str, ...]
  reason: str = ''


def read(path: str) -> dict[str, Any]:
  """Returns {dotted name: value} of a .yaml or .json file, or of the options in a shell script.

  Raises:
    InputError: the file is not there, or holds no settings.
  """
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise InputError(f'{path}: no such file')
  text = file.read_text('utf-8')
  try:
    if file.suffix in ('.yaml', '.yml', '.json'):
      found = _flat(json.loads(text) if file.suffix == '.json' else yaml.safe_load(text))
    else:
      found = _options(text)
  except (ValueError, yaml.YAMLError) as error:
    raise InputError(f'{path}: {" ".join(str(error).split())}') from None
  if not found:
    raise InputError(f'{path}: holds no settings; give a .yaml or .json file, or a script with name=value options')
  return found


def _flat(value: Any, prefix: str = '') -> dict[str, Any]:
  if not isinstance(value, dict):
    return {prefix[:-1]: value} if prefix else {}
  out = {}
  for key, inner in value.items():
    out |= _flat(inner, f'{prefix}{key}.')
  return out


class _Lines(io.StringIO):
  """A script whose comments, which shlex reads as lines, leave the end of the line, where a command ends."""

  def readline(self, size: int = -1, /) -> str:
    line = super().readline(size)
    self.seek(self.tell() - line.endswith('\n'))
    return line


def _options(script: str) -> dict[str, Any]:
  """The options `name=value`, `--name=value`, `--name value value` and `--name` in the commands of a script."""
  lexer = shlex.shlex(_Lines(_STREAM.sub('', script.replace('\\\n', ' '))), posix=True, punctuation_chars=_ENDS)
  lexer.whitespace, lexer.whitespace_split = ' \t\r', True
  words, found = list(lexer), {}
  for i, word in enumerate(words):
    if match := _FLAG.fullmatch(word):
      found[match['name']] = yaml.safe_load(match['value']) if '$' not in match['value'] else match['value']
    elif word.startswith('--'):
      values = list(itertools.takewhile(_is_value, words[i + 1 :]))
      program = next((n for n, value in enumerate(values) if n and value.endswith('.py')), None)  # of a launcher
      values = [yaml.safe_load(value) for value in values[:program]]
      found[word[2:]] = values if len(values) > 1 else values[0] if values else True
  return found


def _is_value(word: str) -> bool:
  """Returns whether a word behind an option belongs to it: it is no option itself, and the command goes on."""
  is_option = _FLAG.fullmatch(word) or word.startswith('-') and not _NEGATIVE.match(word)
  return not is_option and not (word and set(word) <= set(_ENDS))


def convert(library: str, given: dict[str, Any], algorithm: str = '') -> tuple[dict[str, Any], list[Setting]]:
  """Returns the config as nested dicts, and every setting with what became of it.

  Args:
    library: one of LIBRARIES.
    given: {dotted name: value}, of `read`.
    algorithm: our name of the method; '' for the one that the settings name, else grpo.
  """
  config: dict[str, Any] = {}
  settings = []
  method = algorithm or _method(library, given)
  config['algorithm'] = method
  for name, value in given.items():
    settings.append(_setting(library, name, value, method))
  settings = [_computed(setting, given) for setting in _without_epochs(settings)]
  for setting in sorted(settings, key=lambda s: -len(s.fields)):  # one clip range for both sides gives way to its own
    for field in setting.fields:
      _put(config, field, _ours(setting.name, field, setting.value))
  config['algorithm'] = method
  return config, settings


def _without_epochs(settings: list[Setting]) -> list[Setting]:
  """Leaves out the epochs where there is a number of steps, too, which ends a run in all of these libraries."""
  if not any('train.steps' in s.fields for s in settings):
    return settings
  why = 'is not needed beside the number of steps, which ends the run'
  return [Setting(s.name, s.value, (), why) if s.fields == ('train.epochs',) else s for s in settings]


def _computed(setting: Setting, given: dict[str, Any]) -> Setting:
  """Maps verl's size of a minibatch, in prompts, to how many minibatches a step has; some weights need a switch."""
  block = setting.name.rpartition('.')[0]
  trains = given.get(f'{block}.enable_train') and given.get(f'{block}.enable', True)
  if setting.fields == ('nll.mtp_weight',) and not trains:
    return Setting(setting.name, setting.value, (), 'has no effect without enable and enable_train')
  if not _APART.keys().isdisjoint(setting.name.split('.')):
    return setting
  whole = next((v for name, v in given.items() if name.rpartition('.')[2] == 'train_batch_size'), None)
  part = setting.value
  if setting.name.rpartition('.')[2] != 'ppo_mini_batch_size' or not (isinstance(whole, int) and isinstance(part, int)):
    return setting
  return setting if part < 1 or whole % part else Setting(setting.name, whole // part, ('rl.minibatches',))


def _method(library: str, given: dict[str, Any]) -> str:
  for name, value in given.items():
    if _fields(library, name, value, '') == ('algorithm',):
      return str(_ours(name, 'algorithm', value))
  return 'grpo'


def _fields(library: str, name: str, value: Any, method: str) -> tuple[str, ...] | str:
  """The fields that a name stands for, or the reason why there are none."""
  parts = name.replace('/', '.').split('.')
  table = _EVERY | _TABLES[library]
  # A setting of another model, or of the evaluation, is none of the policy's: the part that says so is never cut off.
  apart = max((i for i, part in enumerate(parts) if part in _APART), default=len(parts) - 1)
  tails = ['.'.join(parts[i:]) for i in range(apart + 1)]
  for tail in tails:
    for key in (f'{tail}={_spelled(value)}', f'{tail}@{method}', tail):
      if key in table:
        return table[key][1:] if table[key].startswith('!') else tuple(table[key].split()) or NOT_NEEDED
  for tail in tails:
    if tail in field_names.SYNONYMS:
      return field_names.SYNONYMS[tail]
  if parts[apart] in _APART:
    return f'is of {_APART[parts[apart]]}, for which nothing here has this name'
  same = [
    field
    for field, kind in field_names.FIELDS.items()
    if field.rpartition('.')[2] == name and not dataclasses.is_dataclass(kind)
  ]
  return tuple(same) or 'nothing here has this name'


def _learns_from_rewards(method: str) -> bool:
  found = algorithms.load_algorithm(method) if method in algorithms.ALGORITHMS else None
  return found is not None and found.on_policy and found.rewards


def _setting(library: str, name: str, value: Any, method: str) -> Setting:
  fields = _fields(library, name, value, method)
  if isinstance(fields, str):
    return Setting(name, value, (), fields)
  both_clips = set(fields) == {'rl.clip_low', 'rl.clip_high'}
  if len(fields) > 1 and not both_clips:
    chosen = tuple(f for f in fields if f.startswith(('rl.', 'rollout.')) and _learns_from_rewards(method))
    if len(chosen) != 1:
      return Setting(name, value, (), f'may stand for {", ".join(fields)}; choose')
    fields = chosen
  if value is None or '$' in str(value):
    why = 'has no value in this file' if value is None else 'holds a variable of the shell; write its value'
    return Setting(name, value, (), f'is {fields[0]}, but {why}')
  for field in fields:
    try:
      nested: dict[str, Any] = {}
      _put(nested, field, _ours(name, field, value))
      config_lib.parse(nested)
    except InputError as error:
      return Setting(name, value, (), str(error).removeprefix('config.'))
  return Setting(name, value, fields)


def _ours(name: str, field: str, value: Any) -> Any:
  """A value as our field has it: other words for it, text for numbers, one path for a list of one."""
  words = _VALUES.get(field, {}) | _VALUES.get(name.rpartition('.')[2], {})
  if _spelled(value) in words:
    return words[_spelled(value)]
  if isinstance(value, list) and len(value) == 1:
    value = value[0]
  kind = field_names.FIELDS[field]
  if kind in (int, float) and isinstance(value, (str, float)):
    try:
      number = float(value)
    except ValueError:
      return value
    return int(number) if kind is int and number == int(number) else number
  if kind is str and isinstance(value, list):
    return '|'.join(map(str, value))
  return value


def _spelled(value: Any) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


def _put(config: dict, field: str, value: Any) -> None:
  *sections, name = field.split('.')
  for section in sections:
    config = config.setdefault(section, {})
  config[name] = value


def as_yaml(library: str, source: str, config: dict[str, Any], settings: list[Setting]) -> str:
  """Returns a YAML config that names, in comments, what each line was and what was not mapped."""
  mapped = [s for s in settings if s.fields]
  lines = [f'# From {source} of {library}: {len(mapped)} of {len(settings)} settings. Definitions may differ:']
  lines += ['# docs/from_trl_and_verl.md says how.', yaml.safe_dump(config, sort_keys=False).rstrip(), '', '# Mapped:']
  lines += [f'#   {s.name} -> {", ".join(s.fields)}' for s in mapped]
  lines += ['# Not mapped:', *(f'#   {s.name} = {_one_line(s.value)}: {s.reason}' for s in settings if not s.fields)]
  return '\n'.join(lines) + '\n'


def _one_line(value: Any) -> str:
  return ' '.join(str(value).split())[:80]
