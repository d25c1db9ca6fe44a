"""The viewer of a run's episodes: a local server, or one HTML file.

Both show the page view.html. The server answers /api/overview, /api/episodes, /api/episode, /api/group and /api/history
in JSON; in a file, the page contains these answers. Tokens are colored by the saved rollouts of the run
(`log.rollouts_every`); the page names the config fields that save missing values.

Legend: C tokens of a completion.
"""

import dataclasses
import functools
import http.server
import json
import math
import pathlib
import urllib.parse
from typing import Any

import numpy as np
from etils import epath

from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.data.tokenizer import Tokenizer
from jaxpost.errors import InputError
from jaxpost.monitor.metrics import plain
from jaxpost.rollout import rollout_files
from jaxpost.stage import algorithms, checks
from jaxpost.stage import config as config_lib
from jaxpost.storage import object_store
from jaxpost.tools.rollout_index import PAGE, Index, Query

_PAGE_FILE = pathlib.Path(__file__).with_name('view.html')
_MAX_PAGE = 500
# Colors of tokens that not every run can show -> the config fields that save their values.
_SCORED = 'rl.importance=token_truncated, or several updates of a rollout (rl.minibatches, rl.epochs)'
SAVED_BY = {'ratio': _SCORED, 'entropy': _SCORED, 'kl': 'rl.kl_coef above 0'}
_LOCAL = ('localhost', '127.0.0.1', '[::1]')


class Viewer:
  """Answers the requests of the page (`answer`)."""

  def __init__(self, run: epath.PathLike):
    self.index = Index(run)
    if not self.index.episodes:
      self._check_samples()
    self._rollout = functools.lru_cache(maxsize=4)(rollout_files.load)
    self._tokenizer = functools.cache(self._load_tokenizer)

  def _check_samples(self) -> None:
    """Raises InputError for a run that will never have an episode."""
    saved = self.index.run / 'config.json'
    stages = config_lib.parse_saved(saved).values() if saved.exists() and saved.stat().length else ()
    methods = [c.algorithm for c in stages if not checks.samples(c, algorithms.load_algorithm(c.algorithm))]
    if methods and len(methods) == len(stages):
      raise InputError(
        f'--run: {self.index.run}: {" and ".join(dict.fromkeys(methods))} samples nothing, so there are no episodes to '
        'show; launch.report shows its figures, and evaluation samples with eval.samples'
      )

  def answer(self, path: str, asked: dict[str, str]) -> Any:
    """Returns the JSON value of a request.

    Args:
      path: such as '/api/episodes'.
      asked: its query string.

    Raises:
      InputError: there is no such request, or no such episode.
    """
    index = self.index
    if path == '/api/overview':
      index.refresh()
      return index.overview()
    if path == '/api/episodes':
      numbers = index.find(_query(asked))
      size = min(_MAX_PAGE, max(1, _integer(asked, 'size', PAGE)))
      first = max(0, _integer(asked, 'page', 0)) * size
      return dict(total=len(numbers), episodes=[index.episodes[n] for n in numbers[first : first + size]])
    number = _integer(asked, 'id', -1)
    if path == '/api/episode':
      return self.episode(number)
    index.full(number)  # raises for an unknown episode
    if path == '/api/group':
      return [index.full(n) for n in index.group(number)]
    if path == '/api/history':
      return [index.episodes[n] for n in index.history(number)]
    raise InputError(f'{path}: there is no such request')

  def episode(self, number: int) -> dict[str, Any]:
    """Returns an episode with `tokens`, {'text', 'logprob', 'advantage', ...} of [C] each, or None.

    `missing` is {color that cannot be shown: the config fields that save its values}; without tokens, what saves them.
    """
    row = self.index.full(number)
    short = row['short']
    path = self.index.run / 'rollouts' / short['stage'] / f'{short["step"]}.npz'
    if short['split'] != 'train':
      return row | {'tokens': None, 'missing': {}}
    tokens = self._tokens(path, short) if path.exists() else None
    if tokens is None:
      return row | {'tokens': None, 'missing': {'tokens': 'log.rollouts_every=1'}}
    return row | {'tokens': tokens, 'missing': {name: by for name, by in SAVED_BY.items() if name not in tokens}}

  def _tokens(self, path: epath.Path, short: dict) -> dict[str, list] | None:
    rollout, arrays = self._rollout(path)
    size = rollout.group_size
    positions = [i for i, prompt in enumerate(rollout.prompts) if prompt.index == short['index']]
    if not positions or short['sample'] >= size:
      return None
    row = positions[0] * size + short['sample']
    length = int(rollout.lengths[row])
    ids = rollout.completions[row, :length].tolist()
    tokenizer = self._tokenizer(short['stage'])
    out: dict[str, Any] = {'text': [tokenizer.decode([i], skip_special=False) for i in ids]}
    out['logprob'] = rollout.logprobs[row, :length]
    for name, array in arrays.items():
      kind, _, quantity = name.partition('/')
      is_per_token = kind in ('credit', 'score') and array.shape == rollout.completions.shape
      if is_per_token and quantity != 'sampler_logprobs':
        out[quantity.removesuffix('s')] = array[row, :length]
    if 'old_logprob' in out:
      out['ratio'] = np.exp(out['old_logprob'] - out['logprob'])
    if 'ref_logprob' in out:  # the k3 estimate, which is >= 0; with one update per rollout, the sampler is the policy
      log_ratio = out['ref_logprob'] - out.get('old_logprob', out['logprob'])
      out['kl'] = np.expm1(log_ratio) - log_ratio
    out['trained'] = arrays['trained'][row, :length]
    return plain(out)

  def _load_tokenizer(self, stage: str) -> Tokenizer:
    """Returns the tokenizer of a stage of the run."""
    from jaxpost.stage import weight_sources

    section = config_lib.parse_saved(self.index.run / 'config.json')[stage].model
    return tokenizer_lib.load(weight_sources.saved_tokenizer_path(self.index.run, section))


