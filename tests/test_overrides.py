"""`launch.config_flag`: each --config override of the command line is applied, reported or refused with a hint."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxpost.errors import InputError
from jaxpost.stage import config as config_lib
from jaxpost.stage import field_names
from jaxpost.stage.schema_rl import RlSection

CLONE = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CLONE))  # a plain `pytest` does not have the clone in its path, which has `launch`

from launch import config_flag  # noqa: E402


def read(name, *words):
  """({stage: Config}, lines that are reported) of a config file with these overrides."""
  raw = importlib.import_module(f'configs.{name}').get_config()
  raw.lock()  # as the flag does
  other_words, overrides = config_flag.split(words)
  assert not other_words
  reported = config_flag.apply(raw, overrides)
  return config_lib.parse(raw.to_dict()), reported


def value(config, path):
  for part in path.split('.'):
    config = config[part] if isinstance(config, dict) else getattr(config, part)
  return config


# ---------------------------------------------------- an override of all stages

# Case -> (words, field, its value in every stage).
REACHES_ALL = {
  'integer': ('--config.lora.rank=8', 'lora.rank', 8),
  'in two words': ('--config.lora.rank 8', 'lora.rank', 8),
  'integer for a float': ('--config.optim.weight_decay=1', 'optim.weight_decay', 1.0),
  'string': ('--config.model.remat=full', 'model.remat', 'full'),
  'empty string': ('--config.eval.data.path=', 'eval.data.path', ''),
  'boolean': ('--config.lora.rslora', 'lora.rslora', True),
  'boolean by value': ('--config.lora.rslora=true', 'lora.rslora', True),
  'no boolean': ('--noconfig.data.shuffle', 'data.shuffle', False),
  'tuple': ("--config.rollout.stop_strings=('a','b')", 'rollout.stop_strings', ('a', 'b')),
  'tuple, by commas': ('--config.save.allow_changes=optim.lr,reward', 'save.allow_changes', ('optim.lr', 'reward')),
  'tuple, of words that begin as numbers': ('--config.log.tags=2024-01,3b,', 'log.tags', ('2024-01', '3b')),
  'tuple of paths': ('--config.distill.teachers=runs/a@3,org/name', 'distill.teachers', ('runs/a@3', 'org/name')),
  'tuple of numbers': ('--config.reward_weights=1.0,2.5', 'reward_weights', (1.0, 2.5)),
  'any, with a comma': ('--config.reward=a,b', 'reward', 'a,b'),
  'one text with a comma': ('--config.rollout.stop_strings=a,b', 'rollout.stop_strings', ('a,b',)),
  'tuple of one': ('--config.rollout.stop_strings=a', 'rollout.stop_strings', ('a',)),
  'tuple, repeated': (
    '--config.rollout.stop_strings=a --config.rollout.stop_strings=b',
    'rollout.stop_strings',
    ('a', 'b'),
  ),
  'the last counts': ('--config.lora.rank=4 --config.lora.rank=8', 'lora.rank', 8),
  'section': ("--config.lora={'rank':8}", 'lora.rank', 8),
  'any': ('--config.reward=./a.py:f', 'reward', './a.py:f'),
  'any, several': ("--config.data.map=('./a.py:f','./b.py:f')", 'data.map', ('./a.py:f', './b.py:f')),
  'any, a list': ("--config.reward=['a','./b.py:f']", 'reward', ('a', './b.py:f')),
  'tuple, cleared': ('--config.log.trackers=', 'log.trackers', ()),
  'tuple of texts, cleared': ('--config.rollout.stop_strings=', 'rollout.stop_strings', ()),
  'of the user': ('--config.user.scale=0.5', 'user.scale', 0.5),
}


@pytest.mark.parametrize('case', REACHES_ALL)
def test_override_reaches_every_stage(case):
  words, path, expected = REACHES_ALL[case]
  stages, reported = read('quickstart', *words.split())
  assert [value(s, path) for s in stages.values()] == [expected] * 2 and reported == []
  assert type(value(stages['sft'], path)) is type(expected)


@pytest.mark.parametrize('case', REACHES_ALL)
def test_override_reaches_stage_whose_block_does_not_name_the_field(case):
  words, path, expected = REACHES_ALL[case]
  stages, reported = read('quickstart', *words.replace('config.', 'config.grpo.').split())
  assert value(stages['grpo'], path) == expected and reported == []
  alone, _ = read('quickstart')
  assert stages['sft'] == alone['sft']


@pytest.mark.parametrize('case', REACHES_ALL)
def test_override_reaches_config_without_stages(case):
  words, path, expected = REACHES_ALL[case]
  (stage,) = read('sft_gsm8k', *words.split())[0].values()
  assert value(stage, path) == expected


# Override -> line that reports the stage that keeps its own value.
HIDDEN = {
  '--config.rollout.group_size=16': (
    'config.rollout.group_size=16: stage grpo keeps its own 8; set --config.grpo.rollout.group_size to change it'
  ),
  "--config.rollout={'group_size':16}": (
    'config.rollout.group_size=16: stage grpo keeps its own 8; set --config.grpo.rollout.group_size to change it'
  ),
}


@pytest.mark.parametrize('word', HIDDEN)
def test_stage_with_own_value_keeps_own_value_and_override_is_reported(word):
  stages, reported = read('quickstart', word)
  assert reported == [HIDDEN[word]]
  assert stages['sft'].rollout.group_size == 16 and stages['grpo'].rollout.group_size == 8


@pytest.mark.parametrize('stage', ['', 'sft.'])
def test_steps_of_command_replace_epochs_of_file(stage):
  raw = {'train': {'epochs': 3.0}} | ({'stages': ('sft',), 'sft': {}} if stage else {})
  reported = config_flag.apply(raw, {f'{stage}train.steps': ['7']})
  assert reported == [f'config.{stage}train.steps=7: replaces config.{stage}train.epochs=3.0']
  (config,) = config_lib.parse(raw).values()
  assert (config.train.steps, config.train.epochs) == (7, 0)
  assert config_flag.apply({'train': {'steps': 3}}, {'train.steps': ['7']}) == []
  with pytest.raises(InputError, match=r'config.train.steps: config.train.epochs=2.0 decides the steps; leave out one'):
    config_flag.apply({}, {'train.steps': ['7'], 'train.epochs': ['2']})


def test_override_of_stage_on_command_line_is_not_reported():
  stages, reported = read('quickstart', '--config.rollout.group_size=16', '--config.grpo.rollout.group_size=4')
  assert reported == []
  assert [s.rollout.group_size for s in stages.values()] == [16, 4]


# Case -> (words, pattern of the error).
REFUSED = {
  'steps': (
    '--config.train.steps=77',
    'config.train.steps=77: would change nothing.*sft: 250, grpo: 120.*'
    'write --config.sft.train.steps=77 --config.grpo.train.steps=77$',
  ),
  'float': ('--config.optim.lr=0.5', 'sft: 0.01.*--config.grpo.optim.lr=0.5$'),
  'string': ('--config.algorithm=gpro', 'config.algorithm=gpro: .*--config.grpo.algorithm=gpro$'),
  'section': ("--config.optim={'lr':0.5}", 'config.optim.lr=0.5: would change nothing'),
  'one of them set': (
    '--config.train.steps=7 --config.sft.train.steps=8',
    r'sft: 8, grpo: 120\); write --config.grpo.train.steps=7$',
  ),
  'all of them set': (
    '--config.lora.rank=7 --config.sft.lora.rank=8 --config.grpo.lora.rank=8',
    'config.lora.rank=7: would change nothing.*leave it out$',
  ),
  'no stage': ('--config.gpro.lora.rank=7', 'no stage gpro; did you mean config.grpo.lora.rank'),
  'undone': ("--config.lora.rank=7 --config.lora={'alpha':1}", 'would undo --config.lora.rank'),
  'no value': ('--config.lora.rank', 'config.lora.rank: needs a value'),
  'no number': ('--config.grpo.lora.rank=many', "config.grpo.lora.rank: want int, got 'many'"),
  'no tuple': ('--config.reward=(a,b)', r'config.reward: \(a,b\) cannot be read; quote each text'),
  'no block': ('--config.lora=8', 'config.lora: want a block of fields'),
  'negated value': ('--noconfig.data.shuffle=1', 'noconfig.data.shuffle=1: write'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_override_is_refused_with_a_hint(case):
  words, message = REFUSED[case]
  with pytest.raises(InputError, match=message) as caught:
    read('quickstart', *words.split())
  assert '\n' not in str(caught.value)


def test_words_after_two_dashes_are_no_overrides():
  words = ['local', '--config=a.py', '--config.seed=1', '--', '--config.seed=2']
  assert config_flag.split(words) == (['local', '--config=a.py', '--', '--config.seed=2'], {'seed': ['1']})


# ---------------------------------------------------------------- unknown names

# Unknown field -> field that the hint names.
MEANT = {
  'optim.learning_rate': 'config.optim.lr',
  'output_dir': '--workdir',
  'lr': 'config.optim.lr',
  'train.num_train_epochs': 'config.train.epochs',
  'grpo.optim.lrr': 'config.grpo.optim.lr',
  'grpo.num_generations': 'config.grpo.rollout.group_size',
  'actor_rollout_ref.rollout.n': 'config.rollout.group_size',
  'algorithm.filter_groups.enable': 'config.rl.dynamic_sampling',
  'algorithm.filter_groups.metric': 'config.rl.correct_by',
  'beta': 'config.preference.beta',
  'modle.path': 'config.model.path',
  'optm.lrr': 'config.optim.lr',
  'schedul': 'config.optim.schedule',
  'train.lr': 'config.optim.lr',
  'eval.data.paht': 'config.eval.data.path',
  'optim.zzzz': 'known: name, lr, schedule',
  'optim.lr.x': 'known: name, lr, schedule',
}


@pytest.mark.parametrize('path', MEANT)
def test_unknown_field_is_refused_with_the_field_that_was_meant(path):
  with pytest.raises(InputError, match=rf'^config\.{path}: unknown key; .*{MEANT[path]}\b'):
    read('quickstart', f'--config.{path}=1')


@pytest.mark.parametrize('name', ['workdir', 'output_dir'])
def test_a_flag_of_another_command_is_not_suggested(name):
  code, _, err = command('inspect', '--config=configs/quickstart.py', f'--{name}=runs/x')
  assert code == 2 and err == f'jaxpost: --{name}: there is no such flag; --help lists the flags\n'


@pytest.mark.parametrize(
  'name, field',
  [
    ('eval.path', 'eval.data.path'),
    ('data.val_path', 'eval.data.path'),
    ('data.train_path', 'data.path'),
    ('model.name_or_path', 'model.path'),
    ('fsdp', 'mesh.train'),
  ],
)
def test_a_path_is_suggested_by_what_it_is_of(name, field):
  assert str(field_names.unknown_key('config', name)).endswith(f'did you mean config.{field}?')


def test_unknown_field_in_a_file_gets_the_same_hint():
  with pytest.raises(InputError, match='config.sft.optim.learning_rate: .*config.sft.optim.lr?'):
    config_lib.parse(dict(stages=('sft',), sft=dict(optim=dict(learning_rate=1.0))))


def test_synonyms_lead_to_fields_and_are_no_fields():
  for name, paths in field_names.SYNONYMS.items():
    assert not field_names.field_type(name), name
    assert all(path == '--workdir' or field_names.field_type(path) for path in paths), name


def test_synonyms_agree_with_table_of_trl_and_verl_names():
  """A row of docs/from_trl_and_verl.md that names a synonym has one of its fields."""
  text = (CLONE / 'docs/from_trl_and_verl.md').read_text('utf-8').split('## Where')[0]
  rows = [line.split('|')[1:3] for line in text.splitlines() if line.startswith('| `')]
  documented = {}
  for theirs, ours in rows:
    for name in re.findall(r'`[\w.]+', theirs):
      for field in re.findall(r'`([a-z_][\w.]*)', ours):
        documented.setdefault(name[1:].rpartition('.')[2], set()).add(field)
  both = documented.keys() & field_names.SYNONYMS.keys()
  assert len(both) > 60
  # Each setting that the table names has a synonym. Words after = are values.
  settings = {
    name.rpartition('.')[2] for theirs, _ in rows for name in re.findall(r'`([\w.]+)', theirs.partition('=')[0])
  }
  ours = {field.rpartition('.')[2] for field in field_names.FIELDS}
  assert sorted({name for name in settings if '_' in name} - field_names.SYNONYMS.keys() - ours) == []
  for name in both:
    fields = {f for f in documented[name] if '.' in f or f == 'reward'}
    if fields:
      # `micro_batch_size` stands for train.micro_batch_size, and so on.
      assert fields & {*field_names.SYNONYMS[name]}, (name, fields, field_names.SYNONYMS[name])


@pytest.mark.parametrize(
  'path, value, hint',
  [
    ('rl.advantage', 'grpo', "did you mean 'group'?"),
    ('rl.advantage', 'rloo', "did you mean 'leave_one_out'?"),
    ('rl.aggregate', 'seq-mean-token-mean', "did you mean 'sequence'?"),
    ('rl.kl_estimator', 'low_var_kl', "did you mean 'k3'?"),
    ('rl.advantage', 'gropu', "did you mean 'group'?"),
  ],
)
def test_a_value_of_trl_or_verl_is_refused_with_the_one_that_was_meant(path, value, hint):
  section, field = path.split('.')
  with pytest.raises(InputError) as error:
    config_lib.parse({section: {field: value}})
  assert str(error.value).startswith(f"config.{path}: {value!r} is not one of '', ") and str(error.value).endswith(hint)


def test_values_of_others_stand_for_choices_and_are_none():
  choices = {name: f.metadata['choices'] for name, f in RlSection.__dataclass_fields__.items()}
  for pair, meant in field_names.VALUES.items():
    field, value = pair.split('=')
    assert meant in choices[field] and value not in choices[field], pair


def test_synonyms_agree_with_table_of_most_common_settings():
  page = (CLONE / 'docs/from_trl_and_verl.md').read_text('utf-8')
  section = page.split('## The most common settings')[1].split('\n## ')[0]
  rows = [line.split('|')[2:5] for line in section.splitlines()[4:] if line.startswith('| ')]
  assert len(rows) > 15
  checked = 0
  for trl, verl, ours in rows:
    fields = {name for name in re.findall(r'`([\w.]+)`', ours) if name in field_names.FIELDS}
    for name in re.findall(r'`([\w.]+)`', trl + verl):
      last = name.rpartition('.')[2]
      hints = field_names.SYNONYMS.get(name) or field_names.SYNONYMS.get(last if len(last) > 1 else '', ())
      assert not hints or not fields or fields & {*hints}, (name, hints)
      checked += bool(hints)
  assert checked > 25


# ------------------------------------------------------------- whole commands


def command(verb, *words):
  done = subprocess.run(
    [sys.executable, '-m', f'launch.{verb}', *words],
    cwd=CLONE,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    text=True,
    capture_output=True,
    timeout=120,
  )
  return done.returncode, done.stdout, done.stderr


def test_inspect_applies_and_reports_overrides():
  code, out, err = command(
    'inspect',
    '--config=configs/quickstart.py:short',
    '--stage=grpo',
    '--rows=1',
    '--config.rollout.prompts=3',
    '--config.grpo.train.steps=77',
    '--config.grpo.eval.data.path=',
  )
  assert code == 0, err
  assert '77 steps' in out
  assert (
    'config.rollout.prompts=3: stage grpo keeps its own 64; set --config.grpo.rollout.prompts to change it\n' in err
  )


# Case -> ((config file, overrides), words of the error).
WRONG = {
  'hidden': (('configs/quickstart.py', '--config.algorithm=gpro'), '--config.grpo.algorithm=gpro'),
  'unknown': (('configs/quickstart.py', '--config.lr=1'), 'config.optim.lr'),
  'file': (('configs/quickstrat.py',), 'configs/quickstrat.py: no such file; did you mean configs/quickstart.py?'),
  'name': (('quickstart',), 'quickstart: no such file; did you mean configs/quickstart.py?'),
  'far': (('zzz.py',), 'zzz.py: no such file; the nearest configs are configs/'),
  'folder': (('configs',), 'configs is a folder'),
}
FLAGS = {'inspect': (), 'train': ('--workdir=/nowhere/x',), 'plan': ('--topology=cpu',), 'evaluate': ('--model=x',)}


@pytest.mark.parametrize('case', WRONG)
@pytest.mark.parametrize('verb', FLAGS)
def test_every_command_refuses_bad_config_or_override_in_one_line(verb, case):
  (file, *words), message = WRONG[case]
  code, out, err = command(verb, f'--config={file}', *words, *FLAGS[verb])
  assert code == 2 and out == ''
  assert re.fullmatch('jaxpost: .*\n', err) and message in err, err


def test_overrides_without_a_config_are_refused():
  code, _, err = command('evaluate', '--run=x', '--config.seed=1')
  assert code == 2 and '--config.seed: there is no config to change; give --config=FILE as well' in err


# Case -> (words, pattern of the error).
LINES = {
  'none': ((), 'needs --config and --workdir: --config is the config file: .*; --workdir is the folder of the run: .*'),
  'a word': (('configs/quickstart.py',), "'configs/quickstart.py' is no flag; write --config=configs/quickstart.py"),
  'two dashes': (('config=../x.yaml', 'workdir=w'), "'config=../x.yaml' is no flag; write --config=../x.yaml"),
  'near': (
    ('--config=configs/quickstart.py', '--confg.optim.lr=1'),
    '--confg.optim.lr: there is no such flag; did you mean --config.optim.lr.',
  ),
  'name of TRL': (
    ('--config=configs/quickstart.py', '--learning_rate=1e-3'),
    '--learning_rate: there is no such flag; did you mean --config.optim.lr.',
  ),
  'of another command': (('--config=configs/quickstart.py', '--rows=1'), '--rows: there is no such flag; --help .*'),
  'argument': (('--config=configs/quickstart.py:shrot',), "--config: no argument 'shrot'; did you mean 'short'."),
}


@pytest.mark.parametrize('case', LINES)
def test_wrong_flag_is_refused_in_one_line(case):
  words, message = LINES[case]
  code, out, err = command('train', *words)
  assert code == 2 and re.fullmatch(f'jaxpost: {message}\n', err), err


@pytest.mark.parametrize('verb', ['local', 'submit'])
def test_train_flags_before_two_dashes_are_refused(verb):
  words = {'local': ('--processes=2',), 'submit': ('slurm', '--nodes=2')}[verb]
  code, out, err = command(verb, *words, '--config=configs/quickstart.py', '--workdir=x')
  assert code == 2 and out == ''
  assert err == 'jaxpost: --config: is a flag of launch.train; write all of these after --, as in -- --config=FILE\n'


def test_a_config_and_its_file_may_be_two_words(tmp_path):
  words = ['train', '--config', 'a.yaml', '--', '--config', 'b.py']
  assert config_flag.joined(words) == ['train', '--config=a.yaml', *words[3:]]
  assert config_flag.joined(['train', '--config']) == ['train', '--config']
  (tmp_path / 'a.yaml').write_text('a: [1\n')
  (tmp_path / 'a.py').write_text('def get_config():\n  return a\n')
  for name, message in (('a.yaml', 'while parsing a flow sequence'), ('a.py', f'{tmp_path}/a.py:2: NameError')):
    assert message in command('inspect', '--config', tmp_path / name)[2]


@pytest.mark.parametrize('words', [('train', '--help'), ('main', 'train', '--help')])
def test_help_into_a_closed_pipe_exits_quietly(words):
  read, write = os.pipe()
  os.close(read)
  verb = subprocess.run([sys.executable, '-m', f'launch.{words[0]}', *words[1:]], cwd=CLONE, stdout=write, stderr=-1)
  os.close(write)
  assert verb.returncode == 141 and not verb.stderr, verb.stderr
