"""Engines that answer requests from any thread, and run in turn, one block of tokens at a time.

Programs of several devices that two threads launch at once can deadlock, so an engine runs while its thread holds a
lock that all of them share.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpost.rollout.sequence import Completion, Request

_TICK_S = 0.2  # seconds between checks whether to stop


class Answer(concurrent.futures.Future):
  """A future of the `Completion` of a request; `cancel` frees its slot."""

  # Called by `SharedEngines.serve` with the token ids of each block.
  on_tokens: Callable[[np.ndarray], None] | None = None


class SharedEngines:
  """Engines by name, each with a queue of requests.

  Attributes:
    open: answers of requests that have not ended, queued or in a slot.
    lock: held by the engine that runs; another thread gets it between two blocks.
    stopped: any thread may set it, to end `serve` after the sequences in flight.
  """

  def __init__(self, engines: Mapping[str, Any]) -> None:
    self.open: set[Answer] = set()
    self._engines = engines
    self._queues: dict[str, queue.SimpleQueue[Request]] = {name: queue.SimpleQueue() for name in engines}
    self.lock = FairLock()
    self.stopped = threading.Event()

  def serve(self, run_key: Any, step: int = 0) -> dict[str, dict]:
    """Answers requests until `stopped` is set; returns the figures of each engine."""
    with concurrent.futures.ThreadPoolExecutor(len(self._engines)) as pool:
      options = dict(run_key=run_key, step=step, ended=self.stopped.is_set, tick_s=_TICK_S, on_tokens=_pass_on)
      jobs = {name: pool.submit(self._drive, name, **options) for name in self._engines}
      try:
        for job in concurrent.futures.as_completed(jobs.values()):
          job.result()
      finally:
        self.stopped.set()  # also ends the other engines if one has failed
    return {name: job.result() for name, job in jobs.items()}

  def serve_until(
    self, name: str, ended: Callable[[], bool], run_key: Any, step: int, on_dispatch: Callable | None = None
  ) -> dict:
    """Answers requests to one engine until `ended()`, which is called between blocks; returns its figures.

    Requests that arrive between two calls wait for the next one, because the weights may change meanwhile.
    """
    return self._drive(name, run_key, step, ended, _TICK_S / 20, on_dispatch=on_dispatch)

  @contextlib.contextmanager
  def submitted(self, name: str, requests: Sequence[Request], answers: Sequence[Answer]) -> Iterator[None]:
    """Queues requests to an engine; those of `answers` are open until the block ends."""
    self.open |= set(answers)
    try:
      for request, answer in zip(requests, answers):
        self._queues[name].put(dataclasses.replace(request, tag=answer, is_cancelled=answer.cancelled))
      yield
    finally:
      self.open -= set(answers)

  def cancel_open(self) -> None:
    """Cancels the requests that have not ended."""
    for answer in list(self.open):
      answer.cancel()

  def _drive(
    self, name: str, run_key: Any, step: int, ended: Callable[[], bool], tick_s: float, **hooks: Callable | None
  ) -> dict:
    """Runs an engine until `ended()`, which is called between blocks, or every `tick_s` seconds if it is idle."""
    waiting = self._queues[name]

    def exchange(completions: list[Completion], idle: bool) -> list[Request]:
      """Delivers completions and returns the queued requests; the engine calls it between blocks.

      If the engine is idle, it waits until there is a request or the end, and other engines may run meanwhile.
      """
      for completion in completions:
        if completion.request.tag.set_running_or_notify_cancel():  # False if its client has just left
          completion.request.tag.set_result(completion)
      ready: list[Request] = []
      if ended():
        return ready
      self.lock.release()
      try:
        while True:
          try:
            request = waiting.get(block=idle and not ready, timeout=tick_s)
            if not request.tag.cancelled():
              ready.append(request)
          except queue.Empty:
            if ready or not idle or ended():
              return ready
      finally:
        self.lock.acquire()

    with self.lock:
      return self._engines[name].serve([], run_key=run_key, step=step, next_requests=exchange, **hooks)


def _pass_on(request: Request, tokens: np.ndarray) -> None:
  if request.tag.on_tokens:
    request.tag.on_tokens(tokens)


class FairLock:
  """A lock that goes to the thread that has waited longest.

  `threading.Lock` makes no such promise: the thread that has just released it may get it again while others wait.
  """

  def __init__(self) -> None:
    self._queue: collections.deque[object] = collections.deque()  # of the holder, and then of each thread that waits
    self._changed = threading.Condition()

  def acquire(self) -> None:
    """Waits until all threads that came before have released the lock."""
    turn = object()
    with self._changed:
      self._queue.append(turn)
      self._changed.wait_for(lambda: self._queue[0] is turn)

  def release(self) -> None:
    """Passes the lock on to the next thread in the queue."""
    with self._changed:
      self._queue.popleft()
      self._changed.notify_all()

  __enter__ = acquire

  def __exit__(self, *unused) -> None:
    self.release()
