"""Shows examples as a model sees them: colored text for a terminal.

Trained tokens are green, those of a rejected answer red, those that are only scored (KTO's mismatched answers) yellow,
and others dim. Each branch begins on a new line. The last line says how much of the rows packing fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import table, text

from jaxpost.data import packing

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.data.tokenizer import Tokenizer

_MAX_TOKENS = 512  # shown of each example
_STYLES = ('dim', 'green', 'red', 'yellow')
_MARKS = {'green': '«»', 'red': '«»', 'yellow': '‹›'}  # of these styles, for consoles without colors


def preview(examples: Sequence[Example], tokenizer: Tokenizer, row_length: int = 0, drop: bool = False) -> list[Any]:
  """Returns rich renderables: each example, then a table of lengths.

  Args:
    examples: the examples to show.
    tokenizer: the tokenizer that encoded them.
    row_length: tokens of a row; 0 leaves out the packing figure.
    drop: whether examples above the row length are left out, as with `data.overlong='drop'`; otherwise they are cut.
  """
  return [*(_colored(e, tokenizer) for e in examples), _summary(examples, row_length, drop)]


def marked(colored: text.Text) -> str:
  """Returns a text for a console without colors: «trained» and ‹only scored› tokens are between marks."""
  out = colored.plain
  for span in reversed(colored.spans):
    if marks := _MARKS.get(str(span.style)):
      out = f'{out[: span.start]}{marks[0]}{out[span.start : span.end]}{marks[1]}{out[span.end :]}'
  return out


def _colored(example: Example, tokenizer: Tokenizer) -> text.Text:
  length = len(example.tokens)
  trained = int(example.trained.sum())
  out = text.Text()
  out.append(f'{length} tokens, {trained} trained\n', 'bold')
  tokens = example.tokens[:_MAX_TOKENS]
  styles = _styles(example)[:_MAX_TOKENS]
  parts = _parts(example)[:_MAX_TOKENS]
  # Decode runs of tokens with one style: a character may span several tokens.
  changes = np.diff(styles) | np.diff(parts)
  cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(tokens)]
  for a, b in zip(cuts, cuts[1:]):
    if a and parts[a] != parts[a - 1]:
      out.append(f'\n[answer {parts[a]}] ', 'bold')
    if a < b:
      part = tokenizer.decode(tokens[a:b].tolist(), skip_special=False)
      out.append(part, _STYLES[styles[a]])
  if length > _MAX_TOKENS:
    out.append(f' ... {length - _MAX_TOKENS} more tokens', 'italic')
  if example.arrays:
    out.append('\n' + ', '.join(_values(example)), 'italic')
  return out


def _styles(example: Example) -> np.ndarray:
  """Returns [T] indices into _STYLES."""
  mask = np.asarray(example.loss_mask) > 0
  if example.sequence_ids is None:
    return mask.astype(int)
  ids = example.sequence_ids
  is_rejected = (ids > 0) & (ids % 2 == 0)
  only_scored = (ids > 0) & ~np.isin(ids, ids[mask])  # sequences without a trained token
  return np.where(only_scored, 3, np.where(mask, 1 + is_rejected, 0))


def _parts(example: Example) -> np.ndarray:
  """Returns [T] the number of the answer that each token belongs to: its branch, or its segment."""
  for ids in example.branch_ids, example.segment_ids:
    if ids is not None:
      return ids
  return np.zeros(len(example.tokens), int)


def _values(example: Example) -> Iterator[str]:
  """Yields the values of each array on the trained tokens, such as 'label 1 0 0': all, or up to 8 different ones."""
  for name, array in example.arrays.items():
    if array.ndim == 1:
      values = [f'{v:g}' for v in array[example.loss_mask > 0].tolist()]
      if len(values) > 8:
        values = list(dict.fromkeys(values))[:8]
      yield ' '.join([name, *values])


def _summary(examples: Sequence[Example], row_length: int, drop: bool) -> table.Table:
  lengths = np.array([len(e.tokens) for e in examples])
  trained = np.array([int(e.trained.sum()) for e in examples])
  out = table.Table('', 'min', 'median', 'max', 'total')
  for name, counts in (('tokens', lengths), ('trained', trained)):
    out.add_row(name, str(counts.min()), f'{np.median(counts):.0f}', str(counts.max()), str(counts.sum()))
  if row_length:
    fitted = [e.cut(row_length) for e in examples if not drop or len(e.tokens) <= row_length]
    kept = [len(e.tokens) for e in fitted if e is not None and e.trained.any()]
    rows = packing.pack(kept, row_length)
    fill = sum(kept) / max(len(rows) * row_length, 1)
    out.caption = f'{len(rows)} row{"s" if len(rows) != 1 else ""} of {row_length}, {fill:.1%} filled'
    out.caption += f', {(lengths > row_length).sum()} over-long, {len(examples) - len(kept)} left out'
  return out
