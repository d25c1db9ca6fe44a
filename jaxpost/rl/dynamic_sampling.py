"""Dynamic sampling: rounds of prompts until enough groups carry a signal.

DAPO (arXiv:2503.14476, section 3.2): others are sampled in place of groups
that are all right or all wrong, by the reward `rl.correct_by` and not by the sum:
a length penalty would otherwise be all that a group is trained on.
"""

from __future__ import annotations

import logging
import typing

if typing.TYPE_CHECKING:
  from jaxpost.rl.grading import PendingRollout


def needs_more_groups(pending: PendingRollout, step: int, wanted: int, max_rounds: int) -> bool:
  """Returns True while another round has to be sampled; waits for the rewards.

  Adds `dynamic_sampling/*` to the metrics of the rollout and warns when
  `max_rounds` have not been enough.

  Args:
    wanted: groups that have to have right and wrong samples.
  """
  varied = pending.varied_groups()
  found = varied.sum()
  num_rounds = len(pending.rounds)
  pending.info['dynamic_sampling/rounds'] = num_rounds
  pending.info['dynamic_sampling/kept_ratio'] = float(varied.mean())
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
