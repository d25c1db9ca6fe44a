"""Surrogate losses and KL estimators for policy gradients.

All arguments and results are per token, [B, T] float32 (B rows, T tokens), and not reduced: the weights of the batch
make a mean over tokens or sequences of them. r = pi / pi_old, with log r clamped to [-20, 20].

A surrogate is elementwise in tokens, so that it may be called on chunks of tokens, or couples the tokens of a sequence
by `reduce_sequence`, see `Surrogate`. `LOSSES` has the surrogates by name (most are in surrogates.py), and `KL` the
estimators. To add one, write the function and enter it there and in the choices of `rl.loss` or `rl.kl_estimator`
(stage/schema_rl.py).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpost.losses.reduce import MAX_LOG_RATIO, by_name, same_shape, sequence_mean, sequence_total

# [B, T] -> [B, T]: the mean or the sum over the trained tokens of each sequence, broadcast to all of its tokens.
ReduceSequence = Callable[[jax.Array], jax.Array]
LossAndMetrics = tuple[jax.Array, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class SurrogateOptions:
  """Options of the surrogates; each surrogate reads some of them.

  Attributes:
    clip_low, clip_high: r is clipped to [1 - clip_low, 1 + clip_high]; usual values are 0.2 and 0.2 (PPO), 0.2 and
      0.28 (DAPO), 3e-4 and 4e-4 (GSPO). For 'geo_mean' they bound log r, for 'dppo_tv' and 'dppo_kl' a divergence; for
      'cispo', 1 and 4 are the one-sided bound r <= 5.
    dual_clip: c > 1 bounds the loss of tokens of negative advantage by -c A; 0 is off.
    tau_pos, tau_neg: temperatures of 'sapo' for positive and other advantages.
    dro_beta: weight of the squared log r of 'dro'.
  """

  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float = 0.0
  tau_pos: float = 1.0
  tau_neg: float = 1.05
  dro_beta: float = 0.1


def importance_ratio(logprobs: jax.Array, old_logprobs: jax.Array) -> jax.Array:
  """Returns r = pi / pi_old, differentiable in pi where |log r| <= 20."""
  return jnp.exp(jnp.clip(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clip(
  logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, options: SurrogateOptions
) -> LossAndMetrics:
  """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): the clipped surrogate.

  PPO (arXiv:1707.06347), eq. 7; asymmetric clip as in DAPO (arXiv:2503.14476), eq. 8. With dual_clip = c > 1, at most
  -c A where A < 0 (arXiv:1912.09729).
  """
  check_shapes(logprobs, old_logprobs, advantages)
  return clip_ratio(importance_ratio(logprobs, old_logprobs), advantages, options)


def reinforce(
  logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, options: SurrogateOptions
) -> LossAndMetrics:
  """-A log pi (Williams 1992): the policy gradient itself, unclipped."""
  del options
  check_shapes(logprobs, old_logprobs, advantages)
  return -advantages * logprobs, {'ratio': importance_ratio(logprobs, old_logprobs)}


@dataclasses.dataclass(frozen=True)
class Surrogate:
  """An entry of `LOSSES`.

  Attributes:
    fn: (logprobs, old_logprobs, advantages, options) -> (loss [B, T], {metric: [B, T]}); a fifth argument,
      `reduce_sequence`, if `per_sequence` is not None.
    reads: fields of `SurrogateOptions` that it reads.
    sets: {field of config.rl: default value with this loss}.
    reads_old: whether the loss depends on the log-probs of the old policy.
    per_sequence: `reduce.sequence_mean` or `sequence_total`, which `reduce_sequence` computes; None if a token's loss
      depends only on that token.
  """

  fn: Callable[..., LossAndMetrics]
  reads: tuple[str, ...] = ('clip_low', 'clip_high')
  sets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reads_old: bool = True
  per_sequence: Callable[..., jax.Array] | None = None


LOSSES: dict[str, Surrogate] = {
  'clip': Surrogate(clip, reads=('clip_low', 'clip_high', 'dual_clip')),
  'reinforce': Surrogate(reinforce, reads=(), reads_old=False),
  'cispo': Surrogate(by_name('surrogates:cispo'), sets=dict(clip_low=1.0, clip_high=4.0)),
  'sapo': Surrogate(by_name('surrogates:sapo'), reads=('tau_pos', 'tau_neg'), sets=dict(aggregate='sequence')),
  'gspo': Surrogate(
    by_name('surrogates:gspo'),
    reads=('clip_low', 'clip_high', 'dual_clip'),
    sets=dict(aggregate='sequence', clip_low=3e-4, clip_high=4e-4),
    per_sequence=sequence_mean,
  ),
  'geo_mean': Surrogate(
    by_name('surrogates:geo_mean'),
    sets=dict(aggregate='sequence', clip_low=0.4, clip_high=0.4),
    per_sequence=sequence_mean,
  ),
  'vespo': Surrogate(
    by_name('surrogates:vespo'), reads=(), sets=dict(old_policy='sampler'), per_sequence=sequence_total
  ),
  'dro': Surrogate(by_name('surrogates:dro'), reads=('dro_beta',), sets=dict(old_policy='sampler')),
  'dppo_tv': Surrogate(by_name('surrogates:dppo_tv'), sets=dict(clip_low=0.15, clip_high=0.15, old_policy='sampler')),
  'dppo_kl': Surrogate(by_name('surrogates:dppo_kl'), sets=dict(clip_low=0.05, clip_high=0.05, old_policy='sampler')),
}


expert = by_name('surrogates:expert')
off_policy_kept = by_name('surrogates:off_policy_kept')


def check_shapes(logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array) -> None:
  """Raises ValueError unless the arrays have one shape."""
  same_shape('logprobs, old_logprobs, advantages [B, T]', None, logprobs, old_logprobs, advantages)


def clip_ratio(ratio: jax.Array, advantages: jax.Array, options: SurrogateOptions) -> LossAndMetrics:
  """PPO's clipped surrogate of a ratio; the metrics count tokens without gradient."""
  if options.dual_clip and options.dual_clip <= 1:
    raise ValueError(f'dual_clip {options.dual_clip}: must be more than 1, or 0 for off')
  clipped = jnp.clip(ratio, 1 - options.clip_low, 1 + options.clip_high)
  loss = -jnp.minimum(ratio * advantages, clipped * advantages)
  low = (ratio < 1 - options.clip_low) & (advantages < 0)
  high = (ratio > 1 + options.clip_high) & (advantages > 0)
  metrics = clip_metrics(ratio, low, high)
  if options.dual_clip:
    bound = jnp.where(advantages < 0, -options.dual_clip * advantages, jnp.inf)
    loss = jnp.minimum(loss, bound)
    dual_clipped = (advantages < 0) & (ratio > options.dual_clip)
    metrics['clip_ratio/dual_mean'] = dual_clipped.astype(ratio.dtype)
  return loss, metrics


