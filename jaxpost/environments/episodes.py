"""A sampler of episodes: the model's turns, and the answers of its tools.

Legend: N sequences, G samples a prompt, C completion tokens.

`follow` is the whole of it: a turn that ended calls tools or ends its episode;
answers that came make the next request of an episode. While an environment is
at work its slot goes to others.
"""

import collections
import concurrent.futures
import dataclasses
import json
import logging
import os

import numpy as np

from jaxpost.data import chat
from jaxpost.distributed import coordination
from jaxpost.environments import turns
from jaxpost.environments.pool import Answer, EnvironmentPool
from jaxpost.environments.pool import reset_row as row_of
from jaxpost.errors import InputError
from jaxpost.types import Completion, Prompt, Request, Rollout

NAME = 'environment'  # of the reward that get_reward() gives
_WINDOW, _ENOUGH = 100, 20  # episodes over which the share of failures counts


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
  """prompt: tokens before the first turn; tokens: of all turns and answers
  together; turns: of the model; result: tokens of an answer; wait_blocks: see
  config.tools; failed: share of lost episodes that stops a run."""

  prompt: int
  tokens: int
  turns: int = 8
  result: int = 256
  wait_blocks: int = 4
  failed: float = 0.25


@dataclasses.dataclass(eq=False)
class Episode:
  """One sample of a prompt: what was said, token by token."""

  number: int
  prompt: Prompt
  sample: int
  seat: int = -1  # of the environment that it has
  context: np.ndarray | None = None  # [P], the first turn's
  # (id, written by the model, log-prob, behaviour log-prob, version)
  tokens: list = dataclasses.field(default_factory=list)
  messages: list = dataclasses.field(default_factory=list)
  calls: list = dataclasses.field(default_factory=list)  # of the last turn
  turns: int = 0
  called: int = 0
  failures: int = 0
  malformed: int = 0
  finished: bool = False
  reward: float = np.nan
  error: str | None = None
  lost: bool = False


def given_tokens(ids, version: int) -> list[tuple]:
  """Entries of `Episode.tokens` that the model did not write."""
  return [(int(i), False, 0.0, 0.0, version) for i in ids]


def generated_tokens(completion: Completion) -> list[tuple]:
  """Those of a turn of the model."""
  c = completion
  return list(
    zip(
      c.tokens.tolist(), [True] * len(c.tokens), c.logprobs.tolist(), c.behaviour_logprobs.tolist(), c.versions.tolist()
    )
  )


@dataclasses.dataclass(eq=False)
class PendingAnswers:
  """What an environment of some process was asked for."""

  episode: Episode
  verb: str
  futures: list  # of Answer; empty where another process has it
  born: int  # blocks before


