"""Losses of preference pairs, and of single labeled completions (KTO).

Legend: P pairs; leading axes [...] are arbitrary. c and r are the log-ratios of policy to reference, summed over the
tokens of the chosen and the rejected completion, d = c - r, and s is the sigmoid.

`LOSSES` has the pair losses by name, each fn(pairs, options) -> [..., P]. To add one, write that function and enter it
there: one line, which also says which options it reads and whether it needs a reference model. Its name is then a value
of `config.preference.losses`, in every algorithm of algorithms/preference.py. A new option is a field of
`PreferenceOptions` and, with the same name, of `config.preference` (stage/schema_methods.py).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxpost.errors import InputError
from jaxpost.losses.pairs import F_DIVERGENCES, MAX_EXPONENT, Pairs, PreferenceOptions, implicit_rewards, zero_padding
from jaxpost.losses.reduce import same_shape

_log_sigmoid = jax.nn.log_sigmoid
_sigmoid = jax.nn.sigmoid


def _scores(pairs: Pairs, options: PreferenceOptions) -> tuple[jax.Array, jax.Array]:
  """Returns (c, r), each [..., P], after the f-divergence."""
  score = F_DIVERGENCES[options.f_divergence]
  chosen = score(pairs.chosen - pairs.ref_chosen, options.f_alpha)
  rejected = score(pairs.rejected - pairs.ref_rejected, options.f_alpha)
  return chosen, rejected


def _margin(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """Returns beta d [..., P]."""
  chosen, rejected = _scores(pairs, options)
  return options.beta * (chosen - rejected)


def _means(chosen: jax.Array, rejected: jax.Array, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
  """Returns the means over tokens of these sums [..., P]."""
  chosen = chosen / jnp.maximum(pairs.chosen_length, 1)
  rejected = rejected / jnp.maximum(pairs.rejected_length, 1)
  return chosen, rejected


def _logistic(margin: jax.Array, options: PreferenceOptions) -> jax.Array:
  """-log s(margin), if a fraction `label_smoothing` of the labels is flipped."""
  eps = options.label_smoothing
  return -((1 - eps) * _log_sigmoid(margin) + eps * _log_sigmoid(-margin))


def sigmoid(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """-log s(beta d), s the sigmoid: DPO (arXiv:2305.18290), eq. 7; with label_smoothing, cDPO."""
  return _logistic(_margin(pairs, options), options)


def hinge(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """max(0, 1 - beta d): SLiC (arXiv:2305.10425) on the implicit reward."""
  return jax.nn.relu(1 - _margin(pairs, options))


def ipo(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """(d - 1 / (2 beta))^2: IPO (arXiv:2310.12036), eq. 17."""
  chosen, rejected = _scores(pairs, options)
  if options.ipo_average:
    chosen, rejected = _means(chosen, rejected, pairs)
  return (chosen - rejected - 1 / (2 * options.beta)) ** 2


def exo_pair(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """KL of (s(beta d), s(-beta d)) to (1 - eps, eps), eps = label_smoothing: EXO (arXiv:2402.00856)."""
  if not (eps := options.label_smoothing):
    raise InputError("label_smoothing is 0: 'exo_pair' needs a number above 0, such as 0.001")
  margin = _margin(pairs, options)
  return _sigmoid(margin) * (_log_sigmoid(margin) - math.log1p(-eps)) + _sigmoid(-margin) * (
    _log_sigmoid(-margin) - math.log(eps)
  )


def nca_pair(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """-log s(beta c) - 1/2 log s(-beta c) - 1/2 log s(-beta r): NCA (arXiv:2402.05369), for K = 2."""
  chosen, rejected = implicit_rewards(pairs, options)
  return -_log_sigmoid(chosen) - (_log_sigmoid(-chosen) + _log_sigmoid(-rejected)) / 2


def robust(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """(-(1 - eps) log s(beta d) + eps log s(-beta d)) / (1 - 2 eps), eps = label_smoothing.

  rDPO (arXiv:2403.00409): unbiased if a fraction eps of the labels is wrong.
  """
  eps = options.label_smoothing
  margin = _margin(pairs, options)
  return (-(1 - eps) * _log_sigmoid(margin) + eps * _log_sigmoid(-margin)) / (1 - 2 * eps)


def bco_pair(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """-log s(beta c) - log s(-beta r): BCO (arXiv:2404.04656), without its reward shift."""
  chosen, rejected = implicit_rewards(pairs, options)
  return -_log_sigmoid(chosen) - _log_sigmoid(-rejected)


def sppo_hard(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2: SPPO (arXiv:2405.00675)."""
  chosen, rejected = implicit_rewards(pairs, options)
  return ((chosen - 0.5) ** 2 + (rejected + 0.5) ** 2) / options.beta**2


