"""Bad configs, data, models, rewards and flags end a run with one line that names the field and says what to do.

Most cases call `stages.run`, as the launcher does, and read the InputError. The cases of the launcher run it in a
process and read its exit code and stderr; JAX has no platform there, so that touching a device ends with a traceback.
"""

import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import children
import jax
import jax.numpy as jnp
import pytest
import safetensors.numpy
import tiny

from jaxpost import errors, stages
from jaxpost.errors import InputError
from jaxpost.stage import assemble
from jaxpost.stage import place as place_lib
from jaxpost.storage import object_store
from launch import exits

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOOD = '{"prompt": "1+1=", "completion": "2"}'
REWARDS = """
import time

def fine(completions, **columns):
  return [1.0] * len(completions)

def raises(completions, **columns):
  raise KeyError('gold')

def hangs(completions, **columns):
  time.sleep(600)

def not_a_number(completions, **columns):
  return [float('nan')] * len(completions)

def too_short(completions, **columns):
  return [1.0]

def needs_more(completions, gold):
  return [1.0] * len(completions)

def names_answer(completions, answer, **columns):
  return [1.0] * len(completions)

constant = 7
"""


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


@pytest.fixture
def cwd(tmp_path, monkeypatch):
  """The current directory: a new folder with reward functions in rewards.py and one row of data in train.jsonl."""
  path = tmp_path / 'place'
  path.mkdir()
  (path / 'rewards.py').write_text(REWARDS)
  (path / 'breaks.py').write_text('raise OSError("no GPU here")\n')
  (path / 'train.jsonl').write_text(GOOD + '\n')
  monkeypatch.chdir(path)
  return path


def input_error(config, workdir) -> str:
  """Runs a config; returns the message of the InputError with exit code 2 that it must raise, which is one line."""
  with pytest.raises(InputError) as caught:
    stages.run(config, workdir)
  line = str(caught.value)
  assert caught.value.exit_code == 2
  assert line and '\n' not in line and len(line) < 700, line
  return line


def early_input_error(config, workdir, monkeypatch, devices=False) -> str:
  """Returns what `input_error` does, and asserts that nothing was compiled or written before it.

  Args:
    devices: whether the run may look at its devices before it fails.
  """

  def fail_on_compiling(*unused):
    raise AssertionError('got as far as compiling')

  monkeypatch.setattr(assemble, 'assemble', fail_on_compiling)
  if not devices:
    monkeypatch.setattr(place_lib, 'place_stage', fail_on_compiling)
  line = input_error(config, workdir)
  assert not workdir.exists()
  return line


