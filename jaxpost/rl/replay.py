"""Replays earlier right samples of the policy in groups whose samples are all wrong.

As in ARPO (arXiv:2505.16282), the last sample of such a group, which would have no advantage, is replaced by an earlier
right sample to the same prompt. That one keeps the log-probs with which it was sampled, so ratios to the sampler, or
the weights of `rl.importance`, correct for its age as they do for staleness.

Legend: P prompts (groups), G samples a prompt, N = P * G sequences, C completion tokens.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxpost.rl import batching, merging
from jaxpost.rl.grading import GradedRollout, Grader, PendingRollout, Round
from jaxpost.rl.reward_metrics import reward_table, verdict_table
from jaxpost.rollout import rollout_codec
from jaxpost.types import Prompt, Rollout


@dataclasses.dataclass
class Replay:
  """Stores the last right sample to each prompt, and replays it.

  Attributes:
    grader: grades groups with a replayed sample again.
    max_steps: highest age of a sample in steps; older ones are dropped and counted.
    passes: lowest verdict of a right completion.
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
    """Stores right samples of a step, and returns its rollout with earlier ones in groups that have none.

    Waits for the reward functions. Groups without a verdict stay as they are. Of the right samples of a
    group, the one with the largest mean log-prob is stored, and replaces an older one.
    """
    self.drawn = drawn = pending.result()
    fresh = {key: sample for key, sample in self.stored.items() if step - sample.step <= self.max_steps}
    expired = len(self.stored) - len(fresh)
    self.stored = fresh
    replayed: dict[int, Rollout] = {}  # group -> the sample that replaces its last one
    for g, (prompt, group_verdicts) in enumerate(zip(drawn.rollout.prompts, drawn.verdicts)):
      key = np.asarray(prompt.tokens, np.int32).tobytes()
      right = np.flatnonzero(group_verdicts >= self.passes)
      if right.size:
        self.stored[key] = _most_certain(drawn.rollout, g * len(group_verdicts) + right)
      elif key in self.stored and np.isfinite(group_verdicts[:-1]).any():
        replayed[g] = self.stored[key]
    self.figures = {'replay/used': len(replayed), 'replay/stored': len(self.stored), 'replay/expired': expired}
    if not replayed:
      return pending
    self.figures['replay/age'] = float(np.mean([step - sample.step for sample in replayed.values()]))
    rollout = _replace_last(drawn.rollout, replayed)
    results = list(drawn.results)
    regraded = self.grader.submit(merging.merge([rollout], [list(replayed)])).rounds[0].results
    sample_verdicts = verdict_table(regraded, reward_table(regraded), self.grader.correct_by)[:, -1]
    self.figures['replay/wrong'] = int((~(sample_verdicts >= self.passes)).sum())
    for g, group in zip(replayed, regraded):
      results[g] = group
    return PendingRollout(self.grader, [Round(rollout, graded=results)], pending.info)

  def metrics(self) -> dict:
    """Metrics of the rollout as it was sampled, and `replay/*`."""
    return self.drawn.metrics() | self.figures

  def state(self) -> list[str]:
    """JSON values for a checkpoint."""
    return [rollout_codec.to_text(sample) for sample in self.stored.values()]

  def restore(self, state: list[str]) -> None:
    """Continues from `state`."""
    samples = [rollout_codec.from_text(text) for text in state]
    self.stored = {sample.prompts[0].tokens.tobytes(): sample for sample in samples}


def _most_certain(rollout: Rollout, members: np.ndarray) -> Rollout:
  """Returns a rollout of the one sample of `members` with the largest mean log-prob, cut to its length."""
  mean_logprobs = rollout.logprobs[members].sum(axis=1) / np.maximum(rollout.lengths[members], 1)
  n = members[np.argmax(mean_logprobs)]
  width = rollout.completions.shape[1]

  def cut(x: np.ndarray) -> np.ndarray:
    x = x[n : n + 1]
    return (x[:, : rollout.lengths[n]] if x.ndim > 1 and x.shape[1] == width else x).copy()

  prompt = rollout.prompts[n // rollout.group_size]
  arrays = {name: cut(x) for name, x in rollout_codec.arrays_of(rollout).items()}
  arrays |= {'replayed': np.ones(1, bool), 'versions': cut(batching.token_versions(rollout))}
  return Rollout(
    prompts=(Prompt(prompt.index, np.asarray(prompt.tokens, np.int32), '', {}),), step=rollout.step, **arrays
  )


def _replace_last(rollout: Rollout, replayed: Mapping[int, Rollout]) -> Rollout:
  """Returns the rollout with the last sample of each group of `replayed` replaced by the stored one."""
  arrays = {name: x.copy() for name, x in rollout_codec.arrays_of(rollout).items()}
  arrays['replayed'] = np.zeros(len(rollout.lengths), bool)
  arrays['versions'] = batching.token_versions(rollout).copy()
  group_size = rollout.group_size
  for g, sample in replayed.items():
    n = (g + 1) * group_size - 1
    for name, x in arrays.items():
      x[n] = 0
      stored = vars(sample)[name]  # [1, ...], with fewer tokens than `x`
      x[n : n + 1][tuple(slice(size) for size in stored.shape)] = stored
  return rollout.replace(**arrays)
