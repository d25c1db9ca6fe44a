"""Plays the episodes of one rollout: turns of the model, and answers of its tools.

`EpisodeScheduler.follow` is the core. The engine calls it between two blocks of tokens: a turn that has ended calls
tools or ends its episode; the answers of tools become part of the next request of their episode. While an environment
works, its episode holds no slot of the engine.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.data import prompts as prompts_lib
from jaxpost.distributed import coordination
from jaxpost.environments import turns
from jaxpost.environments.episode import Episode, generated_tokens, given_tokens
from jaxpost.environments.pool import Answer, reset_row
from jaxpost.rollout.sequence import Completion, Request

if TYPE_CHECKING:
  from jaxpost.environments.episodes import Episodes


@dataclasses.dataclass(eq=False)
class PendingAnswers:
  """Requests to an environment that are not answered yet."""

  episode: Episode
  verb: str  # 'reset', 'call' or 'reward'
  # They give an `Answer` to each request; there are none if the environment belongs to another process.
  futures: list[concurrent.futures.Future]
  block: int  # number of the block after which they were sent


class EpisodeScheduler:
  """The episodes of one call of `Episodes`: which wait for an environment, and which for an answer.

  With several processes, each runs this scheduler on the same episodes, but an environment belongs to one of them:
  environment `slot` is number slot // processes of process slot % processes.
  """

  def __init__(self, owner: Episodes, episodes: Sequence[Episode], sampling: dict) -> None:
    self.owner = owner
    self.episodes = episodes
    self.sampling = sampling
    # {number: pool} of the episodes that have an environment
    self.pools = {e.number: pool for e in episodes if (pool := owner.pool.of(e.prompt))}
    self.waiting = collections.deque(e for e in episodes if e.number in self.pools)
    # Prompts of sources without an environment have one turn and no tool.
    self.single = [request for e in episodes if e.number not in self.pools for request in self.begin(e, None)]
    # {pool: slots of its free environments}
    self.free = {pool: list(range(len(pool.all) * coordination.process_count())) for pool in owner.pool.each()}
    self.pending: list[PendingAnswers] = []
    self.block = 0
    self.wait_blocks = owner.limits.wait_blocks
    if coordination.process_count() > 1:
      # Processes must agree on the answers that they use, and these arrive at different times.
      self.wait_blocks = max(self.wait_blocks, 1)

  def follow(self, completions: list[Completion], idle: bool) -> list[Request]:
    """Returns the requests that are ready; `NativeEngine.serve` calls it between two blocks.

    `completions` are turns that have ended. If the engine is `idle`, this waits for an answer.
    """
    self.block += 1
    for completion in completions:
      self.after_turn(completion)
    ready, self.single = self.single, []
    while True:
      self.start_waiting()
      due = self.take_due(idle and not ready)
      for pending, answers in zip(due, collect(due)):
        ready += self.after_answers(pending, answers)
      self.start_waiting()
      if ready or not idle or not self.pending:
        return ready

  def start_waiting(self) -> None:
    """Starts episodes while there are free environments."""
    skipped = []  # episodes of pools without a free environment
    while self.waiting and any(self.free.values()):
      episode = self.waiting.popleft()
      free = self.free[self.pools[episode.number]]
      if not free:
        skipped.append(episode)
        continue
      episode.slot = free.pop(0)
      row = reset_row(episode.prompt.columns, episode.prompt.prompt)
      self.send(episode, 'reset', dict(row=row))
    self.waiting.extendleft(reversed(skipped))

  def send(self, episode: Episode, verb: str, *requests: dict) -> None:
    """Sends requests to the episode's environment, if it belongs to this process."""
    index, process = divmod(episode.slot, coordination.process_count())
    futures = []
    if process == coordination.process_index():
      environment = self.pools[episode.number].all[index]
      futures = [environment.submit(verb=verb, **request) for request in requests]
    self.pending.append(PendingAnswers(episode, verb, futures, self.block))

  def take_due(self, idle: bool) -> list[PendingAnswers]:
    """Removes and returns the pending requests whose answers are used now.

    With `wait_blocks` that depends on the number of blocks alone, so that runs repeat bit for bit. If the engine is
    idle, the oldest requests are due at once.
    """
    if not self.pending:
      return []
    if self.wait_blocks:
      oldest = self.pending[0].block
      last = max(self.block - self.wait_blocks, oldest if idle else -1)
      due = [p for p in self.pending if p.block <= last]
    else:
      if idle:
        concurrent.futures.wait([p.futures[-1] for p in self.pending], return_when=concurrent.futures.FIRST_COMPLETED)
      due = [p for p in self.pending if p.futures[-1].done()]
    self.pending = [p for p in self.pending if p not in due]
    return due

  def after_turn(self, completion: Completion) -> None:
    """Adds a turn to its episode; calls its tools, or ends the episode."""
    owner = self.owner
    e = self.episodes[completion.request.tag]
    ids = completion.tokens.tolist()
    e.tokens += generated_tokens(completion)
    e.turns += 1
    stopped = completion.finished and not completion.stop_string
    text = owner.tokenizer.decode(ids[:-1] if stopped else ids, False)
    pool = self.pools.get(e.number)
    calls = turns.parse(text, pool.tools) if stopped and pool else []
    if calls and ids[-1] != owner.turns.end_id:
      calls = None  # Another stop token ended the turn, after which the template has no tool answer.
    if calls is None:
      e.malformed += 1
    e.calls = calls or []
    e.finished = completion.finished and not calls
    message = {'role': 'assistant', 'content': text}
    if calls:
      message['tool_calls'] = [{'type': 'function', 'function': c} for c in calls]
    e.messages.append(message)
    if calls and e.turns < owner.limits.turns:
      e.called += len(calls)
      self.send(e, 'call', *calls)
    else:
      self.end(e)

  def end(self, episode: Episode) -> None:
    """Requests the reward after the last turn, if there is one."""
    pool = self.pools.get(episode.number)
    if pool and pool.gives_reward:
      self.send(episode, 'reward', {})
    else:
      self.release(episode)

  def release(self, episode: Episode) -> None:
    """Frees the environment of an episode that is over."""
    if pool := self.pools.get(episode.number):
      self.free[pool].append(episode.slot)
      self.free[pool].sort()

  def after_answers(self, pending: PendingAnswers, answers: list[Answer]) -> list[Request]:
    """Continues an episode with an environment's answers; returns its next request, if there is one."""
    e = pending.episode
    # A tool that raises is an answer for the model; any other failure ends the episode.
    error = next((a for a in answers if a.lost or a.spoiled or a.error and pending.verb != 'call'), None)
    if error:
      e.error, e.lost = error.error, error.lost
      self.release(e)
    elif pending.verb == 'reset':
      return self.begin(e, answers[0].value)
    elif pending.verb == 'call':
      return self.next_turn(e, answers)
    else:
      value = answers[0].value
      e.reward = np.nan if value is None else value
      self.release(e)
    return []

  def begin(self, e: Episode, observation: str | None) -> list[Request]:
    """Returns the request for the first turn; the observation of `reset` is appended to the last message."""
    owner = self.owner
    e.context = e.prompt.tokens
    if observation:
      messages = [dict(m) for m in e.prompt.prompt]
      messages[-1]['content'] += owner.turns.break_special_tokens(observation)
      row = {**e.prompt.columns, 'tools': self.pools[e.number].tools}
      e.context = prompts_lib.encode_prompt(owner.tokenizer, messages, row, f'prompt {e.prompt.index}')
    if len(e.context) > owner.limits.prompt:
      e.error = (
        f'reset: with its observation the prompt has {len(e.context)} tokens, '
        f'more than config.rollout.max_prompt_length={owner.limits.prompt}'
      )
      e.context = None
      self.release(e)
      return []
    return [self.request(e)]

  def next_turn(self, e: Episode, answers: list[Answer]) -> list[Request]:
    """Returns the request for the turn after the answers of tools; ends the episode, with no request, if too long."""
    owner = self.owner
    results = []
    e.tokens[-1] = e.tokens[-1]._replace(reward=sum(a.reward for a in answers))
    for call, answer in zip(e.calls, answers):
      text = answer.value
      if answer.error is not None:
        e.failures += 1
        text = json.dumps({'error': answer.error})
      ids = owner.tokenizer.encode(text)
      if len(ids) > owner.limits.result:
        text = owner.tokenizer.decode(ids[: owner.limits.result]) + ' [cut]'
      results.append((call['name'], text))
    ids = owner.turns.answers(results, e.prompt.columns)
    if len(e.tokens) + len(ids) >= self.max_tokens(e):
      self.end(e)
      return []
    e.messages += [{'role': 'tool', 'name': name, 'content': text} for name, text in results]
    e.tokens += given_tokens(ids, owner.engine.version)
    return [self.request(e)]

  def max_tokens(self, e: Episode) -> int:
    """Returns the limit of an episode's tokens: that of its source, or of the run."""
    return e.prompt.source.get('sampling', {}).get('max_tokens', self.owner.limits.tokens)

  def request(self, e: Episode) -> Request:
    """Returns the request for a turn that continues all tokens of the episode."""
    ids = np.array([t.id for t in e.tokens], np.int32)
    remaining = self.max_tokens(e) - len(e.tokens)
    return Request(
      tokens=np.concatenate([e.context, ids]),
      prompt=e.prompt.index,
      sample=e.sample,
      sampling=e.prompt.source.get('sampling', {}) | self.sampling | {'max_tokens': remaining},
      tag=e.number,
    )


def collect(due: list[PendingAnswers]) -> list[list[Answer]]:
  """Returns the answers to each of the pending requests, exchanged between all processes."""
  answers = {i: [vars(f.result()) for f in p.futures] for i, p in enumerate(due) if p.futures}
  if coordination.process_count() > 1 and due:
    shares = coordination.all_gather([[i, x] for i, x in answers.items()])
    answers = {i: x for share in shares for i, x in share}
  return [[Answer(**a) for a in answers[i]] for i in range(len(due))]
