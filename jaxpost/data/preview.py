"""What the model will see: examples as coloured text, for a terminal.

Trained tokens are green, of a rejected answer red, others dim; what is only
scored (KTO's mismatched answers) is yellow. Branches begin on lines of their
own. The last line says how much of the rows packing fills.
"""

import numpy as np
from rich import table, text

from jaxpost.data import packing

_MAX_TOKENS = 512  # of each example
_STYLES = ('dim', 'green', 'red', 'yellow')


def preview(examples, tokenizer, row_length=0):
  """Rich renderables: each example, then a table of lengths.

  Args:
    examples: a list of Examples.
    tokenizer: the `Tokenizer` that made them.
    row_length: T; 0 leaves out the packing figure.
  """
  shown = [_coloured(e, tokenizer) for e in examples]
  return [*shown, _summary(examples, row_length)]


def _coloured(example, tokenizer):
  length = len(example.tokens)
  trained = int(example.trained.sum())
  out = text.Text()
  out.append(f'{length} tokens, {trained} trained\n', 'bold')
  tokens, styles = example.tokens[:_MAX_TOKENS], _styles(example)[:_MAX_TOKENS]
  parts = _parts(example)[:_MAX_TOKENS]
  # Runs, not tokens, are decoded: a character may span several tokens.
  ends = np.diff(styles) | np.diff(parts)
  cuts = [0, *(np.flatnonzero(ends) + 1).tolist(), len(tokens)]
  for a, b in zip(cuts, cuts[1:]):
    if a and parts[a] != parts[a - 1]:
      out.append(f'\n[answer {parts[a]}] ', 'bold')
    if a < b:
      part = tokenizer.decode(tokens[a:b], skip_special=False)
      out.append(part, _STYLES[styles[a]])
  if length > _MAX_TOKENS:
    out.append(f' ... {length - _MAX_TOKENS} more tokens', 'italic')
  if example.arrays:
    out.append('\n' + ', '.join(_values(example)), 'italic')
  return out


def _styles(example):
  """[T] index into _STYLES."""
  mask = np.asarray(example.loss_mask) > 0
  if example.sequence_ids is None:
    return mask.astype(int)
  ids = example.sequence_ids
  second = (ids > 0) & (ids % 2 == 0)
  # Where nothing of a sequence is trained, all of it is only scored.
  idle = (ids > 0) & ~np.isin(ids, ids[mask])
  return np.where(idle, 3, np.where(mask, 1 + second, 0))


def _parts(example):
  """[T] the answer that a token belongs to: its branch, or its segment."""
  for ids in example.branch_ids, example.segment_ids:
    if ids is not None:
      return ids
  return np.zeros(len(example.tokens), int)


def _values(example):
  """'label 1 0 0': what the arrays hold of the trained tokens, if few."""
  for name, array in example.arrays.items():
    if array.ndim == 1:
      found = [f'{v:g}' for v in array[example.loss_mask > 0].tolist()]
      if len(found) > 8:
        found = list(dict.fromkeys(found))[:8]
      yield ' '.join([name, *found])


def _summary(examples, row_length):
  lengths = np.array([len(e.tokens) for e in examples])
  trained = np.array([int(e.trained.sum()) for e in examples])
  out = table.Table('', 'min', 'median', 'max', 'total')
  for name, of in (('tokens', lengths), ('trained', trained)):
    out.add_row(name, str(of.min()), f'{np.median(of):.0f}', str(of.max()), str(of.sum()))
  if row_length:
    cut = np.minimum(lengths, row_length).tolist()
    rows = packing.pack(cut, row_length)
    fill = sum(cut) / (len(rows) * row_length)
    out.caption = f'{len(rows)} rows of {row_length}, {fill:.1%} filled, {int((lengths > row_length).sum())} over-long'
  return out
