"""Grades groups of completions in worker processes that can be killed.

A group is the G completions of one prompt; each function is called once a
group. A call that raises, hangs, dies or returns no G finite numbers masks
its group: every reward None, the reason in `error`, counted in `stats`.
Nothing is ever scored 0 for a failure, and too many of them stop the run.
"""

import atexit
import collections
import concurrent.futures
import json
import logging
import math
import os
import queue
import threading

from jaxpost.errors import InputError
from jaxpost.rewards import builtin
from jaxpost.rewards.groups import Graded, stats_of
from jaxpost.workers import call, process

_LOG = logging.getLogger(__name__)
_WINDOW = 100  # groups over which the share of failures is taken
_ENOUGH = 20  # groups before that share says anything
_TAKE_S = 10.0  # seconds for a group to reach its worker
_SHOWN = 2000  # characters of what a group's functions printed


class Pending:
  """Groups being graded; `result` waits for them."""

  def __init__(self, futures, count):
    self._futures = futures
    self._count = count
    self._graded = None

  def done(self):
    return all(future.done() for future in self._futures)

  def uncounted(self):
    """The `Graded` of each group in order; `RewardPool.count` is yours."""
    return [future.result() for future in self._futures]

  def result(self):
    """The `Graded` of each group in order; InputError past the limit."""
    if self._graded is None:
      graded = self.uncounted()
      self._count(graded)
      self._graded = graded
    return self._graded


class RewardPool:
  """Reward functions and the processes they run in.

  Args:
    rewards: a spec or a tuple of them (builtin.py): builtin name,
      'pkg.module:fn', './file.py:fn', each with '?option=value' if need be,
      or a callable, which runs in this process (in a thread, one call at a
      time) and cannot be killed.
    weights: one number a function; default 1.
    workers: processes, each grading one group at a time.
    timeout_s: for one call of one function.
    max_failed: the run stops when more than this share of the last 100
      groups (of at least 20) failed, or all of the first batch.
    keep_env: leaves TOKEN, SECRET, PASSWORD and API_KEY variables visible to
      the functions; an option called *_env keeps the one that it names.
    start_timeout_s: for importing the functions.
  """

  def __init__(
    self, rewards, *, weights=None, workers=1, timeout_s=30.0, max_failed=0.25, keep_env=False, start_timeout_s=120.0
  ):
    if isinstance(rewards, str) or callable(rewards):
      rewards = (rewards,)
    _check_settings(rewards, weights, workers, timeout_s, max_failed)
    self.names = builtin.short_names(rewards)
    self.stats = stats_of([])  # of the batch graded last
    self._weights = tuple(weights or [1.0] * len(rewards))
    self._max_failed = max_failed
    self._timeout_s = timeout_s
    self._start_timeout_s = start_timeout_s
    self._keep_env, self._variables = keep_env, builtin.variables(rewards)
    named = list(zip(self.names, rewards))
    self._local = [call.load(n, r) for n, r in named if callable(r)]
    self._local_lock = threading.Lock()
    for reward in self._local:
      _LOG.warning(
        'reward %s runs inside this process and cannot be killed if it hangs; write it as module:function', reward.name
      )
    self._remote = [(n, builtin.locate(r)) for n, r in named if not callable(r)]
    self._recent = collections.deque(maxlen=_WINDOW)  # error or None a group
    self._jobs = queue.SimpleQueue()
    self._size = workers
    self._owner = os.getpid()
    self._guard = None
    self._workers, self._threads, self._ready = [], [], []
    self._closed = False

  def check(self, columns=None):
    """Starts the workers, imports every function; InputError if it cannot.

    Args:
      columns: names of the data's columns, to see that each function finds
        the arguments it needs; None leaves that to the first call.
    """
    self._start()
    needs = [(r.name, r.file, r.needs) for r in self._local]
    for ready in self._ready:
      functions = ready.result()
    for (name, _), function in zip(self._remote, functions):
      needs.append((name, function['file'], function['needs']))
    for name, file, arguments in needs if columns is not None else ():
      given = (*call.GIVEN, *columns)
      for missing in call.missing_of(arguments, given):
        raise InputError(f'reward {name} ({file}): {call.missing_column(missing, given)}')

  def submit(self, groups, step=None):
    """Starts grading; returns a `Pending`.

    `step` is what the functions see as TRL's trainer_state.global_step.
    """
    lines = [_request(group, step) for group in groups]
    self._start()
    futures = []
    for line, group in zip(lines, groups):
      future = concurrent.futures.Future()
      self._jobs.put((future, line, len(group.completions)))
      futures.append(future)
    return Pending(futures, self.count)

  def grade(self, groups, step=None):
    """The `Graded` of each group, in order."""
    return self.submit(groups, step).result()

  def close(self):
    """Ends workers and threads; what still waits is cancelled."""
    if self._closed or os.getpid() != self._owner:  # a fork owns nothing
      return
    self._closed = True
    atexit.unregister(self.close)
    while not self._jobs.empty():
      self._jobs.get()[0].cancel()
    for _ in self._threads:
      self._jobs.put(None)
    for thread in self._threads:
      thread.join(0.5)
    for worker in self._workers:
      worker.interrupt()
    for thread in self._threads:
      thread.join(2.0)
    if self._guard:
      self._guard.close()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()

  def _start(self):
    if self._closed:
      raise RuntimeError('the reward pool is closed')
    if self._threads:
      return
    atexit.register(self.close)
    if self._remote:
      variables, dropped = process.environment(self._keep_env, self._variables)
      if dropped:
        _LOG.info('rewards do not see %s; keep_env=True lets them', ', '.join(dropped))
      setup = {
        'path': process.search_path(),
        'rewards': self._remote,
        'timeout_s': self._timeout_s,
        'start_timeout_s': self._start_timeout_s,
      }
      self._guard = process.Keeper()
      self._workers = [process.Worker(setup, variables, self._guard) for _ in range(self._size)]
    for worker in self._workers or [None]:
      # Also starts its process, whose PR_SET_PDEATHSIG is this thread's death.
      ready = concurrent.futures.Future()
      thread = threading.Thread(target=self._serve, args=(worker, ready), daemon=True)
      self._ready.append(ready)
      self._threads.append(thread)
      thread.start()

  def _serve(self, worker, ready):
    """The life of a thread: one worker, one job at a time."""
    _settle(ready, worker.start if worker else list)
    while (job := self._jobs.get()) is not None:
      future, line, size = job
      _settle(future, self._grade_line, worker, line, size)
    if worker:
      worker.finish()

  def _grade_line(self, worker, line, size):
    """One group: the worker's functions first, then those of this process."""
    values, failure, logged = {}, None, []
    if worker:
      values, failure = self._ask(worker, line, logged)
    for reward in self._local if failure is None else ():
      try:
        with self._local_lock:
          group = json.loads(line)
          values[reward.name] = call.call(reward, group['arguments'], logged, group['step'])
      except call.RewardError as error:
        failure = f'reward {reward.name}: {error}', False
        break
    components = {name: values.get(name, [None] * size) for name in self.names}
    if failure:
      return Graded([None] * size, components, *failure)
    rows = zip(*components.values())
    return Graded([self._weighted(row) for row in rows], components, None, logged=tuple(logged))

  def _ask(self, worker, line, logged, again=True):
    """({name: values}, (error, timed out) or None) of one worker."""
    worker.start()
    worker.send(line)
    values, started = {}, False
    try:
      for name, _ in self._remote:
        worker.receive(self._timeout_s + _TAKE_S)  # {'start': name}
        started = True
        reply = worker.receive(self._timeout_s)
        if 'error' in reply:
          return values, (f'reward {name}: {reply["error"]}', False)
        values[name] = reply['values']
        logged.extend(map(tuple, reply['logged']))
      return values, None
    except TimeoutError:
      text, timed_out = f'no answer in {self._timeout_s:g} s', True
      text += worker.kill()
    except process.WorkerDied as error:
      text, timed_out = f'the worker {error}', False
    finally:
      printed, count = worker.take_printed()
      if count:
        _LOG.info('rewards printed %d bytes: %s', count, printed[-_SHOWN:])
    if again and not started:  # what ended it was before this group
      return self._ask(worker, line, logged, again=False)
    return values, (f'reward {name}: {text}', timed_out)

  def _weighted(self, row):
    given = [w * v for w, v in zip(self._weights, row) if v is not None]
    return sum(given) if given else None

  def count(self, graded):
    """Keeps the statistics; InputError when too much failed."""
    self.stats = stats_of(graded)
    first = not self._recent
    self._recent.extend(g.error for g in graded)
    errors = [error for error in self._recent if error]
    size = len(self._recent)
    if first and errors and len(errors) == size:
      raise InputError(f'every group of the first batch failed: {errors[0]}')
    if size >= _ENOUGH and len(errors) > self._max_failed * size:
      raise InputError(
        f'{len(errors)} of the last {size} groups failed, max_failed is {self._max_failed:g}: {errors[0]}'
      )