class Episodes:
  """In the place of `rollout.sampler.Sampler`, for prompts that are conversations."""

  def __init__(self, engine, run_key, pool: EnvironmentPool, tokenizer, limits: EpisodeLimits):
    self.engine, self.run_key, self.pool = engine, run_key, pool
    self.tokenizer, self.limits = tokenizer, limits
    self.turns = turns.Turns(tokenizer)
    self.recent = collections.deque(maxlen=_WINDOW)  # errors or None
    if not self.turns.is_whole():
      logging.info(
        'the chat template renders earlier turns otherwise than they were sampled; training reads what was sampled'
      )

  def __call__(self, prompts, group_size: int = 1, step: int = 0, on_dispatch=None, **sampling) -> Rollout:
    """`group_size` episodes of each prompt; `sampling` as in `Sampling`."""
    play = EpisodeScheduler(
      self,
      [Episode(n * group_size + i, prompt, i) for n, prompt in enumerate(prompts) for i in range(group_size)],
      sampling,
    )
    figures = self.engine.serve(
      [],
      run_key=self.run_key,
      step=step,
      follow=play.follow,
      read_rows=self.engine.prefix_rows(group_size),
      on_dispatch=on_dispatch,
    )
    assert not play.waiting and not play.pending, 'episodes were left out'
    self.count(play.episodes)
    return self.rollout(play.episodes, prompts, group_size, step, figures)

  def count(self, episodes: list[Episode]):
    """InputError when too many were lost."""
    first = not self.recent
    self.recent.extend(e.error for e in episodes)
    errors = [error for error in self.recent if error]
    if errors and (
      first
      and len(errors) == len(episodes)
      or (len(self.recent) >= _ENOUGH and len(errors) > self.limits.failed * len(self.recent))
    ):
      raise InputError(
        f'config.environment: {len(errors)} of the last {len(self.recent)} episodes were lost: {errors[-1]}'
      )

  def rollout(self, episodes, prompts, size, step, figures) -> Rollout:
    """Groups share what all their contexts begin with; the rest of one goes
    before its first turn, untrained."""
    shared, rows = [], []
    for n, prompt in enumerate(prompts):
      group = episodes[n * size : (n + 1) * size]
      contexts = [prompt.tokens if e.context is None else e.context for e in group]
      common = len(os.path.commonprefix([x.tolist() for x in contexts]))
      shared.append(prompt.replace(tokens=contexts[0][:common]))
      rows += [[*given_tokens(context[common:], self.engine.version), *e.tokens] for context, e in zip(contexts, group)]
    room = max(self.limits.tokens, *map(len, rows))
    column = lambda i, dtype: np.array([[t[i] for t in row] + [0] * (room - len(row)) for row in rows], dtype)
    nan = lambda e: np.nan if e.error else e.reward if (self.pool.gives_reward) else 0.0
    return Rollout(
      tuple(shared),
      column(0, np.int32),
      np.array([len(row) for row in rows], np.int32),
      column(2, np.float32),
      column(3, np.float32),
      np.array([e.finished for e in episodes]),
      step,
      self.engine.version,
      figures.pop('occupancy'),
      figures | self.figures(episodes),
      mask=column(1, bool),
      versions=column(4, np.int32),
      rewards={NAME: np.array([nan(e) for e in episodes], np.float64)},
      messages=tuple(e.messages for e in episodes),
    )

  def figures(self, episodes) -> dict:
    """TRL's names for what tools did, and what became of the episodes."""
    called = sum(e.called for e in episodes)
    return {
      'tools/call_frequency': called / len(episodes),
      'tools/failure_frequency': sum(e.failures for e in episodes) / max(called, 1),
      'tools/malformed': sum(e.malformed for e in episodes),
      'episodes/turns': float(np.mean([e.turns for e in episodes])),
      'episodes/failed': sum(e.error is not None for e in episodes),
      'episodes/killed': sum(e.lost for e in episodes),
    }


