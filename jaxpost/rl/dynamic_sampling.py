"""Dynamic sampling: rounds of prompts until enough groups carry a signal.

DAPO (arXiv:2503.14476, section 3.2): groups that are all right or all wrong are
replaced by newly sampled ones. The reward `rl.correct_by` decides, not the sum of rewards:
otherwise groups that differ only in a length penalty would be trained on.
"""

import dataclasses
import logging

import numpy as np

from jaxpost.rl import merging
from jaxpost.rl.grading import Grader, PendingRollout, Round, varied
from jaxpost.rl.reward_metrics import verdict_table
from jaxpost.rollout import rollout_codec


def needs_more_groups(pending: PendingRollout, step: int, num_groups: int, max_rounds: int) -> bool:
  """Returns True while another round has to be sampled; waits for the rewards.

  Adds `dynamic_sampling/*` to the metrics of the rollout and warns when `max_rounds` have not been enough.

  Args:
    num_groups: how many groups must have right and wrong samples.
  """
  num_varied = varied_groups(pending).sum()
  of_this_step = dataclasses.replace(pending, rounds=[r for r in pending.rounds if not r.from_earlier_step])
  num_rounds = len(of_this_step.rounds)
  pending.info['dynamic_sampling/rounds'] = num_rounds
  pending.info['dynamic_sampling/kept_ratio'] = float(varied_groups(of_this_step).mean())
  if num_varied >= num_groups:
    return False
  if num_rounds < max_rounds:
    return True
  pending.info['dynamic_sampling/missing'] = int(num_groups - num_varied)
  reward = f'reward {pending.grader.correct_by}'.rstrip()
  logging.warning(
    f'step {step + 1}: {num_varied} of {num_groups} groups differ in {reward} after {num_rounds} rounds; '
    'the update goes on with these (config.rl.dynamic_sampling)'
  )
  return False


def varied_groups(pending: PendingRollout) -> np.ndarray:
  """Waits for the rewards, and returns for each group of all rounds whether it has right and wrong samples."""
  correct_by = pending.grader.correct_by
  return np.concatenate([varied(verdict_table(r.results, r.rewards, correct_by)) for r in pending.rounds])


def select_varied(pending: PendingRollout, num_groups: int) -> PendingRollout:
  """Selects the first `num_groups` varied groups, those left over by earlier steps first.

  If there are too few, others fill up the step, as all steps have the same shape; the controller takes these out of
  the mask.
  """
  is_varied = varied_groups(pending)
  sizes = [len(r.rewards) for r in pending.rounds]
  is_old = np.repeat([r.from_earlier_step for r in pending.rounds], sizes)
  order = np.concatenate([np.flatnonzero(part) for part in (is_varied & is_old, is_varied & ~is_old, ~is_varied)])
  is_selected = np.isin(np.arange(len(order)), order[:num_groups])  # in the order of sampling again
  ends = np.cumsum(sizes)
  selected = [np.flatnonzero(part).tolist() for part in np.split(is_selected, ends[:-1])]
  return dataclasses.replace(pending, selected=selected)


@dataclasses.dataclass
class Surplus:
  """Groups with right and wrong answers that no step has trained on yet.

  A step that draws more of them than it takes leaves them to the next steps, which take the oldest first. Each step
  also samples a round of its own, so fewer groups wait than a round has.

  Attributes:
    max_steps: how many steps a group waits at most; later it is dropped and counted.
    waiting: the groups, one entry for each round that they were sampled in.
  """

  grader: Grader
  max_steps: int
  waiting: list[Round] = dataclasses.field(default_factory=list)

  def take(self, step: int) -> PendingRollout:
    """Removes all waiting groups, and returns those that step `step` may train on."""
    fresh = [r for r in self.waiting if step - r.rollout.step <= self.max_steps]
    info = {}
    if self.max_steps:
      expired = _num_groups(self.waiting) - _num_groups(fresh)
      info = {'dynamic_sampling/waiting': _num_groups(fresh), 'dynamic_sampling/expired': expired}
    self.waiting = []
    return PendingRollout(self.grader, fresh, info)

  def select(self, pending: PendingRollout, num_groups: int) -> PendingRollout:
    """Selects `num_groups` groups to train on, and keeps the other varied ones for later steps."""
    chosen = select_varied(pending, num_groups)
    if not self.max_steps:
      return chosen
    for round_, selected in zip(pending.rounds, chosen.selected):
      is_varied = varied(verdict_table(round_.results, round_.rewards, self.grader.correct_by))
      surplus = [g for g in np.flatnonzero(is_varied).tolist() if g not in selected]
      if surplus:
        rollout = merging.merge([round_.rollout], [surplus])
        graded = [round_.results[g] for g in surplus]
        self.waiting.append(Round(rollout, from_earlier_step=True, graded=graded))
    self.waiting.sort(key=lambda r: r.rollout.step)
    chosen.info['dynamic_sampling/surplus'] = _num_groups(self.waiting)
    return chosen

  def state(self) -> list[str]:
    """JSON values for a checkpoint."""
    return [rollout_codec.to_text(r.rollout) for r in self.waiting]

  def restore(self, state: list[str]) -> None:
    """Continues from `state`; the workers grade the groups again."""
    rounds = [self.grader.submit(rollout_codec.from_text(text)).rounds[0] for text in state]
    self.waiting = [dataclasses.replace(round_, from_earlier_step=True) for round_ in rounds]


def _num_groups(rounds: list[Round]) -> int:
  return sum(len(r.rollout.prompts) for r in rounds)
