"""Rewards that come with a rollout: of an environment, or recorded with it.

Legend: N sequences of groups of G.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxpost.rewards.groups import Graded
from jaxpost.types import Rollout


def add(groups: Sequence[Graded], rollout: Rollout) -> list[Graded]:
  """Returns the groups with further rewards.

  Args:
    groups: as the reward functions graded them.
    rollout: its `rewards` are NaN where there is none, which leaves the sample without a reward. They do not count for
      prompts whose source (`rl.sources`) has no environment.
  """
  size = len(groups[0].rewards)
  results = []
  for i, (group, prompt) in enumerate(zip(groups, rollout.prompts, strict=True)):
    if prompt.source.get('environment') == '':
      none = dict.fromkeys(rollout.rewards, [None] * size)
      by = group.graded_by if group.graded_by is not None else list(group.components)
      results.append(dataclasses.replace(group, components={**group.components, **none}, graded_by=by))
      continue
    own = {name: values[i * size : (i + 1) * size] for name, values in rollout.rewards.items()}
    components = {name: [None if np.isnan(r) else float(r) for r in values] for name, values in own.items()}
    # In this order: floating-point sums depend on it.
    rows = zip(group.rewards, *components.values())
    rewards = [None if None in parts else parts[0] + sum(parts[1:]) for parts in rows]
    results.append(dataclasses.replace(group, components={**group.components, **components}, rewards=rewards))
  return results
