"""Warns about known ways in which runs fail, based on the rows of metrics; alerts.toml has the texts."""

import collections
import math
import pathlib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

FIRST = 5  # rows whose mean is the reference level of a warning
CERTAIN = 3  # consecutive rows that suffice where all samples or groups show a problem


def nonfinite(values: Mapping[str, Any]) -> list[str]:
  """Returns the names of values that are NaN, infinite or null."""
  return [k for k, v in values.items() if v is None or isinstance(v, float) and not math.isfinite(v)]


class Signals(dict[str, Any]):
  """The metrics of one row by key, with values that `Alerts` derives; NaN for keys that a row lacks.

  weight: the smallest mean weight, or share of kept tokens, of corrections of the sampler.
  start/KEY: mean of a metric over the first rows of the stage. all_failed: failed groups of the stage so far.
  completions: their number. recent_reward: mean of the last three steps. best_reward: the largest such mean before; NaN
  after a negative reward, as the mean of rewards of both signs may be near 0. first_kl: the first `kl` of the stage.
  error: the first error of the reward, or of an episode, in this step.
  nonfinite: names of losses and norms that are not finite; '' if there are none.
  """

  def __missing__(self, key: str) -> float:
    return math.nan


# {name of a warning in alerts.toml: function that returns whether a row shows it}; comparisons with NaN are false.
HOLDS: dict[str, Callable[[Signals], bool]] = {
  'nonfinite': lambda s: bool(s['nonfinite']),
  'failed': lambda s: s['failed_groups'] > 0,
  'lost': lambda s: s['episodes/failed'] > 0,
  # The mean log-prob of a token doubles as well, since the answers keep their lengths. In a healthy run it falls by a
  # tenth or so. With a reward, the answers are samples, which may grow.
  'chosen': lambda s: not s['has_reward'] and s['logps/chosen'] < 2 * min(s['start/logps/chosen'], -1),
  # Without a reward, entropy falls because the model learns its data.
  'entropy': lambda s: s['has_reward'] and s['entropy'] < 0.1 * s['start/entropy'],
  'clipped': lambda s: s['completions/clipped_ratio'] > 0.5,
  'length': lambda s: s['completions/mean_length'] > 3 * max(s['start/completions/mean_length'], 16),
  'flat': lambda s: s['frac_reward_zero_std'] > 0.9,
  'ungraded': lambda s: (
    s['has_reward'] and math.isnan(s['reward']) and s['empty_updates'] > 0 and not s['failed_groups'] > 0
  ),
  'unrewarded': lambda s: (
    math.isfinite(s['reward'])
    and s['masked_samples'] > 0.1 * s['completions']
    and not (s['failed_groups'] > 0 or s['episodes/failed'] > 0)
  ),
  # The row of a step has a learning rate if one of its updates trained a token.
  'empty': lambda s: s['empty_updates'] > 0 and {'lr', 'critic/lr'}.isdisjoint(s),
  'collapsed': lambda s: s['recent_reward'] < 0.1 * s['best_reward'],
  # In the first step of a run, the policy is its reference, unless that is another model. KTO's is of a sequence.
  'kl': lambda s: s['has_reward'] and s['kl'] > 1 and s['first_kl'] < 0.1,
  'removed': lambda s: s['weight'] < 0.05,
  'limited': lambda s: s['clip_ratio/region_mean'] > 0.9,
  # The first update of a rollout clips no value, so the mean over a step's updates stays well below 1.
  'values': lambda s: s['critic/vf_clipfrac'] > 0.5,
  'wpo': lambda s: s['wpo/weight'] < 0.05,
  'slow_rewards': lambda s: s['time/reward'] > 0.5 * s['time/step'],
  'mismatch': lambda s: s['sampler_mismatch'] > 1.05 and not s['replay/used'] > 0,  # replayed: of an older policy
}


class Alerts:
  """Warnings of a run, from its train rows.

  `warnings` has one entry per kind and stage: {'stage', 'step', 'kind', 'text', 'count'}. They depend on values only,
  so each repetition of a run has the same ones, except for slow rewards, and for errors, which a resumed run lacks.
  """

  def __init__(self) -> None:
    self.warnings: list[dict] = []
    self._known = tomllib.loads(pathlib.Path(__file__).with_name('alerts.toml').read_text('utf-8'))
    self._first: dict[tuple[str, str], list[float]] = {}
    self._streak: dict[tuple[str, str], int] = {}
    self._printed: dict[tuple[str, str], int] = {}  # step
    self._failed: collections.Counter[str] = collections.Counter()
    self._rewards: dict[str, collections.deque[float]] = {}
    self._best_reward: dict[str, float] = {}
    self._first_kl: dict[str, float] = {}

  def add(self, stage: str, step: int, kind: str, text: str, every: int) -> bool:
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
      error: of a reward or an episode; without one (a resumed run has rows only), the text points to the samples.
    """
    signals = self._signals(stage, row)
    signals['error'] = error or 'samples/ has the errors'
    new = []
    for kind, warning in self._known.items():
      streak = self._streak.get((stage, kind), 0) + 1 if HOLDS[kind](signals) else 0
      self._streak[stage, kind] = streak
      is_certain = signals[warning.get('share', '')] == 1
      if streak >= (CERTAIN if is_certain else warning['patience']):
        text = warning['text'].format_map(signals)
        if self.add(stage, step, kind, text, warning.get('every', 0)):
          new.append(text)
    return new

  def _signals(self, stage: str, row: Mapping[str, Any]) -> Signals:
    signals = Signals({key: value for key, value in row.items() if value is not None})
    for key in ('entropy', 'completions/mean_length', 'logps/chosen'):
      signals[f'start/{key}'] = self._level(stage, key, signals[key] or math.nan)  # 0: the row has no such answers
    self._failed[stage] += signals.get('failed_groups', 0)
    signals['all_failed'] = self._failed[stage]
    signals['completions'] = signals['completion_tokens'] / (signals['completions/mean_length'] or math.nan)
    rewards, best = self._rewards.setdefault(stage, collections.deque(maxlen=3)), self._best_reward.get(stage, 0.0)
    if math.isfinite(signals['reward']):
      rewards.append(signals['reward'])
    if len(rewards) == 3:
      signals['recent_reward'], signals['best_reward'] = sum(rewards) / 3, best
    self._best_reward[stage] = math.nan if signals['reward'] < 0 else max(best, signals['recent_reward'])
    if math.isfinite(signals['kl']):
      signals['first_kl'] = self._first_kl.setdefault(stage, signals['kl'])
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
