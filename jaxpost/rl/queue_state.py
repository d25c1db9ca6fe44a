"""Converts the rollouts in the queue (`config.rollout.staleness`) to JSON values and back, for checkpoints."""

from __future__ import annotations

from jaxpost.rl.grading import Grader, PendingRollout
from jaxpost.rollout import rollout_codec


def to_json(pending: PendingRollout) -> dict:
  """Returns a rollout as JSON values, without its rewards, which the workers may still be computing."""
  return {
    'info': pending.info,
    'chosen': pending.selected,
    'rollouts': [rollout_codec.to_text(r.rollout) for r in pending.rounds],
    'kept': [r.from_earlier_step for r in pending.rounds],
  }


def from_json(saved: dict, grader: Grader) -> PendingRollout:
  """Returns the rollout that `to_json` saved, and starts to grade it again."""
  rounds = [grader.submit(rollout_codec.from_text(text)).rounds[0] for text in saved['rollouts']]
  for round_, from_earlier_step in zip(rounds, saved['kept'], strict=True):
    round_.from_earlier_step = from_earlier_step
  return PendingRollout(grader, rounds, saved['info'], saved['chosen'])
