"""The records of grading: a group of completions, and its rewards.

Legend: G completions of one prompt.
"""

import collections
import dataclasses
from collections.abc import Sequence


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
    graded_by: names of the functions that grade the group; None: all.
  """

  prompts: list[str | list[dict]]
  completions: list[str | list[dict]]
  completion_ids: list[list[int]]
  columns: dict[str, list]
  graded_by: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class Graded:
  """The rewards of a group.

  Attributes:
    rewards: G weighted sums over the functions that returned a reward; None where no function did.
    components: G values of each function, by its name.
    error: why the group is masked, or None.
    timed_out: True if a function exceeded its time limit.
    logged: (name, value) pairs that the functions passed to log_metric.
    graded_by: as in `Group`.
  """

  rewards: list[float | None]
  components: dict[str, list[float | None]]
  error: str | None
  timed_out: bool = False
  logged: tuple[tuple[str, float], ...] = ()
  graded_by: Sequence[str] | None = None


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
