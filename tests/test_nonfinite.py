"""A step that is not finite changes nothing, is counted and explained."""

import shutil
import subprocess
import sys
import types

import children
import jax
import numpy as np
import optax
import pytest
import rich.console
import safetensors.numpy
import tiny

import jaxpost
from jaxpost import loop
from jaxpost.errors import InputError
from jaxpost.models.config import Experts
from jaxpost.monitor import metrics, nonfinite
from jaxpost.roles import Trainable
from jaxpost.stage import optim
from jaxpost.storage.manifest import finished_steps
from jaxpost.types import Item, Outputs

# Cross entropy that is NaN on tokens the model finds unlikely.
POISON = """
import jax.numpy as jnp

from jaxpost import Algorithm, Objective
from jaxpost.algorithms import sft


def objective(config):
  def loss(outputs, arrays):
    nll = -outputs.logprobs
    return jnp.where(nll > LIMIT, jnp.nan, nll), {
        'nll': nll, 'trap': jnp.where(nll > LIMIT, jnp.inf, 0.0)}

  return Objective(loss, reads=('entropy',))


ALGORITHM = Algorithm(objective, render=sft.render_text)
"""
QUIET = rich.console.Console(quiet=True)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


def poisoned(model, folder, limit, **over):
  folder.mkdir(exist_ok=True)  # one each: modules are loaded once
  file = folder / 'poison.py'
  file.write_text(POISON.replace('LIMIT', repr(limit)))
  return tiny.run_config(model, **tiny.merged(dict(algorithm=str(file), train=dict(steps=30, batch_size=4)), over))


def first(config):
  """The policy, and the Item of the first step."""
  policy, stream = jaxpost.policy_and_stream(config)
  try:
    return policy, next(stream)
  finally:
    stream.close()


def middle(model, folder):
  """(nll that only the worst row of the first batch exceeds, that row)."""
  policy, item = first(poisoned(model, folder / 'never', 1e9))
  batch = item.updates[0][1]
  nll = np.where(np.asarray(batch.loss_weights) > 0, -np.asarray(policy.score(batch).logprobs), 0)
  worst = nll.max(axis=-1).reshape(-1)
  return float(np.sort(worst)[-2:].mean()), worst.argmax()


def test_an_update_without_a_trained_token_is_in_no_mean():
  """Its metrics are sums over no token, 0; only a step of such updates has them."""
  trained = {'ratio': 1.0, 'nll': 2.0, 'lr': 0.1, 'skipped_updates': 1.0, 'empty_updates': 0.0}
  empty = {'ratio': 0.0, 'nll': 0.0, 'lr': 0.1, 'skipped_updates': 0.0, 'empty_updates': 1.0}
  row = nonfinite.merge_metrics([('policy', trained), ('critic', trained), ('policy', empty), ('critic', empty)])
  means = {'ratio': 1.0, 'nll': 2.0, 'lr': 0.1}
  assert row == means | {f'critic/{k}': v for k, v in means.items()} | {'skipped_updates': 2, 'empty_updates': 2}
  assert nonfinite.merge_metrics([('policy', empty)] * 2) == empty | {'empty_updates': 2}


def test_a_bad_step_changes_nothing_and_names_rows_and_terms(model, tmp_path):
  limit, row = middle(model, tmp_path)
  policy, item = first(poisoned(model, tmp_path, limit))
  before = jax.tree.map(np.array, policy.state)
  found = policy.update(item.updates[0][1])
  assert float(found['skipped_updates']) == 1
  jax.tree.map(np.testing.assert_array_equal, before, policy.state)
  text = nonfinite.explain(item, [('policy', found)], jaxpost.Roles(policy))
  terms = text.removeprefix('; not finite: ').split(', ')
  assert {'policy loss', 'policy trap', f'loss in rows {row}', f'trap in rows {row}'} <= set(terms)
  assert not [t for t in terms if 'nll' in t or 'logprobs' in t]


