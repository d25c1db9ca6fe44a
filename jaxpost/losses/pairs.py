"""TODO."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.errors import InputError
from jaxpost.losses.reduce import same_shape

MAX_EXPONENT = 40.0  # the square of its exponential is still finite


class Pairs(NamedTuple):
  """Preference pairs, all arrays [..., P]; padded where not `valid`.

  Attributes:
    chosen, rejected: log-probabilities of the policy, summed over tokens.
    ref_chosen, ref_rejected: of the reference; 0 where there is none.
    chosen_length, rejected_length: tokens summed over; valid: bool.
    nll_scale: [] or [..., P], makes -chosen * nll_scale, summed with the
      weights of the pairs, the mean NLL of the chosen tokens of the global
      batch. For weights of 1 / pairs: pairs / chosen tokens.
  """

  chosen: Any
  rejected: Any
  ref_chosen: Any
  ref_rejected: Any
  chosen_length: Any
  rejected_length: Any
  valid: Any
  nll_scale: Any = 1.0


@dataclasses.dataclass(frozen=True)
class PreferenceOptions:
  """What the losses read; each reads its own part.

  Attributes:
    beta: inverse temperature of the implicit reward beta * log-ratio.
    label_smoothing: share of labels held to be wrong.
    ipo_average: 'ipo' takes means over tokens, as TRL does; its paper, sums.
    gamma: target margin of 'simpo'.
    simpo_alpha: AlphaPO's alpha for 'simpo'; 0 is SimPO.
    discopop_tau: temperature of the blend of 'discopop'.
    f_divergence: what c and r become in WITH_F_DIVERGENCE: a key of
      F_DIVERGENCES. The other losses refuse all but 'reverse_kl'.
    f_alpha: alpha of 'alpha_divergence'.
  """

  beta: float = 0.1
  label_smoothing: float = 0.0
  ipo_average: bool = True
  gamma: float = 0.5
  simpo_alpha: float = 0.0
  discopop_tau: float = 0.05
  f_divergence: str = 'reverse_kl'
  f_alpha: float = 0.5

  def __post_init__(self):
    if self.beta <= 0:
      raise InputError(f'beta is {self.beta}: give a number above 0')
    if not 0 <= self.label_smoothing < 0.5:
      raise InputError(f'label_smoothing is {self.label_smoothing}: give 0 to below 0.5')
    if self.f_divergence not in F_DIVERGENCES:
      raise InputError(f'f_divergence is {self.f_divergence!r}: give one of ' + ', '.join(F_DIVERGENCES))


def _alpha_score(log_ratio, alpha):
  if abs(alpha - 1) < 1e-6:
    return log_ratio
  exponent = jnp.minimum((alpha - 1) * log_ratio, MAX_EXPONENT)
  return jnp.expm1(exponent) / (alpha - 1)


# f'(ratio), 0 at a ratio of 1 (arXiv:2309.16240): fn(log ratio, alpha).
F_DIVERGENCES: dict[str, Callable] = {
  'reverse_kl': lambda x, alpha: x,
  'forward_kl': lambda x, alpha: -jnp.expm1(jnp.minimum(-x, MAX_EXPONENT)),
  'js_divergence': lambda x, alpha: jax.nn.log_sigmoid(x) + math.log(2),
  'alpha_divergence': _alpha_score,
}


def implicit_rewards(pairs, options):
  """(beta c, beta r) [..., P]."""
  return (options.beta * (pairs.chosen - pairs.ref_chosen), options.beta * (pairs.rejected - pairs.ref_rejected))


def zero_padding(pairs):
  """The pairs, with 0 for whatever the padding holds."""
  same_shape('arrays of Pairs [..., P]', None, *pairs[:-1])
  clean = Pairs(*(jnp.where(pairs.valid, x, 0) for x in pairs))
  return clean._replace(valid=pairs.valid)


def pair_metrics(pairs: Pairs, options: PreferenceOptions) -> dict:
  """{metric: [..., P]}, 0 where not valid; rewards are beta * log-ratio."""
  pairs = jax.tree.map(jax.lax.stop_gradient, zero_padding(pairs))
  chosen, rejected = implicit_rewards(pairs, options)
  return {
    'rewards/chosen': chosen,
    'rewards/rejected': rejected,
    'rewards/margins': chosen - rejected,
    'rewards/accuracies': (chosen > rejected).astype(chosen.dtype),
    'logps/chosen': pairs.chosen,
    'logps/rejected': pairs.rejected,
  }
