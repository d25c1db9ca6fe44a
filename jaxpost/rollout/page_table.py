"""Pages of the key-value cache (`rollout.page_size`): which sequence holds which.

A page holds `size` cache entries of one sequence. Samples of one prompt share its full pages; each has a last page of
its own, and takes more as it grows. Page 0 is reserved: free slots write there.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping

import numpy as np


@dataclasses.dataclass
class PageCopy:
  """Copies entries of a prefilled prompt into a page.

  row: of the `generate.Prefilled`. place: which `size` entries of that row. page: their target.
  """

  row: int
  place: int
  page: int


def _nothing() -> bool:
  return False


class PageTable:
  """Which sequence holds which pages of an engine, and which pages are free.

  size: entries of a page.
  count: pages, including the reserved page 0.
  """

  def __init__(self, size: int, count: int):
    self.size = size
    self.count = count
    self.free = collections.deque(range(1, count))
    self.shared: dict[bytes, list[int]] = {}  # prompt -> its full pages
    self.users: collections.Counter[int] = collections.Counter()  # page -> number of holders
    self.held: dict[Hashable, list[int]] = {}  # holder -> its pages, in order
    self.prompts: dict[Hashable, bytes] = {}  # holder -> prompt whose pages it shares

  def needed(self, entries: int) -> int:
    """Pages that `entries` take."""
    return -(-entries // self.size)

  def admit(
    self, holder: Hashable, prompt: bytes, row: int, length: int, extra: int, evict: Callable[[], bool] = _nothing
  ) -> list[PageCopy] | None:
    """Allocates pages for a prompt of `length` entries, which is row `row` of a `generate.Prefilled`.

    Args:
      evict: releases pages that can be done without; False if there are none. Called while too few are free.

    Returns:
      The copies that fill the pages; None where the free pages do not hold the prompt and `extra` entries more.
    """
    full = length // self.size
    total = self.needed(length + extra)
    while (total - full if prompt in self.shared else total) > len(self.free):
      if not evict():
        return None
    copies, known = [], self.shared.get(prompt)
    if known is None:
      known = self.shared[prompt] = [self.free.popleft() for _ in range(full)]
      copies = [PageCopy(row, i, page) for i, page in enumerate(known)]
    private = [self.free.popleft() for _ in range(total - full)]
    if length % self.size:
      copies.append(PageCopy(row, full, private[0]))
    self.held[holder] = [*known, *private]
    self.prompts[holder] = prompt
    self.users.update(self.held[holder])
    return copies

  def grow(self, holder: Hashable, entries: int, evict: Callable[[], bool] = _nothing) -> bool:
    """Extends a holder's pages to `entries`; False, and no page more, if too few are free; `evict` as in `admit`."""
    pages = self.held[holder]
    more = self.needed(entries) - len(pages)
    while more > len(self.free):
      if not evict():
        return False
    for _ in range(more):
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
