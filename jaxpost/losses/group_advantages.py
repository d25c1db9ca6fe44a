"""Advantage estimators from the rewards of groups, beyond that of GRPO.

Legend: P prompts, G samples of each. Unless they say otherwise, functions take rewards [P, G] and valid [P, G] bool, as
in advantages.py, and return [P, G] float32: 0 where not valid, and in groups without variance.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from jaxpost.errors import InputError
from jaxpost.losses import advantages


def leave_one_out(
  rewards: ArrayLike, valid: ArrayLike, *, scale: str = 'none', eps: float = 1e-6, singleton: str = 'zero'
) -> np.ndarray:
  """r_i - mean of the others = n / (n - 1) (r_i - mean), n valid samples.

  RLOO (arXiv:2402.14740). Arguments and result are those of `advantages.group_relative`, except `scale`:
  'leave_one_out' divides by the std of the other samples where it is not 0, as NeMo-RL does; 'none' does not divide.
  """
  if scale not in ('leave_one_out', 'none'):
    raise ValueError(f"scale {scale!r}: want 'leave_one_out' or 'none'")
  rewards, valid = advantages.as_groups(rewards, valid)
  count, centered = advantages.centered_rewards(rewards, valid, singleton)
  gains = centered * count / np.maximum(count - 1, 1)
  if scale == 'leave_one_out':
    # The sum of squared distances of the other samples from their mean: Welford's update, backwards.
    total = (centered**2).sum(axis=1, keepdims=True)
    squares = np.maximum(total - centered**2 * count / np.maximum(count - 1, 1), 0)
    std = np.where(squares > 1e-12 * total, np.sqrt(squares / np.maximum(count - 2, 1)), 0)
    gains = gains / np.where(std > 0, std + eps, 1)
  return gains.astype(np.float32)


def opo(rewards: ArrayLike, valid: ArrayLike, lengths: ArrayLike) -> np.ndarray:
  """r - sum(length r) / sum(length), sums over the group.

  OPO (arXiv:2505.23585), eq. 8: the baseline of minimal variance, if squared gradients are proportional to lengths.

  Args:
    lengths: [P, G], trained tokens of each sample.
  """
  rewards, valid = advantages.as_groups(rewards, valid)
  weight = np.where(valid, lengths, 0)
  total = np.where(valid, weight * rewards, 0).sum(axis=1, keepdims=True)
  baseline = total / np.maximum(weight.sum(axis=1, keepdims=True), 1)
  uniform = advantages.uniform(rewards, valid)[:, None]
  return np.where(valid & ~uniform, rewards - baseline, 0).astype(np.float32)


def gpg(rewards: ArrayLike, valid: ArrayLike) -> np.ndarray:
  """a (r - mean of the group), a = samples / samples of groups that are not uniform.

  GPG (arXiv:2504.02546), eq. 7, with F_norm = 1. verl counts samples of reward 0
  instead of those in uniform groups, which is not what the paper derives.
  """
  rewards, valid = advantages.as_groups(rewards, valid)
  centered = advantages.group_relative(rewards, valid, scale='none')
  in_varied_group = ~advantages.uniform(rewards, valid)[:, None] & valid
  return (centered * (valid.sum() / max(in_varied_group.sum(), 1))).astype(np.float32)


def maxrl(rewards: ArrayLike, valid: ArrayLike) -> np.ndarray:
  """(r - mean) / mean within each group, for rewards of 0 and 1.

  MaxRL (arXiv:2602.02710): in the limit of many samples the policy gradient of the
  log of the pass rate, instead of that of the pass rate.

  Raises:
    InputError: a reward is neither 0 nor 1.
  """
  rewards, valid = advantages.as_groups(rewards, valid)
  _check_binary(rewards, valid, 'maxrl')
  count = valid.sum(axis=1, keepdims=True)
  mean = np.where(valid, rewards, 0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
  centered = advantages.group_relative(rewards, valid, scale='none')
  return (centered / np.where(mean > 0, mean, 1)).astype(np.float32)


def pass_at_k(rewards: ArrayLike, valid: ArrayLike, k: int) -> np.ndarray:
  """Returns the advantages of samples in pass@k: the mean of those of the k-subsets that contain the sample.

  Pass@k training (arXiv:2508.10751), section 2.3: with R = 1 - C(wrong, k) / C(n, k)
  and s = sqrt(R (1 - R)), the advantage of a right sample is (1 - R) / s, and that of a
  wrong one (1 - R - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / s.

  Raises:
    InputError: a reward is neither 0 nor 1.
  """
  rewards, valid = advantages.as_groups(rewards, valid)
  _check_binary(rewards, valid, 'pass_at_k')
  out = np.zeros_like(rewards)
  for i, (values, ok) in enumerate(zip(rewards, valid)):
    n = int(ok.sum())
    wrong = int((ok & (values == 0)).sum())
    if n < k:
      continue
    pass_rate = 1 - math.comb(wrong, k) / math.comb(n, k)  # R
    if pass_rate in (0, 1):
      continue
    fail_rate = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)  # of the subsets with a given wrong sample
    std = math.sqrt(pass_rate * (1 - pass_rate))
    out[i] = np.where(values == 1, 1 - pass_rate, 1 - pass_rate - fail_rate) / std
  return np.where(valid, out, 0).astype(np.float32)


def best_minus_second(rewards: ArrayLike, valid: ArrayLike, *, eps: float = 1e-6) -> np.ndarray:
  """(best - second best) / (std + eps) for the best sample of a group, 0 for the others.

  It estimates the gradient of the expected maximum (arXiv:2503.19595), and divides by the
  unbiased std of the group, as verl's `grpo_passk` does.
  """
  rewards, valid = advantages.as_groups(rewards, valid)
  out = np.zeros_like(rewards)
  for i, (values, ok) in enumerate(zip(rewards, valid)):
    if ok.sum() > 1:
      order = np.argsort(np.where(ok, values, -np.inf))
      if gap := values[order[-1]] - values[order[-2]]:
        out[i, order[-1]] = gap / (values[ok].std(ddof=1) + eps)
  return out.astype(np.float32)


def gdpo(components: Mapping[str, tuple[float, ArrayLike]], valid: ArrayLike, *, eps: float = 1e-6) -> np.ndarray:
  """Returns the weighted sum of the advantages of the single rewards, divided by its std over the batch.

  GDPO (arXiv:2601.05242), eqs. 4 to 6: sum over k of w_k (r_k - mean) / (std + eps) within
  each group, then whitened over the batch, where its mean is 0 because that of each group is.
  So the scale of a reward has no effect, only its weight.

  Args:
    components: {name: (weight, values [P, G])}; a value is NaN where the reward does not
      apply, and then adds 0.
  """
  valid = np.asarray(valid, bool)
  total = np.zeros(valid.shape)
  for weight, values in components.values():
    total += weight * advantages.group_relative(values, valid & np.isfinite(values), eps=eps)
  return advantages.group_relative(total, valid, scale='batch', eps=eps)


def _check_binary(rewards: np.ndarray, valid: np.ndarray, name: str) -> None:
  others = sorted(set(rewards[valid].tolist()) - {0.0, 1.0})
  if others:
    raise InputError(
      f'config.rl.advantage: {name!r} is defined for rewards of 0 and 1, and a reward was {others[0]:g}; '
      "use one verifier as config.reward, or rl.advantage='group'"
    )
