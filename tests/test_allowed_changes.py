"""Fields that a resumed run may change (`save.allow_changes`): what was trained stays, and the next step uses them."""

import re
import shutil

import pytest
import tiny

from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.monitor import metrics
from jaxpost.stage import config as config_lib
from jaxpost.stage import field_names
from jaxpost.stage.schema import CHANGEABLE
from jaxpost.tools import reproduce


def few_low(completion_ids, **columns):
  return [-share for share in tiny.low_share(completion_ids)]


def other(completion_ids, **columns):
  return [float(sum(ids) % 3) for ids in completion_ids]


METHODS = {
  'sft': {},
  # With two updates of a rollout, the second one clips ratios.
  'grpo': {
    'algorithm': 'grpo',
    'reward': (tiny.low_share, other),
    'train.row_length': 0,
    'rollout.prompts': 4,
    'rollout.group_size': 4,
    'rl.minibatches': 2,
    'rl.clip_low': 0.01,
    'rl.clip_high': 0.01,
  },
  'ppo': {
    'algorithm': 'ppo',
    'reward': tiny.low_share,
    'train.row_length': 0,
    'rollout.prompts': 4,
    'rollout.group_size': 4,
    'rl.kl_coef': 0.05,
  },
  'dpo': {'algorithm': 'dpo', 'data.path': 'generated:arithmetic_pairs:max=9,size=64'},
}


def nested(fields):
  """{'a.b': value} -> {'a': {'b': value}}."""
  out = {}
  for name, value in fields.items():
    section, _, field = name.rpartition('.')
    out = tiny.merged(out, {section: {field: value}} if section else {field: value})
  return out


@pytest.fixture(scope='module')
def begun(nano, tmp_path_factory):
  """begun(method) -> (its config, folder of its first 4 steps, rows of a run that is resumed without a change)."""
  runs = {}

  def make(method):
    if method not in runs:
      folder = tmp_path_factory.mktemp(method)
      config = tiny.run_config(nano, **nested(METHODS[method]))
      stages.run(tiny.merged(config, nested({'train.steps': 4})), folder / 'old')
      runs[method] = config, folder / 'old', resume(config, folder / 'old', folder / 'same', {})
    return runs[method]

  return make


def resume(config, begun, workdir, changes):
  """Returns the rows of a copy of a run that is resumed for 3 steps with `changes`."""
  shutil.copytree(begun, workdir)
  fields = {'train.steps': 7, 'save.allow_changes': tuple(changes)} | changes
  stages.run(tiny.merged(config, nested(fields)), workdir)
  rows = metrics.comparable_rows(workdir / 'metrics.jsonl')
  return [row for row in rows if row['split'] == 'train']


# Changes, and what the metrics of the first step with the new value are.
CHANGES = {
  'sft-lr': ('sft', {'optim.lr': 1e-3}, {'lr': 1e-3}),
  'sft-schedule': ('sft', {'optim.schedule': 'cosine', 'optim.end_lr': 1e-4}, {}),
  'sft-warmup_steps': ('sft', {'optim.warmup_steps': 10}, {'lr': 1.38e-3}),
  'sft-weight_decay': ('sft', {'optim.weight_decay': 10.0}, {}),
  'sft-clip_norm': ('sft', {'optim.clip_norm': 1e-8}, {}),
  'grpo-reward': ('grpo', {'reward': (few_low, other)}, {}),
  'grpo-reward_weights': ('grpo', {'reward_weights': (-1.0, 1.0)}, {}),
  'grpo-kl_coef': ('grpo', {'rl.kl_coef': 1.0}, {}),
  'grpo-clip_low': ('grpo', {'rl.clip_low': 0.5}, {}),
  'grpo-clip_high': ('grpo', {'rl.clip_high': 0.5}, {}),
  'grpo-entropy_coef': ('grpo', {'rl.entropy_coef': 0.5}, {}),
  'grpo-temperature': ('grpo', {'rollout.temperature': 0.3}, {}),
  'grpo-max_new_tokens': ('grpo', {'rollout.max_new_tokens': 9}, {}),
  'ppo-kl_coef': ('ppo', {'rl.kl_coef': 0.7}, {'kl_coef': 0.7}),
  'ppo-critic_lr': ('ppo', {'critic.lr': 1e-4}, {'critic/lr': 1e-4}),
  'dpo-beta': ('dpo', {'preference.beta': 0.9}, {}),
}


