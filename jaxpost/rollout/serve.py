"""The decode loop: requests in, completions out, slots never idle for long.

Legend: S slots, C completion tokens, K tokens a block.

`Serving.run` is the loop. Free slots take requests from a queue; a block
draws up to K tokens in every slot; slots whose text ended are free again.
While requests wait, a block is looked at before the next is dispatched: an
empty slot costs more than the gap. Once none wait, the next block runs while
the host looks at the last one, and occupied slots move together, so that
fewer rows are computed. Nothing here depends on the clock.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable

import numpy as np

from jaxpost.sharding import to_host
from jaxpost.types import Completion, Request

# (completions, idle) -> requests; see NativeEngine.serve.
Follow = Callable[[list[Completion], bool], Iterable[Request]]


@dataclasses.dataclass(eq=False)
class Seat:
  """A request in a slot, and what was drawn for it so far."""

  request: Request
  used: int  # cache entries, at most, after the blocks dispatched
  left: int  # tokens still to draw, at most, after these
  over: bool = False
  parts: list = dataclasses.field(default_factory=list)  # of each block

  def take(self, block, slot: int) -> int:
    """Keeps what the block drew in a slot; how many tokens that were."""
    drawn = block.drawn[:, slot]
    self.parts.append([x[drawn, slot] for x in (
        block.tokens, block.logprobs, block.behaviour_logprobs, *block.top)])
    return int(drawn.sum())

  def cut(self, strings, decode) -> str:
    """The stop string that the last block completed, or ''.

    Drops the tokens after the one that completes it.
    """
    if not strings:
      return ''
    new = len(self.parts[-1][0])
    tokens = np.concatenate([p[0] for p in self.parts])
    # A token may be one byte of a character of four.
    reach = 4 * max(map(len, strings)) + new
    for end in range(len(tokens) - new + 1, len(tokens) + 1):
      text = decode(tokens[max(0, end - reach):end])
      for string in strings:
        if string in text:
          drop = len(tokens) - end
          if drop:
            self.parts[-1] = [x[:-drop] for x in self.parts[-1]]
          return string
    return ''

  def completion(self, stop_string: str, finished: bool) -> Completion:
    arrays = [np.concatenate(x) for x in zip(*self.parts)]
    return Completion(self.request, *arrays[:3], finished, stop_string,
                      *arrays[3:])


class Serving:
  """One call of `serve`: the queue, and who sits in which slot."""

  def __init__(self, engine, run_key, step: int, follow: Follow,
               read_rows: int | None):
    self.engine, self.run_key, self.step = engine, run_key, step
    self.follow, self.read_rows = follow, read_rows
    self.queue = collections.deque()
    self.seats = {}  # slot -> Seat
    self.state = engine.init_decode_state()
    self.prefix, self.at = None, {}  # contexts read: text -> row
    self.running = collections.deque()  # (seats, block) dispatched, unseen
    self.steps = self.rows = self.drawn = self.dispatches = 0
    self.gap, self.seen_at = 0.0, None

  def run(self, requests: Iterable[Request]) -> dict:
    """Until nothing is left to do; returns figures."""
    self.enqueue(requests)
    done = []
    while True:
      self.enqueue(self.follow(done, False))
      self.fill()
      if not self.seats:
        more = list(self.follow([], True))
        if not more:
          return self.figures()
        self.enqueue(more)
        done = []
        continue
      ahead = not self.queue and any(s.left > 0 for s in self.seats.values())
      if ahead or not self.running:
        self.dispatch()
      done = self.collect() if len(self.running) > ahead else []

  def enqueue(self, requests: Iterable[Request]):
    for request in requests:
      self.engine.check(request)
      text = np.ascontiguousarray(request.tokens, np.int32).tobytes()
      self.queue.append((text, request))

  # -------------------------------------------------------------- into slots

  def fill(self):
    """Gives free slots the next requests, reading their texts if needed."""
    free = [s for s in range(self.engine.max_concurrent_decodes)
            if s not in self.seats]
    while free and self.queue:
      ready, rest = [], collections.deque()
      for item in self.queue:
        take = item[0] in self.at and len(ready) < len(free)
        (ready if take else rest).append(item)
      if not ready:
        self.read()
        continue
      self.queue = rest
      self.seat(dict(zip(free, ready)))
      free = free[len(ready):]

  def read(self):
    """Prefills texts of one rung: the first that waits, and those like it."""
    engine = self.engine
    size = engine.rung(len(self.queue[0][1].tokens))
    most = self.read_rows or engine.max_concurrent_decodes
    texts = {}
    for text, request in self.queue:
      if len(texts) == most:
        break
      if engine.rung(len(request.tokens)) == size:
        texts.setdefault(text, request.tokens)
    self.prefix = None  # frees the last one first
    self.prefix = engine.prefill(list(texts.values()), self.read_rows or 0)
    self.at = {text: row for row, text in enumerate(texts)}

  def seat(self, taken: dict[int, tuple]):
    """Forks (text, request) of each slot from the prefix."""
    requests = {slot: request for slot, (_, request) in taken.items()}
    entry = self.engine.entry(
        requests, {slot: self.at[text] for slot, (text, _) in taken.items()})
    self.state = self.engine.insert(
        self.state, self.prefix, entry, self.run_key, self.step)
    for slot, request in requests.items():
      self.seats[slot] = Seat(
          request, len(request.tokens), self.engine.max_tokens(request))

  # ------------------------------------------------------------- and through

  def dispatch(self):
    """A block for all slots that can still draw something."""
    engine = self.engine
    live = {s: x for s, x in self.seats.items() if x.left > 0}
    if not self.queue:
      live = self.move_together(live)
    rows = engine.row_rung(max(live) + 1)
    most = max(x.used for x in live.values()) + engine.block
    if self.seen_at is not None and not self.running:
      self.gap += time.perf_counter() - self.seen_at
    self.state, block = engine.generate(
        self.state, engine.read_rung(most), rows)
    for seat in live.values():
      seat.used += engine.block
      seat.left -= engine.block
    self.running.append((live, block))
    self.steps += engine.block
    self.rows += rows * engine.block
    self.dispatches += 1

  def move_together(self, live: dict[int, Seat]) -> dict[int, Seat]:
    """Moves the last rows into free ones where that makes a smaller rung."""
    rung = self.engine.row_rung
    if rung(len(self.seats)) == rung(max(live) + 1):
      return live
    free = (s for s in range(len(self.seats)) if s not in self.seats)
    moves = {s: next(free) for s in sorted(self.seats)
             if s >= len(self.seats)}
    self.state = self.engine.move(self.state, moves)
    self.seats = {moves.get(s, s): x for s, x in self.seats.items()}
    return {s: x for s, x in self.seats.items() if x.left > 0}

  def collect(self) -> list[Completion]:
    """Looks at the oldest block; the completions that ended in it."""
    seats, block = self.running.popleft()
    block = to_host(block)
    self.seen_at = time.perf_counter()
    self.engine.check_finite(block, self.step)
    done = []
    for slot, seat in seats.items():
      if seat.over:
        continue
      self.drawn += seat.take(block, slot)
      cut = seat.cut(
          self.engine.stop_strings(seat.request), self.engine.decode)
      seat.over = bool(cut) or not block.active[slot]
      if seat.over:
        done.append(seat.completion(
            cut, bool(cut) or bool(block.finished[slot])))
    self.seats = {s: x for s, x in self.seats.items() if not x.over}
    return done

  def figures(self) -> dict:
    """occupancy: share of computed slot-steps that drew a wanted token."""
    return {
        'occupancy': self.drawn / self.rows if self.rows else 0.0,
        'tokens_per_dispatch': self.drawn / max(self.dispatches, 1),
        'time/host_gap': self.gap}

