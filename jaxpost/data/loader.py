"""Streams of packed batches: the only place that imports grain.

B rows, T tokens a row. The documents of a run form one endless stream, in
which each epoch is shuffled anew. Window w is the documents [w W, (w+1) W) of
that stream; its packed rows are a pure function of w. So a position is
(window, row), small and independent of batch size, processes and mesh.
"""

import queue
import threading

import grain
import numpy as np

from jaxpost.data import packing as packing_lib
from jaxpost.errors import InputError

_OVERLONG = ('truncate', 'drop', 'error')


def order(num_rows, seed, shuffle=True):
  """The endless global order: `order(...)[i]` is the row of document i.

  Every epoch holds each row once, in an order of its own.
  """
  if num_rows < 1:
    raise InputError('the data holds no rows')
  rows = grain.MapDataset.range(num_rows)
  if shuffle:
    # grain adds the epoch to the seed; spread, so that the second epoch of
    # one seed is not the first of the next.
    spread = np.random.SeedSequence(seed).generate_state(1)[0]
    rows = rows.shuffle(seed=int(spread))
  return rows.repeat()


class PackedStream:
  """An endless iterator of (Batch [B, T], info), resumable at each batch.

  Batches are built ahead in a thread; `state()` speaks of the batch handed
  out last. info: `packing_efficiency` (real tokens / slots), `tokens` (real),
  `documents`, `truncated`, `dropped` (of the windows this batch opened),
  `epochs` (of documents behind the stream once this batch is used).
  """

  def __init__(
      self, examples_fn, num_rows, *, batch_size, row_length, seed,
      shuffle=True, window=0, packing=True, overlong='truncate', prefetch=2,
      where=None):
    """See the class.

    Args:
      examples_fn: row number -> Example; pure, called in the thread.
      num_rows: rows of the data.
      batch_size: B.
      row_length: T.
      seed: decides the order.
      shuffle: else the documents come in file order.
      window: W documents packed together; 0 chooses about 64 full rows.
      packing: False gives each document a row of its own.
      overlong: what to do with documents above T tokens: 'truncate', 'drop',
        or 'error'. A document left with nothing to train on is dropped.
      prefetch: batches built ahead.
      where: row number -> its place, for errors.
    """
    if overlong not in _OVERLONG:
      raise InputError(
        f'overlong={overlong!r} is none of {", ".join(_OVERLONG)}')
    if batch_size < 1 or row_length < 2:
      raise InputError(
        f'batch_size={batch_size} must be at least 1 and'
        f' row_length={row_length} at least 2')
    self._examples_fn = examples_fn
    self._order = order(num_rows, seed, shuffle)
    self._num_rows = num_rows
    self._batch_size = batch_size
    self._row_length = row_length
    self._packing = packing
    self._overlong = overlong
    self._prefetch = max(prefetch, 1)
    self._where = where or (lambda row: f'row {row}')
    self._window = window or self._choose_window()
    self._seed = seed
    # What gives (window, row) its meaning; a state from another is refused.
    self._meaning = {
      'num_rows': num_rows,
      'row_length': row_length,
      'seed': seed,
      'shuffle': int(shuffle),
      'packing': int(packing),
      'overlong': _OVERLONG.index(overlong),
      'window_size': self._window,
    }
    self._position = (0, 0)
    self._queue = self._thread = self._stopped = None

  def __iter__(self):
    return self

  def __next__(self):
    if self._thread is None:
      self._start()
    made = self._queue.get()
    if isinstance(made, BaseException):
      self.close()
      raise made
    batch, info, self._position = made
    return batch, info

  def state(self):
    """Where the stream stands after the last batch handed out: ints only."""
    window, row = self._position
    return {'window': window, 'row': row, **self._meaning}

  def restore(self, state):
    """Go on after the batch that `state` was taken at, in any batch size."""
    for key, mine in self._meaning.items():
      if state.get(key) != mine:
        raise InputError(
          f'data: the saved position is of {key}={state.get(key)} and this'
          f' run has {key}={mine}; go back to that, or start a new run')
    self.close()
    self._position = (state['window'], state['row'])

  def close(self):
    """Stop the thread; the next batch starts it again."""
    if self._thread is None:
      return
    self._stopped.set()
    while self._thread.is_alive():
      # It may wait for room in the queue.
      try:
        self._queue.get(timeout=0.01)
      except queue.Empty:
        pass
    self._queue = self._thread = self._stopped = None

  def _start(self):
    self._queue = queue.Queue(self._prefetch)
    self._stopped = threading.Event()
    self._thread = threading.Thread(
      target=_fill,
      daemon=True,
      name='data',
      args=(self._batches(*self._position), self._queue, self._stopped),
    )
    self._thread.start()

  def _choose_window(self):
    if not self._packing:
      return min(self._num_rows, 256)
    some = [
      len(self._examples_fn(self._order[i]).tokens)
      for i in range(min(64, self._num_rows))
    ]
    mean = min(max(np.mean(some), 1), self._row_length)
    return int(np.clip(64 * self._row_length / mean, 64, 1 << 16))

  def _batches(self, window, row):
    """Yields (batch, info, position after it) from a position on."""
    rows, counts = [], {'truncated': 0, 'dropped': 0}
    barren = 0  # documents read since a row came out
    while True:
      packed, in_window = self._packed_window(window)
      if row == 0:
        counts = {k: n + in_window[k] for k, n in counts.items()}
      barren = 0 if packed else barren + self._window
      if barren >= self._num_rows:
        raise InputError(
          f'data: none of the {self._num_rows} documents has a trained'
          f' token within {self._row_length} tokens; raise row_length')
      while row < len(packed):
        take = self._batch_size - len(rows)
        rows += packed[row : row + take]
        row = min(row + take, len(packed))
        if len(rows) == self._batch_size:
          # The end of a window is the begin of the next.
          position = (window, row) if row < len(packed) else (window + 1, 0)
          share = row / len(packed)
          documents = (window + share) * self._window
          yield self._finish(rows, counts, documents) + (position,)
          rows, counts = [], {'truncated': 0, 'dropped': 0}
      window, row = window + 1, 0

  def _finish(self, rows, counts, documents):
    batch = packing_lib.to_batch(rows, self._row_length, self._batch_size)
    real = int((batch.segment_ids > 0).sum())
    info = {
      'packing_efficiency': real / batch.tokens.size,
      'tokens': real,
      'documents': sum(map(len, rows)),
      'epochs': documents / self._num_rows,
      **counts,
    }
    return batch, info

  def _packed_window(self, window):
    """The rows (lists of Examples) of a window, and what was cut or left."""
    kept, counts = [], {'truncated': 0, 'dropped': 0}
    for i in range(window * self._window, (window + 1) * self._window):
      row = self._order[i]
      example = self._examples_fn(row)
      length = len(example.tokens)
      if length > self._row_length:
        if self._overlong == 'error':
          raise InputError(
            f'{self._where(row)}: has {length} tokens, row_length is'
            f" {self._row_length}; raise it or set overlong='truncate' or"
            " 'drop'")
        if self._overlong == 'drop':
          counts['dropped'] += 1
          continue
        example = type(example)(
          example.tokens[: self._row_length],
          example.loss_mask[: self._row_length],
        )
      if not example.loss_mask[1:].any():
        counts['dropped'] += 1
        continue
      counts['truncated'] += length > self._row_length
      kept.append(example)
    if not self._packing:
      return [[example] for example in kept], counts
    lengths = [len(example.tokens) for example in kept]
    rows = packing_lib.pack(lengths, self._row_length)
    # Packing sorts by length; training must not.
    mixed = np.random.default_rng((self._seed, window)).permutation(len(rows))
    return [[kept[i] for i in rows[r]] for r in mixed], counts


