"""TODO."""

import collections
import dataclasses


@dataclasses.dataclass(frozen=True)
class Group:
  """The completions of one prompt; all lists have one entry a completion.

  Texts for plain prompts; lists of messages for conversational ones:
    Group(['2+2='] * 2, ['4', '5'], [[19], [20]], {'answer': ['4'] * 2})
  """

  prompts: list
  completions: list
  completion_ids: list  # of lists of int
  columns: dict  # name -> list


@dataclasses.dataclass(frozen=True)
class Graded:
  """Rewards of a group: the weighted sum over the functions that gave one."""

  rewards: list  # of float or None: none of the functions gave one
  components: dict  # function name -> list of float or None
  error: str | None  # why the group is masked
  timed_out: bool = False
  logged: tuple = ()  # (name, value) that the functions gave to log_metric


def stats_of(graded):
  """Counts over `Graded` groups, and means of what the functions logged."""
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
