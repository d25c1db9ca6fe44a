"""An OpenAI-compatible server on an engine, so that anybody's agent can ask it.

/v1/chat/completions, /v1/completions and /v1/models on loopback. Requests wait
in a queue and share the slots of one `engine.serve`, which whoever drives the
engine runs. Each answer carries the token ids and their log-probs, and all are
recorded: what an agent was told can be trained on without encoding it again.
"""

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

import numpy as np

from jaxpost.data import chat
from jaxpost.data import messages as messages_lib
from jaxpost.environments import turns
from jaxpost.environments.fair_lock import FairLock as Line
from jaxpost.errors import InputError
from jaxpost.types import Completion, Request

_MOST = 1 << 24  # bytes of a request
_TICK_S = 0.2  # between two looks whether to stop
_FIELDS = ('temperature', 'top_p', 'top_k', 'min_p', 'min_tokens', 'seed')


class Endpoint:
  """The server; requests are served while `serve` runs.

  Args:
    tokenizer: a `Tokenizer`; chats need its template.
    name: of the model, in answers.
    record: called with a dict for each completion: prompt_ids, ids, logprobs,
      finish_reason, model, session (the API key that the client gave).
    more: {name: engine} of others, such as adapters. With any, a body has to
      name whom it asks; else whatever it says is `name`.
  """

  def __init__(self, engine, tokenizer, *, host='127.0.0.1', port=0, name='policy', record=None, more=None):
    self.engine, self.tokenizer, self.name = engine, tokenizer, name
    self.engines = {name: engine} | (more or {})
    self.record = record or (lambda entry: None)
    self._queues = {name: queue.SimpleQueue() for name in self.engines}
    self._turns, self._numbers = Line(), itertools.count()
    self._stop, self._open = threading.Event(), set()
    self._ended, self._tick_s = self._stop.is_set, _TICK_S
    self.sessions = {}  # API key -> `agents.Session`, of a run
    handler = type('Handler', (_Handler,), {'endpoint': self})
    try:
      self._http = _Server((host, port), handler)
    except OSError as error:
      raise InputError(f'{host}:{port}: {error.strerror}; name another --port') from error
    self.url = f'http://{host}:{self._http.server_address[1]}/v1'
    threading.Thread(target=self._http.serve_forever, daemon=True).start()

  def serve(self, run_key, step: int = 0) -> dict:
    """Answers until `stop` is called, from any thread; figures of each.

    Engines take turns, a block at a time: programs of several devices that
    two threads start would wait for each other.
    """
    try:
      with concurrent.futures.ThreadPoolExecutor(len(self.engines)) as pool:
        jobs = {name: pool.submit(self._drive, name, run_key, step) for name in self.engines}
        try:
          for job in concurrent.futures.as_completed(jobs.values()):
            job.result()
        finally:
          self._stop.set()  # where one has failed, too
      return {name: job.result() for name, job in jobs.items()}
    finally:
      self.close()

  def round(self, run_key, step: int, ended: Callable[[], bool], on_dispatch: Callable | None = None) -> dict:
    """Answers until `ended()`, which is asked between blocks; figures.

    Who asks between two rounds waits: the weights may be others by then.
    """
    self._ended, self._tick_s = ended, _TICK_S / 20
    try:
      return self._drive(self.name, run_key, step, on_dispatch)
    finally:
      self._ended = self._stop.is_set

  def _drive(self, name: str, run_key, step: int, on_dispatch: Callable | None = None) -> dict:
    with self._turns:
      return self.engines[name].serve(
        [],
        run_key=run_key,
        step=step,
        follow=functools.partial(self._follow, self._queues[name]),
        on_dispatch=on_dispatch,
      )

  def stop(self):
    """Ends `serve` once nothing is being sampled."""
    self._stop.set()

  def close(self):
    self._stop.set()
    self._http.shutdown()
    self._http.server_close()
    self.drop()

  def drop(self):
    """Refuses what was asked and not answered."""
    for future in list(self._open):  # queued, or in a slot that is gone
      future.cancel()

  def lacks(self, body: dict) -> str:
    """What is wrong with the model that a body names, if anything."""
    name = body.get('model')
    if len(self.engines) == 1 or isinstance(name, str) and (name in self.engines):
      return ''
    return f'model: there is no {name!r}; there is {", ".join(self.engines)}'

  def _named(self, body: dict) -> str:
    return body['model'] if len(self.engines) > 1 else self.name

  def ask(self, requests: list[Request], name='') -> list[Completion]:
    """From any thread: waits for the completions of a body."""
    name = name or self.name
    for request in requests:
      self.engines[name].check(request)  # here, where it can be told
    futures = [concurrent.futures.Future() for _ in requests]
    self._open |= set(futures)
    try:
      for pair in zip(requests, futures):
        self._queues[name].put(pair)
      if self._stop.is_set():  # nobody may be there to answer
        raise concurrent.futures.CancelledError
      return [future.result() for future in futures]
    finally:
      self._open -= set(futures)

  def _follow(self, waiting, done, idle) -> list[Request]:
    for completion in done:
      completion.request.tag.set_result(completion)
    if self._ended():
      return []
    self._turns.release()
    try:
      return self._next(waiting, idle)
    finally:
      self._turns.acquire()

  def _next(self, waiting, idle) -> list[Request]:
    """What was asked; where nothing else is to be done, once there is any."""
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

  def answer(self, path: str, body: dict, session: str) -> dict:
    """What is sent back for a body; InputError for what it cannot be."""
    is_chat, name = path == '/v1/chat/completions', self._named(body)
    contexts = [self._chat(body)] if is_chat else self._texts(body)
    count, number = _field(body, 'n', int, 1), next(self._numbers)
    if count < 1:
      raise InputError(f'n: {count} is less than 1')
    requests = [
      Request(ids, number, i * count + n, self._sampling(body, len(ids)))
      for i, ids in enumerate(contexts)
      for n in range(count)
    ]
    held = self.sessions.get(session)
    if held:
      requests = [self._held(held, body, requests)]
      contexts = [requests[0].tokens]
    try:
      done = self.ask(requests, name)
    except BaseException:
      if held:
        held.busy.release()
      raise
    choices = [(self._message if is_chat else self._text)(i, c, body) for i, c in enumerate(done)]
    if held:
      held.heard(body, done[0], choices[0].get('message') or {'role': 'assistant', 'content': choices[0]['text']})
    for choice, c in zip(choices, done):
      self.record(
        dict(
          session=session,
          model=name,
          prompt_ids=c.request.tokens.tolist(),
          ids=c.tokens.tolist(),
          logprobs=[float(x) for x in c.logprobs],
          finish_reason=choice['finish_reason'],
        )
      )
    read, drawn = sum(map(len, contexts)), sum(len(c.tokens) for c in done)
    return dict(
      id=f'cmpl-{number}',
      created=int(time.time()),
      model=name,
      object='chat.completion' if is_chat else 'text_completion',
      choices=choices,
      prompt_token_ids=contexts[0].tolist(),
      usage=dict(prompt_tokens=read, completion_tokens=drawn, total_tokens=read + drawn),
    )

  def _held(self, held, body, requests: list[Request]) -> Request:
    """The one request of an agent of a run, which decides how it is sampled."""
    if len(requests) != 1:
      raise InputError('n, prompt: an episode of a run asks for one answer')
    sampling = requests[0].sampling
    made = held.request(body, lambda: requests[0].tokens, sampling['max_tokens'])
    made.sampling['stop_strings'] = sampling['stop_strings']
    return made

  def _chat(self, body) -> np.ndarray:
    row = {'prompt': body.get('messages'), 'tools': body.get('tools')}
    return chat.encode_prompt(self.tokenizer, messages_lib.check_messages(row['prompt'], 'messages'), row, 'messages')

  def _texts(self, body) -> list[np.ndarray]:
    """A text, token ids, or a list of either."""
    prompt, encode = body.get('prompt'), self.tokenizer.encode
    if isinstance(prompt, str) or prompt and isinstance(prompt, list) and (isinstance(prompt[0], int)):
      prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
      raise InputError('prompt: must be a text, token ids, or a list of either')
    return [
      np.asarray(
        encode(messages_lib.check_text(p, 'prompt')) if isinstance(p, str) else _ids(p, self.tokenizer.vocab_size),
        np.int32,
      )
      for p in prompt
    ]

  def _sampling(self, body, length: int) -> dict:
    given = {k: _field(body, k, int if k in ('top_k', 'min_tokens', 'seed') else float, None) for k in _FIELDS}
    most = _field(
      body, 'max_completion_tokens', int, _field(body, 'max_tokens', int, max(1, self.engine.config.room - length))
    )
    stop = body.get('stop') or ()
    if not isinstance(stop, (str, list, tuple)):
      raise InputError(f'stop: {stop!r} is no text or list of texts')
    given |= {
      'max_tokens': most,
      'top_logprobs': self._most(body),
      'stop_strings': (stop,) if isinstance(stop, str) else tuple(stop),
    }
    return {k: v for k, v in given.items() if v is not None}

  def _most(self, body) -> int:
    """How many of the likeliest are asked for: chats say it beside `logprobs`,
    other completions by it."""
    if 'messages' in body:
      return _field(body, 'top_logprobs', int, 0) if body.get('logprobs') else 0
    value = body.get('logprobs')
    return int(value) if isinstance(value, bool) else _field(body, 'logprobs', int, 0)

  def _likeliest(self, c: Completion, at: int) -> list[tuple[str, float]]:
    """(token, log-prob) of those that were asked for."""
    if c.top_ids is None:
      return []
    return [(self._piece(i), float(x)) for i, x in zip(c.top_ids[at], c.top_logprobs[at])]

  def _decoded(self, c: Completion) -> str:
    """The text, without the stop string or token that ended it."""
    text = self.tokenizer.decode(c.tokens)
    return text[: text.index(c.stop_string)] if c.stop_string and (c.stop_string in text) else text

  def _message(self, index: int, c: Completion, body) -> dict:
    message = {'role': 'assistant', 'content': self._decoded(c)}
    calls = turns.parse(message['content']) if body.get('tools') else None
    reason = 'stop' if c.finished else 'length'
    if calls:
      reason, message['content'] = 'tool_calls', None
      message['tool_calls'] = [
        dict(id=f'call_{i}', type='function', function=dict(name=call['name'], arguments=json.dumps(call['arguments'])))
        for i, call in enumerate(calls)
      ]
    entry = lambda token, x: dict(token=token, logprob=float(x), bytes=None)
    logprobs = (
      {
        'content': [
          entry(self._piece(i), x) | {'top_logprobs': [entry(*pair) for pair in self._likeliest(c, at)]}
          for at, (i, x) in enumerate(zip(c.tokens, c.logprobs))
        ]
      }
      if body.get('logprobs')
      else None
    )
    return dict(index=index, message=message, finish_reason=reason, logprobs=logprobs, token_ids=c.tokens.tolist())

  def _text(self, index: int, c: Completion, body) -> dict:
    logprobs = None
    if body.get('logprobs') is not None:
      pieces = [self._piece(i) for i in c.tokens]
      ends = list(itertools.accumulate(map(len, pieces), initial=0))
      logprobs = dict(
        tokens=pieces,
        text_offset=ends[:-1],
        token_logprobs=[float(x) for x in c.logprobs],
        top_logprobs=[dict(self._likeliest(c, at)) for at in range(len(pieces))] if self._most(body) else None,
      )
    return dict(
      index=index,
      text=self._decoded(c),
      logprobs=logprobs,
      finish_reason='stop' if c.finished else 'length',
      token_ids=c.tokens.tolist(),
    )

  def _piece(self, token) -> str:
    return self.tokenizer.decode([token], skip_special=False)


