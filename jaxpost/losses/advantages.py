"""Advantages of groups of completions. Legend: N prompts, G samples of each.

Host arrays (numpy): they are a few kilobytes per step, computed once for the
global batch and never inside a micro-batch.
"""

import numpy as np


def group_relative(rewards, valid, *, scale: bool = True, eps: float = 1e-6):
  """(r - mean) / (std + eps) within each group, over its valid samples.

  GRPO (arXiv:2402.03300), section 4.1.2, with the unbiased std; `scale=False`
  is Dr. GRPO (arXiv:2503.20783), eq. 5.

  Args:
    rewards: [N, G] float; entries that are not valid are not looked at.
    valid: [N, G] bool; False where a reward could not be computed.

  Returns:
    [N, G] float32; 0 where not valid, in groups without variance and in
    groups with fewer than two valid samples.
  """
  rewards = np.asarray(rewards, np.float64)
  valid = np.asarray(valid, bool)
  if rewards.shape != valid.shape or rewards.ndim != 2:
    raise ValueError(f'want two [N, G]: {rewards.shape}, {valid.shape}')
  count = valid.sum(axis=1, keepdims=True)
  total = np.where(valid, rewards, 0).sum(axis=1, keepdims=True)
  centred = np.where(valid, rewards - total / np.maximum(count, 1), 0)
  if scale:
    variance = (centred**2).sum(axis=1, keepdims=True)
    std = np.sqrt(variance / np.maximum(count - 1, 1))
    centred = centred / (std + eps)
  return np.where((count > 1) & ~uniform(rewards, valid)[:, None], centred, 0
                  ).astype(np.float32)


def uniform(rewards, valid):
  """[N] bool: groups whose valid rewards are all equal: they teach nothing."""
  rewards, valid = np.asarray(rewards, np.float64), np.asarray(valid, bool)
  low = np.where(valid, rewards, np.inf).min(axis=1)
  high = np.where(valid, rewards, -np.inf).max(axis=1)
  return high == low
