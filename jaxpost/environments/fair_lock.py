"""A fair (first-in, first-out) lock."""

import collections
import threading


class FairLock:
  """A lock that goes to the thread that has waited longest.

  `threading.Lock` makes no such promise: the thread that has just released it may get it again while others wait.
  """

  def __init__(self) -> None:
    self._queue = collections.deque()  # a locked lock per thread; the first one holds the `FairLock`
    self._mutex = threading.Lock()

  def acquire(self) -> None:
    """Waits until all threads that came before have released the lock."""
    turn = threading.Lock()
    turn.acquire()
    with self._mutex:
      self._queue.append(turn)
      is_first = len(self._queue) == 1
    if not is_first:
      turn.acquire()  # blocks until `release` of the thread before

  def release(self) -> None:
    """Passes the lock on to the next thread in the queue."""
    with self._mutex:
      self._queue.popleft()
      if self._queue:
        self._queue[0].release()

  def __enter__(self) -> None:
    self.acquire()

  def __exit__(self, *unused) -> None:
    self.release()
