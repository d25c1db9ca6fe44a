"""The records of grading: a group of completions, and its rewards.

Legend: G completions of one prompt.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

REWARD_MODEL = 'reward_model'  # name of the reward of a reward model that is a role


@dataclasses.dataclass(frozen=True)
class Group:
  """The G completions of one prompt. All lists have G entries.

  Prompts and completions are texts for plain prompts, lists of messages for conversational ones:

    Group(['2+2='] * 2, ['4', '5'], [[19], [20]], {'answer': ['4'] * 2})

  Attributes:
    prompts: the prompt, G times.
    completions: what the policy generated.
    completion_ids: the tokens of each completion.
    columns: the other columns of the prompt's row, by name, each G times.
  """

  prompts: list[str | list[dict]]
  completions: list[str | list[dict]]
  completion_ids: list[list[int]]
  columns: dict[str, list]


@dataclasses.dataclass(frozen=True)
class Graded:
  """The rewards of a group.

  Attributes:
    rewards: G weighted sums over the functions that returned a reward; None where no function did.
    components: G values of each function, by its name.
    error: why the group is masked, or None.
    timed_out: True if a function exceeded its time limit.
    logged: (name, value) pairs that the functions passed to log_metric.
  """

  rewards: list[float | None]
  components: dict[str, list[float | None]]
  error: str | None
  timed_out: bool = False
  logged: tuple[tuple[str, float], ...] = ()


def reward_table(graded: Sequence[Graded], name: str = '') -> np.ndarray:
  """Returns [P, G] float64 of P groups, NaN for None: the sums of rewards, or the values of one reward."""
  rows = [g.components[name] if name else g.rewards for g in graded]
  return np.array([[np.nan if r is None else r for r in row] for row in rows], np.float64)


def verdicts(graded: Sequence[Graded], rewards: np.ndarray, name: str) -> np.ndarray:
  """Returns [P, G] float64: values of the reward that decides what is correct; NaN for samples without a reward.

  Args:
    rewards: [P, G] sums, NaN where a sample has none.
    name: of the reward that decides; '' is the sum, which also stands in where nothing was graded.
  """
  values = reward_table(graded, name) if name and graded[0].components else rewards
  return np.where(np.isfinite(rewards), values, np.nan)


def stats_of(graded: Sequence[Graded]) -> dict[str, float]:
  """Returns counts of groups, failures and masked rows, and the means of the logged values."""
  logged = collections.defaultdict(list)
  for name, value in (pair for g in graded for pair in g.logged):
    logged[f'logged/{name}'].append(value)
  return {
    **{name: sum(v) / len(v) for name, v in logged.items()},
    'groups': len(graded),
    'failed_groups': sum(g.error is not None for g in graded),
    'timeouts': sum(g.timed_out for g in graded),
    'masked_rows': sum(r is None for g in graded for r in g.rewards),
  }
