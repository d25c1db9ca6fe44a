"""Tests of launch.convert: settings of TRL, verl, Tunix and MaxText become a valid config or are listed."""

import json
import operator
import re
import subprocess
import sys

import pytest
import yaml
from test_console import CLONE

from jaxpost.errors import InputError
from jaxpost.stage import config as config_lib
from jaxpost.stage import field_names, prepare
from jaxpost.tools import convert, converted_defaults
from launch import yaml_config

FILES = {
  'trl': (
    'a.yaml',
    """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/tldr
learning_rate: 1.0e-5
num_generations: 16
max_completion_length: 256
beta: 0.04
epsilon: 0.2
per_device_train_batch_size: 8
gradient_checkpointing: true
lr_scheduler_type: cosine
warmup_ratio: 0.03
use_peft: true
lora_r: 32
lora_target_modules: [q_proj, v_proj]
bf16: true
output_dir: out
use_vllm: true
loss_type: dr_grpo
report_to: wandb
""",
  ),
  'verl': (
    'a.sh',
    """set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=gae \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \\
    algorithm.use_kl_in_reward=False \\
    +critic.optim.lr=1e-5 \\
    trainer.total_epochs=15 # a comment
""",
  ),
  'tunix': (
    'a.yaml',
    """
actor_model_config: {lora_config: {rank: 64, alpha: 64.0}}
rl_training_config:
  max_steps: 3738
  num_train_epochs: 2
  actor_optimizer_config: {opt_type: adamw, peak_value: 3e-6, schedule_type: warmup_cosine_decay_schedule, b2: 0.99}
  checkpointing_options: {save_interval_steps: 500, max_to_keep: 4}
rollout_config: {total_generation_steps: 768, max_prompt_length: 256, temperature: 0.9, top_k: 50}
grpo_config: {num_generations: 2, num_iterations: 1, beta: 0.08, epsilon: 0.2}
rollout_engine: vanilla
""",
  ),
  'maxtext': (
    'a.yml',
    """
rl: {num_generations: 2, grpo_beta: 0.08, grpo_epsilon: 0.2, loss_algo: gspo-token}
learning_rate: 3e-6
adam_b2: 0.99
gradient_clipping_threshold: 0.1
weight_dtype: bfloat16
decode_sampling_temperature: 0.9
checkpoint_period: 50
remat_policy: custom
use_pathways: true
ici_fsdp_parallelism: -1
num_epoch: 3
""",
  ),
}
EXPECTED = {
  'trl': {
    'optim.lr': 1e-5,
    'rollout.group_size': 16,
    'rl.kl_coef': 0.04,
    'rl.clip_low': 0.2,
    'rl.clip_high': 0.2,
    'optim.warmup_ratio': 0.03,
    'lora.rank': 32,
    'model.dtype': 'bfloat16',
    'model.remat': 'full',
    'rl.aggregate': 'constant',
    'log.trackers': ['wandb'],
  },
  'verl': {
    'algorithm': 'ppo',
    'rollout.prompts': 1024,
    'optim.lr': 1e-6,
    'critic.lr': 1e-5,
    'train.epochs': 15.0,
    'rollout.group_size': 5,
    'rl.kl_in': 'loss',
    'rl.kl_estimator': 'k3',
    'rl.aggregate': 'constant',
    'rl.minibatches': 4,
  },
  'tunix': {'train.steps': 3738, 'optim.lr': 3e-6, 'optim.schedule': 'cosine', 'rl.kl_coef': 0.08, 'lora.rank': 64},
  'maxtext': {'algorithm': 'gspo', 'rl.clip_high': 0.2, 'model.param_dtype': 'bfloat16', 'optim.clip_norm': 0.1},
}
UNMAPPED = {
  'trl': {'per_device_train_batch_size', 'use_vllm', 'use_peft', 'output_dir'},
  'verl': {'data.train_files', 'algorithm.use_kl_in_reward'},
  'tunix': {'rollout_engine', 'rl_training_config.num_train_epochs'},
  'maxtext': {'remat_policy', 'use_pathways', 'ici_fsdp_parallelism', 'num_epoch'},
}


def value(config, field):
  for part in field.split('.'):
    config = config[part]
  return config


@pytest.fixture(params=FILES)
def converted(request, tmp_path):
  name, text = FILES[request.param]
  (tmp_path / name).write_text(text)
  settings = convert.read(str(tmp_path / name))
  return request.param, tmp_path, settings, *convert.convert(request.param, settings)


def test_each_setting_is_mapped_or_named(converted):
  library, folder, source, config, settings = converted
  assert [s.name for s in settings] == list(source)
  for field, expected in EXPECTED[library].items():
    assert value(config, field) == expected, field
  text = convert.as_yaml(library, 'file', config, settings)
  unmapped = {s.name for s in settings if not s.fields}
  assert UNMAPPED[library] <= unmapped and all(s.reason for s in settings if not s.fields)
  assert all(name in text.split('# Not mapped:')[1] for name in unmapped)
  # The text is a valid config of the same method.
  (folder / 'ours.yaml').write_text(text)
  parsed = config_lib.parse(prepare.as_dict(yaml_config.get_config(folder / 'ours.yaml')))
  assert next(iter(parsed.values())).algorithm == config['algorithm']


@pytest.mark.parametrize('library', convert.LIBRARIES)
def test_tables_map_to_existing_fields(library):
  for fields in convert._TABLES[library].values():
    assert fields.startswith('!') or set(fields.split()) <= field_names.FIELDS.keys(), fields


