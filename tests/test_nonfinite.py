"""A step that is not finite changes no weight, is counted and explained; state that is not finite is never saved."""

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
from jaxpost.monitor import nonfinite
from jaxpost.roles import Trainable
from jaxpost.stage import optim
from jaxpost.storage.manifest import finished_steps
from jaxpost.types import Item, Outputs

# An algorithm whose cross entropy is NaN on tokens with a negative log-likelihood above LIMIT.
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


def poisoned(model, folder, limit, **overrides):
  """Returns a config of the algorithm `POISON` with this limit."""
  folder.mkdir(exist_ok=True)  # a folder for each limit, since a module is loaded only once
  file = folder / 'poison.py'
  file.write_text(POISON.replace('LIMIT', repr(limit)))
  return tiny.run_config(model, **tiny.merged(dict(algorithm=str(file), train=dict(steps=30, batch_size=4)), overrides))


def first_step(config):
  """Returns the policy, and the Item of the first step."""
  policy, stream = jaxpost.policy_and_stream(config)
  try:
    return policy, next(stream)
  finally:
    stream.close()


def limit_and_worst_row(model, folder):
  """Returns (an nll that only one row of the first batch exceeds, that row)."""
  policy, item = first_step(poisoned(model, folder / 'never', 1e9))
  batch = item.updates[0][1]
  nll = np.where(np.asarray(batch.loss_weights) > 0, -np.asarray(policy.score(batch).logprobs), 0)
  worst = nll.max(axis=-1).reshape(-1)
  return float(np.sort(worst)[-2:].mean()), worst.argmax()


def test_metrics_leave_out_updates_without_trained_tokens():
  """Metrics of such an update are sums over no token, 0; a step whose updates are all such has only counts."""
  trained = {'ratio': 1.0, 'nll': 2.0, 'lr': 0.1, 'skipped_updates': 1.0, 'empty_updates': 0.0}
  empty = {'ratio': 0.0, 'nll': 0.0, 'lr': 0.1, 'skipped_updates': 0.0, 'empty_updates': 1.0}
  row = nonfinite.merge_metrics([('policy', trained), ('critic', trained), ('policy', empty), ('critic', empty)])
  means = {'ratio': 1.0, 'nll': 2.0, 'lr': 0.1}
  assert row == means | {f'critic/{k}': v for k, v in means.items()} | {'skipped_updates': 2, 'empty_updates': 2}
  assert nonfinite.merge_metrics([('policy', empty)] * 2) == {'skipped_updates': 0, 'empty_updates': 2}


def test_sampler_and_trainer_are_compared_in_the_first_update_that_trains_a_token():
  updates = [{'sampler_mismatch': x, 'ratio': x, 'empty_updates': float(not x)} for x in (0.0, 1.0, 2.0)]
  row = nonfinite.merge_metrics([('policy', metrics) for metrics in updates])
  assert row == {'sampler_mismatch': 1.0, 'ratio': 1.5, 'empty_updates': 1}


def test_nan_step_changes_no_state_and_names_rows_and_terms(nano, tmp_path):
  limit, row = limit_and_worst_row(nano, tmp_path)
  policy, item = first_step(poisoned(nano, tmp_path, limit))
  before = jax.tree.map(np.array, policy.state)
  figures = policy.update(item.updates[0][1])
  assert float(figures['skipped_updates']) == 1
  jax.tree.map(np.testing.assert_array_equal, before, policy.state)
  text = nonfinite.explain(item, [('policy', figures)], jaxpost.Roles(policy))
  terms = text.removeprefix('; not finite: ').split(', ')
  assert {'policy loss', 'policy trap', f'loss in rows {row}', f'trap in rows {row}'} <= set(terms)
  assert not [t for t in terms if 'nll' in t or 'logprobs' in t]


def test_explanation_handles_arrays_with_several_numbers_per_token():
  """The log-probs of the most likely tokens of a teacher are such an array."""
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


def test_the_run_stops_at_the_limit_and_saves_no_nan(nano, tmp_path):
  config = poisoned(nano, tmp_path, 0.5, optim=dict(max_skipped=3), save=dict(every=2))
  with pytest.raises(
    FloatingPointError, match=(r'about 3 steps up to 3.*not finite: policy .*trap in rows 0, 1, 2, 3')
  ):
    jaxpost.run(config, tmp_path / 'run', QUIET)
  rows = tiny.rows(tmp_path / 'run')
  assert [r['skipped_updates'] for r in rows] == [1, 1, 1]
  assert finished_steps(tmp_path / 'run' / 'checkpoints' / 'poison') == [2]
  policy, _ = first_step({**config, 'algorithm': 'sft', 'init_from': f'{tmp_path}/run@2'})
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(policy.params))


