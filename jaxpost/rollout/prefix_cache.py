"""The prefix cache: key-value entries of finished sequences, reused by the next turn of a conversation.

A cached sequence can always be prefilled again: when a slot or pages are needed, the oldest one is evicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
  from jaxpost.rollout.page_table import PageTable


@dataclasses.dataclass(eq=False)
class CachedPrefix:
  """A finished sequence whose cache entries are kept.

  tokens: its token ids, as the bytes of an int32 array.
  holder: the holder of its pages in the page table, if the cache has pages.
  slot: the slot that has its entries, if the cache has no pages.
  """

  tokens: bytes
  holder: Any
  slot: int


class PrefixCache:
  """The cached prefixes, oldest first; `pages` is the page table of the engine, None if the cache has no pages."""

  def __init__(self, pages: PageTable | None):
    self.pages = pages
    self.entries: list[CachedPrefix] = []

  @property
  def slots(self) -> list[int]:
    """Slots whose reuse would evict a cached prefix."""
    return [] if self.pages else [entry.slot for entry in self.entries]

  def add(self, slot: int, sequence: Any) -> None:
    """Keeps the cache entries of a finished `sequence.ActiveSequence`."""
    tokens = np.concatenate([sequence.request.tokens, sequence.drawn()])
    self.entries.append(CachedPrefix(tokens.astype(np.int32).tobytes(), sequence, slot))

  def longest_match(self, tokens: bytes) -> CachedPrefix | None:
    """The longest cached prefix of `tokens`, or None."""
    matches = (entry for entry in self.entries if tokens.startswith(entry.tokens))
    return max(matches, key=lambda entry: len(entry.tokens), default=None)

  def evict(self, slots: Collection[int] | None = None) -> bool:
    """Evicts the prefixes in `slots`, or with None the oldest one; returns False if there was none."""
    evicted = self.entries[:1] if slots is None else [entry for entry in self.entries if entry.slot in slots]
    for entry in evicted:
      self.entries.remove(entry)
      if self.pages:
        self.pages.release(entry.holder)
    return bool(evicted)
