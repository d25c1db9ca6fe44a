"""Settings of other libraries that become ours together with others of the same file.

Sizes of one device or in samples, numbers of updates, and fractions of another setting.
"""

from __future__ import annotations

import math
from typing import Any

from jaxpost.tools.converted_value import Setting, integer, named, ours

# Parts of a name that say that a setting is not of the policy.
APART = {
  'val_kwargs': 'the evaluation',
  'critic': 'the critic',
  'critic_model_config': 'the critic',
  'critic_optimizer_config': 'the critic',
  'reference_model_config': 'the reference',
  'reward_model': 'the reward model',
  'rollout_model_config': 'the sampler',
}
# The sizes that divide another, or are divided by it, into the updates of a pass over a rollout.
_WHOLE_OF = {
  'ppo_mini_batch_size': 'train_batch_size',
  'mini_batch_size': 'batch_size',
  'steps_per_generation': 'gradient_accumulation_steps',
}
# Numbers of batches, and what they are times to be our field; 1 where a file does not have a factor with a default.
_PRODUCTS = {
  ('num_batches', 'train.steps'): {'num_epoch': 1, 'train_fraction': 1},
  ('num_batches', 'data.max_samples'): {'batch_size': None, 'train_fraction': 1},
  ('num_test_batches', 'eval.size'): {'eval_batch_size': None},
}
_IN_STEPS = [(field,) for field in ('train.steps', 'optim.warmup_steps', 'eval.every', 'save.every', 'log.every')]


