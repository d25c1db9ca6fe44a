"""What the model will see: examples as coloured text, for a terminal.

Trained tokens are green, the others dim; the last line says how much of the
rows packing fills.
"""

import numpy as np
from rich import table
from rich import text

from jaxpost.data import packing


def preview(examples, tokenizer, row_length=0, max_tokens=512):
  """Rich renderables: each example, then a table of lengths.

  Args:
    examples: a list of Examples.
    tokenizer: the `Tokenizer` that made them.
    row_length: T; 0 leaves out the packing figure.
    max_tokens: tokens shown of each example.
  """
  shown = [_coloured(e, tokenizer, max_tokens) for e in examples]
  return [*shown, _summary(examples, row_length)]


def _coloured(example, tokenizer, max_tokens):
  length = len(example.tokens)
  trained = int(example.loss_mask[1:].sum())
  out = text.Text()
  out.append(f'{length} tokens, {trained} trained\n', 'bold')
  tokens, mask = example.tokens[:max_tokens], example.loss_mask[:max_tokens]
  # Runs, not tokens, are decoded: a character may span several tokens.
  cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
  for a, b in zip(cuts, cuts[1:]):
    if a < b:
      part = tokenizer.decode(tokens[a:b], skip_special=False)
      out.append(part, 'green' if mask[a] else 'dim')
  if length > max_tokens:
    out.append(f' ... {length - max_tokens} more tokens', 'italic')
  return out


def _summary(examples, row_length):
  lengths = np.array([len(e.tokens) for e in examples])
  trained = np.array([int(e.loss_mask[1:].sum()) for e in examples])
  out = table.Table('', 'min', 'median', 'max', 'total')
  for name, of in (('tokens', lengths), ('trained', trained)):
    out.add_row(
      name, str(of.min()), f'{np.median(of):.0f}', str(of.max()), str(of.sum()))
  if row_length:
    cut = np.minimum(lengths, row_length).tolist()
    rows = packing.pack(cut, row_length)
    fill = sum(cut) / (len(rows) * row_length)
    out.caption = (
      f'{len(rows)} rows of {row_length}, {fill:.1%} filled,'
      f' {int((lengths > row_length).sum())} over-long')
  return out
