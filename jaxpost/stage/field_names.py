"""Fields of a config by dotted name, and the field that an unknown name stands for.

`field_type` returns the type of a field. `unknown_key` says what to write in
place of a name that is no field: it knows former names, misspellings, fields
of another section and the names that TRL, verl and Hugging Face use.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from typing import Any

from jaxpost.errors import InputError
from jaxpost.stage.schema import Config

# Former names of fields and their present ones.
RENAMED = {
  'model.quantise': 'model.quantize',
  'replay': 'train_on_rollouts',
  'router.replay': 'router.routing_replay',
  'rollout.lag': 'rollout.staleness',
  'rollout.park': 'rollout.offload',
  'rollout.swap_blocks': 'rollout.inflight_update_blocks',
  'tools.lag': 'tools.wait_blocks',
  'critic.shared': 'critic.value_head',
  'reward_model.centre_coef': 'reward_model.center_coef',
  'distill.topk': 'distill.top_k',
  'log.rollouts': 'log.rollouts_every',
  'data.enable_thinking': 'data.template_kwargs.enable_thinking',
}

# Field -> what TRL, verl or Hugging Face call it. docs/from_trl_and_verl.md
# explains the differences; tests/test_overrides.py compares the two.
_OTHER_NAMES = {
  'model.path': 'model_name_or_path pretrained_model_name_or_path model_name',
  'model.tokenizer': 'tokenizer_name_or_path tokenizer_name',
  'model.dtype': 'torch_dtype bf16 fp16',
  'model.attention': 'attn_implementation',
  'model.remat': 'gradient_checkpointing enable_gradient_checkpointing',
  'model.quantize': 'load_in_4bit load_in_8bit quantization',
  'data.path': 'dataset dataset_name train_dataset train_files train_file',
  'data.train_on': 'assistant_only_loss completion_only_loss train_on_prompt',
  'eval.data.path': 'val_files eval_dataset validation_file test_files',
  'train.steps': 'max_steps num_train_epochs num_epochs total_epochs total_training_steps',
  'train.row_length': 'max_length max_seq_length max_seq_len block_size',
  'optim.lr': 'learning_rate',
  'optim.schedule': 'lr_scheduler_type lr_scheduler lr_schedule',
  'optim.warmup_steps': 'warmup_ratio lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps',
  'optim.end_lr': 'min_lr min_lr_ratio lr_end',
  'optim.b1': 'adam_beta1 beta1',
  'optim.b2': 'adam_beta2 beta2',
  'optim.eps': 'adam_epsilon',
  'optim.clip_norm': 'max_grad_norm grad_clip clip_grad',
  'optim.name': 'optimizer',
  'eval.every': 'eval_steps test_freq',
  'save.every': 'save_steps save_freq',
  'save.keep': 'save_total_limit max_actor_ckpt_to_keep',
  'save.keep_best': 'metric_for_best_model load_best_model_at_end',
  'save.best_mode': 'greater_is_better',
  'log.every': 'logging_steps',
  'rollout.group_size': 'num_generations n rollout.n',
  'rollout.prompts': 'generation_batch_size',
  'rollout.max_new_tokens': 'max_completion_length max_response_length response_length max_tokens',
  'rollout.top_logprobs': 'logprobs',
  'rl.epochs': 'num_iterations ppo_epochs num_ppo_epochs',
  'rl.minibatches': 'steps_per_generation ppo_mini_batch_size num_mini_batches',
  'rl.advantage': 'adv_estimator',
  'rl.scale_rewards': 'norm_adv_by_std_in_grpo',
  'rl.loss': 'loss_mode importance_sampling_level',
  'rl.aggregate': 'loss_agg_mode',
  'rl.clip_low': 'clip_ratio_low',
  'rl.clip_high': 'epsilon_high clip_ratio_high',
  'rl.dual_clip': 'delta clip_ratio_c',
  'rl.kl_coef': 'kl_loss_coef',
  'rl.kl_in': 'use_kl_loss use_kl_in_reward',
  'rl.kl_estimator': 'kl_loss_type kl_penalty',
  'rl.entropy_coef': 'entropy_coeff',
  'rl.mask_truncated': 'mask_truncated_completions',
  'rl.importance': 'vllm_importance_sampling_correction',
  'rl.importance_cap': 'vllm_importance_sampling_cap',
  'rl.opsm_threshold': 'off_policy_mask_threshold',
  'rl.dynamic_sampling': 'filter_groups filter_groups.enable max_num_gen_batches',
  'rl.correct_by': 'filter_groups.metric',
  'critic.value_clip': 'cliprange_value',
  'critic.warmup_steps': 'critic_warmup',
  'data.template_kwargs': 'chat_template_kwargs apply_chat_template_kwargs',
  'data.chat_template': 'chat_template_path custom_chat_template',
  'preference.f_divergence': 'f_divergence_type',
  'preference.f_alpha': 'f_alpha_divergence_coef',
  'nll.neftune_alpha': 'neftune_noise_alpha',
  'nll.label_smoothing': 'label_smoothing_factor',
  'preference.precompute_ref': 'precompute_ref_log_probs',
  'distill.on_policy': 'lmbda',
  'reward_model.center_coef': 'center_rewards_coefficient',
  'lora.rank': 'r lora_r lora_rank',
  'lora.alpha': 'lora_alpha',
  'lora.dropout': 'lora_dropout',
  'lora.rslora': 'use_rslora',
  'lora.targets': 'target_modules lora_target_modules',
  'lora.path': 'lora_adapter_path',
  'reward': 'reward_funcs custom_reward_function custom_reward_function.path overlong_buffer',
}
SYNONYMS = {name: (path,) for path, names in _OTHER_NAMES.items() for name in names.split()} | {
  'beta': ('rl.kl_coef', 'preference.beta', 'distill.beta'),
  'epsilon': ('rl.clip_low', 'rl.clip_high'),
  'clip_ratio': ('rl.clip_low', 'rl.clip_high'),
  'kl_ctrl.type': ('rl.kl_target', 'rl.kl_horizon'),
  'loss_type': ('rl.loss', 'rl.aggregate', 'preference.losses', 'nll.kind'),
  'per_device_train_batch_size': ('train.batch_size', 'train.micro_batch_size'),
  'gradient_accumulation_steps': ('train.batch_size', 'train.micro_batch_size'),
  'ppo_micro_batch_size_per_gpu': ('train.micro_batch_size',),
  'use_dynamic_bsz': ('train.micro_batch_size',),
  'train_batch_size': ('rollout.prompts', 'train.batch_size'),
  'report_to': ('log.wandb', 'log.tensorboard'),
}
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
  if path in RENAMED:
    return InputError(f'{where}.{path}: has been renamed; write {where}.{RENAMED[path]}')
  parts = path.split('.')
  near = _suggestions(parts)[:_MAX_SUGGESTIONS]
  if not near:
    known = ', '.join(name.rpartition('.')[2] for name in _members(_known_section(parts)))
    return InputError(f'{where}.{path}: unknown key; known: {known}')
  *names, last = [f'{where}.{name}' for name in near]
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