def test_value_that_its_field_refuses_is_not_mapped():
  _, (setting,) = convert.convert('trl', {'lr_scheduler_type': 'polynomial'})
  assert not setting.fields and 'polynomial' in setting.reason


@pytest.mark.parametrize('value, ours', [(False, 'none'), (True, 'group'), ('batch', 'batch')])
def test_scale_rewards_of_trl_may_be_a_bool(value, ours):
  config, _ = convert.convert('trl', {'scale_rewards': value})
  assert config['rl']['scale_rewards'] == ours


def test_cosine_with_min_lr_of_trl_becomes_end_lr():
  settings = {'lr_scheduler_type': 'cosine_with_min_lr', 'lr_scheduler_kwargs.min_lr_rate': 0.1}
  config, (_, rate) = convert.convert('trl', settings)
  assert config['optim'] == {'schedule': 'cosine'} and 'fraction of the peak' in rate.reason
  config, _ = convert.convert('trl', settings | {'lr_scheduler_kwargs.min_lr': 1e-7})
  assert config['optim'] == {'schedule': 'cosine', 'end_lr': 1e-7}
  config, _ = convert.convert('trl', settings | {'learning_rate': 1e-6, 'warmup_steps': 0.1})
  assert config['optim'] == {'schedule': 'cosine', 'end_lr': pytest.approx(1e-7), 'lr': 1e-6, 'warmup_ratio': 0.1}


def test_python_script_is_refused_with_the_accepted_formats(tmp_path):
  (tmp_path / 'dpo.py').write_text('args = DPOConfig(beta=0.05, loss_type=["sigmoid", "sft"])')
  with pytest.raises(InputError, match=r'dpo\.py: is Python, .* \.yaml file'):
    convert.read(tmp_path / 'dpo.py')


def test_beta_of_dpo_is_a_preference_field():
  config, _ = convert.convert('trl', {'beta': 0.1}, 'dpo')
  assert config['preference'] == {'beta': 0.1} and 'rl' not in config


def test_files_without_settings_are_refused(tmp_path):
  (tmp_path / 'a.sh').write_text('echo hello\n')
  (tmp_path / 'c.yaml').write_bytes('name: café'.encode('latin-1'))
  for name, words in (('a.sh', 'holds no settings'), ('b.yaml', 'no such file'), ('c.yaml', "c.yaml: 'utf-8' codec")):
    with pytest.raises(InputError, match=words):
      convert.read(str(tmp_path / name))


def test_convert_command_writes_a_config_and_lists_unmapped_settings(tmp_path):
  name, text = FILES['tunix']
  (tmp_path / name).write_text(text)
  command = [sys.executable, '-m', 'launch.convert']
  out = tmp_path / 'new' / 'ours.yaml'
  result = subprocess.run(
    [*command, 'tunix', tmp_path / name, f'--out={out}'], cwd=CLONE, text=True, capture_output=True
  )
  assert result.returncode == 0 and 'rollout_engine' in result.stderr.split('not mapped: ')[1], result.stderr
  counted = re.search(r'(\d+) settings: (\d+) mapped, (\d+) not needed here, (\d+) not mapped: ', result.stderr)
  total, *parts = map(int, counted.groups())
  assert total == sum(parts) and parts[2] == len(result.stderr.split('not mapped: ')[1].split(', '))
  assert 'names no method, so this is a config of grpo' in result.stderr
  assert yaml.safe_load(out.read_text())['rollout']['max_new_tokens'] == 768
  result = subprocess.run([*command, 'verl', tmp_path / name], cwd=CLONE, text=True, capture_output=True)
  assert f'looks like settings of tunix: write launch.convert tunix {tmp_path / name}' in result.stderr
  result = subprocess.run([*command, 'axolotl', tmp_path / name], cwd=CLONE, text=True, capture_output=True)
  assert result.returncode == 2 and 'maxtext' in result.stderr


@pytest.mark.parametrize('library', FILES)
@pytest.mark.parametrize('assumed', FILES)
def test_file_of_another_library_is_recognized(library, assumed, tmp_path):
  (tmp_path / FILES[library][0]).write_text(FILES[library][1])
  source = convert.read(str(tmp_path / FILES[library][0]))
  assert convert.looks_like(assumed, source) == ('' if assumed == library else library)


RL = {'per_device_train_batch_size': 4, 'gradient_accumulation_steps': 8, 'num_generations': 8}


@pytest.mark.parametrize(
  'method, given, prompts, lacks',
  [
    ('grpo', RL | {'num_processes': 4}, 16, ''),
    ('rloo', RL | {'num_processes': 4, 'steps_per_generation': 16}, 32, ''),
    ('grpo', RL, None, 'the file lacks the number of processes'),
    ('grpo', RL | {'num_processes': 1, 'num_generations': 5}, None, 'no whole number'),
    ('ppo', {'per_device_train_batch_size': 4, 'num_processes': 2}, None, 'the file lacks num_generations'),
    ('grpo', {'generation_batch_size': 64, 'num_generations': 8}, 8, ''),
    ('grpo', {'generation_batch_size': 64}, None, 'num_generations; the file lacks num_generations'),
  ],
)
def test_batch_of_trl_rl_becomes_prompts_per_rollout(method, given, prompts, lacks):
  config, settings = convert.convert('trl', given, method)
  (batch,) = (s for s in settings if s.name in ('per_device_train_batch_size', 'generation_batch_size'))
  assert lacks in batch.reason and 'train.batch_size' not in batch.reason
  assert config.get('rollout', {}).get('prompts') == prompts and 'train' not in config
  assert all('rollout.prompts' in s.reason for s in settings if s.name == 'gradient_accumulation_steps')


