"""Masks that reject tokens or sequences on which sampler and trainer differ too much.

Arguments and results are those of the corrections in importance.py: log_ratio [N, C] = log pi_old (trainer) - log
pi_sampler, mask [N, C], options -> [N, C]. The estimators are those of verl's `rollout_rs`, of a token or as the mean
over the tokens of a sequence: k2 = log(r)^2 / 2 and k3 = r - 1 - log r. Bounds on k1 = -log r are bounds on the ratio,
as in token_mask and sequence_mask.
"""

import numpy as np

from jaxpost.losses.importance import CorrectionOptions, clamped_exp, sequence_mean


def icepop(log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """The ratio within [token_low, token_high], 0 outside.

  IcePop ("Every step evolves", arXiv:2510.18855).
  """
  return clamped_exp(log_ratio) * token_mask(log_ratio, mask, options)


def token_mask(log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """1 where the ratio is within [token_low, token_high], else 0."""
  del mask
  ratio = clamped_exp(log_ratio)
  return (ratio >= options.token_low) & (ratio <= options.token_high)


def sequence_mask(log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """1 where the geometric mean of the sequence's ratios is in range, else 0."""
  mean = clamped_exp(sequence_mean(log_ratio, mask)[:, None])
  kept = (mean >= options.sequence_low) & (mean <= options.sequence_high)
  return np.broadcast_to(kept, mask.shape)


def product_mask(log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """1 where the product of the sequence's ratios is in [product_low, product_high], else 0."""
  product = clamped_exp((log_ratio * mask).sum(axis=1, keepdims=True))
  kept = (product >= options.product_low) & (product <= options.product_high)
  return np.broadcast_to(kept, mask.shape)


def token_k2(log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """1 where k2 of the token is at most reject_above, else 0."""
  del mask
  return _k2(log_ratio) <= options.reject_above


def token_k3(log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """1 where k3 of the token is at most reject_above, else 0."""
  del mask
  return _k3(log_ratio) <= options.reject_above


def sequence_k2(log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """1 where the mean k2 of the sequence's trained tokens is at most reject_above, else 0."""
  kept = sequence_mean(_k2(log_ratio), mask) <= options.reject_above
  return np.broadcast_to(kept[:, None], mask.shape)


def sequence_k3(log_ratio: np.ndarray, mask: np.ndarray, options: CorrectionOptions) -> np.ndarray:
  """1 where the mean k3 of the sequence's trained tokens is at most reject_above, else 0."""
  kept = sequence_mean(_k3(log_ratio), mask) <= options.reject_above
  return np.broadcast_to(kept[:, None], mask.shape)


def _k2(log_ratio: np.ndarray) -> np.ndarray:
  return log_ratio**2 / 2


def _k3(log_ratio: np.ndarray) -> np.ndarray:
  return clamped_exp(log_ratio) - 1 - log_ratio
