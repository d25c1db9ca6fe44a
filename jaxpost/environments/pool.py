"""Runs each environment in its own process, which can be killed.

An environment follows TRL's protocol (`environment_factory`): a class that is instantiated without arguments, with
reset(**row), which returns the first observation or None; public methods, which are the tools; and optionally
get_reward(). Beyond TRL's, it may have an attribute `turn_reward`, which a tool sets to the reward of its call. A tool
that raises answers with its error. If a call hangs or the process dies, the process is killed and its episode is lost.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError
from jaxpost.workers import process

if TYPE_CHECKING:
  from jaxpost.data.sources import Rows
  from jaxpost.types import Prompt

_START_TIMEOUT_S = 120.0  # for importing the environment
PLAY = 'play'  # play(base_url, api_key): an environment with this method is an agent


@dataclasses.dataclass(frozen=True)
class Answer:
  """An environment's reply to one request."""

  value: Any = None  # what the method returned
  error: str | None = None  # why there is no value; None: there is one
  lost: bool = False  # the process has ended, and the episode with it
  reward: float = 0.0  # of a tool call, if the environment gives rewards of turns
  spoiled: bool = False  # that reward is not a finite number, which ends the episode


class Environment:
  """One environment process and the thread that talks to it; serves one episode at a time."""

  def __init__(self, worker: process.Worker, timeout_s: float) -> None:
    self._worker = worker
    self._timeout_s = timeout_s
    # The kernel kills the process when the thread that started it ends, so the thread is kept.
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._lost = True  # True until `reset` has started an episode

  def submit(self, **request) -> concurrent.futures.Future:
    """Queues a request {'verb': ...} (see worker.py); returns a future of its `Answer`."""
    line = json.dumps(request, default=str)
    return self._thread.submit(self._ask, request['verb'], line)

  def _ask(self, verb: str, line: str) -> Answer:
    worker = self._worker
    if verb in ('check', 'reset'):
      worker.start()
      self._lost = False
    if self._lost:
      return Answer(error=f'{verb}: the process is gone', lost=True)
    try:
      worker.send(line)
      return Answer(**worker.receive(self._timeout_s))
    except TimeoutError:
      self._lost = True
      return Answer(error=f'{verb}: no answer in {self._timeout_s:g} s{worker.kill()}', lost=True)
    except process.WorkerDied as error:
      self._lost = True
      return Answer(error=f'{verb}: the process {error}', lost=True)
    finally:
      worker.take_printed('an environment')

  def describe(self) -> dict:
    """Starts the process; returns its tools and abilities, see 'ready' in worker.py. InputError if that fails."""
    return self._thread.submit(self._worker.start).result()

  def close(self) -> None:
    """Kills the process and waits for the thread."""
    self._worker.interrupt()
    self._thread.shutdown(wait=True, cancel_futures=True)


class EnvironmentPool:
  """The environments of a stage: one process for each episode in flight.

  Attributes:
    tools: JSON schemas of the tools, for the chat template.
    gives_reward: True if the class has get_reward.
    gives_turn_rewards: True if it has an attribute turn_reward.
    agent: True if the class has a method play(base_url, api_key), an agent that uses the policy over HTTP.

  Args:
    spec: './env.py:Class' or 'pkg.module:Class'.
    timeout_s: seconds for one reset, one tool call, or one get_reward.
    max_characters: length at which an answer is cut.
    env_vars: names of environment variables that the processes see besides those of `process.worker_variables`.
  """

  def __init__(
    self,
    spec: str,
    *,
    workers: int,
    timeout_s: float = 30.0,
    max_characters: int = 1 << 16,
    env_vars: Sequence[str] = (),
  ) -> None:
    """Starts one process and reads the tools; InputError if the environment cannot be imported."""
    setup = dict(environment=spec, timeout_s=timeout_s, max_characters=max_characters, start_timeout_s=_START_TIMEOUT_S)
    self._spec = spec
    variables, _ = process.worker_variables(env_vars)
    self._reaper = process.Reaper()
    module, label = 'jaxpost.environments.worker', f'environment {spec}'
    processes = [process.Worker(module, setup, variables, self._reaper, label) for _ in range(workers)]
    self.all = [Environment(worker, timeout_s) for worker in processes]
    self._closed = False
    atexit.register(self.close)
    try:
      ready = self.all[0].describe()
    except BaseException:
      self.close()
      raise
    self.agent = PLAY in ready['tools']
    # An agent defines the tools of its own requests.
    self.tools: list[dict] = [] if self.agent else list(ready['tools'].values())
    self.gives_reward: bool = ready['gives_reward']
    self.gives_turn_rewards: bool = ready['gives_turn_rewards']

  def check_rows(self, rows: Rows) -> None:
    """Raises InputError if `reset` cannot be called with the first row."""
    row: dict = next((row for row in rows if row is not None), {})
    if error := self.all[0].submit(verb='check', row={**dict.fromkeys(row), 'prompt': None}).result().error:
      self.close()
      raise InputError(f'environment {self._spec}: {error}')

  def each(self) -> list[EnvironmentPool]:
    """Returns the pools that episodes may play in: this one."""
    return [self]

  def of(self, prompt: Prompt) -> EnvironmentPool:
    """Returns the pool in which the episodes of a prompt play: this one."""
    del prompt
    return self

  def close(self) -> None:
    """Ends all processes."""
    if self._closed:
      return
    self._closed = True
    atexit.unregister(self.close)
    for environment in self.all:
      environment.close()
    self._reaper.close()


def reset_row(columns: dict, prompt: Any) -> dict:
  """Returns the row that `reset` receives: the columns and the prompt. InputError if JSON cannot represent it."""
  row = {**columns, 'prompt': prompt}
  try:
    json.dumps(row)
  except (TypeError, ValueError) as error:
    raise InputError(
      f'environment: a row has a value that JSON cannot represent ({error}); drop the column with config.data.map'
    ) from error
  return row