# name of a case: ('grpo' or 'sft', fields that differ from a good config, pattern that the line must contain)
FIELDS = {
  'unknown key': ('sft', dict(sede=1), 'config.sede: .*config.seed'),
  'unknown key in a block': ('sft', dict(train=dict(step=1)), 'config.train.step: .*train.steps'),
  'unknown key in a block in a block': (
    'sft',
    dict(eval=dict(data=dict(paht='x'))),
    'config.eval.data.paht: .*config.eval.data.path',
  ),
  'no held-out file': (
    'sft',
    dict(eval=dict(data=dict(path='./held.jsonl'))),
    'config.eval.data: ./held.jsonl: no such file',
  ),
  'unknown key in a stage': ('sft', dict(stages=('a',), a=dict(optim=dict(lrr=1.0))), 'config.a.optim.lrr: .*lr'),
  'text for a number': ('sft', dict(train=dict(steps='10')), "train.steps: want int, got '10'"),
  'float for an int': ('sft', dict(train=dict(steps=10.0)), 'train.steps: want int, got 10.0'),
  'bool for an int': ('sft', dict(seed=True), 'config.seed: want int, got True'),
  'text for a tuple': ('sft', dict(reward_weights='1,2'), 'reward_weights: want tuple'),
  'text for tuple of stages': ('sft', dict(stages='sft'), 'config.stages: want tuple'),
  'a number for a block': ('sft', dict(train=3), 'config.train: want a block'),
  'nan': ('sft', dict(optim=dict(lr=float('nan'))), 'optim.lr: nan is not'),
  'infinity': ('sft', dict(optim=dict(lr=float('inf'))), 'optim.lr: inf is'),
  'negative': ('sft', dict(optim=dict(lr=-0.5)), 'optim.lr: -0.5 is below'),
  'absurd rate': ('sft', dict(optim=dict(lr=1e30)), r'optim.lr: 1e\+30 is above 100'),
  'moments that never move': ('sft', dict(optim=dict(b2=1.0)), 'optim.b2: 1.0 is above 0.999999'),
  'no epsilon': ('sft', dict(optim=dict(eps=0.0)), 'optim.eps: 0.0 is below 1e-20'),
  'above its range': ('sft', dict(optim=dict(b1=2.0)), 'b1: 2.0 is above'),
  'no choice': ('sft', dict(data=dict(overlong='trunkate')), "data.overlong: 'trunkate'.*did you mean 'truncate'"),
  'absurd batch': ('sft', dict(train=dict(batch_size=10**12)), 'train.batch_size: 1000000000000 is above 1048576'),
  'absurd row': ('sft', dict(train=dict(row_length=10**12)), 'train.row_length: 1000000000000 is above'),
  'batch that no host holds': (
    'sft',
    dict(train=dict(batch_size=2**20, row_length=2**24)),
    r'config.train: batch_size x row_length are 1.76e\+13 tokens, which take 3.93e\+05 GiB',
  ),
  'absurd completion': ('grpo', dict(rollout=dict(max_new_tokens=10**9)), 'rollout.max_new_tokens: .* is above'),
  'absurd prompts': ('grpo', dict(rollout=dict(prompts=10**9)), 'rollout.prompts: .* is above'),
  'rollout that no host holds': (
    'grpo',
    dict(rollout=dict(prompts=2**20, group_size=2**16)),
    'config.rollout: prompts x group_size x .* tokens, which take',
  ),
  'absurd evaluation': ('grpo', dict(eval=dict(samples=10**12)), 'eval.samples: .* is above 65536'),
  'absurd seed': ('sft', dict(seed=10**30), 'config.seed: .* is above 4294967295'),
  'seed of 20,000 bits': ('sft', dict(seed=2**20000), 'config.seed: an int that is too long to show is above'),
  'absurd time': ('grpo', dict(rewards=dict(timeout_s=1e300)), r'rewards.timeout_s: 1e\+300 is above 604800'),
  'absurd decay': ('sft', dict(optim=dict(weight_decay=1e30)), r'optim.weight_decay: 1e\+30 is above'),
  'text with NUL': ('sft', dict(data=dict(path='a\0b')), "config.data.path: 'a.x00b' has a character that is no text"),
  'half a character': ('grpo', dict(reward=('length', '\ud800')), r'config.reward.1.: .* has a character that is no'),
  'stage that is a path': (
    'sft',
    {'stages': ('../../evil',), '../../evil': {}},
    "config.stages: '../../evil' cannot name a stage",
  ),
  'stage in a folder': ('sft', {'stages': ('a/b',), 'a/b': {}}, "config.stages: 'a/b' cannot name a stage"),
  'stage without a name': ('sft', {'stages': ('',), '': {}}, "config.stages: '' cannot name a stage"),
  'stage of two lines': ('sft', {'stages': ('x\ny',), 'x\ny': {}}, r"config.stages: 'x.ny' cannot name a stage"),
  'name that is a number': ('sft', {3: {}}, 'config.3: the name of a field must be a string'),
  'mesh axis twice': ('sft', dict(mesh=dict(train='fsdp=2,fsdp=2')), 'mesh.train: .* names the axis fsdp twice'),
  'mesh axis twice, first of 1': ('sft', dict(mesh=dict(train='fsdp=1,fsdp=-1')), 'names the axis fsdp twice'),
  'mesh axis of many digits': ('sft', dict(mesh=dict(train='fsdp=' + '9' * 5000)), 'mesh.train: cannot read'),
  'stage called like a block': ('sft', dict(stages=('rl',)), "'rl' is a field of every config"),
  'stage twice': ('sft', dict(stages=('a', 'a'), a={}), "config.stages: names 'a' twice"),
  'stage of stages': (
    'sft',
    dict(stages=('a',), a=dict(stages=('b',), b={})),
    'config.a.stages: a stage has no stages',
  ),
  'stage without block': ('sft', dict(stages=('sft', 'grop'), sft={}), 'no block config.grop'),
  'algorithm': ('sft', dict(algorithm='sff'), "no 'sff'; did you mean 'sft'.*built in: sft, dpo"),
  'algorithm with swapped letters': ('sft', dict(algorithm='dop'), "no 'dop'; did you mean 'dpo'"),
  'algorithm of a user': ('sft', dict(algorithm='my.module'), "config.algorithm: no module 'my'"),
  'not an algorithm': ('sft', dict(algorithm='json.decoder'), 'config.algorithm: json.decoder has no ALGORITHM'),
  'preset': ('sft', dict(model=dict(path='', preset='tinny')), "model.preset: .*'tinny'.*tiny"),
  'optimizer': ('sft', dict(optim=dict(name='adamv')), "optim.name: .*'adamv'.*adamw"),
  'optimizer without decay': (
    'sft',
    dict(optim=dict(name='adam', weight_decay=0.1)),
    'optim.weight_decay: optax.adam takes none; use adamw',
  ),
  'mesh axis': ('sft', dict(mesh=dict(train='model=2')), "config.mesh.train: .*'model=2'.*data, fsdp, expert"),
  'mesh unreadable': ('sft', dict(mesh=dict(train='fsdp:2')), "mesh.train: cannot read 'fsdp:2'"),
  'mesh size': ('sft', dict(mesh=dict(rollout='data=--1')), "mesh.rollout: cannot read 'data=--1'"),
  'mesh with two rests': ('sft', dict(mesh=dict(train='fsdp=-1,data=-1')), 'mesh.train: .*one of them may be -1'),
  'mesh of nothing': ('sft', dict(mesh=dict(train='fsdp=0')), 'mesh.train: .*sizes are 1 or more'),
  'context to sample': ('grpo', dict(mesh=dict(rollout='context=2')), 'mesh.rollout: the context axis splits rows'),
  'devices to sample nothing': ('sft', dict(mesh=dict(rollout_devices=4)), 'mesh.rollout_devices: sft samples nothing'),
  'devices to sample nothing held out': (
    'sft',
    dict(mesh=dict(rollout_devices=4), eval=dict(samples=2)),
    'mesh.rollout_devices: sft samples nothing',
  ),
  'devices to sample what is stored': (
    'grpo',
    dict(mesh=dict(rollout_devices=4), train_on_rollouts='run'),
    'mesh.rollout_devices: grpo samples nothing',
  ),
  'devices to score nothing': (
    'sft',
    dict(mesh=dict(score_devices=4)),
    'mesh.score_devices: sft has no reference, teacher or reward model; leave it 0',
  ),
  'devices to score without a reference': (
    'grpo',
    dict(mesh=dict(score_devices=1), rl=dict(kl_coef=0.0)),
    'mesh.score_devices: grpo has no reference, teacher or reward model; leave it 0',
  ),
  'lag of a greedy answer': (
    'grpo',
    dict(algorithm='remax', rollout=dict(staleness=1)),
    'rollout.staleness: 1 does not work with config.train_on_rollouts or',
  ),
  'parked while others sample': (
    'grpo',
    dict(rollout=dict(staleness=1, offload=True)),
    'rollout.offload: rollout.staleness',
  ),
  'more top log-probs than there are tokens': (
    'grpo',
    dict(rollout=dict(top_logprobs=5000)),
    'rollout.top_logprobs: 5000 of a vocabulary of',
  ),
  'a base that is not there': (
    'grpo',
    dict(lora=dict(rank=2), rollout=dict(share_base=True), mesh=dict(rollout_devices=1)),
    'rollout.share_base: the sampler has its own devices',
  ),
  'parked for a sampler elsewhere': (
    'grpo',
    dict(rollout=dict(offload=True), mesh=dict(rollout_devices=1)),
    'rollout.offload: rollout.staleness and mesh.rollout_devices sample beside training',
  ),
  'swap without a lag': (
    'grpo',
    dict(rollout=dict(inflight_update_blocks=2)),
    'rollout.inflight_update_blocks: with rollout.staleness=0 there are no newer',
  ),
  'no data': ('sft', dict(data=dict(path='')), 'config.data.path: is empty'),
  'rows shorter than two': ('sft', dict(train=dict(row_length=1)), 'row_length=1 at least 2'),
  'no reward': ('grpo', dict(reward=''), 'config.reward: is empty'),
  'group of one': ('grpo', dict(rollout=dict(group_size=1)), 'rollout.group_size: .*at least 2'),
  'rows too short to roll out': ('grpo', dict(train=dict(row_length=20)), 'train.row_length: 20 .* = 36; raise it'),
  'prompts too long': (
    'grpo',
    dict(rollout=dict(max_prompt_length=3)),
    'all 200 prompts are longer than max_prompt_length=3',
  ),
  'weights of rewards': ('grpo', dict(reward_weights=(1.0, 2.0)), 'reward_weights: 2 weights for 1 rewards'),
  'weight of text': ('grpo', dict(reward_weights=('1',)), "config.reward_weights.0.: want float, got '1'"),
  'number as YAML reads it': ('sft', dict(optim=dict(lr='3e-3')), "optim.lr: want float, got '3e-3' .*write 1.0e-3"),
  'reward of a number': ('grpo', dict(reward=3), 'reward: 3 is an int'),
  'reward unknown': ('grpo', dict(reward='exact_mach'), 'exact_mach.*exact_match'),
  'reward of a file alone': (
    'grpo',
    dict(reward='./rewards.py'),
    r'rewards.py is a file; name its function, too: ./rewards.py:FUNCTION',
  ),
  'reward without module': ('grpo', dict(reward='my_rewards:fn'), "no module 'my_rewards'"),
  'reward without file': ('grpo', dict(reward='./reward.py:fine'), 'no file ./reward.py'),
  'reward without function': ('grpo', dict(reward='./rewards.py:fin'), "rewards.py has no 'fin'; it has fine"),
  'reward that is none': ('grpo', dict(reward='./rewards.py:constant'), 'constant is an int, not a function'),
  'reward that cannot be imported': (
    'grpo',
    dict(reward='./breaks.py:fine'),
    'raised OSError: no GPU here at .*breaks.py:1',
  ),
  'reward that needs another column': (
    'grpo',
    dict(reward='./rewards.py:needs_more'),
    "needs_more .*rewards.py.*needs the column 'gold', the data from .* on has: .*answ",
  ),
  'init_from no run': ('sft', dict(init_from='.'), 'config.init_from: . is neither the folder of a run'),
  'init_from no step': ('sft', dict(init_from='.@x'), "config.init_from: 'x' in '.@x' is not a step; name a number"),
}


