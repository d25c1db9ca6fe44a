"""The rollouts of several rounds of sampling as one.

Legend: N sequences, G samples a prompt, P prompt tokens, C completion tokens.
"""

from collections.abc import Sequence

import numpy as np

from jaxpost.rl import batching
from jaxpost.rollout.rollout_codec import arrays_of
from jaxpost.types import Prompt, Rollout

# Metrics of rounds that are added up; others are averaged.
_COUNTS = (
  *('tools/malformed', 'episodes/failed', 'episodes/killed', 'episodes/begun_again', 'episodes/cancelled'),
  *('tokens_prefilled', 'tokens_cached', 'preempted', 'draft/tokens', 'draft/blocks'),
)


def merge(rollouts: Sequence[Rollout], groups: Sequence[Sequence[int]], measured: Sequence[Rollout] = ()) -> Rollout:
  """Joins the chosen groups of several rollouts into one.

  Args:
    groups: indices of the groups to take of each rollout.
    measured: rollouts whose figures are those of the result; (): all.
  """
  first = rollouts[0]
  size = batching.group_size(first)
  chosen = [_members(indices, size) for indices in groups]
  # Rollouts of environments are as wide as their longest episode.
  width = max(r.completions.shape[1] for r in rollouts)

  def join(name: str) -> np.ndarray:
    return np.concatenate([_pad_to(vars(r)[name][members], width) for r, members in zip(rollouts, chosen)])

  prompts: tuple[Prompt, ...] = tuple(r.prompts[g] for r, indices in zip(rollouts, groups) for g in indices)
  rewards = first.rewards
  if rewards:
    rewards = {
      name: np.concatenate([r.rewards[name][members] for r, members in zip(rollouts, chosen)]) for name in rewards
    }
  messages = first.messages
  if messages:
    messages = tuple(r.messages[n] for r, members in zip(rollouts, chosen) for n in members)
  figures = {}
  for name in first.figures:
    combine = np.sum if name in _COUNTS else np.mean
    figures[name] = combine([r.figures[name] for r in measured or rollouts]).item()
  return first.replace(
    prompts=prompts,
    rewards=rewards,
    messages=messages,
    figures=figures,
    occupancy=float(np.mean([r.occupancy for r in measured or rollouts])),
    **{name: join(name) for name in arrays_of(first)},
  )


def _members(groups: Sequence[int], size: int) -> np.ndarray:
  """Indices of all sequences of some groups."""
  return (np.asarray(groups, int)[:, None] * size + np.arange(size)).reshape(-1)


def _pad_to(x: np.ndarray, width: int) -> np.ndarray:
  """[N, C, ...] -> [N, width, ...], padded with 0; [N], and experts [N, P + C, L, k], unchanged."""
  return np.pad(x, ((0, 0), (0, width - x.shape[1]), *((0, 0),) * (x.ndim - 2))) if x.ndim in (2, 3) else x
