"""Threads that take turns, in the order in which they have come."""

import collections
import threading


class Turns:
  """A lock that goes to whoever has waited longest.

  `threading.Lock` may go again and again to the thread that gives it back.
  """

  def __init__(self):
    self._line, self._lock = collections.deque(), threading.Lock()

  def acquire(self):
    mine = threading.Lock()
    mine.acquire()
    with self._lock:
      self._line.append(mine)
      first = len(self._line) == 1
    if not first:
      mine.acquire()

  def release(self):
    with self._lock:
      self._line.popleft()
      if self._line:
        self._line[0].release()

  def __enter__(self):
    self.acquire()

  def __exit__(self, *args):
    del args
    self.release()
