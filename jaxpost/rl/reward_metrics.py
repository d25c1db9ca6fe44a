"""Metrics of rewards and completions, under the names that TRL logs.

Legend: N sequences, P prompts (groups), G samples a prompt, C completion tokens.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Sequence

import numpy as np

from jaxpost.rl import batching

if typing.TYPE_CHECKING:
  from jaxpost.rewards.groups import Graded, Group
  from jaxpost.types import Credit, Experience, Rollout, RowShape

REWARD_MODEL = 'reward_model'  # name in metrics of the reward of a reward model that runs on the devices


def reward_table(graded: Sequence[Graded], name: str = '') -> np.ndarray:
  """Returns the sums of rewards [P, G] float64, or the values of the reward `name`; NaN for None."""
  rows = [g.components[name] if name else g.rewards for g in graded]
  return np.array([[np.nan if r is None else r for r in row] for row in rows], np.float64)


def verdict_table(graded: Sequence[Graded], rewards: np.ndarray, name: str) -> np.ndarray:
  """Returns [P, G] float64: values of the reward that decides what is correct; NaN for samples without a reward.

  Args:
    rewards: [P, G] sums, NaN where a sample has none.
    name: of the reward that decides; '' is the sum, which also stands in where nothing was graded.
  """
  values = reward_table(graded, name) if name and graded[0].components else rewards
  not_graded = [  # groups of sources (`rl.sources`) that this reward does not grade: the sum decides
    g.graded_by is not None and name not in g.graded_by and all(v is None for v in g.components.get(name, [0]))
    for g in graded
  ]
  values = np.where(np.array(not_graded)[:, None], rewards, values)
  return np.where(np.isfinite(rewards), values, np.nan)


def reward_metrics(table: np.ndarray, results: Sequence[Graded]) -> dict:
  """Returns means, spreads and counts of the rewards `table` [P, G], which is NaN where a sample has none."""
  valid = np.isfinite(table)
  rewards = table[valid]
  out = component_metrics(results) | {
    'reward': float(rewards.mean()) if rewards.size else float('nan'),
    'masked_samples': int((~valid).sum()),
  }
  if table.shape[1] > 1:  # one sample has no spread
    groups = [row[v] for row, v in zip(table, valid) if v.sum() > 1]
    out |= {
      'reward_std': float(np.mean([group.std(ddof=1) for group in groups])) if groups else float('nan'),
      'frac_reward_zero_std': float(np.mean([np.ptp(group) == 0 for group in groups])) if groups else float('nan'),
    }
  return out


def component_metrics(results: Sequence[Graded]) -> dict:
  """Returns rewards/NAME/mean and rewards/NAME/std over the samples that this reward function has graded."""
  out = {}
  for name in results[0].components if results else ():
    values = [r for group in results for r in group.components[name] if r is not None]
    if values:
      out[f'rewards/{name}/mean'] = float(np.mean(values))
      out[f'rewards/{name}/std'] = float(np.std(values))
  return out


def length_metrics(rollout: Rollout) -> dict:
  """Returns lengths of the completions, in tokens, and the share that was cut off."""
  ended = rollout.lengths[rollout.finished]
  return {
    'completions/mean_length': float(rollout.lengths.mean()),
    'completions/min_length': int(rollout.lengths.min()),
    'completions/max_length': int(rollout.lengths.max()),
    'completions/clipped_ratio': float(1 - rollout.finished.mean()),
    'completions/mean_terminated_length': float(ended.mean()) if ended.size else 0.0,
    'completion_tokens': int(rollout.lengths.sum()),
  }


def advantage_metrics(credit: Credit) -> dict:
  """Returns figures of the advantages of the trained tokens; {} if the algorithm has none, or none per token."""
  trained, values = credit.mask > 0, np.asarray(credit.arrays.get('advantages'))
  if values.shape not in (trained.shape, (len(trained), 1)) or not trained.any():
    return {}
  values = np.broadcast_to(values, trained.shape)[trained]
  figures = dict(mean=values.mean(), std=values.std(), max=values.max(), min=values.min())
  figures |= dict(frac_positive=(values > 0).mean(), frac_zero=(values == 0).mean())
  return {f'advantages/{name}': float(x) for name, x in figures.items()}


def step_metrics(experience: Experience, shape: RowShape, config: typing.Any) -> dict:
  """Returns tokens of the step, use of rows and sampler slots, entropy, pass rates, lengths by verdict, and staleness.

  Args:
    shape: of the batch of all sequences; the tokens of a prompt that they share count once.
  """
  rollout = experience.rollout
  lengths = batching.prompt_lengths(rollout) + rollout.lengths
  places = batching.places(rollout, range(len(lengths)), shape)
  counts = np.array([p.end - p.start for p in sorted(places)])  # tokens that are computed for each sequence
  tokens = int(counts.sum())
  # The last `count` tokens of a sequence attend to length - count + 1, ..., length tokens.
  out = {
    'tokens': tokens,
    'mean_context': float((counts * (2 * lengths - counts + 1.0)).sum() / 2 / max(tokens, 1)),
    'packing_efficiency': tokens / (shape.num_rows * shape.row_length),
    'slot_occupancy': rollout.occupancy,
    **rollout.figures,
  }
  if rollout.demonstration is not None:
    out['expert/reward'] = float(np.nanmean(experience.rewards[rollout.demonstration]))
  sampled = experience
  not_sampled = rollout.replayed if rollout.demonstration is None else rollout.demonstration
  if not_sampled is not None:
    verdicts = np.where(not_sampled, np.nan, experience.verdicts)
    sampled = dataclasses.replace(experience, mask=experience.mask * ~not_sampled[:, None], verdicts=verdicts)
  if not rollout.from_data:
    out |= surprisal_metrics(sampled)
    if experience.components and has_threshold(experience.components, config.eval.pass_reward):
      out |= correctness_metrics(sampled, config.eval.pass_reward)
  if not rollout.from_data and (config.rollout.staleness or config.rl.keep_surplus or config.rl.replay):
    updates_per_step = config.rl.epochs * config.rl.minibatches
    # Age in steps of the weights that sampled the trained tokens.
    age = experience.step - batching.token_versions(rollout)[experience.mask > 0] / updates_per_step
    out['staleness/mean'] = float(age.mean()) if age.size else 0.0
    out['staleness/max'] = float(age.max(initial=0.0))
  return out


def surprisal_metrics(experience: Experience) -> dict:
  """Returns entropy/quarter_N: the mean of -log p of the sampled tokens in each quarter of their completion.

  Without truncation (top-k, top-p) the expected value is the entropy of the sampler, so it needs no further pass. A
  quarter without a trained token is left out.
  """
  rollout, mask = experience.rollout, experience.mask > 0
  quarters = 4 * np.arange(mask.shape[1]) // np.maximum(rollout.lengths[:, None], 1)
  surprisals = {n: -rollout.logprobs[mask & (quarters == n - 1)] for n in (1, 2, 3, 4)}
  return {f'entropy/quarter_{n}': float(x.mean()) for n, x in surprisals.items() if x.size}


def has_threshold(rewards: Collection[str], passes: float) -> bool:
  """Returns whether values from `passes` on are right; those of a reward model have no zero, so it must be set."""
  return {*rewards} != {REWARD_MODEL} or passes != 1.0


def correctness_metrics(experience: Experience, passes: float) -> dict:
  """Returns fractions of the groups by their pass rate, and mean lengths of right and wrong completions.

  A completion is right if its verdict is at least `passes`; those without a verdict do not count.
  """
  verdicts = experience.verdicts
  assert verdicts is not None, 'graded completions have verdicts'
  graded = np.isfinite(verdicts)
  right = graded & (verdicts >= passes)
  group_size = experience.rollout.group_size
  count = graded.reshape(-1, group_size).sum(axis=1)
  rate = (right.reshape(-1, group_size).sum(axis=1) / np.maximum(count, 1))[count > 0]
  bins = {'none': rate == 0, 'low': (rate > 0) & (rate <= 0.5), 'high': (rate > 0.5) & (rate < 1), 'all': rate == 1}
  out = {f'pass_rate/{name}': float(part.mean()) for name, part in bins.items() if rate.size}
  lengths, parts = experience.rollout.lengths, {'right_length': right, 'wrong_length': graded & ~right}
  return out | {f'completions/{name}': float(lengths[part].mean()) for name, part in parts.items() if part.any()}


def sample_rows(
  rollout: Rollout, groups: Sequence[Group], results: Sequence[Graded], rewards: np.ndarray
) -> list[dict]:
  """Returns a row of texts and scores a completion, for people to read; `groups`, `results` [P] and `rewards` [N]."""
  rows = []
  for n, length in enumerate(rollout.lengths):
    g, i = divmod(n, rollout.group_size)
    group, result, prompt = groups[g], results[g], rollout.prompts[g]
    row: dict[str, typing.Any] = {
      'prompt': _text(group.prompts[i]),
      'completion': _text(group.completions[i]),
      'reward': float(rewards[n]) if np.isfinite(rewards[n]) else None,
    }
    if error := result.error or (rollout.errors is not None and rollout.errors[n]):
      row['error'] = str(error)
    for name in ('demonstration', 'replayed'):
      if vars(rollout)[name] is not None and vars(rollout)[name][n]:
        row[name] = True
    row |= _expected(group.columns, i) | _turns(group.completions[i])
    if source := prompt.source.get('name'):
      row['source'] = source
    row |= {
      'components': {name: values[i] for name, values in result.components.items()},
      'length': int(length),
      'finished': bool(rollout.finished[n]),
      'logprob': float(rollout.logprobs[n, :length].sum()),
      'prompt_index': prompt.index,
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
  """Returns the messages of an episode of several or with tool calls, so that a reader can tell them apart."""
  if isinstance(completion, str) or (len(completion) < 2 and not any(m.get('tool_calls') for m in completion)):
    return {}
  return {'turns': [{k: m[k] for k in ('role', 'content', 'tool_calls', 'name') if m.get(k)} for m in completion]}


def _text(prompt: str | list[dict]) -> str:
  return prompt if isinstance(prompt, str) else '\n'.join(str(message['content']) for message in prompt)