@pytest.mark.parametrize('library, name', [('verl', 'trainer.default_local_dir'), ('trl', 'workdir')])
def test_run_folder_is_reported_as_the_workdir_flag(library, name):
  config, (folder,) = convert.convert(library, {name: 'checkpoints/mine'})
  assert folder.reason == 'is the flag --workdir of launch.train' and config == {'algorithm': 'grpo'}


def test_a_batch_of_sft_is_ambiguous():
  _, settings = convert.convert('trl', RL, 'sft')
  assert settings[0].reason == 'may stand for train.batch_size, train.micro_batch_size; choose'


UPDATES = {'max_steps': 100, 'warmup_steps': 10, 'save_steps': 7, 'num_iterations': 2}


@pytest.mark.parametrize(
  'library, method, given, steps, warmup',
  [
    ('trl', 'grpo', UPDATES, 50, 5),
    ('trl', 'rloo', UPDATES | {'steps_per_generation': 10, 'gradient_accumulation_steps': 2}, 10, 1),
    ('trl', 'dpo', UPDATES, 100, 10),
    ('trl', 'ppo', {'max_steps': 100, 'warmup_steps': 10, 'save_steps': 7, 'num_ppo_epochs': 2}, 100, 10),
    (
      'tunix',
      'grpo',
      {f'grpo_config.{k}': v for k, v in UPDATES.items()} | {'mini_batch_size': 4, 'batch_size': 8},
      25,
      None,
    ),
  ],
)
def test_steps_that_count_updates_become_rollouts(library, method, given, steps, warmup):
  config, settings = convert.convert(library, given, method)
  assert config['train']['steps'] == steps and config.get('optim', {}).get('warmup_steps') == warmup
  if steps == 100:
    assert config['save'] == {'every': 7}
  else:
    assert 'save' not in config and 'counts updates' in settings[2].reason


def test_steps_of_verl_are_kept_as_rollouts():
  source = {'trainer.total_training_steps': 100, 'actor.ppo_epochs': 2, 'actor.ppo_mini_batch_size': 64}
  config, _ = convert.convert('verl', source | {'data.train_batch_size': 256})
  assert config['train']['steps'] == 100 and config['rl'] == {'epochs': 2, 'minibatches': 4}


def test_cispo_bound_is_converted_to_its_distance_from_1():
  cispo = {'loss_type': 'cispo', 'epsilon': 0.2, 'epsilon_high': 5.0}
  config, settings = convert.convert('trl', cispo)
  assert config['rl'] == {'loss': 'cispo', 'clip_high': 4.0} and 'at least 1' in settings[1].reason


@pytest.mark.parametrize(
  'library, method, given, section, ours',
  [
    (
      'trl',
      'dpo',
      {'loss_type': 'ipo', 'loss_weights': [0.5]},
      'preference',
      {'losses': ['ipo'], 'loss_weights': [0.5]},
    ),
    (
      'trl',
      'dpo',
      {'loss_type': ['sigmoid', 'sft'], 'label_smoothing': 0.1},
      'preference',
      {'losses': ['sigmoid', 'sft'], 'label_smoothing': 0.1},
    ),
    ('trl', 'simpo', {'alpha': 0.2, 'cpo_alpha': 0.0}, 'preference', {'simpo_alpha': 0.2, 'nll_coef': 0.0}),
    ('trl', 'cpo', {'loss_type': 'sigmoid'}, 'preference', None),  # the loss of this name reads a reference
    ('trl', 'sft', {'loss_type': 'dft', 'assistant_only_loss': True}, 'nll', {'kind': 'dft'}),
    ('trl', 'sft', {'dataset_text_field': 'text'}, 'data', None),
    ('trl', 'grpo', {'importance_sampling_level': 'sequence'}, 'rl', {'loss': 'gspo'}),
    ('trl', 'gkd', {'teacher_model_name_or_path': 'a'}, 'distill', {'teachers': ['a']}),
    ('verl', '', {'algorithm.adv_estimator': 'grpo_passk'}, 'rl', {'advantage': 'best_minus_second'}),
    ('verl', '', {'rollout_correction.rollout_is': 'token'}, 'rl', {'importance': ['token_truncated']}),
    (
      'verl',
      '',
      {'use_kl_in_reward': True, 'kl_ctrl.kl_coef': 0.1, 'kl_penalty': 'low_var_kl'},
      'rl',
      {'kl_in': 'reward', 'kl_coef': 0.1},
    ),
  ],
)
def test_setting_is_mapped_by_its_meaning_in_the_method(library, method, given, section, ours):
  config, settings = convert.convert(library, given, method)
  assert config.get(section) == ours
  assert all(s.fields or s.reason for s in settings)
  prepare.resolve_all(config)  # what the method would refuse is left out


def test_method_of_the_command_line_overrides_that_of_the_file():
  config, (setting,) = convert.convert('verl', {'algorithm.adv_estimator': 'rloo'}, 'dapo')
  assert config == {'algorithm': 'dapo'} and not setting.fields and 'dapo' in setting.reason