def _fill(batches, out, stopped):
  """Thread: put batches into the queue until told to stop."""
  try:
    for made in batches:
      if not _put(out, made, stopped):
        return
  except BaseException as error:  # re-raised where the batch is awaited
    _put(out, error, stopped)


def _put(out, item, stopped):
  while not stopped.is_set():
    try:
      out.put(item, timeout=0.1)
      return True
    except queue.Full:
      pass
  return False


def eval_batches(examples, batch_size, row_length):
  """Each example once, as a list of Batches [batch_size, row_length].

  The last batch is filled with empty rows. `loss_weights` hold the plain
  mask (0 or 1), so that sums over batches can be divided by the whole count.
  Examples above `row_length` are cut to it, and count nothing where only
  their prompt is left.
  """
  cut = [
    type(e)(e.tokens[:row_length], e.loss_mask[:row_length]) for e in examples
  ]
  if not any(e.loss_mask[1:].any() for e in cut):
    raise InputError(
      f'evaluation: none of the {len(cut)} documents has a trained token'
      f' within {row_length} tokens')
  rows = packing_lib.pack([len(e.tokens) for e in cut], row_length)
  filled = [[cut[i] for i in row] for row in rows]
  return [
    packing_lib.to_batch(
      filled[n : n + batch_size], row_length, batch_size, normalise=False)
    for n in range(0, len(filled), batch_size)
  ]
