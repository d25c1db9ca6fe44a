"""Surrogate losses and KL estimators for policy gradients.

All arguments and results are per token, [B, T] float32, unreduced and
elementwise in tokens, so that they may be called on chunks of them: the
weights of the batch decide token-mean, sequence-mean or constant length.

r = pi / pi_old throughout, its logarithm held within +-20. `LOSSES` holds the
surrogates by name, `KL` the estimators.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpost.losses.reduce import same_shape

_MAX_LOG_RATIO = 20.0  # exp(20) is as good as infinite and stays finite
_MAX_LOG_SEQUENCE_RATIO = 10.0
_ARGUMENTS = 'logprobs, old_logprobs, advantages [B, T]'


@dataclasses.dataclass(frozen=True)
class SurrogateOptions:
  """What the surrogates read; each reads its own part.

  Attributes:
    clip_low, clip_high: r is held within [1 - clip_low, 1 + clip_high]; the
      usual values are 0.2 and 0.2 (PPO) or 0.28 (DAPO), 3e-4 and 4e-4 (GSPO).
      For 'geo_mean' they bound log r; for 'cispo' low 1 and high 4 is the
      one-sided bound r <= 5.
    dual_clip: c > 1 bounds the loss of tokens of negative advantage by -c A;
      0 is off.
    tau_pos, tau_neg: SAPO's temperatures for advantages above 0 and others.
  """

  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float = 0.0
  tau_pos: float = 1.0
  tau_neg: float = 1.05


def importance_ratio(logprobs, old_logprobs):
  """pi / pi_old, differentiable in pi where its logarithm is within +-20."""
  return jnp.exp(jnp.clip(logprobs - old_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def sequence_ratio(mean_log_ratio, logprobs):
  """s_it = sg(s_i) pi / sg(pi), s_i = exp(mean over the tokens of log r).

  GSPO-token (arXiv:2507.18071), eq. 14: the value is the sequence's ratio,
  the gradient the token's own. log s_i is held to at most 10.

  Args:
    mean_log_ratio: [B, T], the same for all tokens of a sequence.
  """
  same_shape('mean_log_ratio, logprobs [B, T]', None, mean_log_ratio, logprobs)
  hold = jax.lax.stop_gradient
  return jnp.exp(jnp.minimum(hold(mean_log_ratio) + logprobs - hold(logprobs), _MAX_LOG_SEQUENCE_RATIO))


def clipped_surrogate(logprobs, old_logprobs, advantages, clip_low: float, clip_high: float, dual_clip: float = 0.0):
  """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old.

  Schulman et al. 2017 (PPO), eq. 7; asymmetric clip as in DAPO
  (arXiv:2503.14476), eq. 8. With dual_clip = c > 1, at most -c A where A < 0
  (arXiv:1912.09729).

  Returns:
    (loss, ratio, is_clipped_low, is_clipped_high), the last two float 0 or 1:
    tokens whose gradient the clip removes. `is_dual_clipped` gives those that
    the dual clip takes.
  """
  same_shape(_ARGUMENTS, None, logprobs, old_logprobs, advantages)
  ratio = importance_ratio(logprobs, old_logprobs)
  return _clip(ratio, advantages, clip_low, clip_high, dual_clip)


def is_dual_clipped(ratio, advantages, dual_clip: float):
  """[B, T] float 0 or 1: tokens whose gradient the dual clip removes."""
  taken = (advantages < 0) & (ratio > dual_clip)
  return (taken & (dual_clip > 0)).astype(ratio.dtype)


def _clip(ratio, advantages, clip_low, clip_high, dual_clip):
  """As `clipped_surrogate`, of a ratio."""
  if dual_clip and dual_clip <= 1:
    raise ValueError(f'dual_clip {dual_clip}: want more than 1, or 0 for off')
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  loss = -jnp.minimum(ratio * advantages, clipped * advantages)
  if dual_clip:
    bound = jnp.where(advantages < 0, -dual_clip * advantages, jnp.inf)
    loss = jnp.minimum(loss, bound)
  low = (ratio < 1 - clip_low) & (advantages < 0)
  high = (ratio > 1 + clip_high) & (advantages > 0)
  return loss, ratio, low.astype(loss.dtype), high.astype(loss.dtype)


def _clip_loss(ratio, advantages, options):
  loss, _, low, high = _clip(ratio, advantages, options.clip_low, options.clip_high, options.dual_clip)
  metrics = _metrics(ratio, low, high)
  if options.dual_clip:
    metrics['clip_ratio/dual_mean'] = is_dual_clipped(ratio, advantages, options.dual_clip)
  return loss, metrics


def _metrics(ratio, low, high):
  return {
    'ratio': ratio,
    'clip_ratio/low_mean': low.astype(ratio.dtype),
    'clip_ratio/high_mean': high.astype(ratio.dtype),
  }


def clip(logprobs, old_logprobs, advantages, options, sequence_mean=None):
  """`clipped_surrogate`, as one of LOSSES."""
  del sequence_mean
  same_shape(_ARGUMENTS, None, logprobs, old_logprobs, advantages)
  return _clip_loss(importance_ratio(logprobs, old_logprobs), advantages, options)


def gspo(logprobs, old_logprobs, advantages, options, sequence_mean):
  """PPO's clip of the sequence's ratio: GSPO (arXiv:2507.18071), eq. 13.

  For the paper's objective the weights average over each sequence first.
  """
  same_shape(_ARGUMENTS, None, logprobs, old_logprobs, advantages)
  mean = sequence_mean(jax.lax.stop_gradient(logprobs - old_logprobs))
  return _clip_loss(sequence_ratio(mean, logprobs), advantages, options)


def geo_mean(logprobs, old_logprobs, advantages, options, sequence_mean):
  """-A exp(mean over the tokens of the clipped log r).

  GMPO (arXiv:2507.20673): log r is held within [-clip_low, clip_high],
  and the clip applies where it lowers the objective. The gradient is a
  token's own if the weights average over each sequence first.
  `sequence_mean` is called on the clipped log r.
  """
  same_shape(_ARGUMENTS, None, logprobs, old_logprobs, advantages)
  log_ratio = logprobs - old_logprobs
  low = (log_ratio < -options.clip_low) & (advantages < 0)
  high = (log_ratio > options.clip_high) & (advantages > 0)
  clipped = jnp.where(low, -options.clip_low, jnp.where(high, options.clip_high, log_ratio))
  mean = sequence_mean(jax.lax.stop_gradient(clipped))
  ratio = sequence_ratio(mean, clipped)
  return -advantages * ratio, _metrics(ratio, low, high)


def cispo(logprobs, old_logprobs, advantages, clip_low: float, clip_high: float):
  """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi.

  CISPO (MiniMax-M1, arXiv:2506.13585): no token loses its gradient.
  verl bounds r on both sides. TRL and the paper bound it above only, by an
  absolute value: clip_low = 1 leaves the lower side free, and
  clip_high = bound - 1.

  Returns:
    (loss, ratio, is_clipped_low, is_clipped_high), float 0 or 1: tokens whose
    weight is bounded, whatever their advantage.
  """
  same_shape(_ARGUMENTS, None, logprobs, old_logprobs, advantages)
  ratio = importance_ratio(logprobs, old_logprobs)
  weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  loss = -jax.lax.stop_gradient(weight) * advantages * logprobs
  low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
  return loss, ratio, low.astype(loss.dtype), high.astype(loss.dtype)


def _cispo(logprobs, old_logprobs, advantages, options, sequence_mean=None):
  del sequence_mean
  loss, ratio, low, high = cispo(logprobs, old_logprobs, advantages, options.clip_low, options.clip_high)
  metrics = _metrics(ratio, low, high)
  metrics['cispo_clip_ratio'] = high * (advantages > 0)
  return loss, metrics


def sapo(logprobs, old_logprobs, advantages, tau_pos: float = 1.0, tau_neg: float = 1.05):
  """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft clip.

  SAPO (arXiv:2511.20347).

  Returns:
    (loss, ratio).
  """
  same_shape(_ARGUMENTS, None, logprobs, old_logprobs, advantages)
  ratio = importance_ratio(logprobs, old_logprobs)
  tau = jnp.where(advantages > 0, tau_pos, tau_neg)
  gate = 4 / tau * jax.nn.sigmoid(tau * (ratio - 1))
  return -gate * advantages, ratio


def off_policy_kept(logprobs, behaviour_logprobs, advantages, threshold, sequence_mean):
  """1, but 0 on negative advantages in sequences far off policy.

  Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556): far is a mean
  of log (sampler / pi) over the sequence above the threshold, pi being the
  policy as it is now.
  """
  drift = sequence_mean(jax.lax.stop_gradient(behaviour_logprobs - logprobs))
  return 1.0 - ((drift > threshold) & (advantages < 0))


def _sapo(logprobs, old_logprobs, advantages, options, sequence_mean=None):
  del sequence_mean
  loss, ratio = sapo(logprobs, old_logprobs, advantages, options.tau_pos, options.tau_neg)
  return loss, {'ratio': ratio}


def reinforce(logprobs, advantages):
  """-A log pi (Williams 1992): the policy gradient itself, unclipped."""
  same_shape('logprobs, advantages [B, T]', None, logprobs, advantages)
  return -advantages * logprobs


def _reinforce(logprobs, old_logprobs, advantages, options, sequence_mean=None):
  del options, sequence_mean
  same_shape(_ARGUMENTS, None, logprobs, old_logprobs, advantages)
  return reinforce(logprobs, advantages), {'ratio': importance_ratio(logprobs, old_logprobs)}


# fn(logprobs, old_logprobs, advantages, options: SurrogateOptions,
#    sequence_mean) -> (loss [B, T], {metric: [B, T]}).
# sequence_mean: [B, T] -> [B, T], the mean over the trained tokens of each
# sequence, for all of its tokens. Only SEQUENCE_LOSSES need it. On chunks of
# tokens it returns means that were computed before.
LOSSES: dict[str, Callable] = {
  'clip': clip,
  'cispo': _cispo,
  'sapo': _sapo,
  'gspo': gspo,
  'geo_mean': geo_mean,
  'reinforce': _reinforce,
}
SEQUENCE_LOSSES = ('gspo', 'geo_mean')


def kl_k1(logprobs, ref_logprobs):
  """d = log pi - log ref: unbiased, of either sign, and of zero mean gradient.

  This and the next two: Schulman, "Approximating KL divergence" (2020). In a
  loss k1 teaches nothing; it belongs in the reward.
  """
  same_shape('logprobs, ref_logprobs [B, T]', None, logprobs, ref_logprobs)
  return logprobs - ref_logprobs


def kl_k2(logprobs, ref_logprobs):
  """d^2 / 2: biased, but its gradient is that of the KL divergence."""
  return kl_k1(logprobs, ref_logprobs) ** 2 / 2


def kl_k3(logprobs, ref_logprobs):
  """exp(-d) - 1 + d with d = log pi - log ref: unbiased, never negative.

  Also GRPO (arXiv:2402.03300), eq. 4. d is held within +-20.
  """
  d = jnp.clip(kl_k1(logprobs, ref_logprobs), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  return jnp.expm1(-d) + d


def kl_abs(logprobs, ref_logprobs):
  """|d|."""
  return jnp.abs(kl_k1(logprobs, ref_logprobs))


def _straight_through(estimator):
  """The value of an estimator with the gradient of k2 (arXiv:2506.09477)."""

  def estimate(logprobs, ref_logprobs):
    k2 = kl_k2(logprobs, ref_logprobs)
    value = estimator(logprobs, ref_logprobs)
    return k2 + jax.lax.stop_gradient(-k2) + jax.lax.stop_gradient(value)

  return estimate


kl_k1_straight_through = _straight_through(kl_k1)
kl_k3_straight_through = _straight_through(kl_k3)

# fn(logprobs, ref_logprobs) -> [B, T]
KL: dict[str, Callable] = {
  'k1': kl_k1,
  'k2': kl_k2,
  'k3': kl_k3,
  'abs': kl_abs,
  'k1+': kl_k1_straight_through,
  'k3+': kl_k3_straight_through,
}


def mismatch(logprobs, sampler_logprobs):
  """exp |log pi - log pi_sampler|: 1 when sampler and trainer agree."""
  return jnp.exp(jnp.abs(jax.lax.stop_gradient(logprobs) - sampler_logprobs))
