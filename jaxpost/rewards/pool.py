"""Grades groups of completions in worker processes that can be killed.

A group is the G completions of one prompt; each function is called once per group. If a call raises, hangs, crashes or
does not return G finite numbers, its group is masked: all rewards are None, the reason is in `error`, and the failure
is counted in `stats`. A failure is never scored as 0, and too many failures stop the run.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import json
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpost.errors import InputError, refuse
from jaxpost.rewards import builtin
from jaxpost.rewards.groups import Graded, Group
from jaxpost.workers import process, user_code

if TYPE_CHECKING:
  from jaxpost.workers.call import Reward

_LOG = logging.getLogger(__name__)
_WINDOW = 100  # groups over which the fraction of failures is computed
_MIN_GROUPS = 20  # groups before that fraction is checked
_TAKE_S = 10.0  # seconds for a worker to accept a group
_HINT = 'rewards run in another process: make it text, numbers, lists or dicts, or drop it with config.data.map'
_Job = tuple[concurrent.futures.Future[Graded], str, Group]  # (result, the JSON line for a worker, the group)


class _Reply(NamedTuple):
  """A worker's values for one group, by function, and the error that ended the grading, if any."""

  values: dict[str, list]
  error: str | None = None
  timed_out: bool = False


class RewardPool(contextlib.AbstractContextManager):
  """Reward functions and the processes that run them.

  The workers see few environment variables: PATH, HOME, the locale and the like (`process.worker_variables`), those
  that an option called *_env names, and `env_vars`.

  Args:
    rewards: a spec or several (builtin.py): a builtin name, 'pkg.module:fn' or './file.py:fn', each with optional
      '?option=value', or a callable. A callable runs in a thread of this process, one call at a time, and cannot be
      killed.
    weights: one number per function; default 1.
    workers: number of processes; each grades one group at a time.
    timeout_s: seconds for one call of one function.
    max_failed: the run stops if more than this fraction of the last 100 groups (at least 20) failed, or all groups of
      the first batch.
    start_timeout_s: seconds for importing the functions.
    env_vars: names of more environment variables that the workers see.
    show_printed: what the functions print in one worker appears on stderr, up to 20 lines a batch.
  """

  def __init__(
    self,
    rewards: str | Callable | Sequence[str | Callable],
    *,
    weights: Sequence[float] | None = None,
    workers: int = 1,
    timeout_s: float = 30.0,
    max_failed: float = 0.25,
    start_timeout_s: float = 120.0,
    env_vars: Sequence[str] = (),
    show_printed: bool = True,
  ) -> None:
    if isinstance(rewards, str) or callable(rewards):
      rewards = (rewards,)
    weights = weights or [1.0] * len(rewards)
    refuse(not rewards, 'reward: none is given')
    refuse(len(weights) != len(rewards), f'reward_weights: {len(weights)} weights for {len(rewards)} rewards')
    for weight in weights:
      refuse(not math.isfinite(weight), f'reward_weights: {weight} is not finite')
    refuse(workers < 1, f'reward workers: {workers} is less than 1')
    refuse(not (timeout_s > 0 and math.isfinite(timeout_s)), f'reward timeout_s: {timeout_s} is not a time in seconds')
    refuse(not 0 <= max_failed <= 1, f'reward max_failed: {max_failed} is not within 0 and 1')
    self.names = builtin.short_names(rewards)
    self.weights = dict(zip(self.names, weights))
    self._max_failed = max_failed
    self._timeout_s = timeout_s
    self._needed_variables = [*builtin.needed_variables(rewards), *env_vars]
    named = list(zip(self.names, rewards))
    self._local: list[Reward] = []
    self._local_lock = threading.Lock()
    for name, reward in named:
      if callable(reward):
        from jaxpost.workers import call

        self._local.append(call.load(name, reward))
        _LOG.warning(
          'reward %s runs inside this process and cannot be killed if it hangs; write it as module:function', name
        )
    self._remote = [(n, builtin.locate(r)) for n, r in named if not callable(r)]
    self._setup = dict(rewards=self._remote, timeout_s=timeout_s, start_timeout_s=start_timeout_s)
    self._console = process.Printed([name for name, _ in self._remote]) if show_printed else None
    self._needs: list[tuple[str, str, Sequence[str]]] = []  # name, file and needed columns of each function
    self._recent: collections.deque[str | None] = collections.deque(maxlen=_WINDOW)  # the error of each group, or None
    self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # None ends a thread
    self._size = workers
    self._owner = os.getpid()
    self._reaper: process.Reaper | None = None
    self._workers: list[process.Worker] = []
    self._threads: list[threading.Thread] = []
    self._ready: list[concurrent.futures.Future[list[dict]]] = []
    self._closed = False

  def check_rows(self, rows: Any, names: Sequence[str] | None = None, numbers: range | None = None) -> None:
    """Like `check`, for every row; also refuses values that JSON cannot represent, and null for all built-ins.

    Args:
      rows: `data.sources.Rows`; if they are read lazily, only the columns of the first are checked.
      names: names of the functions that grade them; None: all.
      numbers: those of the rows that they grade; None: all.
    """
    numbers = range(len(rows)) if numbers is None else numbers
    first = next(rows[i] for i in numbers if rows[i])
    columns = first if rows.streaming else {column: None for i in numbers for column in rows[i]}
    self.check(columns, names, f'the data from {rows.where(numbers[0])} on')
    graders = [name for name in self.names if names is None or name in names]
    for column, value in first.items() if graders else ():
      check_json(column, value)
    built_in = {name for name, spec in self._remote if spec.startswith(builtin.PACKAGE)}
    functions = [entry for entry in self._needs if entry[0] in graders]
    if rows.streaming or not any(needs for *_, needs in functions):
      return
    for i in numbers:
      filled = [name for name, value in rows[i].items() if value is not None]
      missing = [user_code.missing_of(needs, (*user_code.GIVEN, *filled)) for *_, needs in functions]
      if all(missing) and built_in.issuperset(graders):  # a user's function may accept null
        column = missing[0][0].replace('|', ' or ')
        raise InputError(
          f'{rows.where(i)}: {column}: is absent or null, and reward {graders[0]} needs it; give it, or drop the row'
        )
      for name, file, needs in functions if any(missing) else ():
        for column in user_code.missing_of(needs, (*user_code.GIVEN, *rows[i])):
          text = f'reward {name} ({file}): {user_code.missing_column(column, rows[i])}'
          raise InputError(f'{rows.where(i)}: {text}; give it, null where there is none, or drop the row')

  def check(
    self, columns: Iterable[str] | None = None, names: Sequence[str] | None = None, at: str = 'the data'
  ) -> None:
    """Starts the workers and imports every function; InputError if that fails.

    Args:
      columns: names of the data's columns, to check that each function gets the arguments it needs; None skips that
        check until the first call.
      names: names of the functions whose arguments are checked; None: all.
      at: where the data is, for errors.
    """
    self._start()
    self._needs = [(r.name, r.file, r.needs) for r in self._local]
    for ready in self._ready:
      functions = ready.result()
    self._needs += [(name, info['file'], info['needs']) for (name, _), info in zip(self._remote, functions)]
    if columns is None:
      return
    available = (*user_code.GIVEN, *columns)
    for name, file, arguments in self._needs:
      if names is not None and name not in names:
        continue
      for missing in user_code.missing_of(arguments, available):
        raise InputError(f'reward {name} ({file}): {user_code.missing_column(missing, available, at)}')

  def submit(self, groups: Sequence[Group], step: int | None = None) -> list[concurrent.futures.Future[Graded]]:
    """Starts grading without waiting for it; failures are not counted before `count` is called.

    InputError if JSON cannot represent a column. `step` reaches the functions as TRL's trainer_state.global_step.
    """
    lines = [_request(group, step) for group in groups]
    self._start()
    futures: list[concurrent.futures.Future[Graded]] = [concurrent.futures.Future() for _ in groups]
    for job in zip(futures, lines, groups, strict=True):
      self._jobs.put(job)
    return futures

  def grade(self, groups: Sequence[Group], step: int | None = None) -> list[Graded]:
    """Grades groups and returns the `Graded` of each, in order; InputError if too many failed."""
    graded = [future.result() for future in self.submit(groups, step)]
    self.count(graded)
    return graded

  def close(self) -> None:
    """Ends workers and threads; groups that are still queued are cancelled."""
    if self._closed or os.getpid() != self._owner:  # A forked copy of this process must not end the workers.
      return
    self._closed = True
    atexit.unregister(self.close)
    with contextlib.suppress(queue.Empty):  # threads take jobs meanwhile
      while True:
        if job := self._jobs.get_nowait():
          job[0].cancel()
    for _ in self._threads:
      self._jobs.put(None)
    for thread in self._threads:
      thread.join(0.5)
    for worker in self._workers:
      worker.interrupt()
    for thread in self._threads:
      thread.join(2.0)
    if self._reaper:
      self._reaper.close()

  def __exit__(self, *unused) -> None:
    self.close()

  def _start(self) -> None:
    """Starts the threads, and with them the workers, on first use."""
    if self._closed:
      raise RuntimeError('the reward pool is closed')
    if self._threads:
      return
    atexit.register(self.close)
    if self._remote:
      variables, hidden = process.worker_variables(self._needed_variables)
      if hidden:
        _LOG.info('rewards do not see %s; config.rewards.env_vars passes some on', ', '.join(hidden))
      self._reaper = reaper = process.Reaper()
      label = 'reward ' + ', '.join(name for name, _ in self._remote)
      self._workers = [
        process.Worker('jaxpost.rewards.worker', self._setup, variables, reaper, label) for _ in range(self._size)
      ]
    workers: list[process.Worker | None] = [*self._workers] or [None]  # None: functions of this process alone
    for worker in workers:
      # The thread also starts the worker's process: PR_SET_PDEATHSIG kills a process when the thread that started it
      # ends.
      ready: concurrent.futures.Future[list[dict]] = concurrent.futures.Future()
      thread = threading.Thread(target=self._serve, args=(worker, ready), daemon=True)
      self._ready.append(ready)
      self._threads.append(thread)
      thread.start()

  def _serve(self, worker: process.Worker | None, ready: concurrent.futures.Future) -> None:
    """Runs in a thread: serves one worker, one job at a time."""
    _settle(ready, worker.start if worker else list)
    while (job := self._jobs.get()) is not None:
      future, line, group = job
      _settle(future, self._grade_line, worker, line, group)
    if worker:
      worker.finish()

  def _grade_line(self, worker: process.Worker | None, line: str, group: Group) -> Graded:
    """Grades one group: first with the worker's functions, then with those of this process."""
    logged: list[tuple[str, float]] = []
    size = len(group.completions)
    names = self.names if group.graded_by is None else group.graded_by
    remote = [name for name, _ in self._remote if name in names]
    local = [reward for reward in self._local if reward.name in names]
    reply = self._ask(worker, line, logged, remote) if worker and remote else _Reply({})
    if reply.error is None and local:
      reply = self._call_local(local, reply.values, line, logged)
    components = {name: reply.values.get(name, [None] * size) for name in self.names}
    if reply.error is not None:
      return Graded([None] * size, components, reply.error, reply.timed_out, graded_by=group.graded_by)
    return Graded(self._sums(components, size), components, None, logged=tuple(logged), graded_by=group.graded_by)

  def _call_local(self, rewards: Sequence[Reward], values: dict[str, list], line: str, logged: list) -> _Reply:
    """Calls the functions of this process on a group, after a worker has returned `values`."""
    from jaxpost.workers import call

    for reward in rewards:
      try:
        with self._local_lock:
          group = json.loads(line)
          values[reward.name] = call.call(reward, group['arguments'], logged, group['step'])
      except call.RewardError as error:
        return _Reply(values, f'reward {reward.name}: {error}')
    return _Reply(values)

  def _ask(self, worker: process.Worker, line: str, logged: list, names: Sequence[str], retry: bool = True) -> _Reply:
    """Has a worker grade one group; retries once if the worker was dead before the group reached it."""
    worker.start()
    worker.send(line)
    values: dict[str, list] = {}
    started = False
    try:
      for name in names:
        worker.receive(self._timeout_s + _TAKE_S)  # {'start': name}
        started = True
        reply = worker.receive(self._timeout_s)
        if 'error' in reply:
          return _Reply(values, f'reward {name}: {reply["error"]}')
        values[name] = reply['values']
        logged.extend(map(tuple, reply['logged']))
      return _Reply(values)
    except TimeoutError:
      failed = _Reply(values, f'reward {name}: no answer in {self._timeout_s:g} s{worker.kill()}', timed_out=True)
    except process.WorkerDied as error:
      failed = _Reply(values, f'reward {name}: the worker {error}')
    finally:
      printed, count = worker.take_printed('rewards')
      if count and self._console:
        self._console.show(worker, printed, count - process.TAIL)
    if retry and not started:  # This group is not the cause.
      return self._ask(worker, line, logged, names, retry=False)
    return failed

  def _sums(self, components: dict[str, list[float | None]], size: int) -> list[float | None]:
    """Returns the weighted sum of the rewards of each completion of a group, or None.

    A function that returned None for all of them is left out. If it returned None for some, these completions have no
    reward, as None must not count as 0.
    """
    pairs = zip(self.weights.values(), components.values())
    graded = [(weight, values) for weight, values in pairs if any(v is not None for v in values)]
    rows = zip(*(values for _, values in graded)) if graded else [(None,)] * size
    return [None if None in row else sum(w * v for (w, _), v in zip(graded, row)) for row in rows]

  def count(self, graded: Sequence[Graded]) -> None:
    """Counts the failures of a batch; InputError if too many groups failed."""
    if self._console:
      self._console.next_batch()
    is_first_batch = not self._recent
    self._recent.extend(g.error for g in graded)
    errors = [error for error in self._recent if error]
    size = len(self._recent)
    if is_first_batch and errors and len(errors) == size:
      raise InputError(f'every group of the first batch failed: {errors[0]}')
    if size >= _MIN_GROUPS and len(errors) > self._max_failed * size:
      raise InputError(
        f'{len(errors)} of the last {size} groups failed, max_failed is {self._max_failed:g}: {errors[0]}'
      )


