"""Advantage estimators from rewards, on the host; the critic's is `values.gae`.

Legend: N prompts, G samples of each, S = N * G sequences, C completion tokens.
Sequence s answers prompt s // G. Masks are over trained tokens; masked entries
(tool output, padding, samples without a reward) come out as 0.

Arrays are numpy arrays on the host, float64 inside: a few kilobytes per step,
computed once for the global batch and never inside a micro-batch.
"""

import numpy as np
from numpy.typing import ArrayLike

from jaxpost.losses.reduce import same_shape


def group_relative(
  rewards: ArrayLike, valid: ArrayLike, *, scale: bool | str = True, eps: float = 1e-6, singleton: str = 'zero'
) -> np.ndarray:
  """(r - mean) / (std + eps) within each group, over its valid samples.

  GRPO (arXiv:2402.03300), section 4.1.2, with the unbiased std. Without
  scaling it is Dr. GRPO (arXiv:2503.20783), eq. 5; with the std of the whole
  batch it is "Lite PPO" (arXiv:2508.08221).

  Args:
    rewards: [N, G] float; entries that are not valid are ignored.
    valid: [N, G] bool; False where a reward could not be computed.
    scale: divide by the std of the 'group' (or True), of the 'batch', or by
      nothing: 'none' (or False).
    singleton: advantage in a group with a single valid sample: 'zero', or 'raw'
      for its reward, as if mean and std were 0 and 1 (as in verl).

  Returns:
    [N, G] float32; 0 where not valid and in groups without variance.
  """
  rewards, valid = _groups(rewards, valid)
  scale = {True: 'group', False: 'none'}.get(scale, scale)
  if scale not in ('group', 'batch', 'none'):
    raise ValueError(f"scale {scale!r}: want 'group', 'batch' or 'none'")
  count, centered = _centered(rewards, valid, singleton)
  if scale == 'group':
    variance = (centered**2).sum(axis=1, keepdims=True)
    std = np.sqrt(variance / np.maximum(count - 1, 1))
    centered = centered / (np.where(count == 1, 1, std) + eps)
  elif scale == 'batch':
    kept = rewards[valid]
    centered = centered / ((kept.std(ddof=1) if kept.size > 1 else 1) + eps)
  return centered.astype(np.float32)


def uniform(rewards: ArrayLike, valid: ArrayLike) -> np.ndarray:
  """Returns [N] bool: groups whose valid rewards are all equal, so have no gradient."""
  rewards, valid = _groups(rewards, valid)
  low = np.where(valid, rewards, np.inf).min(axis=1)
  high = np.where(valid, rewards, -np.inf).max(axis=1)
  return high == low


def leave_one_out(rewards: ArrayLike, valid: ArrayLike, *, singleton: str = 'zero') -> np.ndarray:
  """r_i - mean of the others = n / (n - 1) (r_i - mean), n valid samples.

  RLOO (arXiv:2402.14740). Arguments and result are those of `group_relative`.
  """
  rewards, valid = _groups(rewards, valid)
  count, centered = _centered(rewards, valid, singleton)
  centered = centered * count / np.maximum(count - 1, 1)
  return centered.astype(np.float32)


