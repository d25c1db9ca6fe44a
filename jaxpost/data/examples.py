"""`Example` is one document with its loss mask; `Documents` are those of a data set, with outputs of frozen models.

Legend: N documents, T tokens of a document, S tokens of all documents whose outputs are read (`Example.read`). A
document may have branches that share a prompt, or several segments; `types.Batch` explains both.
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

  Fields that are None are those of a plain document: positions from 0, one segment, no branches or sequences.
  """

  tokens: np.ndarray  # [T] int32
  loss_mask: np.ndarray  # [T] bool, or float32 weights >= 0
  positions: np.ndarray | None = None  # [T] int32
  segment_ids: np.ndarray | None = None  # [T] int32 from 1
  branch_ids: np.ndarray | None = None  # [T] int32, 0 for the shared prompt
  sequence_ids: np.ndarray | None = None  # [T] int32 from 1, 0 for none
  arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name -> [T, ...]
  unseen: str = ''  # a warning about a turn that is trained after another header than in sampling; '' for none

  @property
  def trained(self) -> np.ndarray:
    """[T] bool: tokens with a weight above 0 that have a token before them in their segment, which predicts them."""
    trained = np.asarray(self.loss_mask) > 0
    trained[:1] = False
    if self.segment_ids is not None:
      trained[1:] &= self.segment_ids[1:] == self.segment_ids[:-1]
    return trained

  @property
  def read(self) -> np.ndarray:
    """[T] bool: tokens whose logprobs are used: those that are trained, and all of numbered sequences."""
    return self.trained if self.sequence_ids is None else self.trained | (self.sequence_ids > 0)

  def cut(self, length: int) -> Example | None:
    """Returns this document cut to `length` tokens, or None if its prompts leave no room for the sequences.

    A plain document loses its end. With numbered sequences, the ends of the longest sequences are cut until all fit;
    prompts and at least one token of each sequence are kept. A sequence that is trained on its last token alone, where
    a score is read, keeps that token and loses tokens before it.
    """
    total = len(self.tokens)
    if total <= length:
      return self
    if self.sequence_ids is None:
      return self._at(np.arange(length), np.arange(length))
    # A span is from the first to the last token of a sequence, and may include untrained tokens.
    indices = [np.flatnonzero(self.sequence_ids == n) for n in np.unique(self.sequence_ids) if n]
    spans = sorted((index[0], index[-1] + 1) for index in indices)
    sizes = _shorten_longest([stop - start for start, stop in spans], total - length)
    if sizes is None:
      return None
    # `kept` says which positions and ids remain; `content` has the index of the token whose content is at each.
    kept, content = np.ones(total, bool), np.arange(total)
    for (start, stop), size in zip(spans, sizes):
      kept[start + size : stop] = False
      if self.loss_mask[stop - 1] > 0 and not self.trained[start : stop - 1].any():
        content[start + size - 1] = stop - 1  # the token with the score
    return self._at(np.flatnonzero(kept), content[kept])

  def _at(self, place: np.ndarray, content: np.ndarray) -> Example:
    """Returns the tokens at the indices `content`, with the positions and ids of those at the indices `place`."""
    names = ('positions', 'segment_ids', 'branch_ids', 'sequence_ids')
    placed = {name: vars(self)[name][place] for name in names if vars(self)[name] is not None}
    arrays = {name: array[content] for name, array in self.arrays.items()}
    return Example(self.tokens[content], self.loss_mask[content], arrays=arrays, **placed)


def _shorten_longest(sizes: list[int], excess: int) -> list[int] | None:
  """Returns `sizes` with the largest reduced by `excess` in total, each at least 1; None if that is impossible."""
  room = sum(sizes) - excess
  if room < len(sizes):
    return None
  out = [0] * len(sizes)
  # The smallest come first: larger sizes share the room that they do not need.
  for n, i in enumerate(sorted(range(len(sizes)), key=lambda i: (sizes[i], -i))):
    out[i] = min(sizes[i], room // (len(sizes) - n))
    room -= out[i]
  return out


def warn_without_stop(examples: Iterable[Example | None], tokenizer: Tokenizer) -> None:
  """Warns if no example trains a token at which sampling stops."""
  documents = [e for e in examples if e is not None]
  if documents and not any(np.isin(e.tokens[e.trained], tokenizer.stop_ids).any() for e in documents):
    logging.warning(
      'config.data: no trained span ends in a stop token (%s), so the model does not learn to stop; let the chat '
      'template end turns of the assistant with one (config.data.chat_template)',
      tokenizer.decode(tokenizer.stop_ids, skip_special=False),
    )


def warn_unseen(examples: Iterable[Example | None]) -> None:
  """Warns once if examples train turns after another header than in sampling (`Example.unseen`)."""
  problems = [e.unseen for e in examples if e is not None and e.unseen]
  if problems:
    logging.warning(
      'config.data: %d rows train a turn that others follow after another text than sampling shows; %s; set '
      "config.data.train_on='completion' and give each answer a row of its own, or let config.data.chat_template "
      'render all turns alike',
      len(problems),
      problems[0],
    )


@dataclasses.dataclass(eq=False)
class Documents:
  """A sequence of Examples with precomputed arrays (reference log-probs, teacher top-k).

  Before `fill` the arrays are zeros of the right shapes, so that batches have their final form before a device is used.

  Attributes:
    plain: number -> Example without the arrays; None for a row that a map drops.
    size: N.
    fields: {name: (shape after [T], dtype)} of the arrays; None for no arrays.
  """

  plain: Callable
  size: int
  fields: Mapping | None = None
  # [N + 1] once filled: where the values of a document begin in `_values`
  _starts: np.ndarray = dataclasses.field(init=False, repr=False)
  _values: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, init=False, repr=False)  # name -> [S, ...]

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, number: int) -> Example | None:
    example = self.plain(number)
    if example is None or not self.fields:
      return example
    is_read = example.read
    arrays = dict(example.arrays)
    for name, (shape, dtype) in self.fields.items():
      arrays[name] = np.zeros((len(is_read), *shape), dtype)
      if name in self._values:
        start, stop = self._starts[number : number + 2]
        arrays[name][is_read] = self._values[name][start:stop]
    return dataclasses.replace(example, arrays=arrays)

  def fill(self, examples: Iterable[Example | None], values: Mapping[str, np.ndarray]) -> None:
    """Sets the arrays, {name: [S, ...]} of the read tokens of `examples`, which are all documents in order."""
    counts = [0 if e is None else int(e.read.sum()) for e in examples]
    self._starts = np.append(0, np.cumsum(counts))
    self._values |= values
