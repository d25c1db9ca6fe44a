"""Converts settings of other libraries that depend on other settings of the same file.

These are sizes per device or in samples, numbers of updates, and fractions of another setting.
"""

from __future__ import annotations

import math
from typing import Any

from jaxpost.tools.converted_value import Setting, integer, named, ours

# Parts of names that show that a setting is not the policy's.
APART = {
  'val_kwargs': 'the evaluation',
  'critic': 'the critic',
  'critic_model_config': 'the critic',
  'critic_optimizer_config': 'the critic',
  'reference_model_config': 'the reference',
  'reward_model': 'the reward model',
  'rollout_model_config': 'the sampler',
}
# Sizes -> the size by which they are divided, or that they divide, to get the updates per pass over a rollout.
_WHOLE_OF = {
  'ppo_mini_batch_size': 'train_batch_size',
  'mini_batch_size': 'batch_size',
  'steps_per_generation': 'gradient_accumulation_steps',
}
# (number of batches, our field) -> {factors by which it is multiplied: default if the file lacks it}.
_PRODUCTS = {
  ('num_batches', 'train.steps'): {'num_epoch': 1, 'train_fraction': 1},
  ('num_batches', 'data.max_samples'): {'batch_size': None, 'train_fraction': 1},
  ('num_test_batches', 'eval.size'): {'eval_batch_size': None},
}
_IN_STEPS = [(field,) for field in ('train.steps', 'optim.warmup_steps', 'eval.every', 'save.every', 'log.every')]


