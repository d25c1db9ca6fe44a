"""Environments in processes of their own, one each, that can be killed.

Of TRL's protocol (`environment_factory`): a class made without arguments, with
reset(**row), which returns the first observation or None, public methods that
are tools, and get_reward(). A tool that raises answers with its error; one
that hangs or dies takes its process along, and its episode is lost.
"""

import atexit
import concurrent.futures
import dataclasses
import json
import logging

from jaxpost.errors import InputError
from jaxpost.workers import process

_LOG = logging.getLogger(__name__)
_SHOWN = 2000  # characters of what an environment printed


@dataclasses.dataclass(frozen=True)
class Answer:
  """What an environment said; `lost` where its process is gone."""

  value: object = None
  error: str | None = None
  lost: bool = False


class Environment:
  """One process with its thread; serves one episode at a time."""

  def __init__(self, worker, timeout_s: float):
    self._worker, self._timeout_s = worker, timeout_s
    # The thread that starts the process must live as long as it.
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._lost = True  # there is no process in the middle of an episode

  def submit(self, **request) -> concurrent.futures.Future:
    """An `Answer` to come, of {'verb': ...}; see env_worker.py."""
    line = json.dumps(request, default=str)
    return self._thread.submit(self._ask, request['verb'], line)

  def _ask(self, verb: str, line: str) -> Answer:
    worker = self._worker
    if verb == 'reset':
      worker.start()
      self._lost = False
    if self._lost:
      return Answer(error=f'{verb}: the process is gone', lost=True)
    try:
      worker.send(line)
      return Answer(**worker.receive(self._timeout_s))
    except TimeoutError:
      self._lost, where = True, worker.kill()
      return Answer(error=f'{verb}: no answer in {self._timeout_s:g} s{where}', lost=True)
    except process.WorkerDied as error:
      self._lost = True
      return Answer(error=f'{verb}: the process {error}', lost=True)
    finally:
      printed, count = worker.take_printed()
      if count:
        _LOG.info('an environment printed %d bytes: %s', count, printed[-_SHOWN:])

  def greet(self) -> dict:
    return self._thread.submit(self._worker.start).result()

  def close(self):
    self._worker.interrupt()
    self._thread.shutdown(wait=True, cancel_futures=True)


class EnvironmentPool:
  """As many environments as episodes go on at a time.

  Args:
    spec: './env.py:Class' or 'pkg.module:Class'.
    workers: processes.
    timeout_s: for one reset, one call of a tool, or one get_reward.
    most: characters of an answer at most.
  """

  def __init__(self, spec: str, *, workers: int, timeout_s=30.0, most=1 << 16, start_timeout_s=120.0):
    setup = {
      'path': process.search_path(),
      'environment': spec,
      'timeout_s': timeout_s,
      'most': most,
      'start_timeout_s': start_timeout_s,
    }
    variables, _ = process.environment(keep_env=False)
    self._guard = process.Keeper()
    self.all = [
      Environment(
        process.Worker(setup, variables, self._guard, 'jaxpost.environments.worker', f'environment {spec}'), timeout_s
      )
      for _ in range(workers)
    ]
    self.tools, self.gives_reward, self.agent = None, None, False
    self._closed = False
    atexit.register(self.close)

  def check(self):
    """Starts one and asks for its tools; InputError if that cannot be."""
    try:
      said = self.all[0].greet()
    except BaseException:
      self.close()
      raise
    # play(base_url, api_key) is somebody's agent, which has its own tools.
    self.agent = 'play' in said['tools']
    self.tools = [] if self.agent else list(said['tools'].values())
    self.gives_reward = said['gives_reward']
    return self

  def close(self):
    if self._closed:
      return
    self._closed = True
    atexit.unregister(self.close)
    for environment in self.all:
      environment.close()
    self._guard.close()


def row_of(columns: dict, prompt) -> dict:
  """A row as `reset` gets it; InputError for what JSON cannot carry."""
  row = {**columns, 'prompt': prompt}
  try:
    json.dumps(row)
  except (TypeError, ValueError) as error:
    raise InputError(
      f'environment: a row holds what JSON cannot carry ({error}); drop the column with config.data.map'
    ) from error
  return row
