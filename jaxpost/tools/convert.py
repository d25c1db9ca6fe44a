"""Converts settings of TRL, verl, Tunix or MaxText to a config; each setting is mapped, or listed as not mapped.

Names come from convert.toml and from stage/field_names.toml, which also has hints for misspelled fields. A value is
mapped only if the field accepts it; nothing is guessed. Equal names need not mean equal results:
docs/from_trl_and_verl.md explains where definitions differ.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import yaml

from jaxpost.errors import InputError
from jaxpost.stage import algorithms, field_names
from jaxpost.stage import config as config_lib
from jaxpost.tools import converted_names, converted_reward, converted_sizes, converted_value, shell_options
from jaxpost.tools.converted_value import Setting, named, ours, spelled, trackers

_TABLES = {name: table for name, table in converted_value.TABLES.items() if name != 'values'}
_EVERY, _NEEDS = (_TABLES.pop(name) for name in ('every', 'needs'))
LIBRARIES = tuple(_TABLES)
# Libraries whose steps are updates, except num_batches of MaxText; steps of verl are rollouts, as here.
_COUNT_UPDATES = ('trl', 'tunix', 'maxtext')
# A reference to another setting as a value.
_REFERENCE = re.compile(r'\$\{(?:oc\.select:)?(?P<name>\.?[A-Za-z_][\w.]*)(?:,(?P<default>[^{}]*))?\}')
_MAX_REFERENCES = 9  # in a chain; more are a cycle
_REFUSED = re.compile(r'config\.([\w.]+): ')
NOT_NEEDED = 'is not needed here'  # the reason of a setting for something that is always done


def read(path: str) -> dict[str, Any]:
  """Returns {dotted name: value} of a .yaml or .json file, or of the options in a shell script (`shell_options`).

  Raises:
    InputError: the file is missing, or has no settings.
  """
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise InputError(f'{path}: {"is a folder; name a file in it" if file.is_dir() else "no such file"}')
  if file.suffix in ('.py', '.ipynb'):
    raise InputError(f'{path}: is Python, which is not run here; write its arguments as name: value into a .yaml file')
  try:
    text = file.read_text('utf-8')
    if file.suffix in ('.yaml', '.yml', '.json'):
      settings = _interpolated(_flat(json.loads(text) if file.suffix == '.json' else yaml.safe_load(text)))
    else:
      settings = shell_options.options(text)
  except (ValueError, yaml.YAMLError) as error:
    raise InputError(f'{path}: {" ".join(str(error).split())}') from None
  if not settings:
    raise InputError(f'{path}: holds no settings; give a .yaml or .json file, or a script with name=value options')
  return settings


def _flat(value: Any, prefix: str = '') -> dict[str, Any]:
  if not isinstance(value, dict):
    return {prefix[:-1]: value} if prefix else {}
  out: dict[str, Any] = {}
  for key, inner in value.items():
    out |= _flat(inner, f'{prefix}{key}.')
  return out


def _interpolated(settings: dict[str, Any]) -> dict[str, Any]:
  """Resolves references of OmegaConf to other settings: ${a.b}, ${.b} or ${oc.select:a.b,DEFAULT}."""

  def resolved(name: str, value: Any, depth: int = 0) -> Any:
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) and depth < _MAX_REFERENCES else None
    if match is None:
      return value
    referenced = match['name'] if match['name'][0] != '.' else name.rpartition('.')[0] + match['name']
    if referenced in settings:
      return resolved(referenced, settings[referenced], depth + 1)
    return value if match['default'] is None else yaml.safe_load(match['default'])

  return {name: resolved(name, value) for name, value in settings.items()}


def convert(library: str, given: dict[str, Any], algorithm: str = '') -> tuple[dict[str, Any], list[Setting]]:
  """Returns the config as nested dicts, and every setting with its fields here, or why it has none.

  Args:
    library: one of LIBRARIES.
    given: {dotted name: value}, of `read`.
    algorithm: our name of the method; '': the one that the settings name, by default grpo.
  """
  method = algorithm or method_of(library, given)
  return read_by(method, settings_of(library, given, method))


def settings_of(library: str, given: dict[str, Any], method: str) -> list[Setting]:
  """Returns every setting with its fields and value for one of our methods, or why it has none."""
  settings = []
  for name, value in given.items():
    setting = _setting(library, name, value, method)
    other_method = setting.fields == ('algorithm',) and ours(name, 'algorithm', value) != method
    settings.append(setting.unmapped(f'gives way to the algorithm {method}') if other_method else setting)
  settings = [converted_names.known_here(library, setting, given) for setting in settings]
  if library == 'verl' and learns_from_rewards(method):
    settings = converted_reward.joined(settings, given)
  settings = [converted_sizes.computed(setting, given) for setting in _without_epochs(settings)]
  settings = converted_sizes.without_overridden(library, settings, given)
  peak_lr = next((ours(s.name, 'optim.lr', s.value) for s in settings if s.fields == ('optim.lr',)), 0)
  settings = [converted_sizes.end_of_schedule(setting, peak_lr) for setting in settings]
  counts_updates = library in _COUNT_UPDATES and (library, method) != ('trl', 'ppo')  # TRL no longer has PPO
  if counts_updates and learns_from_rewards(method):
    updates = converted_sizes.updates_of_a_rollout(settings)
    settings = [s if s.name == 'num_batches' else converted_sizes.in_rollouts(s, updates) for s in settings]
  settings = [_of_a_pair(setting, method) for setting in settings]
  return [_with_its_switch(setting, given, _NEEDS.get(library, {})) for setting in settings]


def looks_like(library: str, given: dict[str, Any]) -> str:
  """Returns another library that knows far more of the names of these settings; '' if there is none."""

  def count_known(other: str) -> int:
    names = {key.partition('=')[0].partition('@')[0] for key in _TABLES[other]}
    return sum(any(f'.{name}'.endswith(f'.{known_name}') for known_name in names) for name in given)

  other = max(LIBRARIES, key=count_known)
  return other if count_known(other) > 2 * count_known(library) + 2 else ''


def read_by(method: str, settings: list[Setting]) -> tuple[dict[str, Any], list[Setting]]:
  """Returns the config of the settings, and the settings; those for which it would be refused are left out."""
  while True:
    config: dict[str, Any] = {'algorithm': method}
    # A setting of one field overrides one of several, such as a clip range for both sides.
    for setting in sorted(settings, key=lambda s: -len(s.fields)):
      for field in setting.fields:
        _put(config, field, ours(setting.name, field, setting.value))
    config['algorithm'] = method
    refused, reason = _refused(config)
    if not any(refused in s.fields for s in settings):
      return config, settings
    settings = [s.unmapped(reason) if refused in s.fields else s for s in settings]


def _refused(config: dict[str, Any]) -> tuple[str, str]:
  """Returns the field for which the config is refused, and the reason; two '' if it is accepted."""
  from jaxpost.stage import prepare

  try:
    prepare.resolve_all(config)
  except InputError as error:
    match = _REFUSED.match(str(error))
    return (match[1], str(error).removeprefix('config.')) if match else ('', '')
  return '', ''


def _with_its_switch(setting: Setting, given: dict[str, Any], needs: dict[str, str]) -> Setting:
  """Leaves out a setting without effect, because the setting that enables it is off."""
  for name, switch in needs.items():
    if setting.fields and f'.{setting.name}'.endswith(f'.{name}'):
      switch_name, _, enabling_value = switch.partition('=')
      if spelled(named(given, switch_name)) != enabling_value:
        return setting.unmapped(f'has no effect without {switch}')
  return setting


def _of_a_pair(setting: Setting, method: str) -> Setting:
  """Doubles TRL's largest sequence length if a row has to hold both answers of a pair."""
  if setting.name != 'max_length' or not isinstance(setting.value, int) or method not in algorithms.ALGORITHMS:
    return setting
  trains_on_pairs = algorithms.load_algorithm(method).mean_per(plain(method)) == 'pair'
  return setting._replace(value=2 * setting.value) if trains_on_pairs else setting


