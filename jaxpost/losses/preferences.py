"""Losses of preference pairs, and of single completions that are labelled.

Legend: P pairs; leading axes are free. c and r are the log-ratios of policy
to reference, summed over the tokens of the chosen and the rejected completion,
and d = c - r.

`LOSSES` holds the losses of pairs by name, each fn(pairs, options) -> [..., P].
To add one, write that function and name it there.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpost.errors import InputError
from jaxpost.losses.pairs import F_DIVERGENCES, MAX_EXPONENT, Pairs, PreferenceOptions, implicit_rewards, zero_padding
from jaxpost.losses.reduce import same_shape

_log_sigmoid, _sigmoid = jax.nn.log_sigmoid, jax.nn.sigmoid


def _scores(pairs, options):
  """(c, r) [..., P] after the f-divergence."""
  score, alpha = F_DIVERGENCES[options.f_divergence], options.f_alpha
  return (score(pairs.chosen - pairs.ref_chosen, alpha), score(pairs.rejected - pairs.ref_rejected, alpha))


def _margin(pairs, options):
  """beta d [..., P]."""
  chosen, rejected = _scores(pairs, options)
  return options.beta * (chosen - rejected)


def _means(chosen, rejected, pairs):
  return (chosen / jnp.maximum(pairs.chosen_length, 1), rejected / jnp.maximum(pairs.rejected_length, 1))


def _logistic(margin, options):
  """-log sigmoid(margin), with a share of the labels turned round."""
  eps = options.label_smoothing
  return -((1 - eps) * _log_sigmoid(margin) + eps * _log_sigmoid(-margin))


def sigmoid(pairs, options):
  """-log sigmoid(beta d): DPO (arXiv:2305.18290), eq. 7; smoothed, cDPO."""
  return _logistic(_margin(pairs, options), options)


def hinge(pairs, options):
  """max(0, 1 - beta d): SLiC (arXiv:2305.10425) on the implicit reward."""
  return jax.nn.relu(1 - _margin(pairs, options))


def ipo(pairs, options):
  """(d - 1 / (2 beta))^2: IPO (arXiv:2310.12036), eq. 17."""
  chosen, rejected = _scores(pairs, options)
  if options.ipo_average:
    chosen, rejected = _means(chosen, rejected, pairs)
  return (chosen - rejected - 1 / (2 * options.beta)) ** 2


def exo_pair(pairs, options):
  """KL of (s(beta d), s(-beta d)) to (1 - eps, eps): EXO (arXiv:2402.00856)."""
  if not (eps := options.label_smoothing):
    raise InputError("label_smoothing is 0: 'exo_pair' needs a number above 0, such as 0.001")
  margin = _margin(pairs, options)
  return _sigmoid(margin) * (_log_sigmoid(margin) - math.log1p(-eps)) + _sigmoid(-margin) * (
    _log_sigmoid(-margin) - math.log(eps)
  )


def nca_pair(pairs, options):
  """-log s(beta c) - 1/2 log s(-beta c) - 1/2 log s(-beta r), s the sigmoid.

  NCA (arXiv:2402.05369), for K = 2.
  """
  chosen, rejected = implicit_rewards(pairs, options)
  return -_log_sigmoid(chosen) - (_log_sigmoid(-chosen) + _log_sigmoid(-rejected)) / 2


def robust(pairs, options):
  """(-(1 - eps) log s(beta d) + eps log s(-beta d)) / (1 - 2 eps).

  rDPO (arXiv:2403.00409): unbiased if a share eps of the labels is wrong.
  """
  eps, margin = options.label_smoothing, _margin(pairs, options)
  return (-(1 - eps) * _log_sigmoid(margin) + eps * _log_sigmoid(-margin)) / (1 - 2 * eps)


def bco_pair(pairs, options):
  """-log s(beta c) - log s(-beta r): BCO (arXiv:2404.04656), without shift."""
  chosen, rejected = implicit_rewards(pairs, options)
  return -_log_sigmoid(chosen) - _log_sigmoid(-rejected)


def sppo_hard(pairs, options):
  """(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2: SPPO (arXiv:2405.00675)."""
  chosen, rejected = implicit_rewards(pairs, options)
  return ((chosen - 0.5) ** 2 + (rejected + 0.5) ** 2) / options.beta**2


def aot(pairs, options):
  """DPO on sorted margins, policy's against reference's: AOT, paired.

  Optimal transport (arXiv:2406.05882). It couples all pairs of the call, so
  that a step's loss depends on its micro-batches.
  """
  return _transport(pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected, pairs, options)


def aot_unpaired(pairs, options):
  """As `aot`, of sorted c against sorted r."""
  return _transport(pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected, pairs, options)


def _transport(upper, lower, pairs, options):
  """Logistic loss of the differences of two sorted samples, [..., P].

  Padding is sorted last; the losses go to the valid places, in order.
  """
  valid, upper, lower = (x.ravel() for x in (pairs.valid, upper, lower))
  in_order = lambda x: x[jnp.argsort(jnp.where(valid, x, jnp.inf), stable=True)]
  losses = _logistic(options.beta * (in_order(upper) - in_order(lower)), options)
  places = jnp.argsort(~valid, stable=True)
  return jnp.zeros_like(losses).at[places].set(losses).reshape(pairs.valid.shape)


def apo_zero(pairs, options):
  """1 - s(beta c) + s(beta r): APO-zero (arXiv:2408.06266)."""
  chosen, rejected = implicit_rewards(pairs, options)
  return _sigmoid(-chosen) + _sigmoid(rejected)


def apo_down(pairs, options):
  """s(beta c) + 1 - s(beta d): APO-down (arXiv:2408.06266)."""
  chosen, rejected = implicit_rewards(pairs, options)
  return _sigmoid(chosen) + _sigmoid(rejected - chosen)


def discopop(pairs, options):
  """Logistic and exponential loss, blended by s(beta d / tau).

  DiscoPOP (arXiv:2406.08414), the log-ratio modulated loss.
  """
  margin = _margin(pairs, options)
  scaled = margin / options.discopop_tau
  # exp(-margin) alone overflows where the blend gives it no weight.
  return -_log_sigmoid(margin) * _sigmoid(-scaled) + jnp.exp(jnp.minimum(_log_sigmoid(scaled) - margin, MAX_EXPONENT))


def sigmoid_norm(pairs, options):
  """DPO of means over tokens: length-normalised (Tulu 3, arXiv:2411.15124)."""
  chosen, rejected = _means(*_scores(pairs, options), pairs)
  return _logistic(options.beta * (chosen - rejected), options)


def sft(pairs, options):
  """NLL of the chosen completion, per token of the global batch."""
  del options
  return -pairs.chosen * pairs.nll_scale


def orpo(pairs, options):
  """-beta log s(log odds of chosen - log odds of rejected), no reference.

  Of ORPO (arXiv:2403.07691), eq. 7, whose other half is 'sft'; from means
  over tokens, odds = p / (1 - p).
  """
  chosen, rejected = _means(pairs.chosen, pairs.rejected, pairs)
  gap = (chosen - rejected) - (_log1m_exp(chosen) - _log1m_exp(rejected))
  return -options.beta * _log_sigmoid(gap)


def _log1m_exp(x):
  """log(1 - exp(x)) for x <= 0, held finite at 0."""
  x = jnp.minimum(x, -1e-7)
  near = x > -math.log(2)
  # Each branch sees only what it can differentiate.
  return jnp.where(near, jnp.log(-jnp.expm1(jnp.where(near, x, -1.0))), jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))


def cpo(pairs, options):
  """-log s(beta (log p_chosen - log p_rejected)), no reference.

  Of CPO (arXiv:2401.08417), whose other half is 'sft'.
  """
  return _logistic(options.beta * (pairs.chosen - pairs.rejected), options)


def cpo_hinge(pairs, options):
  """max(0, 1 - beta (log p_chosen - log p_rejected)): SLiC, no reference."""
  return jax.nn.relu(1 - options.beta * (pairs.chosen - pairs.rejected))


def simpo(pairs, options):
  """-log s(beta (mean log p_chosen - mean log p_rejected) - gamma).

  SimPO (arXiv:2405.14734), eq. 6; with simpo_alpha, AlphaPO
  (arXiv:2501.03884): log p becomes (1 - p^-alpha) / alpha.
  """
  chosen, rejected = _means(pairs.chosen, pairs.rejected, pairs)
  if alpha := options.simpo_alpha:
    chosen, rejected = (-jnp.expm1(jnp.minimum(-alpha * x, MAX_EXPONENT)) / alpha for x in (chosen, rejected))
  return _logistic(options.beta * (chosen - rejected) - options.gamma, options)


LOSSES: dict[str, Callable] = {
  'sigmoid': sigmoid,
  'hinge': hinge,
  'ipo': ipo,
  'exo_pair': exo_pair,
  'nca_pair': nca_pair,
  'robust': robust,
  'bco_pair': bco_pair,
  'sppo_hard': sppo_hard,
  'aot': aot,
  'aot_unpaired': aot_unpaired,
  'apo_zero': apo_zero,
  'apo_down': apo_down,
  'discopop': discopop,
  'sigmoid_norm': sigmoid_norm,
  'sft': sft,
  'orpo': orpo,
  'cpo': cpo,
  'cpo_hinge': cpo_hinge,
  'simpo': simpo,
}
WITH_F_DIVERGENCE = ('sigmoid', 'hinge', 'ipo', 'exo_pair', 'robust', 'discopop', 'sigmoid_norm')
REFERENCE_FREE = ('sft', 'orpo', 'cpo', 'cpo_hinge', 'simpo')


def weighted(names, weights, pairs: Pairs, options: PreferenceOptions):
  """[..., P] sum over the named losses; 0, and no gradient, where not valid.

  Names of ('sigmoid', 'bco_pair', 'sft') and weights of (0.8, 0.2, 1) are
  MPO (arXiv:2411.10442).
  """
  if len(names) != len(weights) or not names:
    raise InputError(
      f'{len(names)} names of preference losses and {len(weights)} weights: give one weight for each name'
    )
  plain = set(names) - set(WITH_F_DIVERGENCE) - set(REFERENCE_FREE)
  if options.f_divergence != 'reverse_kl' and plain:
    raise InputError(f"f_divergence is {options.f_divergence!r}, which {sorted(plain)} do not have: give 'reverse_kl'")
  pairs = zero_padding(pairs)
  loss = sum(w * LOSSES[name](pairs, options) for name, w in zip(names, weights))
  return jnp.where(pairs.valid, loss, 0)


def kto(log_ratio, label, z, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0):
  """1 - s(beta (x - z)) if desirable, 1 - s(beta (z - x)) if not.

  KTO (arXiv:2402.01306), eq. 8.

  Args:
    log_ratio: [P] x, policy to reference, summed over tokens.
    label: [P] bool, whether the completion is desirable.
    z: [] max(0, mean log-ratio of completions paired with other prompts);
      taken as a constant.

  Returns:
    [P], times the weight of its label.
  """
  same_shape('log_ratio, label [P]', None, log_ratio, label)
  margin = beta * (log_ratio - jax.lax.stop_gradient(z))
  return jnp.where(label, desirable_weight * _sigmoid(-margin), undesirable_weight * _sigmoid(margin))


def apo_zero_unpaired(
  log_ratio, label, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
):
  """`kto` with z = 0: APO-zero (arXiv:2408.06266) of single completions."""
  return kto(log_ratio, label, 0.0, beta, desirable_weight, undesirable_weight)