def _settle(future: concurrent.futures.Future, function: Callable, *arguments) -> None:
  """Sets the result of a future to that of a call, or its exception."""
  try:
    future.set_result(function(*arguments))
  except BaseException as error:  # Raised in the thread that waits for the future.
    future.set_exception(error)


def _request(group: Group, step: int | None) -> str:
  """Returns the JSON line for a worker; InputError for a column that JSON cannot represent."""
  fields: dict[str, list] = {
    'prompts': group.prompts,
    'completions': group.completions,
    'completion_ids': group.completion_ids,
  }
  for name in group.columns:
    if name in user_code.GIVEN:
      raise InputError(
        f'reward: a column is called {name!r}, a name reserved for arguments that the run gives to functions; rename it'
      )
  fields.update(group.columns)
  for name, values in fields.items():
    if len(values) != len(group.completions):
      raise ValueError(f'{name} has {len(values)} entries for {len(group.completions)} completions')
  try:
    return json.dumps({'step': step, 'graded_by': group.graded_by, 'arguments': fields})
  except (TypeError, ValueError):
    for name, values in fields.items():
      check_json(name, values)
    raise


def check_json(name: str, values: Any, where: str = 'reward', hint: str = _HINT) -> None:
  """Raises InputError for a column that JSON cannot represent."""
  try:
    json.dumps(values)
  except (TypeError, ValueError) as error:
    raise InputError(f'{where}: column {name!r}: {error}; {hint}') from error
