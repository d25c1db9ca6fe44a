"""Allocates the pages of the key-value cache to sequences (`rollout.page_size`).

A page holds `size` cache entries. Samples of one prompt share its full pages; each has its own copy of a last page that
is not full, and takes more pages as it grows. Page 0 is reserved: free slots write there.
"""

import collections
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import numpy as np


class PageCopy(NamedTuple):
  """Copies entries of a prefilled prompt into a page.

  row: row of the `generate.Prefilled`. place: the source is the entries [place * size, (place + 1) * size) of that row.
  page: the target.
  """

  row: int
  place: int
  page: int


class PageTable:
  """The pages of each sequence of an engine, and the free ones; there are `count`, with the reserved page 0."""

  def __init__(self, size: int, count: int):
    self.size = size
    self.free = collections.deque(range(1, count))
    self.shared: dict[bytes, list[int]] = {}  # prompt -> its full pages
    self.users: collections.Counter[int] = collections.Counter()  # page -> number of holders
    self.held: dict[Hashable, list[int]] = {}  # holder -> its pages, in order
    self.prompts: dict[Hashable, bytes] = {}  # holder -> prompt whose pages it shares

  def needed(self, entries: int) -> int:
    """Pages that `entries` take."""
    return -(-entries // self.size)

  def admit(
    self, holder: Hashable, prompt: bytes, row: int, length: int, extra: int, evict: Callable[[], bool]
  ) -> list[PageCopy] | None:
    """Allocates pages for a prompt of `length` entries, which is row `row` of a `generate.Prefilled`.

    Args:
      evict: releases pages of the prefix cache; False if it has none. Called while too few pages are free.

    Returns:
      The copies that fill the pages; None if the free pages do not hold the prompt and `extra` entries more.
    """
    num_full = length // self.size
    total = self.needed(length + extra)
    # Eviction may release the shared pages of this prompt, too.
    while (total - num_full if prompt in self.shared else total) > len(self.free):
      if not evict():
        return None
    copies = []
    full_pages = self.shared.get(prompt)
    if full_pages is None:
      full_pages = self.shared[prompt] = [self.free.popleft() for _ in range(num_full)]
      copies = [PageCopy(row, i, page) for i, page in enumerate(full_pages)]
    private = [self.free.popleft() for _ in range(total - num_full)]
    if length % self.size:
      copies.append(PageCopy(row, num_full, private[0]))
    self.held[holder] = [*full_pages, *private]
    self.prompts[holder] = prompt
    self.users.update(self.held[holder])
    return copies

  def grow(self, holder: Hashable, entries: int, evict: Callable[[], bool]) -> bool:
    """Extends a holder's pages to `entries`, or returns False if too few are free; `evict` as in `admit`."""
    pages = self.held[holder]
    num_new = self.needed(entries) - len(pages)
    while num_new > len(self.free):
      if not evict():
        return False
    for _ in range(num_new):
      pages.append(self.free.popleft())
      self.users[pages[-1]] += 1
    return True

  def hand_over(self, holder: Hashable, to: Hashable) -> None:
    """Gives all pages of one holder to another."""
    self.held[to] = self.held.pop(holder)
    self.prompts[to] = self.prompts.pop(holder)

  def release(self, holder: Hashable) -> None:
    """Frees the pages of a holder that no other one shares."""
    prompt = self.prompts.pop(holder)
    for page in self.held.pop(holder):
      self.users[page] -= 1
      if not self.users[page]:
        del self.users[page]
        self.free.append(page)
    if prompt not in self.prompts.values():
      self.shared.pop(prompt, None)

  def table(self, holders: Mapping[int, Hashable], rows: int, entries: int) -> np.ndarray:
    """[rows, pages] int32: the pages of the first `entries` of each slot.

    Args:
      holders: {slot: holder}; other slots get the reserved page 0.
    """
    out = np.zeros((rows, self.needed(entries)), np.int32)
    for slot, holder in holders.items():
      pages = self.held[holder][: out.shape[1]]
      out[slot, : len(pages)] = pages
    return out