def test_an_array_may_have_several_numbers_a_token():
  """As the log-probs of a teacher's likeliest tokens have."""
  top = np.zeros((1, 3, 4, 2), np.float32)  # [M, B, T, k]
  top[0, 2, 1, 1] = np.nan
  values = np.full((1, 3, 4), np.inf)
  weights = np.zeros((1, 3, 4))
  weights[0, 1] = 1
  batch = types.SimpleNamespace(loss_weights=weights, arrays={'top': top})
  role = types.SimpleNamespace(
    score=lambda batch: Outputs(values=values), objective=types.SimpleNamespace(coupled=False, divergence=True)
  )
  item = Item([('policy', batch)], {})
  text = nonfinite.explain(item, [('policy', {'loss': np.nan})], types.SimpleNamespace(trainable={'policy': role}))
  assert text == '; not finite: policy loss, values in rows 1, top in rows 2'


def test_the_run_stops_at_the_limit_and_saves_no_nan(model, tmp_path):
  config = poisoned(model, tmp_path, 0.5, optim=dict(max_skipped=3), save=dict(every=2))
  with pytest.raises(
    FloatingPointError, match=(r'about 3 steps up to 3.*not finite: policy .*trap in rows 0, 1, 2, 3')
  ):
    jaxpost.run(config, tmp_path / 'run', QUIET)
  rows = [r for r in metrics.read_rows(tmp_path / 'run' / 'metrics.jsonl') if r['split'] == 'train']
  assert [r['skipped_updates'] for r in rows] == [1, 1, 1]
  assert finished_steps(tmp_path / 'run' / 'checkpoints' / 'poison') == [2]
  policy, _ = first({**config, 'algorithm': 'sft', 'init_from': f'{tmp_path}/run@2'})
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(policy.params))


def test_bad_steps_between_good_ones_count():
  """Every second step is bad: a count of bad ones in a row never ends."""
  stage = types.SimpleNamespace(
    name='x',
    max_skipped=4,
    peak_flops=0,
    samples_every=9,
    steps=99,
    host_health=None,
    save_rollout=None,
    roles=None,
    memory_usage=dict,
    writer=types.SimpleNamespace(write=lambda *row: None),
  )
  run, last = loop._Progress(stage), 0
  with pytest.raises(FloatingPointError, match='about 5 steps up to 9'):
    for last in range(1, 40):
      bad = {'skipped_updates': float(last % 2), 'empty_updates': 0.0}
      run.pending = loop._PendingStep(last, Item([], {'tokens': 1}), [('policy', bad)], {'time/step': 1.0}, None)
      run.log_pending()


def test_a_run_that_trains_nothing_says_so(model, tmp_path):
  """A reward that is always None: counted in each row, said once."""
  config = tiny.grpo_config(model, reward=nothing, train=dict(steps=11))
  summary = jaxpost.run(config, tmp_path, QUIET)
  (warning,) = (w for w in summary['warnings'] if w['kind'] == 'empty')
  assert 'does the reward return None' in warning['text']
  rows = [r for r in metrics.read_rows(tmp_path / 'metrics.jsonl') if r['split'] == 'train']
  assert [r['empty_updates'] for r in rows] == [1] * 11


def nothing(completions, **columns):
  del columns
  return [None] * len(completions)


def with_value(tree, name, value):
  """The tree with `value` in one place of the first array of floats whose path holds `name`."""
  flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
  at = next(i for i, (path, x) in enumerate(flat) if name in jax.tree_util.keystr(path) and x.dtype.kind != 'i')
  leaves = [x for _, x in flat]
  leaves[at] = leaves[at].at[(0,) * leaves[at].ndim].set(value)
  return treedef.unflatten(leaves)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('name', ['mu', 'nu'])
def test_an_update_whose_new_state_is_not_finite_is_not_applied(model, name, value):
  """The loss and the gradient are finite."""
  policy, item = first(tiny.run_config(model, algorithm='sft'))
  policy.state = policy.state.replace(opt_state=with_value(policy.state.opt_state, name, value))
  before = jax.tree.map(np.array, policy.state)
  found = policy.update(item.updates[0][1])
  assert float(found['skipped_updates']) == 1 and np.isfinite(found['loss']) and np.isfinite(found['grad_norm'])
  jax.tree.map(np.testing.assert_array_equal, before, policy.state)


