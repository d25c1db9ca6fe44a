"""Rewards that no reward function computes: of an environment, recorded with a rollout, or of a reward model.

Legend: N sequences, in P groups of G; C completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.rewards.groups import Graded
from jaxpost.rl.reward_metrics import REWARD_MODEL
from jaxpost.types import Rollout

if TYPE_CHECKING:
  from jaxpost.rl.grading import Grader


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
    from jaxpost.rl import process_rewards

    rollout, scores = process_rewards.grade(rollout, outputs, grader)
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
