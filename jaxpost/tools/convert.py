"""Settings of TRL, verl, Tunix or MaxText as a config of ours; every one is mapped, or named as not mapped.

Names come from convert.toml and from stage/field_names.toml, which also answers misspelled
fields. A value is taken only if the field accepts it; nothing is guessed. Equal names
need not mean equal results: docs/from_trl_and_verl.md says where definitions differ.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import tomllib
from typing import Any, NamedTuple

import yaml

from jaxpost.errors import InputError
from jaxpost.stage import algorithms, field_names
from jaxpost.stage import config as config_lib
from jaxpost.tools import shell_options

_TABLES = tomllib.loads(pathlib.Path(__file__).with_suffix('.toml').read_text('utf-8'))
_VALUES, _EVERY, _NEEDS = (_TABLES.pop(name) for name in ('values', 'every', 'needs'))
LIBRARIES = tuple(_TABLES)
# Another setting, as the value of one.
_OTHER = re.compile(r'\$\{(?:oc\.select:)?(?P<name>\.?[A-Za-z_][\w.]*)(?:,(?P<default>[^{}]*))?\}')
_MOST_OTHERS = 9  # of one another; more are a circle
_REFUSED = re.compile(r'config\.([\w.]+): ')
_APART = {'val_kwargs': 'the evaluation', 'critic': 'the critic', 'reward_model': 'the reward model'}
# The sizes that divide another, or are divided by it, into the updates of a pass over a rollout.
_WHOLE_OF = {
  'ppo_mini_batch_size': 'train_batch_size',
  'mini_batch_size': 'batch_size',
  'steps_per_generation': 'gradient_accumulation_steps',
}
_COUNT_UPDATES = ('trl', 'tunix')  # their steps are updates; those of verl and MaxText are rollouts, as here
_IN_STEPS = [(field,) for field in ('train.steps', 'optim.warmup_steps', 'eval.every', 'save.every', 'log.every')]
NOT_NEEDED = 'is not needed here'  # the reason of a setting that asks for what is done anyway


class Setting(NamedTuple):
  """A setting of another library: its fields here, or why there are none."""

  name: str
  value: Any
  fields: tuple[str, ...]
  reason: str = ''


def read(path: str) -> dict[str, Any]:
  """Returns {dotted name: value} of a .yaml or .json file, or of the options in a shell script (`shell_options`).

  Raises:
    InputError: the file is not there, or holds no settings.
  """
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise InputError(f'{path}: no such file')
  if file.suffix in ('.py', '.ipynb'):
    raise InputError(f'{path}: is Python, which is not run here; write its arguments as name: value into a .yaml file')
  try:
    text = file.read_text('utf-8')
    if file.suffix in ('.yaml', '.yml', '.json'):
      found = _interpolated(_flat(json.loads(text) if file.suffix == '.json' else yaml.safe_load(text)))
    else:
      found = shell_options.options(text)
  except (ValueError, yaml.YAMLError) as error:
    raise InputError(f'{path}: {" ".join(str(error).split())}') from None
  if not found:
    raise InputError(f'{path}: holds no settings; give a .yaml or .json file, or a script with name=value options')
  return found


def _flat(value: Any, prefix: str = '') -> dict[str, Any]:
  if not isinstance(value, dict):
    return {prefix[:-1]: value} if prefix else {}
  out: dict[str, Any] = {}
  for key, inner in value.items():
    out |= _flat(inner, f'{prefix}{key}.')
  return out


def _interpolated(found: dict[str, Any]) -> dict[str, Any]:
  """The settings with the values of others, which OmegaConf writes as ${a.b}, ${.b} or ${oc.select:a.b,DEFAULT}."""

  def filled(name: str, value: Any, depth: int = 0) -> Any:
    match = _OTHER.fullmatch(value) if isinstance(value, str) and depth < _MOST_OTHERS else None
    if match is None:
      return value
    other = match['name'] if match['name'][0] != '.' else name.rpartition('.')[0] + match['name']
    if other in found:
      return filled(other, found[other], depth + 1)
    return value if match['default'] is None else yaml.safe_load(match['default'])

  return {name: filled(name, value) for name, value in found.items()}


def convert(library: str, given: dict[str, Any], algorithm: str = '') -> tuple[dict[str, Any], list[Setting]]:
  """Returns the config as nested dicts, and every setting with what became of it.

  Args:
    library: one of LIBRARIES.
    given: {dotted name: value}, of `read`.
    algorithm: our name of the method; '' for the one that the settings name, else grpo.
  """
  settings = []
  method = algorithm or _method(library, given)
  for name, value in given.items():
    found = _setting(library, name, value, method)
    other = found.fields == ('algorithm',) and _ours(name, 'algorithm', value) != method
    settings.append(Setting(name, value, (), f'gives way to the algorithm {method}') if other else found)
  settings = [_computed(setting, given) for setting in _without_epochs(settings)]
  if library in _COUNT_UPDATES and _learns_from_rewards(method):
    settings = [_in_rollouts(setting, _updates_of_a_rollout(settings)) for setting in settings]
  if library == 'verl':
    settings = [_with_its_switch(setting, given) for setting in settings]
  return _read_by(method, settings)


def looks_like(library: str, given: dict[str, Any]) -> str:
  """Returns another library that knows far more of the names of these settings, '' for none."""

  def known(other: str) -> int:
    names = {key.partition('=')[0].partition('@')[0] for key in _TABLES[other]}
    return sum(any(f'.{name}'.endswith(f'.{n}') for n in names) for name in given)

  other = max(LIBRARIES, key=known)
  return other if known(other) > 2 * known(library) + 2 else ''


def _read_by(method: str, settings: list[Setting]) -> tuple[dict[str, Any], list[Setting]]:
  """Returns the config of the settings, without those that it would be refused for, and the settings."""
  while True:
    config: dict[str, Any] = {'algorithm': method}
    for setting in sorted(settings, key=lambda s: -len(s.fields)):  # one clip range for both sides gives way to its own
      for field in setting.fields:
        _put(config, field, _ours(setting.name, field, setting.value))
    config['algorithm'] = method
    refused, why = _refused(config)
    if not any(refused in s.fields for s in settings):
      return config, settings
    settings = [Setting(s.name, s.value, (), why) if refused in s.fields else s for s in settings]


def _refused(config: dict[str, Any]) -> tuple[str, str]:
  """The field that the config is refused for, and the words of the refusal; '' where there is none."""
  from jaxpost.stage import prepare

  try:
    prepare.resolve_all(config)
  except InputError as error:
    match = _REFUSED.match(str(error))
    return (match[1], str(error).removeprefix('config.')) if match else ('', '')
  return '', ''


def _with_its_switch(setting: Setting, given: dict[str, Any]) -> Setting:
  """Leaves out a setting of verl that has no effect, as what switches it on is off."""
  for name, switch in _NEEDS.items():
    if setting.fields and f'.{setting.name}'.endswith(f'.{name}'):
      needed, _, on = switch.partition('=')
      if _spelled(_named(given, needed)) != on:
        return Setting(setting.name, setting.value, (), f'has no effect without {switch}')
  return setting


def _without_epochs(settings: list[Setting]) -> list[Setting]:
  """Leaves out the epochs where there is a number of steps, too, which ends a run in all of these libraries."""
  if not any('train.steps' in s.fields for s in settings):
    return settings
  why = 'is not needed beside the number of steps, which ends the run'
  return [Setting(s.name, s.value, (), why) if s.fields == ('train.epochs',) else s for s in settings]


def _computed(setting: Setting, given: dict[str, Any]) -> Setting:
  """Maps sizes that are ours only together with other settings; some weights need a switch."""
  block, _, last = setting.name.rpartition('.')
  trains = given.get(f'{block}.enable_train') and given.get(f'{block}.enable', True)
  if setting.fields == ('nll.mtp_weight',) and not trains:
    return Setting(setting.name, setting.value, (), 'has no effect without enable and enable_train')
  if not _APART.keys().isdisjoint(setting.name.split('.')):
    return setting
  if last in _WHOLE_OF:
    counts = last == 'steps_per_generation'  # micro-batches; the others are sizes in prompts
    sizes = setting.value, _integer(given, _WHOLE_OF[last], int(counts))
    whole, part = sizes if counts else sizes[::-1]
    fits = whole and isinstance(part, int) and part > 0 and whole % part == 0
    return Setting(setting.name, whole // part, ('rl.minibatches',)) if fits else setting
  if last in ('epsilon', 'epsilon_high') and _named(given, 'loss_type') == 'cispo' and setting.fields:
    return _bound_of_cispo(setting)
  if setting.fields == ('train.micro_batch_size',) and last.endswith('_per_gpu'):
    return _of_all_gpus(setting, given)
  if setting.fields == ('rollout.prompts',) and last in ('per_device_train_batch_size', 'generation_batch_size'):
    return _in_prompts(setting, given, last == 'generation_batch_size')
  return setting


def _bound_of_cispo(setting: Setting) -> Setting:
  """Maps TRL's bound of the ratio to one above 1; it has none below."""
  if setting.fields == ('rl.clip_high',) and isinstance(setting.value, (int, float)) and setting.value >= 1:
    return Setting(setting.name, setting.value - 1, setting.fields)
  return Setting(setting.name, setting.value, (), 'cispo has the bound epsilon_high alone, which is at least 1')


