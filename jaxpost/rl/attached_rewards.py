"""Rewards that come with a rollout: of an environment, or recorded with it.

Legend: N sequences of groups of G.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxpost.rewards.groups import Graded


def add(groups: Sequence[Graded], attached: Mapping[str, np.ndarray]) -> list[Graded]:
  """Returns the groups with further rewards.

  Args:
    groups: as the reward functions graded them.
    attached: {name: [N] rewards}, NaN where there is none, which leaves the sample without a reward.
  """
  size = len(groups[0].rewards)
  results = []
  for i, group in enumerate(groups):
    own = {name: values[i * size : (i + 1) * size] for name, values in attached.items()}
    components = {name: [None if np.isnan(r) else float(r) for r in values] for name, values in own.items()}
    # In this order: floating-point sums depend on it.
    rows = zip(group.rewards, *components.values())
    rewards = [None if None in parts else parts[0] + sum(parts[1:]) for parts in rows]
    results.append(dataclasses.replace(group, components={**group.components, **components}, rewards=rewards))
  return results