@pytest.mark.parametrize('name', ['adamw', 'muon'])  # muon without a trial step
def test_weights_that_would_overflow_are_not_written(model, monkeypatch, name):
  monkeypatch.setattr(optim, 'make_optimizer', lambda *unused: optax.sgd(float('inf')))
  policy, item = first(tiny.run_config(model, algorithm='sft', optim=dict(name=name)))
  before = jax.tree.map(np.array, policy.state)
  assert float(policy.update(item.updates[0][1])['skipped_updates']) == 1
  jax.tree.map(np.testing.assert_array_equal, before, policy.state)


def spoil_update(monkeypatch, number, spoil, only=lambda role: True):
  """Calls spoil(role, batch), which returns the batch, before an update of a role."""
  update, steps = Trainable.update, []

  def faulty(role, batch):
    if only(role):
      steps.append(1)
      if len(steps) == number:
        batch = spoil(role, batch)
    return update(role, batch)

  monkeypatch.setattr(Trainable, 'update', faulty)


@pytest.mark.parametrize('lora', [dict(), dict(rank=2)], ids=['all weights', 'adapters'])
@pytest.mark.parametrize('part, name', [('params', ''), ('opt_state', 'mu'), ('opt_state', 'nu')])
def test_a_state_that_is_not_finite_is_never_saved(model, tmp_path, monkeypatch, lora, part, name):
  """It went bad in memory after the second step; each step is saved."""

  def spoil(role, batch):
    role.state = role.state.replace(**{part: with_value(getattr(role.state, part), name, np.nan)})
    return batch

  spoil_update(monkeypatch, 3, spoil)
  config = tiny.run_config(model, algorithm='sft', lora=lora, train=dict(steps=6), save=dict(every=1))
  with pytest.raises(FloatingPointError, match=f'sft: at step 3: not finite and not saved: policy/{part}/.*earlier'):
    jaxpost.run(config, tmp_path / 'run', QUIET)
  assert finished_steps(tmp_path / 'run/checkpoints/sft') == [2, 1]
  monkeypatch.undo()
  jaxpost.run(config, tmp_path / 'run', QUIET)  # goes on from step 2
  assert finished_steps(tmp_path / 'run/checkpoints/sft')[0] == 6


def sparse_model(folder):
  return tiny.folder(folder / 'sparse', family='qwen3_moe', experts=Experts(4, 2, 16))


SPOILED = {  # config, whether it is the critic's, part of the state, a name in the path of the array, value
  'critic': (dict(algorithm='ppo'), True, 'params', '', np.nan),
  'router': (dict(algorithm='sft'), False, 'params', 'router', np.inf),
  'weights in float16': (dict(algorithm='sft', model=dict(dtype='float16')), False, 'params', '', np.nan),
  'loss scale': (dict(algorithm='sft', model=dict(dtype='float16')), False, 'opt_state', 'scale', np.nan),
  'loss scale without end': (dict(algorithm='sft', model=dict(dtype='float16')), False, 'opt_state', 'scale', np.inf),
}


@pytest.mark.parametrize('what', SPOILED)
def test_a_part_of_a_method_that_is_not_finite_is_never_saved(model, tmp_path, monkeypatch, what):
  over, of_critic, part, name, value = SPOILED[what]
  make = tiny.grpo_config if over['algorithm'] == 'ppo' else tiny.run_config
  folder = sparse_model(tmp_path) if 'router' in what else model
  config = tiny.merged(make(folder, train=dict(steps=5), save=dict(every=1)), over)

  def spoil(role, batch):
    role.state = role.state.replace(**{part: with_value(getattr(role.state, part), name, value)})
    return batch

  spoil_update(monkeypatch, 3, spoil, lambda role: (not role.model.head) == of_critic)
  role = 'critic' if of_critic else 'policy'
  with pytest.raises(FloatingPointError, match=f'at step 3: not finite and not saved: {role}/{part}.*earlier'):
    jaxpost.run(config, tmp_path / 'run', QUIET)
  (stage,) = (tmp_path / 'run/checkpoints').iterdir()
  assert finished_steps(stage) == [2, 1]
  monkeypatch.undo()
  jaxpost.run(config, tmp_path / 'run', QUIET)  # goes on from step 2
  assert finished_steps(stage)[0] == 5


