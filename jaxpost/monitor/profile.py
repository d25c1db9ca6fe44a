"""Profiles some steps with `jax.profiler` (`config.log.profile_from`)."""

import logging

import jax
from etils import epath


class Trace:
  """Traces steps `first` to `first` + `number` - 1 into a folder.

  Open it with TensorBoard or xprof; every process writes its own files.
  """

  def __init__(self, folder: epath.Path, first: int, number: int, last: int):
    """last: step before an evaluation, not traced if another step is."""
    self._folder, self._first = folder, first
    self._after = max(first + 1, min(first + number, last))
    self._open: bool | None = None  # None before the first step

  def at(self, step: int) -> None:
    """Starts or ends the trace; called before each step."""
    if step >= self._after:
      if self._open is None:
        logging.warning('config.log.profile_from=%d traces nothing, as this start begins at step %d', self._first, step)
      self.close()
    # A run that resumes within these steps traces the remaining ones.
    elif not self._open and self._first <= step < self._after:
      self._folder.mkdir(parents=True, exist_ok=True)
      jax.profiler.start_trace(str(self._folder))
      self._open = True

  def close(self) -> None:
    """Ends the current trace, if any; JAX has one at a time."""
    if self._open:
      jax.profiler.stop_trace()
    self._open = False
