"""Joins the rollouts of several rounds of sampling into one.

Legend: N sequences, G samples a prompt, P prompt tokens, C completion tokens.
"""

from collections.abc import Sequence

import numpy as np

from jaxpost.rollout.rollout_codec import arrays_of
from jaxpost.types import Rollout

# Metrics that are summed over rounds; others are averaged.
_COUNTS = (
  *('tools/malformed', 'episodes/failed', 'episodes/killed', 'episodes/begun_again', 'episodes/cancelled'),
  *('tokens_prefilled', 'tokens_cached', 'preempted', 'draft/tokens', 'draft/blocks'),
)


def merge(rollouts: Sequence[Rollout], groups: Sequence[Sequence[int]], measured: Sequence[Rollout] = ()) -> Rollout:
  """Joins the chosen groups of several rollouts into one.

  Args:
    groups: indices of the groups to take of each rollout.
    measured: rollouts whose metrics are combined for the result; (): all.
  """
  first = rollouts[0]
  size = first.group_size
  parts = [(rollout, _members(indices, size)) for rollout, indices in zip(rollouts, groups)]
  # Rollouts of environments are as wide as their longest episode.
  width = max(rollout.completions.shape[1] for rollout in rollouts)

  def join(name: str) -> np.ndarray:
    return np.concatenate([_pad_to(vars(rollout)[name][members], width) for rollout, members in parts])

  def join_rewards(name: str) -> np.ndarray:
    return np.concatenate([(rollout.rewards or {})[name][members] for rollout, members in parts])

  prompts = tuple(rollout.prompts[g] for rollout, indices in zip(rollouts, groups) for g in indices)
  rewards = first.rewards and {name: join_rewards(name) for name in first.rewards}
  messages = first.messages and tuple((rollout.messages or ())[n] for rollout, members in parts for n in members)
  measured = measured or rollouts
  figures = {}
  for name in first.figures:
    combine = np.sum if name in _COUNTS else np.mean
    figures[name] = combine([rollout.figures[name] for rollout in measured]).item()
  return first.replace(
    prompts=prompts,
    rewards=rewards,
    messages=messages,
    figures=figures,
    occupancy=float(np.mean([rollout.occupancy for rollout in measured])),
    **{name: join(name) for name in arrays_of(first)},
  )


def _members(groups: Sequence[int], size: int) -> np.ndarray:
  """Returns the indices of all sequences of some groups."""
  return (np.asarray(groups, int)[:, None] * size + np.arange(size)).reshape(-1)


def _pad_to(x: np.ndarray, width: int) -> np.ndarray:
  """Pads [N, C, ...] with 0 to [N, width, ...]; returns [N], and experts [N, P + C, L, k], unchanged."""
  if x.ndim not in (2, 3):
    return x
  no_padding = (0, 0)
  return np.pad(x, (no_padding, (0, width - x.shape[1]), *[no_padding] * (x.ndim - 2)))