def _field(body: dict, name: str, kind, default):
  """A number of a body; null is the default."""
  value = body.get(name)
  if value is None:
    return default
  if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind is int and not (value == value // 1)):
    raise InputError(f'{name}: {value!r} is no {kind.__name__}')
  return kind(value)


def _ids(ids, vocab_size: int) -> list[int]:
  if not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
    raise InputError(f'prompt: token ids are ints below {vocab_size}')
  return ids


class _Server(http.server.ThreadingHTTPServer):
  """Clients may be gone before they are answered."""

  daemon_threads = True

  def handle_error(self, request, client_address):
    if isinstance(sys.exc_info()[1], ConnectionError):
      logging.info('%s:%d was gone before its answer', *client_address[:2])
    else:
      super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
  """One connection, in a thread of its own."""

  endpoint: Endpoint
  protocol_version = 'HTTP/1.1'

  def do_GET(self):
    if self.path.rstrip('/') == '/v1/models':
      self._send(
        200,
        dict(object='list', data=[dict(id=name, object='model', owned_by='jaxpost') for name in self.endpoint.engines]),
      )
    else:
      self._refuse(404, f'{self.path}: there is nothing')

  def do_POST(self):
    size = int(self.headers.get('Content-Length') or 0)
    if size > _MOST:
      self.close_connection = True
      return self._refuse(413, f'{size} bytes are more than {_MOST}')
    data = self.rfile.read(size)
    if self.path not in ('/v1/chat/completions', '/v1/completions'):
      return self._refuse(404, f'{self.path}: there is nothing')
    session = self.headers.get('Authorization', '').removeprefix('Bearer ')
    try:
      body = json.loads(data)
      if not isinstance(body, dict):
        raise InputError('the body must be a JSON object')
      if self.endpoint.lacks(body):
        return self._refuse(404, self.endpoint.lacks(body))
      found = self.endpoint.answer(self.path, body, session)
    except (InputError, ValueError) as error:
      return self._refuse(400, str(error))
    except concurrent.futures.CancelledError:
      return self._refuse(503, 'the server ends')
    if body.get('stream'):
      return self._stream(found)
    self._send(200, found)

  def _stream(self, found: dict):
    """Server-sent events: everything in one."""
    for choice in found['choices']:
      if 'message' in choice:
        choice['delta'] = choice.pop('message')
    if found['object'] == 'chat.completion':
      found['object'] += '.chunk'
    text = f'data: {json.dumps(found)}\n\ndata: [DONE]\n\n'
    self._write(200, 'text/event-stream', text.encode())

  def _refuse(self, code: int, text: str):
    self._send(code, {'error': dict(message=text, type='invalid_request_error', code=code)})

  def _send(self, code: int, found: dict):
    self._write(code, 'application/json', json.dumps(found).encode())

  def _write(self, code: int, kind: str, data: bytes):
    self.send_response(code)
    self.send_header('Content-Type', kind)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *args):
    del args
