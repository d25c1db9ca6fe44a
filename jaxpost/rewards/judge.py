"""The reward of a judge: a model behind an OpenAI-compatible URL.

Every completion of a group is one request to URL/chat/completions; `parallel`
of them are under way at a time. A request that fails for a reason that passes
(429, 5xx, no connection, no answer in time, an answer without a score) is made
again after a pause that doubles; what still has no score is None, never 0.
"""

import concurrent.futures
import http.client
import json
import os
import random
import re
import time
import urllib.error
import urllib.request

from jaxpost.errors import InputError
from jaxpost.rewards.format import text_of
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
_AGAIN = (408, 409, 425, 429)  # and 5xx
_MOST = 1 << 20  # bytes of a reply
_LONGEST = 30.0  # seconds of a pause


class Judge:
  """(score - min) / (max - min) of the judge's score, from 0 to 1.

  Args:
    url: up to and with /v1.
    model: the name the server knows it by.
    template: a text file, where {prompt}, {completion}, {min}, {max} and the
      name of any column in braces are filled in.
    score: pattern for the judge's reply; its last match counts, and there the
      first group. A score outside of min and max is none.
    api_key_env: the environment variable that holds the key.
    timeout: seconds for a request.
    retries: further requests after one that failed.
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
  ):
    if not re.fullmatch(r'https?://[^\s/@?#]+(/[^\s@?#]*)?', url):
      raise InputError(
        f'option url={url!r} is no address as http://HOST:PORT/v1 (and holds'
        ' no key: name its variable with api_key_env)'
      )
    if not min < max or timeout <= 0 or retries < 0 or parallel < 1 or (pause < 0 or max_tokens < 1):
      raise InputError('options: want min < max, timeout > 0, retries >= 0, parallel >= 1, pause >= 0, max_tokens >= 1')
    self._score = _pattern(score)
    if api_key_env and not os.environ.get(api_key_env):
      raise InputError(f'option api_key_env={api_key_env}: it is not set')
    self._template = _read(template) if template else TEMPLATE
    self.needs_columns = tuple(sorted(set(_FIELD.findall(self._template)) - {'prompt', 'completion', 'min', 'max'}))
    self._url, self._key = f'{url.rstrip("/")}/chat/completions', api_key_env
    self._body = {'model': model, 'temperature': temperature, 'max_tokens': max_tokens}
    self._min, self._max = min, max
    self._timeout, self._retries = timeout, retries
    self._parallel, self._pause = parallel, pause

  def __call__(self, prompts, completions, time_limit_s=None, log_metric=None, **columns):
    # What is not back shortly before the worker would be killed is None.
    limit = 0.9 * time_limit_s if time_limit_s else float('inf')
    deadline = time.monotonic() + limit
    threads = concurrent.futures.ThreadPoolExecutor(self._parallel)
    asked = [
      threads.submit(self._ask, text, deadline)
      for text in (
        self._fill(prompt, completion, {name: columns[name][i] for name in self.needs_columns})
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
      )
    ]
    left = None if limit == float('inf') else limit
    concurrent.futures.wait(asked, left)
    threads.shutdown(wait=False, cancel_futures=True)
    answers = [a.result() if a.done() and not a.cancelled() else (None, 'no answer in time') for a in asked]
    failed = [error for score, error in answers if error]
    if answers and len(failed) == len(answers):
      raise call.RewardError(f'no request was answered: {failed[-1]}')
    scores = [score for score, _ in answers]
    if log_metric and scores:
      log_metric('judge_without_score', scores.count(None) / len(scores))
    return scores

  def _fill(self, prompt, completion, columns):
    """The request's text; braces in what is filled in stay as they are."""
    values = {
      'prompt': prompt if isinstance(prompt, str) else '\n'.join(f'{m["role"]}: {text_of([m])}' for m in prompt),
      'completion': text_of(completion),
      'min': f'{self._min:g}',
      'max': f'{self._max:g}',
      **columns,
    }
    return _FIELD.sub(lambda match: str(values[match[1]]), self._template)

  def _ask(self, text, deadline):
    """(reward or None, why no request was answered or None)."""
    error = None
    for attempt in range(1 + self._retries):
      left = deadline - time.monotonic()
      if left <= 0:
        break
      wait = self._pause * 2**attempt * random.uniform(0.5, 1.5)
      try:
        reply = self._post(text, min(self._timeout, left))
        error, score = None, self._read_score(reply)
        if score is not None:
          return score, None
      except urllib.error.HTTPError as failure:
        error = f'HTTP {failure.code} {_detail(failure)}'
        if failure.code not in _AGAIN and failure.code < 500:
          return None, error
        wait = max(wait, _seconds(failure.headers.get('Retry-After')))
      except (OSError, http.client.HTTPException) as failure:
        error = f'{type(failure).__name__}: {failure}'
      except _NoReply:
        error = None  # it answered, without a score
      if attempt < self._retries:
        time.sleep(max(0.0, min(wait, _LONGEST, deadline - time.monotonic())))
    return None, error

  def _post(self, text, timeout):
    """What the judge said."""
    headers = {'Content-Type': 'application/json'}
    if self._key:
      headers['Authorization'] = f'Bearer {os.environ[self._key]}'
    body = self._body | {'messages': [{'role': 'user', 'content': text}]}
    request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method='POST')
    with _OPENER.open(request, timeout=timeout) as response:
      data = response.read(_MOST)
    try:
      said = json.loads(data)['choices'][0]['message']['content']
    except (ValueError, LookupError, TypeError, RecursionError) as error:
      raise _NoReply from error
    if not isinstance(said, str):
      raise _NoReply
    return said

  def _read_score(self, reply):
    found = list(self._score.finditer(reply))
    try:
      score = float(found[-1][1]) if found else float('nan')
    except (TypeError, ValueError):  # the user's pattern takes anything
      return None
    if not self._min <= score <= self._max:
      return None
    return (score - self._min) / (self._max - self._min)


class _NoReply(Exception):
  """A reply that is none of the chat completions API."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
  """The key must not follow to another host."""

  def redirect_request(self, *unused):
    return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _pattern(text):
  try:
    pattern = re.compile(text)
  except re.error as error:
    raise InputError(f'option score={text!r}: {error}') from error
  if not pattern.groups:
    raise InputError(f'option score={text!r} has no group (...) for the number')
  return pattern


def _read(file):
  try:
    with open(file, encoding='utf-8') as opened:
      text = opened.read()
  except (OSError, ValueError) as error:
    raise InputError(f'option template={file!r}: {error}') from error
  if '{completion}' not in text:
    raise InputError(f'option template={file!r}: has no {{completion}}')
  return text


def _seconds(header):
  return float(header) if header and header.strip().isdecimal() else 0.0


def _detail(failure):
  try:
    text = failure.read(300).decode(errors='replace')
  except (OSError, http.client.HTTPException):
    return ''
  return ' '.join(text.split())
