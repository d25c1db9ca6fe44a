"""The batches of `loader.PackedStream` on several processes.

Each process renders its share of the documents of some windows, and the processes exchange `Facts` about them, which
suffice to pack all documents and to normalize weights. So all processes pack in the same way, and each then renders and
builds only the rows of its own devices.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxpost.data import loader, packing
from jaxpost.distributed.channel import Channel, seconds_waited
from jaxpost.errors import InputError

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.types import Batch

_WINDOW_ROWS = 64  # approximate number of rows of a window


class Facts(NamedTuple):
  """The figures of a document that all processes know; they can be packed like an Example."""

  length: int
  context: float  # sum over its tokens of the number of tokens that each attends to
  totals: tuple[float, float, float]  # see `packing.weight_totals`

  @property
  def tokens(self) -> range:
    """A placeholder of the right length: packing reads only the number of tokens."""
    return range(self.length)


def facts_of(example: Example, per: str) -> Facts:
  """Returns the facts of a document; `per` is that of `packing.to_batch`."""
  length = len(example.tokens)
  context = length * (length + 1) / 2 if example.positions is None else float((example.positions + 1.0).sum())
  return Facts(length, context, packing.weight_totals(example, per))


class SharedStream(loader.PackedStream):
  """A PackedStream whose work is shared by all processes.

  It yields the same batches, with zeros in the rows that a process does not need.
  """

  def __init__(self, stream: loader.PackedStream, like: Batch, place: Callable[[Batch], Batch]):
    """Continues at the position of `stream`, which is the same on all processes.

    Args:
      like: a batch of the stream, for its fields.
      place: puts a batch on the devices, which determines the rows that this process needs.
    """
    stream.close()
    vars(self).update(vars(stream))
    numbers = np.arange(1, len(like.tokens) + 1, dtype=np.int32)[:, None]  # 0 is padding
    placed = place(dataclasses.replace(like, tokens=np.broadcast_to(numbers, like.tokens.shape))).tokens
    self._local_rows = {int(n) - 1 for shard in placed.addressable_shards for n in np.unique(shard.data) if n}
    self._like = like
    self._windows_per_exchange = max(1, self.batch_size // _WINDOW_ROWS)  # about one exchange per batch
    self._channel: Channel | None = None
    self._known: dict[int, tuple[list, dict]] = {}  # window -> [(row of the data, Facts)] and counts
    self._rendered: dict[int, Example] = {}  # row of the data -> the Example that this process has rendered

  def __next__(self) -> tuple[Batch, dict[str, float]]:
    start, before = time.perf_counter(), self._channel.waited if self._thread else 0.0
    batch_and_info = super().__next__()
    # Count only the part of this call's waiting in which the thread waited for other processes.
    seconds_waited(min(time.perf_counter() - start, self._channel.waited - before))
    return batch_and_info

  def close(self) -> None:
    if self._channel is not None:
      self._channel.closed.set()
    super().close()

  def _start(self) -> None:
    self._channel, self._known = Channel(), {}
    super()._start()

  def _documents(self, window: int, part: slice = slice(None)) -> tuple[list, dict[str, int]]:
    """Returns [(row of the data, Facts)] of a window, and its counts; later windows are measured at the same time."""
    del part
    if window not in self._known:
      windows = range(window, window + self._windows_per_exchange)
      by_process = [json.loads(line) for line in self._channel.join(self._measure(windows)).splitlines()]
      self._known = {w: self._joined([parts[n] for parts in by_process]) for n, w in enumerate(windows)}
    return self._known[window]

  def _measure(self, windows: range) -> bytes:
    """Renders this process's share of each window, and returns its facts and counts as a line of JSON."""
    index, count = self._channel.index, self._channel.count
    share = slice(self.window * index // count, self.window * (index + 1) // count)
    rendered = [super(SharedStream, self)._documents(window, share) for window in windows]
    self._rendered = {number: example for kept, _ in rendered for number, example in kept}
    measured = []
    for kept, counts in rendered:
      measured.append(([(int(number), *facts_of(example, self.per)) for number, example in kept], counts))
    return json.dumps(measured).encode() + b'\n'

  def _joined(self, parts: list) -> tuple[list, dict[str, int]]:
    kept = [(number, Facts(*facts)) for measured, _ in parts for number, *facts in measured]
    return kept, {key: sum(counts[key] for _, counts in parts) for key in parts[0][1]}

  def _build(self, rows: list) -> tuple[Batch, int, float]:
    """Returns the batch, with the rows of this process, and the figures of all rows."""
    local_rows = [row if n in self._local_rows else [] for n, row in enumerate(rows)]
    lengths = {number: facts.length for row in local_rows for number, facts in row}
    examples = {number: self._render(number, lengths[number]) for number in sorted(lengths)}
    facts = [facts for row in rows for _, facts in row]
    packed = [[examples[number] for number, _ in row] for row in local_rows]
    totals = [f.totals for f in facts]
    batch = self._completed(packing.to_batch(packed, self.row_length, self.batch_size, self.per, totals=totals))
    return batch, sum(f.length for f in facts), sum(f.context for f in facts)

  def _render(self, number: int, length: int) -> Example:
    example = self.fitted(number, self._rendered.get(number) or self.examples_fn(number))
    if example is None or len(example.tokens) != length:
      here = len(example.tokens) if example is not None else 0
      raise InputError(
        f'{self.where(number)}: has {here} tokens here and {length} on another process; give all processes the same '
        'files'
      )
    return example

  def _completed(self, batch: Batch) -> Batch:
    """Returns the batch with all fields of the first batch."""
    zeros = jax.tree.map(np.zeros_like, self._like)
    fields: dict[str, Any] = {n: x for n, x in vars(batch).items() if isinstance(x, np.ndarray)}
    unknown = sorted({n for n in fields if vars(zeros)[n] is None} | (set(batch.arrays) - set(zeros.arrays)))
    if unknown:
      raise InputError(
        f'data: rows of this batch have {", ".join(unknown)}, which the first batch does not have; with several '
        'processes, all rows need the same columns'
      )
    return zeros.replace(arrays=zeros.arrays | batch.arrays, **fields)
