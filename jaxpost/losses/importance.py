"""Correction for samplers that are not the trainer, and how far they differ.

Legend: S sequences, C completion tokens. log_ratio = log pi_old (trainer) -
log pi_sampler, per token.

Host arrays (numpy): weights enter the loss as constants, once per batch, by
multiplication with the loss of a token.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxpost.losses.reduce import same_shape

_MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class CorrectionOptions:
  """What the methods read; each reads its own part.

  Attributes:
    cap: most that a truncated weight may be.
    token_low, token_high: ratios of tokens that 'icepop' and 'token_mask'
      keep.
    sequence_low, sequence_high: geometric means of the ratios of a sequence
      that 'sequence_mask' keeps.
  """

  cap: float = 2.0
  token_low: float = 0.5
  token_high: float = 5.0
  sequence_low: float = 0.99
  sequence_high: float = 1.01


def token_truncated(log_ratio, mask, options):
  """min(ratio, cap): truncated importance sampling, token by token.

  "Your efficient RL framework secretly brings you off-policy RL training"
  (Yao et al. 2025).
  """
  del mask
  return np.minimum(_exp(log_ratio), options.cap)


def sequence_truncated(log_ratio, mask, options):
  """min(product of the sequence's ratios, cap), on each of its tokens."""
  total = (log_ratio * mask).sum(axis=1, keepdims=True)
  return np.broadcast_to(np.minimum(_exp(total), options.cap), mask.shape)


def icepop(log_ratio, mask, options):
  """The ratio within [token_low, token_high], 0 outside.

  IcePop ("Every step evolves", arXiv:2510.18855).
  """
  return _exp(log_ratio) * token_mask(log_ratio, mask, options)


def token_mask(log_ratio, mask, options):
  """1 where the ratio is within [token_low, token_high], 0 outside."""
  del mask
  ratio = _exp(log_ratio)
  return (ratio >= options.token_low) & (ratio <= options.token_high)


def sequence_mask(log_ratio, mask, options):
  """1 where the geometric mean of a sequence's ratios is within the band."""
  mean = _exp(_mean(log_ratio, mask)[:, None])
  kept = (mean >= options.sequence_low) & (mean <= options.sequence_high)
  return np.broadcast_to(kept, mask.shape)


# fn(log_ratio [S, C] float64, mask [S, C] bool, options: CorrectionOptions)
#    -> [S, C]; `correction` masks the result.
METHODS: dict[str, Callable] = {
  'token_truncated': token_truncated,
  'sequence_truncated': sequence_truncated,
  'icepop': icepop,
  'token_mask': token_mask,
  'sequence_mask': sequence_mask,
}
WEIGHTS = 'token_truncated', 'sequence_truncated', 'icepop'  # not only 0 and 1


def correction(names, log_ratio, mask, options: CorrectionOptions):
  """The product of the methods named, such as ('sequence_mask', 'icepop').

  Args:
    log_ratio: [S, C]; not looked at where the mask is 0.
    mask: [S, C], 1 for trained tokens.

  Returns:
    [S, C] float32 weights, 0 where the mask is.
  """
  log_ratio, mask = _arguments('log_ratio, mask [S, C]', mask, log_ratio)
  weights = mask.astype(np.float64)
  for name in names:
    weights = weights * METHODS[name](log_ratio, mask, options)
  return weights.astype(np.float32)


def off_policy_metrics(old_logprobs, sampler_logprobs, mask) -> dict:
  """How far trainer and sampler are apart, under verl's names.

  Means over tokens (kl, k3_kl, chi2_token) or over sequences with a trained
  token (the others). All [S, C]; {} where nothing is trained.
  """
  old, mask = _arguments('old_logprobs, mask [S, C]', mask, old_logprobs)
  sampler, _ = _arguments('sampler_logprobs, mask [S, C]', mask, sampler_logprobs)
  trained = mask.any(axis=1)
  if not trained.any():
    return {}
  old, sampler, mask = old[trained], sampler[trained], mask[trained]
  log_ratio = old - sampler
  over_tokens = lambda x: x[mask].mean()
  ours, theirs = _mean(old, mask), _mean(sampler, mask)
  gap = theirs - ours
  total = _exp(log_ratio.sum(axis=1))
  metrics = {
    'kl': -over_tokens(log_ratio),
    'k3_kl': over_tokens(_exp(log_ratio) - 1 - log_ratio),
    'training_ppl': np.exp(-ours).mean(),
    'training_log_ppl': -ours.mean(),
    'rollout_ppl': np.exp(-theirs).mean(),
    'rollout_log_ppl': -theirs.mean(),
    'log_ppl_diff': gap.mean(),
    'log_ppl_abs_diff': np.abs(gap).mean(),
    'log_ppl_diff_max': gap.max(),
    'log_ppl_diff_min': gap.min(),
    'ppl_ratio': np.exp(gap).mean(),
    'chi2_token': over_tokens(_exp(log_ratio) ** 2) - 1,
    'chi2_seq': (total**2).mean() - 1,
  }
  return {f'rollout_corr/{k}': float(v) for k, v in metrics.items()}


def _arguments(what, mask, array):
  """(array as float64 with 0 where the mask is, mask as bool)."""
  array, mask = np.asarray(array, np.float64), np.asarray(mask, bool)
  same_shape(what, 2, array, mask)
  return np.where(mask, array, 0), mask


def _exp(log_ratio):
  return np.exp(np.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def _mean(x, mask):
  """[S] means over the trained tokens; 0 where there are none."""
  return (x * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
