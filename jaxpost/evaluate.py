"""Evaluation during training: held-out loss, and pass@k from samples.

Legend: N prompts, k samples a prompt.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jaxpost.roles import Policy, Sampler
from jaxpost.sharding import to_host
from jaxpost.types import Batch


def held_out_loss(policy: Policy, batches: list[Batch]) -> dict:
  """Mean -log p over all trained tokens of `batches` (weights 0 or 1)."""
  total = count = entropy = 0.0
  for batch in batches:
    outputs = to_host(policy.score(batch))
    total -= float(outputs.logprobs.sum(dtype=np.float64))
    entropy += float(outputs.entropy.sum(dtype=np.float64))
    count += float(batch.loss_weights.sum())
  return {'loss': total / count, 'entropy': entropy / count,
          'perplexity': math.exp(min(total / count, 50.0))}


def pass_at_k(passed: np.ndarray, k: int) -> float:
  """Chance that one of k samples passes, unbiased, from [N, n] bool.

  1 - C(n - c, k) / C(n, k), Chen et al. 2021 (arXiv:2107.03374), eq. 1.
  """
  n = passed.shape[1]
  chances = [1 - math.comb(n - int(c), k) / math.comb(n, k)
             for c in passed.sum(axis=1)]
  return float(np.mean(chances))


@dataclasses.dataclass
class SampledEval:
  """pass@k of completions of held-out prompts, graded as in training.

  Prompts of which a sample could not be graded are left out and counted.
  """

  sampler: Sampler
  pool: object  # RewardPool
  prompts: tuple  # of Prompt
  samples: int
  pass_reward: float
  temperature: float
  to_groups: Callable
  rows: Callable  # (rollout, groups, graded) -> sample rows

  def __call__(self, policy: Policy, step: int) -> tuple[dict, list[dict]]:
    self.sampler.sync(policy, step)
    rollout = self.sampler(
        self.prompts, self.samples, step, temperature=self.temperature)
    self.sampler.release()
    groups = self.to_groups(rollout)
    graded = self.pool.grade(groups)
    rewards = np.array([[math.nan if r is None else r for r in g.rewards]
                        for g in graded])
    whole = np.isfinite(rewards).all(axis=1)
    out = {'completions/mean_length': float(rollout.lengths.mean()),
           'completions/clipped_ratio': float(1 - rollout.finished.mean()),
           'ungraded_prompts': int((~whole).sum())}
    if whole.any():
      passed = rewards[whole] >= self.pass_reward
      ks = sorted({1, self.samples} | {
          2**i for i in range(int(math.log2(self.samples)) + 1)})
      out |= {f'pass@{k}': pass_at_k(passed, k) for k in ks}
      out['reward'] = float(rewards[whole].mean())
    return out, self.rows(rollout, groups, graded)


@dataclasses.dataclass
class Evaluator:
  """Everything `eval.*` asks for. Call it with the policy and the step."""

  batches: list[Batch]
  sampled: SampledEval | None = None

  def __call__(self, policy: Policy, step: int) -> tuple[dict, list[dict]]:
    """(metrics, sample rows)."""
    metrics, rows = {}, []
    if self.sampled is not None:
      metrics, rows = self.sampled(policy, step)
    if self.batches:
      metrics |= held_out_loss(policy, self.batches)
    return metrics, rows