@pytest.mark.parametrize('top_k', [0, 3])
def test_a_teacher_that_is_not_finite_teaches_nothing(model, tmp_path, monkeypatch, top_k):
  config = tiny.run_config(
    model,
    algorithm='distill',
    distill=dict(teachers=(model,), top_k=top_k),
    train=dict(steps=4),
    save=dict(every=1, keep=9),
  )

  def spoil(role, batch):
    if not top_k:
      return batch.replace(teacher_hidden=(batch.teacher_hidden[0].at[..., 0].set(np.nan),))
    name = 'teacher_0_logprobs'
    return batch.replace(arrays={**batch.arrays, name: batch.arrays[name] + np.nan})

  spoil_update(monkeypatch, 3, spoil)
  jaxpost.run(config, tmp_path / 'run', QUIET)
  rows = [r for r in metrics.read_rows(tmp_path / 'run/metrics.jsonl') if r['split'] == 'train']
  assert [r['skipped_updates'] for r in rows] == [0, 0, 1, 0]
  assert finished_steps(tmp_path / 'run/checkpoints/distill') == [4, 3, 2, 1]
  for step in 3, 4:
    policy, _ = first({**config, 'algorithm': 'sft', 'distill': {}, 'init_from': f'{tmp_path}/run@{step}'})
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(policy.params))


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_weights_that_are_not_finite_are_refused_by_name(model, tmp_path, dtype, value):
  shutil.copytree(model, tmp_path / 'bad')
  file = tmp_path / 'bad/model.safetensors'
  tensors = {k: v.astype(dtype) for k, v in safetensors.numpy.load_file(file).items()}
  name = 'model.layers.0.mlp.up_proj.weight'
  tensors[name][-1, -1] = value
  safetensors.numpy.save_file(tensors, file)
  with pytest.raises(InputError, match=rf'bad/model.safetensors: tensor {name}: holds NaN or infinity'):
    first(tiny.run_config(str(tmp_path / 'bad'), algorithm='sft'))
  tensors[name][-1, -1] = -np.finfo(np.float16).max  # the largest values are no infinity
  safetensors.numpy.save_file(tensors, file)
  first(tiny.run_config(str(tmp_path / 'bad'), algorithm='sft'))


# Spoils one array on the second of two hosts, before the third update.
ON_ONE_HOST = """
import jax, numpy as np
from jaxpost.algorithms.sft import ALGORITHM
from jaxpost.roles import Trainable

update, steps = Trainable.update, []

def spoiled(x):
  shards = [shard.data for shard in x.addressable_shards]
  if jax.process_index() == 1:
    shards[0] = jax.device_put(np.asarray(shards[0]) * np.nan, shards[0].sharding)
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

def faulty(role, batch):
  steps.append(1)
  if len(steps) == 3:
    SPOIL
  return update(role, batch)

Trainable.update = faulty
"""
STATE = 'role.state = role.state.replace(params={**role.state.params, "embed": spoiled(role.state.params["embed"])})'
BATCH = 'batch = batch.replace(loss_weights=spoiled(batch.loss_weights))'


@pytest.mark.parametrize('what', ['batch', 'state'])
def test_on_one_of_two_hosts(tmp_path, what):
  """Both do the same: they skip the step, or end before they save it."""
  (tmp_path / 'faulty.py').write_text(ON_ONE_HOST.replace('SPOIL', STATE if what == 'state' else BATCH))
  over = dict(algorithm=f'{tmp_path}/faulty.py', train=dict(steps=5, batch_size=4), save=dict(every=1, keep=9))
  config = tiny.run_config(tiny.folder(tmp_path / 'model'), **over)
  file = tiny.config_file(tmp_path / 'config.py', config)
  command = [
    sys.executable,
    '-m',
    'launch.local',
    '--processes=2',
    '--',
    f'--config={file}',
    f'--workdir={tmp_path}/run',
  ]
  ended = subprocess.run(command, cwd=children.CLONE, env=children.environment(), text=True, capture_output=True)
  assert ended.returncode == (4 if what == 'state' else 0), ended.stderr[-3000:]
  steps = finished_steps(tmp_path / 'run/checkpoints/faulty')
  assert steps == ([2, 1] if what == 'state' else [5, 4, 3, 2, 1])
  for step in steps:
    policy, _ = first({**config, 'algorithm': 'sft', 'init_from': f'{tmp_path}/run@{step}'})
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(policy.params))