class EpisodeScheduler:
  """One call: who plays, who waits for an environment, who for an answer."""

  def __init__(self, owner: Episodes, episodes, sampling: dict):
    self.owner, self.episodes, self.sampling = owner, episodes, sampling
    self.waiting = collections.deque(episodes)
    # Seat s is environment s // processes of process s % processes.
    self.free = list(range(len(owner.pool.all) * coordination.process_count()))
    self.pending, self.clock = [], 0
    self.wait_blocks = owner.limits.wait_blocks
    if coordination.process_count() > 1:  # all must see the same answers
      self.wait_blocks = max(self.wait_blocks, 1)

  def follow(self, done: list[Completion], idle: bool) -> list[Request]:
    """What `NativeEngine.serve` asks between two blocks."""
    self.clock += 1
    for completion in done:
      self.after_turn(completion)
    ready = []
    while True:
      self.seat()
      due = self.due(idle)
      for pending, answers in zip(due, collect(due)):
        ready += self.after(pending, answers)
      self.seat()
      if ready or not idle or not self.pending:
        return ready

  def seat(self):
    """Episodes begin where an environment is free."""
    while self.waiting and self.free:
      episode = self.waiting.popleft()
      episode.seat = self.free.pop(0)
      self.ask(episode, 'reset', dict(row=row_of(episode.prompt.columns, episode.prompt.prompt)))

  def ask(self, episode: Episode, verb: str, *requests):
    """Sends requests to the episode's environment, if it is here."""
    at, process = divmod(episode.seat, coordination.process_count())
    here = process == coordination.process_index()
    self.pending.append(
      PendingAnswers(
        episode,
        verb,
        [self.owner.pool.all[at].submit(verb=verb, **request) for request in requests] if here else [],
        self.clock,
      )
    )

  def due(self, idle: bool) -> list[PendingAnswers]:
    """Those whose answers count now; the rest stays pending."""
    if not self.pending:
      return []
    if self.wait_blocks:
      oldest = self.pending[0].born
      last = max(self.clock - self.wait_blocks, oldest if idle else -1)
      due = [p for p in self.pending if p.born <= last]
    else:
      if idle:
        concurrent.futures.wait([p.futures[-1] for p in self.pending], return_when=concurrent.futures.FIRST_COMPLETED)
      due = [p for p in self.pending if p.futures[-1].done()]
    self.pending = [p for p in self.pending if p not in due]
    return due

  def after_turn(self, completion: Completion):
    """A turn ended: its tools are called, or its episode is over."""
    owner, e = self.owner, self.episodes[completion.request.tag]
    ids = completion.tokens.tolist()
    e.tokens += generated_tokens(completion)
    e.turns += 1
    stopped = completion.finished and not completion.stop_string
    text = owner.tokenizer.decode(ids[:-1] if stopped else ids, False)
    calls = turns.parse(text) if stopped else []
    if calls and ids[-1] != owner.turns.end_id:
      calls = None  # no turn that the template would go on from
    e.malformed += calls is None
    e.calls, e.finished = calls or [], completion.finished and not calls
    e.messages.append(
      {'role': 'assistant', 'content': text}
      | ({'tool_calls': [{'type': 'function', 'function': c} for c in calls]} if calls else {})
    )
    if calls and e.turns < owner.limits.turns:
      e.called += len(calls)
      self.ask(e, 'call', *calls)
    else:
      self.end(e)

  def end(self, episode: Episode):
    if self.owner.pool.gives_reward:
      self.ask(episode, 'reward', {})
    else:
      self.leave(episode)

  def leave(self, episode: Episode):
    self.free.append(episode.seat)
    self.free.sort()

  def after(self, pending: PendingAnswers, answers: list[Answer]) -> list[Request]:
    """What follows from an environment's answers."""
    e, error = pending.episode, next((a for a in answers if a.lost or a.error and pending.verb != 'call'), None)
    if error:
      e.error, e.lost = error.error, error.lost
      self.leave(e)
    elif pending.verb == 'reset':
      return self.begin(e, answers[0].value)
    elif pending.verb == 'call':
      return self.answer(e, answers)
    else:
      value = answers[0].value
      e.reward = np.nan if value is None else value
      self.leave(e)
    return []

  def begin(self, e: Episode, observation: str | None) -> list[Request]:
    """The first turn, after what `reset` has to say."""
    owner, e.context = self.owner, e.prompt.tokens
    if observation:
      messages = [dict(m) for m in e.prompt.prompt]
      messages[-1]['content'] += owner.turns.safe(observation)
      e.context = chat.encode_prompt(owner.tokenizer, messages, {'tools': owner.pool.tools}, f'prompt {e.prompt.index}')
    if len(e.context) > owner.limits.prompt:
      e.error = (
        f'reset: with its observation the prompt has {len(e.context)} '
        'tokens, more than config.rollout.max_prompt_length'
      )
      e.context = None
      self.leave(e)
      return []
    return [self.request(e)]

  def answer(self, e: Episode, answers: list[Answer]) -> list[Request]:
    """The next turn, after the tools; none where it would not fit."""
    owner, results = self.owner, []
    for call, answer in zip(e.calls, answers):
      text = answer.value
      if answer.error is not None:
        e.failures += 1
        text = json.dumps({'error': answer.error})
      ids = owner.tokenizer.encode(text)
      if len(ids) > owner.limits.result:
        text = owner.tokenizer.decode(ids[: owner.limits.result]) + ' [cut]'
      results.append((call['name'], text))
      e.messages.append({'role': 'tool', 'name': call['name'], 'content': text})
    ids = owner.turns.answers(results)
    if len(e.tokens) + len(ids) >= owner.limits.tokens:
      self.end(e)
      return []
    e.tokens += given_tokens(ids, owner.engine.version)
    return [self.request(e)]

  def request(self, e: Episode) -> Request:
    said = np.array([t[0] for t in e.tokens], np.int32)
    return Request(
      np.concatenate([e.context, said]),
      e.prompt.index,
      e.sample,
      {**self.sampling, 'max_tokens': self.owner.limits.tokens - len(e.tokens)},
      e.number,
    )


def collect(due: list[PendingAnswers]) -> list[list[Answer]]:
  """The answers to all of them, on every process."""
  found = {i: [vars(f.result()) for f in p.futures] for i, p in enumerate(due) if p.futures}
  if coordination.process_count() > 1 and due:
    shares = coordination.all_gather([[i, x] for i, x in found.items()])
    found = {i: x for share in shares for i, x in share}
  return [[Answer(**a) for a in found[i]] for i in range(len(due))]
