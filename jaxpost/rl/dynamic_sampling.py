"""Dynamic sampling: rounds of prompts until enough groups carry a signal.

DAPO (arXiv:2503.14476, section 3.2): groups whose rewards are all equal have
no advantage, so others are sampled in their place.
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
    wanted: groups whose rewards have to differ.
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
    'step %d: %d of %d groups differ in reward after %d rounds; the '
    'update goes on with these (config.rl.dynamic_sampling)',
    step + 1,
    found,
    wanted,
    num_rounds,
  )
  return False
