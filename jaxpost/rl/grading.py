"""Rewards of rollouts, from worker processes and from a reward model.

Grading is asynchronous: `Grader.submit` sends groups to the workers and returns a `PendingRollout`; its `result` waits
for them and returns a `GradedRollout`.

Legend: N sequences, P prompts (groups), G samples a prompt, C completion tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import numpy as np

from jaxpost.distributed import coordination
from jaxpost.losses import advantages
from jaxpost.rewards.groups import Graded, Group, stats_of
from jaxpost.rl import reward_metrics
from jaxpost.rl.reward_metrics import REWARD_MODEL, reward_table, verdict_table

if typing.TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.rewards.pool import RewardPool
  from jaxpost.types import Rollout


@dataclasses.dataclass
class Grader:
  """Sends rollouts to the workers that run the reward functions; each process of a run grades its share of groups.

  Attributes:
    pool: the workers; None where a run has no reward function.
    model_weight: weight of the reward model in the sum of rewards.
    correct_by: name of the reward that decides what is correct; '': the sum.
    observers: functions called with the grades of each step: of a curriculum, of `rl.sources`.
    per_step: the reward model grades the steps of a completion.
  """

  pool: RewardPool | None
  tokenizer: Tokenizer
  model_weight: float = 1.0
  correct_by: str = ''
  observers: Sequence[Callable[[PendingRollout, GradedRollout], None]] = ()
  per_step: bool = False

  def submit(self, rollout: Rollout, greedy: Rollout | None = None, info: dict | None = None) -> PendingRollout:
    """Starts grading and returns at once.

    Args:
      greedy: one greedy answer to each prompt, for a baseline (ReMax).
      info: metrics of sampling that belong to the rollout.
    """
    baseline = None if greedy is None else Round(greedy, self._submit_groups(greedy))
    return PendingRollout(self, [Round(rollout, self._submit_groups(rollout), baseline)], info or {})

  def _submit_groups(self, rollout: Rollout) -> Callable[[], list[Graded]] | None:
    """Submits this process's share of the groups; returns a function that waits for the rewards of all groups."""
    if self.pool is None or rollout.from_data:
      return None
    pool, num_groups = self.pool, len(rollout.prompts)
    futures = pool.submit(to_groups(rollout, self.tokenizer, coordination.shard(range(num_groups))), rollout.step)

    def wait() -> list[Graded]:
      shards = coordination.all_gather([vars(future.result()) for future in futures])
      # `coordination.shard` deals groups out one by one: process p of n has p, p + n, p + 2n, ...
      graded = [Graded(**shards[i % len(shards)][i // len(shards)]) for i in range(num_groups)]
      pool.count(graded)
      return graded

    return wait


@dataclasses.dataclass
class Round:
  """One call of the sampler, and its rewards; dynamic sampling draws several rounds for one step.

  Attributes:
    wait: waits for the rewards of the workers; None: no function grades the groups, or `graded` has their rewards.
    greedy: one greedy answer to each prompt.
    from_earlier_step: its groups were left over by an earlier step.
    graded: rewards of each group, where these are known already.
  """

  rollout: Rollout
  wait: Callable[[], list[Graded]] | None = None
  greedy: Round | None = None
  from_earlier_step: bool = False
  graded: list[Graded] | None = None

  @functools.cached_property
  def results(self) -> list[Graded]:
    """Rewards of each group: those of the workers and of the environment."""
    if self.graded is not None:
      return self.graded
    size = self.rollout.group_size
    graded = self.wait() if self.wait else [Graded([0.0] * size, {}, None)] * len(self.rollout.prompts)
    if not self.rollout.rewards:
      return graded
    from jaxpost.rl import attached_rewards

    return attached_rewards.add_attached(graded, self.rollout)

  @functools.cached_property
  def rewards(self) -> np.ndarray:
    """[P, G] float64; NaN where there is no reward."""
    return reward_table(self.results)


@dataclasses.dataclass
class PendingRollout:
  """The rollout of a step while its rewards are being computed.

  Attributes:
    rounds: one, or with dynamic sampling several.
    info: metrics of sampling.
    selected: indices of the groups of each round to train on; None: all.
  """

  grader: Grader
  rounds: list[Round]
  info: dict = dataclasses.field(default_factory=dict)
  selected: list[list[int]] | None = None

  @functools.cached_property
  def rollout(self) -> Rollout:
    """The selected groups of all rounds; does not wait for rewards."""
    if len(self.rounds) == 1 and self.selected is None:
      return self.rounds[0].rollout
    from jaxpost.rl import merging

    measured = [r.rollout for r in self.rounds if not r.from_earlier_step]
    return merging.merge([r.rollout for r in self.rounds], [groups for _, groups in self._selection()], measured)

  def join(self, other: PendingRollout) -> PendingRollout:
    """Returns a rollout of the rounds of both; `other` was sampled later."""
    return PendingRollout(self.grader, self.rounds + other.rounds, self.info | other.info)

  def result(self, reward_model_outputs: np.ndarray | None = None) -> GradedRollout:
    """Waits for the workers, and adds up all rewards of the selected groups.

    Args:
      reward_model_outputs: [N, C]; the output at the last token of a completion is its reward.
    """
    grader, rollout = self.grader, self.rollout
    results = [r.results[g] for r, groups in self._selection() for g in groups]
    rewards = np.concatenate([r.rewards[groups] for r, groups in self._selection()])
    if reward_model_outputs is not None:
      from jaxpost.rl import attached_rewards

      rollout, results, rewards = attached_rewards.add_reward_model(
        rollout, results, rewards, reward_model_outputs, grader
      )
    if rollout.verdicts is None:
      correct = verdict_table(results, rewards, grader.correct_by)
    else:  # recorded with the rollout
      correct = rollout.verdicts.reshape(rewards.shape)
    weights = {REWARD_MODEL: grader.model_weight} | (grader.pool.weights if grader.pool else {})
    names = results[0].components
    baseline = None
    if self.rounds[0].greedy:
      baseline = np.concatenate([r.greedy.rewards[groups, 0] for r, groups in self._selection()])
    sampled = [group for r in self.rounds if not r.from_earlier_step for group in r.results]
    greedy = [group for r in self.rounds if r.greedy for group in r.greedy.results]
    episode_errors = [] if rollout.errors is None else rollout.errors.tolist()
    return GradedRollout(
      rollout=rollout,
      rewards=rewards.reshape(-1),
      baseline=baseline,
      verdicts=correct,
      components={name: (weights.get(name, 1.0), reward_table(results, name).reshape(-1)) for name in names},
      results=results,
      sampled=sampled if self.selected else None,
      stats=stats_of(sampled + greedy) if grader.pool else {},
      error=next(filter(None, [*(group.error for group in sampled + greedy), *episode_errors]), ''),
      tokenizer=grader.tokenizer,
    )

  def _selection(self) -> list[tuple[Round, Sequence[int]]]:
    """Returns (round, indices of its groups to train on) of each round."""
    if self.selected:
      return list(zip(self.rounds, self.selected))
    return [(r, range(len(r.rollout.prompts))) for r in self.rounds]


@dataclasses.dataclass(frozen=True)
class GradedRollout:
  """A rollout with its rewards: host arrays, equal on every process.

  Attributes:
    rewards: [N] float64, the sum over functions, environment and reward model; NaN where a completion has none.
    baseline: [P] float64 rewards of greedy answers, or None.
    verdicts: [P, G] float64 values of the reward that decides what is correct; NaN for samples without a reward.
    components: {name: (weight in the sum, [N] values)} of each reward.
    results: rewards of each group, one by one.
    sampled: results of all groups that dynamic sampling chose from; None: it is off.
    stats, error: counts and the first error of all graded answers, greedy ones included, and of episodes.
  """

  rollout: Rollout
  rewards: np.ndarray
  baseline: np.ndarray | None
  verdicts: np.ndarray
  components: dict[str, tuple[float, np.ndarray]]
  results: list[Graded]
  sampled: list[Graded] | None
  stats: dict
  error: str
  tokenizer: Tokenizer

  def metrics(self) -> dict:
    """Means and spreads of rewards and lengths; NAME/unfiltered is over all sampled groups, trained or not."""
    rollout, results, sampled = self.rollout, self.results, self.sampled
    table = self.rewards.reshape(self.verdicts.shape)
    if rollout.demonstration is not None:
      from jaxpost.rl import demonstrations

      rollout, results, sampled = demonstrations.leave_out(rollout, rollout.demonstration, results, sampled)
      table = table[:, :-1]
    out = reward_metrics.length_metrics(rollout)
    if self.rollout.from_data or not self.results[0].components:
      return out
    out |= reward_metrics.reward_metrics(table, results)
    if self.baseline is not None:
      out['masked_baseline'] = int(np.isfinite(table[np.isnan(self.baseline)]).sum())
    if sampled:
      unfiltered = reward_metrics.reward_metrics(reward_table(sampled), sampled)
      out |= {f'{name}/unfiltered': value for name, value in unfiltered.items()}
    return out | self.stats

  def sample_rows(self) -> list[dict]:
    """One row a completion for samples/STAGE/STEP.jsonl."""
    groups = to_groups(self.rollout, self.tokenizer)
    return reward_metrics.sample_rows(self.rollout, groups, self.results, self.rewards)


def varied(values: np.ndarray) -> np.ndarray:
  """Returns for each row of [P, G] whether it has at least two finite values that are not all equal, [P] bool."""
  valid = np.isfinite(values)
  return ~advantages.uniform(values, valid) & (valid.sum(axis=1) > 1)


def to_groups(rollout: Rollout, tokenizer: Tokenizer, indices: Sequence[int] | None = None) -> list[Group]:
  """Returns groups of completions in the form that reward functions of TRL take.

  Args:
    indices: which groups to convert; None: all.
  """
  size = rollout.group_size
  groups = []
  for i in range(len(rollout.prompts)) if indices is None else indices:
    prompt = rollout.prompts[i]
    ids = [rollout.completions[n, : rollout.lengths[n]].tolist() for n in range(i * size, (i + 1) * size)]
    texts: list[str | list[dict]] = [tokenizer.decode(x) for x in ids]
    if rollout.messages:
      texts = list(rollout.messages[i * size : (i + 1) * size])
    elif not isinstance(prompt.prompt, str):
      texts = [[{'role': 'assistant', 'content': text}] for text in texts]
    columns = {name: [value] * size for name, value in prompt.columns.items()}
    groups.append(Group([prompt.prompt] * size, texts, ids, columns, prompt.source.get('rewards')))
  return groups
