"""Rollouts and their rewards: from workers, and from a reward model.

Legend: N sequences, G samples a prompt, C completion tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence

import numpy as np

from jaxpost.distributed import coordination
from jaxpost.distributed.transfer import to_host
from jaxpost.losses import advantages
from jaxpost.rewards.groups import Graded, Group, stats_of
from jaxpost.rl import batching
from jaxpost.rl.reward_metrics import component_metrics, length_metrics, sample_rows

if typing.TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.rewards.pool import PendingGrades as Pending
  from jaxpost.rewards.pool import RewardPool
  from jaxpost.roles import Roles
  from jaxpost.types import Rollout

MODEL = 'reward_model'  # the name of a reward that is a role


@dataclasses.dataclass
class Grader:
  """Grades in worker processes; without a pool there is nothing to grade.

  Of several processes of a run each grades its share of the groups.

  model_weight: of the reward model beside the pool's functions.
  """

  pool: RewardPool | None
  tokenizer: 'Tokenizer'
  model_weight: float = 1.0

  def submit(self, rollout: Rollout, greedy: Rollout | None = None) -> 'Grading':
    """Starts grading; `greedy` holds one more answer to each prompt."""
    start = lambda made: (
      None
      if (made is None or self.pool is None or rollout.from_data)
      else Shared(
        self.pool,
        len(made.prompts),
        self.pool.submit(to_groups(made, self.tokenizer, coordination.shard(range(len(made.prompts)))), made.step),
      )
    )
    return Grading(self, [Round(rollout, self.tokenizer, start(rollout), start(greedy))])

  def close(self):
    if self.pool:
      self.pool.close()


@dataclasses.dataclass
class Shared:
  """Groups being graded, `pending` those of this process."""

  pool: RewardPool
  number: int  # of groups, on all processes
  pending: Pending

  @functools.cached_property
  def graded(self) -> list[Graded]:
    """Of all groups, in order and equal on every process."""
    shares = coordination.all_gather([vars(graded) for graded in self.pending.uncounted()])
    found = [None] * self.number
    for i, share in enumerate(shares):
      found[i :: len(shares)] = [Graded(**fields) for fields in share]
    self.pool.count(found)
    return found


@dataclasses.dataclass
class Round:
  """What was sampled at once."""

  rollout: Rollout
  tokenizer: 'Tokenizer'
  pending: Shared | None
  greedy: Shared | None

  @functools.cached_property
  def groups(self) -> list[Group]:
    return to_groups(self.rollout, self.tokenizer)

  @functools.cached_property
  def graded(self) -> list[Graded]:
    number = len(self.rollout.prompts)
    size = len(self.rollout.lengths) // number
    found = self.pending.graded if self.pending else ([Graded([0.0] * size, {}, None)] * number)
    return [
      with_own(g, {k: x[i * size : (i + 1) * size] for k, x in (self.rollout.rewards or {}).items()})
      for i, g in enumerate(found)
    ]

  @functools.cached_property
  def table(self) -> np.ndarray:
    """[groups, G] float64; NaN where there is no reward."""
    return _table(self.graded)


@dataclasses.dataclass
class Grading:
  """One or more rounds of a step; `chosen` groups of each, or all."""

  grader: Grader
  parts: list[Round]
  chosen: list | None = None
  values: np.ndarray | None = None  # [N], once `rewards` was called
  model_scores: np.ndarray | None = None  # [N], weighted

  @property
  def rounds(self) -> int:
    return len(self.parts)

  @functools.cached_property
  def rollout(self) -> Rollout:
    if len(self.parts) == 1 and self.chosen is None:
      return self.parts[0].rollout
    return batching.merge([p.rollout for p in self.parts], self._picked())

  def mixed(self) -> np.ndarray:
    """[groups of all rounds] bool: their valid rewards are not all equal."""
    return np.concatenate([_mixed(p.table) for p in self.parts])

  def kept_mixed(self) -> np.ndarray:
    """Likewise, of the groups that were kept."""
    return np.concatenate([_mixed(p.table)[i] for p, i in zip(self.parts, self._picked())])

  def rewards(self, model_scores=None):
    """([N] float64, [groups] of the greedy answers or None).

    Args:
      model_scores: [N, C] values of a reward model; that of the last token
        of a completion counts.
    """
    total = np.concatenate([p.table[i].reshape(-1) for p, i in zip(self.parts, self._picked())])
    if model_scores is not None:
      scores = self._last(model_scores) * self.grader.model_weight
      failed = np.repeat([g.error is not None for g in self.graded], self.group_size)
      for own in (self.rollout.rewards or {}).values():
        failed = failed | np.isnan(own)  # an episode that was lost
      total = np.where(failed, np.nan, np.nan_to_num(total) + scores)
      self.model_scores = scores
    self.values, baseline = total, None
    if self.parts[0].greedy is not None:
      baseline = np.concatenate([_table(p.greedy.graded)[i, 0] for p, i in zip(self.parts, self._picked())])
    return total, baseline

  @property
  def group_size(self) -> int:
    return len(self.rollout.lengths) // max(len(self.rollout.prompts), 1)

  @property
  def graded(self) -> list[Graded]:
    return [p.graded[g] for p, i in zip(self.parts, self._picked()) for g in i]

  @property
  def groups(self) -> list[Group]:
    return [p.groups[g] for p, i in zip(self.parts, self._picked()) for g in i]

  def metrics(self) -> dict:
    """What the rewards and the lengths look like; call after `rewards`."""
    pool = self.grader.pool
    out = length_metrics(self.rollout)
    if self.rollout.from_data or not (pool or self.rollout.rewards or self.model_scores is not None):
      return out
    table = self.values.reshape(-1, self.group_size)
    valid = np.isfinite(table)
    kept = table[valid]
    out |= component_metrics(self.graded) | {
      'reward': float(kept.mean()) if kept.size else float('nan'),
      'masked_samples': int((~valid).sum()),
    }
    if self.group_size > 1:  # one sample has no spread
      spread = [r[v].std(ddof=1) for r, v in zip(table, valid) if v.sum() > 1]
      out |= {
        'reward_std': float(np.mean(spread)) if spread else float('nan'),
        'frac_reward_zero_std': float(advantages.uniform(table, valid).mean()),
      }
    if self.model_scores is not None:
      out |= {
        f'rewards/{MODEL}/mean': float(self.model_scores.mean()),
        f'rewards/{MODEL}/std': float(self.model_scores.std()),
      }
    if pool is None:
      return out
    # Of all that was graded, also where it is not trained on.
    return out | stats_of([g for p in self.parts for g in p.graded + (p.greedy.graded if p.greedy else [])])

  def rows(self) -> list[dict]:
    return sample_rows(self.rollout, self.groups, self.graded, self.values)

  def _picked(self) -> list:
    return self.chosen or [range(len(p.rollout.prompts)) for p in self.parts]

  def _last(self, scores):
    """[N, C] -> [N]: what stands at the last token of each completion."""
    rows = np.arange(len(scores))
    return np.asarray(scores, np.float64)[rows, np.maximum(self.rollout.lengths, 1) - 1]


def with_own(graded: Graded, own: dict) -> Graded:
  """A group with the rewards that its rollout brought along: name -> [G]."""
  plain = {k: [None if np.isnan(r) else float(r) for r in x] for k, x in own.items()}
  add = lambda total, *more: None if None in (total, *more) else (total + sum(more))
  return dataclasses.replace(
    graded,
    components={**graded.components, **plain},
    rewards=[add(*row) for row in zip(graded.rewards, *plain.values())],
  )


def join(first: Grading, more: Grading) -> Grading:
  return Grading(first.grader, first.parts + more.parts)


def keep_mixed(grading: Grading, wanted: int) -> Grading:
  """The first `wanted` groups that differ in reward.

  Where they are too few, others fill up, as a step has one shape; the
  controller takes them out of the mask.
  """
  mixed = grading.mixed()
  order = np.concatenate([np.flatnonzero(mixed), np.flatnonzero(~mixed)])
  picked, start, chosen = set(order[:wanted].tolist()), 0, []
  for part in grading.parts:
    number = len(part.table)
    chosen.append([g for g in range(number) if start + g in picked])
    start += number
  return Grading(grading.grader, grading.parts, chosen)


def model_values(rollout: Rollout, roles: Roles, *, at_once: int, rows: tuple[int, int]) -> np.ndarray:
  """[N, C] values of the reward model.

  Args:
    at_once: sequences that fit into `rows`, (B, T) of a batch.
  """
  group, found = len(rollout.lengths) // len(rollout.prompts), []
  for start in range(0, len(rollout.lengths), at_once):
    members = np.arange(start, min(start + at_once, len(rollout.lengths)))
    part = rollout.replace(
      prompts=tuple(rollout.prompts[n // group] for n in members),
      completions=rollout.completions[members],
      lengths=rollout.lengths[members],
    )
    mask = batching.completion_mask(part)
    values = roles.reward_model(
      roles.policy.place(batching.to_batch(part, range(len(members)), mask, {}, *rows))
    ).values
    found.append(batching.from_rows(part, to_host(values), rows[1], rows[0]))
  return np.concatenate(found)


def _mixed(table) -> np.ndarray:
  valid = np.isfinite(table)
  return ~advantages.uniform(table, valid) & (valid.sum(axis=1) > 1)


def _table(graded) -> np.ndarray:
  return np.array([[np.nan if r is None else r for r in g.rewards] for g in graded], np.float64)


def to_groups(rollout: Rollout, tokenizer: 'Tokenizer', numbers: Sequence[int] | None = None) -> list[Group]:
  """Completions as the reward functions of TRL take them; all, or some."""
  size = len(rollout.lengths) // len(rollout.prompts)
  groups = []
  for i in range(len(rollout.prompts)) if numbers is None else numbers:
    prompt = rollout.prompts[i]
    ids = [rollout.completions[n, : rollout.lengths[n]].tolist() for n in range(i * size, (i + 1) * size)]
    texts = [tokenizer.decode(x) for x in ids]
    if rollout.messages:
      texts = list(rollout.messages[i * size : (i + 1) * size])
    elif not isinstance(prompt.prompt, str):
      texts = [[{'role': 'assistant', 'content': t}] for t in texts]
    groups.append(Group([prompt.prompt] * size, texts, ids, {k: [v] * size for k, v in prompt.columns.items()}))
  return groups
