"""Threads that take turns, in the order in which they have come."""

import collections
import threading


class Line:
  """A lock that goes to whoever has waited longest.

  `threading.Lock` may go again and again to the thread that gives it back.
  """

  def __init__(self):
    self._waiting, self._lock = collections.deque(), threading.Lock()

  def acquire(self):
    mine = threading.Lock()
    mine.acquire()
    with self._lock:
      self._waiting.append(mine)
      first = len(self._waiting) == 1
    if not first:
      mine.acquire()

  def release(self):
    with self._lock:
      self._waiting.popleft()
      if self._waiting:
        self._waiting[0].release()

  def __enter__(self):
    self.acquire()

  def __exit__(self, *args):
    del args
    self.release()
