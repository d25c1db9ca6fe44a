"""Draws prompts by their pass rate: solved ones are retired, or each has the probability 1 - pass rate.

`data.prompts.PromptStream` asks `Curriculum` whether to draw a row; the grader reports the
verdicts of every group that was sampled, also of those that dynamic sampling did not select.

Legend: P prompts (groups), G samples a prompt.
"""

from __future__ import annotations

import dataclasses
import logging
import typing

import numpy as np

from jaxpost.rl.reward_metrics import reward_table, verdict_table

if typing.TYPE_CHECKING:
  from jaxpost.data.prompts import PromptStream
  from jaxpost.rl.grading import GradedRollout, PendingRollout


@dataclasses.dataclass
class Curriculum:
  """Pass rates of the rows of the data, and the rule that decides which rows are drawn.

  Attributes:
    kind: 'retire': rows whose last group was all right are not drawn again;
      'prioritized': a row is drawn with probability 1 - its last pass rate (Kimi k1.5,
      arXiv:2501.12599, section 2.3.4).
    passes: lowest verdict of a right completion.
    rates: row -> pass rate of its last group; rows that were never sampled are drawn.
    passed_over: how many times a row was not drawn, so far.
    per_step: prompts of a step.
    drawn: number of rows drawn in the current pass over the data. The stream counts them, without those that it skips
      for their length, which train nothing.
  """

  kind: str
  seed: int
  passes: float
  stream: PromptStream
  rates: dict[int, float] = dataclasses.field(default_factory=dict)
  passed_over: int = 0
  per_step: int = 1
  drawn: int = 0

  def draws(self, row: int, index: int) -> bool:
    """Returns whether `row`, at `index` of the endless order of prompts, is drawn.

    After a pass that draws fewer rows than a step takes, all are drawn again: otherwise steps would train on
    the same few prompts over and over.
    """
    if index % len(self.stream) == 0:
      if index and self.drawn < min(self.per_step, len(self.stream)):
        logging.warning(
          f'{self.drawn} of {len(self.stream)} prompts are left to draw, and a step takes {self.per_step}; '
          'all are drawn again (config.rl.curriculum)'
        )
        self.rates.clear()
      self.drawn = 0
    rate = self.rates.get(row, 0.0)
    if self.kind == 'retire':
      drawn = rate < 1
    else:
      drawn = np.random.default_rng((self.seed, index, 0xC0)).random() >= rate
    if not drawn:
      self.passed_over += 1
    return drawn

  def observe(self, pending: PendingRollout, graded: GradedRollout) -> None:
    """Records the pass rates of a graded rollout, and adds `curriculum/*` to its metrics."""
    if graded.sampled is None:
      prompts, table = graded.rollout.prompts, graded.verdicts
    else:
      prompts = [prompt for r in pending.rounds if not r.from_earlier_step for prompt in r.rollout.prompts]
      table = verdict_table(graded.sampled, reward_table(graded.sampled), pending.grader.correct_by)
    if graded.rollout.demonstration is not None:  # the last of a group is an answer of the data, not of the policy
      table = table[:, :-1]
    for prompt, values in zip(prompts, table):
      values = values[np.isfinite(values)]
      if values.size:
        self.rates[self.stream.row(prompt.index)] = float((values >= self.passes).mean())
    rates = np.array([*self.rates.values()] or [0.0])
    pending.info |= {
      'curriculum/pass_rate': float(rates.mean()),
      'curriculum/solved': int((rates == 1).sum()),
      'curriculum/seen': len(self.rates),
      'curriculum/passed_over': self.passed_over,
    }

  def state(self) -> dict:
    """JSON values for a checkpoint."""
    rates = {str(row): rate for row, rate in self.rates.items()}
    return {'rates': rates, 'passed_over': self.passed_over, 'drawn': self.drawn}

  def restore(self, state: dict) -> None:
    """Continues from `state`."""
    self.rates = {int(row): rate for row, rate in state['rates'].items()}
    self.passed_over = state['passed_over']
    self.drawn = state.get('drawn', len(self.stream))  # absent in older checkpoints: as if the pass had drawn all
