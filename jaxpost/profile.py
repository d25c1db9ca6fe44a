"""A trace of some steps: where their time goes, on devices and on the host."""

import jax
from etils import epath


class Trace:
  """Traces steps `first` to `first` + `number` - 1 into a folder.

  Open it with TensorBoard or xprof; every process writes files of its own.
  """

  def __init__(self, folder: epath.Path, first: int, number: int, last: int):
    """`first` = 0 traces nothing; `last` is the last step there is."""
    self._folder, self._first = folder, first
    self._after = first and min(first + number, last)
    self._open = False

  def at(self, step: int):
    """Before each step."""
    if step >= self._after:
      self.close()
    # Of a run that is resumed inside, the rest.
    elif not self._open and self._first <= step < self._after:
      self._folder.mkdir(parents=True, exist_ok=True)
      jax.profiler.start_trace(str(self._folder))
      self._open = True

  def close(self):
    """Ends a trace that is under way; JAX has one at a time."""
    if self._open:
      jax.profiler.stop_trace()
      self._open = False