MICRO = 'actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu'


@pytest.mark.parametrize(
  'given, rows, words',
  [
    ({'trainer.n_gpus_per_node': 8, 'trainer.nnodes': 2}, 512, ''),
    ({'trainer.n_gpus_per_node': 8}, 256, ''),
    ({'trainer.nnodes': 2}, None, 'is of one GPU'),
    ({'trainer.n_gpus_per_node': '$GPUS'}, None, 'is of one GPU'),
    ({'trainer.n_gpus_per_node': 8, 'actor_rollout_ref.actor.use_dynamic_bsz': True}, None, 'use_dynamic_bsz'),
  ],
)
def test_micro_batch_per_gpu_becomes_rows_of_all_gpus(given, rows, words):
  config, settings = convert.convert('verl', {MICRO: 32, 'critic.ppo_micro_batch_size_per_gpu': 4} | given)
  assert config.get('train') == (None if rows is None else {'micro_batch_size': rows})
  assert words in settings[0].reason and 'critic' in settings[1].reason


@pytest.mark.parametrize(
  'library, name, value, trackers',
  [
    ('verl', 'trainer.logger', ['console', 'wandb'], ['wandb']),
    ('verl', 'trainer.logger', 'console', None),
    ('verl', 'trainer.logger', ['console', 'mlflow', 'trackio', 'tensorboard'], ['mlflow', 'trackio']),
    ('trl', 'report_to', ['tensorboard', 'wandb'], ['wandb']),
    ('trl', 'report_to', 'trackio', ['trackio']),
    ('trl', 'report_to', 'none', None),
  ],
)
def test_loggers_become_trackers(library, name, value, trackers):
  config, (setting,) = convert.convert(library, {name: value})
  assert config.get('log') == (None if trackers is None else {'trackers': trackers})
  assert setting.reason == (convert.NOT_NEEDED if trackers is None else '')
  config_lib.parse(config)


def test_unknown_tracker_is_named_in_the_reason():
  _, (setting,) = convert.convert('verl', {'trainer.logger': ['console', 'swanlab']})
  assert 'swanlab' in setting.reason


def test_unmapped_evaluation_and_vllm_settings_name_the_alternative():
  source = {'eval_strategy': 'steps', 'vllm_mode': 'colocate'}
  evaluation, colocated = (s.reason for s in convert.convert('trl', source)[1])
  assert evaluation == 'eval.data names held-out data, and eval.every the steps between evaluations'
  assert colocated == convert.NOT_NEEDED
  assert 'mesh.rollout_devices' in convert.convert('trl', {'vllm_mode': 'server'})[1][0].reason


def test_sizes_and_ratios_are_no_counts_and_rates():
  """The errors of a config suggest a field for each of these names, but their values mean something else."""
  source = {'actor.ppo_mini_batch_size': 256, 'min_lr_ratio': 0.1, 'generation_batch_size': 64, 'fp16': True}
  config, settings = convert.convert('verl', source)
  assert config == {'algorithm': 'grpo'} and all(s.reason for s in settings)


def test_multi_token_prediction_weight_needs_its_switch():
  source = {'model.mtp.enable_train': True, 'model.mtp.mtp_loss_scaling_factor': 0.1, 'model.mtp.detach_encoder': True}
  config, settings = convert.convert('verl', source, 'sft')
  assert config['nll']['mtp_weight'] == 0.1
  assert [s.name for s in settings if 'is not built' in s.reason] == ['model.mtp.detach_encoder']
  switched_off = [source | {f'model.mtp.{name}': False} for name in ('enable', 'enable_train')]
  for case, algorithm in (switched_off[0], 'sft'), (switched_off[1], 'sft'), (source, 'grpo'):
    assert 'nll' not in convert.convert('verl', case, algorithm)[0]


@pytest.mark.parametrize(
  'given, reward, unmapped',
  [
    ({}, 'verl:./r.py:compute_score', ''),
    ({'custom_reward_function.name': 'score'}, 'verl:./r.py:score', ''),
    (
      {'reward_model.overlong_buffer.enable': True, 'reward_model.overlong_buffer.len': 128},
      'verl:./r.py:compute_score,overlong?max=512&buffer=128',
      '',
    ),
    (
      {
        'reward.reward_kwargs.overlong_buffer_cfg.enable': True,
        'reward.reward_kwargs.overlong_buffer_cfg.len': 99,
        'reward.reward_kwargs.overlong_buffer_cfg.penalty_factor': 0.5,
        'reward.reward_kwargs.max_resp_len': 200,
      },
      'verl:./r.py:compute_score,overlong?max=200&buffer=99&factor=0.5',
      'reward.reward_kwargs.max_resp_len',
    ),
    (
      {'reward_model.overlong_buffer.enable': True},  # without its size
      'verl:./r.py:compute_score',
      'reward_model.overlong_buffer.enable',
    ),
    ({'custom_reward_function.path': '$FILE'}, None, 'custom_reward_function.path'),
  ],
)
def test_reward_function_and_penalty_of_verl_become_one_reward(given, reward, unmapped):
  source = {
    'algorithm.adv_estimator': 'grpo',
    'custom_reward_function.path': './r.py',
    'data.max_response_length': 512,
    **given,
  }
  config, settings = convert.convert('verl', source)
  assert config.get('reward') == reward
  assert ' '.join(s.name for s in settings if not s.fields) == unmapped
  assert 'reward' not in convert.convert('verl', source, 'sft')[0]


