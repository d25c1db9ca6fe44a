"""Advantages from the rewards of groups, on the host, and the table of all estimators.

Other estimators are in group_advantages.py, token_advantages.py and turn_advantages.py; the critic's is `values.gae`.

Legend: N sequences, G samples per prompt, P = N / G prompts, C completion tokens. Sequence n answers prompt n // G.
Masks select trained tokens; the results of other entries (tool output, padding, samples without a reward) are 0.

Arrays are numpy arrays on the host, and computations are in float64: they are a few kilobytes per step, and advantages
are computed once for the global batch, never for a micro-batch.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from jaxpost.losses.reduce import by_name, same_shape


def group_relative(
  rewards: ArrayLike, valid: ArrayLike, *, scale: str = 'group', eps: float = 1e-6, singleton: str = 'zero'
) -> np.ndarray:
  """(r - mean) / (std + eps) within each group, over its valid samples.

  GRPO (arXiv:2402.03300), section 4.1.2, with the unbiased std. Without scaling it is Dr. GRPO (arXiv:2503.20783), eq.
  5; with the std of the whole batch it is "Lite PPO" (arXiv:2508.08221).

  Args:
    rewards: [P, G] float; entries that are not valid are ignored.
    valid: [P, G] bool; False where a reward could not be computed.
    scale: what to divide by: the std of the 'group' or of the 'batch', or nothing ('none').
    singleton: advantage in a group with a single valid sample: 'zero', or 'raw' for its reward, as if mean and std
      were 0 and 1 (as in verl).

  Returns:
    [P, G] float32; 0 where not valid and in groups without variance.
  """
  rewards, valid = as_groups(rewards, valid)
  if scale not in ('group', 'batch', 'none'):
    raise ValueError(f"scale {scale!r}: want 'group', 'batch' or 'none'")
  count, centered = centered_rewards(rewards, valid, singleton)
  if scale == 'group':
    variance = (centered**2).sum(axis=1, keepdims=True)
    std = np.where(count == 1, 1, np.sqrt(variance / np.maximum(count - 1, 1)))
    centered = centered / np.where(std > 0, std + eps, 1)
  elif scale == 'batch':
    batch = rewards[valid]
    std = batch.std(ddof=1) if batch.size > 1 else 1
    centered = centered / (std + eps if std > 0 else 1)
  return centered.astype(np.float32)


def uniform(rewards: ArrayLike, valid: ArrayLike) -> np.ndarray:
  """Returns [P] bool: whether the valid rewards of a group are all equal, so that it has no gradient."""
  rewards, valid = as_groups(rewards, valid)
  low = np.where(valid, rewards, np.inf).min(axis=1)
  high = np.where(valid, rewards, -np.inf).max(axis=1)
  return high == low


def as_groups(rewards: ArrayLike, valid: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
  """Returns (rewards as float64, valid as bool), both [P, G]; ValueError for other shapes."""
  rewards = np.asarray(rewards, np.float64)
  valid = np.asarray(valid, bool)
  same_shape('rewards, valid [P, G]', 2, rewards, valid)
  return rewards, valid


def centered_rewards(rewards: np.ndarray, valid: np.ndarray, singleton: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns (number of valid samples [P, 1], r - mean [P, G]).

  In groups without variance r - mean is exactly 0: rounding would leave 1e-17, which a division by eps would amplify.
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


def token_rewards(rewards: np.ndarray, mask: np.ndarray, kl: np.ndarray | float, turns: np.ndarray) -> np.ndarray:
  """Returns [N, C]: `turns`, with the rest of the reward [N] (NaN: 0) added at the last trained token, minus the KL."""
  per_token = np.array(turns)
  trained = mask > 0
  last = mask.shape[1] - 1 - trained[:, ::-1].argmax(axis=1)
  per_token[np.arange(len(mask)), last] += np.nan_to_num(rewards) - per_token.sum(axis=1)
  return (per_token - kl) * trained


def adaptive_kl(coef: float, kl: float, target: float, horizon: float, steps: int) -> float:
  """Returns the KL coefficient after `steps` samples whose mean KL was `kl`.

  coef (1 + clip(kl / target - 1, -0.2, 0.2) min(steps / horizon, 1)): Ziegler et al. (arXiv:1909.08593), section 2.2.
  """
  error = np.clip(kl / target - 1, -0.2, 0.2)
  return float(coef * (1 + error * min(steps / horizon, 1)))


@dataclasses.dataclass(frozen=True)
class Estimator:
  """An entry of `ESTIMATORS`.

  Attributes:
    fn: (*takes, **reads) -> [P, G], or [N, C].
    takes: 'rewards' and 'valid' [P, G], 'lengths' [P, G] (trained tokens), 'mask' and 'token_rewards' [N, C], 'greedy'
      [N] (reward of the prompt's greedy answer), 'turn_rewards', 'sampled' and 'completions' [N, C] (see
      turn_advantages.py), 'components' {name: (weight, [P, G])} (the single rewards).
    reads: {argument of fn: field of config.rl}.
    scales: allowed values of config.rl.scale_rewards; the first is the default.
    compares: whether it compares the samples of a group, and so needs at least two.
    binary: whether it is defined for rewards of 0 and 1 only.
  """

  fn: Callable[..., np.ndarray]
  takes: tuple[str, ...] = ('rewards', 'valid')
  reads: Mapping[str, str] = dataclasses.field(default_factory=dict)
  scales: tuple[str, ...] = ('none',)
  compares: bool = True
  binary: bool = False


_SCALED = {'scale': 'scale_rewards', 'eps': 'std_eps', 'singleton': 'singleton'}
_TURNS = 'rewards', 'valid', 'turn_rewards', 'sampled'
_TURN_READS = {'scale': 'scale_rewards', 'eps': 'std_eps', 'gamma': 'turn_gamma'}
ESTIMATORS: dict[str, Estimator] = {
  'group': Estimator(group_relative, reads=_SCALED, scales=('group', 'batch', 'none')),
  'leave_one_out': Estimator(
    by_name('group_advantages:leave_one_out'), reads=_SCALED, scales=('none', 'leave_one_out')
  ),
  'reinforce_pp': Estimator(
    by_name('token_advantages:reinforce_plus_plus'),
    takes=('token_rewards', 'mask'),
    reads={'gamma': 'gamma'},
    compares=False,
  ),
  'reinforce_pp_baseline': Estimator(
    by_name('token_advantages:reinforce_plus_plus_baseline'),
    takes=('rewards', 'valid', 'mask'),
    reads={'singleton': 'singleton'},
  ),
  'remax': Estimator(
    by_name('token_advantages:remax'),
    takes=('token_rewards', 'mask', 'greedy'),
    reads={'gamma': 'gamma'},
    compares=False,
  ),
  'opo': Estimator(by_name('group_advantages:opo'), takes=('rewards', 'valid', 'lengths')),
  'gpg': Estimator(by_name('group_advantages:gpg')),
  'maxrl': Estimator(by_name('group_advantages:maxrl'), binary=True),
  'pass_at_k': Estimator(by_name('group_advantages:pass_at_k'), reads={'k': 'pass_k'}, binary=True),
  'best_minus_second': Estimator(by_name('group_advantages:best_minus_second'), reads={'eps': 'std_eps'}),
  'gdpo': Estimator(by_name('group_advantages:gdpo'), takes=('components', 'valid'), reads={'eps': 'std_eps'}),
  'mt_grpo': Estimator(by_name('turn_advantages:mt_grpo'), takes=_TURNS, reads=_TURN_READS, scales=('group', 'none')),
  'gigpo': Estimator(
    by_name('turn_advantages:gigpo'),
    takes=(*_TURNS, 'completions'),
    reads={**_TURN_READS, 'weight': 'step_weight'},
    scales=('group', 'none'),
  ),
}
