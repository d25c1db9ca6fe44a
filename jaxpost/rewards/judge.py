"""The reward of an LLM judge behind an OpenAI-compatible URL.

Each completion of a group is one request to URL/chat/completions, with up to `parallel` requests in flight. A request
that fails for a temporary reason (429, 5xx, no connection, a timeout, a reply without a score) is retried with
exponential backoff. A completion that gets no score is None, never 0.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpost.errors import InputError
from jaxpost.rewards.format import content_text, text_of
from jaxpost.workers import call

TEMPLATE = """You grade the answer of an assistant.

The request:
{prompt}

The answer:
{completion}

Is it correct, complete and helpful? Reason briefly, then end with one line
"Score: N", N from {min} (useless) to {max} (perfect)."""
SCORE = r'(?i)score[\s:=*]{1,6}(-?\d+(?:\.\d+)?)'
_FIELD = re.compile(r'\{(\w+)\}')
_RETRIED = (408, 409, 425, 429)  # HTTP status codes, and all 5xx
_MAX_REPLY = 1 << 20  # bytes of a reply that are read
_MAX_PAUSE_S = 30.0


class Judge:
  """The judge's score, scaled to 0..1: (score - min) / (max - min).

  Args:
    url: address of the API, up to and including /v1.
    model: name of the model on the server.
    template: a text file in which {prompt}, {completion}, {min}, {max} and any column name in braces are replaced.
    score: pattern whose last match in the reply gives the score, in its first group.
    min: lowest valid score; a score outside of min..max does not count.
    max: highest valid score.
    api_key_env: environment variable that holds the API key.
    timeout: seconds for a request.
    retries: further attempts after a request that failed.
    parallel: requests in flight, for each worker.
    temperature: sampling temperature of the judge.
    max_tokens: length limit of the judge's reply.
    pause: seconds before the first retry; doubled for each further one.
  """

  def __init__(
    self,
    url: str,
    model: str,
    template: str = '',
    score: str = SCORE,
    min: float = 0.0,
    max: float = 10.0,
    api_key_env: str = '',
    timeout: float = 20.0,
    retries: int = 3,
    parallel: int = 8,
    temperature: float = 0.0,
    max_tokens: int = 512,
    pause: float = 0.5,
  ) -> None:
    if not re.fullmatch(r'https?://[^\s/@?#]+(/[^\s@?#]*)?', url):
      raise InputError(
        f'option url={url!r} is no address as http://HOST:PORT/v1 (and holds'
        ' no key: name its variable with api_key_env)'
      )
    valid = min < max and timeout > 0 and retries >= 0 and parallel >= 1 and pause >= 0 and max_tokens >= 1
    if not valid:
      raise InputError('options: want min < max, timeout > 0, retries >= 0, parallel >= 1, pause >= 0, max_tokens >= 1')
    self._score = _pattern(score)
    if api_key_env and not os.environ.get(api_key_env):
      raise InputError(f'option api_key_env={api_key_env}: it is not set')
    self._template = read_template(template, 'completion') if template else TEMPLATE
    self.needs_columns = self.columns_of('prompt', 'completion', 'min', 'max')
    self._url, self._key = f'{url.rstrip("/")}/chat/completions', api_key_env
    self._body = {'model': model, 'temperature': temperature, 'max_tokens': max_tokens}
    self._min, self._max = min, max
    self._timeout, self._retries = timeout, retries
    self._parallel, self._pause = parallel, pause

  def __call__(
    self,
    prompts: list,
    completions: list,
    time_limit_s: float | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns,
  ) -> list[float | None]:
    """Returns one reward per completion; RewardError if the server answered none of the requests."""
    # Requests without an answer shortly before the pool would kill the worker give None; the others still count.
    limit_s = 0.9 * time_limit_s if time_limit_s else None
    deadline = time.monotonic() + (limit_s or float('inf'))
    threads = concurrent.futures.ThreadPoolExecutor(self._parallel)
    futures = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
      row = {name: columns[name][i] for name in self.needs_columns}
      values = {'prompt': prompt_text(prompt), 'completion': text_of(completion), **row}
      text = self.fill({'min': f'{self._min:g}', 'max': f'{self._max:g}', **values})
      futures.append(threads.submit(self.ask, text, deadline, self._read_score))
    concurrent.futures.wait(futures, limit_s)
    threads.shutdown(wait=False, cancel_futures=True)
    verdicts = [f.result() if f.done() and not f.cancelled() else Verdict(error='no answer in time') for f in futures]
    errors = [v.error for v in verdicts if v.error]
    if verdicts and len(errors) == len(verdicts):
      raise call.RewardError(f'no request was answered: {errors[-1]}')
    scores = [v.score for v in verdicts]
    if log_metric and scores:
      log_metric('judge_without_score', scores.count(None) / len(scores))
    return scores

  def columns_of(self, *fields: str) -> tuple[str, ...]:
    """Returns the names of the columns that the template shows, besides these fields of the judge."""
    return tuple(sorted(set(_FIELD.findall(self._template)) - {*fields}))

  def fill(self, values: dict) -> str:
    """Returns the text of a request; braces in the inserted values are left as they are."""
    return _FIELD.sub(lambda match: str(values[match[1]]), self._template)

  def ask(self, text: str, deadline: float, read: Callable[[str], Any]) -> Verdict:
    """Sends a request until `read` finds a score in the reply, within the retries and the deadline."""
    error = None
    for attempt in range(1 + self._retries):
      remaining = deadline - time.monotonic()
      if remaining <= 0:
        break
      wait = self._pause * 2**attempt * random.uniform(0.5, 1.5)
      try:
        reply = self._post(text, min(self._timeout, remaining))
        error = None
        score = read(reply)
        if score is not None:
          return Verdict(score)
      except urllib.error.HTTPError as failure:
        error = f'HTTP {failure.code} {_detail(failure)}'
        if failure.code not in _RETRIED and failure.code < 500:
          return Verdict(error=error)
        wait = max(wait, _seconds(failure.headers.get('Retry-After')))
      except (OSError, http.client.HTTPException) as failure:
        error = f'{type(failure).__name__}: {failure}'
      except _NoReply:
        error = None  # The server answered, without a score.
      if attempt < self._retries:
        time.sleep(max(0.0, min(wait, _MAX_PAUSE_S, deadline - time.monotonic())))
    return Verdict(error=error)

  def _post(self, text: str, timeout: float) -> str:
    """Sends one request; returns the text of the reply. Raises OSError, HTTPException or _NoReply."""
    headers = {'Content-Type': 'application/json'}
    if self._key:
      headers['Authorization'] = f'Bearer {os.environ[self._key]}'
    body = self._body | {'messages': [{'role': 'user', 'content': text}]}
    request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method='POST')
    with _OPENER.open(request, timeout=timeout) as response:
      data = response.read(_MAX_REPLY)
    try:
      content = json.loads(data)['choices'][0]['message']['content']
    except (ValueError, LookupError, TypeError, RecursionError) as error:
      raise _NoReply from error
    if not isinstance(content, str):
      raise _NoReply
    return content

  def _read_score(self, reply: str) -> float | None:
    """Returns the scaled score in a reply, or None if there is no valid one."""
    matches = list(self._score.finditer(reply))
    try:
      score = float(matches[-1][1]) if matches else float('nan')
    except (TypeError, ValueError):  # The user's pattern may match text that is no number.
      return None
    if not self._min <= score <= self._max:
      return None
    return (score - self._min) / (self._max - self._min)


class Verdict(NamedTuple):
  """The outcome of one request: the scores in the reply, or None and, if it was not answered, the reason."""

  score: Any = None
  error: str | None = None


class _NoReply(Exception):
  """The response is not a reply of the chat completions API."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
  """Refuses redirects, so that the API key is never sent to another host."""

  def redirect_request(self, *unused):
    return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _pattern(text: str) -> re.Pattern:
  """Compiles the option `score`."""
  try:
    pattern = re.compile(text)
  except re.error as error:
    raise InputError(f'option score={text!r}: {error}') from error
  if not pattern.groups:
    raise InputError(f'option score={text!r} has no group (...) for the number')
  return pattern


def prompt_text(prompt: str | list[dict]) -> str:
  """Returns a prompt as one text, with the roles of its messages."""
  return prompt if isinstance(prompt, str) else '\n'.join(f'{m["role"]}: {content_text(m["content"])}' for m in prompt)


def read_template(file: str, needed: str) -> str:
  """Reads the option `template`; InputError unless it has the field {`needed`}."""
  try:
    with open(file, encoding='utf-8') as opened:
      text = opened.read()
  except (OSError, ValueError) as error:
    raise InputError(f'option template={file!r}: {error}') from error
  if f'{{{needed}}}' not in text:
    raise InputError(f'option template={file!r}: has no {{{needed}}}')
  return text


def _seconds(header: str | None) -> float:
  """Returns the seconds of a Retry-After header, 0 for a missing one or a date."""
  return float(header) if header and header.strip().isdecimal() else 0.0


def _detail(failure: urllib.error.HTTPError) -> str:
  """Returns the beginning of the body of an error response."""
  try:
    text = failure.read(300).decode(errors='replace')
  except (OSError, http.client.HTTPException):
    return ''
  return ' '.join(text.split())
