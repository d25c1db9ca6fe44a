"""A sampler of episodes in which an external agent queries the policy over HTTP.

The agent runs in the process of an environment and receives an address and an API key. All requests with one key form
one episode. A chat that repeats the conversation so far continues its sampled tokens, which are never tokenized again;
the messages that the agent has added since are not trained on.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.environments.episode import Episode, EpisodeLimits, generated_tokens, given_tokens
from jaxpost.environments.episodes import Episodes
from jaxpost.environments.openai_server import Endpoint
from jaxpost.environments.pool import PLAY, Answer, Environment, EnvironmentPool, reset_row
from jaxpost.errors import InputError
from jaxpost.rollout.sequence import Completion, Request
from jaxpost.types import Prompt, Rollout

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.environments.turns import Turns


@dataclasses.dataclass(eq=False)
class Session:
  """The conversation of one agent so far, for `openai_server.Endpoint`.

  `request` and `record_answer` alternate; `busy` is held in between, as an episode has one request at a time.
  """

  episode: Episode
  turns: Turns
  limits: EpisodeLimits
  sampling: dict
  known: list[dict] = dataclasses.field(default_factory=list)  # the messages of the conversation, answers included
  begun: int = 0  # how often a conversation has started
  head: int = 0  # number of messages before the first answer
  between: list[int] = dataclasses.field(default_factory=list)  # tokens that the agent added after the last answer
  new_context: np.ndarray | None = None  # the tokens of a request that starts over, until it is answered
  full: bool = False  # True after a request beyond the token limit of an episode
  busy: threading.Lock = dataclasses.field(default_factory=threading.Lock)

  def context(self, body: dict, encode: Callable[[], np.ndarray]) -> tuple[np.ndarray, bool]:
    """Returns ([P] int32 all tokens before the answer, True if they do not continue the episode, which starts over).

    `encode` tokenizes the whole body, if it does not continue the conversation.
    """
    messages = body.get('messages')
    tokens = self._tokens()
    count = len(self.known)
    if count and messages and len(messages) > count and _same_messages(messages[:count], self.known):
      between = self.turns.continuation(messages[count:], ended=tokens[-1] == self.turns.end_id, row=body)
      return np.concatenate([tokens, between]).astype(np.int32), False
    ids = encode()
    # A text or token prompt continues the episode if it begins with its tokens.
    continues = self.episode.tokens and not messages and ids[: len(tokens)].tolist() == tokens.tolist()
    return ids, not continues

  def _tokens(self) -> np.ndarray:
    """Returns all tokens of the episode: the context and those after it."""
    e = self.episode
    context = np.zeros(0, np.int32) if e.context is None else e.context
    return np.concatenate([context, [t.id for t in e.tokens]]).astype(np.int32)

  def request(self, body: dict, encode: Callable[[], np.ndarray], max_tokens: int) -> Request:
    """Returns the request for an answer of at most `max_tokens` tokens, and takes `busy`.

    Raises:
      InputError: if the prompt or the episode would be too long, or the session is busy.
    """
    e = self.episode
    if not self.busy.acquire(blocking=False):
      raise InputError('api key: an episode asks for one answer at a time')
    try:
      ids, restarts = self.context(body, encode)
      if restarts and len(ids) > self.limits.prompt:
        raise InputError(f'messages: {len(ids)} tokens exceed config.rollout.max_prompt_length={self.limits.prompt}')
      # The episode changes only when the request is answered: the engine may still refuse it.
      self.new_context = ids if restarts else None
      self.between = [] if restarts else ids[len(self._tokens()) :].tolist()
      remaining = self.limits.tokens - len(self.between) - (0 if restarts else len(e.tokens))
      if remaining < 1:
        self.full = True
        raise InputError('messages: the episode has used all of config.rollout.max_new_tokens')
    except BaseException:
      self.busy.release()
      raise
    sampling = {**self.sampling, 'max_tokens': max(1, min(max_tokens, remaining))}
    return Request(ids, e.prompt.index, e.sample, sampling)

  def record_answer(self, body: dict, completion: Completion, message: dict) -> None:
    """Appends an answer to the episode, and releases `busy`."""
    e = self.episode
    if self.new_context is not None:
      self.begun += 1
      self.head = len(body.get('messages') or 'a')  # a text prompt counts as one message
      e.context = self.new_context
      e.tokens = []
      e.messages = []
    e.tokens += given_tokens(self.between, completion.versions[0])
    e.tokens += generated_tokens(completion)
    e.turns += 1
    e.finished = completion.finished
    request_messages = body.get('messages') or [{'role': 'user', 'content': str(body.get('prompt'))}]
    self.known = [*request_messages, message]
    e.messages = self.known[self.head :]
    self.busy.release()


def _same_messages(messages: list[dict], others: list[dict]) -> bool:
  """Returns whether two lists of messages of one length are equal apart from empty fields, which some clients add."""

  def filled(message: dict) -> dict:
    return {k: v for k, v in message.items() if v not in (None, [], '')}

  return all(isinstance(a, dict) and filled(a) == filled(b) for a, b in zip(messages, others, strict=True))


class Agents(Episodes):
  """Replaces `rollout.sampler.Sampler` if the environment is an agent. Its server runs as long as the stage."""

  def __init__(
    self, engine: Any, run_key: Any, pool: EnvironmentPool, tokenizer: Tokenizer, limits: EpisodeLimits
  ) -> None:
    super().__init__(engine, run_key, pool, tokenizer, limits)
    self.endpoint = Endpoint(engine, tokenizer)
    weakref.finalize(self, self.endpoint.close)

  def __call__(
    self, prompts: Sequence[Prompt], group_size: int = 1, step: int = 0, on_dispatch: Callable | None = None, **sampling
  ) -> Rollout:
    """Plays `group_size` episodes of each prompt; `sampling` as in `Request.sampling`."""
    episodes = [Episode(n * group_size + i, prompt, i) for n, prompt in enumerate(prompts) for i in range(group_size)]
    scheduler = AgentScheduler(self, episodes, sampling)
    cancelled_before = self.endpoint.counts['cancelled']
    shared = self.endpoint.shared
    figures = shared.serve_until(self.endpoint.name, scheduler.advance, self.run_key, step, on_dispatch)
    self.check_failures(episodes)
    shared.cancel_open()  # requests of agents that have just been killed
    figures['episodes/cancelled'] = self.endpoint.counts['cancelled'] - cancelled_before
    figures['episodes/begun_again'] = sum(max(0, s.begun - 1) for s in scheduler.sessions.values())
    return self.rollout(episodes, prompts, group_size, step, figures)


class AgentScheduler:
  """The episodes of one call of `Agents`: which are running, and which wait for a free process."""

  def __init__(self, owner: Agents, episodes: Sequence[Episode], sampling: dict) -> None:
    self.owner = owner
    self.waiting = collections.deque(episodes)
    self.free = list(owner.pool.all)
    # {environment: (the episode that it plays, the futures of its `Answer`s)}
    self.running: dict[Environment, tuple[Episode, list[concurrent.futures.Future]]] = {}
    # Keys that no agent can guess, so that none writes into the episode of another.
    self.sessions = {
      secrets.token_urlsafe(): Session(e, owner.turns, owner.limits, e.prompt.source.get('sampling', {}) | sampling)
      for e in episodes
    }
    owner.endpoint.sessions = self.sessions
    self.keys = {session.episode: key for key, session in self.sessions.items()}

  def advance(self) -> bool:
    """Collects finished episodes and starts waiting ones; returns True once all are over."""
    for environment, (episode, futures) in list(self.running.items()):
      if futures[-1].done():
        del self.running[environment]
        self.free.append(environment)
        self._finish(episode, futures)
    while self.waiting and self.free:
      episode, environment = self.waiting.popleft(), self.free.pop(0)
      self.running[environment] = episode, self._start(episode, environment)
    return not self.running and not self.waiting

  def _start(self, e: Episode, environment: Environment) -> list[concurrent.futures.Future]:
    """Queues all requests of an episode; each is served after the one before."""
    requests = [
      dict(verb='reset', row=reset_row(e.prompt.columns, e.prompt.prompt)),
      dict(verb='call', name=PLAY, arguments=dict(base_url=self.owner.endpoint.url, api_key=self.keys[e])),
    ]
    if self.owner.pool.gives_reward:
      requests.append(dict(verb='reward'))
    return [environment.submit(**request) for request in requests]

  def _finish(self, e: Episode, futures: list[concurrent.futures.Future]) -> None:
    """Records the reward of an episode, or its error."""
    answers: list[Answer] = [future.result() for future in futures]
    # An agent may raise when it is refused for the token limit. Its episode ends there, like any other of full length.
    full = self.sessions[self.keys[e]].full
    failed = [a for i, a in enumerate(answers) if a.error and (a.lost or not (full and i == 1))]
    if failed:
      e.error, e.lost = failed[0].error, failed[0].lost
    elif not e.turns:
      e.error = 'play: the agent ended without having asked anything'
    elif self.owner.pool.gives_reward:
      value = answers[-1].value
      e.reward = np.nan if value is None else value
