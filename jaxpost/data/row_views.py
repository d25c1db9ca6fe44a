"""Views of rows, with the attributes of `sources.Rows`: concatenated sources, rows read on access, the first rows."""

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxpost.errors import InputError

Row = dict[str, Any]


class Chain:
  """The rows of several sources, one source after the other."""

  def __init__(self, name: str, parts: Sequence[Any], weights: Iterable[float] = (), streaming: bool = False):
    self.name = name
    self.weights = tuple(weights)
    self.streaming = streaming
    self.sizes = tuple(len(part) for part in parts)
    self.dropped = sum(part.dropped for part in parts)
    self._parts = parts
    self._starts = [0, *itertools.accumulate(self.sizes)]

  def __len__(self) -> int:
    return self._starts[-1]

  def __getitem__(self, i: int) -> Row | None:
    part, n = self._find(i)
    return part[n]

  def where(self, i: int) -> str:
    part, n = self._find(i)
    return part.where(n)

  def _find(self, i: int) -> tuple[Any, int]:
    """Returns the source of a row, and its number there."""
    number = range(len(self))[i]
    part = bisect.bisect_right(self._starts, number) - 1
    return self._parts[part], number - self._starts[part]


class Lazy(Chain):
  """The rows of the files of one source, each read on access and passed through `prepare`, which may drop it."""

  def __init__(self, name: str, opened: Sequence[Any], prepare: Callable[[Any, str], Row | None]):
    super().__init__(name, opened, streaming=True)
    self.sizes = (len(self),)  # the files are one source
    self._prepare = prepare

  def __getitem__(self, i: int) -> Row | None:
    return self._prepare(super().__getitem__(i), self.where(i))


class First:
  """The first rows of a source, or of each source of a mixture in proportion to its size."""

  def __init__(self, rows: Any, count: int):
    """Takes `count` rows, fewer than there are."""
    self.name = rows.name
    self.weights = rows.weights
    self.streaming = rows.streaming
    self.dropped = rows.dropped
    starts = [0, *itertools.accumulate(rows.sizes)]
    ends = [count * stop // len(rows) for stop in starts]  # cumulative sizes of what remains of the sources
    self.sizes = tuple(stop - start for start, stop in zip(ends, ends[1:]))
    if rows.weights and not all(self.sizes):
      raise InputError(f'data: {count} samples of {rows.name} leave a source without rows; raise data.max_samples')
    self._rows, self._starts, self._stops = rows, starts, ends[1:]

  def __len__(self) -> int:
    return self._stops[-1]

  def __getitem__(self, i: int) -> Row | None:
    return self._rows[self._place(i)]

  def where(self, i: int) -> str:
    return self._rows.where(self._place(i))

  def _place(self, i: int) -> int:
    """Returns the number of a row in all rows."""
    number = range(len(self))[i]
    part = bisect.bisect_right(self._stops, number)
    return self._starts[part] + number - (self._stops[part - 1] if part else 0)