def test_settings_of_critic_and_evaluation_do_not_set_policy_fields():
  source = {
    'algorithm.adv_estimator': 'gae',
    'actor_rollout_ref.rollout.n': 8,
    'actor_rollout_ref.rollout.val_kwargs.n': 2,
    'actor_rollout_ref.rollout.val_kwargs.top_p': 0.7,
    'actor_rollout_ref.actor.optim.lr_warmup_steps_ratio': 0.1,
    'critic.optim.lr_warmup_steps_ratio': 0.05,
    'critic.optim.lr': 1e-5,
    'critic.ppo_epochs': 3,
    'critic.ppo_mini_batch_size': 4,
    'data.train_batch_size': 16,
    'reward_model.max_length': 99,
    'actor_rollout_ref.actor.clip_ratio_high': 0.28,
    'actor_rollout_ref.actor.clip_ratio': 0.2,
  }
  config, settings = convert.convert('verl', source)
  assert config['rollout']['group_size'] == 8 and config['eval']['samples'] == 2
  assert config['optim'] == {'warmup_ratio': 0.1} and config['critic'] == {'lr': 1e-5}
  assert config['rl'] == {'clip_low': 0.2, 'clip_high': 0.28} and 'row_length' not in config.get('train', {})
  reasons = {s.name: s.reason for s in settings if not s.fields}
  assert reasons['critic.ppo_epochs'] == 'is of the critic, for which nothing here has this name'
  assert 'the evaluation' in reasons['actor_rollout_ref.rollout.val_kwargs.top_p']


@pytest.mark.parametrize(
  'method, field', [('dpo', 'preference.beta'), ('simpo', 'preference.beta'), ('gkd', 'distill.beta')]
)
def test_beta_is_mapped_to_the_section_of_the_method(method, field):
  _, (setting,) = convert.convert('trl', {'beta': 0.3}, method)
  assert setting.fields == (field,)


def test_unmapped_settings_of_verl_grpo_example_have_specific_reasons():
  """These settings of verl's GRPO example on one node have no field of the same name here."""
  source = {
    'algorithm.adv_estimator': 'grpo',
    'data.filter_overlong_prompts': True,
    'actor_rollout_ref.model.use_remove_padding': True,
    'actor_rollout_ref.actor.fsdp_config.param_offload': False,
    'actor_rollout_ref.ref.fsdp_config.param_offload': True,
    'actor_rollout_ref.actor.fsdp_config.optimizer_offload': False,
    'actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu': 40,
    'actor_rollout_ref.rollout.name': 'vllm',
    'actor_rollout_ref.rollout.gpu_memory_utilization': 0.6,
    'trainer.n_gpus_per_node': 8,
    'trainer.nnodes': 1,
  }
  _, settings = convert.convert('verl', source)
  reasons = {s.name.rpartition('.')[2]: s.reason for s in settings if not s.fields}
  assert not [name for name, reason in reasons.items() if 'nothing here' in reason]
  assert 'rollout.offload' in reasons['param_offload'] and reasons['name'] == 'is not needed here'


SCRIPT = r"""#!/bin/bash
# don't stop here
accelerate launch --num_processes 4 --multi_gpu train.py \
  --lora_target_modules q_proj v_proj \
  --max_steps -1 --min_lr -.5 --bf16 --eos_token '<|im_end|>' \
  --reward_funcs a.b ./c:d 2>&1 | tee log  # it's kept
echo done --num_train_epochs 3; trl sft --seed 7 # the last
echo $HOME
"""


def test_script_options_keep_all_their_values(tmp_path):
  (tmp_path / 'a.sh').write_text(SCRIPT)
  assert convert.read(str(tmp_path / 'a.sh')) == {
    'num_processes': 4,
    'multi_gpu': 'train.py',
    'lora_target_modules': ['q_proj', 'v_proj'],
    'max_steps': -1,
    'min_lr': '-.5',
    'bf16': True,
    'eos_token': '<|im_end|>',
    'reward_funcs': ['a.b', './c:d'],
    'num_train_epochs': 3,
    'seed': 7,
  }


VARIABLES = r"""#!/usr/bin/env bash
set -xeuo pipefail
export OMP_NUM_THREADS=4
lr=3e-6 clip_high=0.28
prompt=$((1024 * 2))
answer=$(( (prompt + 512) * 4 / 2 ))
MODEL=${MODEL:-"Qwen/Qwen3-4B"}
FILE=${FILE:-${HOME}/train.parquet}
DATA=(
    data.max_prompt_length=${prompt}  # of the array
    data.train_files="${FILE}"
)
MORE=(data.max_response_length=$answer algorithm.adv_estimator="grpo")
CUDA_VISIBLE_DEVICES=0 python3 -m verl.trainer.main_ppo "${DATA[@]}" "${MORE[@]}" \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.n=$((answer / unknown)) \
    ++actor_rollout_ref.actor.optim.lr=${lr} \
    +actor_rollout_ref.actor.clip_ratio_high=${clip_high} "$@"
lr=1
"""