@pytest.mark.parametrize('case', FIELDS)
def test_bad_field_is_refused_before_anything_is_compiled(case, model, cwd, monkeypatch):
  algorithm, change, pattern = FIELDS[case]
  if algorithm == 'sft':
    good = tiny.run_config(model)
  else:
    good = tiny.grpo_config(model, reward='exact_match', rewards=dict(workers=1))
  line = early_input_error(tiny.merged(good, change), cwd / 'run', monkeypatch)
  assert re.search(pattern, line), line


# name of a case: (fields, pattern that the line must contain); JAX has one device here
DEVICES = {
  'mesh does not fit': (dict(mesh=dict(train='fsdp=3')), 'mesh.train: .fsdp=3. does not fit 1 .*: .fsdp=-1. fits any'),
  'nobody left to train': (
    dict(algorithm='grpo', reward='length?max=8', train=dict(row_length=0), mesh=dict(rollout_devices=1)),
    'rollout_devices, score_devices: 1 of 1 device.s. leave none',
  ),
  'mesh of a later stage': (
    dict(stages=('a', 'b'), a={}, b=dict(mesh=dict(rollout='data=2'))),
    'mesh.rollout: .data=2. does not fit 1',
  ),
}


@pytest.mark.parametrize('case', DEVICES)
def test_mesh_that_does_not_fit_the_devices_is_refused(case, model, cwd, monkeypatch):
  change, pattern = DEVICES[case]
  line = early_input_error(tiny.run_config(model, **change), cwd / 'run', monkeypatch, devices=True)
  assert re.search(pattern, line), line


def test_micro_batch_that_does_not_split_over_the_devices_is_refused():
  from jaxpost.stage import batch_shape, config

  parsed = config.parse(dict(train=dict(batch_size=6)))['sft']
  with pytest.raises(InputError, match='6 rows of a micro-batch do not split over 4'):
    batch_shape.batch_shape(parsed, False, 4)


def lines(*text):
  return '\n'.join(text).encode() + b'\n'


