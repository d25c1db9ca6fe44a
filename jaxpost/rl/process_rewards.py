"""Rewards of the steps of a completion, from a process reward model.

Its output is read where it was trained (`data.preferences.make_steps_example`): at the line break after each step. The
last step of a completion ends with a stop token, which the model was not trained on, so a line break replaces it in
the model's input. A step's reward is placed at that token, so that PPO, VAPO and REINFORCE++ credit it to the tokens
before; methods that compare groups take the sum.

Legend: N sequences, C completion tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxpost.rl import batching
from jaxpost.roles import Frozen

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.rl.grading import Grader
  from jaxpost.types import Batch, Rollout


@dataclasses.dataclass
class StepJudge(Frozen):
  """A process reward model whose input has a line break instead of each stop token of a completion."""

  tokenizer: Tokenizer

  def __call__(self, batch: Batch) -> Any:
    """Runs the program on a placed batch whose `loss_weights` are those of completions, [M, B / M, T]."""
    stopped = (batch.loss_weights > 0) & jnp.isin(batch.tokens, jnp.asarray(self.tokenizer.stop_ids))
    tokens = jnp.where(stopped, self.tokenizer.encode('\n')[-1], batch.tokens)
    return super().__call__(batch.replace(tokens=tokens))


def grade(rollout: Rollout, values: np.ndarray, grader: Grader) -> tuple[Rollout, np.ndarray]:
  """Returns (the rollout with rewards of steps, rewards [N]).

  A step gets the model's probability that it is right, divided by the number of steps: more steps earn no more. A step
  that the limit of tokens cut off gets 0, as the model has not been trained inside of steps. The reward of a completion
  is the sum over its steps, from 0 to 1.

  Args:
    values: [N, C] log-odds.
    grader: its `model_weight` scales the rewards of steps in the rollout, but not the rewards [N].
  """
  ends, cut_off = step_ends(rollout, grader.tokenizer)
  # The clip keeps exp finite; the probability at 30 is 1 in float32.
  probability = 1 / (1 + np.exp(-np.clip(np.asarray(values, np.float64), -30, 30)))
  step_rewards = np.where(ends & ~cut_off, probability, 0) / np.maximum(ends.sum(axis=1, keepdims=True), 1)
  return rollout.replace(turn_rewards=grader.model_weight * step_rewards), step_rewards.sum(axis=1)


def step_ends(rollout: Rollout, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
  """Returns (ends, cut_off), both [N, C] bool.

  ends: tokens with a line break and stop tokens, the first of several in a row, and the last token.
  cut_off: those at which the limit of tokens ended a step.
  """
  ids = np.unique(rollout.completions)
  breaks = np.isin(
    rollout.completions, [i for i in ids.tolist() if i in tokenizer.stop_ids or '\n' in tokenizer.decode([i])]
  )
  repeated = np.zeros_like(breaks)
  repeated[:, 1:] = breaks[:, 1:] & breaks[:, :-1]
  last = np.arange(breaks.shape[1]) == np.maximum(rollout.lengths[:, None], 1) - 1
  ends = (breaks & ~repeated | last & ~breaks) & (batching.completion_mask(rollout) > 0)
  return ends, ends & ~breaks & ~np.asarray(rollout.finished, bool)[:, None]