def _updates_of_a_rollout(settings: list[Setting]) -> int:
  """Returns the optimizer updates that these settings make of a rollout."""
  counts = [_ours(s.name, *s.fields, s.value) for s in settings if s.fields in (('rl.epochs',), ('rl.minibatches',))]
  return math.prod(counts)


def _in_rollouts(setting: Setting, updates: int) -> Setting:
  """Maps a number of updates to one of rollouts, which are the steps of an on-policy run here."""
  if updates == 1 or setting.fields not in _IN_STEPS:
    return setting
  number = _ours(setting.name, setting.fields[0], setting.value)
  if isinstance(number, int) and number % updates == 0:
    return Setting(setting.name, number // updates, setting.fields)
  why = f'counts updates, of which a step has {updates} here; {setting.fields[0]} counts steps'
  return Setting(setting.name, setting.value, (), why)


def _of_all_gpus(setting: Setting, given: dict[str, Any]) -> Setting:
  """Maps verl's rows of a GPU at a time to those of all GPUs."""
  gpus, nodes = _integer(given, 'n_gpus_per_node'), _integer(given, 'nnodes', 1)
  if _named(given, f'{setting.name.rpartition(".")[0]}.use_dynamic_bsz') is True:
    return Setting(setting.name, setting.value, (), 'has no effect with use_dynamic_bsz')
  if not (gpus and nodes):
    return Setting(setting.name, setting.value, (), 'is of one GPU; train.micro_batch_size counts the rows of all')
  return Setting(setting.name, _ours(setting.name, setting.fields[0], setting.value) * gpus * nodes, setting.fields)


def _in_prompts(setting: Setting, given: dict[str, Any], whole: bool) -> Setting:
  """Maps TRL's completions of a generation, `whole` or of a micro-batch of a device, to prompts."""
  group = _integer(given, 'num_generations')
  factors = {'num_generations': group}
  completions = _ours(setting.name, setting.fields[0], setting.value)
  if not whole:
    # TRL generates once for each update, unless steps_per_generation says how many micro-batches it is for.
    steps = _integer(given, 'steps_per_generation', _integer(given, 'gradient_accumulation_steps', 1))
    processes = _integer(given, 'num_processes')
    factors |= {'gradient_accumulation_steps': steps, 'the number of processes': processes}
    completions *= (steps or 1) * (processes or 1)
  unknown = [name for name, value in factors.items() if not value]
  if not unknown and completions % group == 0:
    return Setting(setting.name, completions // group, setting.fields)
  of = 'itself' if whole else 'x gradient_accumulation_steps x processes'
  why = f'the file lacks {" and ".join(unknown)}' if unknown else 'which is no whole number here'
  return Setting(setting.name, setting.value, (), f'rollout.prompts is this {of} / num_generations; {why}')


def _named(given: dict[str, Any], name: str) -> Any:
  """Returns the value of the setting whose name ends like this; None without one."""
  return next((value for other, value in given.items() if f'.{other}'.endswith(f'.{name}')), None)


def _integer(given: dict[str, Any], name: str, default: int = 0) -> int:
  """Returns a setting that is a whole number above 0, `default` where it is not given, and 0 for another value."""
  value = _named(given, name)
  if value is None:
    return default
  return value if isinstance(value, int) and value > 0 else 0


def _method(library: str, given: dict[str, Any]) -> str:
  for name, value in given.items():
    if _fields(library, name, value, '') == ('algorithm',):
      return str(_ours(name, 'algorithm', value))
  return 'grpo'


def _fields(library: str, name: str, value: Any, method: str) -> tuple[str, ...] | str:
  """The fields that a name stands for, or the reason why there are none."""
  if name.startswith('$'):
    return 'is a variable that the script assigns and does not use'
  parts = name.replace('/', '.').split('.')
  table = _EVERY | _TABLES[library]
  # A setting of another model, or of the evaluation, is none of the policy's: the part that says so is never cut off.
  apart = max((i for i, part in enumerate(parts) if part in _APART), default=len(parts) - 1)
  tails = ['.'.join(parts[i:]) for i in range(apart + 1)]
  for tail in tails:
    kinds = [f'{tail}@{method}', *[f'{tail}@RL'] * _learns_from_rewards(method)]
    for key in (f'{tail}={_spelled(value)}', *kinds, tail):
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
  if fields[0].startswith('--') and len(fields) == 1:
    return Setting(name, value, (), f'is the flag {fields[0]} of launch.train')
  both_clips = set(fields) == {'rl.clip_low', 'rl.clip_high'}
  if len(fields) > 1 and not both_clips:
    chosen = tuple(f for f in fields if f.startswith(('rl.', 'rollout.')) and _learns_from_rewards(method))
    if len(chosen) != 1:
      return Setting(name, value, (), f'may stand for {", ".join(fields)}; choose')
    fields = chosen
  if value is None or '$' in str(value):
    why = (
      'has no value in this file' if value is None else 'holds a variable that this file does not set; write its value'
    )
    return Setting(name, value, (), f'is {fields[0]}, but {why}')
  if fields == ('log.trackers',) and not _trackers(value):
    return Setting(name, value, (), NOT_NEEDED)
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
    value = words[_spelled(value)]
  if field == 'log.trackers':
    return _trackers(value)
  kind = field_names.FIELDS[field]
  if kind is tuple:
    return value if isinstance(value, list) else [value]
  if isinstance(value, list) and len(value) == 1:
    value = value[0]
  if kind in (int, float) and isinstance(value, (str, float)):
    try:
      number = float(value)
    except ValueError:
      return value
    return int(number) if kind is int and number == int(number) else number
  if kind is str and isinstance(value, list):
    return '|'.join(map(str, value))
  return value


def _trackers(value: Any) -> list:
  """Returns trackers as a list, without what every run writes: lines on the console, and TensorBoard's files."""
  return [v for v in (value if isinstance(value, list) else [value]) if v not in ('console', 'tensorboard', 'none')]


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
  page = 'from_tunix_and_maxtext' if library in ('tunix', 'maxtext') else 'from_trl_and_verl'
  lines = [f'# From {source} of {library}: {len(mapped)} of {len(settings)} settings. Definitions may differ:']
  lines += [
    f'# docs/{page}.md says how, and which defaults differ of what the file does not set.',
    yaml.safe_dump(config, sort_keys=False).rstrip(),
    '',
    '# Mapped:',
  ]
  lines += [f'#   {s.name} -> {", ".join(s.fields)}' for s in mapped]
  lines += ['# Not mapped:', *(f'#   {s.name} = {_one_line(s.value)}: {s.reason}' for s in settings if not s.fields)]
  return '\n'.join(lines) + '\n'


def _one_line(value: Any) -> str:
  return ' '.join(str(value).split())[:80]