USER = {'role': 'user', 'content': 'a'}
GOOD_CHAT = json.dumps({'messages': [USER, {'role': 'assistant', 'content': 'b'}]})
# name of a case: (file, its bytes, config.data, pattern that the line must contain)
DATA = {
  'missing': (
    'train.jsonl',
    lines(GOOD),
    dict(path='trian.jsonl'),
    'trian.jsonl: no such file; did you mean train.jsonl',
  ),
  'missing and nothing like it': (
    'notebooks.jsonl',
    lines(GOOD),
    dict(path='nope.jsonl'),
    'nope.jsonl: no such file, and no similar name in [.]$',
  ),
  'missing folder': (
    'train.jsonl',
    lines(GOOD),
    dict(path='dat/x.jsonl'),
    'dat/x.jsonl: no such file, nor is there a folder dat',
  ),
  'empty': ('empty.jsonl', b'', dict(path='empty.jsonl'), 'empty.jsonl: holds no rows'),
  'bad line': ('bad.jsonl', lines(GOOD, '{"prompt": "a",, }'), dict(path='bad.jsonl'), r'bad.jsonl:2:16'),
  'torn line': ('bad.jsonl', lines(GOOD, GOOD[:-9]), dict(path='bad.jsonl'), r'bad.jsonl:2:'),
  'a number': ('bad.jsonl', lines(GOOD, '1'), dict(path='bad.jsonl'), 'bad.jsonl:2: the row is an int, must'),
  'no object': ('bad.jsonl', lines(GOOD, '[1]'), dict(path='bad.jsonl'), 'bad.jsonl:2: .*list'),
  'renamed from nothing': (
    'x.jsonl',
    lines('{"question": "a", "answer": "b"}'),
    dict(path='x.jsonl', columns='prompt=questoin,completion=answer'),
    "x.jsonl:1: no column 'questoin'; did you mean 'question'",
  ),
  'columns unreadable': (
    'x.jsonl',
    lines(GOOD),
    dict(path='x.jsonl', columns='prompt'),
    "columns: 'prompt' must be target=source",
  ),
  'no known column': ('x.jsonl', lines(GOOD, '{"question": "a"}'), dict(path='x.jsonl'), 'x.jsonl:2: .*question'),
  'prompt without completion': ('x.jsonl', lines('{"prompt": "a"}'), dict(path='x.jsonl'), 'x.jsonl:1: .*completion'),
  'null content': (
    'x.jsonl',
    lines(json.dumps({'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': None}]})),
    dict(path='x.jsonl'),
    r'x.jsonl:1: messages\[1\].content',
  ),
  'null column': (
    'x.jsonl',
    lines('{"prompt": "a", "completion": null}'),
    dict(path='x.jsonl'),
    'x.jsonl:1: completion',
  ),
  'calls that are none': (
    'x.jsonl',
    lines(GOOD_CHAT, json.dumps({'messages': [USER, {'role': 'assistant', 'content': 'b', 'tool_calls': 7}]})),
    dict(path='x.jsonl'),
    r'x.jsonl:2: messages\[1\].tool_calls: is an int, must be a list of .*function',
  ),
  'no assistant': (
    'x.jsonl',
    lines(json.dumps({'messages': [{'role': 'user', 'content': 'a'}]})),
    dict(path='x.jsonl'),
    'x.jsonl:1: .*assistant',
  ),
  'unknown role': (
    'x.jsonl',
    lines(json.dumps({'messages': [{'role': 'usr', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]})),
    dict(path='x.jsonl'),
    r"x.jsonl:1: messages\[0\].role.*'usr'",
  ),
  'not utf-8': (
    'x.jsonl',
    lines(GOOD) + b'{"prompt": "\xff\xfe", "co": 1}\n',
    dict(path='x.jsonl'),
    r'x.jsonl:2.*UTF-8',
  ),
  'broken gzip': ('x.jsonl.gz', b'\x1f\x8b\x08\x00nonsense', dict(path='x.jsonl.gz'), 'x.jsonl.gz'),
  'broken parquet': ('x.parquet', b'PAR1 and so on', dict(path='x.parquet'), 'x.parquet'),
  'unknown kind': ('x.xlsx', b'a,b\n', dict(path='x.xlsx'), 'x.xlsx: .*jsonl'),
  'folder without data': ('empty/notes.md', b'x', dict(path='empty'), 'empty: .*jsonl'),
  'only a prompt fits': (
    'x.jsonl',
    lines(json.dumps({'prompt': 'a' * 99, 'completion': 'b'})),
    dict(path='x.jsonl'),
    'no.* trained token within 64 tokens',
  ),
  'generator': ('x', b'', dict(path='generated:arithmetik'), 'generated:arithmetik: there is no such data'),
  'option of a generator': ('x', b'', dict(path='generated:arithmetic:maximum=3'), "unknown option 'maximum'"),
  'map of a file': ('x.jsonl', lines(GOOD), dict(path='x.jsonl', map='./maps.py:fn'), 'no file ./maps.py'),
  'map that raises': (
    'x.jsonl',
    lines(GOOD),
    dict(path='x.jsonl', map='./rewards.py:raises'),
    'x.jsonl:1: .*raised KeyError',
  ),
}


@pytest.mark.parametrize('case', DATA)
def test_bad_data_is_refused_before_anything_is_compiled(case, model, cwd, monkeypatch):
  name, content, data, pattern = DATA[case]
  (cwd / name).parent.mkdir(exist_ok=True)
  (cwd / name).write_bytes(content)
  line = early_input_error(tiny.run_config(model, data=data), cwd / 'run', monkeypatch)
  assert re.search(pattern, line), line
  # Held-out data is checked as early as training data.
  if case in ('missing', 'bad line', 'null content'):
    line = early_input_error(tiny.run_config(model, eval=dict(data=dict(path=data['path']))), cwd / 'run', monkeypatch)
    assert re.search(pattern, line), line


def edit_tensors(folder, change):
  """Rewrites the weights of a folder; `change` edits the dict of tensors in place."""
  path = folder / 'model.safetensors'
  weights = safetensors.numpy.load_file(path)
  change(weights)
  safetensors.numpy.save_file(weights, path)


def edit_config(folder, **fields):
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def keep_only_pickle(folder):
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


def truncate(folder):
  path = folder / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-100])


def append_config_text(folder, text):
  file = folder / 'config.json'
  file.write_text(file.read_text().rstrip().removesuffix('}') + text + '}')


def write_index_to(folder, name):
  (folder / 'model.safetensors').unlink()
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': {NORM: name}}))


def move_weights_out(folder):
  """Moves the weights to the parent of the folder, and writes an index that refers to them there."""
  path = folder / 'model.safetensors'
  names = safetensors.numpy.load_file(path)
  path.rename(folder.parent / path.name)
  (folder / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': dict.fromkeys(names, '../model.safetensors')})
  )


def edit_header(folder, change):
  """Replaces the bytes of the header of the weights by `change(bytes)`."""
  path = folder / 'model.safetensors'
  data = path.read_bytes()
  size = 8 + int.from_bytes(data[:8], 'little')
  header = change(data[8:size])
  path.write_bytes(len(header).to_bytes(8, 'little') + header + data[size:])


def overlap_two_tensors(text):
  """Returns the header with the byte range of one norm replaced by that of another norm, which has the same size."""
  header = json.loads(text)
  norms = [name for name in header if name.endswith('layernorm.weight')]
  header[norms[0]]['data_offsets'] = header[norms[1]]['data_offsets']
  return json.dumps(header).encode()


