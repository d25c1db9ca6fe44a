"""A step that is not finite changes nothing, is counted and explained."""

import types

import jax
import numpy as np
import pytest
import rich.console
import tiny

import jaxpost
from jaxpost import loop
from jaxpost.monitor import metrics, nonfinite
from jaxpost.storage.manifest import finished_steps
from jaxpost.types import Item

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


def test_a_bad_step_changes_nothing_and_names_rows_and_terms(model, tmp_path):
  limit, row = middle(model, tmp_path)
  policy, item = first(poisoned(model, tmp_path, limit))
  before = jax.tree.map(np.array, policy.state)
  found = policy.update(item.updates[0][1])
  assert float(found['skipped_updates']) == 1
  jax.tree.map(np.testing.assert_array_equal, before, policy.state)
  text = nonfinite.diagnosis(item, [('policy', found)], jaxpost.Roles(policy))
  terms = text.removeprefix('; not finite: ').split(', ')
  assert {'policy loss', 'policy trap', f'loss in rows {row}', f'trap in rows {row}'} <= set(terms)
  assert not [t for t in terms if 'nll' in t or 'logprobs' in t]


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
