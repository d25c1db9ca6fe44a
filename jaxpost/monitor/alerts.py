"""Warnings about the known ways in which a run goes wrong, from the rows of its metrics."""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

FIRST = 5  # rows that set the level a warning compares with
PATIENCE = 10  # rows in a row before a noisy signal counts


def nonfinite(values: Mapping[str, Any]) -> list[str]:
  """Names of the values that are NaN, infinite or null."""
  return [k for k, v in values.items() if v is None or isinstance(v, float) and not math.isfinite(v)]


class Signals(dict[str, Any]):
  """The metrics of one row by their keys, and what `Alerts` derives; NaN for what a row lacks.

  weight: the least that corrections of the sampler leave, a mean weight or a share.
  start/KEY: mean of a metric over the first rows of the stage. all_failed: the failed groups of these rows.
  error: the first one of the reward in this step.
  nonfinite: names of the losses and norms that are not finite, '' for none.
  """

  def __missing__(self, key: str) -> float:
    return math.nan


class Rule(NamedTuple):
  """A known way to go wrong.

  holds: whether a row shows it; comparisons with NaN are false.
  text: the warning, with what to do; `str.format` fills in signals.
  patience: rows in a row that must show it.
  every: steps after which it is printed again; 0: never.
  """

  kind: str
  holds: Callable[[Signals], bool]
  text: str
  patience: int = PATIENCE
  every: int = 0


RULES = (
  Rule(
    'nonfinite',
    lambda s: bool(s['nonfinite']),
    '{nonfinite} not finite: lower lr, clip gradients, look at the batch of this step',
    patience=1,
  ),
  Rule(
    'failed',
    lambda s: s['failed_groups'] > 0,
    'the reward of {failed_groups:.0f} of {groups:.0f} groups failed ({all_failed:.0f} groups of this stage so far), '
    'and they train nothing: {error}',
    patience=1,
    every=50,
  ),
  # Without a reward, entropy falls because the model learns its data.
  Rule(
    'entropy',
    lambda s: s['has_reward'] and s['entropy'] < 0.1 * s['start/entropy'],
    'entropy {entropy:.2g} is under 10 % of its start {start/entropy:.2g}: the policy hardly explores; lower '
    'config.optim.lr or raise config.rl.kl_coef',
  ),
  Rule(
    'clipped',
    lambda s: s['completions/clipped_ratio'] > 0.5,
    '{completions/clipped_ratio:.0%} of completions are cut at config.rollout.max_new_tokens: raise it, or reward '
    'shorter answers',
  ),
  Rule(
    'length',
    lambda s: s['completions/mean_length'] > 3 * max(s['start/completions/mean_length'], 16),
    'completions grew from {start/completions/mean_length:.0f} to {completions/mean_length:.0f} tokens: does the '
    'reward pay for length?',
  ),
  Rule(
    'flat',
    lambda s: s['frac_reward_zero_std'] > 0.9,
    '{frac_reward_zero_std:.0%} of groups have equal rewards and teach nothing: other prompts, larger groups or a '
    'finer reward',
  ),
  Rule(
    'empty',
    lambda s: s['empty_updates'] > 0,
    'no token was trained in these steps: all is masked; does the reward return None, do all groups agree?',
  ),
  Rule(
    'removed',
    lambda s: s['weight'] < 0.05,
    'config.rl.importance, or vespo, leaves {weight:.1%} of the loss: weights or masks remove nearly all; a smaller '
    'config.rollout.staleness, or wider limits',
    patience=1,
  ),
  Rule(
    'limited',
    lambda s: s['clip_ratio/region_mean'] > 0.9,
    '{clip_ratio/region_mean:.0%} of tokens are clipped and have no gradient: fewer config.rl.epochs and minibatches, '
    'a lower config.optim.lr, or a wider config.rl.clip_low and clip_high',
    patience=1,
  ),
  # The first update of a rollout clips no value, so the mean over a step's updates stays well below 1.
  Rule(
    'values',
    lambda s: s['critic/vf_clipfrac'] > 0.5,
    '{critic/vf_clipfrac:.0%} of values are clipped and have no gradient: a lower config.critic.lr, fewer '
    'config.rl.epochs and minibatches, or a wider config.critic.value_clip',
  ),
  Rule(
    'wpo',
    lambda s: s['wpo/weight'] < 0.05,
    'config.preference.weighting leaves {wpo/weight:.1%} of the loss, as the pairs are far from what the policy '
    'writes: pairs of its own (online_dpo), a lower config.optim.lr, or no weighting',
    patience=1,
  ),
  Rule(
    'mismatch',
    lambda s: s['mismatch'] > 1.05,
    'sampler_mismatch {mismatch:.3f}: sampler and trainer disagree on log-probs. With several updates of a rollout, or '
    'rollout.staleness, the policy moves fast: lower config.optim.lr; else check dtypes, temperature, 8 bits',
    patience=1,
  ),
)