NORM = 'model.layers.0.input_layernorm.weight'
# name of a case: (edit of the model folder, pattern that the line must contain)
MODELS = {
  'missing tensor': (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), f'{NORM}'),
  'extra tensor': (
    lambda f: edit_tensors(f, lambda t: t.update({'model.layers.0.lora.weight': t[NORM]})),
    'model.layers.0.lora.weight',
  ),
  'tensor of another shape': (
    lambda f: edit_tensors(f, lambda t: t.update({NORM: t[NORM][:-1].copy()})),
    rf'{NORM}.*15',
  ),
  'tensor of another type': (
    lambda f: edit_tensors(f, lambda t: t.update({NORM: t[NORM].astype('int32')})),
    rf'{NORM} has type I32',
  ),
  'index to elsewhere': (move_weights_out, r"'\.\./model.safetensors', which"),
  'code of its own': (lambda f: edit_config(f, auto_map={'AutoModel': 'modeling.Mine'}), 'auto_map'),
  'tensors that overlap': (lambda f: edit_header(f, overlap_two_tensors), 'model.safetensors: .*tensors overlap'),
  'shape of floats': (lambda f: edit_header(f, lambda t: t.replace(b'[16]', b'[16.0]')), 'header is damaged'),
  'header of lists in lists': (lambda f: edit_header(f, lambda t: b'[' * 5000), 'header is damaged'),
  'config of lists in lists': (lambda f: (f / 'config.json').write_text('[' * 5000), 'nested too deeply'),
  'config with a huge integer': (lambda f: append_config_text(f, ', "x": ' + '9' * 5000), 'config.json: unreadable'),
  'index to a long name': (lambda f: write_index_to(f, 'a' * 5000), 'which is no file name'),
  'truncated': (truncate, 'model.safetensors: '),
  'pickle only': (keep_only_pickle, 'pytorch_model.bin.*safetensors'),
  'no weights': (lambda f: (f / 'model.safetensors').unlink(), 'safetensors'),
  'unknown model_type': (lambda f: edit_config(f, model_type='mamba'), "'mamba'.*llama, mistral"),
  'no config': (lambda f: (f / 'config.json').unlink(), 'config.json'),
  'bad config': (lambda f: (f / 'config.json').write_text('{'), 'config.json'),
  'size of text': (lambda f: edit_config(f, hidden_size='16'), "hidden_size='16'"),
  'too few embeddings': (lambda f: None, '259 tokens are more than the 100'),
}


@pytest.mark.parametrize('case', MODELS)
def test_damaged_model_folder_is_refused_before_anything_is_compiled(case, model, cwd, monkeypatch):
  change, pattern = MODELS[case]
  if case == 'too few embeddings':
    tiny.folder(cwd / 'model', vocab_size=100)
  else:
    shutil.copytree(model, cwd / 'model')
  change(cwd / 'model')
  line = early_input_error(tiny.run_config(str(cwd / 'model')), cwd / 'run', monkeypatch)
  assert re.search(pattern, line), line
  assert str(cwd / 'model') in line


@pytest.mark.parametrize(
  'change, pattern',
  [
    (dict(path='./no_such/model'), 'config.model.path: ./no_such/model does'),
    (dict(tokenizer=''), 'tokenizer'),
    (dict(tokenizer='./none'), './none'),
  ],
  ids=['folder', 'no tokenizer in it', 'tokenizer'],
)
def test_model_section_that_names_no_model_or_tokenizer_is_refused(change, pattern, model, cwd, monkeypatch):
  line = early_input_error(tiny.merged(tiny.run_config(model), dict(model=change)), cwd / 'run', monkeypatch)
  assert re.search(pattern, line), line


@pytest.mark.parametrize(
  'change, pattern',
  [
    (dict(lora=dict(rank=2, targets='query')), "config.lora.targets: 'query' matches none of layers/q, "),
    (dict(lora=dict(rank=9)), 'config.lora.rank: 9 is larger than layers/'),
    (dict(model=dict(quantize='nf4')), "config.model.quantize: 'nf4' is for"),
    (dict(model=dict(quantize='int3')), 'config.model.quantize.*int8'),
    (dict(model=dict(path='gs://no/model')), r'gs://no/model: .*\[gcs\]'),
  ],
  ids=['targets', 'rank', 'quantise', 'bits', 'store'],
)
def test_bad_adapter_quantization_or_store_is_refused(change, pattern, model, cwd, monkeypatch):
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  line = early_input_error(tiny.merged(tiny.run_config(model), change), cwd / 'run', monkeypatch)
  assert re.search(pattern, line), line


@pytest.mark.parametrize('row', ['{"prompt": "2+2=", "answer": null}', '{"prompt": "2+2="}'])
def test_row_that_no_reward_can_grade_is_refused(row, model, cwd, monkeypatch):
  (cwd / 'rows.jsonl').write_bytes(lines('{"prompt": "1+1=", "answer": "2"}', row))
  config = tiny.grpo_config(model, data=dict(path='rows.jsonl'), reward='exact_match', rewards=dict(workers=1))
  config['eval']['data']['path'] = ''
  line = early_input_error(config, cwd / 'run', monkeypatch)
  assert line == ('rows.jsonl:2: answer: is absent or null, and reward exact_match needs it; give it, or drop the row')
  # Null is accepted where another reward grades the row, or a user's function may handle it. A missing column is
  # accepted only if no function names it: otherwise none can be called, and the completions would have no reward.
  for reward in (('./rewards.py:fine',), ('./rewards.py:names_answer',), ('exact_match', 'length?max=8')):
    changed = tiny.merged(config, dict(reward=reward))
    if 'null' in row or 'fine' in reward[0]:
      with pytest.raises(AssertionError, match='as far as compiling'):
        stages.run(changed, cwd / 'run')
    else:
      text = "needs the column 'answer', this row has: prompt; give it, null where there is none, or drop the row"
      line = early_input_error(changed, cwd / 'refused', monkeypatch)
      assert re.fullmatch(rf'rows.jsonl:2: reward (exact_match|names_answer) \(.*\.py\): {text}', line), line