def plain(method: str) -> config_lib.Config:
  """Returns the config that sets nothing but one of our methods, with its defaults."""
  (config,) = config_lib.parse({'algorithm': method}).values()
  return config_lib.resolve(config, algorithms.load_algorithm(method).defaults)


def _without_epochs(settings: list[Setting]) -> list[Setting]:
  """Leaves out epochs if there is also a number of steps, which ends a run in all of these libraries."""
  if not any('train.steps' in s.fields for s in settings):
    return settings
  reason = 'is not needed beside the number of steps, which ends the run'
  return [s.unmapped(reason) if s.fields == ('train.epochs',) else s for s in settings]


def method_of(library: str, given: dict[str, Any]) -> str:
  """Returns our name of the method of the settings; by default grpo, or ppo if they have a section for it."""
  for name, value in given.items():
    if _fields(library, name, value, '') == ('algorithm',):
      return str(ours(name, 'algorithm', value))
  sections = {name.partition('.')[0] for name in given}
  return 'ppo' if 'ppo_config' in sections and 'grpo_config' not in sections else 'grpo'


def _fields(library: str, name: str, value: Any, method: str) -> tuple[str, ...] | str:
  """Returns the fields that a name stands for, or the reason why there are none."""
  if name.startswith('$'):
    return 'is a variable that the script assigns and does not use'
  parts = name.replace('/', '.').split('.')
  table = _EVERY | _TABLES[library]
  # A setting of another model or of the evaluation is not the policy's: a tail always keeps the part that says so.
  last_start = max((i for i, part in enumerate(parts) if part in converted_sizes.APART), default=len(parts) - 1)
  tails = ['.'.join(parts[i:]) for i in range(last_start + 1)]
  for tail in tails:
    keys_by_method = [f'{tail}@{method}', *[f'{tail}@RL'] * learns_from_rewards(method)]
    for key in (f'{tail}={spelled(value)}', *keys_by_method, tail):
      if key in table:
        return table[key][1:] if table[key].startswith('!') else tuple(table[key].split()) or NOT_NEEDED
  for tail in tails:
    if tail in field_names.SYNONYMS:
      return field_names.SYNONYMS[tail]
  for section in parts[:-1]:
    if f'{section}.*' in table:
      return table[f'{section}.*'].removeprefix('!') or NOT_NEEDED
  if parts[last_start] in converted_sizes.APART:
    return f'is of {converted_sizes.APART[parts[last_start]]}, for which nothing here has this name'
  same_name = [
    field
    for field, field_type in field_names.FIELDS.items()
    if field.rpartition('.')[2] == name and not dataclasses.is_dataclass(field_type)
  ]
  return tuple(same_name) or 'nothing here has this name'


