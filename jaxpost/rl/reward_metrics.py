"""Metrics of rewards and completions, under the names that TRL logs.

Legend: N sequences, P prompts (groups), G samples a prompt, C completion tokens.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence

import numpy as np

from jaxpost.rl import batching

if typing.TYPE_CHECKING:
  from jaxpost.rewards.groups import Graded, Group
  from jaxpost.types import Experience, Rollout, RowShape

REWARD_MODEL = 'reward_model'  # name of the reward of a reward model that is a role


def reward_table(graded: Sequence[Graded], name: str = '') -> np.ndarray:
  """Returns [P, G] float64 of P groups, NaN for None: the sums of rewards, or the values of one reward."""
  rows = [g.components[name] if name else g.rewards for g in graded]
  return np.array([[np.nan if r is None else r for r in row] for row in rows], np.float64)


def verdicts(graded: Sequence[Graded], rewards: np.ndarray, name: str) -> np.ndarray:
  """Returns [P, G] float64: values of the reward that decides what is correct; NaN for samples without a reward.

  Args:
    rewards: [P, G] sums, NaN where a sample has none.
    name: of the reward that decides; '' is the sum, which also stands in where nothing was graded.
  """
  values = reward_table(graded, name) if name and graded[0].components else rewards
  other = [
    g.graded_by is not None and name not in g.graded_by and all(v is None for v in g.components.get(name, [0]))
    for g in graded
  ]
  values = np.where(np.array(other)[:, None], rewards, values)  # of sources that this reward does not grade
  return np.where(np.isfinite(rewards), values, np.nan)


def reward_metrics(table: np.ndarray, results: Sequence[Graded]) -> dict:
  """Means, spreads and counts of the rewards [P, G] of groups; NaN where a sample has none."""
  valid = np.isfinite(table)
  kept = table[valid]
  out = component_metrics(results) | {
    'reward': float(kept.mean()) if kept.size else float('nan'),
    'masked_samples': int((~valid).sum()),
  }
  if table.shape[1] > 1:  # one sample has no spread
    compared = [row[v] for row, v in zip(table, valid) if v.sum() > 1]
    out |= {
      'reward_std': float(np.mean([row.std(ddof=1) for row in compared])) if compared else float('nan'),
      'frac_reward_zero_std': float(np.mean([np.ptp(row) == 0 for row in compared])) if compared else float('nan'),
    }
  return out


def component_metrics(results: Sequence[Graded]) -> dict:
  """rewards/NAME/mean and std over the samples that a function applied to."""
  out = {}
  for name in results[0].components if results else ():
    values = [r for group in results for r in group.components[name] if r is not None]
    if values:
      out[f'rewards/{name}/mean'] = float(np.mean(values))
      out[f'rewards/{name}/std'] = float(np.std(values))
  return out


def length_metrics(rollout: Rollout) -> dict:
  """Lengths of the completions and the share that was cut off."""
  ended = rollout.lengths[rollout.finished]
  return {
    'completions/mean_length': float(rollout.lengths.mean()),
    'completions/min_length': int(rollout.lengths.min()),
    'completions/max_length': int(rollout.lengths.max()),
    'completions/clipped_ratio': float(1 - rollout.finished.mean()),
    'completions/mean_terminated_length': float(ended.mean()) if ended.size else 0.0,
    'completion_tokens': int(rollout.lengths.sum()),
  }


def step_metrics(experience: Experience, shape: RowShape, config: typing.Any) -> dict:
  """Tokens of the step, how full its rows and the sampler's slots were, staleness; what is right and how long it is.

  Args:
    shape: of the batch of all sequences; a prompt that they share counts once.
  """
  rollout = experience.rollout
  lengths = batching.prompt_lengths(rollout) + rollout.lengths
  places = batching.places(rollout, range(len(lengths)), *shape)
  counts = np.array([p.end - p.start for p in sorted(places)])  # tokens that are computed for each sequence
  tokens = int(counts.sum())
  out = {
    'tokens': tokens,
    'mean_context': float((counts * (2 * lengths - counts + 1.0)).sum() / 2 / max(tokens, 1)),
    'packing_efficiency': tokens / (shape.num_rows * shape.row_length),
    'slot_occupancy': rollout.occupancy,
    **rollout.figures,
  }
  if rollout.demonstration is not None:
    out['expert/reward'] = float(np.nanmean(experience.rewards[rollout.demonstration]))
  own, given = experience, rollout.replayed if rollout.demonstration is None else rollout.demonstration
  if given is not None:  # not sampled in this step
    verdicts_ = np.where(given, np.nan, experience.verdicts)
    own = dataclasses.replace(experience, mask=experience.mask * ~given[:, None], verdicts=verdicts_)
  if not rollout.from_data:
    out |= surprisal_metrics(own)
    out |= correctness_metrics(own, config.eval.pass_reward) if experience.components else {}
  if not rollout.from_data and (config.rollout.staleness or config.rl.keep_surplus or config.rl.replay):
    updates_per_step = config.rl.epochs * config.rl.minibatches
    # Age in steps of the weights that sampled the trained tokens.
    age = experience.step - batching.token_versions(rollout)[experience.mask > 0] / updates_per_step
    out['staleness/mean'] = float(age.mean()) if age.size else 0.0
    out['staleness/max'] = float(age.max(initial=0.0))
  return out


def surprisal_metrics(experience: Experience) -> dict:
  """entropy/quarter_N: mean of -log p of the sampled tokens in each quarter of their completion.

  Under sampling without truncation its mean is the entropy of the sampler, and needs no further pass. A quarter without
  a trained token is left out.
  """
  rollout, mask = experience.rollout, experience.mask > 0
  quarters = 4 * np.arange(mask.shape[1]) // np.maximum(rollout.lengths[:, None], 1)
  found = {n: -rollout.logprobs[mask & (quarters == n - 1)] for n in (1, 2, 3, 4)}
  return {f'entropy/quarter_{n}': float(x.mean()) for n, x in found.items() if x.size}


def correctness_metrics(experience: Experience, passes: float) -> dict:
  """Fractions of the groups by their pass rate, and mean lengths of right and wrong completions.

  A completion is right if its verdict is at least `passes`; those without a verdict do not count.
  """
  verdicts_ = experience.verdicts
  assert verdicts_ is not None, 'graded completions have verdicts'
  graded = np.isfinite(verdicts_)
  right = graded & (verdicts_ >= passes)
  count = graded.reshape(experience.groups, -1).sum(axis=1)
  rate = (right.reshape(experience.groups, -1).sum(axis=1) / np.maximum(count, 1))[count > 0]
  bins = {'none': rate == 0, 'low': (rate > 0) & (rate <= 0.5), 'high': (rate > 0.5) & (rate < 1), 'all': rate == 1}
  out = {f'pass_rate/{name}': float(part.mean()) for name, part in bins.items() if rate.size}
  lengths = experience.rollout.lengths
  for name, part in (('right_length', right), ('wrong_length', graded & ~right)):
    if part.any():
      out[f'completions/{name}'] = float(lengths[part].mean())
  return out


def sample_rows(
  rollout: Rollout, groups: Sequence[Group], results: Sequence[Graded], rewards: np.ndarray
) -> list[dict]:
  """One row a completion, to be read by people: texts, rewards, log-prob.

  Args:
    groups, results: of each prompt; rewards: [N].
  """
  rows = []
  size = batching.group_size(rollout)
  for n, length in enumerate(rollout.lengths):
    group, result = groups[n // size], results[n // size]
    i = n % size
    row: dict[str, typing.Any] = {
      'prompt': _text(group.prompts[i]),
      'completion': _text(group.completions[i]),
      'reward': float(rewards[n]) if np.isfinite(rewards[n]) else None,
    }
    if result.error:
      row['error'] = result.error
    for name in ('demonstration', 'replayed'):
      if vars(rollout)[name] is not None and vars(rollout)[name][n]:
        row[name] = True
    row |= _expected(group.columns, i) | _turns(group.completions[i])
    if source := rollout.prompts[n // size].source.get('name'):
      row['source'] = source
    row |= {
      'components': {name: values[i] for name, values in result.components.items()},
      'length': int(length),
      'finished': bool(rollout.finished[n]),
      'logprob': float(rollout.logprobs[n, :length].sum()),
      'prompt_index': rollout.prompts[n // size].index,
      'sample': i,
      'version': rollout.version,
    }
    if rollout.top_ids is not None:
      from jaxpost.programs import reported

      row['top_logprobs'] = reported.pairs(rollout, n)
    rows.append(row)
  return rows


_EXPECTED = ('answer', 'solution', 'ground_truth', 'target', 'reference')  # columns that hold the right answer


def _expected(columns: dict[str, list], i: int) -> dict:
  """The expected answer of a sample, where a column has one."""
  for name in _EXPECTED:
    if name in columns and isinstance(columns[name][i], (str, int, float)):
      return {'expected': str(columns[name][i])}
  return {}


def _turns(completion: str | list[dict]) -> dict:
  """The messages of an episode with more than one, so that turns and tool calls can be told apart."""
  if isinstance(completion, str) or (len(completion) < 2 and not any(m.get('tool_calls') for m in completion)):
    return {}
  return {'turns': [{k: m[k] for k in ('role', 'content', 'tool_calls', 'name') if m.get(k)} for m in completion]}


def _text(prompt: str | list[dict]) -> str:
  if isinstance(prompt, str):
    return prompt
  return '\n'.join(str(message['content']) for message in prompt)
