"""Rewards of the steps of a completion, from a process reward model.

It is read where it was trained (`data.preferences.make_steps_example`): at the line break after
each step, and at the last token. A step's reward stands at that token, so that PPO, VAPO and
REINFORCE++ credit it to the tokens before; methods that compare groups take the sum.

Legend: N sequences, C completion tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxpost.rl import batching

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.rl.grading import Grader
  from jaxpost.types import Rollout


def grade(rollout: Rollout, values: np.ndarray, grader: Grader) -> tuple[Rollout, np.ndarray]:
  """Returns (the rollout with rewards of steps, rewards [N]).

  A step gets the model's probability that it is right, divided by the number of steps: more steps earn no more.
  A reward is the sum over the steps, from 0 to 1.

  Args:
    values: [N, C] log-odds.
    grader: has the weight of the reward in the sum of rewards, which the rewards of steps hold.
  """
  ends = step_ends(rollout, grader.tokenizer)
  # The clip keeps exp finite; the probability at 30 is 1 in float32.
  chance = 1 / (1 + np.exp(-np.clip(np.asarray(values, np.float64), -30, 30)))
  share = np.where(ends, chance, 0) / np.maximum(ends.sum(axis=1, keepdims=True), 1)
  return rollout.replace(turn_rewards=grader.model_weight * share), share.sum(axis=1)


def step_ends(rollout: Rollout, tokenizer: Tokenizer) -> np.ndarray:
  """Returns [N, C] bool: tokens with a line break, the first of several in a row, and the last token."""
  ids = np.unique(rollout.completions)
  breaks = np.isin(rollout.completions, [i for i in ids.tolist() if '\n' in tokenizer.decode([i])])
  breaks[:, 1:] &= ~breaks[:, :-1]
  last = np.arange(breaks.shape[1]) == np.maximum(rollout.lengths[:, None], 1) - 1
  return (breaks | last) & (batching.completion_mask(rollout) > 0)
