"""Several teachers of `opd`: the log-probs that stand for those of one reference.

Each teacher scores the whole rollout, as a reference does. The result is the sum of their
log-probs, weighted by `distill.weights`, so that its distance from the policy is the k1 estimate of
sum_i w_i KL(student, teacher_i), the loss of `gkd` with beta = 1. A source of `rl.sources`
may have some of the teachers only; their weights then sum to 1 for its prompts.

Legend: N sequences, G samples a prompt, K teachers, C completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpost.types import Rollout


def weights(rollout: Rollout, config: Any) -> np.ndarray:
  """Returns the weight of each teacher for each sequence, [N, K] float64; rows sum to 1."""
  every = np.asarray(config.distill.weights or (1.0,) * len(config.distill.teachers), np.float64)
  table = np.zeros((len(rollout.prompts), len(every)))
  for row, prompt in zip(table, rollout.prompts):
    chosen = list(prompt.source.get('teachers', range(len(every))))
    row[chosen] = every[chosen] / every[chosen].sum()
  return np.repeat(table, len(rollout.lengths) // len(rollout.prompts), axis=0)


def combine(logprobs: Sequence[np.ndarray], rollout: Rollout, config: Any) -> np.ndarray:
  """Returns the weighted sum [N, C] float32 of the log-probs [N, C] of the K teachers."""
  shares = weights(rollout, config)
  return np.float32(sum(share[:, None] * x for share, x in zip(shares.T, logprobs, strict=True)))
