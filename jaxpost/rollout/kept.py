"""Texts whose completions ended, and whose cache is still there.

The next turn of a conversation goes on from it. Nobody waits for that turn:
whoever needs the slot, or the pages, takes it from the text that ended first.
"""

import dataclasses

import numpy as np


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
    return max((k for k in self.all if text.startswith(k.text)),
               key=lambda k: len(k.text), default=None)

  def take(self, kept: Kept):
    """Somebody goes on with it."""
    self.all.remove(kept)

  def drop(self, slots=None) -> bool:
    """Forgets what is in `slots`, or else the oldest, if there is one."""
    gone = self.all[:1] if slots is None else [
        k for k in self.all if k.slot in slots]
    for kept in gone:
      self.all.remove(kept)
      if self.pages:
        self.pages.release(kept.seat)
    return bool(gone)
