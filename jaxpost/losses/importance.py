"""Importance correction of the mismatch between sampler and trainer.

Legend: N sequences, C completion tokens. log_ratio = log pi_old (trainer) - log pi_sampler, per token.

Arrays are numpy arrays on the host: weights are computed once per batch, and
token losses are multiplied by them as constants.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxpost.errors import InputError
from jaxpost.losses.reduce import MAX_LOG_RATIO, by_name, same_shape


@dataclasses.dataclass(frozen=True)
class CorrectionOptions:
  """Options of the correction methods, fields of config.rl; each method reads some of them."""

  importance_cap: float = 2.0  # upper bound of truncated weights
  token_low: float = 0.5  # bounds of 'icepop' and 'token_mask' for the ratio of a token
  token_high: float = 5.0
  sequence_low: float = 0.99  # bounds of 'sequence_mask' for the geometric mean of the ratios of a sequence
  sequence_high: float = 1.01
  product_low: float = 0.5  # bounds of 'product_mask' for the product of the ratios of a sequence
  product_high: float = 2.0
  # 'token_k2', 'token_k3', 'sequence_k2' and 'sequence_k3' keep tokens or sequences of at most this divergence.
  reject_above: float = 0.1


def token_truncated(log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """min(ratio, cap): truncated importance sampling, token by token.

  "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al. 2025).
  """
  del mask
  return np.minimum(clamped_exp(log_ratio), options.importance_cap)


def sequence_truncated(log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """min(product of the ratios of the sequence, cap), at each of its tokens."""
  total = (log_ratio * mask).sum(axis=1, keepdims=True)
  return np.broadcast_to(np.minimum(clamped_exp(total), options.importance_cap), mask.shape)


@dataclasses.dataclass(frozen=True)
class Correction:
  """An entry of `METHODS`."""

  # (log_ratio [N, C] float64, mask [N, C] bool, options) -> [N, C]; `correction` masks the result.
  fn: Callable[[np.ndarray, np.ndarray, CorrectionOptions], np.ndarray]
  reads: tuple[str, ...]  # fields of `CorrectionOptions`
  weighs: bool = False  # whether the result is a ratio, of which a product may have only one, and not a mask of 0 and 1


_TOKEN, _SEQUENCE = ('token_low', 'token_high'), ('sequence_low', 'sequence_high')
METHODS: dict[str, Correction] = {
  'token_truncated': Correction(token_truncated, ('importance_cap',), weighs=True),
  'sequence_truncated': Correction(sequence_truncated, ('importance_cap',), weighs=True),
  'icepop': Correction(by_name('rejection:icepop'), _TOKEN, weighs=True),
  'token_mask': Correction(by_name('rejection:token_mask'), _TOKEN),
  'sequence_mask': Correction(by_name('rejection:sequence_mask'), _SEQUENCE),
  'product_mask': Correction(by_name('rejection:product_mask'), ('product_low', 'product_high')),
  'token_k2': Correction(by_name('rejection:token_k2'), ('reject_above',)),
  'token_k3': Correction(by_name('rejection:token_k3'), ('reject_above',)),
  'sequence_k2': Correction(by_name('rejection:sequence_k2'), ('reject_above',)),
  'sequence_k3': Correction(by_name('rejection:sequence_k3'), ('reject_above',)),
}


def check(names: Sequence[str], options: CorrectionOptions) -> None:
  """Raises InputError for unknown corrections, those that exclude each other, and empty ranges.

  `names` is config.rl.importance, and may include 'opsm', which is computed in the update.
  """
  unknown = sorted(set(names) - {*METHODS, 'opsm'})
  if unknown:
    raise InputError(f'config.rl.importance: {unknown} are not known; known are {", ".join((*METHODS, "opsm"))}')
  weights = [name for name in names if name in METHODS and METHODS[name].weighs]
  if len(weights) > 1:
    raise InputError(
      f'config.rl.importance: {" and ".join(weights)} would each multiply by the ratio; keep one of them'
    )
  for kind in ('token', 'sequence', 'product'):
    low, high = vars(options)[f'{kind}_low'], vars(options)[f'{kind}_high']
    if low > high:
      raise InputError(f'config.rl.{kind}_low: {low} is above {kind}_high={high}, so no token is kept; swap them')


def correction(names: Sequence[str], log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """Returns the product [N, C] float32 of the named methods, such as ('sequence_mask', 'icepop'); 0 outside the mask.

  Args:
    log_ratio: [N, C]; ignored where the mask is 0.
    mask: [N, C], 1 for trained tokens.
  """
  same_shape('log_ratio, mask [N, C]', 2, log_ratio, mask)
  mask = np.asarray(mask, bool)
  log_ratio = np.where(mask, np.asarray(log_ratio, np.float64), 0)
  weights = mask.astype(np.float64)
  for name in names:
    weights = weights * METHODS[name].fn(log_ratio, mask, options)
  return weights.astype(np.float32)


def off_policy_metrics(old_logprobs: np.ndarray, sampler_logprobs: np.ndarray, mask: np.ndarray) -> dict[str, float]:
  """Returns metrics of the difference between trainer and sampler, from log-probs [N, C], under verl's names.

  {} if no token is trained. kl, k3_kl and chi2_token are means over tokens; the others are statistics over sequences
  that have a trained token.
  """
  same_shape('old_logprobs, sampler_logprobs, mask [N, C]', 2, old_logprobs, sampler_logprobs, mask)
  mask = np.asarray(mask, bool)
  trained = mask.any(axis=1)
  if not trained.any():
    return {}
  mask = mask[trained]
  old, sampler = (np.where(mask, np.asarray(x, np.float64)[trained], 0) for x in (old_logprobs, sampler_logprobs))
  log_ratio = old - sampler
  trainer_mean = sequence_mean(old, mask)
  sampler_mean = sequence_mean(sampler, mask)
  gap = sampler_mean - trainer_mean
  total = clamped_exp(log_ratio.sum(axis=1))
  metrics = {
    'kl': -log_ratio[mask].mean(),
    'k3_kl': (clamped_exp(log_ratio) - 1 - log_ratio)[mask].mean(),
    'training_ppl': np.exp(-trainer_mean).mean(),
    'training_log_ppl': -trainer_mean.mean(),
    'rollout_ppl': np.exp(-sampler_mean).mean(),
    'rollout_log_ppl': -sampler_mean.mean(),
    'log_ppl_diff': gap.mean(),
    'log_ppl_abs_diff': np.abs(gap).mean(),
    'log_ppl_diff_max': gap.max(),
    'log_ppl_diff_min': gap.min(),
    'ppl_ratio': np.exp(gap).mean(),
    'chi2_token': (clamped_exp(log_ratio) ** 2)[mask].mean() - 1,
    'chi2_seq': (total**2).mean() - 1,
  }
  return {f'rollout_corr/{k}': float(v) for k, v in metrics.items()}


def weight_metrics(weights: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> dict[str, float]:
  """Returns metrics of the weights w [N, C] of the n tokens of the mask; {} if there are none.

  ess: (sum w)^2 / (n sum w^2), the effective fraction of the tokens (Kong 1992); 0 if all weights are 0.
  masked_positive and masked_negative: of the tokens with a positive or negative advantage, the share of weight 0.
  """
  mask = np.asarray(mask, bool)
  if not mask.any():
    return {}
  w = np.asarray(weights, np.float64)[mask]
  signs = np.sign(np.asarray(advantages)[mask])
  squares = (w**2).sum()
  metrics = {'ess': w.sum() ** 2 / (w.size * squares) if squares else 0.0}
  for name, sign in (('positive', 1), ('negative', -1)):
    if (signs == sign).any():
      metrics[f'masked_{name}'] = (w[signs == sign] == 0).mean()
  return {f'importance_weight/{k}': float(v) for k, v in metrics.items()}


def clamped_exp(log_ratio: np.ndarray) -> np.ndarray:
  """Returns the ratio, from its log clamped to [-20, 20]."""
  return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_mean(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Returns the means [N] over the trained tokens; 0 for sequences without any."""
  return (x * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