IN_CI = ('sft-lr', 'grpo-reward')


@pytest.mark.parametrize('case', [c if c in IN_CI else pytest.param(c, marks=pytest.mark.nightly) for c in CHANGES])
def test_a_changed_field_takes_effect_at_the_next_step_and_keeps_what_was_trained(case, begun, tmp_path):
  method, changes, expected = CHANGES[case]
  config, folder, same = begun(method)
  changed = resume(config, folder, tmp_path / 'run', changes)
  assert [row['step'] for row in changed] == list(range(1, 8))
  assert changed[:4] == same[:4]
  assert {name: changed[4][name] for name in expected} == pytest.approx(expected)
  # The weights and the data of the first step are the old ones, and its update is another.
  if any(name.startswith('rollout.') for name in changes):  # other completions
    longest = changes.get('rollout.max_new_tokens', config['rollout']['max_new_tokens'])
    assert longest / 2 < changed[4]['completions/mean_length'] <= longest
  else:
    lengths = 'completions/mean_length' if method in ('grpo', 'ppo') else 'tokens'
    assert changed[4][lengths] == same[4][lengths]
  assert changed[6]['loss'] != same[6]['loss']


def test_changes_are_by_name_and_the_error_says_how(nano, tmp_path):
  config = tiny.run_config(nano, train=dict(steps=1))
  stages.run(config, tmp_path)
  slower = tiny.merged(config, dict(train=dict(steps=2), optim=dict(lr=1e-3)))
  with pytest.raises(
    InputError, match='config.optim.lr of sft differs .*, or allow it by --config.save.allow_changes='
  ):
    stages.run(slower, tmp_path)
  allowed = tiny.merged(slower, dict(save=dict(allow_changes=('optim.lr',))))
  with pytest.raises(InputError, match='config.seed of sft differs.*its weights$'):
    stages.run(allowed | {'seed': 5}, tmp_path)
  with pytest.raises(InputError, match='no step of the stage is left: .* raise its train.steps'):
    stages.run(tiny.merged(allowed, dict(train=dict(steps=1))), tmp_path)
  with pytest.raises(InputError, match=re.escape("config.save.allow_changes[0]: 'seed' is not one of optim.lr, ")):
    config_lib.parse(tiny.merged(slower, dict(save=dict(allow_changes=('seed',)))))


def test_a_finished_stage_takes_no_change_and_the_error_names_the_one_that_trains(nano, tmp_path):
  both = tiny.run_config(nano, stages=('one', 'two'), one={}, two={}, train=dict(steps=1))
  stages.run(both, tmp_path)
  over = dict(optim=dict(lr=1e-3), save=dict(allow_changes=('optim.lr',)), two=dict(train=dict(steps=2)))
  with pytest.raises(InputError, match='config.optim.lr of one differs.* set config.two.optim.lr for two alone'):
    stages.run(tiny.merged(both, over), tmp_path)


@pytest.mark.parametrize(
  'key, state',
  [
    ('reward', {'rl.curriculum': 'retire'}),
    ('rl.kl_coef', {'rl.kl_target': 6.0, 'rl.kl_in': 'reward'}),
    ('rl.entropy_coef', {'rl.entropy_target': 1.0}),
    ('rollout.temperature', {'rollout.staleness': 1}),
  ],
)
def test_a_field_whose_state_the_checkpoint_keeps_cannot_change(key, state, nano, tmp_path):
  config = tiny.grpo_config(nano, **nested({'train.steps': 1, 'rl.kl_coef': 0.1, 'rl.entropy_coef': 0.1} | state))
  stages.run(config, tmp_path)
  change = {key: few_low if key == 'reward' else 0.7, 'train.steps': 2, 'save.allow_changes': (key,)}
  with pytest.raises(InputError, match=f'config.{key} of grpo differs.*keeps what config.{next(iter(state))} has'):
    stages.run(tiny.merged(config, nested(change)), tmp_path)


def test_reproduce_names_the_fields_that_changed():
  starts = [{'changes': {'grpo': {'optim.lr': 1e-3, 'seed': 1}}}, {'changes': {'grpo': {'optim.lr': 1e-4, 'seed': 2}}}]
  assert reproduce.changed_fields(starts) == ['optim.lr']
  assert reproduce.changed_fields(starts[:1] * 2) == reproduce.changed_fields([]) == []


def test_all_names_are_fields():
  assert all(field_names.field_type(name) for name in CHANGEABLE)
