"""Tests of a reference model that follows the policy: averages and resets of TR-DPO, also after a resume."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
import tiny

import jaxpost
from jaxpost.errors import InputError
from jaxpost.monitor import metrics
from jaxpost.stage import algorithms, checks, moving_reference
from jaxpost.stage import config as config_lib


@pytest.mark.parametrize('every, mix', [(1, 0.6), (3, 1.0), (2, 0.25)])
def test_reference_is_the_average_of_tr_dpo(every, mix):
  """After each `every` updates, reference = mix policy + (1 - mix) reference. Between them, it stays the same."""
  optimizer = moving_reference.following(optax.sgd(0.1, momentum=0.9), every, mix)
  params = {'x': jnp.array([1.0, -2.0])}
  state = optimizer.init(params)
  reference = np.array([1.0, -2.0])
  for n in range(1, 8):
    updates, state = optimizer.update({'x': jnp.array([0.3, 0.1]) * n}, state, params)
    params = optax.apply_updates(params, updates)
    if n % every == 0:
      reference = mix * np.asarray(params['x'], np.float64) + (1 - mix) * reference
    np.testing.assert_allclose(state.reference['x'], reference, rtol=1e-6)


def test_updates_of_the_policy_do_not_depend_on_the_reference():
  plain, with_reference = optax.adamw(0.1), moving_reference.following(optax.adamw(0.1), 2, 0.5)
  params = {'x': jnp.array([1.0, -2.0])}
  states = plain.init(params), with_reference.init(params)
  for n in range(4):
    grads = {'x': jnp.array([0.3, 0.1]) * n}
    expected, plain_state = plain.update(grads, states[0], params)
    actual, state_with_reference = with_reference.update(grads, states[1], params)
    states = plain_state, state_with_reference
    np.testing.assert_array_equal(expected['x'], actual['x'])


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_reset_optimizer_restarts_moments_but_not_the_schedule(name):
  """After a reset, the moments are those of a new optimizer, and the learning rate continues to decay (ProRL)."""
  schedule = optax.linear_schedule(1.0, 0.0, 10)
  make = {'adamw': optax.adamw, 'muon': optax.contrib.muon}[name]
  optimizer = moving_reference.following(make(schedule), 3, 1.0, reset_optimizer=True)
  params = {'x': jnp.array([[1.0, -2.0], [0.5, 1.0]])}
  state = optimizer.init(params)

  def step(state, params, n):
    return optimizer.update({'x': jnp.array([[0.3, 0.1], [-0.2, 0.4]]) * n}, state, params)

  for n in (1, 2, 3):
    updates, state = step(state, params, n)
    params = optax.apply_updates(params, updates)
  updates, _ = step(state, params, 5)
  new_optimizer = make(lambda count: schedule(count + 3))
  expected, _ = new_optimizer.update(
    {'x': jnp.array([[0.3, 0.1], [-0.2, 0.4]]) * 5}, new_optimizer.init(params), params
  )
  np.testing.assert_allclose(updates['x'], expected['x'], rtol=1e-6)


def rows_of(folder, workdir, **over):
  config = tiny.run_config(folder, reference=dict(every=2), save=dict(every=3, export=False), **over)
  jaxpost.run(config, workdir, rich.console.Console(quiet=True))
  return {row['step']: row for row in metrics.read_rows(workdir / 'metrics.jsonl') if row['split'] == 'train'}


@pytest.mark.long
@pytest.mark.parametrize('rank', [0, 2])
def test_a_reset_makes_policy_and_reference_equal(nano, tmp_path, rank):
  """The loss of DPO is log 2 while they are equal. A resumed run continues with the reference of its checkpoint."""
  over = dict(algorithm='dpo', data=dict(path='generated:arithmetic_pairs:max=99,ops=+,size=40'), lora=dict(rank=rank))
  rows = rows_of(nano, tmp_path / 'whole', **over, train=dict(steps=6))
  equal = {step: abs(row['loss'] - np.log(2)) < 1e-5 for step, row in rows.items()}
  assert equal == {1: True, 2: False, 3: True, 4: False, 5: True, 6: False}
  rows_of(nano, tmp_path / 'parts', **over, train=dict(steps=3))
  resumed = rows_of(nano, tmp_path / 'parts', **over, train=dict(steps=6))
  assert resumed[4]['loss'] == rows[4]['loss'] and resumed[6]['loss'] == rows[6]['loss']


@pytest.mark.long
def test_reset_sets_the_kl_of_grpo_to_zero(nano, tmp_path):
  rollout = dict(prompts=4, group_size=4, max_prompt_length=32, max_new_tokens=8)
  over = dict(reward='regex_match?pattern=[aeiou]', rl=dict(kl_coef=0.1), rollout=rollout)
  rows = rows_of(nano, tmp_path, algorithm='grpo', **over, train=dict(steps=4, row_length=0))
  assert [rows[n]['kl'] < 1e-6 for n in (1, 2, 3, 4)] == [True, False, True, False]


@pytest.mark.parametrize(
  'algorithm, over, message',
  [
    ('grpo', {}, 'config.reference.every: grpo reads no reference model'),
    ('simpo', {}, 'config.reference.every: simpo reads no reference model'),
    ('opd', dict(rl=dict(reference='teacher')), 'config.reference.every: a reference from'),
    ('dpo', dict(preference=dict(precompute_ref=True)), 'config.preference.precompute_ref: the reference changes'),
    ('dpo', dict(mesh=dict(score='fsdp=-1')), 'config.mesh.score: '),
    ('grpo', dict(rl=dict(kl_coef=0.1), rollout=dict(offload=True)), 'config.rollout.offload: cannot offload'),
  ],
)
def test_moving_reference_with_incompatible_options_is_refused(algorithm, over, message):
  parsed = config_lib.parse(dict(algorithm=algorithm, reward='x', reference=dict(every=2), data=dict(path='x'), **over))
  method = algorithms.load_algorithm(algorithm)
  with pytest.raises(InputError, match=message):
    checks.check_config(config_lib.resolve(next(iter(parsed.values())), method.defaults), method)
