"""A sampler of multi-turn episodes with tools, in place of `rollout.sampler.Sampler`.

Legend: N sequences, G samples of a prompt.
"""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.environments import turns
from jaxpost.environments.episode import Episode, EpisodeLimits, given_tokens
from jaxpost.environments.episode_scheduler import EpisodeScheduler
from jaxpost.errors import InputError
from jaxpost.losses import turn_advantages
from jaxpost.types import Prompt, Rollout

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.environments.by_source import PoolsBySource
  from jaxpost.environments.pool import EnvironmentPool

REWARD_NAME = 'environment'  # name of the reward that get_reward() returns
TURNS_NAME = 'environment_turns'  # name of the sum of the rewards of turns
_WINDOW = 100  # episodes over which the fraction of failures is computed
_MIN_EPISODES = 20  # episodes before that fraction is checked


class Episodes:
  """Replaces `rollout.sampler.Sampler` if prompts are conversations with an environment; needs a chat template."""

  def __init__(
    self, engine: Any, run_key: Any, pool: EnvironmentPool | PoolsBySource, tokenizer: Tokenizer, limits: EpisodeLimits
  ) -> None:
    self.engine = engine
    self.run_key = run_key
    self.pool = pool
    self.tokenizer = tokenizer
    self.limits = limits
    self.turns = turns.Turns(tokenizer)
    self.recent: collections.deque[str | None] = collections.deque(maxlen=_WINDOW)  # the error of each episode, or None
    if not self.turns.matches_template():
      logging.info(
        'the chat template renders earlier turns differently from how they were sampled; '
        'training reads what was sampled'
      )

  def __call__(
    self, prompts: Sequence[Prompt], group_size: int = 1, step: int = 0, on_dispatch: Callable | None = None, **sampling
  ) -> Rollout:
    """Plays `group_size` episodes of each prompt; `sampling` as in `Request.sampling`."""
    episodes = [Episode(n * group_size + i, prompt, i) for n, prompt in enumerate(prompts) for i in range(group_size)]
    scheduler = EpisodeScheduler(self, episodes, sampling)
    figures = self.engine.serve(
      [],
      run_key=self.run_key,
      step=step,
      next_requests=scheduler.follow,
      prefill_rows=self.engine.prefill_rows(group_size),
      on_dispatch=on_dispatch,
    )
    assert not scheduler.waiting and not scheduler.pending, 'some episodes were not played to their end'
    self.check_failures(episodes)
    return self.rollout(episodes, prompts, group_size, step, figures)

  def check_failures(self, episodes: Sequence[Episode]) -> None:
    """Raises InputError if all episodes of the first call failed, or too many of the recent ones."""
    is_first_call = not self.recent
    self.recent.extend(e.error for e in episodes)
    errors = [error for error in self.recent if error]
    count = len(self.recent)
    all_failed = is_first_call and errors and len(errors) == count
    too_many = count >= _MIN_EPISODES and len(errors) > self.limits.failed * count
    if all_failed or too_many:
      raise InputError(f'config.environment: {len(errors)} of the last {count} episodes were lost: {errors[-1]}')

  def rollout(
    self, episodes: Sequence[Episode], prompts: Sequence[Prompt], group_size: int, step: int, figures: dict
  ) -> Rollout:
    """Makes the rollout of finished episodes.

    The contexts of a group may differ, because `reset` adds to the prompt. Their common prefix becomes the prompt of
    the group; the remaining tokens precede the first turn of each sequence, and are not trained on.
    """
    shared_prompts = []
    rows = []  # the tokens after the shared prompt, for each episode
    for n, prompt in enumerate(prompts):
      group = episodes[n * group_size : (n + 1) * group_size]
      contexts = [prompt.tokens if e.context is None else e.context for e in group]
      prefix = len(os.path.commonprefix([x.tolist() for x in contexts]))
      shared_prompts.append(prompt.replace(tokens=contexts[0][:prefix]))
      for context, e in zip(contexts, group):
        rows.append([*given_tokens(context[prefix:], self.engine.version), *e.tokens])
    width = max(self.limits.tokens, *map(len, rows))

    def padded(field: str, dtype: Any) -> np.ndarray:
      """Returns a field of `EpisodeToken` for all tokens, [N, width], 0 after the end."""
      return np.array([[getattr(t, field) for t in row] + [0] * (width - len(row)) for row in rows], dtype)

    completions, mask = padded('id', np.int32), padded('generated', bool)
    rewards = {REWARD_NAME: np.array([self._reward(e) for e in episodes], np.float64)}
    turn_rewards = None
    if self.pool.gives_turn_rewards:
      turn_rewards = padded('reward', np.float64)
      failed = np.array([e.error is not None for e in episodes])
      rewards[TURNS_NAME] = np.where(failed, np.nan, turn_rewards.sum(axis=1))
    return Rollout(
      prompts=tuple(shared_prompts),
      completions=completions,
      lengths=np.array([len(row) for row in rows], np.int32),
      logprobs=padded('logprob', np.float32),
      behavior_logprobs=padded('behavior_logprob', np.float32),
      finished=np.array([e.finished for e in episodes]),
      step=step,
      version=self.engine.version,
      occupancy=figures.pop('occupancy'),
      figures=figures
      | self.figures(episodes)
      | {'episodes/shared_states': shared_states(completions, mask, group_size)},
      mask=mask,
      versions=padded('version', np.int32),
      rewards=rewards,
      turn_rewards=turn_rewards,
      messages=tuple(e.messages for e in episodes),
      errors=np.array([e.error or '' for e in episodes]),
    )

  def _reward(self, episode: Episode) -> float:
    """Returns the reward of an episode; NaN, which masks it, if it failed."""
    if episode.error:
      return np.nan
    pool = self.pool.of(episode.prompt)
    return episode.reward if pool and pool.gives_reward else 0.0

  def figures(self, episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns metrics of tools, under TRL's names, and of episodes."""
    called = sum(e.called for e in episodes)
    return {
      'tools/call_frequency': called / len(episodes),
      'tools/failure_frequency': sum(e.failures for e in episodes) / max(called, 1),
      'tools/malformed': sum(e.malformed for e in episodes),
      'episodes/turns': float(np.mean([e.turns for e in episodes])),
      'episodes/failed': sum(e.error is not None for e in episodes),
      'episodes/killed': sum(e.lost for e in episodes),
    }


def shared_states(completions: np.ndarray, mask: np.ndarray, group_size: int) -> float:
  """Returns the fraction of turns that share their observation with another turn of their group (GiGPO).

  Args:
    completions, mask: [N, C] tokens, and which of them the policy sampled.
  """
  states = turn_advantages.states(turn_advantages.turns_of(mask), completions, group_size)
  counts = [len(turns_of_state) for turns_of_state in states.values()]
  return sum(n for n in counts if n > 1) / max(sum(counts), 1)