@pytest.mark.parametrize('algorithm', ['sft', 'grpo'])
def test_held_out_rows_without_the_column_of_the_reward_are_refused(algorithm, model, cwd, monkeypatch):
  """Training rows of SFT, and held-out rows beyond `eval.size`, do not need the column."""
  graded_row = '{"prompt": "1+1=", "completion": "2", "answer": "2"}'
  ungraded_row = '{"prompt": "1+1=", "completion": "2"}'
  for name, rows in ('train', [graded_row]), ('bare', [ungraded_row]), ('mixed', [graded_row, ungraded_row]):
    (cwd / f'{name}.jsonl').write_bytes(lines(*rows))
  reward = dict(reward='./rewards.py:names_answer', rewards=dict(workers=1))

  def config(data, held_out):
    base = tiny.grpo_config(model, **reward) if algorithm == 'grpo' else tiny.run_config(model, **reward)
    return tiny.merged(base, dict(data=dict(path=data), eval=dict(samples=1, size=1, data=dict(path=held_out))))

  line = early_input_error(config('train.jsonl', 'bare.jsonl'), cwd / 'run', monkeypatch)
  text = r"reward names_answer \(.*\.py\): needs the column 'answer', the data from bare.jsonl:1 on has: prompt, .*"
  assert re.fullmatch(text, line), line
  if algorithm == 'sft':
    with pytest.raises(AssertionError, match='as far as compiling'):
      stages.run(config('bare.jsonl', 'mixed.jsonl'), cwd / 'run')


# Rewards that fail for every group of the first batch


@pytest.mark.parametrize(
  'name, pattern',
  [
    ('raises', "raised KeyError: 'gold' at .*rewards.py:8"),
    ('hangs', r'no answer in 0.5 s'),
    ('not_a_number', 'returned nan at 0'),
    ('too_short', 'returned 1 rewards for 4 completions'),
  ],
)
def test_reward_that_fails_for_every_group_stops_the_run(name, pattern, model, cwd):
  config = tiny.grpo_config(
    model,
    reward=f'./rewards.py:{name}',
    train=dict(steps=1),
    rewards=dict(workers=1, timeout_s=0.5 if name == 'hangs' else 60.0),
  )
  line = input_error(config, cwd / 'run')
  assert re.search(pattern, line), line
  assert name in line and 'rewards.py' in line, line
  assert 'every group of the first batch failed' in line
  assert (cwd / 'run' / 'metrics.jsonl').read_text() == ''


# Runs that go on with another config or model


@pytest.fixture(scope='module')
def finished_run(model, tmp_path_factory):
  """(config, folder) of a finished run of two steps."""
  config = tiny.run_config(model, train=dict(steps=2))
  workdir = tmp_path_factory.mktemp('begun') / 'run'
  stages.run(config, workdir)
  return config, workdir


# name of a case: (fields that change in a finished run, pattern that the line must contain)
CHANGES = {
  'lr': (dict(optim=dict(lr=1e-4)), 'config.optim.lr of sft .*0.003, now'),
  'seed': (dict(seed=5), 'config.seed of sft .*0, now 5'),
  'data': (dict(data=dict(shuffle=False)), 'config.data.shuffle'),
  'batch': (dict(train=dict(batch_size=4)), 'config.train.batch_size'),
  'stages': (dict(stages=('a',), a={}), 'config.stages: .* holds another run, of which sft has begun'),
  'algorithm': (dict(algorithm='grpo', reward='length'), 'config.stages: '),
  'fewer steps': (dict(train=dict(steps=1)), 'train.steps: 1 of sft.*step 2'),
}


@pytest.mark.parametrize('case', CHANGES)
def test_resume_with_a_config_that_changes_the_training_is_refused(case, finished_run, capsys):
  (config, workdir), (change, pattern) = finished_run, CHANGES[case]
  before = {p: p.read_bytes() for p in workdir.rglob('*') if p.is_file()}
  line = input_error(tiny.merged(config, change), workdir)
  assert re.search(pattern, line), line
  if case == 'lr':
    printed = ''.join(capsys.readouterr().out.split())
    assert f'config.optim.lrofsft:0.003in{workdir}/config.json,now' in printed
  assert before == {p: p.read_bytes() for p in workdir.rglob('*') if p.is_file()}


def test_resume_with_another_model_of_the_same_shapes_is_refused(model, cwd):
  """The config of the model at config.model.path has changed since the run began, which no shape shows."""
  shutil.copytree(model, cwd / 'model')
  config = tiny.run_config(str(cwd / 'model'), train=dict(steps=1))
  stages.run(config, cwd / 'run')
  edit_config(cwd / 'model', rms_norm_eps=1e-3)
  line = input_error(tiny.merged(config, dict(train=dict(steps=2))), cwd / 'run')
  assert re.search('config.model.path of sft: has norm_eps 0.001, in the checkpoint 1e-06', line), line


def test_model_that_changed_since_a_stage_ended_is_refused(model, cwd):
  """The next stage would read the weights of the ended stage as those of another model."""
  shutil.copytree(model, cwd / 'model')
  one_stage = tiny.run_config(str(cwd / 'model'), train=dict(steps=1))
  config = dict(one_stage, stages=['first', 'second'], first={}, second={})
  stages.run(config, cwd / 'run')
  shutil.rmtree(cwd / 'run/checkpoints/second')
  (cwd / 'run/summary.json').unlink()
  edit_config(cwd / 'model', rms_norm_eps=1e-3)
  assert 'config.model.path of first: has norm_eps 0.001' in input_error(config, cwd / 'run')


@pytest.mark.parametrize(
  'change',
  [
    dict(save=dict(every=1)),
    dict(log=dict(every=3)),
    dict(eval=dict(every=2)),
    dict(rewards=dict(workers=1)),
    dict(train=dict(steps=4)),
  ],
  ids=lambda change: '.'.join(change),
)
def test_resume_with_a_config_that_does_not_change_the_training_goes_on(change, finished_run, tmp_path):
  config, workdir = finished_run
  shutil.copytree(workdir, tmp_path / 'run')
  changed = tiny.merged(tiny.merged(config, dict(train=dict(steps=3))), change)
  stages.run(changed, tmp_path / 'run')
  for section, values in change.items():
    before = json.loads((workdir / 'config.json').read_text())[section]
    after = json.loads((tmp_path / 'run/config.json').read_text())[section]
    assert after == before | values