def test_script_variables_are_substituted(tmp_path):
  """Variables are no settings themselves. Those without a value in the script stay as they are."""
  (tmp_path / 'a.sh').write_text(VARIABLES)
  source = convert.read(str(tmp_path / 'a.sh'))
  assert source == {
    'data.max_prompt_length': 2048,
    'data.train_files': '${FILE:-${HOME}/train.parquet}',
    'data.max_response_length': 5120,
    'algorithm.adv_estimator': 'grpo',
    'actor_rollout_ref.model.path': 'Qwen/Qwen3-4B',
    'actor_rollout_ref.rollout.n': '$((answer/unknown))',
    'actor_rollout_ref.actor.optim.lr': '3e-6',
    'actor_rollout_ref.actor.clip_ratio_high': 0.28,
  }
  config, settings = convert.convert('verl', source)
  assert config['optim'] == {'lr': 3e-6} and config['rl'] == {'clip_high': 0.28}
  assert [s.name for s in settings if 'does not set' in s.reason] == ['data.train_files', 'actor_rollout_ref.rollout.n']


@pytest.mark.parametrize(
  'script, wanted',
  [
    # A variable that is extended twice, as for two folders, is not substituted without end.
    ('export P=$P:/a\nexport P=$P:/b\nx.py data.path=$P n=1', {'data.path': '$P:/a:/b', 'n': 1}),
    ('A=$B\nB=$A\nx.py a.a=$A b.b=$B', {'a.a': '$B', 'b.b': '$B'}),
    # The bracket of an array before a blank is no value.
    ('ARGS=( --lr 1e-5 --max_steps 10 )\nx.py "${ARGS[@]}"', {'lr': '1e-5', 'max_steps': 10}),
    ("x.py --a '' --b 2", {'a': None, 'b': 2}),
    # Arithmetic ends at its own two closing brackets, not at the first two.
    ('N=4\nx.py --beta $((N*(2+1))) --n $(((N + 2) * (1 + (N - 1)))) --m $((N))', {'beta': 12, 'n': 24, 'm': 4}),
    ('x.py --a $((((1', {'a': '$((((1'}),
    # Unused assignments are reported, except for those that set the environment of a program.
    ('export K=1\nD=0 x.py a=1 \\\n\nseed=3; N=2\necho $N', {'a': 1, '$seed': 3}),
    # In a file of assignments alone, these are the settings.
    ('lr=3e-6 # of Adam\nseed=7\nn=$((seed+1))\nexport HOME=/x\n', {'lr': '3e-6', 'seed': 7, 'n': 8}),
  ],
)
def test_script_assignments_arrays_and_arithmetic_are_read(tmp_path, script, wanted):
  (tmp_path / 'a.sh').write_text(script)
  assert convert.read(str(tmp_path / 'a.sh')) == wanted


def test_a_variable_that_a_script_does_not_use_is_not_mapped():
  config, (setting,) = convert.convert('trl', {'$learning_rate': 1e-6})
  assert config == {'algorithm': 'grpo'} and setting.reason.startswith('is a variable that the script')


def test_exponentially_growing_variable_is_refused(tmp_path):
  (tmp_path / 'a.sh').write_text('A=xx\n' + 'A=$A$A\n' * 99 + 'x.py name=$A')
  with pytest.raises(InputError, match=r'a.sh: the value x+\.\.\. grows to 2,097,152 characters'):
    convert.read(str(tmp_path / 'a.sh'))


NESTED = """
actor_rollout_ref:
  actor:
    policy_loss: {loss_mode: vanilla, clip_cov_ratio: 0.0002, kl_cov_ratio: 0.0002}
    use_kl_loss: SWITCH
    kl_loss_coef: 0.001
  rollout: {'n': 8, response_length: '${oc.select:data.max_response_length,512}', top_k: -1}
  ref: {log_prob_micro_batch_size: '${.other}', other: '${actor_rollout_ref.ref.log_prob_micro_batch_size}'}
data: {max_response_length: 700, prompt_key: prompt}
critic:
  rollout_n: '${actor_rollout_ref.rollout.n}'
  optim: {lr: 1.0e-5}
algorithm: {adv_estimator: grpo, lam: 1.0, kl_penalty: kl, filter_groups: {enable: false, max_num_gen_batches: 4}}
"""


@pytest.mark.parametrize('on', [True, False])
def test_settings_without_effect_are_not_mapped(tmp_path, on):
  """A file with all of verl's defaults has settings of every method and loss.

  If they were mapped, they would take effect.
  """
  (tmp_path / 'a.yaml').write_text(NESTED.replace('SWITCH', str(on)))
  config, settings = convert.convert('verl', source := convert.read(str(tmp_path / 'a.yaml')))
  assert source['critic.rollout_n'] == 8 and '$' in source['actor_rollout_ref.ref.other']
  assert config == {
    'algorithm': 'grpo',
    'rollout': {'group_size': 8, 'max_new_tokens': 700},
    **({'rl': {'kl_coef': 0.001, 'kl_in': 'loss'}} if on else {}),
  }
  reasons = {s.name.rpartition('.')[2]: s.reason for s in settings if not s.fields}
  assert reasons['clip_cov_ratio'] == 'has no effect without loss_mode=clip_cov'
  assert reasons['kl_penalty'] == 'has no effect without use_kl_in_reward=true'
  assert reasons['max_num_gen_batches'] == 'has no effect without filter_groups.enable=true'
  assert 'grpo would ignore it' in reasons['lr'] and 'would ignore it' in reasons['lam']
  assert reasons['top_k'] == reasons['prompt_key'] == convert.NOT_NEEDED
  prepare.resolve_all(config)


