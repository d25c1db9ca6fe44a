"""Texts whose completions ended, and whose cache is still there.

The next turn of a conversation goes on from it. Nobody waits for that turn:
whoever needs the slot, or the pages, takes it from the text that ended first.

Pages of a key-value cache: who holds which, and which are free.

A page holds `size` entries of one text. Samples of one prompt share its full
pages; each has a last page of its own, and takes more as it grows. Page 0
belongs to nobody: free slots write there.
"""

import collections
import dataclasses

import numpy as np

from jaxpost.errors import InputError


@dataclasses.dataclass(eq=False)
class Kept:
  """A text that was in `slot`; `seat` holds its pages, where there are any."""

  text: bytes
  seat: object
  slot: int


class Shelf:
  """What is kept, the oldest first.

  pages: of the engine, or None; then a text lives and dies with its slot.
  """

  def __init__(self, pages):
    self.pages, self.all = pages, []

  @property
  def slots(self) -> list[int]:
    """That are lost if something else is put there."""
    return [] if self.pages else [kept.slot for kept in self.all]

  def add(self, slot: int, seat):
    text = np.concatenate([seat.request.tokens, seat.drawn()])
    self.all.append(Kept(text.astype(np.int32).tobytes(), seat, slot))

  def begun(self, text: bytes) -> Kept | None:
    """The longest that a text begins with."""
    return max((k for k in self.all if text.startswith(k.text)), key=lambda k: len(k.text), default=None)

  def take(self, kept: Kept):
    """Somebody goes on with it."""
    self.all.remove(kept)

  def drop(self, slots=None) -> bool:
    """Forgets what is in `slots`, or else the oldest, if there is one."""
    gone = self.all[:1] if slots is None else [k for k in self.all if k.slot in slots]
    for kept in gone:
      self.all.remove(kept)
      if self.pages:
        self.pages.release(kept.seat)
    return bool(gone)


@dataclasses.dataclass
class Copy:
  """Entries of a prefix that go into a page: its row, its place, the page."""

  row: int
  place: int
  page: int


class Pages:
  """The pool of one engine.

  count: pages, that of nobody included. room: most entries of a text.
  """

  def __init__(self, size: int, count: int, room: int):
    if (count - 1) * size < room:
      raise InputError(
        f'config.rollout.cache_tokens: {count - 1} pages of {size} do not hold one text of {room} entries; raise it'
      )
    self.size, self.count = size, count
    self.free = collections.deque(range(1, count))
    self.shared = {}  # text -> full pages of its prompt
    self.users = collections.Counter()  # page -> holders
    self.held = {}  # holder -> its pages, in order
    self.texts = {}  # holder -> text whose pages it shares

  def needed(self, entries: int) -> int:
    return -(-entries // self.size)

  def admit(self, holder, text: bytes, row: int, length: int, ahead: int) -> list[Copy] | None:
    """Pages for a text of `length` that is row `row` of a prefix.

    Returns what is to be copied there, or None where the pool has no room
    for it and `ahead` entries more.
    """
    full, total = length // self.size, self.needed(length + ahead)
    known = self.shared.get(text)
    if total - (full if known is not None else 0) > len(self.free):
      return None
    copies = []
    if known is None:
      known = self.shared[text] = [self.free.popleft() for _ in range(full)]
      copies = [Copy(row, i, page) for i, page in enumerate(known)]
    own = [self.free.popleft() for _ in range(total - full)]
    if length % self.size:
      copies.append(Copy(row, full, own[0]))
    self.held[holder], self.texts[holder] = [*known, *own], text
    self.users.update(self.held[holder])
    return copies

  def grow(self, holder, entries: int) -> bool:
    """Pages for so many entries; False, and none, where the pool is empty."""
    pages = self.held[holder]
    more = self.needed(entries) - len(pages)
    if more > len(self.free):
      return False
    for _ in range(more):
      pages.append(self.free.popleft())
      self.users[pages[-1]] += 1
    return True

  def hand_over(self, holder, to):
    """What one holds is another's."""
    self.held[to] = self.held.pop(holder)
    self.texts[to] = self.texts.pop(holder)

  def release(self, holder):
    text = self.texts.pop(holder)
    for page in self.held.pop(holder):
      self.users[page] -= 1
      if not self.users[page]:
        del self.users[page]
        self.free.append(page)
    if text not in self.texts.values():
      self.shared.pop(text, None)

  def table(self, holders: dict, rows: int, entries: int) -> np.ndarray:
    """[rows, pages] int32 of the first `entries`; holders: {slot: holder}."""
    out = np.zeros((rows, self.needed(entries)), np.int32)
    for slot, holder in holders.items():
      pages = self.held[holder][: out.shape[1]]
      out[slot, : len(pages)] = pages
    return out