def clip_metrics(ratio: jax.Array, low: jax.Array, high: jax.Array) -> dict[str, jax.Array]:
  """Returns the metrics of a ratio; `low` and `high` are the tokens that are clipped at a bound."""
  return {
    'ratio': ratio,
    'clip_ratio/low_mean': low.astype(ratio.dtype),
    'clip_ratio/high_mean': high.astype(ratio.dtype),
  }


KLEstimator = Callable[[jax.Array, jax.Array], jax.Array]  # (logprobs, ref_logprobs) -> [B, T]


def kl_k1(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """d = log pi - log ref: unbiased, of either sign, with a gradient whose mean is zero.

  k1, k2 and k3 are from Schulman, "Approximating KL divergence" (2020). As a term of the loss k1 has no effect on
  average; use it in the reward.
  """
  same_shape('logprobs, ref_logprobs [B, T]', None, logprobs, ref_logprobs)
  return logprobs - ref_logprobs


def kl_k2(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """d^2 / 2: biased, but its gradient is that of the KL divergence."""
  return kl_k1(logprobs, ref_logprobs) ** 2 / 2


def kl_k3(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """exp(-d) - 1 + d, d clamped to [-20, 20]: unbiased, never negative. Also GRPO (arXiv:2402.03300), eq. 4."""
  d = jnp.clip(kl_k1(logprobs, ref_logprobs), -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return jnp.expm1(-d) + d


def kl_absolute(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """|d|: biased, never negative."""
  d = kl_k1(logprobs, ref_logprobs)
  return jnp.where(d == 0, 0.0, jnp.abs(d))  # no gradient where there is no divergence


def straight_through(estimator: KLEstimator) -> KLEstimator:
  """Returns an estimator with the value of `estimator` and the gradient of k2 (arXiv:2506.09477)."""

  def with_gradient_of_k2(logprobs, ref_logprobs):
    k2 = kl_k2(logprobs, ref_logprobs)
    return k2 + jax.lax.stop_gradient(-k2) + jax.lax.stop_gradient(estimator(logprobs, ref_logprobs))

  return with_gradient_of_k2


KL: dict[str, KLEstimator] = {
  'k1': kl_k1,
  'k2': kl_k2,
  'k3': kl_k3,
  'abs': kl_absolute,
  'k1+': straight_through(kl_k1),
  'k3+': straight_through(kl_k3),
}
