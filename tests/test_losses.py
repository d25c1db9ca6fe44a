"""Losses against figures of other systems, and by hand.

tests/golden/losses.json says where its figures come from.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost.losses import advantages
from jaxpost.losses import policy_gradient

GOLDEN = json.loads((pathlib.Path(__file__).parent / 'golden' / 'losses.json')
                    .read_text())
INPUTS = {k: np.array(v, np.float32) for k, v in GOLDEN['inputs'].items()}
CASES = GOLDEN['cases']
close = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize('case, options', [
    ('verl/grpo_std/score', {}),
    ('trlformula/grpo_adv_group/score2', dict(eps=1e-4)),
    ('verl/dr_grpo/score2', dict(scale=False)),
])
def test_group_relative(case, options):
  rewards = INPUTS[case.rpartition('/')[2]].reshape(2, 4)
  ours = advantages.group_relative(
      rewards, np.ones((2, 4), bool), **options)
  close(ours.ravel(), CASES[case])


@pytest.mark.parametrize('case, weights', [
    ('verl/ppo_clip0.2_dual3/token-mean', lambda m: m / m.sum()),
    ('trl/grpo_loss_grpo_eps0.2', lambda m: m / m.sum(1)[:, None] / len(m)),
    ('trl/grpo_loss_dr_grpo_eps0.2', lambda m: m / m.size),
])
def test_clipped_surrogate(case, weights):
  """Who averages how is a matter of the batch's weights alone."""
  weights = weights(INPUTS['mask'])
  gains = INPUTS['adv_grpo_score2']

  def loss(new):
    values, *_ = policy_gradient.clipped_surrogate(
        new, INPUTS['old'], gains, 0.2, 0.2)
    return jnp.sum(values * weights)

  value, gradient = jax.value_and_grad(loss)(jnp.asarray(INPUTS['new']))
  golden = CASES[case]
  close(value, golden['loss'])
  if 'grad' in golden:
    close(gradient, golden['grad'])


def test_k3():
  """TRL's dapo loss with beta 0.04: surrogate and KL, mean over tokens."""
  mask = INPUTS['mask']

  def loss(new):
    values, *_ = policy_gradient.clipped_surrogate(
        new, INPUTS['old'], INPUTS['adv_grpo_score2'], 0.2, 0.2)
    values += 0.04 * policy_gradient.kl_k3(new, INPUTS['ref'])
    return jnp.sum(values * mask) / mask.sum()

  golden = CASES['trl/grpo_dapo_beta0.04_k3']
  value, gradient = jax.value_and_grad(loss)(jnp.asarray(INPUTS['new']))
  close(value, golden['loss'])
  close(gradient, golden['grad'])


def test_groups_that_teach_nothing_get_zero():
  """Equal rewards, a single valid sample, none; masked samples get 0."""
  nan = np.nan
  rewards = np.array([[2, 2, 2], [1, nan, nan], [nan] * 3, [0, nan, 1]])
  valid = np.isfinite(rewards)
  ours = advantages.group_relative(rewards, valid)
  assert not ours[:3].any()
  close(ours[3], [-np.sqrt(0.5), 0, np.sqrt(0.5)])
  np.testing.assert_array_equal(
      advantages.uniform(rewards, valid), [True, True, False, False])


def test_clip_is_reported_where_it_removes_the_gradient():
  new = jnp.log(jnp.array([[0.5, 0.5, 1.5, 1.5]]))
  gains = jnp.array([[1.0, -1.0, 1.0, -1.0]])
  *_, low, high = policy_gradient.clipped_surrogate(
      new, jnp.zeros((1, 4)), gains, 0.2, 0.2)
  np.testing.assert_array_equal(low, [[0, 1, 0, 0]])
  np.testing.assert_array_equal(high, [[0, 0, 1, 0]])
  gradient = jax.grad(lambda x: policy_gradient.clipped_surrogate(
      x, jnp.zeros((1, 4)), gains, 0.2, 0.2)[0].sum())(new)
  np.testing.assert_array_equal(gradient[0] != 0, [1, 0, 0, 1])