def test_config_can_be_corrected_before_its_stage_saves(model, cwd):
  """A stage that has saved nothing does not fix its config; a stage that has saved does."""
  config = tiny.run_config(model, train=dict(steps=1))
  workdir = cwd / 'run'
  input_error(tiny.merged(config, dict(data=dict(path='nothing.jsonl'))), workdir)
  workdir.mkdir(exist_ok=True)
  (workdir / 'metrics.jsonl').write_text('{"stage": "dpo", "split": "train", "step": 1, "loss": 9.0}\n')
  assert 'loss/dpo' not in stages.run(config, workdir)  # the row is of a method that was given up before it saved
  # A second stage that failed may change; the first, which is saved, may not.
  rl = tiny.grpo_config(
    model,
    stages=('sft', 'online'),
    reward='./rewards.py:raises',
    train=dict(steps=1),
    sft=dict(algorithm='sft', reward='', train=dict(row_length=64), rollout=dict(prompts=8, group_size=8)),
    online=dict(algorithm='grpo'),
    rewards=dict(workers=1),
  )
  line = input_error(rl, workdir)
  assert 'raised KeyError' in line
  fixed = tiny.merged(rl, dict(reward='./rewards.py:fine'))
  assert stages.run(fixed, workdir)['steps/online'] == 1
  line = input_error(tiny.merged(fixed, dict(sft=dict(seed=3))), workdir)
  assert 'config.seed of sft' in line


# The launcher, in a process of its own


