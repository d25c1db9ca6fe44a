"""The decode loop: requests in, completions out, slots never idle for long.

Legend: S slots, C completion tokens, K tokens a block.

`Serving.run` is the loop. Free slots take requests from a queue; a block
draws up to K tokens in every slot; slots whose text ended are free again.
While requests wait, a block is looked at before the next is dispatched: an
empty slot costs more than the gap. Once none wait, the next block runs while
the host looks at the last one, and occupied slots move together, so that
fewer rows are computed. Nothing here depends on the clock.

The cache of a text that ended stays until its place is wanted. A request that
goes on with such a text, the next turn of a conversation, has only the rest
read; nobody waits for it, and others take its slot before one stays empty.
"""

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Iterable

import numpy as np

from jaxpost.distributed.transfer import to_host
from jaxpost.rollout.kv_cache import Shelf
from jaxpost.types import Completion, Request

# (completions, idle) -> requests; see NativeEngine.serve.
Follow = Callable[[list[Completion], bool], Iterable[Request]]
Tell = Callable[[Request, np.ndarray], None]


@dataclasses.dataclass(eq=False)
class Seat:
  """A request on its way through the queue and a slot."""

  request: Request
  left: int  # tokens still to draw, at most, after the blocks dispatched
  tokens: np.ndarray  # to be read when it gets a slot
  used: int = 0  # cache entries, at most, after the blocks dispatched
  experts: tuple = ()  # that `tokens` passed, [P, L, k], if it is recorded
  over: bool = False
  parts: list = dataclasses.field(default_factory=list)  # of each block

  def __post_init__(self):
    self.tokens = np.ascontiguousarray(self.tokens, np.int32)
    self.text, self.used = self.tokens.tobytes(), len(self.tokens)

  def again(self) -> 'Seat':
    """To go on later where this one is; its blocks were all looked at."""
    text = np.concatenate([self.request.tokens, self.drawn()])
    return Seat(self.request, self.left, text, parts=self.parts)

  def drawn(self) -> np.ndarray:
    """[C] token ids so far."""
    return np.concatenate([np.zeros(0, np.int32), *(p[0] for p in self.parts)])

  def take(self, block, slot: int, version: int) -> int:
    """Keeps what the block drew in a slot; how many tokens that were."""
    drawn = block.drawn[:, slot]
    versions = np.full(len(drawn), version, np.int32)
    self.parts.append(
      [x[drawn, slot] for x in (block.tokens, block.logprobs, block.behaviour_logprobs, *block.experts, *block.top)]
      + [versions[drawn]]
    )
    return int(drawn.sum())

  def cut(self, strings, decode, least: int = 0) -> str:
    """The stop string that the last block completed, or ''.

    Drops the tokens after the one that completes it. What the first `least`
    tokens complete does not count.
    """
    if not strings:
      return ''
    new, tokens = len(self.parts[-1][0]), self.drawn()
    # A token may be one byte of a character of four.
    reach = 4 * max(map(len, strings)) + new
    whole = decode(tokens[-reach:])
    if not any(string in whole for string in strings):
      return ''
    for end in range(len(tokens) - new + 1, len(tokens) + 1):
      start = max(0, end - reach)
      text, early = (decode(tokens[start:x]) for x in (end, max(start, least)))
      for string in strings if end > least else ():
        # Half a character may decode to something else.
        known = len(os.path.commonprefix([early, text]))
        if text.find(string, max(0, known - len(string) + 1)) >= 0:
          drop = len(tokens) - end
          if drop:
            self.parts[-1] = [x[:-drop] for x in self.parts[-1]]
          return string
    return ''

  def completion(self, stop_string: str, finished: bool) -> Completion:
    *drawn, versions = [np.concatenate(x) for x in zip(*self.parts)]
    at = 3 + len(self.experts)
    new = len(self.tokens) - len(self.request.tokens)  # was read again
    experts = [np.concatenate([read, more[new:]]) for read, more in zip(self.experts, drawn[3:at])]
    most = self.request.sampling.get('top_logprobs')
    top = [x[:, :most] for x in drawn[at:]] or (None, None)
    return Completion(self.request, *drawn[:3], finished, stop_string, *top, *(experts or (None,)), versions)