class Alerts:
  """Warnings of a run, from its train rows.

  `warnings` has one entry per kind and stage: {'stage', 'step', 'kind', 'text', 'count'}. They follow from values
  alone, so every repetition of a run warns the same; only the error of a reward is not in the rows that a resume reads.
  """

  def __init__(self) -> None:
    self.warnings: list[dict] = []
    self._first: dict[tuple[str, str], list[float]] = {}
    self._streak: dict[tuple[str, str], int] = {}
    self._printed: dict[tuple[str, str], int] = {}  # step
    self._failed: collections.Counter[str] = collections.Counter()

  def add(self, stage: str, step: int, kind: str, text: str, every: int = 0) -> bool:
    """Counts a warning; True where it is to be printed: the first of its kind and stage, or `every` steps later."""
    due = not every or step >= self._printed.get((stage, kind), -every) + every
    if due:
      self._printed[stage, kind] = step
    for old in self.warnings:
      if (old['stage'], old['kind']) == (stage, kind):
        old['count'] += 1
        return bool(every) and due
    self.warnings.append({'stage': stage, 'step': step, 'kind': kind, 'text': text, 'count': 1})
    return True

  def check(self, stage: str, step: int, row: Mapping[str, Any], error: str = '') -> list[str]:
    """Texts of the warnings to print: those that this row is the first to cause, and those that are due again.

    Args:
      error: of a reward in this step; a resume, which has the row alone, points to the samples.
    """
    signals = self._signals(stage, row)
    signals['error'] = error or 'samples/ has the errors'
    new = []
    for rule in RULES:
      streak = self._streak.get((stage, rule.kind), 0) + 1 if rule.holds(signals) else 0
      self._streak[stage, rule.kind] = streak
      if streak >= rule.patience:
        text = rule.text.format_map(signals)
        if self.add(stage, step, rule.kind, text, rule.every):
          new.append(text)
    return new

  def _signals(self, stage: str, row: Mapping[str, Any]) -> Signals:
    found = Signals({key: value for key, value in row.items() if value is not None})
    for key in ('entropy', 'completions/mean_length'):
      found[f'start/{key}'] = self._level(stage, key, found[key])
    self._failed[stage] += found.get('failed_groups', 0)
    found['all_failed'] = self._failed[stage]
    left = (found[key] for key in ('importance_weight', 'off_policy_kept', 'vespo/phi'))
    found['weight'] = min(left, key=lambda x: (math.isnan(x), x))
    mismatch = row.get('sampler_mismatch', math.nan)
    # Written as null, and so read by a resume, where it is not finite: it is the mean of exp of a difference.
    found['mismatch'] = math.inf if mismatch is None or math.isinf(mismatch) else mismatch
    if row.get('replay/used'):  # samples of an older policy
      found['mismatch'] = math.nan
    found['has_reward'] = 'reward' in row
    # An overflow of the loss scale lowers it, and is no cause for alarm.
    watched = () if row.get('overflowed_updates') else ('loss', 'grad_norm')
    found['nonfinite'] = ' and '.join(key for key in nonfinite(row) if key in watched)
    return found

  def _level(self, stage: str, key: str, value: float) -> float:
    """Mean over the first rows of a stage; NaN until there are enough."""
    first = self._first.setdefault((stage, key), [])
    if len(first) < FIRST:
      first.extend([value] if math.isfinite(value) else [])
      return math.nan
    return sum(first) / FIRST
