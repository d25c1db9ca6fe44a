"""The batches of `loader.PackedStream` on several processes.

Each process renders its share of the documents of some windows, and all tell each other the facts of theirs: enough to
pack all documents, and to divide weights. So all pack alike, and each renders again and builds only the rows of its own
devices.
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

_WINDOW_ROWS = 64  # rows of a window, about


class Facts(NamedTuple):
  """The facts of a document that all processes know; they are packed like an Example."""

  length: int
  context: float  # how many tokens each of its tokens attends to, summed
  totals: tuple[float, float, float]  # see `count_totals`

  @property
  def tokens(self) -> range:
    """Stands for the tokens, of which only the number counts."""
    return range(self.length)


def facts_of(example: Example, per: str) -> Facts:
  """Returns the facts of a document; `per` is that of `packing.to_batch`."""
  length = len(example.tokens)
  context = length * (length + 1) / 2 if example.positions is None else float((example.positions + 1.0).sum())
  return Facts(length, context, count_totals(example, per))


def count_totals(example: Example, per: str) -> tuple[float, float, float]:
  """Returns what an Example adds to the totals by which `packing.to_batch` divides weights.

  The first is that of `loss_weights`; the others are of `nll_weights`, or of the two kinds of labels.
  """
  mask = np.where(example.trained, example.loss_mask, 0)
  if per == 'token':
    return float(mask.sum(dtype=np.float64)), 0.0, 0.0
  ids = np.ones(len(mask), np.int32) if example.sequence_ids is None else example.sequence_ids
  trained = (mask > 0) & (ids > 0)

  def count(numbers: np.ndarray) -> float:
    return float(len(np.unique(numbers)))

  if per == 'pair':
    return count((ids[trained] - 1) // 2), float(mask[ids % 2 == 1].sum(dtype=np.float64)), 0.0
  label = example.arrays['label'] if per == 'label' else np.zeros(len(mask))
  return count(ids[trained]), count(ids[trained & (label > 0)]), count(ids[trained & (label < 0)])


class SharedStream(loader.PackedStream):
  """A stream whose work all processes share; it gives each of them the batches of a PackedStream.

  Rows that a process does not need are zeros.
  """

  def __init__(self, stream: loader.PackedStream, like: Batch, place: Callable[[Batch], Batch]):
    """Goes on where `stream` is.

    Args:
      stream: what it replaces, equal on all processes.
      like: a batch of the stream, for its fields.
      place: puts a batch on the devices, which decides the rows that this process needs.
    """
    stream.close()
    vars(self).update(vars(stream))
    numbers = np.arange(1, len(like.tokens) + 1, dtype=np.int32)[:, None]  # 0 is padding
    placed = place(dataclasses.replace(like, tokens=np.broadcast_to(numbers, like.tokens.shape))).tokens
    self._own = {int(n) - 1 for shard in placed.addressable_shards for n in np.unique(shard.data) if n}
    self._like = like
    self._together = max(1, self._batch_size // _WINDOW_ROWS)  # windows, so that processes meet about once a batch
    self._channel: Channel | None = None
    self._known: dict[int, tuple[list, dict]] = {}  # window -> [(row of the data, Facts)] and counts
    self._made: dict[int, Example] = {}  # those that were rendered here

  def __next__(self) -> tuple[Batch, dict[str, float]]:
    start, before = time.perf_counter(), self._channel.waited if self._thread else 0.0
    made = super().__next__()
    # What the thread waited for other processes, of the time without a batch, is their time and not this host's.
    seconds_waited(min(time.perf_counter() - start, self._channel.waited - before))
    return made

  def close(self) -> None:
    """Stops the thread; the next batch starts it again."""
    if self._channel is not None:
      self._channel.closed.set()
    super().close()

  def _start(self) -> None:
    self._channel, self._known = Channel(), {}
    super()._start()

  def _documents(self, window: int, part: slice = slice(None)) -> tuple[list, dict[str, int]]:
    """Returns [(row of the data, Facts)] of a window, and its counts; other windows are measured with it."""
    del part
    if window not in self._known:
      windows = range(window, window + self._together)
      said = [json.loads(line) for line in self._channel.join(self._measure(windows)).splitlines()]
      self._known = {w: self._joined([one[n] for one in said]) for n, w in enumerate(windows)}
    return self._known[window]

  def _measure(self, windows: range) -> bytes:
    """Renders the share of this process of each window, and returns its facts and counts as a line of JSON."""
    index, count = self._channel.index, self._channel.count
    share = slice(self._window * index // count, self._window * (index + 1) // count)
    read = [super(SharedStream, self)._documents(window, share) for window in windows]
    self._made = {number: example for kept, _ in read for number, example in kept}
    measured = [([(int(number), *facts_of(example, self._per)) for number, example in kept], n) for kept, n in read]
    return json.dumps(measured).encode() + b'\n'

  def _joined(self, parts: list) -> tuple[list, dict[str, int]]:
    kept = [(number, Facts(*facts)) for known, _ in parts for number, *facts in known]
    return kept, {key: sum(counts[key] for _, counts in parts) for key in parts[0][1]}

  def _build(self, rows: list) -> tuple[Batch, int, float]:
    """Returns the batch, with the rows of this process, and the figures of all rows."""
    own = [row if n in self._own else [] for n, row in enumerate(rows)]
    needed = {number: facts.length for row in own for number, facts in row}
    made = {number: self._again(number, needed[number]) for number in sorted(needed)}
    examples = [[made[number] for number, _ in row] for row in own]
    found = jax.tree.map(np.zeros_like, self._like)
    if self._own:
      found = packing.to_batch(examples, self._row_length, self._batch_size, normalize=False, per=self._per)
    facts = [facts for row in rows for _, facts in row]
    batch = self._divided(found, np.sum([f.totals for f in facts], axis=0))
    return batch, sum(f.length for f in facts), sum(f.context for f in facts)

  def _again(self, number: int, length: int) -> Example:
    example = self.fitted(number, self._made.get(number) or self._examples_fn(number))
    if example is None or len(example.tokens) != length:
      here = len(example.tokens) if example is not None else 0
      raise InputError(
        f'{self._where(number)}: has {here} tokens here and {length} on another process; give all processes the same '
        'files'
      )
    return example

  def _divided(self, batch: Batch, totals: np.ndarray) -> Batch:
    """Returns the batch with all fields of the others, and its masks divided by the totals of all rows."""
    fields: dict[str, Any] = {n: np.zeros_like(x) for n, x in vars(self._like).items() if isinstance(x, np.ndarray)}
    arrays = {n: np.zeros_like(x) for n, x in self._like.arrays.items()}
    mine = {n: x for n, x in vars(batch).items() if isinstance(x, np.ndarray)}
    new = sorted((set(mine) - set(fields)) | (set(batch.arrays) - set(arrays)))
    if new:
      raise InputError(
        f'data: rows of this batch have {", ".join(new)}, which the first batch does not have; where several processes '
        'share the work, all rows need the same columns'
      )
    fields, arrays = fields | mine, arrays | batch.arrays
    fields['loss_weights'] = packing.divided(batch.loss_weights, totals[0])
    if self._per == 'pair':
      arrays['nll_weights'] = packing.divided(arrays['nll_weights'], totals[1])
    if self._per == 'label':
      sides = (arrays['label'] > 0, totals[1]), (arrays['label'] < 0, totals[2])
      arrays['label_weights'] = sum(packing.divided(np.where(side, arrays['label_weights'], 0), n) for side, n in sides)
    return dataclasses.replace(batch, arrays=arrays, **fields)