def aot(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """Paired AOT: DPO on the sorted log-ratios of chosen to rejected, of the policy and of the reference.

  Alignment by optimal transport (arXiv:2406.05882). Sorting couples all pairs
  of a micro-batch, so the loss of a step depends on its micro-batches.
  """
  return _transport(pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected, pairs, options)


def aot_unpaired(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """Unpaired AOT (arXiv:2406.05882): DPO on sorted c and sorted r."""
  return _transport(pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected, pairs, options)


def _transport(upper: jax.Array, lower: jax.Array, pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """Returns the logistic loss of the differences of two sorted samples, [..., P].

  Padding is sorted last; the losses are written to the valid entries, in order.
  """
  valid, upper, lower = (x.ravel() for x in (pairs.valid, upper, lower))

  def sort(x):
    return x[jnp.argsort(jnp.where(valid, x, jnp.inf), stable=True)]

  losses = _logistic(options.beta * (sort(upper) - sort(lower)), options)
  places = jnp.argsort(~valid, stable=True)  # valid entries first
  return jnp.zeros_like(losses).at[places].set(losses).reshape(pairs.valid.shape)


def apo_zero(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """1 - s(beta c) + s(beta r): APO-zero (arXiv:2408.06266)."""
  chosen, rejected = implicit_rewards(pairs, options)
  return _sigmoid(-chosen) + _sigmoid(rejected)


def apo_down(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """s(beta c) + 1 - s(beta d): APO-down (arXiv:2408.06266)."""
  chosen, rejected = implicit_rewards(pairs, options)
  return _sigmoid(chosen) + _sigmoid(rejected - chosen)


def discopop(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """-(1 - w) log s(beta d) + w exp(-beta d), w = s(beta d / tau).

  DiscoPOP (arXiv:2406.08414), the log-ratio modulated loss.
  """
  margin = _margin(pairs, options)
  scaled = margin / options.discopop_tau
  # w exp(-margin) = exp(log w - margin): exp(-margin) alone would overflow where w is almost 0.
  return -_log_sigmoid(margin) * _sigmoid(-scaled) + jnp.exp(jnp.minimum(_log_sigmoid(scaled) - margin, MAX_EXPONENT))


def sigmoid_norm(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """Length-normalized DPO, with c and r as means over tokens (Tulu 3, arXiv:2411.15124)."""
  chosen, rejected = _means(*_scores(pairs, options), pairs)
  return _logistic(options.beta * (chosen - rejected), options)


def sft(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """NLL of the chosen completion, scaled so that the batch gives the mean over its chosen tokens."""
  del options
  return -pairs.chosen * pairs.nll_scale


def orpo(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """-beta log s(log odds of chosen - log odds of rejected), without reference.

  The odds-ratio term of ORPO (arXiv:2403.07691), eq. 7; its other term is
  'sft'. odds = p / (1 - p), where log p is the mean over tokens.
  """
  chosen, rejected = _means(pairs.chosen, pairs.rejected, pairs)
  gap = (chosen - rejected) - (_log1m_exp(chosen) - _log1m_exp(rejected))
  return -options.beta * _log_sigmoid(gap)


def _log1m_exp(x: jax.Array) -> jax.Array:
  """Returns log(1 - exp(x)) for x <= 0, finite at 0."""
  x = jnp.minimum(x, -1e-7)
  near = x > -math.log(2)
  # The inner `where`s replace inputs at which the gradient of a branch is not
  # finite: in the gradient of the outer one, inf * 0 would be NaN.
  return jnp.where(near, jnp.log(-jnp.expm1(jnp.where(near, x, -1.0))), jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))


def cpo(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """-log s(beta (log p_chosen - log p_rejected)), without reference.

  The preference term of CPO (arXiv:2401.08417); its other term is 'sft'.
  """
  return _logistic(options.beta * (pairs.chosen - pairs.rejected), options)


def cpo_hinge(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """max(0, 1 - beta (log p_chosen - log p_rejected)): SLiC (arXiv:2305.10425), without reference."""
  return jax.nn.relu(1 - options.beta * (pairs.chosen - pairs.rejected))


def simpo(pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """-log s(beta (mean log p_chosen - mean log p_rejected) - gamma).

  SimPO (arXiv:2405.14734), eq. 6; with simpo_alpha, AlphaPO (arXiv:2501.03884): log p becomes (1 - p^-alpha) / alpha.
  """
  chosen, rejected = _means(pairs.chosen, pairs.rejected, pairs)
  if alpha := options.simpo_alpha:
    chosen, rejected = (-jnp.expm1(jnp.minimum(-alpha * x, MAX_EXPONENT)) / alpha for x in (chosen, rejected))
  return _logistic(options.beta * (chosen - rejected) - options.gamma, options)


@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
  """An entry of `LOSSES`.

  Attributes:
    fn: (pairs, options) -> [..., P].
    reads: the fields of `PreferenceOptions` that it reads besides `beta`, and 'ld_alpha' if LD-DPO may weight its sums.
    needs_reference: whether it reads `Pairs.ref_chosen` and `ref_rejected`.
    reward_is_mean: whether metrics report its implicit reward as a mean over tokens.
  """

  fn: Callable[[Pairs, PreferenceOptions], jax.Array]
  reads: tuple[str, ...] = ()
  needs_reference: bool = True
  reward_is_mean: bool = False


_F_OPTIONS = ('f_divergence', 'f_alpha')

LOSSES: dict[str, PreferenceLoss] = {
  'sigmoid': PreferenceLoss(sigmoid, reads=('label_smoothing', 'ld_alpha', *_F_OPTIONS)),
  'hinge': PreferenceLoss(hinge, reads=('ld_alpha', *_F_OPTIONS)),
  'ipo': PreferenceLoss(ipo, reads=('ipo_average', *_F_OPTIONS)),
  'exo_pair': PreferenceLoss(exo_pair, reads=('label_smoothing', *_F_OPTIONS)),
  'nca_pair': PreferenceLoss(nca_pair),
  'robust': PreferenceLoss(robust, reads=('label_smoothing', 'ld_alpha', *_F_OPTIONS)),
  'bco_pair': PreferenceLoss(bco_pair),
  'sppo_hard': PreferenceLoss(sppo_hard),
  'aot': PreferenceLoss(aot, reads=('label_smoothing',)),
  'aot_unpaired': PreferenceLoss(aot_unpaired, reads=('label_smoothing',)),
  'apo_zero': PreferenceLoss(apo_zero),
  'apo_down': PreferenceLoss(apo_down),
  'discopop': PreferenceLoss(discopop, reads=('discopop_tau', *_F_OPTIONS)),
  'sigmoid_norm': PreferenceLoss(sigmoid_norm, reads=('label_smoothing', *_F_OPTIONS)),
  'sft': PreferenceLoss(sft, needs_reference=False),
  'orpo': PreferenceLoss(orpo, needs_reference=False, reward_is_mean=True),
  'cpo': PreferenceLoss(cpo, reads=('label_smoothing',), needs_reference=False),
  'cpo_hinge': PreferenceLoss(cpo_hinge, needs_reference=False),
  'simpo': PreferenceLoss(
    simpo, reads=('label_smoothing', 'gamma', 'simpo_alpha'), needs_reference=False, reward_is_mean=True
  ),
}


def readers(option: str) -> tuple[str, ...]:
  """Returns the names of the losses that read this field of `PreferenceOptions`."""
  return tuple(name for name, loss in LOSSES.items() if option in loss.reads)


def without_f_divergence(names: Sequence[str]) -> list[str]:
  """Returns the losses among `names` that are defined for reverse KL only: they do not read `f_divergence`."""
  return sorted(name for name in {*names} - {*readers('f_divergence')} if LOSSES[name].needs_reference)


def weighted(names: Sequence[str], weights: Sequence[float], pairs: Pairs, options: PreferenceOptions) -> jax.Array:
  """Returns the weighted sum [..., P] of the named losses; 0, without gradient, for pairs that are not valid.

  The names ('sigmoid', 'bco_pair', 'sft') with the weights (0.8, 0.2, 1) are MPO (arXiv:2411.10442).
  """
  if len(names) != len(weights) or not names:
    raise InputError(
      f'{len(names)} names of preference losses and {len(weights)} weights: give one weight for each name'
    )
  reverse_kl_only = without_f_divergence(names)
  if options.f_divergence != 'reverse_kl' and reverse_kl_only:
    raise InputError(
      f"f_divergence is {options.f_divergence!r}, which {reverse_kl_only} do not support: give 'reverse_kl'"
    )
  pairs = zero_padding(pairs)
  loss = sum(w * LOSSES[name].fn(pairs, options) for name, w in zip(names, weights))
  return jnp.where(pairs.valid, loss, 0)


def kto(
  log_ratio: jax.Array,
  label: jax.Array,
  z: jax.Array | float,
  beta: float = 0.1,
  desirable_weight: float = 1.0,
  undesirable_weight: float = 1.0,
) -> jax.Array:
  """1 - s(beta (x - z)) for desirable completions, 1 - s(beta (z - x)) for others.

  KTO (arXiv:2402.01306), eq. 8; with z = 0, APO-zero (arXiv:2408.06266) of single completions.

  Args:
    log_ratio: [P], x: log-ratio of policy to reference, summed over tokens.
    label: [P] bool, True for desirable completions.
    z: [], max(0, mean log-ratio of completions paired with other prompts);
      no gradient flows through it.

  Returns:
    [P], each loss times the weight of its label.
  """
  same_shape('log_ratio, label [P]', None, log_ratio, label)
  margin = beta * (log_ratio - jax.lax.stop_gradient(z))
  return jnp.where(label, desirable_weight * _sigmoid(-margin), undesirable_weight * _sigmoid(margin))
