"""Looks for the known ways a run goes wrong, in the rows of its metrics."""

import math
from collections.abc import Mapping
from typing import Any

FIRST = 5  # rows that set the level a warning compares with
PATIENCE = 10  # rows in a row before a noisy signal counts


def nonfinite(values: Mapping[str, Any]) -> list[str]:
  """Names of the values that are NaN, infinite or null."""
  return [k for k, v in values.items() if v is None or isinstance(v, float) and not math.isfinite(v)]


class Watch:
  """Warnings of a run, from its train rows.

  `warnings` has one entry per kind and stage: {'stage', 'step', 'kind',
  'text', 'count'}. Decides from values only, so every run says the same.
  """

  def __init__(self):
    self.warnings, self._first, self._streak = [], {}, {}

  def add(self, stage: str, step: int, kind: str, text: str) -> bool:
    """Counts a warning; True where it is the first of its kind and stage."""
    for old in self.warnings:
      if (old['stage'], old['kind']) == (stage, kind):
        old['count'] += 1
        return False
    self.warnings.append({'stage': stage, 'step': step, 'kind': kind, 'text': text, 'count': 1})
    return True

  def _level(self, stage: str, key: str, value: float) -> float:
    """Mean over the first rows of a stage; NaN until there are enough."""
    first = self._first.setdefault((stage, key), [])
    if len(first) < FIRST:
      first.extend([value] if math.isfinite(value) else [])
      return math.nan
    return sum(first) / FIRST

  def check(self, stage: str, step: int, row: Mapping[str, Any]) -> list[str]:
    """Texts of the warnings that this row is the first to cause."""
    entropy, length, clipped, flat, mismatch, empty = (
      math.nan if row.get(k) is None else row[k]
      for k in (
        'entropy',
        'completions/mean_length',
        'completions/clipped_ratio',
        'frac_reward_zero_std',
        'sampler_mismatch',
        'empty_updates',
      )
    )
    explore = self._level(stage, 'entropy', entropy)
    short = self._level(stage, 'length', length)
    bad = [
      k for k in nonfinite(row) if k in ('loss', 'grad_norm') and not row.get('overflowed_updates')
    ]  # the loss scale sees to it
    # Kind, holds now (NaN compares false), rows in a row it must hold, text.
    rules = (
      (
        'nonfinite',
        bad,
        1,
        f'{" and ".join(bad)} not finite: lower lr, clip gradients, look at the batch of this step',
      ),
      # Without a reward, entropy falls because the model learns its data.
      (
        'entropy',
        'reward' in row and entropy < 0.1 * explore,
        PATIENCE,
        f'entropy {entropy:.2g} is under 10 % of its start {explore:.2g}: the '
        'policy hardly explores; lower lr or raise the kl coefficient',
      ),
      (
        'clipped',
        clipped > 0.5,
        PATIENCE,
        f'{clipped:.0%} of completions are cut at max_tokens: raise it, or reward shorter answers',
      ),
      (
        'length',
        length > 3 * max(short, 16),
        PATIENCE,
        f'completions grew from {short:.0f} to {length:.0f} tokens: does the reward pay for length?',
      ),
      (
        'flat',
        flat > 0.9,
        PATIENCE,
        f'{flat:.0%} of groups have equal rewards and teach nothing: other prompts, larger groups or a finer reward',
      ),
      (
        'empty',
        empty > 0,
        PATIENCE,
        'no token was trained in these steps: all is masked; does the reward return None, do all groups agree?',
      ),
      (
        'mismatch',
        mismatch > 1.05,
        1,
        f'sampler_mismatch {mismatch:.3f}: sampler and trainer disagree on log-probs; check dtypes, temperature',
      ),
    )
    new = []
    for kind, holds, patience, text in rules:
      streak = self._streak.get((stage, kind), 0) + 1 if holds else 0
      self._streak[stage, kind] = streak
      if streak >= patience and self.add(stage, step, kind, text):
        new.append(text)
    return new
