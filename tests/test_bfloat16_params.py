"""With model.param_dtype=bfloat16, gradients and moments are float32, and stochastic rounding keeps small updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.models import layers
from jaxpost.programs import noise
from jaxpost.programs import train as programs
from jaxpost.types import Batch

UPDATES = 24


def test_stochastic_rounding_is_unbiased():
  low, high = (np.float32(x) for x in (1.0, 1.0078125))  # neighbors in bfloat16
  for sign in (1, -1):
    for fraction in (0.1, 0.5, 0.93):
      x = jnp.full(40_000, sign * (low + fraction * (high - low)), jnp.float32)
      rounded = np.asarray(noise.round_stochastically(x, jax.random.key(1)), np.float32) * sign
      assert set(rounded.tolist()) == {low, high}
      error = np.sqrt(fraction * (1 - fraction) / len(rounded))
      assert abs((rounded == high).mean() - fraction) < 4 * error


def test_values_that_bfloat16_can_hold_are_not_changed():
  x = jnp.asarray([0.0, -1.5, 3e38, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16)
  for seed in range(20):
    rounded = noise.round_stochastically(x.astype(jnp.float32), jax.random.key(seed))
    np.testing.assert_array_equal(np.asarray(rounded, np.float32), np.asarray(x, np.float32))


def test_gradients_of_micro_batches_are_summed_in_float32():
  """The sum is 1 + 512 * 2^-9; in bfloat16 each small term would be rounded away."""
  factors = np.full((513, 1, 1), 2.0**-9, np.float32)
  factors[0] = 1
  ids = jnp.ones((513, 1, 1), jnp.int32)
  batch = Batch(ids, ids, ids, jnp.asarray(factors))

  def loss(params, micro):
    return (params['x'] * micro.loss_weights.astype(jnp.bfloat16)).sum().astype(jnp.float32), {}

  _, grads = jax.jit(lambda p: programs.accumulate(loss, p, batch))({'x': jnp.ones((), jnp.bfloat16)})
  assert grads['x'].dtype == jnp.float32 and float(grads['x']) == 2.0


def test_gradients_of_a_frequent_token_are_summed_in_float32():
  """The sum is 8,192 * 2^-12; in bfloat16 it would stop at 2^-4, where a term is half of the last digit."""
  tokens = jnp.full((2, 4096), 3)
  table = jnp.zeros((8, 4), jnp.bfloat16)

  def loss(table):
    return 2.0**-12 * jnp.sum(layers.embed(table, tokens, 'bfloat16', lambda x, *axes: x).astype(jnp.float32))

  grad = jax.jit(jax.grad(loss))(table)
  assert grad.dtype == table.dtype
  np.testing.assert_array_equal(np.asarray(grad, np.float32)[:, 0], [0, 0, 0, 2, 0, 0, 0, 0])


@pytest.fixture(scope='module')
def policies_and_updates(tmp_path_factory):
  """{dtype: (policy, change of each weight)} after updates that are small beside the weights."""
  folder = tiny.folder(tmp_path_factory.mktemp('model') / 'nano')
  changes = {}
  for dtype in ('float32', 'bfloat16'):
    optim = dict(lr=1e-5, warmup_steps=0, schedule='constant')
    config = tiny.merged(tiny.run_config(folder, algorithm='sft'), dict(model=dict(param_dtype=dtype), optim=optim))
    policy, stream = jaxpost.policy_and_stream(config)
    before = jax.tree.map(lambda x: np.asarray(x, np.float32), policy.state.params)
    batch = next(stream).updates[0].batch
    for _ in range(UPDATES):
      policy.update(batch)
    after = policy.state.params
    changes[dtype] = policy, jax.tree.map(lambda x, y: np.asarray(x, np.float32) - y, after, before)
  return changes


@pytest.mark.long
def test_moments_are_float32(policies_and_updates):
  state = policies_and_updates['bfloat16'][0].state
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
  assert {x.dtype for x in jax.tree.leaves(state.opt_state) if x.ndim} == {jnp.dtype(jnp.float32)}


@pytest.mark.long
def test_bfloat16_weights_move_as_far_as_float32_weights(policies_and_updates):
  """Compares the change along the direction of the float32 change; rounding to nearest would lose most of it."""
  changes = {dtype: jax.tree.leaves(change) for dtype, (_, change) in policies_and_updates.items()}
  exact, actual = (np.concatenate([x.ravel() for x in changes[dtype]]) for dtype in ('float32', 'bfloat16'))
  assert np.abs(exact).max() > 1e-4
  assert actual @ exact / (exact @ exact) == pytest.approx(1, abs=0.05)