def launch(cwd, *arguments):
  """Runs the launcher where JAX has no device; returns its exit code, stdout and stderr."""
  process = subprocess.run(
    [sys.executable, '-m', 'launch.train', *arguments],
    cwd=cwd,
    text=True,
    env={**os.environ, 'JAX_PLATFORMS': 'none_at_all', 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    timeout=120,
  )
  return process.returncode, process.stdout, process.stderr


CONFIG = '--config=config.py', '--workdir=run'
AFTER_OPENING = ('data', 'model', 'algorithm', 'mesh')  # cases found wrong after the run has printed its first line
# name of a case: (arguments, what stderr must contain)
LAUNCHES = {
  'unknown key': ((*CONFIG, '--config.trian.steps=3'), 'trian'),
  'ill-typed': ((*CONFIG, '--config.train.steps=many'), 'many'),
  'value': ((*CONFIG, '--config.optim.lr=nan'), 'config.optim.lr: nan is not a finite number'),
  'data': ((*CONFIG, '--config.data.path=trian.jsonl'), 'trian.jsonl: no such file; did you mean train.jsonl'),
  'model': ((*CONFIG, '--config.model.path=./mdel'), './mdel does not exist'),
  'algorithm': ((*CONFIG, '--config.algorithm=spt'), "there is no 'spt'"),
  'mesh': ((*CONFIG, '--config.mesh.train=model=8'), 'config.mesh.train'),
  'config file': (('--config=cnfig.py', '--workdir=run'), 'cnfig.py'),
  'flag': ((*CONFIG, '--wrokdir=x'), 'wrokdir'),
  'no workdir': (CONFIG[:1], 'workdir'),
  'word': ((*CONFIG, 'steps=3'), "'steps=3' is no flag"),
  'syntax': (('--config=syntax.py', '--workdir=run'), 'syntax.py'),
  'config that exits': (('--config=exits.py', '--workdir=run'), 'exits.py:2: the config file ends the process'),
  'config that recurses': (('--config=recurses.py', '--workdir=run'), 'recurses.py:2: RecursionError'),
  'workdir of no name': ((CONFIG[0], '--workdir='), '--workdir: is empty'),
  'workdir that is a file': ((CONFIG[0], '--workdir=train.jsonl'), 'train.jsonl is a file, and a run needs a folder'),
  'workdir below a file': ((CONFIG[0], '--workdir=train.jsonl/run'), 'train.jsonl is a file'),
  'workdir with a long name': ((CONFIG[0], '--workdir=' + 'a' * 300), 'File name too long'),
  'process of no cluster': ((*CONFIG, '--process_id=1'), '--process_id does nothing without --coordinator'),
  'config that raises': (('--config=raises.py', '--workdir=run'), 'raises.py:5: Wrong: no such split'),
}


@pytest.mark.parametrize('case', LAUNCHES)
def test_launcher_refuses_bad_flags_and_configs_with_exit_code_2(case, model, cwd):
  tiny.config_file(cwd / 'config.py', tiny.run_config(model))
  (cwd / 'syntax.py').write_text('def get_config(:\n  return {}\n')
  (cwd / 'exits.py').write_text('def get_config():\n  raise SystemExit(0)\n')
  (cwd / 'recurses.py').write_text('def get_config():\n  return get_config()\n')
  (cwd / 'raises.py').write_text(
    'class Wrong(Exception):\n  "Of a config."\n\ndef get_config():\n  raise Wrong("no such split")\n'
  )
  arguments, expected = LAUNCHES[case]
  code, out, err = launch(cwd, *arguments)
  assert code == 2, err
  assert re.fullmatch(r'jaxpost \d.*, seed 0, workdir run\n' if case in AFTER_OPENING else '', out), out
  assert re.fullmatch('jaxpost: .*\n', err), err
  assert expected in err
  assert not (cwd / 'run').exists()


@pytest.mark.parametrize(
  'link, target', [('checkpoints', 'checkpoints'), ('checkpoints/sft', 'sft'), ('checkpoints', 'none')]
)
def test_checkpoints_behind_a_broken_link_are_refused(link, target, tmp_path):
  """Such a run used to train to its end, and then could save nothing."""
  path = tmp_path / link
  path.parent.mkdir(exist_ok=True)
  path.symlink_to(target)
  with pytest.raises(InputError, match=f'{path}: is a link that leads nowhere'):
    object_store.check_workdir(str(tmp_path))


def test_folder_whose_path_is_taken_is_one_line(tmp_path):
  (tmp_path / 'timeline').symlink_to('timeline')
  with pytest.raises(InputError, match='timeline: File exists; name another path'), object_store.explained():
    (tmp_path / 'timeline').mkdir(exist_ok=True)


def test_write_to_a_path_that_is_a_folder_is_one_line(tmp_path):
  """etils raises this error without an errno and a path."""
  folder = tmp_path / 'folder'
  folder.mkdir()
  with pytest.raises(InputError, match=f'{folder} is a directory; name another path'), object_store.explained():
    object_store.write(folder, b'x')
  assert [*tmp_path.rglob('*')] == [folder]  # no draft is left


@pytest.mark.parametrize('name', ['config.json', 'summary.json', 'metrics.jsonl', 'plan.json'])
@pytest.mark.parametrize('text', [b'', b'{', b'[1]', b'[' * 5000, b'\xff\xfe', b'{"stages": 3}\n{}\n', b'null'])
def test_damaged_file_of_a_run_is_named_or_made_anew(name, text, finished_run, tmp_path, caplog):
  """The error is one line that names the file; a file on which nothing depends is made anew."""
  config, workdir = finished_run
  shutil.copytree(workdir, tmp_path / 'run')
  for has_checksums in (True, False):
    (tmp_path / 'run' / name).write_bytes(text)
    if not has_checksums:
      (tmp_path / 'run/checksums.json').unlink()  # as in the folder of an older run
      if name in ('metrics.jsonl', 'plan.json') or name == 'summary.json' and text == b'{"stages": 3}\n{}\n':
        continue  # without checksums these files are believed, or a finished run does not read them
    try:
      stages.run(config, tmp_path / 'run')
    except InputError as error:
      assert name in str(error) and '\n' not in str(error)
    else:
      assert name != 'config.json'  # on which the run depends


@pytest.mark.parametrize('error', [*errors.KNOWN, OSError], ids=lambda kind: kind.__name__)
def test_known_errors_are_one_line_with_their_exit_code(error, capsys):
  """A full disk is recognized by the errno of an OSError, too."""

  def main(argv):
    raise error(errno.ENOSPC, 'No space left on device', 'x/y') if error is OSError else error('what, where')

  with pytest.raises(SystemExit) as exit_info:
    exits.run(main, ['train'])
  assert exit_info.value.code == (5 if error is OSError else error.exit_code)
  err = capsys.readouterr().err
  assert err.startswith('jaxpost: ') and err.count('\n') == 1
  assert {2, 3, 4, 5, 42, 1} == {kind.exit_code for kind in errors.KNOWN}


def test_out_of_memory_error_of_xla_is_one_line_that_names_a_field(capsys):
  """The error of XLA itself names neither a program nor a field."""

  def main(argv):
    jax.block_until_ready(jax.jit(lambda: jnp.ones((1 << 42,)) + argv.index('train') + 1)())

  with pytest.raises(SystemExit) as exit_info:
    exits.run(main, ['train'])
  err = capsys.readouterr().err
  assert exit_info.value.code == 2 and err.count('\n') == 1
  assert re.match('jaxpost: RESOURCE_EXHAUSTED: .*config.train.micro_batch_size', err), err


@pytest.mark.parametrize('codes, worst', [([0, 4], 4), ([5, 42], 5), ([2, 5], 2), ([0, 42], 42), ([42, 1], 1)])
def test_worst_exit_code_of_processes(codes, worst):
  assert exits.worst(codes) == worst


def test_run_with_closed_standard_streams_writes_no_output_into_its_files(tmp_path):
  """Otherwise a file of the run would get the descriptor of stdout, and with it what is printed."""
  script = """
import os, subprocess, sys
from launch import exits

def main(argv):
  with open(sys.argv[1], 'w') as file:
    os.write(1, b'of the runtime')
    print('a line')
    subprocess.run(['sh', '-c', 'echo of a child'], check=True)
    file.write(f'{file.fileno() > 2} {sys.stdout.isatty()}')

exits.run(main, ['x'])
"""
  command = [sys.executable, '-c', script, str(tmp_path / 'file')]
  process = subprocess.run(['sh', '-c', 'exec "$0" "$@" <&- >&- 2>&-', *command], env=children.environment(), cwd=ROOT)
  assert process.returncode == 0 and (tmp_path / 'file').read_text() == 'True False'


def test_deleted_working_directory_is_one_line(tmp_path):
  script = (
    f'mkdir {tmp_path}/x; cd {tmp_path}/x; rmdir {tmp_path}/x; {sys.executable} -m launch.train --config=a --workdir=b'
  )
  process = subprocess.run(script, shell=True, env=children.environment(), capture_output=True, text=True)
  assert process.returncode == 2 and process.stderr.count('\n') == 1 and 'has been deleted' in process.stderr


def test_full_disk_is_exit_code_5_and_the_run_resumes_with_room(model, tmp_path):
  """With room on the disk, the same command goes on to the last step."""
  config = tiny.run_config(model, train=dict(steps=40), save=dict(every=1, keep=30))
  file = tiny.config_file(tmp_path / 'config.py', config)
  (tmp_path / 'disk').mkdir()
  run = f'{sys.executable} -m launch.train --config={file} --workdir={tmp_path}/disk/run'
  script = f"""
mount -t tmpfs -o size=1m none {tmp_path}/disk || exit 99
{run}; code=$?
mount -o remount,size=100m {tmp_path}/disk
{run} > {tmp_path}/out || exit 98
exit $code
"""
  try:
    process = subprocess.run(
      ['unshare', '-rm', 'sh', '-c', script], cwd=ROOT, env=children.environment(), capture_output=True, text=True
    )
  except FileNotFoundError:
    pytest.skip('there is no unshare, which makes the small disk')
  if process.returncode == 99 or 'unshare' in process.stderr:
    pytest.skip('this machine lets nobody mount the small disk')
  assert process.returncode == 5, (process.stdout, process.stderr)
  assert 'Traceback' not in process.stderr
  (line,) = [line for line in process.stderr.splitlines() if line.startswith('jaxpost: ')]
  assert re.fullmatch('jaxpost: .*/run/.*: no room on the disk.*run the same command again', line), process.stderr
  assert json.loads((tmp_path / 'out').read_text().splitlines()[-1])['steps/sft'] == 40