def _groups(rewards: ArrayLike, valid: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
  rewards = np.asarray(rewards, np.float64)
  valid = np.asarray(valid, bool)
  same_shape('rewards, valid [N, G]', 2, rewards, valid)
  return rewards, valid


def _centered(rewards: np.ndarray, valid: np.ndarray, singleton: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns (number of valid samples [N, 1], r - mean [N, G]).

  Groups without variance give exactly 0: rounding would leave 1e-17 there, and
  dividing by eps makes that matter.
  """
  if singleton not in ('zero', 'raw'):
    raise ValueError(f"singleton {singleton!r}: want 'zero' or 'raw'")
  count = valid.sum(axis=1, keepdims=True)
  total = np.where(valid, rewards, 0).sum(axis=1, keepdims=True)
  centered = np.where(valid, rewards - total / np.maximum(count, 1), 0)
  centered = np.where(uniform(rewards, valid)[:, None], 0, centered)
  if singleton == 'raw':
    centered = np.where((count == 1) & valid, rewards, centered)
  return count, centered


def whiten(x: ArrayLike, mask: ArrayLike) -> np.ndarray:
  """(x - mean) / sqrt(var + 1e-8) over all masked-in entries of [S, C].

  The variance is unbiased.
  """
  mask, x = masked_tokens('x, mask [S, C]', mask, x)
  count = mask.sum()
  mean = x.sum() / max(count, 1)
  variance = ((x - mean) ** 2 * mask).sum() / max(count - 1, 1)
  white = (x - mean) / np.sqrt(variance + 1e-8)
  return np.where(mask, white, 0).astype(np.float32)


def returns_to_go(token_rewards: ArrayLike, mask: ArrayLike, gamma: float = 1.0) -> np.ndarray:
  """Discounted sums of the rewards from each token on.

  Masked tokens are skipped: their rewards are ignored, and they take no
  discount.

  Args:
    token_rewards: [S, C], including -coef * KL if the KL is part of the reward.

  Returns:
    [S, C] float32.
  """
  mask, rewards = masked_tokens('token_rewards, mask [S, C]', mask, token_rewards)
  returns = np.zeros_like(rewards)
  total = np.zeros(len(rewards))
  for t in reversed(range(rewards.shape[1])):
    total = np.where(mask[:, t], rewards[:, t] + gamma * total, total)
    returns[:, t] = total
  return np.where(mask, returns, 0).astype(np.float32)


def reinforce_plus_plus(token_rewards: ArrayLike, mask: ArrayLike, gamma: float = 1.0) -> np.ndarray:
  """Returns whitened `returns_to_go` [S, C]: REINFORCE++ (arXiv:2501.03262)."""
  return whiten(returns_to_go(token_rewards, mask, gamma), mask)


def reinforce_plus_plus_baseline(
  rewards: ArrayLike, valid: ArrayLike, mask: ArrayLike, *, singleton: str = 'zero'
) -> np.ndarray:
  """r - mean of the group on every token, whitened over the batch.

  REINFORCE++-baseline (arXiv:2501.03262).

  Args:
    rewards, valid: [N, G].
    mask: [N * G, C].

  Returns:
    [N * G, C] float32.
  """
  rewards, valid = _groups(rewards, valid)
  mask = np.asarray(mask, bool)
  same_shape('rewards [N, G] and mask [N * G, C]', 1, rewards.ravel(), mask[:, 0])
  _, centered = _centered(rewards, valid, singleton)
  mask = mask & valid.reshape(-1, 1)
  return whiten(np.where(mask, centered.reshape(-1, 1), 0), mask)


def remax(token_rewards: ArrayLike, mask: ArrayLike, greedy_rewards: ArrayLike, gamma: float = 1.0) -> np.ndarray:
  """Returns-to-go minus the reward of the greedy completion.

  ReMax (arXiv:2310.10505).

  Args:
    token_rewards, mask: [S, C].
    greedy_rewards: [S], reward of the greedy completion of each sequence's prompt.

  Returns:
    [S, C] float32.
  """
  greedy = np.asarray(greedy_rewards, np.float64)
  returns = returns_to_go(token_rewards, mask, gamma)
  same_shape('token_rewards [S, C] and greedy_rewards [S]', 1, returns[:, 0], greedy)
  gains = np.where(np.asarray(mask, bool), returns - greedy[:, None], 0)
  return gains.astype(np.float32)


def adaptive_kl(coef: float, kl: float, target: float, horizon: float, steps: int) -> float:
  """The KL coefficient after `steps` samples whose mean KL was `kl`.

  coef (1 + clip(kl / target - 1, -0.2, 0.2) steps / horizon): Ziegler et al.
  (arXiv:1909.08593), section 2.2.
  """
  error = np.clip(kl / target - 1, -0.2, 0.2)
  return float(coef * (1 + error * steps / horizon))


def masked_tokens(what: str, mask: ArrayLike, *arrays: ArrayLike) -> tuple[np.ndarray, ...]:
  """Returns (mask as bool, *arrays as float64, 0 where masked)."""
  mask = np.asarray(mask, bool)
  arrays = [np.asarray(a, np.float64) for a in arrays]
  same_shape(what, 2, mask, *arrays)
  return mask, *(np.where(mask, a, 0) for a in arrays)