def test_negative_max_steps_leaves_the_epochs():
  config, (steps, _) = convert.convert('trl', {'max_steps': -1, 'num_train_epochs': 2})
  assert steps.reason == convert.NOT_NEEDED and config['train'] == {'epochs': 2.0}


@pytest.mark.parametrize('method', ['grpo', 'ppo', 'sft', 'kto', 'gkd'])
def test_names_of_jaxpost_fields_are_mapped_where_unambiguous(method):
  """Fields of no section are mapped. Of fields in several sections, methods with rewards take that of the sampler."""
  source = {'seed': 7, 'init_from': 'runs/a', 'temperature': 0.9, 'timeout_s': 3, 'epochs': 2, 'warmup_steps': 5}
  config, settings = convert.convert('trl', source, method)
  assert config['seed'] == 7 and config['init_from'] == 'runs/a' and config['optim'] == {'warmup_steps': 5}
  reasons = {s.name: s.reason for s in settings if not s.fields}
  if method in ('grpo', 'ppo'):
    assert config['rollout'] == {'temperature': 0.9} and 'temperature' not in reasons
  else:
    fields = 'rollout.temperature, distill.temperature, eval.temperature'
    assert reasons['temperature'] == f'may stand for {fields}; choose' and 'rollout' not in config
  assert reasons['timeout_s'] == 'may stand for rewards.timeout_s, tools.timeout_s; choose'
  assert 'train.epochs' in reasons['epochs'] and 'rl.epochs' in reasons['epochs']


def test_name_of_a_section_is_not_mapped_to_a_field():
  _, settings = convert.convert('trl', {'model': 'a/b', 'x.seed': 3})
  assert [s.reason for s in settings] == ['nothing here has this name'] * 2


# ------------------------------- defaults of the other library, which its files leave out

TUNIX_ROLLOUTS = {'rollout.max_prompt_length': 64, 'rollout.temperature': 0.9, 'rollout.max_new_tokens': 64}


@pytest.mark.parametrize(
  'library, given, wanted',
  [
    ('verl', {'actor.use_kl_loss': True}, {'rl.kl_in': 'loss', 'rl.kl_coef': 0.001, 'rl.kl_estimator': 'k3'}),
    ('verl', {'actor.use_kl_loss': True, 'actor.kl_loss_coef': 0.01}, {'rl.kl_in': 'loss', 'rl.kl_coef': 0.01}),
    (
      'verl',
      {'algorithm.use_kl_in_reward': True},
      {'rl.kl_in': 'reward', 'rl.kl_coef': 0.001, 'rl.kl_estimator': 'k1', 'rl.kl_target': 0.0},
    ),
    (
      'verl',
      {'algorithm.use_kl_in_reward': True, 'algorithm.kl_ctrl.type': 'adaptive', 'algorithm.kl_ctrl.kl_coef': 0.01},
      {'rl.kl_coef': 0.01, 'rl.kl_estimator': 'k1', 'rl.kl_target': 0.1},
    ),
    ('verl', {'actor.use_kl_loss': False}, {'rl.kl_coef': 0.0}),
    (
      'verl',
      {'data.val_files': 'a.parquet', 'trainer.test_freq': 5},
      {'eval.samples': 1, 'eval.temperature': 0.0, 'eval.size': 8192, 'eval.every': 5},
    ),
    (
      'verl',
      {'data.val_files': 'a.parquet', 'val_kwargs.n': 4, 'val_kwargs.temperature': 0.6, 'data.val_max_samples': 64},
      {'eval.samples': 4, 'eval.temperature': 0.6, 'eval.size': 64},
    ),
    ('verl', {'actor.optim.lr': 1e-6}, {'eval.samples': 0, 'eval.size': 256}),
    (
      'verl',
      {'actor.policy_loss.loss_mode': 'kl_cov'},
      {'rl.kl_cov': 0.0002, 'rl.kl_cov_coef': 0.1, 'rl.kl_coef': 0.0},
    ),
    ('verl', {'actor.policy_loss.loss_mode': 'clip_cov'}, {'rl.clip_cov': 0.0002, 'rl.kl_cov': 0.0}),
    ('trl', {'use_peft': True}, {'lora.rank': 16, 'lora.alpha': 32, 'lora.dropout': 0.0}),
    ('trl', {'use_peft': True, 'lora_r': 8, 'lora_alpha': 8}, {'lora.rank': 8, 'lora.alpha': 8, 'lora.dropout': 0.0}),
    ('trl', {'learning_rate': 1e-5}, {'lora.rank': 0, 'reference.every': 0}),
    ('trl', {'beta': 0.04}, {'rl.kl_coef': 0.04, 'rl.kl_weighted': True}),
    ('trl', {'beta': 0.04, 'use_bias_correction_kl': False}, {'rl.kl_coef': 0.04, 'rl.kl_weighted': False}),
    ('trl', {'beta': 0.0}, {'rl.kl_weighted': False}),
    (
      'trl',
      {'use_adaptive_entropy': True, 'entropy_target': 0.3, 'entropy_coef_delta': 0.01},
      {'rl.entropy_target': 0.3, 'rl.entropy_step': 0.01},
    ),
    ('trl', {'use_adaptive_entropy': True}, {'rl.entropy_target': 0.2, 'rl.entropy_step': 0.005}),
    ('trl', {'entropy_target': 0.3}, {'rl.entropy_target': 0.0}),
    ('verl', {'actor.policy_loss.loss_mode': 'dro', 'actor.policy_loss.dro_beta': 0.2}, {'rl.dro_beta': 0.2}),
    ('verl', {'filter_groups.enable': True, 'filter_groups.metric': 'acc'}, {'rl.correct_by': ''}),
  ],
)
def test_enabled_feature_gets_the_defaults_of_the_library(library, given, wanted):
  config = converted_defaults.convert_with_defaults(library, given, 'grpo')[0]
  ((_, stage),) = prepare.resolve_all(config).values()
  assert {field: operator.attrgetter(field)(stage) for field in wanted} == wanted


