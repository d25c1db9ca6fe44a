"""The examples of a data set, with arrays that frozen models compute for them.

Legend: N documents, T tokens of one, S trained tokens of all.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.data.tokenizer import Tokenizer


def read_tokens(example: Example) -> np.ndarray:
  """Returns [T] bool: the tokens that are trained, or belong to a sequence that is only read."""
  if example.sequence_ids is None:
    return example.trained
  return example.trained | (example.sequence_ids > 0)


def warn_without_stop(examples: Iterable[Example | None], tokenizer: Tokenizer) -> None:
  """Warns if there are examples, and none trains a token at which sampling stops."""
  read = [e for e in examples if e is not None]
  if read and not any(np.isin(e.tokens[e.trained], tokenizer.stop_ids).any() for e in read):
    logging.warning(
      'config.data: no trained span ends in a stop token (%s), so the model does not learn to stop; let the chat '
      'template end turns of the assistant with one (config.data.chat_template)',
      tokenizer.decode(tokenizer.stop_ids, skip_special=False),
    )


def warn_unseen(examples: Iterable[Example | None]) -> None:
  """Warns once if examples train turns after a text that no prompt of a sampler ends in."""
  found = [e.unseen for e in examples if e is not None and e.unseen]
  if found:
    logging.warning(
      'config.data: %d rows train a turn that others follow after another text than sampling shows; %s; set '
      "config.data.train_on='completion' and give each answer a row of its own, or let config.data.chat_template "
      'render all turns alike',
      len(found),
      found[0],
    )


class Documents:
  """A sequence of Examples that carry precomputed arrays (reference log-probs, teacher top-k).

  Until `fill` the arrays are zeros of the right shapes, so that batches have their final form before a device is used.
  This is the only place that holds computed arrays.

  Attributes:
    fields: {name: (shape after [T], dtype)} of the arrays.
  """

  def __init__(self, plain: Callable, size: int, fields: Mapping | None = None):
    """See the class.

    Args:
      plain: number -> Example without the arrays; None for a row that a map drops.
      fields: as the attribute; None for no arrays.
    """
    self.plain = plain
    self.fields = dict(fields or {})
    self._size = size
    self._starts: np.ndarray | None = None  # [N + 1]: where the tokens of a document begin in `_values`
    self._values: dict[str, np.ndarray] = {}  # name -> [S, ...]

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, number: int) -> Example | None:
    example = self.plain(number)
    if example is None or not self.fields:
      return example
    trained = read_tokens(example)
    arrays = dict(example.arrays)
    for name, (shape, dtype) in self.fields.items():
      arrays[name] = np.zeros((len(trained), *shape), dtype)
      if name in self._values:
        start, stop = self._starts[number : number + 2]
        arrays[name][trained] = self._values[name][start:stop]
    return dataclasses.replace(example, arrays=arrays)

  def fill(self, examples: Iterable[Example | None], values: Mapping[str, np.ndarray]) -> None:
    """Takes the arrays [S, ...] of the trained tokens of `examples`, which are all documents in order."""
    counts = [0 if e is None else int(read_tokens(e).sum()) for e in examples]
    self._starts = np.append(0, np.cumsum(counts))
    self._values |= values
