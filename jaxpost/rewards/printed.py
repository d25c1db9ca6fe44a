"""Shows on the console of a run what its reward functions print."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

_LINES = 20  # to show of each batch
_COLUMNS = 400  # characters to show of a line


class Printed:
  """Shows on stderr what functions print in one worker process, that which prints first: up to 20 lines a batch."""

  def __init__(self, names: Collection[str]) -> None:
    self._names = names  # of the functions
    self._worker = None
    self._left = _LINES  # -1: lines were left out

  def next_batch(self) -> None:
    """Allows as many lines again."""
    self._left = _LINES

  def show(self, worker: Any, printed: str, cut: int) -> None:
    """Prints what the functions printed for a group, each line after the name of its function.

    Args:
      worker: the process; what another one prints is not shown.
      printed: parts that begin with a zero byte and the name of the function that is called.
      cut: number of bytes before them that are missing, if positive.
    """
    if self._worker not in (None, worker):
      return
    self._worker = worker
    name = next(iter(self._names)) if len(self._names) == 1 else 'rewards'
    lines = [(name, f'({cut} bytes before this are not shown)')] if cut > 0 else []
    for i, part in enumerate(printed.split('\0')):
      first, _, rest = part.partition('\n')
      if i and first in self._names:
        name, part = first, rest
      lines += [(name, line) for line in part.splitlines() if line.strip()]
    for name, line in lines[: max(self._left, 0)]:
      line = ''.join(c if c.isprintable() else ' ' for c in line[:_COLUMNS])  # no codes for the terminal
      sys.stderr.write(f'{name}: {line}\n')  # a whole line, which a progress bar prints above itself
    if len(lines) > self._left >= 0:
      sys.stderr.write(f'rewards: printed more than {_LINES} lines in this step; the others are not shown\n')
    self._left = max(self._left - len(lines), -1)