def _settle(future, function, *arguments):
  try:
    future.set_result(function(*arguments))
  except BaseException as error:  # for the one who waits, as executors do
    future.set_exception(error)


def _request(group, step):
  """The line for a worker; InputError for a column that JSON cannot carry."""
  fields = {'prompts': group.prompts, 'completions': group.completions, 'completion_ids': group.completion_ids}
  for name in group.columns:
    if name in call.GIVEN:
      raise InputError(
        f'reward: a column is called {name!r}, which is what reward functions get from the run; rename it'
      )
  fields.update(group.columns)
  for name, values in fields.items():
    if len(values) != len(group.completions):
      raise ValueError(f'{name} has {len(values)} entries for {len(group.completions)} completions')
  try:
    return json.dumps({'step': step, 'arguments': fields})
  except (TypeError, ValueError):
    for name, values in fields.items():
      _check_json(name, values)
    raise


def _check_json(name, values):
  try:
    json.dumps(values)
  except (TypeError, ValueError) as error:
    raise InputError(
      f'reward: column {name!r}: {error}; reward functions run in another'
      ' process: make it text, numbers, lists or dicts, or drop it'
    ) from error


def _check_settings(rewards, weights, workers, timeout_s, max_failed):
  if not rewards:
    raise InputError('reward: none is given')
  if weights and len(weights) != len(rewards):
    raise InputError(f'reward_weights: {len(weights)} weights for {len(rewards)} rewards')
  for weight in weights or ():
    if not math.isfinite(weight):
      raise InputError(f'reward_weights: {weight} is not finite')
  if workers < 1:
    raise InputError(f'reward workers: {workers} is less than 1')
  if not (timeout_s > 0 and math.isfinite(timeout_s)):
    raise InputError(f'reward timeout_s: {timeout_s} is not a time in seconds')
  if not 0 <= max_failed <= 1:
    raise InputError(f'reward max_failed: {max_failed} is not within 0 and 1')
