"""Surrogate losses beyond PPO's clip and REINFORCE; `policy_gradient.LOSSES` names them.

Arguments and results are those of the surrogates in policy_gradient.py: per token, [B, T] float32 (B rows, T tokens),
r = pi / pi_old; sg is the stop of gradients. `reduce_sequence` is the mean over a sequence, in `vespo` the sum.
"""

import jax
import jax.numpy as jnp

from jaxpost.losses import policy_gradient
from jaxpost.losses.reduce import MAX_LOG_RATIO, same_shape

_MAX_LOG_SEQUENCE_RATIO = 10.0
_MAX_WEIGHT = 20.0  # of a token in DPPO
_VESPO_K, _VESPO_LAMBDA = (2.0, 3.0), (3.0, 2.0)  # parameters of VESPO's weights for A >= 0 and for A < 0


def sequence_ratio(mean_log_ratio: jax.Array, logprobs: jax.Array) -> jax.Array:
  """s_it = sg(s_i) pi / sg(pi), s_i = exp(mean over the tokens of log r).

  GSPO-token (arXiv:2507.18071), eq. 14: the value is the ratio of the sequence,
  and the gradient is that of the token. log s_it is clamped to at most 10.

  Args:
    mean_log_ratio: [B, T], the same for all tokens of a sequence.
  """
  same_shape('mean_log_ratio, logprobs [B, T]', None, mean_log_ratio, logprobs)
  stop = jax.lax.stop_gradient
  return jnp.exp(jnp.minimum(stop(mean_log_ratio) + logprobs - stop(logprobs), _MAX_LOG_SEQUENCE_RATIO))


def gspo(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  options: policy_gradient.SurrogateOptions,
  reduce_sequence: policy_gradient.ReduceSequence,
) -> policy_gradient.LossAndMetrics:
  """PPO's clipped surrogate with the ratio of the sequence: GSPO (arXiv:2507.18071), eq. 13.

  The paper's objective is that with weights which first average over each sequence.
  """
  policy_gradient.check_shapes(logprobs, old_logprobs, advantages)
  mean = reduce_sequence(jax.lax.stop_gradient(logprobs - old_logprobs))
  return policy_gradient.clip_ratio(sequence_ratio(mean, logprobs), advantages, options)


def geo_mean(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  options: policy_gradient.SurrogateOptions,
  reduce_sequence: policy_gradient.ReduceSequence,
) -> policy_gradient.LossAndMetrics:
  """-A exp(mean over the tokens of the clipped log r).

  GMPO (arXiv:2507.20673): log r is clipped to [-clip_low, clip_high] where that lowers the objective. The gradient is
  the paper's with weights which first average over each sequence. `reduce_sequence` is called on the clipped log r.
  """
  policy_gradient.check_shapes(logprobs, old_logprobs, advantages)
  log_ratio = logprobs - old_logprobs
  low = (log_ratio < -options.clip_low) & (advantages < 0)
  high = (log_ratio > options.clip_high) & (advantages > 0)
  clipped = jnp.where(low, -options.clip_low, jnp.where(high, options.clip_high, log_ratio))
  mean = reduce_sequence(jax.lax.stop_gradient(clipped))
  ratio = sequence_ratio(mean, clipped)
  return -advantages * ratio, policy_gradient.clip_metrics(ratio, low, high)


def cispo(
  logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, options: policy_gradient.SurrogateOptions
) -> policy_gradient.LossAndMetrics:
  """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi.

  CISPO (MiniMax-M1, arXiv:2506.13585): no token loses its gradient. verl bounds r on both sides. TRL and the paper only
  have an upper bound, which is 1 + clip_high; clip_low = 1 means that there is no lower bound.

  The clip ratios count tokens whose weight is clipped, for any advantage;
  'cispo_clip_ratio' counts those of positive advantage, as in TRL.
  """
  policy_gradient.check_shapes(logprobs, old_logprobs, advantages)
  ratio = policy_gradient.importance_ratio(logprobs, old_logprobs)
  weight = jnp.clip(ratio, 1 - options.clip_low, 1 + options.clip_high)
  loss = -jax.lax.stop_gradient(weight) * advantages * logprobs
  metrics = policy_gradient.clip_metrics(ratio, ratio < 1 - options.clip_low, ratio > 1 + options.clip_high)
  metrics['cispo_clip_ratio'] = metrics['clip_ratio/high_mean'] * (advantages > 0)
  return loss, metrics


def sapo(
  logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, options: policy_gradient.SurrogateOptions
) -> policy_gradient.LossAndMetrics:
  """-(4 / tau) sigmoid(tau (r - 1)) A, where tau depends on the sign of A: a soft clip, SAPO (arXiv:2511.20347)."""
  policy_gradient.check_shapes(logprobs, old_logprobs, advantages)
  ratio = policy_gradient.importance_ratio(logprobs, old_logprobs)
  tau = jnp.where(advantages > 0, options.tau_pos, options.tau_neg)
  gate = 4 / tau * jax.nn.sigmoid(tau * (ratio - 1))
  return -gate * advantages, {'ratio': ratio}