def computed(setting: Setting, given: dict[str, Any]) -> Setting:
  """Maps sizes that depend on other settings, and leaves out weights whose switch is off."""
  block, _, name = setting.name.rpartition('.')
  trains = given.get(f'{block}.enable_train') and given.get(f'{block}.enable', True)
  if setting.fields == ('nll.mtp_weight',) and not trains:
    return setting.unmapped('has no effect without enable and enable_train')
  if not APART.keys().isdisjoint(setting.name.split('.')):
    return setting
  for field in setting.fields:
    if (name, field) in _PRODUCTS:
      return _product(setting, given, _PRODUCTS[name, field])
  if name == 'max_target_length' and setting.fields == ('rollout.max_new_tokens',):
    return _without_the_prompt(setting, given)
  if name in _WHOLE_OF:
    is_count = name == 'steps_per_generation'  # of micro-batches; the others are sizes in prompts
    sizes = setting.value, integer(given, _WHOLE_OF[name], int(is_count))
    whole, part = sizes if is_count else sizes[::-1]
    fits = whole and isinstance(part, int) and part > 0 and whole % part == 0
    return Setting(setting.name, whole // part, ('rl.minibatches',)) if fits else setting
  if name == 'warmup_steps' and isinstance(setting.value, float) and 0 < setting.value < 1:  # as in transformers
    return Setting(setting.name, setting.value, ('optim.warmup_ratio',))
  if name in ('epsilon', 'epsilon_high') and named(given, 'loss_type') == 'cispo' and setting.fields:
    return _bound_of_cispo(setting)
  if setting.fields == ('train.micro_batch_size',) and name.endswith('_per_gpu'):
    return _of_all_gpus(setting, given)
  if setting.fields == ('rollout.prompts',) and name in ('per_device_train_batch_size', 'generation_batch_size'):
    return _in_prompts(setting, given, name == 'generation_batch_size')
  return setting


def _product(setting: Setting, given: dict[str, Any], factors: dict[str, int | None]) -> Setting:
  """Maps a number of batches to its product with `factors`, {setting: its default, or None}."""
  (field,) = setting.fields
  values = {name: default if named(given, name) is None else named(given, name) for name, default in factors.items()}
  numbers = [setting.value, *values.values()]
  if not all(isinstance(number, (int, float)) for number in numbers):
    missing = ' and '.join(name for name, value in values.items() if value is None)
    reason = f'the file lacks {missing}' if missing else 'which are no numbers here'
    return setting.unmapped(f'{field} is this times {" and ".join(factors)}; {reason}')
  return Setting(setting.name, int(math.prod(numbers)), setting.fields)


def _without_the_prompt(setting: Setting, given: dict[str, Any]) -> Setting:
  """Maps MaxText's tokens of a prompt and a completion to those of a completion."""
  prompt = integer(given, 'max_prefill_predict_length')
  if prompt and isinstance(setting.value, int) and setting.value > prompt:
    return Setting(setting.name, setting.value - prompt, setting.fields)
  prompt_field = 'max_prefill_predict_length, which the file lacks or which is not below it'
  return setting.unmapped(f'rollout.max_new_tokens is this less {prompt_field}')


def without_overridden(library: str, settings: list[Setting], given: dict[str, Any]) -> list[Setting]:
  """Leaves out settings that the library ignores because of another one in the file.

  A number of warm-up steps overrides a fraction in all of these libraries; 0 steps only in verl. The learning rate of
  Tunix is `peak_value` if the same section has a schedule, and else `learning_rate`.
  """
  steps = [s for s in settings if s.fields == ('optim.warmup_steps',)]
  warmup = next((s.name for s in steps if library == 'verl' or ours(s.name, s.fields[0], s.value)), '')
  out = []
  for setting in settings:
    section, _, name = setting.name.rpartition('.')
    overriding = warmup if setting.fields == ('optim.warmup_ratio',) else ''
    if library == 'tunix' and name in ('learning_rate', 'peak_value') and setting.fields:
      rate = 'peak_value' if given.get(f'{section}.schedule_type') else 'learning_rate'
      overriding = f'{section}.{rate}' if rate != name and f'{section}.{rate}' in given else ''
    out.append(setting.unmapped(f'gives way to {overriding} in {library}') if overriding else setting)
  return out


def end_of_schedule(setting: Setting, peak: float) -> Setting:
  """Maps a final rate that is a fraction of the `peak`, if the file has a peak."""
  if peak and setting.reason.startswith('a fraction of the peak') and isinstance(setting.value, (int, float)):
    return Setting(setting.name, setting.value * peak, ('optim.end_lr',))
  return setting


def _bound_of_cispo(setting: Setting) -> Setting:
  """Maps TRL's bound of the ratio to its distance above 1; there is none below."""
  if setting.fields == ('rl.clip_high',) and isinstance(setting.value, (int, float)) and setting.value >= 1:
    return Setting(setting.name, setting.value - 1, setting.fields)
  return setting.unmapped('cispo has the bound epsilon_high alone, which is at least 1')


def updates_of_a_rollout(settings: list[Setting]) -> int:
  """Returns the number of optimizer updates per rollout with these settings."""
  counts = [ours(s.name, s.fields[0], s.value) for s in settings if s.fields in (('rl.epochs',), ('rl.minibatches',))]
  return math.prod(counts)


def in_rollouts(setting: Setting, updates: int) -> Setting:
  """Maps a number of updates to a number of rollouts, which are the steps of on-policy runs here."""
  if updates == 1 or setting.fields not in _IN_STEPS:
    return setting
  number = ours(setting.name, setting.fields[0], setting.value)
  if isinstance(number, int) and number % updates == 0:
    return Setting(setting.name, number // updates, setting.fields)
  reason = f'counts updates, of which a step has {updates} here; {setting.fields[0]} counts steps'
  return setting.unmapped(reason)


def _of_all_gpus(setting: Setting, given: dict[str, Any]) -> Setting:
  """Maps verl's micro-batch rows of one GPU to those of all GPUs."""
  gpus, nodes = integer(given, 'n_gpus_per_node'), integer(given, 'nnodes', 1)
  if named(given, f'{setting.name.rpartition(".")[0]}.use_dynamic_bsz') is True:
    return setting.unmapped('has no effect with use_dynamic_bsz')
  if not (gpus and nodes):
    return setting.unmapped('is of one GPU; train.micro_batch_size counts the rows of all')
  return Setting(setting.name, ours(setting.name, setting.fields[0], setting.value) * gpus * nodes, setting.fields)


def _in_prompts(setting: Setting, given: dict[str, Any], is_total: bool) -> Setting:
  """Maps TRL's completions, of a generation (`is_total`) or of a micro-batch on a device, to prompts."""
  group = integer(given, 'num_generations')
  factors = {'num_generations': group}
  completions = ours(setting.name, setting.fields[0], setting.value)
  if not is_total:
    # TRL generates once per update, unless steps_per_generation sets the number of micro-batches.
    steps = integer(given, 'steps_per_generation', integer(given, 'gradient_accumulation_steps', 1))
    processes = integer(given, 'num_processes')
    factors |= {'gradient_accumulation_steps': steps, 'the number of processes': processes}
    completions *= (steps or 1) * (processes or 1)
  unknown = [name for name, value in factors.items() if not value]
  if not unknown and completions % group == 0:
    return Setting(setting.name, completions // group, setting.fields)
  factors_text = 'itself' if is_total else 'x gradient_accumulation_steps x processes'
  reason = f'the file lacks {" and ".join(unknown)}' if unknown else 'which is no whole number here'
  return setting.unmapped(f'rollout.prompts is this {factors_text} / num_generations; {reason}')
