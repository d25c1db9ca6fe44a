"""The `Example`: one document with its loss mask; `Documents`: those of a data set, with what frozen models compute.

Legend: N documents, T tokens of one, S trained tokens of all. A document may hold branches that share a prompt, or
several segments side by side; `types.Batch` explains both.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Example:
  """One document that is packed as a whole.

  The fields that are None are those of a plain document: positions from 0, one segment, no branches or sequences.
  """

  tokens: np.ndarray  # [T] int32
  loss_mask: np.ndarray  # [T] bool, or float32 weights >= 0
  positions: np.ndarray | None = None  # [T] int32
  segment_ids: np.ndarray | None = None  # [T] int32 from 1
  branch_ids: np.ndarray | None = None  # [T] int32, 0 is the shared prompt
  sequence_ids: np.ndarray | None = None  # [T] int32 from 1, 0 is none
  arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name -> [T, ...]
  unseen: str = ''  # which turn is trained after a text that no prompt of a sampler ends in; '' for none

  @property
  def trained(self) -> np.ndarray:
    """[T] bool: tokens with a weight above 0 and a token before them, which predicts them."""
    trained = np.asarray(self.loss_mask) > 0
    trained[:1] = False
    if self.segment_ids is not None:
      trained[1:] &= self.segment_ids[1:] == self.segment_ids[:-1]
    return trained

  @property
  def read(self) -> np.ndarray:
    """[T] bool: tokens that are trained, or belong to a sequence that is only read."""
    return self.trained if self.sequence_ids is None else self.trained | (self.sequence_ids > 0)

  def cut(self, length: int) -> Example | None:
    """Returns this document in `length` tokens, or None if its prompts leave no room.

    A plain document loses its end. Of numbered sequences the longest loses its end until all fit, never a prompt; at
    least one token of each is kept. A sequence that is trained on its last token alone (a score is read there) keeps
    that token and loses those before it.
    """
    total = len(self.tokens)
    if total <= length:
      return self
    if self.sequence_ids is None:
      return self._at(np.arange(length), np.arange(length))
    # From the first to the last token of each sequence; some between may be untrained.
    found = [np.flatnonzero(self.sequence_ids == n) for n in np.unique(self.sequence_ids) if n]
    spans = sorted((at[0], at[-1] + 1) for at in found)
    sizes = _shorten_longest([b - a for a, b in spans], total - length)
    if sizes is None:
      return None
    # Numbers of the tokens whose positions and ids are kept, and of those whose content is.
    place, content, at = [], [], 0
    for (a, b), size in zip(spans, sizes):
      kept = np.arange(at, a + size)
      place.append(kept)
      if self.loss_mask[b - 1] > 0 and not self.trained[a : b - 1].any():
        kept = np.append(kept[:-1], b - 1)
      content.append(kept)
      at = b
    place.append(np.arange(at, total))
    content.append(np.arange(at, total))
    return self._at(np.concatenate(place), np.concatenate(content))

  def _at(self, place: np.ndarray, content: np.ndarray) -> Example:
    """Returns the tokens numbered `content`, with the positions and ids of those numbered `place`."""

    def take(array: np.ndarray | None, index: np.ndarray) -> np.ndarray | None:
      return None if array is None else array[index]

    return Example(
      tokens=self.tokens[content],
      loss_mask=self.loss_mask[content],
      positions=take(self.positions, place),
      segment_ids=take(self.segment_ids, place),
      branch_ids=take(self.branch_ids, place),
      sequence_ids=take(self.sequence_ids, place),
      arrays={name: array[content] for name, array in self.arrays.items()},
    )


def _shorten_longest(sizes: list[int], excess: int) -> list[int] | None:
  """Takes `excess` in all from the largest sizes, leaving each at least 1; None if that is too much."""
  if sum(sizes) - len(sizes) < excess:
    return None
  rest = sum(sizes) - excess
  out = [0] * len(sizes)
  left = len(sizes)
  # Smallest first: the room that they do not use is shared by the larger.
  for i in sorted(range(len(sizes)), key=lambda i: (sizes[i], -i)):
    out[i] = min(sizes[i], rest // left)
    rest -= out[i]
    left -= 1
  return out


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
    self._starts = np.zeros(0, np.int64)  # [N + 1] once filled: where the tokens of a document begin in `_values`
    self._values: dict[str, np.ndarray] = {}  # name -> [S, ...]

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, number: int) -> Example | None:
    example = self.plain(number)
    if example is None or not self.fields:
      return example
    trained = example.read
    arrays = dict(example.arrays)
    for name, (shape, dtype) in self.fields.items():
      arrays[name] = np.zeros((len(trained), *shape), dtype)
      if name in self._values:
        start, stop = self._starts[number : number + 2]
        arrays[name][trained] = self._values[name][start:stop]
    return dataclasses.replace(example, arrays=arrays)

  def fill(self, examples: Iterable[Example | None], values: Mapping[str, np.ndarray]) -> None:
    """Takes the arrays [S, ...] of the trained tokens of `examples`, which are all documents in order."""
    counts = [0 if e is None else int(e.read.sum()) for e in examples]
    self._starts = np.append(0, np.cumsum(counts))
    self._values |= values