def test_skipped_steps_between_good_steps_count():
  """Every second step is bad: a count of bad steps in a row would never reach the limit."""
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
  progress, step = loop._Progress(stage), 0
  with pytest.raises(FloatingPointError, match='about 5 steps up to 9'):
    for step in range(1, 40):
      figures = {'skipped_updates': float(step % 2), 'empty_updates': 0.0}
      progress.pending = loop._PendingStep(
        step, Item([], {'tokens': 1}), [('policy', figures)], {'time/step': 1.0}, None
      )
      progress.log_pending()


def test_run_without_rewards_warns_that_updates_are_empty(nano, tmp_path):
  """The reward is always None: each row of metrics counts the empty update, and warnings explain it from step 1 on."""
  config = tiny.grpo_config(nano, reward=no_reward, train=dict(steps=11))
  summary = jaxpost.run(config, tmp_path, QUIET)
  assert {w['kind'] for w in summary['warnings']} <= {'start', 'ungraded', 'empty', 'clipped'}
  (warning,) = (w for w in summary['warnings'] if w['kind'] == 'empty')
  assert 'does the reward return None' in warning['text']
  (first,) = (w for w in summary['warnings'] if w['kind'] == 'ungraded')
  assert first['step'] == 1 and first['count'] == 11
  rows = tiny.rows(tmp_path)
  assert [r['empty_updates'] for r in rows] == [1] * 11
  assert not [r for r in rows if {'loss', 'ratio', 'grad_norm', 'sampler_mismatch'} & r.keys()]
  assert not summary.keys() & {'loss/grpo', 'sampler_mismatch/grpo'}


def no_reward(completions, **columns):
  del columns
  return [None] * len(completions)


def with_value(tree, name, value):
  """Returns the tree with `value` in one place of the first array of floats whose path contains `name`."""
  flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
  index = next(i for i, (path, x) in enumerate(flat) if name in jax.tree_util.keystr(path) and x.dtype.kind != 'i')
  leaves = [x for _, x in flat]
  leaves[index] = leaves[index].at[(0,) * leaves[index].ndim].set(value)
  return treedef.unflatten(leaves)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('name', ['mu', 'nu'])
def test_an_update_whose_new_state_is_not_finite_is_not_applied(nano, name, value):
  """The loss and the gradient are finite, and the state of the optimizer is not."""
  policy, item = first_step(tiny.run_config(nano, algorithm='sft'))
  policy.state = policy.state.replace(opt_state=with_value(policy.state.opt_state, name, value))
  before = jax.tree.map(np.array, policy.state)
  figures = policy.update(item.updates[0][1])
  assert float(figures['skipped_updates']) == 1 and np.isfinite(figures['loss']) and np.isfinite(figures['grad_norm'])
  jax.tree.map(np.testing.assert_array_equal, before, policy.state)


@pytest.mark.parametrize('name', ['adamw', 'muon'])  # muon has no trial step
def test_weights_that_would_overflow_are_not_written(nano, monkeypatch, name):
  monkeypatch.setattr(optim, 'make_optimizer', lambda *unused: optax.sgd(float('inf')))
  policy, item = first_step(tiny.run_config(nano, algorithm='sft', optim=dict(name=name)))
  before = jax.tree.map(np.array, policy.state)
  assert float(policy.update(item.updates[0][1])['skipped_updates']) == 1
  jax.tree.map(np.testing.assert_array_equal, before, policy.state)


def spoil_update(monkeypatch, number, spoil, only=lambda role: True):
  """Before update `number` of a role that `only` accepts, replaces the batch by spoil(role, batch)."""
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
def test_a_state_that_is_not_finite_is_never_saved(nano, tmp_path, monkeypatch, lora, part, name):
  """Each step is saved; the state turns NaN in memory after the second step."""

  def spoil(role, batch):
    role.state = role.state.replace(**{part: with_value(getattr(role.state, part), name, np.nan)})
    return batch

  spoil_update(monkeypatch, 3, spoil)
  config = tiny.run_config(nano, algorithm='sft', lora=lora, train=dict(steps=6), save=dict(every=1))
  with pytest.raises(FloatingPointError, match=f'sft: at step 3: not finite and not saved: policy/{part}/.*earlier'):
    jaxpost.run(config, tmp_path / 'run', QUIET)
  assert finished_steps(tmp_path / 'run/checkpoints/sft') == [2, 1]
  monkeypatch.undo()
  jaxpost.run(config, tmp_path / 'run', QUIET)  # goes on from step 2
  assert finished_steps(tmp_path / 'run/checkpoints/sft')[0] == 6


