"""A sampler of episodes in which somebody else's agent asks the policy by HTTP.

Legend: N sequences, G samples a prompt.

The agent runs in the process of an environment and knows an address and a key.
What it asks with a key is one episode: a chat that goes on with what was said
there continues its tokens, which are never encoded again; what came between
two answers is not trained.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.environments.episodes import Episode, Episodes
from jaxpost.environments.episodes import EpisodeLimits as Limits
from jaxpost.environments.episodes import generated_tokens as drawn
from jaxpost.environments.episodes import given_tokens as told
from jaxpost.environments.openai_server import Endpoint
from jaxpost.environments.pool import Answer
from jaxpost.environments.pool import reset_row as row_of
from jaxpost.errors import InputError
from jaxpost.types import Completion, Request, Rollout

if TYPE_CHECKING:
  from jaxpost.environments.turns import Turns

PLAY = 'play'  # of an environment: play(base_url, api_key) is the agent


@dataclasses.dataclass(eq=False)
class Session:
  """What one agent has asked so far, for `endpoint.Endpoint`."""

  episode: Episode
  turns: Turns
  limits: Limits
  sampling: dict
  known: list = dataclasses.field(default_factory=list)  # messages until now
  last: int = -1  # token drawn last
  begun: int = 0  # texts that went on with nothing before
  head: int = 0  # messages that came before the first answer
  between: list = dataclasses.field(default_factory=list)  # ids, not drawn
  anew: np.ndarray | None = None  # the text asked for, if it begins again
  full: bool = False  # it asked for more than the tokens of an episode
  busy: threading.Lock = dataclasses.field(default_factory=threading.Lock)

  def ids(self, body: dict, encode) -> tuple[np.ndarray, bool]:
    """The text that a body asks to go on with, and whether it begins again.

    `encode` has it anew.
    """
    e, messages = self.episode, body.get('messages')
    if self.known and messages and _same(messages[: len(self.known)], self.known) and (len(messages) > len(self.known)):
      between = self.turns.more(messages[len(self.known) :], ended=self.last == self.turns.end_id)
      return np.concatenate([self._text(), between]).astype(np.int32), False
    ids, text = encode(), self._text()
    return ids, not (e.tokens and not messages and (ids[: len(text)].tolist() == text.tolist()))

  def _text(self) -> np.ndarray:
    e = self.episode
    context = np.zeros(0, np.int32) if e.context is None else e.context
    return np.concatenate([context, [t[0] for t in e.tokens]]).astype(np.int32)

  def request(self, body: dict, encode, most: int) -> Request:
    """What is to be sampled, at most `most` tokens of it."""
    e = self.episode
    if not self.busy.acquire(blocking=False):
      raise InputError('api key: an episode asks for one answer at a time')
    try:
      ids, anew = self.ids(body, encode)
      if anew and len(ids) > self.limits.prompt:
        raise InputError(f'messages: {len(ids)} tokens are more than config.rollout.max_prompt_length')
      # Until it is answered nothing counts: it may still be refused.
      self.anew = ids if anew else None
      self.between = [] if anew else ids[len(self._text()) :].tolist()
      left = self.limits.tokens - len(self.between) - (0 if anew else len(e.tokens))
      if left < 1:
        self.full = True
        raise InputError('messages: the episode has used all of config.rollout.max_new_tokens')
    except BaseException:
      self.busy.release()
      raise
    return Request(ids, e.prompt.index, e.sample, {**self.sampling, 'max_tokens': max(1, min(most, left))})

  def heard(self, body: dict, completion: Completion, message: dict):
    """An answer was given."""
    e = self.episode
    if self.anew is not None:
      self.begun, self.head = self.begun + 1, len(body.get('messages') or 'a')
      e.context, e.tokens, e.messages = self.anew, [], []
    e.tokens += told(self.between, completion.versions[0])
    e.tokens += drawn(completion)
    e.turns, e.finished = e.turns + 1, completion.finished
    asked = body.get('messages') or [{'role': 'user', 'content': str(body.get('prompt'))}]
    self.known = [*asked, message]
    e.messages = self.known[self.head :]
    self.last = int(completion.tokens[-1])
    self.busy.release()


def _same(one: list, two: list) -> bool:
  """Whether messages say the same; clients add fields that are empty."""
  said = lambda m: {k: v for k, v in m.items() if v not in (None, [], '')}
  return len(one) == len(two) and all(isinstance(a, dict) and said(a) == said(b) for a, b in zip(one, two))


class Agents(Episodes):
  """In the place of `rollout.sampler.Sampler`: the server outlives updates."""

  def __init__(self, engine, run_key, pool, tokenizer, limits: Limits):
    super().__init__(engine, run_key, pool, tokenizer, limits)
    self.endpoint = Endpoint(engine, tokenizer)
    weakref.finalize(self, self.endpoint.close)

  def __call__(self, prompts, group_size: int = 1, step: int = 0, on_dispatch=None, **sampling) -> Rollout:
    episodes = [Episode(n * group_size + i, prompt, i) for n, prompt in enumerate(prompts) for i in range(group_size)]
    play = AgentScheduler(self, episodes, step, sampling)
    figures = self.endpoint.round(self.run_key, step, play.ended, on_dispatch)
    self.count(episodes)
    self.endpoint.drop()  # of agents that were killed
    figures['episodes/begun_again'] = sum(max(0, s.begun - 1) for s in play.sessions.values())
    return self.rollout(episodes, prompts, group_size, step, figures)


class AgentScheduler:
  """One call: which agents play, and which wait for a process."""

  def __init__(self, owner: Agents, episodes, step: int, sampling: dict):
    self.owner, self.waiting = owner, collections.deque(episodes)
    self.free, self.playing = list(owner.pool.all), []
    self.sessions = {}
    for e in episodes:
      self.sessions[f'{step}-{e.prompt.index}-{e.sample}'] = Session(e, owner.turns, owner.limits, sampling)
    owner.endpoint.sessions = self.sessions
    self.keys = {s.episode: key for key, s in self.sessions.items()}

  def ended(self) -> bool:
    """Looks after the processes; whether all episodes are over."""
    for item in [x for x in self.playing if x[2][-1].done()]:
      self.playing.remove(item)
      episode, environment, futures = item
      self.free.append(environment)
      self.settle(episode, futures)
    while self.waiting and self.free:
      episode, environment = self.waiting.popleft(), self.free.pop(0)
      self.playing.append((episode, environment, self.begin(episode, environment)))
    return not self.playing and not self.waiting

  def begin(self, e: Episode, environment) -> list[concurrent.futures.Future]:
    """Answers to come; each waits for the one before."""
    verbs = [
      dict(verb='reset', row=row_of(e.prompt.columns, e.prompt.prompt)),
      dict(verb='call', name=PLAY, arguments=dict(base_url=self.owner.endpoint.url, api_key=self.keys[e])),
    ]
    if self.owner.pool.gives_reward:
      verbs.append(dict(verb='reward'))
    return [environment.submit(**verb) for verb in verbs]

  def settle(self, e: Episode, futures):
    answers: list[Answer] = [future.result() for future in futures]
    full = self.sessions[self.keys[e]].full  # it ends there, as others do
    wrong = [a for i, a in enumerate(answers) if a.error and (a.lost or not (full and i == 1))]
    if wrong:
      e.error, e.lost = wrong[0].error, wrong[0].lost
    elif not e.turns:
      e.error = 'play: the agent ended without having asked anything'
    elif self.owner.pool.gives_reward:
      value = answers[-1].value
      e.reward = np.nan if value is None else value
