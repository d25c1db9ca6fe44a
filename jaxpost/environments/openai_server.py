"""An OpenAI-compatible HTTP server on an engine, for agents and other clients.

It serves /v1/chat/completions, /v1/completions and /v1/models, by default on loopback. Each HTTP request waits in a
queue in its own thread; the requests share the slots of one `engine.serve`, which runs in the thread that drives the
engine. Each response carries token ids and log-probs, so that the text can be trained on without tokenizing it again.
openai_format.py translates the bodies.
"""

from __future__ import annotations

import concurrent.futures
import functools
import http.server
import itertools
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxpost.environments import openai_format
from jaxpost.environments.fair_lock import FairLock
from jaxpost.errors import InputError
from jaxpost.rollout.sequence import Completion, Request

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.environments.agents import Session

_MAX_BODY = 1 << 24  # bytes of a request
_TICK_S = 0.2  # seconds between checks whether to stop
_CHAT = '/v1/chat/completions'
_TEXT = '/v1/completions'


class Endpoint:
  """The server. It listens from the start; requests are answered while `serve` or `serve_until` runs.

  Attributes:
    url: address of the API, up to and including /v1.
    sessions: API key -> `Session` of an agent whose requests form an episode of a training run.

  Args:
    tokenizer: chats need its chat template.
    port: 0 picks a free one.
    name: the name of the model in responses.
    record: called for each completion with a dict of prompt_ids, ids, logprobs, finish_reason, model and session (the
      API key of the client).
    other_engines: {name: engine} of other models, such as adapters. If there are any, a body must name its model; else
      the name in a body is ignored.
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
    other_engines: dict[str, Any] | None = None,
  ) -> None:
    self.engine = engine
    self.name = name
    self.engines = {name: engine} | (other_engines or {})
    self.sessions: dict[str, Session] = {}
    self._record = record or (lambda entry: None)
    self._translator = openai_format.Translator(tokenizer, engine.config.room)
    self._queues = {name: queue.SimpleQueue() for name in self.engines}
    self._engine_lock = FairLock()
    self._numbers = itertools.count()
    self._stop = threading.Event()
    self._open = set()  # futures of requests that are not answered
    self._ended = self._stop.is_set
    self._tick_s = _TICK_S
    handler = type('Handler', (_Handler,), {'endpoint': self})
    try:
      self._http = _Server((host, port), handler)
    except OSError as error:
      raise InputError(f'{host}:{port}: {error.strerror}; name another --port') from error
    self.url = f'http://{host}:{self._http.server_address[1]}/v1'
    threading.Thread(target=self._http.serve_forever, daemon=True).start()

  # ------------------------------------------------------- driving the engines

  def serve(self, run_key: Any, step: int = 0) -> dict[str, dict]:
    """Answers requests until `stop` is called from any thread, then closes; returns the figures of each engine.

    The engines run in turn, a block at a time: programs of several devices that two threads launch at once can
    deadlock.
    """
    try:
      with concurrent.futures.ThreadPoolExecutor(len(self.engines)) as pool:
        jobs = {name: pool.submit(self._drive, name, run_key, step) for name in self.engines}
        try:
          for job in concurrent.futures.as_completed(jobs.values()):
            job.result()
        finally:
          self._stop.set()  # also ends the other engines if one has failed
      return {name: job.result() for name, job in jobs.items()}
    finally:
      self.close()

  def serve_until(
    self, ended: Callable[[], bool], run_key: Any, step: int, on_dispatch: Callable | None = None
  ) -> dict:
    """Answers requests until `ended()`, which is called between blocks; returns the engine's figures.

    Requests that arrive between two calls wait for the next one, because the weights may change meanwhile.
    """
    self._ended = ended
    self._tick_s = _TICK_S / 20
    try:
      return self._drive(self.name, run_key, step, on_dispatch)
    finally:
      self._ended = self._stop.is_set

  def _drive(self, name: str, run_key: Any, step: int, on_dispatch: Callable | None = None) -> dict:
    with self._engine_lock:
      return self.engines[name].serve(
        [],
        run_key=run_key,
        step=step,
        next_requests=functools.partial(self._follow, self._queues[name]),
        on_dispatch=on_dispatch,
      )

  def _follow(self, waiting: queue.SimpleQueue, done: list[Completion], idle: bool) -> list[Request]:
    """Delivers completions and returns new requests; the engine calls it between blocks.

    Other engines may run while it waits.
    """
    for completion in done:
      completion.request.tag.set_result(completion)
    if self._ended():
      return []
    self._engine_lock.release()
    try:
      return self._take(waiting, idle)
    finally:
      self._engine_lock.acquire()

  def _take(self, waiting: queue.SimpleQueue, idle: bool) -> list[Request]:
    """Returns the queued requests; an idle engine waits until there is one or the end."""
    ready = []
    while True:
      try:
        request, future = waiting.get(block=idle and not ready, timeout=self._tick_s)
        if future.cancelled():
          continue
        ready.append(Request(request.tokens, request.prompt, request.sample, request.sampling, future))
      except queue.Empty:
        if ready or not idle or self._ended():
          return ready

  def stop(self) -> None:
    """Ends `serve` after the sequences in flight."""
    self._stop.set()

  def close(self) -> None:
    """Stops listening and refuses the requests that are left."""
    self._stop.set()
    self._http.shutdown()
    self._http.server_close()
    self.cancel_open()

  def cancel_open(self) -> None:
    """Refuses the requests that are not answered, queued or in a slot that is gone."""
    for future in list(self._open):
      future.cancel()

  # -------------------------------------------- answering, in the threads of HTTP

  def model_error(self, body: dict) -> str:
    """Returns the error text for the model that a body names, '' if there is such a model."""
    name = body.get('model')
    if len(self.engines) == 1 or isinstance(name, str) and name in self.engines:
      return ''
    return f'model: there is no {name!r}; there is {", ".join(self.engines)}'

  def generate(self, requests: list[Request], name: str) -> list[Completion]:
    """Waits for the completions of the requests of one body; may be called from any thread.

    Raises:
      InputError: if the engine cannot serve a request.
      CancelledError: if the server ends.
    """
    for request in requests:
      self.engines[name].check(request)  # An error in the engine's thread would end the run.
    futures = [concurrent.futures.Future() for _ in requests]
    self._open |= set(futures)
    try:
      for pair in zip(requests, futures):
        self._queues[name].put(pair)
      if self._stop.is_set():  # No engine may be running.
        raise concurrent.futures.CancelledError
      return [future.result() for future in futures]
    finally:
      self._open -= set(futures)

  def answer(self, path: str, body: dict, api_key: str) -> dict:
    """Returns the response to a body; InputError if the body is invalid."""
    is_chat = path == _CHAT
    name = body['model'] if len(self.engines) > 1 else self.name
    count = openai_format.number(body, 'n', int, 1)
    requests = self._requests(is_chat, body, count)
    number = requests[0].prompt
    session = self.sessions.get(api_key)
    if self.sessions and not session:
      raise InputError('Authorization: this API key belongs to no episode of the run')
    if session:
      requests = [_session_request(session, body, requests)]
    try:
      completions = self.generate(requests, name)
    except BaseException:
      if session:
        session.busy.release()
      raise
    to_choice = self._translator.chat_choice if is_chat else self._translator.text_choice
    choices = [to_choice(i, c, body) for i, c in enumerate(completions)]
    if session:
      message = choices[0].get('message') or {'role': 'assistant', 'content': choices[0]['text']}
      session.record_answer(body, completions[0], message)
    for choice, completion in zip(choices, completions):
      self._record(_record_entry(api_key, name, completion, choice['finish_reason']))
    prompts = [request.tokens for request in requests[::count]]
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(len(c.tokens) for c in completions)
    return dict(
      id=f'cmpl-{number}',
      created=int(time.time()),
      model=name,
      object='chat.completion' if is_chat else 'text_completion',
      choices=choices,
      prompt_token_ids=prompts[0].tolist(),
      usage=dict(
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens
      ),
    )

  def _requests(self, is_chat: bool, body: dict, count: int) -> list[Request]:
    """Returns the requests of a body, `count` for each prompt.

    The number of the body and the index of the request in it seed the draws.
    """
    contexts = [self._translator.chat_prompt(body)] if is_chat else self._translator.text_prompts(body)
    number = next(self._numbers)
    if count < 1:
      raise InputError(f'n: {count} is less than 1')
    return [
      Request(ids, number, i * count + n, self._translator.sampling(body, len(ids)))
      for i, ids in enumerate(contexts)
      for n in range(count)
    ]


def _session_request(session: Session, body: dict, requests: list[Request]) -> Request:
  """Returns the request of an agent in a training run; its session decides about tokens and sampling."""
  if len(requests) != 1:
    raise InputError('n, prompt: an episode of a run asks for one answer')
  sampling = requests[0].sampling
  request = session.request(body, lambda: requests[0].tokens, sampling['max_tokens'])
  request.sampling['stop_strings'] = sampling['stop_strings']
  return request


def _record_entry(api_key: str, model: str, completion: Completion, finish_reason: str) -> dict:
  return dict(
    session=api_key,
    model=model,
    prompt_ids=completion.request.tokens.tolist(),
    ids=completion.tokens.tolist(),
    logprobs=[float(x) for x in completion.logprobs],
    finish_reason=finish_reason,
  )


class _Server(http.server.ThreadingHTTPServer):
  """A thread per connection; a client that disconnects early is logged in one line."""

  daemon_threads = True
  request_queue_size = 1024  # connections that wait to be accepted; beyond the default of 5 they are reset

  def handle_error(self, request: Any, client_address: tuple) -> None:
    if isinstance(sys.exc_info()[1], ConnectionError):
      logging.info('%s:%d was gone before its answer', *client_address[:2])
    else:
      super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
  """One connection, in its own thread."""

  endpoint: Endpoint
  protocol_version = 'HTTP/1.1'

  def do_GET(self) -> None:
    """Answers /v1/models."""
    if self.path.rstrip('/') != '/v1/models':
      self._refuse(404, f'{self.path}: there is nothing')
      return
    models = [dict(id=name, object='model', owned_by='jaxpost') for name in self.endpoint.engines]
    self._send(200, dict(object='list', data=models))

  def do_POST(self) -> None:
    """Answers chats and completions."""
    size = int(self.headers.get('Content-Length') or 0)
    if size > _MAX_BODY:
      self.close_connection = True  # The body stays unread.
      return self._refuse(413, f'{size} bytes are more than {_MAX_BODY}')
    data = self.rfile.read(size)
    if self.path not in (_CHAT, _TEXT):
      return self._refuse(404, f'{self.path}: there is nothing')
    api_key = self.headers.get('Authorization', '').removeprefix('Bearer ')
    try:
      body = json.loads(data)
      if not isinstance(body, dict):
        raise InputError('the body must be a JSON object')
      if error := self.endpoint.model_error(body):
        return self._refuse(404, error)
      response = self.endpoint.answer(self.path, body, api_key)
    except (InputError, ValueError) as error:
      return self._refuse(400, str(error))
    except concurrent.futures.CancelledError:
      return self._refuse(503, 'the server ends')
    if body.get('stream'):
      return self._stream(response)
    self._send(200, response)

  def _stream(self, response: dict) -> None:
    """Sends a response as server-sent events: one event with the whole text, then the end."""
    for choice in response['choices']:
      if 'message' in choice:
        choice['delta'] = choice.pop('message')
    if response['object'] == 'chat.completion':
      response['object'] += '.chunk'
    text = f'data: {json.dumps(response)}\n\ndata: [DONE]\n\n'
    self._write(200, 'text/event-stream', text.encode())

  def _refuse(self, code: int, text: str) -> None:
    self._send(code, {'error': dict(message=text, type='invalid_request_error', code=code)})

  def _send(self, code: int, response: dict) -> None:
    self._write(code, 'application/json', json.dumps(response).encode())

  def _write(self, code: int, kind: str, data: bytes) -> None:
    self.send_response(code)
    self.send_header('Content-Type', kind)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *unused) -> None:
    """Logs no requests."""
