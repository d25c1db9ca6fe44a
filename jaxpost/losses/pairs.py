"""Preference pairs: their log-probs from packed rows, options of their losses, and metrics.

Legend: B rows, T tokens, N sequences, P = N / 2 pairs; leading axes [...] are arbitrary.
c and r are the log-ratios of policy to reference, summed over the tokens of the
chosen and the rejected completion. The losses are in `preferences.py`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.errors import InputError
from jaxpost.losses.reduce import same_shape, sequence_sum, to_tokens
from jaxpost.types import Array

MAX_EXPONENT = 40.0  # exp(40)^2 is still finite in float32


class Pairs(NamedTuple):
  """Preference pairs, all arrays [..., P]; padded where not `valid`.

  Attributes:
    chosen, rejected: log-probabilities of the policy, summed over tokens.
    ref_chosen, ref_rejected: the same under the reference model; 0 without one.
    chosen_length, rejected_length: number of tokens in those sums.
    valid: bool, False for padding.
    nll_scale: [] or [..., P]. -chosen * nll_scale, summed with the weights of
      the pairs, is the mean NLL over the chosen tokens of the global batch.
      With weights of 1 / pairs it is pairs / chosen tokens.
  """

  chosen: Array
  rejected: Array
  ref_chosen: Array
  ref_rejected: Array
  chosen_length: Array
  rejected_length: Array
  valid: Array
  nll_scale: Array | float = 1.0


@dataclasses.dataclass(frozen=True)
class PreferenceOptions:
  """Options of the preference losses.

  `preferences.LOSSES` says which loss reads which option; all read `beta`.

  Attributes:
    beta: inverse temperature of the implicit reward beta * log-ratio.
    label_smoothing: assumed fraction of wrong labels.
    ipo_average: 'ipo' takes means over tokens, as TRL does; its paper takes sums.
    gamma: target margin of 'simpo'.
    simpo_alpha: alpha of AlphaPO for 'simpo'; with 0 it is SimPO.
    discopop_tau: temperature of the blend of 'discopop'.
    f_divergence: key of F_DIVERGENCES, applied to c and r. Losses that do not
      read it accept 'reverse_kl' only.
    f_alpha: alpha of 'alpha_divergence' as in TRL, which is 1 - alpha of the paper (arXiv:2309.16240).
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


def _alpha_score(log_ratio: jax.Array, alpha: float) -> jax.Array:
  if abs(alpha - 1) < 1e-6:
    return log_ratio
  exponent = jnp.minimum((alpha - 1) * log_ratio, MAX_EXPONENT)
  return jnp.expm1(exponent) / (alpha - 1)


# (log-ratio, alpha) -> f'(ratio), shifted to be 0 at a ratio of 1 (f-DPO, arXiv:2309.16240).
F_DIVERGENCES: dict[str, Callable[[jax.Array, float], jax.Array]] = {
  'reverse_kl': lambda log_ratio, alpha: log_ratio,
  'forward_kl': lambda log_ratio, alpha: -jnp.expm1(jnp.minimum(-log_ratio, MAX_EXPONENT)),
  'js_divergence': lambda log_ratio, alpha: jax.nn.log_sigmoid(log_ratio) + math.log(2),
  'alpha_divergence': _alpha_score,
}


def implicit_rewards(pairs: Pairs, options: PreferenceOptions) -> tuple[jax.Array, jax.Array]:
  """Returns the implicit rewards (beta c, beta r), each [..., P]."""
  chosen = options.beta * (pairs.chosen - pairs.ref_chosen)
  rejected = options.beta * (pairs.rejected - pairs.ref_rejected)
  return chosen, rejected


def zero_padding(pairs: Pairs) -> Pairs:
  """Returns the pairs with 0 in all entries that are not valid."""
  same_shape('arrays of Pairs [..., P]', None, *pairs[:-1])
  return Pairs(*(jnp.where(pairs.valid, x, 0) for x in pairs))._replace(valid=pairs.valid)


def pair_metrics(pairs: Pairs, options: PreferenceOptions) -> dict[str, jax.Array]:
  """Returns {metric: [..., P]}, 0 where not valid; rewards are beta * log-ratio."""
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


def split_pairs(per_sequence: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Splits [B, N] into chosen and rejected [B, P]: sequences 1, 3, ... and 2, 4, ..."""
  in_pairs = per_sequence[:, : per_sequence.shape[1] // 2 * 2]
  return in_pairs[:, 0::2], in_pairs[:, 1::2]


def desensitized(mask: jax.Array, sequence_ids: jax.Array, alpha: float) -> jax.Array:
  """Returns weights [B, T] of the trained tokens: 1 up to the length of the pair's shorter answer, then alpha.

  LD-DPO (arXiv:2409.06411), eq. 10: log p is summed over the length that both answers have, and over
  the tokens beyond it with the weight alpha. `mask` [B, T] selects the trained tokens; others get 0.
  """
  mask = mask.astype(jnp.float32)
  num_before = jnp.cumsum(mask, axis=1) - mask  # trained tokens of the row before a token
  start = -to_tokens(sequence_max(-num_before, sequence_ids), sequence_ids)  # their minimum over the sequence
  lengths = sequence_sum(mask, sequence_ids)
  shorter = jnp.repeat(jnp.minimum(*split_pairs(lengths)), 2, axis=1)
  shorter = jnp.pad(shorter, ((0, 0), (0, lengths.shape[1] - shorter.shape[1])))
  return mask * jnp.where(num_before - start < to_tokens(shorter, sequence_ids), 1.0, alpha)


def wpo_weights(adjusted: jax.Array, mask: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Returns the weight of each pair [B, P], at most 1 as in TRL; it has no gradient.

  WPO (arXiv:2406.11827), eq. 2: the product over both answers of exp(mean over tokens of log p - log sum p^2),
  the probability of an answer relative to that of a typical sample.

  Args:
    adjusted: [B, T], log p - log sum p^2 of each token.
  """
  means = sequence_sum(adjusted * mask, sequence_ids) / jnp.maximum(sequence_sum(mask * 1.0, sequence_ids), 1)
  chosen, rejected = split_pairs(jax.lax.stop_gradient(means))
  return jnp.exp(jnp.minimum(chosen + rejected, 0.0))


def sequence_max(x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Returns the largest entry of each sequence [B, N], such as a weight or label of all its tokens; 0 if absent."""
  length = x.shape[1]

  def row_max(row, ids):
    largest = jax.ops.segment_max(row, ids, num_segments=length + 1)[1:]
    return jnp.where(jnp.isfinite(largest), largest, 0.0)

  return jax.vmap(row_max)(x, sequence_ids)
