"""Advantage estimators for conversations, from the rewards of their turns: MT-GRPO and GiGPO.

Legend: N sequences, G samples per prompt, P = N / G prompts, C completion tokens, K the largest number of turns.
A turn is a run of sampled tokens; between two turns are the tokens of the environment's answer. Advantages are [N, C]
float32.
"""

import collections

import numpy as np
from numpy.typing import ArrayLike

from jaxpost.losses import advantages
from jaxpost.losses.reduce import same_shape


def mt_grpo(
  rewards: ArrayLike,
  valid: ArrayLike,
  turn_rewards: ArrayLike,
  sampled: ArrayLike,
  *,
  gamma: float = 1.0,
  scale: str = 'group',
  eps: float = 1e-6,
) -> np.ndarray:
  """sum over l >= k of gamma^(l - k) A_l for the tokens of turn k; the last turn includes the outcome.

  MT-GRPO (arXiv:2505.11821): A_l is the reward of turn l, normalized within the group as in GRPO;
  to that of the last turn the normalized outcome is added. The paper has two turns, with advantages
  A_1 + A_2 and A_2. Here turn l is compared with those of the samples that have a turn l.

  Args:
    rewards, valid: [P, G]; the outcome is the reward minus the sum of the rewards of all turns.
    turn_rewards: [N, C], the reward of a turn at one of its tokens.
    sampled: [N, C], nonzero for tokens of turns.
  """
  rewards, valid = advantages.as_groups(rewards, valid)
  turns = turns_of(sampled)
  per_turn, outcome, last = _split(rewards, turn_rewards, turns)
  gains = np.zeros_like(per_turn)
  for k in range(gains.shape[1]):
    has_turn = valid & (last >= k).reshape(valid.shape)
    turn_k = per_turn[:, k].reshape(valid.shape)
    gains[:, k] = advantages.group_relative(turn_k, has_turn, scale=scale, eps=eps).ravel()
  outcome_gains = advantages.group_relative(outcome.reshape(valid.shape), valid, scale=scale, eps=eps)
  gains[np.arange(len(last)), last] += outcome_gains.ravel()
  return _to_tokens(_to_go(gains, gamma), turns)


def gigpo(
  rewards: ArrayLike,
  valid: ArrayLike,
  turn_rewards: ArrayLike,
  sampled: ArrayLike,
  completions: ArrayLike,
  *,
  gamma: float = 0.95,
  weight: float = 1.0,
  scale: str = 'group',
  eps: float = 1e-6,
) -> np.ndarray:
  """Returns the advantage of the episode in its group, plus `weight` times that of the turn among turns of its state.

  GiGPO (arXiv:2505.10978): turns of a group that start from the same state are compared by their discounted sums of
  rewards from there on, where the last turn includes the outcome. A turn whose state no other turn shares adds 0. The
  state is the observation: the tokens of the environment directly before the turn.

  Args:
    rewards, valid, turn_rewards, sampled: as in `mt_grpo`.
    completions: [N, C] tokens.
  """
  rewards, valid = advantages.as_groups(rewards, valid)
  turns = turns_of(sampled)
  returns, outcome, last = _split(rewards, turn_rewards, turns)
  returns[np.arange(len(last)), last] += outcome
  returns = _to_go(returns, gamma)
  gains = np.zeros_like(returns)
  for places in states(turns, completions, rewards.shape[1]).values():
    rows, columns = np.array(places).T
    state_returns, state_valid = returns[rows, columns][None], valid.ravel()[rows][None]
    gains[rows, columns] = advantages.group_relative(state_returns, state_valid, scale=scale, eps=eps)
  episodes = advantages.group_relative(rewards, valid, scale=scale, eps=eps).reshape(-1, 1)
  return _to_tokens(episodes + weight * gains, turns)


def turns_of(sampled: ArrayLike) -> np.ndarray:
  """Returns [N, C]: the number of the turn of each sampled token, from 0; -1 for other tokens."""
  sampled = np.asarray(sampled) > 0
  begins = sampled & ~np.pad(sampled, ((0, 0), (1, 0)))[:, :-1]
  return np.where(sampled, begins.cumsum(axis=1) - 1, -1)


def states(turns: np.ndarray, completions: ArrayLike, group_size: int) -> dict[tuple, list[tuple[int, int]]]:
  """Returns {(prompt, observation): [(sequence, turn), ...]}: turns that start from the same state.

  Args:
    turns: [N, C], the result of `turns_of`.
    completions: [N, C] tokens; the observation is the tokens between a turn and the one before.
  """
  turns_of_state = collections.defaultdict(list)
  for n, (row, tokens) in enumerate(zip(turns, np.asarray(completions))):
    end = 0
    for k in range(row.max(initial=-1) + 1):
      (places,) = np.nonzero(row == k)
      turns_of_state[n // group_size, tokens[end : places[0]].tobytes()].append((n, k))
      end = places[-1] + 1
  return turns_of_state


def _split(rewards: np.ndarray, turn_rewards: ArrayLike, turns: np.ndarray) -> tuple[np.ndarray, ...]:
  """Returns (rewards of turns [N, K], outcome: reward minus their sum [N], number of the last turn [N], -1 if none)."""
  turn_rewards = np.asarray(turn_rewards, np.float64)
  same_shape('turn_rewards, sampled [N, C]', 2, turn_rewards, turns)
  same_shape('rewards [P, G] and sampled [N, C]', 1, rewards.ravel(), turns[:, 0])
  last = turns.max(axis=1)
  per_turn = np.zeros((len(turns), max(last.max(initial=0) + 1, 1)))
  rows, columns = np.nonzero(turns >= 0)
  np.add.at(per_turn, (rows, turns[rows, columns]), turn_rewards[rows, columns])
  return per_turn, np.nan_to_num(rewards).ravel() - per_turn.sum(axis=1), last


def _to_go(x: np.ndarray, gamma: float) -> np.ndarray:
  """Returns discounted sums [N, K] of x [N, K] from each turn on."""
  sums = x.copy()
  for k in reversed(range(x.shape[1] - 1)):
    sums[:, k] += gamma * sums[:, k + 1]
  return sums


def _to_tokens(per_turn: np.ndarray, turns: np.ndarray) -> np.ndarray:
  """Returns [N, C] float32: for each sampled token the entry of its turn in `per_turn` [N, K], 0 for others."""
  values = np.take_along_axis(per_turn, np.maximum(turns, 0), axis=1)
  return np.where(turns >= 0, values, 0).astype(np.float32)
