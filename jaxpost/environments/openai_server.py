"""An OpenAI-compatible HTTP server on an engine, for agents and other clients.

It serves /v1/chat/completions, /v1/completions and /v1/models, by default on loopback. http_connections.py reads the
requests and sends the replies in one thread; a few more translate bodies, with openai_format.py and openai_stream.py.
The requests share the slots of `shared_engines.SharedEngines`. A client that leaves gives up its slots.
Each response carries token ids and log-probs, so that the text can be trained on without tokenizing it again.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import hmac
import itertools
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpost.data.examples import Example
from jaxpost.environments import http_connections, openai_format
from jaxpost.environments.http_connections import EVENTS, Call, HttpError, Reply
from jaxpost.environments.openai_stream import EventStream, TextStream
from jaxpost.environments.shared_engines import Answer, SharedEngines
from jaxpost.errors import InputError, refuse
from jaxpost.rollout.sequence import Completion, Request

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.environments.agents import Session

_THREADS = 4  # threads that translate bodies
_LOOPBACK = 'localhost', '127.0.0.1', '::1'
_CHAT = '/v1/chat/completions'
_TEXT = '/v1/completions'


class _Job(NamedTuple):
  """A body, and the requests that it makes.

  session: that of an agent, held busy, or None. echo: the reply repeats the prompts. stream: None if it is JSON.
  """

  call: Call
  body: dict
  model: str
  requests: list[Request]
  count: int
  session: Session | None
  echo: bool
  prompts: list[np.ndarray]
  stream: EventStream | None

  @property
  def draws(self) -> bool:
    """Returns whether the requests draw any token."""
    return not self.echo or self.requests[0].sampling['max_tokens'] > 0


class Endpoint:
  """The server. It listens from the start; requests are answered while `serve`, or `shared.serve_until`, runs.

  Attributes:
    url: address of the API, up to and including /v1.
    sessions: API key -> `Session` of an agent whose requests form an episode of a training run.
    shared: the engines, and the requests that wait for them.
    counts: requests so far by outcome: answered, refused, and cancelled because their client left.

  Args:
    tokenizer: chats need its chat template.
    port: 0 picks a free one.
    name: the name of the model in responses.
    record: called for each completion with a dict of prompt_ids, ids, logprobs, finish_reason, model and session (the
      API key of the client).
    api_key: bearer token that a client must send; '': none is needed.
    other_engines: {name: engine} of other models, such as adapters. If there are any, a body must name its model.
      Agents of a run may give any name.
    scorers: {name: `tools.scoring.Scorer`} of each model, for log-probs of prompts; {}: there are none.
  """

  def __init__(
    self,
    engine: Any,
    tokenizer: Tokenizer,
    *,
    host: str = '127.0.0.1',
    port: int = 0,
    name: str = 'policy',
    record: Callable[[dict], None] | None = None,
    api_key: str = '',
    other_engines: dict[str, Any] | None = None,
    scorers: Mapping[str, Any] = types.MappingProxyType({}),
  ) -> None:
    self.engine = engine
    self.name = name
    self.engines = {name: engine} | (other_engines or {})
    self.sessions: dict[str, Session] = {}
    self.counts = collections.Counter(answered=0, refused=0, cancelled=0)
    self.hosts = _LOOPBACK if host in _LOOPBACK else ()  # names it is called by; (): by any
    self.api_key = api_key
    self._scorers = scorers
    self._record = record or (lambda entry: None)
    self._tokenizer = tokenizer
    self._translator = openai_format.Translator(tokenizer, engine.config.room)
    self.shared = SharedEngines(self.engines)
    self._numbers = itertools.count()
    self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS)
    self._scoring = concurrent.futures.ThreadPoolExecutor(1)  # so that long lists of prompts delay no other client
    try:
      listening = http_connections.listen(host, port)
    except OSError as error:
      raise InputError(f'{host}:{port}: {error.strerror}; name another --port') from error
    self._http = http_connections.Connections(listening, self._reply, self._refuse, self._admit)
    self.url = f'http://{host}:{self._http.port}/v1'

  def serve(self, run_key: Any, step: int = 0) -> dict[str, dict]:
    """Answers requests until `stop` is called from any thread, then closes; returns the figures of each engine."""
    try:
      return self.shared.serve(run_key, step)
    finally:
      self.close()

  def stop(self) -> None:
    """Ends `serve` after the sequences in flight."""
    self.shared.stopped.set()

  def close(self) -> None:
    """Stops listening and refuses the requests that are left."""
    self.stop()
    self.shared.cancel_open()
    self._http.close()
    self._threads.shutdown(wait=False)
    self._scoring.shutdown(wait=False)

  async def _reply(self, call: Call) -> Reply:
    """Answers a call; runs in the thread of the connections."""
    try:
      paths = (_CHAT, _TEXT) if call.method == 'POST' else ('/v1/models', '/v1/models/')
      if call.path not in paths:
        return self._refuse(404, f'there is nothing at {call.path}')
      if call.method == 'GET':
        models = [dict(id=name, object='model', owned_by='jaxpost') for name in self.engines]
        return Reply(200, json.dumps(dict(object='list', data=models)))
      reply = await self._answer(call)
    except HttpError as error:
      return self._refuse(error.status, str(error), error.code)
    except (InputError, ValueError) as error:
      return self._refuse(400, str(error))
    except RecursionError:
      return self._refuse(400, 'the body is nested too deeply')
    except concurrent.futures.CancelledError:
      if not call.client_left:
        return self._refuse(503, 'the server ends')
      self.counts['cancelled'] += 1
      return Reply(499, '')  # never sent
    self.counts['answered'] += 1
    return reply

  def _admit(self, call: Call) -> None:
    """Raises HttpError if the key is wrong, or a page of another site asks (DNS rebinding)."""
    if self.api_key and not hmac.compare_digest(_key(call).encode(), self.api_key.encode()):
      raise HttpError(401, 'Authorization: the API key is missing or wrong')
    host = re.sub(r':\d+$', '', call.headers.get('host', '')).strip('[]').lower()
    if self.hosts and host not in self.hosts:
      raise HttpError(403, f'Host: {host!r} is not a name of this server: {", ".join(self.hosts)}')

  def _refuse(self, status: int, text: str, code: str | None = None) -> Reply:
    """Returns an error reply of the API; `text` begins with the name of the parameter, if it is about one."""
    self.counts['refused'] += 1
    name = text.partition(':')[0].partition('[')[0]
    param = name if name.isidentifier() and name.islower() else None
    kind = 'server_error' if status >= 500 else 'invalid_request_error'
    return Reply(status, json.dumps({'error': dict(message=text, type=kind, param=param, code=code)}))

  async def _answer(self, call: Call) -> Reply:
    """Returns the reply to a chat or completion.

    Raises:
      InputError: if the body is invalid, or the engine cannot serve a request of it.
      CancelledError: of concurrent.futures, if the server ends or the client leaves.
    """
    run = asyncio.get_running_loop().run_in_executor
    job = await run(self._threads, self._prepare, call)
    try:  # a session is busy from here on
      await run(self._threads, self._check, job)
      is_scored = job.echo and job.body.get('logprobs') is not None
      scores = await run(self._scoring, self._score, job) if is_scored else [None for _ in job.prompts]
      if scores is None:
        raise concurrent.futures.CancelledError
      if job.draws:
        completions = await self._generate(job)
      else:
        completions = [openai_format.nothing_drawn(request) for request in job.requests]
    except BaseException:
      if job.session:
        job.session.busy.release()
      raise
    return await run(self._threads, self._respond, job, completions, scores)

  def _prepare(self, call: Call) -> _Job:
    """Reads a body; InputError if it is invalid, HttpError if it names no model."""
    body = json.loads(call.body)
    refuse(not isinstance(body, dict), 'the body must be a JSON object')
    name = body.get('model')
    if self.sessions or (len(self.engines) == 1 and name in ('', None)):
      name = self.name
    elif not (isinstance(name, str) and name in self.engines):
      raise HttpError(404, f'model: there is no {name!r}; there is {", ".join(self.engines)}', 'model_not_found')
    count = openai_format.number(body, 'n', int, 1)
    requests = self._requests(call.path == _CHAT, body, count)
    session = self.sessions.get(_key(call))
    refuse(bool(self.sessions) and not session, 'Authorization: this API key belongs to no episode of the run')
    if session:
      requests = [_session_request(session, body, requests, self.engines[name])]
    else:
      openai_format.check_supported(body, call.path == _CHAT, self._scorers.get(name))
    echo = bool(body.get('echo')) and not session
    prompts = [request.tokens for request in requests[::count]]
    stream = None
    if body.get('stream'):
      # Text is sent while it is drawn; other answers, and those to agents of a run, when they are complete.
      at_end = session or echo or body.get('tools') or body.get('logprobs') not in (None, False)
      stops = [] if at_end else [request.sampling['stop_strings'] for request in requests]
      before = [] if call.path == _CHAT else self._translator.before
      texts = [TextStream(self._tokenizer.decode, strings, before) for strings in stops]
      stream = EventStream(call.path == _CHAT, name, texts)
    return _Job(call, body, name, requests, count, session=session, echo=echo, prompts=prompts, stream=stream)

  def _check(self, job: _Job) -> None:
    """Raises InputError if a request cannot be served; in the engine's thread, the error would end the run."""
    refuse(not all(map(len, job.prompts)), 'prompt: is empty; a sequence begins with at least one token')
    for i, request in enumerate(job.requests if job.draws else ()):
      self.engines[job.model].check(dataclasses.replace(request, prompt=i // job.count))  # the number in the body

  def _score(self, job: _Job) -> list[Any] | None:
    """Returns a `TextScore` of each prompt; None if the server ends or the client leaves."""
    chunks = self._scorers[job.model].chunks([Example(p, np.ones(len(p), bool)) for p in job.prompts])
    scores: list[Any] = []
    while len(scores) < len(job.prompts):
      with self.shared.lock:  # between two blocks
        if job.call.client_left or self.shared.stopped.is_set():
          return None
        scores += next(chunks)
    return scores

  async def _generate(self, job: _Job) -> list[Completion]:
    """Waits for the completions of the requests of a body; sends the events of a stream. Raises as `_answer` does."""
    answers = [Answer() for _ in job.requests]
    job.call.futures = [*answers]
    arrived: asyncio.Queue[tuple[int, np.ndarray] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def pass_on(index: int, tokens: np.ndarray) -> None:
      loop.call_soon_threadsafe(arrived.put_nowait, (index, tokens))  # the engine runs in another thread

    if job.stream and job.stream.texts:
      for i, answer in enumerate(answers):
        answer.on_tokens = functools.partial(pass_on, i)
    with self.shared.submitted(job.model, job.requests, answers):
      if job.call.client_left or self.shared.stopped.is_set():  # No engine may be running.
        job.call.cancel()
      ended = asyncio.gather(*map(asyncio.wrap_future, answers), return_exceptions=True)
      ended.add_done_callback(lambda _: arrived.put_nowait(None))
      while (part := await arrived.get()) is not None:
        event = job.stream.part(*part)
        if event and not job.call.client_left:
          try:
            await job.call.send_event(event)
          except (ConnectionError, TimeoutError):
            job.call.leave()
      return [answer.result() for answer in answers]

  def _respond(self, job: _Job, completions: list[Completion], scores: list[Any]) -> Reply:
    """Returns the reply with these completions and the scores of the prompts, and records what was drawn."""
    make_choice = self._translator.chat_choice if job.call.path == _CHAT else self._translator.text_choice
    choices = [make_choice(i, completion, job.body) for i, completion in enumerate(completions)]
    if job.session:
      message = choices[0].get('message') or {'role': 'assistant', 'content': choices[0]['text']}
      job.session.record_answer(job.body, completions[0], message)
    for choice, completion in zip(choices if job.draws else (), completions):
      self._record(
        dict(
          session=_key(job.call),
          model=job.model,
          prompt_ids=completion.request.tokens.tolist(),
          ids=completion.tokens.tolist(),
          logprobs=[float(x) for x in completion.logprobs],
          finish_reason=choice['finish_reason'],
        )
      )
    if job.echo:
      choices = [
        self._translator.with_prompt(c, job.body, job.prompts[i // job.count], scores[i // job.count])
        for i, c in enumerate(choices)
      ]
    response = openai_format.response(job.call.path == _CHAT, job.model, choices, job.prompts, completions)
    if job.stream:
      with_usage = (job.body.get('stream_options') or {}).get('include_usage')
      return Reply(200, job.stream.end(response, with_usage), EVENTS)
    return Reply(200, json.dumps(response))

  def _requests(self, is_chat: bool, body: dict, count: int) -> list[Request]:
    """Returns the requests of a body, `count` for each prompt.

    The number of the body and the index of the request in it seed the draws. If the body has a seed, the number is 0
    and the seed decides, so that the same body is answered with the same text.
    """
    contexts = [self._translator.chat_prompt(body)] if is_chat else self._translator.text_prompts(body)
    number = next(self._numbers) if body.get('seed') is None else 0
    max_count = openai_format.MAX_ANSWERS // len(contexts)
    refuse(not 1 <= count <= max_count, f'n: {count} is not between 1 and {max_count}, for {len(contexts)} prompts')
    return [
      Request(ids, number, i * count + n, self._translator.sampling(body, len(ids)))
      for i, ids in enumerate(contexts)
      for n in range(count)
    ]


def _session_request(session: Session, body: dict, requests: list[Request], engine: Any) -> Request:
  """Returns the request of an agent in a training run; its session decides about tokens and sampling."""
  refuse(len(requests) != 1, 'n, prompt: an episode of a run asks for one answer')
  sampling = requests[0].sampling
  request = session.request(body, lambda: requests[0].tokens, sampling['max_tokens'])
  if sampling['stop_strings']:  # in addition to those of the run
    request.sampling['stop_strings'] = (*engine.config.stop_strings, *sampling['stop_strings'])
  return request


def _key(call: Call) -> str:
  header = call.headers.get('authorization', '')
  scheme, _, key = header.partition(' ')
  return key.strip() if scheme.lower() == 'bearer' else header
