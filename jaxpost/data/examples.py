"""The `Example`: one document with its loss mask, and how it is cut to a length.

T tokens of one document. A document may hold branches that share a prompt, or
several segments side by side; `types.Batch` explains both.
"""

from __future__ import annotations

import dataclasses

import numpy as np


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