def computed(setting: Setting, given: dict[str, Any]) -> Setting:
  """Maps sizes that are ours only together with other settings; some weights need a switch."""
  block, _, last = setting.name.rpartition('.')
  trains = given.get(f'{block}.enable_train') and given.get(f'{block}.enable', True)
  if setting.fields == ('nll.mtp_weight',) and not trains:
    return Setting(setting.name, setting.value, (), 'has no effect without enable and enable_train')
  if not APART.keys().isdisjoint(setting.name.split('.')):
    return setting
  for field in setting.fields:
    if (last, field) in _PRODUCTS:
      return _product(setting, given, _PRODUCTS[last, field])
  if last == 'max_target_length' and setting.fields == ('rollout.max_new_tokens',):
    return _without_the_prompt(setting, given)
  if last in _WHOLE_OF:
    counts = last == 'steps_per_generation'  # micro-batches; the others are sizes in prompts
    sizes = setting.value, integer(given, _WHOLE_OF[last], int(counts))
    whole, part = sizes if counts else sizes[::-1]
    fits = whole and isinstance(part, int) and part > 0 and whole % part == 0
    return Setting(setting.name, whole // part, ('rl.minibatches',)) if fits else setting
  if last == 'warmup_steps' and isinstance(setting.value, float) and 0 < setting.value < 1:  # as transformers reads it
    return Setting(setting.name, setting.value, ('optim.warmup_ratio',))
  if last in ('epsilon', 'epsilon_high') and named(given, 'loss_type') == 'cispo' and setting.fields:
    return _bound_of_cispo(setting)
  if setting.fields == ('train.micro_batch_size',) and last.endswith('_per_gpu'):
    return _of_all_gpus(setting, given)
  if setting.fields == ('rollout.prompts',) and last in ('per_device_train_batch_size', 'generation_batch_size'):
    return _in_prompts(setting, given, last == 'generation_batch_size')
  return setting


def _product(setting: Setting, given: dict[str, Any], factors: dict[str, int | None]) -> Setting:
  """Maps a number of batches to its product with `factors`: settings and their defaults, None where there is none."""
  (field,) = setting.fields
  values = {name: default if named(given, name) is None else named(given, name) for name, default in factors.items()}
  numbers = [setting.value, *values.values()]
  if not all(isinstance(number, (int, float)) for number in numbers):
    missing = ' and '.join(name for name, value in values.items() if value is None)
    why = f'the file lacks {missing}' if missing else 'which are no numbers here'
    return Setting(setting.name, setting.value, (), f'{field} is this times {" and ".join(factors)}; {why}')
  return Setting(setting.name, int(math.prod(numbers)), setting.fields)


def _without_the_prompt(setting: Setting, given: dict[str, Any]) -> Setting:
  """Maps MaxText's tokens of a prompt and a completion to those of a completion."""
  prompt = integer(given, 'max_prefill_predict_length')
  if prompt and isinstance(setting.value, int) and setting.value > prompt:
    return Setting(setting.name, setting.value - prompt, setting.fields)
  why = 'rollout.max_new_tokens is this less max_prefill_predict_length, which the file lacks or which is not below it'
  return Setting(setting.name, setting.value, (), why)


def without_overridden(library: str, settings: list[Setting], given: dict[str, Any]) -> list[Setting]:
  """Leaves out settings that the library does not read where another one is in the file.

  A number of warm-up steps decides over a fraction, in all of these libraries; 0 of them only in verl. A rate of Tunix
  is `peak_value` where the same section has a schedule, and `learning_rate` where it has none.
  """
  steps = [s for s in settings if s.fields == ('optim.warmup_steps',)]
  warm = next((s.name for s in steps if library == 'verl' or ours(s.name, s.fields[0], s.value)), '')
  out = []
  for setting in settings:
    section, _, last = setting.name.rpartition('.')
    wins = warm if setting.fields == ('optim.warmup_ratio',) else ''
    if library == 'tunix' and last in ('learning_rate', 'peak_value') and setting.fields:
      rate = 'peak_value' if given.get(f'{section}.schedule_type') else 'learning_rate'
      wins = f'{section}.{rate}' if rate != last and f'{section}.{rate}' in given else ''
    out.append(Setting(setting.name, setting.value, (), f'gives way to {wins} in {library}') if wins else setting)
  return out


def end_of_schedule(setting: Setting, peak: float) -> Setting:
  """Maps a smallest rate that is a fraction of the `peak`, where the file has that."""
  if peak and setting.reason.startswith('a fraction of the peak') and isinstance(setting.value, (int, float)):
    return Setting(setting.name, setting.value * peak, ('optim.end_lr',))
  return setting


def _bound_of_cispo(setting: Setting) -> Setting:
  """Maps TRL's bound of the ratio to one above 1; it has none below."""
  if setting.fields == ('rl.clip_high',) and isinstance(setting.value, (int, float)) and setting.value >= 1:
    return Setting(setting.name, setting.value - 1, setting.fields)
  return Setting(setting.name, setting.value, (), 'cispo has the bound epsilon_high alone, which is at least 1')


def updates_of_a_rollout(settings: list[Setting]) -> int:
  """Returns the optimizer updates that these settings make of a rollout."""
  counts = [ours(s.name, s.fields[0], s.value) for s in settings if s.fields in (('rl.epochs',), ('rl.minibatches',))]
  return math.prod(counts)


def in_rollouts(setting: Setting, updates: int) -> Setting:
  """Maps a number of updates to one of rollouts, which are the steps of an on-policy run here."""
  if updates == 1 or setting.fields not in _IN_STEPS:
    return setting
  number = ours(setting.name, setting.fields[0], setting.value)
  if isinstance(number, int) and number % updates == 0:
    return Setting(setting.name, number // updates, setting.fields)
  why = f'counts updates, of which a step has {updates} here; {setting.fields[0]} counts steps'
  return Setting(setting.name, setting.value, (), why)


def _of_all_gpus(setting: Setting, given: dict[str, Any]) -> Setting:
  """Maps verl's rows of a GPU at a time to those of all GPUs."""
  gpus, nodes = integer(given, 'n_gpus_per_node'), integer(given, 'nnodes', 1)
  if named(given, f'{setting.name.rpartition(".")[0]}.use_dynamic_bsz') is True:
    return Setting(setting.name, setting.value, (), 'has no effect with use_dynamic_bsz')
  if not (gpus and nodes):
    return Setting(setting.name, setting.value, (), 'is of one GPU; train.micro_batch_size counts the rows of all')
  return Setting(setting.name, ours(setting.name, setting.fields[0], setting.value) * gpus * nodes, setting.fields)


def _in_prompts(setting: Setting, given: dict[str, Any], whole: bool) -> Setting:
  """Maps TRL's completions of a generation, `whole` or of a micro-batch of a device, to prompts."""
  group = integer(given, 'num_generations')
  factors = {'num_generations': group}
  completions = ours(setting.name, setting.fields[0], setting.value)
  if not whole:
    # TRL generates once for each update, unless steps_per_generation says how many micro-batches it is for.
    steps = integer(given, 'steps_per_generation', integer(given, 'gradient_accumulation_steps', 1))
    processes = integer(given, 'num_processes')
    factors |= {'gradient_accumulation_steps': steps, 'the number of processes': processes}
    completions *= (steps or 1) * (processes or 1)
  unknown = [name for name, value in factors.items() if not value]
  if not unknown and completions % group == 0:
    return Setting(setting.name, completions // group, setting.fields)
  of = 'itself' if whole else 'x gradient_accumulation_steps x processes'
  why = f'the file lacks {" and ".join(unknown)}' if unknown else 'which is no whole number here'
  return Setting(setting.name, setting.value, (), f'rollout.prompts is this {of} / num_generations; {why}')
