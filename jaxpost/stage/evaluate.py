"""Evaluation during training: pass@k from samples; `held_out_loss.py` has the loss.

Legend: N prompts, k samples a prompt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.distributed import watchdog

if TYPE_CHECKING:
  from jaxpost.rewards.groups import Graded
  from jaxpost.rl.grading import Grader
  from jaxpost.roles import Roles
  from jaxpost.rollout.sampler import Sampler
  from jaxpost.stage.held_out_loss import HeldOut
  from jaxpost.types import Prompt, Rollout


def pass_at_k(passed: np.ndarray, k: int) -> float:
  """Chance that one of k samples passes, unbiased, from [N, n] bool.

  1 - C(n - c, k) / C(n, k), Chen et al. 2021 (arXiv:2107.03374), eq. 1.
  """
  n = passed.shape[1]
  chances = [1 - math.comb(n - int(c), k) / math.comb(n, k) for c in passed.sum(axis=1)]
  return float(np.mean(chances))


def pass_rates(passed: np.ndarray) -> dict[str, float]:
  """Returns {'pass@k': chance} for k = 1, 2, 4, ... and n, from [N, n] bool."""
  n = passed.shape[1]
  ks = sorted({2**i for i in range(n.bit_length())} | {n})
  return {f'pass@{k}': pass_at_k(passed, k) for k in ks}


def pass_metrics(graded: Sequence[Graded], verdicts: np.ndarray, pass_reward: float) -> dict[str, float]:
  """Returns pass@k by the verdicts, and pass@k/NAME by each reward.

  Prompts of which a sample has no verdict are left out and counted. pass@k/NAME
  also leaves out prompts that the reward NAME does not apply to.

  Args:
    graded: of N prompts; verdicts: [N, k] values of the reward that decides what is correct.
    pass_reward: value of any reward from which a sample passes.
  """
  from jaxpost.rl.reward_metrics import reward_table  # which no SFT run reads

  whole = np.isfinite(verdicts).all(axis=1)  # [N]
  tables = {'': verdicts} | {f'/{name}': reward_table(graded, name) for name in graded[0].components}
  out: dict[str, float] = {'ungraded_prompts': int((~whole).sum())}
  for suffix, table in tables.items():
    judged = whole & np.isfinite(table).all(axis=1)
    if judged.any():
      out |= {f'{name}{suffix}': chance for name, chance in pass_rates(table[judged] >= pass_reward).items()}
  return out


@dataclasses.dataclass
class SampledEval:
  """pass@k of completions of held-out prompts, graded as in training.

  The reward `config.rl.correct_by` says what has passed, see `pass_metrics`.

  score: (rollout, roles) -> [N k, C] values of the reward model, if there is one.
  offload: `config.rollout.offload`, as in training.
  """

  sampler: Sampler
  grader: Grader
  prompts: tuple[Prompt, ...]
  samples: int
  pass_reward: float
  temperature: float
  score: Callable[[Rollout, Roles], np.ndarray] | None = None
  offload: bool = False

  def __call__(self, roles: Roles, step: int) -> tuple[dict, list[dict]]:
    from jaxpost.rl import reward_metrics

    engine = self.sampler.engine
    with contextlib.ExitStack() as during:
      during.enter_context(engine.preserve_weights())  # the next rollout may need those that are loaded now
      if self.offload:
        from jaxpost.rl import offload

        during.enter_context(offload.offloaded(roles))
      engine.load(roles.policy.params, step)
      rollout = self.sampler(self.prompts, self.samples, step, temperature=self.temperature)
      engine.unload()
    pending = self.grader.submit(rollout)
    graded = pending.result(self.score(rollout, roles) if self.score else None)
    out = {
      'completions/mean_length': float(rollout.lengths.mean()),
      'completions/clipped_ratio': float(1 - rollout.finished.mean()),
      **pass_metrics(graded.results, graded.verdicts, self.pass_reward),
      **reward_metrics.component_metrics(graded.results),
    }
    whole = np.isfinite(graded.verdicts).all(axis=1)
    if whole.any():
      out['reward'] = float(graded.rewards.reshape(-1, self.samples)[whole].mean())
    return out, graded.sample_rows()


@dataclasses.dataclass
class Evaluator:
  """Everything `eval.*` asks for. Call it with the roles and the step."""

  held_out: HeldOut | None = None
  sampled: SampledEval | None = None

  @watchdog.slow_operation('an evaluation')
  def __call__(self, roles: Roles, step: int) -> tuple[dict, list[dict]]:
    """(metrics, sample rows)."""
    metrics: dict[str, float] = {}
    rows: list[dict] = []
    if self.sampled is not None:
      metrics, rows = self.sampled(roles, step)
    if self.held_out is not None:
      metrics |= self.held_out(roles)
    return metrics, rows
