"""Streams of packed batches: the only module that imports grain.

Legend: B rows, T tokens per row, W documents per window.

The documents of a run form one endless stream, and each epoch has a new order. Window w has the documents
[w W, (w+1) W) of that stream, and its packed rows are a pure function of w. So a position in the data is (window, row),
which does not depend on batch size, processes or mesh. `shared_rows.py` makes the batches of several processes.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from jaxpost.data import packing as packing_lib
from jaxpost.errors import InputError

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.types import Batch

  PackedRow = list[tuple[int, Example]]  # (row of the data, its Example)

_OVERLONG = ('truncate', 'drop', 'error')
_AHEAD = 2  # batches that are built ahead


def order(
  num_rows: int, seed: int, shuffle: bool = True, sizes: Sequence[int] = (), weights: Sequence[float] = ()
) -> grain.MapDataset:
  """Returns the endless order of documents: entry i is the row of document i.

  Every epoch has each row once, in a new order. With `weights`, the rows are those of several sources in turn, of
  `sizes` rows: each source has an endless order of this kind, and they are interleaved evenly by weight.
  """
  if num_rows < 1:
    raise InputError('the data holds no rows')
  if not weights:
    return _endless(0, num_rows, seed if shuffle else None)
  bounds = np.append(0, np.cumsum(sizes)).tolist()
  spans = zip(bounds, bounds[1:])
  sources = [_endless(start, stop, (seed, n) if shuffle else None) for n, (start, stop) in enumerate(spans)]
  return grain.MapDataset.mix(sources, weights=_shares(weights).tolist())


def _endless(start: int, stop: int, seed: int | tuple[int, int] | None) -> grain.MapDataset:
  rows = grain.MapDataset.range(start, stop)
  if seed is not None:
    # grain adds the epoch to the seed: hash the seed, so that epoch 1 of seed s is not epoch 0 of seed s + 1.
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    if 1 < len(rows) <= 1024:
      from jaxpost.data import few_rows

      return grain.MapDataset.range(sys.maxsize).map(few_rows.endless(start, len(rows), hashed))
    rows = rows.shuffle(seed=hashed)
  return rows.repeat()


def _shares(weights: Sequence[float]) -> np.ndarray:
  return np.asarray(weights, np.float64) / np.sum(weights)


def identity_of_mixture(sizes: Sequence[int], weights: Sequence[float]) -> dict[str, int]:
  """Returns the sizes and weights of a mixture, which a saved position must agree with; {} without weights."""
  if not weights:
    return {}
  shares_ppm = np.rint(_shares(weights) * 1e6).astype(int).tolist()
  return {
    **{f'rows_of_source_{n}': int(size) for n, size in enumerate(sizes)},
    **{f'weight_ppm_of_source_{n}': share for n, share in enumerate(shares_ppm)},
  }


def check_position(state: Mapping[str, Any], identity: Mapping[str, int]) -> None:
  """Raises InputError unless a saved position is of a stream with this identity."""
  for key, value in identity.items():
    if state.get(key) != value:
      raise InputError(
        f'data: the saved position is of {key}={state.get(key)} and this run has {key}={value}; restore the old '
        'value, or start a new run'
      )


@dataclasses.dataclass(eq=False, repr=False)
class PackedStream:
  """An endless iterator of (Batch [B, T], info), resumable at each batch.

  Batches are built ahead in a thread; `state()` is the position after the last batch that was returned.

  info has `tokens` (without padding), `packing_efficiency` (tokens / (B T)), `mean_context` (tokens that a token
  attends to), `documents` (in this batch), `truncated` and `dropped` (of the windows that this batch begins), `epochs`
  (documents of the stream up to the end of this batch / rows) and, with several sources, the documents in it of source
  n from 0, `data/<n>/documents`.

  Attributes:
    examples_fn: row number -> Example, or None for a dropped one; pure, called in the thread.
    seed: of the order.
    shuffle: False keeps the documents in file order.
    window: W; 0 is replaced by as many documents as fill about 64 rows.
    packing: False gives each document a row of its own.
    overlong: what to do with documents above T tokens: 'truncate', 'drop' or 'error'. A document without a trained
      token, truncated or not, is dropped.
    where: row number -> its place, for errors.
    per: how weights are normalized, see `packing.to_batch`.
    sizes, weights: rows and weight of each source, see `order`.
  """

  examples_fn: Callable[[int], Example | None]
  num_rows: int
  _: dataclasses.KW_ONLY
  batch_size: int
  row_length: int
  seed: int
  shuffle: bool = True
  window: int = 0
  packing: bool = True
  overlong: str = 'truncate'
  where: Callable[[int], str] = 'row {}'.format
  per: str = 'token'
  sizes: Sequence[int] = ()
  weights: Sequence[float] = ()

  def __post_init__(self) -> None:
    """Sets the stream to its start."""
    if self.batch_size < 1 or self.row_length < 2:
      raise InputError(f'batch_size={self.batch_size} must be at least 1 and row_length={self.row_length} at least 2')
    self._order = order(self.num_rows, self.seed, self.shuffle, self.sizes, self.weights)
    self._stops = np.cumsum(self.sizes) if len(self.sizes) > 1 else ()
    self.window = self.window or self._choose_window()
    # All that a position (window, row) depends on; `restore` takes its windows, and refuses any other difference.
    self._identity = {
      'num_rows': self.num_rows,
      'row_length': self.row_length,
      'seed': self.seed,
      'shuffle': int(self.shuffle),
      'packing': int(self.packing),
      'overlong': _OVERLONG.index(self.overlong),
      'window_size': self.window,
      **identity_of_mixture(self.sizes, self.weights),
    }
    self._position = (0, 0)
    self._thread: futures.ThreadPoolExecutor | None = None

  def __iter__(self) -> PackedStream:
    return self

  def __next__(self) -> tuple[Batch, dict[str, float]]:
    if self._thread is None:
      self._start()
    try:
      batch, info, self._position = self._ahead.popleft().result()
    except BaseException:  # an error in the data, or an interrupt
      self.close()
      raise
    self._ahead.append(self._thread.submit(next, self._source))
    return batch, info

  def state(self) -> dict[str, int]:
    """Returns the position after the last batch that was returned, and all that it depends on."""
    window, row = self._position
    return {'window': window, 'row': row, **self._identity}

  def restore(self, state: dict[str, int]) -> None:
    """Continues at a position that `state` has returned, with its windows and any batch size."""
    # The size of windows is an estimate from lengths, which a map that draws random numbers changes.
    identity = self._identity | {'window_size': state.get('window_size', self.window)}
    check_position(state, identity)
    self.window, self._identity = identity['window_size'], identity
    self.close()
    self._position = (state['window'], state['row'])

  def close(self) -> None:
    """Stops the thread; the next batch starts it again."""
    if self._thread is not None:
      self._thread.shutdown(cancel_futures=True)
    self._thread = None

  def peek(self) -> Batch:
    """Returns the next batch without moving on."""
    return next(self._batches(*self._position))[0]

  def _start(self) -> None:
    self._source = self._batches(*self._position)
    self._thread = futures.ThreadPoolExecutor(1, 'data')
    self._ahead = collections.deque(self._thread.submit(next, self._source) for _ in range(_AHEAD))

  def _choose_window(self) -> int:
    """Returns the W that fills about 64 rows, estimated from the lengths of the first documents."""
    if not self.packing:
      return min(self.num_rows, 256)
    examples = (self.examples_fn(self._order[i]) for i in range(min(64, self.num_rows)))
    lengths = [len(example.tokens) for example in examples if example]
    mean = float(np.clip(np.mean(lengths), 1, self.row_length)) if lengths else 1.0
    return int(np.clip(64 * self.row_length / mean, 64, 1 << 16))

  def _batches(self, window: int, row: int) -> Iterator[tuple[Batch, dict, tuple[int, int]]]:
    """Yields (batch, info, position after the batch) from a position on."""
    rows: list[PackedRow] = []
    counts = {'truncated': 0, 'dropped': 0}
    unused = 0  # documents read since the last packed row
    while True:
      packed, window_counts = self._packed_window(window)
      if row == 0:
        counts = {name: n + window_counts[name] for name, n in counts.items()}
      unused = 0 if packed else unused + self.window
      if unused >= self.num_rows:
        raise InputError(
          f'data: none of the {self.num_rows} documents has a trained'
          f' token within {self.row_length} tokens; raise row_length, or change data.map if it drops them all'
        )
      while row < len(packed):
        take = self.batch_size - len(rows)
        rows += packed[row : row + take]
        row = min(row + take, len(packed))
        if len(rows) == self.batch_size:
          # The end of a window is the start of the next.
          position = (window, row) if row < len(packed) else (window + 1, 0)
          documents = (window + row / len(packed)) * self.window
          yield self._finish(rows, counts, documents) + (position,)
          rows, counts = [], {'truncated': 0, 'dropped': 0}
      window, row = window + 1, 0

  def _finish(self, rows: list[PackedRow], counts: dict[str, int], documents: float) -> tuple[Batch, dict]:
    """Makes (batch, info) of B rows; `documents` is the number of documents of the stream up to its end."""
    batch, tokens, context = self._build(rows)
    sources = np.searchsorted(self._stops, [number for row in rows for number, _ in row], 'right')
    info = {
      'packing_efficiency': tokens / batch.tokens.size,
      'tokens': tokens,
      'mean_context': context / max(tokens, 1),
      'documents': sum(map(len, rows)),
      'epochs': documents / self.num_rows,
      **counts,
      **{f'data/{n}/documents': int((sources == n).sum()) for n in range(len(self._stops))},
    }
    return batch, info

  def _build(self, rows: list[PackedRow]) -> tuple[Batch, int, float]:
    """Returns the batch of these rows, its number of tokens, and the sum over tokens of those each attends to."""
    examples = [[example for _, example in row] for row in rows]
    batch = packing_lib.to_batch(examples, self.row_length, self.batch_size, per=self.per)
    contexts = (batch.positions + 1)[batch.segment_ids > 0]
    return batch, len(contexts), contexts.sum().item()

  def _packed_window(self, window: int) -> tuple[list[PackedRow], dict[str, int]]:
    """Packs the documents of a window; counts those truncated and those dropped."""
    kept, counts = self._documents(window)
    if not self.packing:
      return [[document] for document in kept], counts
    rows = packing_lib.pack_examples([example for _, example in kept], self.row_length)
    # Packing sorts documents by length, which would bias the batches: shuffle the rows.
    shuffled = np.random.default_rng((self.seed, window)).permutation(len(rows))
    return [[kept[i] for i in rows[r]] for r in shuffled], counts

  def _documents(self, window: int, part: slice = slice(None)) -> tuple[PackedRow, dict[str, int]]:
    """Renders the documents of a window, or a part of them; counts those truncated and those dropped."""
    numbers = [self._order[i] for i in range(window * self.window, (window + 1) * self.window)[part]]
    # Files are read fastest in their own order.
    examples = {row: self.examples_fn(row) for row in sorted(set(numbers))}
    fitted = [(row, self.fitted(row, examples[row])) for row in numbers]
    kept = [(row, example) for row, example in fitted if example is not None]
    truncated = sum(example is not examples[row] for row, example in kept)
    return kept, {'truncated': truncated, 'dropped': len(numbers) - len(kept)}

  def fitted(self, row: int, example: Example | None) -> Example | None:
    """Returns the Example of a row of the data cut to at most T tokens, as it is packed; None if it is dropped."""
    if example is not None and len(example.tokens) > self.row_length:
      if self.overlong == 'error':
        raise InputError(
          f'{self.where(row)}: has {len(example.tokens)} tokens, row_length is {self.row_length}; raise it or set '
          "overlong='truncate' or 'drop'"
        )
      example = example.cut(self.row_length) if self.overlong == 'truncate' else None
    return example if example is not None and example.trained.any() else None