def test_dropout_of_adapters_is_left_out_where_a_run_would_refuse_it():
  """TRL's default is 0.05 in all methods, and here a method that samples takes none."""
  for given in ({}, {'lora_dropout': 0.1}):
    config, settings, _ = converted_defaults.convert_with_defaults('trl', {'use_peft': True, **given}, 'grpo')
    assert 'dropout' not in config['lora']
    assert all('without dropout' in s.reason for s in settings if s.name == 'lora_dropout')
    config, _, _ = converted_defaults.convert_with_defaults('trl', {'use_peft': True, **given}, 'sft')
    assert config['lora']['dropout'] == given.get('lora_dropout', 0.05)


# Switch -> settings without which jaxpost refuses it.
NEEDED = {
  'kl_ctrl.type': {'use_kl_in_reward': True, 'kl_ctrl.kl_coef': 0.001},
  'loss_mode': {'data.train_batch_size': 1024, 'actor.ppo_mini_batch_size': 256},
}


@pytest.mark.parametrize('library', converted_defaults.DEFAULTS)
def test_every_library_default_is_mapped_to_a_field(library):
  for kind, table in converted_defaults.DEFAULTS[library].items():
    switch, _, enabled = kind.rpartition('=')
    method = 'grpo' if switch or kind in ('every', 'RL') else kind
    method = 'sft' if switch == 'use_peft' else method  # which takes dropout
    switches = {switch: enabled, **NEEDED.get(switch, {})} if switch else {}
    _, settings = convert.convert(library, table | switches, method)
    settings = [s for s in settings if s.name not in switches]
    unmapped = {s.name for s in settings if not s.fields and 'gives way' not in s.reason}
    # verl's PPO has rollout.n=1, and TRL's weight of the KL term is off.
    assert unmapped <= {'actor_rollout_ref.rollout.n', 'use_bias_correction_kl'}


@pytest.mark.parametrize(
  'library, given, method, added',
  [
    (
      'trl',
      {'learning_rate': 1e-5},
      'grpo',
      {'optim.schedule': 'linear', 'train.epochs': 3, 'rollout.max_new_tokens': 512, 'rollout.group_size': 8},
    ),
    (
      'trl',
      {'max_steps': 9, 'lr_scheduler_type': 'cosine', 'max_completion_length': 9},
      'rloo',
      {'rl.kl_coef': 0.05, 'rollout.group_size': 2},
    ),
    (
      'trl',
      {'num_train_epochs': 1, 'lr_scheduler_type': 'constant'},
      'reward_model',
      {'optim.lr': 1e-4, 'train.row_length': 2048},
    ),
    (
      'verl',
      {
        'trainer.total_epochs': 2,
        'data.train_batch_size': 512,
        'data.max_response_length': 99,
        'data.max_prompt_length': 99,
      },
      '',  # verl's own default is PPO
      {
        'rl.dual_clip': 3.0,
        'rl.lam': 1.0,
        'rl.minibatches': 2,
        'rollout.group_size': 1,
        'critic.value_clip': 0.5,
        'optim.weight_decay': 0.01,
        'optim.lr': 1e-6,
        'critic.lr': 1e-5,
      },
    ),
    ('maxtext', {'learning_rate': 1e-5}, 'sft', {}),
    ('tunix', {'ppo_config.gamma': 1.0}, '', {'rl.kl_coef': 0.04, **TUNIX_ROLLOUTS}),
    (
      'tunix',
      {'grpo_config.num_generations': 4},
      '',
      {'rl.kl_coef': 0.04, 'rl.aggregate': 'sequence', **TUNIX_ROLLOUTS},
    ),
    (
      'trl',
      {'num_train_epochs': 1, 'lr_scheduler_type': 'constant'},
      'simpo',
      {'preference.beta': 0.1, 'preference.gamma': 0.5, 'preference.nll_coef': 1.0, 'train.row_length': 2048},
    ),
    (
      'trl',
      {'num_train_epochs': 1, 'lr_scheduler_type': 'constant', 'max_length': 99},
      'gkd',
      {'optim.lr': 2e-5, 'distill.on_policy': 0.5},
    ),
  ],
)
def test_library_defaults_that_differ_are_written_to_the_config(library, given, method, added):
  config, settings, defaults = converted_defaults.convert_with_defaults(library, given, method)
  assert [s.name for s in settings] == list(given)
  written = {field: convert.ours(s.name, field, s.value) for s in defaults for field in s.fields}
  plain = convert.plain(config['algorithm'])
  for field, value in added.items():
    is_same = operator.attrgetter(field)(plain) == value
    assert written.pop(field, None) == (None if is_same else value), field
  assert not written
  text = convert.as_yaml(library, 'a.yaml', config, settings, defaults)
  assert text.count('# Not in the file') == bool(defaults)
  assert yaml.safe_load(text) == json.loads(json.dumps(config))