def vespo(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  options: policy_gradient.SurrogateOptions,
  reduce_sequence: policy_gradient.ReduceSequence,
) -> policy_gradient.LossAndMetrics:
  """-sg(phi(W)) A log pi, phi(W) = W^k exp(lambda (1 - W)), W the product of r over the sequence.

  VESPO (arXiv:2602.10693): a soft weight instead of a clip, 1 where policy and sampler agree.
  k and lambda are 2 and 3 where A >= 0, 3 and 2 elsewhere, as in the paper and TRL. pi_old is the
  sampler's policy, so W corrects for old samples and for differences between the programs.
  """
  del options
  policy_gradient.check_shapes(logprobs, old_logprobs, advantages)
  log_w = reduce_sequence(jax.lax.stop_gradient(logprobs - old_logprobs))
  log_w = jnp.clip(log_w, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  ratio = jnp.exp(log_w)  # W
  k, lam = jnp.where(advantages >= 0, *_VESPO_K), jnp.where(advantages >= 0, *_VESPO_LAMBDA)
  weight = jnp.exp(k * log_w + lam * (1 - ratio))
  return -weight * advantages * logprobs, {'ratio': ratio, 'vespo/phi': weight}


def dro(
  logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, options: policy_gradient.SurrogateOptions
) -> policy_gradient.LossAndMetrics:
  """-A log pi + beta / 2 (log r)^2: the policy gradient, held to the sampler by a quadratic penalty.

  DRO (arXiv:2405.19107) fits V + beta log(pi / ref) of a whole completion, with a learned value V, to its reward; the
  derivative is that of this loss with A = reward - V. Here, as in verl and Tinker, each token has a penalty, the
  reference is the policy that sampled, and the baseline of the group is used instead of V.
  """
  policy_gradient.check_shapes(logprobs, old_logprobs, advantages)
  penalty = options.dro_beta / 2 * (logprobs - old_logprobs) ** 2
  ratio = policy_gradient.importance_ratio(logprobs, old_logprobs)
  return penalty - advantages * logprobs, {'ratio': ratio}


def dppo_tv(
  logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, options: policy_gradient.SurrogateOptions
) -> policy_gradient.LossAndMetrics:
  """-sg(min(r, 20)) A log pi, without tokens whose probability has changed too much: DPPO with total variation.

  DPPO (arXiv:2602.04879): a token of positive advantage is left out if pi - pi_old
  exceeds clip_high, one of negative advantage if pi_old - pi exceeds clip_low. The
  old policy is the one that sampled; 0.15 is verl's value of both bounds.
  """
  policy_gradient.check_shapes(logprobs, old_logprobs, advantages)
  change = jnp.exp(logprobs) - jnp.exp(old_logprobs)
  return _masked(logprobs, old_logprobs, advantages, low=change < -options.clip_low, high=change > options.clip_high)


def dppo_kl(
  logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, options: policy_gradient.SurrogateOptions
) -> policy_gradient.LossAndMetrics:
  """`dppo_tv` with another measure of change: the KL divergence of the events "this token" and "another one".

  It is KL(pi_old || pi). A token is left out only if pi has changed in the direction
  of its advantage; verl's bound is 0.05.
  """
  policy_gradient.check_shapes(logprobs, old_logprobs, advantages)
  old = jnp.exp(old_logprobs)
  eps = 1e-8  # keeps the logarithm finite at probability 1
  log_ratio_of_others = jnp.log((1 - old + eps) / (1 - jnp.exp(logprobs) + eps))
  divergence = old * (old_logprobs - logprobs) + (1 - old) * log_ratio_of_others
  low = (divergence > options.clip_low) & (logprobs < old_logprobs)
  high = (divergence > options.clip_high) & (logprobs > old_logprobs)
  return _masked(logprobs, old_logprobs, advantages, low=low, high=high)


def _masked(
  logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, *, low: jax.Array, high: jax.Array
) -> policy_gradient.LossAndMetrics:
  """DPPO's loss; `low` and `high` [B, T] mask the tokens whose probability fell or rose too far."""
  ratio = policy_gradient.importance_ratio(logprobs, old_logprobs)
  low &= advantages < 0
  high &= advantages > 0
  weight = jax.lax.stop_gradient(jnp.minimum(ratio, _MAX_WEIGHT) * ~(low | high))
  return -weight * advantages * logprobs, policy_gradient.clip_metrics(ratio, low, high)


def expert(logprobs: jax.Array, advantages: jax.Array, gamma: float) -> jax.Array:
  """-A p / (p + gamma), with p the policy's probability of a token that an expert wrote, [B, T].

  LUFFY (arXiv:2504.14945): the unclipped ratio p / 1, as if the expert were certain, shaped by
  f(x) = x / (x + gamma). The gradient of f(p) is gamma p / (p + gamma)^2 times that of log p, so rare
  tokens have more weight than with p itself.
  """
  return -advantages * jax.nn.sigmoid(logprobs - jnp.log(gamma))


def off_policy_kept(
  logprobs: jax.Array,
  sampler_logprobs: jax.Array,
  advantages: jax.Array,
  threshold: float,
  reduce_sequence: policy_gradient.ReduceSequence,
) -> jax.Array:
  """Returns a mask [B, T]: 0 for tokens of negative advantage in sequences that are far off policy, else 1.

  Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556): a sequence is far off policy if its mean of log
  (sampler / pi) exceeds the threshold, pi being the current policy.
  """
  drift = reduce_sequence(jax.lax.stop_gradient(sampler_logprobs - logprobs))
  return 1.0 - ((drift > threshold) & (advantages < 0))