def sparse_model(folder):
  return tiny.folder(folder / 'sparse', family='qwen3_moe', experts=Experts(4, 2, 16))


SPOILED = {  # config, whether the critic is spoiled, part of the state, a name in the path of the array, value
  'critic': (dict(algorithm='ppo'), True, 'params', '', np.nan),
  'router': (dict(algorithm='sft'), False, 'params', 'router', np.inf),
  'weights in float16': (dict(algorithm='sft', model=dict(dtype='float16')), False, 'params', '', np.nan),
  'loss scale': (dict(algorithm='sft', model=dict(dtype='float16')), False, 'opt_state', 'scale', np.nan),
  'loss scale without end': (dict(algorithm='sft', model=dict(dtype='float16')), False, 'opt_state', 'scale', np.inf),
}


@pytest.mark.parametrize('what', SPOILED)
def test_critic_router_or_loss_scale_that_is_not_finite_is_never_saved(nano, tmp_path, monkeypatch, what):
  overrides, of_critic, part, name, value = SPOILED[what]
  make = tiny.grpo_config if overrides['algorithm'] == 'ppo' else tiny.run_config
  folder = sparse_model(tmp_path) if 'router' in what else nano
  config = tiny.merged(make(folder, train=dict(steps=5), save=dict(every=1)), overrides)

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
def test_step_with_nan_from_the_teacher_is_skipped(nano, tmp_path, monkeypatch, top_k):
  config = tiny.run_config(
    nano,
    algorithm='distill',
    distill=dict(teachers=(nano,), top_k=top_k),
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
  rows = tiny.rows(tmp_path / 'run')
  assert [r['skipped_updates'] for r in rows] == [0, 0, 1, 0]
  assert finished_steps(tmp_path / 'run/checkpoints/distill') == [4, 3, 2, 1]
  for step in 3, 4:
    policy, _ = first_step({**config, 'algorithm': 'sft', 'distill': {}, 'init_from': f'{tmp_path}/run@{step}'})
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(policy.params))


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_weights_that_are_not_finite_are_refused_by_name(nano, tmp_path, dtype, value):
  shutil.copytree(nano, tmp_path / 'bad')
  file = tmp_path / 'bad/model.safetensors'
  tensors = {k: v.astype(dtype) for k, v in safetensors.numpy.load_file(file).items()}
  name = 'model.layers.0.mlp.up_proj.weight'
  tensors[name][-1, -1] = value
  safetensors.numpy.save_file(tensors, file)
  with pytest.raises(InputError, match=rf'bad/model.safetensors: tensor {name}: holds NaN or infinity'):
    first_step(tiny.run_config(str(tmp_path / 'bad'), algorithm='sft'))
  tensors[name][-1, -1] = -np.finfo(np.float16).max  # the largest finite value is accepted
  safetensors.numpy.save_file(tensors, file)
  first_step(tiny.run_config(str(tmp_path / 'bad'), algorithm='sft'))


# An algorithm that makes one array NaN on the second of two hosts before the third update.
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
SPOIL_STATE = (
  'role.state = role.state.replace(params={**role.state.params, "embed": spoiled(role.state.params["embed"])})'
)
SPOIL_BATCH = 'batch = batch.replace(loss_weights=spoiled(batch.loss_weights))'


@pytest.mark.parametrize('what', ['batch', 'state'])
def test_two_hosts_agree_where_one_is_not_finite(tmp_path, what):
  """Both hosts do the same: they skip the step, or end before they save it."""
  (tmp_path / 'faulty.py').write_text(ON_ONE_HOST.replace('SPOIL', SPOIL_STATE if what == 'state' else SPOIL_BATCH))
  overrides = dict(algorithm=f'{tmp_path}/faulty.py', train=dict(steps=5, batch_size=4), save=dict(every=1, keep=9))
  config = tiny.run_config(tiny.folder(tmp_path / 'model'), **overrides)
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
  done = subprocess.run(command, cwd=children.CLONE, env=children.environment(), text=True, capture_output=True)
  assert done.returncode == (4 if what == 'state' else 0), done.stderr[-3000:]
  steps = finished_steps(tmp_path / 'run/checkpoints/faulty')
  assert steps == ([2, 1] if what == 'state' else [5, 4, 3, 2, 1])
  for step in steps:
    policy, _ = first_step({**config, 'algorithm': 'sft', 'init_from': f'{tmp_path}/run@{step}'})
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(policy.params))
