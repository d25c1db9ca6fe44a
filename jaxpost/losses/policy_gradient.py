"""Surrogate losses and KL estimators for policy gradients.

All arguments and results are per token, [B, T] float32, unreduced: the
weights of the batch decide token-mean, sequence-mean or constant length.
"""

import jax
import jax.numpy as jnp

_MAX_LOG_RATIO = 20.0  # exp(20) is as good as infinite and stays finite


def clipped_surrogate(logprobs, old_logprobs, advantages, clip_low: float,
                      clip_high: float):
  """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old.

  Schulman et al. 2017 (PPO), eq. 7; asymmetric clip as in DAPO
  (arXiv:2503.14476), eq. 8. No dual clip.

  Returns:
    (loss, ratio, is_clipped_low, is_clipped_high), the last two float 0 or 1:
    tokens whose gradient the clip removes.
  """
  log_ratio = jnp.clip(
      logprobs - old_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  ratio = jnp.exp(log_ratio)
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  loss = -jnp.minimum(ratio * advantages, clipped * advantages)
  low = (ratio < 1 - clip_low) & (advantages < 0)
  high = (ratio > 1 + clip_high) & (advantages > 0)
  return loss, ratio, low.astype(loss.dtype), high.astype(loss.dtype)


def kl_k3(logprobs, ref_logprobs):
  """exp(-d) - 1 + d with d = log pi - log ref: unbiased, never negative.

  Schulman, "Approximating KL divergence" (2020); GRPO (arXiv:2402.03300),
  eq. 4.
  """
  d = jnp.clip(logprobs - ref_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  return jnp.expm1(-d) + d


def mismatch(logprobs, sampler_logprobs):
  """exp |log pi - log pi_sampler|: 1 when sampler and trainer agree."""
  return jnp.exp(jnp.abs(jax.lax.stop_gradient(logprobs) - sampler_logprobs))
