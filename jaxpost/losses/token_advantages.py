"""Advantage estimators from rewards of tokens: REINFORCE++ and ReMax, and whitening.

Legend and conventions are those of advantages.py. Rewards of tokens and masks are [N, C], and results [N, C] float32.
"""

import numpy as np
from numpy.typing import ArrayLike

from jaxpost.losses import advantages
from jaxpost.losses.reduce import same_shape


def whiten(x: ArrayLike, mask: ArrayLike) -> np.ndarray:
  """(x - mean) / sqrt(var + 1e-8), over all entries in the mask; the variance is unbiased."""
  mask, x = masked_tokens('x, mask [N, C]', mask, x)
  count = int(mask.sum())
  mean = x.sum() / max(count, 1)
  variance = ((x - mean) ** 2 * mask).sum() / max(count - 1, 1)
  white = (x - mean) / np.sqrt(variance + 1e-8)
  return np.where(mask, white, 0).astype(np.float32)


def returns_to_go(token_rewards: ArrayLike, mask: ArrayLike, gamma: float = 1.0) -> np.ndarray:
  """Returns discounted sums of the rewards from each token on.

  Tokens outside of the mask are skipped: their rewards are ignored, and discounts do not count them.

  Args:
    token_rewards: including -coef * KL if the KL is part of the reward.
  """
  mask, rewards = masked_tokens('token_rewards, mask [N, C]', mask, token_rewards)
  returns = np.zeros_like(rewards)
  total = np.zeros(len(rewards))
  for t in reversed(range(rewards.shape[1])):
    total = np.where(mask[:, t], rewards[:, t] + gamma * total, total)
    returns[:, t] = total
  return np.where(mask, returns, 0).astype(np.float32)


def reinforce_plus_plus(token_rewards: ArrayLike, mask: ArrayLike, gamma: float = 1.0) -> np.ndarray:
  """Returns whitened `returns_to_go`: REINFORCE++ (arXiv:2501.03262)."""
  return whiten(returns_to_go(token_rewards, mask, gamma), mask)


def reinforce_plus_plus_baseline(
  rewards: ArrayLike, valid: ArrayLike, mask: ArrayLike, *, singleton: str = 'zero'
) -> np.ndarray:
  """r - mean of the group, from rewards and valid [P, G], on every token; whitened over the batch.

  REINFORCE++-baseline (arXiv:2501.03262).
  """
  rewards, valid = advantages.as_groups(rewards, valid)
  mask = np.asarray(mask, bool)
  same_shape('rewards [P, G] and mask [N, C]', 1, rewards.ravel(), mask[:, 0])
  _, centered = advantages.centered_rewards(rewards, valid, singleton)
  mask = mask & valid.reshape(-1, 1)
  return whiten(np.where(mask, centered.reshape(-1, 1), 0), mask)


def remax(token_rewards: ArrayLike, mask: ArrayLike, greedy_rewards: ArrayLike, gamma: float = 1.0) -> np.ndarray:
  """Returns `returns_to_go` minus the reward of the greedy completion: ReMax (arXiv:2310.10505).

  Args:
    greedy_rewards: [N], reward of the greedy completion of each sequence's prompt.
  """
  greedy = np.asarray(greedy_rewards, np.float64)
  returns = returns_to_go(token_rewards, mask, gamma)
  same_shape('token_rewards [N, C] and greedy_rewards [N]', 1, returns[:, 0], greedy)
  gains = np.where(np.asarray(mask, bool), returns - greedy[:, None], 0)
  return gains.astype(np.float32)


def masked_tokens(names: str, mask: ArrayLike, *arrays: ArrayLike) -> tuple[np.ndarray, ...]:
  """Returns (mask as bool, *arrays as float64 with 0 outside of the mask); `names` is for `same_shape`."""
  mask = np.asarray(mask, bool)
  arrays = [np.asarray(a, np.float64) for a in arrays]
  same_shape(names, 2, mask, *arrays)
  return mask, *(np.where(mask, a, 0) for a in arrays)