def _query(asked: dict[str, str]) -> Query:
  fields = {f.name for f in dataclasses.fields(Query)}
  values: dict[str, Any] = {k: v for k, v in asked.items() if k in fields and v != ''}
  for name, convert in (('step', int), ('lowest', float), ('highest', float)):
    if name in values:
      values[name] = _number(name, values[name], convert)
  return Query(**values)


def _integer(asked: dict[str, str], name: str, default: int) -> int:
  return _number(name, asked.get(name, default), int)


def _number(name: str, text: Any, kind: type) -> Any:
  try:
    value = kind(text)
  except ValueError:
    raise InputError(f'{name}: {text!r} is no number') from None
  if isinstance(value, float) and not math.isfinite(value):
    raise InputError(f'{name}: {text!r} is not finite')
  return value


def page(data: Any = None) -> str:
  """Returns the page; with `data`, {request: answer}, it asks no server."""
  # `<` could end the script that contains the data; U+2028 is a line end in old scripts.
  text = json.dumps(data, ensure_ascii=False).replace('<', '\\u003c').replace('\u2028', '\\u2028')
  return _PAGE_FILE.read_text('utf-8').replace('/*DATA*/ null', text, 1)


def write_file(run: epath.PathLike, out: epath.PathLike, most: int) -> int:
  """Writes one HTML file with the first `most` episodes, failed and truncated ones first; returns their number."""
  viewer = Viewer(run)
  chosen = viewer.index.find(Query())[:most]
  data = dict(overview=viewer.index.overview(), episodes=[viewer.episode(n) for n in chosen])
  object_store.write(epath.Path(out), page(data).encode('utf-8', 'replace'))
  return len(chosen)


def make_server(run: epath.PathLike, port: int) -> http.server.ThreadingHTTPServer:
  """Returns a local server of the page, to be run by `serve_forever`; InputError if the port is in use."""
  viewer = Viewer(run)

  class Handler(http.server.BaseHTTPRequestHandler):
    timeout = 30

    def do_GET(self) -> None:
      # Refuses pages of other sites whose name was rebound to this address.
      host = self.headers.get('Host', '').rpartition(':')[0] or self.headers.get('Host', '')
      if host not in _LOCAL:
        return self._send(403, 'text/plain', b'open this page as localhost')
      url = urllib.parse.urlsplit(self.path)
      if url.path == '/':
        return self._send(200, 'text/html; charset=utf-8', page().encode())
      try:
        answer = viewer.answer(url.path, dict(urllib.parse.parse_qsl(url.query)))
      except InputError as error:
        return self._send(404, 'application/json', json.dumps({'error': str(error)}).encode())
      self._send(200, 'application/json', json.dumps(plain(answer)).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
      self.send_response(status)
      headers = {'Content-Type': kind, 'Content-Length': str(len(body)), 'X-Content-Type-Options': 'nosniff'}
      for name, value in headers.items():
        self.send_header(name, value)
      self.end_headers()
      self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
      """Requests are not logged."""

  try:
    return http.server.ThreadingHTTPServer(('127.0.0.1', port), Handler)
  except OSError as error:
    raise InputError(f'--port={port}: {error.strerror}; choose another, or 0 for any') from None