class Serving:
  """One call of `serve`: the queue, and who sits in which slot."""

  def __init__(
    self,
    engine,
    run_key,
    step: int,
    follow: Follow,
    read_rows: int | None,
    tell: Tell | None = None,
    *,
    reuse_cache: bool = True,
    on_dispatch: Callable[[int], None] | None = None,
  ):
    self.engine, self.run_key, self.step = engine, run_key, step
    self.follow, self.read_rows, self.tell = follow, read_rows, tell
    self.reuse_cache, self.on_dispatch = reuse_cache, on_dispatch
    self.queue = collections.deque()  # of Seat
    self.seats = {}  # slot -> Seat, first come first
    self.state = engine.init_decode_state()
    self.pages = engine.pages()
    self.prefix, self.at = None, {}  # texts that were read -> row
    # (seats, block, version of the weights) dispatched, unseen
    self.running = collections.deque()
    self.kept = Shelf(self.pages)
    self.rows = self.drawn = self.dispatches = self.requeued = 0
    self.tokens_read = self.tokens_kept = 0
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
      if (ahead or not self.running) and not self.dispatch():
        ahead = False
      done = self.collect() if len(self.running) > ahead else []

  def enqueue(self, requests: Iterable[Request]):
    for request in requests:
      self.engine.check(request)
      self.queue.append(Seat(request, self.engine.max_tokens(request), request.tokens))

  # -------------------------------------------------------------- into slots

  def fill(self):
    """Gives free slots the next in the queue, reading texts if needed."""
    self.go_on()
    free = self.free()
    while free and self.queue:
      taken, copies, room = {}, [], True
      for seat in list(self.queue):
        if len(taken) == len(free) or not room:
          break
        if seat.text in self.at:
          found = self.place(seat)
          room = found is not None
          if room:
            copies += found
            taken[free[len(taken)]] = seat
      if not taken and room:
        self.read()
        continue
      self.sit(taken, copies)
      free = free[len(taken) :] if room else []

  def free(self) -> list[int]:
    """Slots without a seat; those with a text worth keeping come last."""
    keeping = self.kept.slots
    return [s for s in range(self.engine.max_concurrent_decodes) if s not in self.seats and s not in keeping] + keeping

  def place(self, seat: Seat) -> list | None:
    """Pages for what a seat has read; None where there is no room."""
    if not self.pages:
      return []
    while True:
      found = self.pages.admit(seat, seat.text, self.at[seat.text], len(seat.tokens), self.engine.block)
      if found is not None or not self.kept.drop():
        return found

  def grow(self, seat: Seat, entries: int) -> bool:
    """Pages for so many entries; texts that are kept give theirs."""
    while not self.pages.grow(seat, entries):
      if not self.kept.drop():
        return False
    return True

  def go_on(self):
    """Seats whose text begins with one that is kept: the rest is read."""
    taken, more, free = {}, {}, self.free()
    for seat in list(self.queue) if self.kept.all and free else ():
      kept = self.kept.begun(seat.text)
      if not kept or not free:
        continue
      self.kept.take(kept)
      slot = kept.slot
      if self.pages:
        slot = free[0]
        self.pages.hand_over(kept.seat, seat)
        if not self.grow(seat, len(seat.tokens) + self.engine.block):
          self.pages.release(seat)
          continue
      free.remove(slot)
      filled = min(len(kept.text) // seat.tokens.itemsize, len(seat.tokens) - 1)  # the last one says what is next
      taken[slot], more[slot] = seat, (filled, seat.tokens[filled:])
      self.tokens_kept += filled
      self.tokens_read += len(more[slot][1])
    if not taken:
      return
    entry = self.engine.entry(taken, dict.fromkeys(taken, 0))
    self.leave_queue(taken)
    table = self.pages and self.pages.table(
      taken, self.engine.max_concurrent_decodes, self.engine.read_rung(max(len(x.tokens) for x in taken.values()))
    )
    self.state = self.engine.extend(self.state, entry, more, self.run_key, self.step, table)
    self.seats |= taken

  def leave_queue(self, taken: dict[int, Seat]):
    chosen = set(taken.values())
    self.queue = collections.deque(x for x in self.queue if x not in chosen)

  def read(self):
    """Prefills texts of one rung: the first that waits, and those like it."""
    engine = self.engine
    size = engine.rung(len(self.queue[0].tokens))
    most = self.read_rows or engine.max_concurrent_decodes
    texts = {}
    for seat in self.queue:
      if len(texts) == most:
        break
      if engine.rung(len(seat.tokens)) == size:
        texts.setdefault(seat.text, seat.tokens)
    self.prefix = None  # frees the last one first
    self.prefix = engine.prefill(list(texts.values()), self.read_rows or 0)
    self.prefix_experts = to_host(self.prefix.experts, share=False)
    self.at = {text: row for row, text in enumerate(texts)}
    self.tokens_read += sum(map(len, texts.values()))

  def sit(self, taken: dict[int, Seat], copies: list):
    """Forks the seats from the prefix into {slot: Seat}."""
    if not taken:
      return
    self.leave_queue(taken)
    if not self.pages:
      self.kept.drop(taken)
    rows = {slot: self.at[seat.text] for slot, seat in taken.items()}
    entry = self.engine.entry(taken, rows, copies)
    self.state = self.engine.insert(self.state, self.prefix, entry, self.run_key, self.step)
    self.seats |= taken
    for slot, seat in taken.items():
      found = [x[rows[slot], 0, : len(seat.tokens)] for x in self.prefix_experts]
      seat.experts = (np.stack(found, axis=1),) if found else ()

  # ------------------------------------------------------------- and through

  def dispatch(self) -> bool:
    """A block for all slots that can still draw something.

    False where the blocks that run have to be looked at first.
    """
    engine = self.engine
    if self.pages and not self.make_room():
      return False
    if self.on_dispatch:
      self.on_dispatch(self.dispatches)
    live = {s: x for s, x in self.seats.items() if x.left > 0}
    if not self.queue:
      live = self.move_together(live)
    rows = engine.row_rung(max(live) + 1)
    read = engine.read_rung(max(x.used for x in live.values()) + engine.block)
    if self.seen_at is not None and not self.running:
      self.gap += time.perf_counter() - self.seen_at
    table = self.pages and self.pages.table(live, rows, read)
    self.state, block = engine.generate(self.state, read, rows, table)
    for seat in live.values():
      seat.used += engine.block
      seat.left -= engine.block
    self.running.append((live, block, engine.version))
    self.rows += rows * engine.block
    self.dispatches += 1
    return True

  def make_room(self) -> bool:
    """Pages for a block of every seat; the last come goes back if need be."""
    for seat in list(self.seats.values()):
      while seat in self.seats.values() and not self.grow(seat, seat.used + self.engine.block):
        if self.running:
          return False
        slot, last = list(self.seats.items())[-1]
        del self.seats[slot]
        self.pages.release(last)
        self.queue.appendleft(last.again())
        self.requeued += 1
    return True

  def move_together(self, live: dict[int, Seat]) -> dict[int, Seat]:
    """Moves the last rows into free ones where that makes a smaller rung."""
    rung, count = self.engine.row_rung, len(self.seats)
    if rung(count) == rung(max(live) + 1):
      return live
    free = (s for s in range(count) if s not in self.seats)
    moves = {s: next(free) for s in sorted(self.seats) if s >= count}
    if not moves:
      return live
    self.move_kept(set(moves.values()))
    self.state = self.engine.move(self.state, moves)
    self.seats = {moves.get(s, s): x for s, x in self.seats.items()}
    return {s: x for s, x in self.seats.items() if x.left > 0}

  def move_kept(self, wanted: set[int]):
    """Texts that are kept make room in these slots, or are forgotten."""
    if self.pages:
      return
    taken, moves = wanted | {*self.kept.slots}, {}
    free = [s for s in self.free() if s not in taken]
    for kept in self.kept.all:
      if kept.slot in wanted and free:
        moves[kept.slot] = kept.slot = free.pop()
    self.kept.drop(wanted)
    if moves:
      self.state = self.engine.move(self.state, moves)

  def collect(self) -> list[Completion]:
    """Looks at the oldest block; the completions that ended in it."""
    seats, block, version = self.running.popleft()
    block = to_host(block, share=False)
    self.seen_at = time.perf_counter()
    if block.broken.any():
      raise FloatingPointError(
        f'sampling at step {self.step}: logits of the weights after '
        f'{version} updates are not finite (the run has '
        'diverged: lower the learning rate and restart from an earlier '
        'checkpoint), or forbidden_ids and min_new_tokens leave no token to '
        'draw'
      )
    done = []
    for slot, seat in seats.items():
      if seat.over:
        continue
      self.drawn += seat.take(block, slot, version)
      cut = seat.cut(
        self.engine.stop_strings(seat.request),
        self.engine.decode,
        seat.request.sampling.get('min_tokens', self.engine.config.min_new_tokens),
      )
      seat.over = bool(cut) or not block.active[slot]
      if self.tell:
        self.tell(seat.request, seat.drawn())
      if seat.over:
        done.append(seat.completion(cut, bool(cut) or bool(block.finished[slot])))
        if self.reuse_cache:
          self.kept.add(slot, seat)
        elif self.pages:
          self.pages.release(seat)
    self.seats = {s: x for s, x in self.seats.items() if not x.over}
    return done

  def figures(self) -> dict:
    """Of the whole call.

    occupancy: share of computed slot-steps that drew a wanted token.
    time/dispatch_gap: seconds from a block's result to the next dispatch, on
      average; 0 where the next one ran already.
    requeued: seats that gave up their slot because the pool was full.
    tokens_prefilled: tokens of texts that were read. tokens_kept: those that
      were not, because their cache was there.
    """
    paged = {'requeued': self.requeued} if self.pages else {}
    return {
      **paged,
      'occupancy': self.drawn / self.rows if self.rows else 0.0,
      'tokens_prefilled': self.tokens_read,
      'tokens_kept': self.tokens_kept,
      'tokens_per_dispatch': self.drawn / max(self.dispatches, 1),
      'time/dispatch_gap': self.gap / max(self.dispatches, 1),
    }
