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

PAIRS = 'generated:arithmetic_pairs:max=9,size=64'


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


def few_high(completion_ids, **columns):
  return [-tiny.low_share([ids])[0] for ids in completion_ids]


def nested(fields):
  """{'a.b': value} -> {'a': {'b': value}}."""
  out = {}
  for name, value in fields.items():
    section, _, field = name.rpartition('.')
    out = tiny.merged(out, {section: {field: value}} if section else {field: value})
  return out


def rows_of(workdir):
  return [row for row in metrics.comparable_rows(workdir / 'metrics.jsonl') if row['split'] == 'train']


def resumed(config, changes, folder):
  """Returns the rows of a run of 4 steps that is resumed for 3 more, and of one that is resumed with `changes`."""
  runs = []
  stages.run(tiny.merged(config, nested({'train.steps': 4})), folder / 'old')
  for name, changed in (('same', {}), ('changed', changes)):
    shutil.copytree(folder / 'old', folder / name)
    allowed = {'train.steps': 7, 'save.allow_changes': tuple(changed)}
    stages.run(tiny.merged(config, nested(allowed | changed)), folder / name)
    runs.append(rows_of(folder / name))
  return runs


def check(same, changed):
  """Steps of before the change are kept; the first after it has the same samples, and the later ones do not."""
  assert [row['step'] for row in changed] == list(range(1, 8))
  assert changed[:4] == same[:4]
  assert changed[4] != same[4] and changed[4].get('completion_length') == same[4].get('completion_length')
  assert changed[5]['loss'] != same[5]['loss'] and changed[6]['loss'] != same[6]['loss']


def test_a_resumed_run_takes_another_learning_rate_schedule_decay_and_clip(model, tmp_path):
  changes = {
    'optim.lr': 1e-3,
    'optim.schedule': 'cosine',
    'optim.end_lr': 1e-4,
    'optim.warmup_ratio': 0.1,
    'optim.weight_decay': 0.1,
    'optim.clip_norm': 0.5,
  }
  same, changed = resumed(tiny.run_config(model), changes, tmp_path)
  check(same, changed)
  assert changed[4]['loss'] == same[4]['loss']
  assert same[4]['lr'] == pytest.approx(3e-3) and 1e-4 < changed[4]['lr'] < 1e-3


def test_a_resumed_run_takes_another_reward_and_terms_of_its_loss(model, tmp_path):
  changes = {'reward': few_high, 'rl.kl_coef': 0.1, 'rl.clip_low': 0.1, 'rl.clip_high': 0.3, 'rl.entropy_coef': 0.01}
  same, changed = resumed(tiny.grpo_config(model), changes, tmp_path)
  check(same, changed)
  assert changed[4]['reward'] == pytest.approx(-same[4]['reward'])
  assert 'kl' in changed[4] and 'kl' not in same[4]


@pytest.mark.long
@pytest.mark.parametrize(
  'method, changes',
  [
    (dict(algorithm='ppo', reward=tiny.low_share, train=dict(row_length=0)), {'critic.lr': 1e-4, 'optim.lr': 1e-4}),
    (dict(algorithm='dpo', data=dict(path=PAIRS)), {'preference.beta': 0.5, 'optim.warmup_steps': 6}),
  ],
)
def test_a_resumed_run_of_other_methods_takes_their_fields(method, changes, model, tmp_path):
  config = tiny.run_config(model, rollout=dict(prompts=4, group_size=4), **method)
  check(*resumed(config, changes, tmp_path))


def test_a_change_is_allowed_by_name_only_and_the_error_says_how(model, tmp_path):
  config = tiny.run_config(model, train=dict(steps=1))
  stages.run(config, tmp_path)
  slower = tiny.merged(config, dict(train=dict(steps=2), optim=dict(lr=1e-3)))
  with pytest.raises(
    InputError, match='config.optim.lr of sft differs .*, or allow it by --config.save.allow_changes=optim.lr'
  ):
    stages.run(slower, tmp_path)
  with pytest.raises(InputError, match='config.seed of sft differs.*its weights$'):
    stages.run(slower | {'seed': 5, 'save': {'allow_changes': ('optim.lr',), 'export': False}}, tmp_path)
  with pytest.raises(InputError, match=re.escape("config.save.allow_changes[0]: 'seed' is not one of optim.lr, ")):
    config_lib.parse(tiny.merged(slower, dict(save=dict(allow_changes=('seed',)))))


def test_all_names_are_fields():
  assert all(field_names.field_type(name) for name in CHANGEABLE)
