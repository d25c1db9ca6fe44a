"""Warns about known ways in which runs fail, based on the rows of metrics."""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

FIRST = 5  # rows whose mean is the reference level of a warning
PATIENCE = 10  # consecutive rows before a noisy signal counts


def nonfinite(values: Mapping[str, Any]) -> list[str]:
  """Returns the names of values that are NaN, infinite or null."""
  return [k for k, v in values.items() if v is None or isinstance(v, float) and not math.isfinite(v)]


class Signals(dict[str, Any]):
  """The metrics of one row by key, with values that `Alerts` derives; NaN for keys that a row lacks.

  weight: the smallest mean weight, or share of kept tokens, of corrections of the sampler.
  start/KEY: mean of a metric over the first rows of the stage. all_failed: failed groups of the stage so far.
  error: the first error of the reward in this step.
  nonfinite: names of losses and norms that are not finite; '' if there are none.
  """

  def __missing__(self, key: str) -> float:
    return math.nan


class Rule(NamedTuple):
  """A known way in which runs fail.

  holds: whether a row shows it; comparisons with NaN are false.
  text: the warning and its remedy; `str.format` inserts signals.
  patience: consecutive rows that must show it.
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
  # The mean log-prob of a token doubles as well, since the answers keep their lengths. In a healthy run it falls by a
  # tenth or so. With a reward, the answers are samples, which may grow.
  Rule(
    'chosen',
    lambda s: not s['has_reward'] and s['logps/chosen'] < 2 * min(s['start/logps/chosen'], -1),
    'logps/chosen fell from {start/logps/chosen:.4g} to {logps/chosen:.4g}: chosen answers become less likely, too; '
    'lower config.optim.lr, raise config.preference.beta, or set config.preference.nll_coef (not for kto)',
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
    'ungraded',
    lambda s: s['has_reward'] and math.isnan(s['reward']) and s['empty_updates'] > 0 and not s['failed_groups'] > 0,
    'config.reward returned None for all {masked_samples:.0f} completions, which train nothing: does it fit the data?',
    patience=1,
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
    lambda s: s['sampler_mismatch'] > 1.05 and not s['replay/used'] > 0,  # replayed samples are of an older policy
    'sampler_mismatch {sampler_mismatch:.3f}: sampler and trainer disagree on log-probs. With rollout.staleness or '
    'rl.keep_surplus, the policy moves fast: lower config.optim.lr; else check dtypes, temperature, 8 bits',
    patience=1,
  ),
)


class Alerts:
  """Warnings of a run, from its train rows.

  `warnings` has one entry per kind and stage: {'stage', 'step', 'kind', 'text', 'count'}. They depend on values only,
  so each repetition of a run has the same warnings, except for the error of a reward, which a resumed run lacks.
  """

  def __init__(self) -> None:
    self.warnings: list[dict] = []
    self._first: dict[tuple[str, str], list[float]] = {}
    self._streak: dict[tuple[str, str], int] = {}
    self._printed: dict[tuple[str, str], int] = {}  # step
    self._failed: collections.Counter[str] = collections.Counter()

  def add(self, stage: str, step: int, kind: str, text: str, every: int = 0) -> bool:
    """Counts a warning; returns whether to print it: the first of its kind and stage, or `every` steps later."""
    is_due = not every or step >= self._printed.get((stage, kind), -every) + every
    if is_due:
      self._printed[stage, kind] = step
    for earlier in self.warnings:
      if (earlier['stage'], earlier['kind']) == (stage, kind):
        earlier['count'] += 1
        return bool(every) and is_due
    self.warnings.append({'stage': stage, 'step': step, 'kind': kind, 'text': text, 'count': 1})
    return True

  def check(self, stage: str, step: int, row: Mapping[str, Any], error: str = '') -> list[str]:
    """Returns the texts of warnings to print: those that this row causes first, and those that are due again.

    Args:
      error: of a reward in this step; without one (a resumed run has rows only), the text points to the samples.
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
    signals = Signals({key: value for key, value in row.items() if value is not None})
    for key in ('entropy', 'completions/mean_length', 'logps/chosen'):
      signals[f'start/{key}'] = self._level(stage, key, signals[key] or math.nan)  # 0: the row has no such answers
    self._failed[stage] += signals.get('failed_groups', 0)
    signals['all_failed'] = self._failed[stage]
    weights = (signals[key] for key in ('importance_weight', 'off_policy_kept', 'vespo/phi'))
    signals['weight'] = min(weights, key=lambda x: (math.isnan(x), x))
    if row.get('sampler_mismatch', 1.0) is None:  # the mean of exp(difference) has overflowed
      signals['sampler_mismatch'] = math.inf
    signals['has_reward'] = 'reward' in row
    # An overflow only lowers the loss scale.
    watched = () if row.get('overflowed_updates') else ('loss', 'grad_norm')
    signals['nonfinite'] = ' and '.join(key for key in nonfinite(row) if key in watched)
    return signals

  def _level(self, stage: str, key: str, value: float) -> float:
    """Returns the mean over the first rows of a stage; NaN until there are FIRST of them."""
    first = self._first.setdefault((stage, key), [])
    if len(first) < FIRST:
      if math.isfinite(value):
        first.append(value)
      return math.nan
    return sum(first) / FIRST
