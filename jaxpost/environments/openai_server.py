"""An OpenAI-compatible HTTP server on an engine, for agents and other clients.

It serves /v1/chat/completions, /v1/completions and /v1/models, by default on loopback. Each HTTP request waits in a
queue in its own thread; the requests share the slots of one `engine.serve`, which runs in the thread that drives the
engine. Each response carries token ids and log-probs, so that the text can be trained on without tokenizing it again.
openai_format.py translates the bodies.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hmac
import http.server
import itertools
import json
import logging
import queue
import re
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
_MAX_ANSWERS = 1024  # of one request, to all of its prompts
_PATIENCE_S = 60  # for the next bytes of a client
_LOOPBACK = 'localhost', '127.0.0.1', '::1'
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
    api_key: if not empty, what a client must send as its bearer token.
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
    api_key: str = '',
    other_engines: dict[str, Any] | None = None,
  ) -> None:
    self.engine = engine
    self.name = name
    self.engines = {name: engine} | (other_engines or {})
    self.sessions: dict[str, Session] = {}
    self.hosts = (*_LOOPBACK, host) if host in _LOOPBACK else ()  # names it is called by; (): by any
    self.api_key = api_key
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
    else:
      openai_format.check_supported(body)
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
      self._record(openai_format.record_entry(api_key, name, completion, choice['finish_reason']))
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
    if not 1 <= count <= _MAX_ANSWERS // len(contexts):
      raise InputError(f'n: {count} is not between 1 and {_MAX_ANSWERS // len(contexts)}, for {len(contexts)} prompts')
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
  timeout = _PATIENCE_S

  def do_GET(self) -> None:
    """Answers /v1/models."""
    if not self._is_admitted():
      return
    if self.path.rstrip('/') != '/v1/models':
      self._refuse(404, f'{self.path}: there is nothing')
      return
    models = [dict(id=name, object='model', owned_by='jaxpost') for name in self.endpoint.engines]
    self._send(200, dict(object='list', data=models))

  def do_POST(self) -> None:
    """Answers chats and completions."""
    size = self.headers.get('Content-Length', '')
    if 'Transfer-Encoding' in self.headers or not (size.isascii() and size.isdigit()):
      return self.send_error(411, 'a request needs a Content-Length, in bytes')
    if len(size) > 9 or int(size) > _MAX_BODY:
      return self.send_error(413, f'the body has more than {_MAX_BODY} bytes')
    data = self.rfile.read(
      int(size)
    )  # also of a request that is refused: a client reads no answer before it has sent all
    if not self._is_admitted():
      return
    if self.path not in (_CHAT, _TEXT):
      return self._refuse(404, f'{self.path}: there is nothing')
    api_key = self.headers.get('Authorization', '').removeprefix('Bearer ')
    try:
      body = json.loads(data)
      if not isinstance(body, dict):
        raise InputError('the body must be a JSON object')
      if error := self.endpoint.model_error(body):
        return self._refuse(404, error, 'model_not_found')
      response = self.endpoint.answer(self.path, body, api_key)
    except (InputError, ValueError) as error:
      return self._refuse(400, str(error))
    except RecursionError:
      return self._refuse(400, 'the body is nested too deeply')
    except concurrent.futures.CancelledError:
      return self._refuse(503, 'the server ends')
    if body.get('stream'):
      return self._stream(response)
    self._send(200, response)

  def _is_admitted(self) -> bool:
    """False if the request was refused: its key is wrong, or a page of another site has sent it (DNS rebinding)."""
    endpoint = self.endpoint
    given = self.headers.get('Authorization', '').removeprefix('Bearer ')
    if endpoint.api_key and not hmac.compare_digest(given.encode(), endpoint.api_key.encode()):
      self.send_error(401, 'Authorization: the API key is missing or wrong')
      return False
    host = re.sub(r':\d+$', '', self.headers.get('Host', '')).strip('[]').lower()
    if endpoint.hosts and host not in endpoint.hosts:
      self.send_error(403, f'Host: {host!r} is not a name of this server: {", ".join(endpoint.hosts)}')
      return False
    return True

  def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
    """Refuses a request and ends the connection, as its body may be unread; http.server calls it, too."""
    del explain
    self.close_connection = True
    self._refuse(code, message or http.HTTPStatus(code).phrase)

  def _stream(self, response: dict) -> None:
    """Sends a response as server-sent events: one event with the whole text, then the end."""
    for choice in response['choices']:
      if 'message' in choice:
        choice['delta'] = choice.pop('message')
    if response['object'] == 'chat.completion':
      response['object'] += '.chunk'
    self._send(200, f'data: {json.dumps(response)}\n\ndata: [DONE]\n\n', 'text/event-stream')

  def _refuse(self, status: int, text: str, code: str | None = None) -> None:
    """Sends an error of the API; the text of one about a parameter begins with its name."""
    name = text.partition(':')[0].partition('[')[0]
    param = name if name.isidentifier() and name.islower() else None
    kind = 'server_error' if status >= 500 else 'invalid_request_error'
    self._send(status, {'error': dict(message=text, type=kind, param=param, code=code)})

  def _send(self, status: int, data: dict | str, kind: str = 'application/json') -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    self.send_response(status)
    self.send_header('Content-Type', kind)
    self.send_header('Content-Length', str(len(text.encode())))
    self.end_headers()
    self.wfile.write(text.encode())

  def log_message(self, *unused) -> None:
    """Logs no requests."""
