"""Packs documents into rows of one length.

Legend: B rows, T tokens per row (`row_length`). Documents are never cut or joined: each has one or several segments of
its own, and positions that start at 0.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost import types

if TYPE_CHECKING:
  from jaxpost.data.examples import Example

  Place = tuple[int, slice]  # row of a batch, and the tokens of an Example in it
  Totals = tuple[float, float, float]  # see `weight_totals`

PER = ('token', 'sequence', 'pair', 'label')


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
  """Distributes Examples of these lengths over rows by best-fit decreasing; returns the indices in each row.

  The longest Example comes first, and each goes into the fullest row that still has room for it. Documents of 180
  tokens on average (log-normal) fill 99 % of rows of 2,048 tokens.
  """
  order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
  rows: list[list[int]] = []
  free: list[tuple[int, int]] = []  # (room left, row), ascending
  for i in order:
    if lengths[i] > row_length:
      raise ValueError(f'Example {i}: {lengths[i]} tokens; a row takes {row_length}')
    best = bisect.bisect_left(free, (lengths[i], -1))  # of the rows with enough room, the one with the least
    if best == len(free):
      room, row = row_length, len(rows)
      rows.append([])
    else:
      room, row = free.pop(best)
    rows[row].append(i)
    bisect.insort(free, (room - lengths[i], row))
  return rows


def pack_examples(examples: Sequence[Example], row_length: int) -> list[list[int]]:
  """Distributes Examples over rows, as `pack` does."""
  return pack([len(e.tokens) for e in examples], row_length)


def to_batch(
  rows: Sequence[Sequence[Example]],
  row_length: int,
  num_rows: int,
  per: str = 'token',
  totals: Sequence[Totals] | None = None,
) -> types.Batch:
  """Makes a Batch [num_rows, row_length] of numpy arrays from rows of Examples.

  Args:
    rows: the Examples of each row, at most `num_rows` rows; missing rows are empty. All Examples have the same
      `arrays`.
    per: what the loss masks are divided by. 'token': the weight of all trained tokens. 'sequence': the number of
      trained sequences, where a document without sequence_ids counts as one. 'pair': the number of trained pairs;
      arrays['nll_weights'] then holds the mask of the chosen (odd) sequences, divided by its sum. 'label': as
      'sequence'; arrays['label_weights'] then holds the masks of the sequences with arrays['label'] > 0 and < 0, each
      divided by its number of sequences.
    totals: `weight_totals` of all documents of the batch, if others have some of them; (): masks are not divided.

  Returns:
    The Batch. `branch_ids` and `sequence_ids` are None if no Example has them. `arrays` are float32, or int32 if the
    Examples hold integers.
  """
  if per not in PER:
    raise ValueError(f'per={per!r} is none of {", ".join(PER)}')
  shape = num_rows, row_length
  examples = [example for row in rows for example in row]
  optional = [n for n in ('branch_ids', 'sequence_ids') if any(vars(e)[n] is not None for e in examples)]
  fields: dict[str, Any] = {n: np.zeros(shape, np.int32) for n in ('tokens', 'positions', 'segment_ids', *optional)}
  mask = np.zeros(shape, np.float32)
  arrays = _empty_arrays(examples, shape)
  chosen = np.zeros(shape, np.float32)
  for r, row in enumerate(rows):
    start = 0
    for example in row:
      place = r, slice(start, start + len(example.tokens))
      _fill(fields, place, example)
      mask[place] = np.where(example.trained, example.loss_mask, 0)
      chosen[place] = np.where(_sequence_ids(example) % 2 == 1, mask[place], 0)
      for name, array in example.arrays.items():
        arrays[name][place] = array
      start = place[1].stop
  totals = [weight_totals(example, per) for example in examples] if totals is None else totals
  of_loss, of_first, of_second = np.sum([(0.0, 0.0, 0.0), *totals], axis=0)
  if per == 'pair':
    arrays['nll_weights'] = _divided(chosen, of_first)
  if per == 'label':  # an array of the documents, if there are any
    good, bad = (np.where(sign * arrays.get('label', mask) > 0, mask, 0) for sign in (1, -1))
    arrays['label_weights'] = _divided(good, of_first) + _divided(bad, of_second)
  return types.Batch(**fields, loss_weights=_divided(mask, of_loss), arrays=arrays)


def _fill(fields: dict[str, np.ndarray], place: Place, example: Example) -> None:
  """Writes the fields of one Example; its ids continue those of the documents before it in the row."""
  row, length = place[0], len(example.tokens)
  fields['tokens'][place] = example.tokens
  fields['positions'][place] = np.arange(length) if example.positions is None else example.positions
  ids = 1 if example.segment_ids is None else example.segment_ids
  fields['segment_ids'][place] = fields['segment_ids'][row].max() + ids
  if example.branch_ids is not None:
    fields['branch_ids'][place] = example.branch_ids
  sequences = example.sequence_ids
  if sequences is not None:
    last = fields['sequence_ids'][row].max()
    # The chosen sequence of a pair has an odd id, so the ids of a pair start after an even number.
    last += last % 2 if sequences.max(initial=0) > 1 else 0
    fields['sequence_ids'][place] = np.where(sequences > 0, last + sequences, 0)


def _sequence_ids(example: Example) -> np.ndarray:
  """Returns the sequence [T] of each token, 0 for none; a document without ids is one sequence."""
  return np.ones(len(example.tokens), np.int32) if example.sequence_ids is None else example.sequence_ids


def _empty_arrays(examples: Sequence[Example], shape: tuple[int, int]) -> dict[str, np.ndarray]:
  """Returns zeros [B, T, ...] for each of the `arrays` of the Examples."""
  if not examples:
    return {}
  names = sorted(examples[0].arrays)
  for example in examples:
    if sorted(example.arrays) != names:
      raise ValueError(f'documents of one batch have different arrays: {names} and {sorted(example.arrays)}')
  out = {}
  for name in names:
    array = examples[0].arrays[name]
    kind = np.int32 if np.issubdtype(array.dtype, np.integer) else np.float32
    out[name] = np.zeros(shape + array.shape[1:], kind)
  return out


def weight_totals(example: Example, per: str) -> Totals:
  """Returns what an Example adds to the totals by which `to_batch` divides the masks of a batch.

  The first is for `loss_weights`; the second is for `nll_weights`, or both others are for the labels > 0 and < 0.
  """
  mask = np.where(example.trained, example.loss_mask, 0)
  if per == 'token':
    return mask.sum(dtype=np.float64), 0, 0
  ids = _sequence_ids(example)
  trained = (mask > 0) & (ids > 0)
  if per == 'pair':
    return len(np.unique((ids[trained] - 1) // 2)), mask[ids % 2 == 1].sum(dtype=np.float64), 0
  label = example.arrays['label'] if per == 'label' else np.zeros(len(mask))
  of_all, good, bad = (len(np.unique(ids[trained & part])) for part in (True, label > 0, label < 0))
  return of_all, good, bad


def _divided(mask: np.ndarray, total: float) -> np.ndarray:
  """Returns the mask [B, T] divided by `total`, as float32; the mask itself if `total` is 0."""
  return (mask / total).astype(np.float32) if total else mask
