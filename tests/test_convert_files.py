"""`launch.convert` turns whole files of TRL, verl, Tunix and MaxText into configs, and accounts for each setting."""

import pathlib

import pytest
import yaml

from jaxpost.stage import optim, prepare
from jaxpost.tools import convert

FOLDER = pathlib.Path(__file__).with_name('settings_of_others')
EXPECTED = yaml.safe_load((FOLDER / 'ours.yaml').read_text())
# Settings without a counterpart in jaxpost, by the last part of their names. All other settings are mapped, or have a
# reason that names what jaxpost has instead.
NO_COUNTERPART = {
  'maxtext_dpo.yml': 'enable_goodput_recording monitor_goodput',
  'maxtext_rl.yml': 'max_num_batched_tokens async_scheduling enable_dp_attention async_checkpointing debug',
  'trl_dpo.yaml': 'preprocessing_num_workers log_level',
  'trl_grpo.yaml': 'log_level logging_first_step',
  'tunix_ppo.yaml': 'rank alpha module_path mesh',  # of the critic
  'verl_dapo.sh': 'no-wait working-dir attention_dropout embd_pdrop enable_chunked_prefill max_num_batched_tokens '
  'top_p',
  'verl_ppo.sh': 'enable_gradient_checkpointing ppo_micro_batch_size_per_gpu',  # of the critic
}
ALGORITHMS = {'trl_dpo.yaml': 'dpo'}  # the only file that does not name its method


@pytest.mark.parametrize('file', EXPECTED)
def test_published_file_becomes_the_expected_config(file):
  library = file.partition('_')[0]
  file_settings = convert.read(str(FOLDER / file))
  config, settings = convert.convert(library, file_settings, ALGORITHMS.get(file, ''))
  assert config == EXPECTED[file]
  assert [s.name for s in settings] == list(file_settings) and all(bool(s.fields) != bool(s.reason) for s in settings)
  unknown = [s.name.rpartition('.')[2] for s in settings if 'nothing here' in s.reason]
  assert unknown == NO_COUNTERPART.get(file, '').split()
  assert not convert.looks_like(library, file_settings)
  for _, stage in prepare.resolve_all(config).values():
    optim.check(stage.optim)


def converted(library, given, algorithm=''):
  """Returns (config, {setting: reason why it is not mapped})."""
  config, settings = convert.convert(library, given, algorithm)
  return config, {s.name: s.reason for s in settings}


@pytest.mark.parametrize('library, ratio', [('trl', 0.1), ('tunix', 0.1), ('verl', None)])
def test_a_number_of_warmup_steps_decides_over_a_fraction(library, ratio):
  names = ('lr_warmup_steps_ratio', 'lr_warmup_steps') if library == 'verl' else ('warmup_ratio', 'warmup_steps')
  config, reasons = converted(library, dict(zip(names, (0.1, 5))))
  assert config['optim'] == {'warmup_steps': 5} and reasons[names[0]] == f'gives way to {names[1]} in {library}'
  config, _ = converted(library, dict(zip(names, (0.1, 0))))  # only verl takes 0 steps for a setting
  assert config['optim'].get('warmup_ratio') == ratio


@pytest.mark.parametrize('schedule, rate', [('warmup_cosine_decay_schedule', 2e-5), (None, 1e-5)])
def test_the_rate_of_tunix_depends_on_a_schedule(schedule, rate):
  rates = {'optimizer_config.learning_rate': 1e-5, 'optimizer_config.peak_value': 2e-5}
  config, reasons = converted('tunix', rates | {'optimizer_config.schedule_type': schedule}, 'sft')
  assert config['optim']['lr'] == rate and sum('gives way' in reason for reason in reasons.values()) == 1


def test_other_models_of_tunix_are_not_the_policy():
  tunix_settings = {
    'actor_model_config.lora_config.rank': 64,
    'critic_model_config.lora_config.rank': 32,
    'reference_model_config.lora_config.rank': 8,
    'rollout_model_config.mesh.shape': '(8,)',
    'rl_training_config.actor_optimizer_config.max_grad_norm': 0.1,
    'rl_training_config.critic_optimizer_config.max_grad_norm': 0.3,
    'ppo_config.gae_lambda': 0.9,
  }
  config, reasons = converted('tunix', tunix_settings)
  assert config == {'algorithm': 'ppo', 'lora': {'rank': 64}, 'optim': {'clip_norm': 0.1}, 'rl': {'lam': 0.9}}
  assert 'mesh.rollout' in reasons['rollout_model_config.mesh.shape']
  assert 'mesh.score' in reasons['reference_model_config.lora_config.rank']


@pytest.mark.parametrize(
  'library, given, section, ours',
  [
    ('tunix', {'model_id': 'gemma2_2b_it', 'model_name': 'gemma2-2b-it'}, 'model', None),
    ('tunix', {'data_source': 'huggingface', 'dataset_name': 'a/b'}, 'data', {'path': 'a/b'}),
    ('tunix', {'data_source': 'tfds', 'dataset_name': 'mtnt/en-fr'}, 'data', None),
    ('tunix', {'num_batches': 10}, 'data', None),
    ('tunix', {'num_batches': 10, 'batch_size': 4, 'train_fraction': 0.5}, 'data', {'max_samples': 20}),
    ('maxtext', {'dataset_name': 'huggingface:a/b'}, 'data', {'path': 'a/b'}),
    ('maxtext', {'num_batches': 10, 'num_epoch': 3, 'train_fraction': 0.5}, 'train', {'steps': 15}),
    ('maxtext', {'num_batches': 10, 'rl.num_iterations': 2}, 'train', {'steps': 10}),
    ('maxtext', {'eval_interval': 10, 'rl.num_iterations': 2}, 'eval', {'every': 5}),
    ('maxtext', {'num_test_batches': 10}, 'eval', None),
    ('maxtext', {'max_target_length': 100}, 'rollout', None),
    ('maxtext', {'max_target_length': 64, 'max_prefill_predict_length': 64}, 'rollout', {'max_prompt_length': 64}),
    ('maxtext', {'lora_rank': 8, 'enable_lora': False}, 'lora', None),
    ('maxtext', {'lora_rank': 8, 'enable_lora': True, 'lora_module_path': '.*self_attention.*'}, 'lora', {'rank': 8}),
    ('maxtext', {'use_sft': True, 'sft_train_on_completion_only': False}, 'data', {'train_on': 'all'}),
    ('maxtext', {'remat_policy': 'full'}, 'model', {'remat': 'full'}),
    ('trl', {'load_in_8bit': True, 'load_in_4bit': False, 'lora_r': 8}, 'model', {'quantize': 'int8'}),
  ],
)
def test_settings_that_depend_on_others(library, given, section, ours):
  config, reasons = converted(library, given)
  assert config.get(section) == ours
  assert not any('nothing here' in reason for reason in reasons.values())
