"""Rewards that no reward function computes: of an environment, recorded with a rollout, or of a reward model.

A reward model grades completions or, if it is a process reward model, their steps. The output of the latter is read
where it was trained (`data.preferences.make_steps_example`): at the line break after each step. The last step of a
completion ends with a stop token, which the model was not trained on, so a line break replaces it in the model's input.
A step's reward is placed at that token, so that PPO, VAPO and REINFORCE++ credit it to the tokens before; methods that
compare groups take the sum.

Legend: N sequences, in P groups of G; C completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxpost.rewards.groups import Graded
from jaxpost.rl import batching
from jaxpost.rl.reward_metrics import REWARD_MODEL
from jaxpost.roles import Frozen

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.rl.grading import Grader
  from jaxpost.types import Batch, Rollout


def add_attached(groups: Sequence[Graded], rollout: Rollout) -> list[Graded]:
  """Returns the groups with the rewards that came with the rollout added.

  Args:
    groups: as the reward functions graded them.
    rollout: where its `rewards` are NaN, the sample gets no reward. They do not count for prompts whose source
      (`rl.sources`) has no environment.
  """
  size = len(groups[0].rewards)
  attached = rollout.rewards or {}
  results = []
  for i, (group, prompt) in enumerate(zip(groups, rollout.prompts, strict=True)):
    if prompt.source.get('environment') == '':
      no_values: dict[str, list[float | None]] = {name: [None] * size for name in attached}
      graded_by = group.graded_by if group.graded_by is not None else list(group.components)
      results.append(dataclasses.replace(group, components={**group.components, **no_values}, graded_by=graded_by))
      continue
    components = {
      name: [None if np.isnan(reward) else float(reward) for reward in values[i * size : (i + 1) * size]]
      for name, values in attached.items()
    }
    # If the functions returned None for every completion of a group, without an error, they count as 0.
    not_graded = group.error is None and all(reward is None for reward in group.rewards)
    # Floating-point sums depend on this order.
    rows = zip([0.0] * size if not_graded else group.rewards, *components.values())
    rewards = [None if None in parts else parts[0] + sum(parts[1:]) for parts in rows]
    results.append(dataclasses.replace(group, components={**group.components, **components}, rewards=rewards))
  return results


def add_reward_model(
  rollout: Rollout, results: Sequence[Graded], rewards: np.ndarray, outputs: np.ndarray, grader: Grader
) -> tuple[Rollout, list[Graded], np.ndarray]:
  """Adds the rewards of a reward model, except to samples whose other rewards have failed: these get no reward.

  Args:
    rewards: [P, G] sums of the other rewards.
    outputs: [N, C] of the reward model; the output at the last token of a completion is its reward.

  Returns:
    The rollout, with rewards of steps if `grader.per_step`, the results, and the sums [P, G].
  """
  last = np.maximum(rollout.lengths, 1) - 1
  scores = np.asarray(outputs, np.float64)[np.arange(len(last)), last]
  if grader.per_step:
    rollout, scores = grade_steps(rollout, outputs, grader)
  scores = scores.reshape(rewards.shape)
  missing = np.isnan(rewards)
  no_function = missing.all(axis=1, keepdims=True)  # groups that only the reward model grades
  raised = np.array([[group.error is not None] for group in results])
  failed = (missing & ~no_function) | raised
  for attached in (rollout.rewards or {}).values():
    failed |= np.isnan(attached).reshape(rewards.shape)  # episodes whose environment failed
  rewards = np.where(failed, np.nan, np.nan_to_num(rewards) + grader.model_weight * scores)
  with_model = [
    dataclasses.replace(group, components={**group.components, REWARD_MODEL: row.tolist()})
    for group, row in zip(results, scores, strict=True)
  ]
  return rollout, with_model, rewards


@dataclasses.dataclass
class StepJudge(Frozen):
  """A process reward model whose input has a line break instead of each stop token of a completion."""

  tokenizer: Tokenizer

  def __call__(self, batch: Batch) -> Any:
    """Runs the program on a placed batch whose `loss_weights` are those of completions, [M, B / M, T]."""
    stopped = (batch.loss_weights > 0) & jnp.isin(batch.tokens, jnp.asarray(self.tokenizer.stop_ids))
    tokens = jnp.where(stopped, self.tokenizer.encode('\n')[-1], batch.tokens)
    return super().__call__(batch.replace(tokens=tokens))


def grade_steps(rollout: Rollout, values: np.ndarray, grader: Grader) -> tuple[Rollout, np.ndarray]:
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
