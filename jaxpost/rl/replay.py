"""Replay of the policy's own right samples, in groups of wrong ones.

As in ARPO (arXiv:2505.16282), a group of wrong samples, which would teach nothing, gets
an earlier right sample to the same prompt in the place of its last one. It keeps the log-probs
with which it was sampled, so ratios to the sampler, or the weights of `rl.importance`, correct
for its age as they do for staleness.

Legend: P prompts (groups), G samples a prompt, N = P * G sequences, C completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxpost.rl import batching, merging
from jaxpost.rl.grading import GradedRollout, Grader, PendingRollout, Round
from jaxpost.rl.reward_metrics import reward_table, verdicts
from jaxpost.rollout import rollout_codec
from jaxpost.rollout.rollout_codec import arrays_of
from jaxpost.types import Prompt, Rollout


@dataclasses.dataclass
class Replay:
  """The last right sample to each prompt, and where it is used again.

  Attributes:
    grader: grades what is used again, together with its new group.
    max_steps: age of a sample at most; it is dropped and counted afterwards.
    passes: verdict from which a completion is right.
    stored: {tokens of the prompt: rollout of one sample}.
    drawn: the rollout of the step as the policy has sampled it.
  """

  grader: Grader
  max_steps: int
  passes: float
  stored: dict[bytes, Rollout] = dataclasses.field(default_factory=dict)
  drawn: GradedRollout | None = None
  figures: dict[str, float] = dataclasses.field(default_factory=dict)

  def mix(self, pending: PendingRollout, step: int) -> PendingRollout:
    """Stores the right samples of a step, and returns its rollout with earlier ones in groups that have none.

    Waits for the reward functions. Groups without a verdict stay as they are. Of the right samples of a
    group, the one with the largest mean log-prob is stored, in place of an older one.
    """
    self.drawn = drawn = pending.result()
    fresh = {key: one for key, one in self.stored.items() if step - one.step <= self.max_steps}
    expired = len(self.stored) - len(fresh)
    self.stored = fresh
    used: dict[int, Rollout] = {}  # group -> the sample that takes the place of its last one
    for g, (prompt, found) in enumerate(zip(drawn.rollout.prompts, drawn.verdicts)):
      key = np.asarray(prompt.tokens, np.int32).tobytes()
      right = np.flatnonzero(found >= self.passes)
      if right.size:
        self.stored[key] = _most_certain(drawn.rollout, g * len(found) + right)
      elif key in self.stored and np.isfinite(found[:-1]).any():
        used[g] = self.stored[key]
    self.figures = {'replay/used': len(used), 'replay/stored': len(self.stored), 'replay/expired': expired}
    if not used:
      return pending
    self.figures['replay/age'] = float(np.mean([step - one.step for one in used.values()]))
    rollout = _replaced(drawn.rollout, used)
    results = list(drawn.results)
    again = self.grader.submit(merging.merge([rollout], [list(used)])).rounds[0].results
    found = verdicts(again, reward_table(again), self.grader.correct_by)[:, -1]
    self.figures['replay/wrong'] = int((~(found >= self.passes)).sum())
    for g, group in zip(used, again):
      results[g] = group
    return PendingRollout(self.grader, [Round(rollout, graded=results)], pending.info)

  def metrics(self) -> dict:
    """Metrics of the rollout as it was sampled, and `replay/*`."""
    return self.drawn.metrics() | self.figures

  def state(self) -> list[str]:
    """JSON values for a checkpoint."""
    return [rollout_codec.to_text(one) for one in self.stored.values()]

  def restore(self, state: list[str]) -> None:
    """Continues from `state`."""
    found = [rollout_codec.from_text(text) for text in state]
    self.stored = {one.prompts[0].tokens.tobytes(): one for one in found}


def _most_certain(rollout: Rollout, members: np.ndarray) -> Rollout:
  """A rollout of the one sample with the largest mean log-prob, cut to its length."""
  length = rollout.lengths[members]
  n = members[np.argmax(rollout.logprobs[members].sum(axis=1) / np.maximum(length, 1))]
  width = rollout.completions.shape[1]

  def one(x: np.ndarray) -> np.ndarray:
    x = x[n : n + 1]
    return (x[:, : rollout.lengths[n]] if x.ndim > 1 and x.shape[1] == width else x).copy()

  prompt = rollout.prompts[n // batching.group_size(rollout)]
  arrays = {name: one(x) for name, x in arrays_of(rollout).items()}
  arrays |= {'replayed': np.ones(1, bool), 'versions': one(batching.token_versions(rollout))}
  return Rollout(
    prompts=(Prompt(prompt.index, np.asarray(prompt.tokens, np.int32), '', {}),), step=rollout.step, **arrays
  )


def _replaced(rollout: Rollout, used: Mapping[int, Rollout]) -> Rollout:
  """The rollout with stored samples in the place of the last ones of these groups."""
  arrays = {name: x.copy() for name, x in arrays_of(rollout).items()}
  arrays['replayed'] = np.zeros(len(rollout.lengths), bool)
  arrays['versions'] = batching.token_versions(rollout).copy()
  size = batching.group_size(rollout)
  for g, one in used.items():
    n = (g + 1) * size - 1
    for name, x in arrays.items():
      x[n] = 0
      stored = vars(one)[name]  # [1, ...]
      x[n : n + 1][tuple(slice(size) for size in stored.shape)] = stored
  return rollout.replace(**arrays)