def learns_from_rewards(method: str) -> bool:
  """Returns whether this is one of our methods that sample and get rewards."""
  algorithm = algorithms.load_algorithm(method) if method in algorithms.ALGORITHMS else None
  return algorithm is not None and algorithm.on_policy and algorithm.rewards


def _setting(library: str, name: str, value: Any, method: str) -> Setting:
  fields = _fields(library, name, value, method)
  if isinstance(fields, str):
    return Setting(name, value, (), fields)
  if fields[0].startswith('--') and len(fields) == 1:
    return Setting(name, value, (), f'is the flag {fields[0]} of launch.train')
  both_clips = set(fields) == {'rl.clip_low', 'rl.clip_high'}
  if len(fields) > 1 and not both_clips:
    chosen = tuple(f for f in fields if f.startswith(('rl.', 'rollout.')) and learns_from_rewards(method))
    if len(chosen) != 1:
      return Setting(name, value, (), f'may stand for {", ".join(fields)}; choose')
    fields = chosen
  if value is None or '$' in str(value):
    problem = (
      'has no value in this file' if value is None else 'holds a variable that this file does not set; write its value'
    )
    return Setting(name, value, (), f'is {fields[0]}, but {problem}')
  if fields == ('log.trackers',) and not trackers(value):
    return Setting(name, value, (), NOT_NEEDED)
  for field in fields:
    try:
      nested: dict[str, Any] = {}
      _put(nested, field, ours(name, field, value))
      config_lib.parse(nested)
    except InputError as error:
      return Setting(name, value, (), str(error).removeprefix('config.'))
  return Setting(name, value, fields)


def _put(config: dict, field: str, value: Any) -> None:
  *sections, name = field.split('.')
  for section in sections:
    config = config.setdefault(section, {})
  config[name] = value


def as_yaml(
  library: str, source: str, config: dict[str, Any], settings: list[Setting], defaults: Sequence[Setting] = ()
) -> str:
  """Returns a YAML config that names, in comments, what each line was and what was not mapped.

  Args:
    defaults: of the library, which are in the config but not in the file.
  """
  mapped = [s for s in settings if s.fields]
  page = 'from_tunix_and_maxtext' if library in ('tunix', 'maxtext') else 'from_trl_and_verl'
  lines = [f'# From {source} of {library}: {len(mapped)} of {len(settings)} settings. Definitions may differ:']
  lines += [f'# docs/{page}.md says how.', yaml.safe_dump(config, sort_keys=False).rstrip(), '', '# Mapped:']
  lines += [f'#   {s.name} -> {", ".join(s.fields)}' for s in mapped]
  if defaults:
    lines.append(f'# Not in the file, defaults of {library} that differ from ours:')
  lines += [f'#   {s.name} = {_one_line(s.value)} -> {", ".join(s.fields)}' for s in defaults]
  lines += ['# Not mapped:', *(f'#   {s.name} = {_one_line(s.value)}: {s.reason}' for s in settings if not s.fields)]
  return '\n'.join(lines) + '\n'


def _one_line(value: Any) -> str:
  return ' '.join(str(value).split())[:80]
