"""Dynamic sampling: rounds of prompts until enough groups carry a signal.

DAPO (arXiv:2503.14476, section 3.2): others are sampled in place of groups
that are all right or all wrong, by the reward `rl.correct_by` and not by the sum:
a length penalty would otherwise be all that a group is trained on.
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from jaxpost.rl import merging
from jaxpost.rl.grading import Grader, PendingRollout, Round, varied
from jaxpost.rl.reward_metrics import verdicts
from jaxpost.rollout import rollout_codec


def needs_more_groups(pending: PendingRollout, step: int, wanted: int, max_rounds: int) -> bool:
  """Returns True while another round has to be sampled; waits for the rewards.

  Adds `dynamic_sampling/*` to the metrics of the rollout and warns when
  `max_rounds` have not been enough.

  Args:
    wanted: groups that have to have right and wrong samples.
  """
  found = varied_groups(pending).sum()
  own = dataclasses.replace(pending, rounds=[r for r in pending.rounds if not r.from_earlier_step])
  num_rounds = len(own.rounds)
  pending.info['dynamic_sampling/rounds'] = num_rounds
  pending.info['dynamic_sampling/kept_ratio'] = float(varied_groups(own).mean())
  if found >= wanted:
    return False
  if num_rounds < max_rounds:
    return True
  pending.info['dynamic_sampling/missing'] = int(wanted - found)
  logging.warning(
    'step %d: %d of %d groups differ in reward%s after %d rounds; the '
    'update goes on with these (config.rl.dynamic_sampling)',
    step + 1,
    found,
    wanted,
    pending.grader.correct_by and f' {pending.grader.correct_by}',
    num_rounds,
  )
  return False


def varied_groups(pending: PendingRollout) -> np.ndarray:
  """[groups of all rounds] bool: the reward that decides what is correct differs within a group.

  Waits for the reward functions.
  """
  correct_by = pending.grader.correct_by
  return np.concatenate([varied(verdicts(r.results, r.rewards, correct_by)) for r in pending.rounds])


def select_varied(pending: PendingRollout, num_groups: int) -> PendingRollout:
  """Selects the first `num_groups` varied groups, those left over by earlier steps first.

  Others fill up where there are too few, as all steps have the same shape; the controller takes these out of the
  mask.
  """
  differs = varied_groups(pending)
  sizes = [len(r.rewards) for r in pending.rounds]
  old = np.repeat([r.from_earlier_step for r in pending.rounds], sizes)
  order = np.concatenate([np.flatnonzero(part) for part in (differs & old, differs & ~old, ~differs)])
  picked = np.isin(np.arange(len(differs)), order[:num_groups])  # in the order of sampling again
  ends = np.cumsum(sizes)
  selected = [np.flatnonzero(part).tolist() for part in np.split(picked, ends[:-1])]
  return dataclasses.replace(pending, selected=selected)


@dataclasses.dataclass
class Surplus:
  """Groups with right and wrong answers that no step has trained on yet.

  A step that draws more of them than it takes leaves them to the next steps, which take
  the oldest first. Each step also samples a round of its own, so fewer groups wait than a
  round has.

  Attributes:
    max_steps: that a group waits at most; it is dropped and counted afterwards.
    waiting: one entry for each round that they were sampled in.
  """

  grader: Grader
  max_steps: int
  waiting: list[Round] = dataclasses.field(default_factory=list)

  def take(self, step: int) -> PendingRollout:
    """Returns the groups that step `step` may train on; none waits any more."""
    fresh = [r for r in self.waiting if step - r.rollout.step <= self.max_steps]
    info = {}
    if self.max_steps:
      expired = _groups(self.waiting) - _groups(fresh)
      info = {'dynamic_sampling/waiting': _groups(fresh), 'dynamic_sampling/expired': expired}
    self.waiting = []
    return PendingRollout(self.grader, fresh, info)

  def select(self, pending: PendingRollout, wanted: int) -> PendingRollout:
    """Selects `wanted` groups to train on, and keeps the others that are varied."""
    chosen = select_varied(pending, wanted)
    if not self.max_steps:
      return chosen
    for one, taken in zip(pending.rounds, chosen.selected):
      differs = varied(verdicts(one.results, one.rewards, self.grader.correct_by))
      left = [g for g in np.flatnonzero(differs).tolist() if g not in taken]
      if left:
        self.waiting.append(_part(one, left))
    self.waiting.sort(key=lambda one: one.rollout.step)
    chosen.info['dynamic_sampling/surplus'] = _groups(self.waiting)
    return chosen

  def state(self) -> list[str]:
    """JSON values for a checkpoint."""
    return [rollout_codec.to_text(r.rollout) for r in self.waiting]

  def restore(self, state: list[str]) -> None:
    """Continues from `state`; the workers grade the groups again."""
    self.waiting = [self.grader.submit(rollout_codec.from_text(text)).rounds[0] for text in state]
    for one in self.waiting:
      one.from_earlier_step = True


def _part(one: Round, groups: list[int]) -> Round:
  """Some groups of a round whose rewards are known."""
  rollout = merging.merge([one.rollout], [groups])
  return Round(rollout, from_earlier_step=True, graded=[one.results[g] for g in groups])


def _groups(rounds: list[Round]) -> int:
  return sum(len(r.rollout.prompts) for r in rounds)
