"""KL estimators besides k1, k2 and k3; `policy_gradient.KL` names them.

Arguments and results are per token, [B, T] float32.
"""

import jax
import jax.numpy as jnp

from jaxpost.losses import policy_gradient


def absolute(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """|d| with d = log pi - log ref: biased, never negative."""
  d = policy_gradient.kl_k1(logprobs, ref_logprobs)
  return jnp.where(d == 0, 0.0, jnp.abs(d))  # no gradient where there is no divergence


def k1_straight_through(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """The value of k1 with the gradient of k2 (arXiv:2506.09477)."""
  return _straight_through(policy_gradient.kl_k1, logprobs, ref_logprobs)


def k3_straight_through(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """The value of k3 with the gradient of k2 (arXiv:2506.09477)."""
  return _straight_through(policy_gradient.kl_k3, logprobs, ref_logprobs)


def _straight_through(
  estimator: policy_gradient.KLEstimator, logprobs: jax.Array, ref_logprobs: jax.Array
) -> jax.Array:
  k2 = policy_gradient.kl_k2(logprobs, ref_logprobs)
  value = estimator(logprobs, ref_logprobs)
  return k2 + jax.lax.stop_gradient(-k2) + jax.lax.stop_gradient(value)
