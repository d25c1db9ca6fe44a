"""Continuous batching: assigns requests to the slots of an engine, and collects their completions.

`Scheduler.run` is the loop: admit queued requests into free slots (from the prefix cache, or by a prefill), dispatch a
block of decode steps for all slots, harvest the tokens of an earlier block, free the slots that finished.

While requests are queued, a block is harvested before the next is dispatched, as an empty slot costs more than the gap.
Once none are queued, the next block runs while the host reads the last one, and occupied slots are compacted, so that
fewer rows are computed. No decision depends on the clock.

The cache entries of a finished sequence stay until their slot or pages are needed (`prefix_cache.PrefixCache`). A
request that continues such a sequence, the next turn of a conversation, prefills only its new tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpost.distributed.transfer import to_host
from jaxpost.errors import DivergedError
from jaxpost.rollout.prefix_cache import CachedPrefix, PrefixCache
from jaxpost.rollout.sequence import ActiveSequence, Completion, Request

if TYPE_CHECKING:
  from jaxpost.programs.generate import Block
  from jaxpost.rollout.engine import OnDispatch
  from jaxpost.rollout.native import NativeEngine
  from jaxpost.rollout.page_table import PageCopy

# (finished completions, idle) -> further requests; see `Engine.serve`.
NextRequests = Callable[[list[Completion], bool], Iterable[Request]]
# Called with (request, the token ids that the block drew for it) after each block.
OnTokens = Callable[[Request, np.ndarray], None]


class Dispatched(NamedTuple):
  """A block that was dispatched and not harvested yet.

  slots: {slot: sequence} that it decodes. version: number of updates that produced its weights.
  """

  slots: dict[int, ActiveSequence]
  block: Block
  version: int


@dataclasses.dataclass(eq=False)
class Scheduler:
  """One call of `NativeEngine.serve`: the queue, and which sequence is in which slot."""

  overlaps = True  # a block may be dispatched before the last one is harvested

  engine: NativeEngine
  run_key: np.ndarray
  step: int
  next_requests: NextRequests
  _: dataclasses.KW_ONLY
  prefill_rows: int | None
  on_tokens: OnTokens | None = None
  reuse_cache: bool = True
  on_dispatch: OnDispatch | None = None

  def __post_init__(self) -> None:
    self.queue: collections.deque[ActiveSequence] = collections.deque()
    self.cancellable = False  # whether any request can be cancelled
    self.active: dict[int, ActiveSequence] = {}  # by slot, first admitted first
    self.state = self.engine.init_decode_state()
    self.pages = self.engine.pages()
    self.prefilled: Any = None  # the `Prefilled` of the last prefill
    self.prefilled_rows: dict[bytes, int] = {}  # prompt -> its row in `prefilled`
    self.running: collections.deque[Dispatched] = collections.deque()
    self.prefix_cache = PrefixCache(self.pages)
    # Counts that `figures` reports.
    self.computed = 0  # slot-steps: decode steps x slots
    self.drawn = 0  # tokens, without those of cancelled requests
    self.dispatches = 0
    self.preempted = 0
    self.tokens_prefilled = 0
    self.tokens_cached = 0
    self.gap_s = 0.0  # total time between the harvest of a block and the dispatch of the next, in seconds
    self.harvested_at: float | None = None

  def run(self, requests: Iterable[Request]) -> dict:
    """Serves requests until no more come; returns figures."""
    self.enqueue(requests)
    finished: list[Completion] = []
    while True:
      self.enqueue(self.next_requests(finished, False))
      if self.cancellable:
        self.drop_cancelled()
      self.admit()
      if not self.active:
        arrived = list(self.next_requests([], True))
        if not arrived:
          return self.figures()
        self.enqueue(arrived)
        finished = []
        continue
      can_draw = any(sequence.remaining > 0 for sequence in self.active.values())
      overlap = self.overlaps and not self.queue and can_draw
      dispatched = False
      if overlap or not self.running:
        dispatched = self.dispatch()
      # If blocks overlap, the block just dispatched runs while the one before it is read.
      keep_running = 1 if overlap and dispatched else 0
      finished = self.harvest() if len(self.running) > keep_running else []

  def enqueue(self, requests: Iterable[Request]) -> None:
    """Checks requests and puts them at the end of the queue."""
    for request in requests:
      self.engine.check(request)
      self.cancellable |= request.is_cancelled is not None
      max_tokens = request.sampling.get('max_tokens', self.engine.config.max_new_tokens)
      self.queue.append(ActiveSequence(request, max_tokens, request.tokens))

  def drop_cancelled(self) -> None:
    """Removes cancelled requests from the queue and the slots; tokens of theirs in a running block are discarded."""
    sequences = (*self.queue, *self.active.values())
    cancelled = {x for x in sequences if x.request.is_cancelled and x.request.is_cancelled()}
    for sequence in cancelled:
      sequence.done = True
      self.drawn -= len(sequence.drawn())
      if self.pages and sequence in self.active.values():
        self.pages.release(sequence)
    self.dequeue(cancelled)
    self.active = {slot: sequence for slot, sequence in self.active.items() if sequence not in cancelled}

  # ------------------------------------------------------------------ admission

  def admit(self) -> None:
    """Gives free slots to queued sequences, in order, after prefills of those that need one."""
    self.admit_cached()
    free = self.free_slots()
    while free and self.queue:
      matched, copies, has_room = self.match_prefilled(free)
      if matched:
        self.insert(matched, copies)
        free = free[len(matched) :]
      elif has_room:
        self.prefill()
      if not has_room:
        return

  def free_slots(self) -> list[int]:
    """Returns the slots without a sequence; those with a cached prefix come last."""
    cached = self.prefix_cache.slots
    slots = range(self.engine.max_concurrent_decodes)
    return [slot for slot in slots if slot not in self.active and slot not in cached] + cached

  def match_prefilled(self, free: list[int]) -> tuple[dict[int, ActiveSequence], list[PageCopy], bool]:
    """Returns ({free slot: queued sequence of the last prefill}, page copies, False if one found too few pages)."""
    matched: dict[int, ActiveSequence] = {}
    copies: list[PageCopy] = []
    for sequence in self.queue:
      if len(matched) == len(free):
        break
      if sequence.key in self.prefilled_rows:
        if self.pages:
          row, evict = self.prefilled_rows[sequence.key], self.prefix_cache.evict
          fills = self.pages.admit(sequence, sequence.key, row, len(sequence.tokens), self.engine.block, evict=evict)
          if fills is None:
            return matched, copies, False
          copies += fills
        matched[free[len(matched)]] = sequence
    return matched, copies, True

  def admit_cached(self) -> None:
    """Admits queued requests that extend a cached prefix; only their suffix is prefilled."""
    if not self.prefix_cache.entries:
      return
    free = self.free_slots()
    admitted: dict[int, ActiveSequence] = {}
    suffixes = {}
    for sequence in list(self.queue):
      cached = self.prefix_cache.longest_match(sequence.key) if free else None
      if cached is None or (slot := self.claim_cached_slot(cached, sequence, free)) is None:
        continue
      free.remove(slot)
      # The last token is always computed, as the next one is drawn from its output.
      filled = min(len(cached.tokens) // sequence.tokens.itemsize, len(sequence.tokens) - 1)
      admitted[slot] = sequence
      suffixes[slot] = (filled, sequence.tokens[filled:])
      self.tokens_cached += filled
      self.tokens_prefilled += len(sequence.tokens) - filled
    if not admitted:
      return
    entry = self.engine.entry(admitted, dict.fromkeys(admitted, 0))
    self.dequeue({*admitted.values()})
    table = None
    if self.pages:
      longest = max(len(sequence.tokens) for sequence in admitted.values())
      table = self.pages.table(admitted, self.engine.max_concurrent_decodes, self.engine.buckets.read(longest))
    self.state = self.engine.extend(self.state, entry, suffixes, self.run_key, self.step, table=table)
    self.active |= admitted

  def claim_cached_slot(self, cached: CachedPrefix, sequence: ActiveSequence, free: list[int]) -> int | None:
    """Takes a prefix, and its pages, from the cache for a sequence that continues it; returns the slot.

    It is None if there are too few pages: then the prefix is dropped, and the sequence stays queued without pages.
    """
    self.prefix_cache.entries.remove(cached)
    if not self.pages:
      return cached.slot
    self.pages.hand_over(cached.holder, sequence)
    if self.pages.grow(sequence, len(sequence.tokens) + self.engine.block, self.prefix_cache.evict):
      return free[0]
    self.pages.release(sequence)
    return None

  def dequeue(self, sequences: set[ActiveSequence]) -> None:
    """Removes sequences from the queue."""
    self.queue = collections.deque(sequence for sequence in self.queue if sequence not in sequences)

  def prefill(self) -> None:
    """Prefills the prompt of the first sequence in the queue, with others of the same length bucket."""
    engine = self.engine
    bucket = engine.buckets.prompt(len(self.queue[0].tokens))
    max_rows = self.prefill_rows or engine.max_concurrent_decodes
    prompts: dict[bytes, np.ndarray] = {}
    for sequence in self.queue:
      if len(prompts) == max_rows:
        break
      if engine.buckets.prompt(len(sequence.tokens)) == bucket:
        prompts.setdefault(sequence.key, sequence.tokens)
    self.prefilled = None  # frees the arrays of the last prefill first
    self.prefilled = engine.prefill(list(prompts.values()), self.prefill_rows or 0)
    self.prefilled_experts = to_host(self.prefilled.experts, share=False)
    self.prefilled_rows = {key: row for row, key in enumerate(prompts)}
    self.tokens_prefilled += sum(map(len, prompts.values()))

  def insert(self, admitted: dict[int, ActiveSequence], copies: list[PageCopy]) -> None:
    """Forks prefilled sequences into their slots."""
    self.dequeue({*admitted.values()})
    if not self.pages:
      self.prefix_cache.evict(admitted)
    rows = {slot: self.prefilled_rows[sequence.key] for slot, sequence in admitted.items()}
    entry = self.engine.entry(admitted, rows, copies)
    self.state = self.engine.insert(self.state, self.prefilled, entry, self.run_key, self.step)
    self.active |= admitted
    for slot, sequence in admitted.items():
      experts = [x[rows[slot], 0, : len(sequence.tokens)] for x in self.prefilled_experts]  # of each layer
      sequence.experts = (np.stack(experts, axis=1),) if experts else ()

  # --------------------------------------------------------------------- decode

  def dispatch(self) -> bool:
    """Dispatches a block for all slots that may still draw tokens.

    Returns False, without a dispatch, if running blocks must be harvested first, to free pages.
    """
    engine = self.engine
    if self.pages and not self.ensure_pages():
      return False
    if self.on_dispatch:
      self.on_dispatch(self.dispatches)
    live = {slot: sequence for slot, sequence in self.active.items() if sequence.remaining > 0}
    if not self.queue:
      live = self.compact(live)
    rows = engine.buckets.rows(max(live) + 1)
    read = engine.buckets.decode(max(sequence.used for sequence in live.values()) + engine.block, rows)
    if self.harvested_at is not None and not self.running:
      self.gap_s += time.perf_counter() - self.harvested_at
    table = self.pages.table(live, rows, read or engine.length) if self.pages else None
    block = self.decode(live, rows, read, table)
    for sequence in live.values():
      sequence.used += engine.block
      sequence.remaining -= engine.block
    self.running.append(Dispatched(live, block, engine.version))
    self.computed += rows * engine.block
    self.dispatches += 1
    return True

  def decode(self, live: dict[int, ActiveSequence], rows: int, read: int, table: np.ndarray | None) -> Block:
    """Dispatches a block of the sequences in the first `rows` slots."""
    del live
    self.state, block = self.engine.generate(self.state, read, rows, table)
    return block

  def ensure_pages(self) -> bool:
    """Allocates pages for a block of every sequence, preempting the last admitted; False to harvest blocks first."""
    block, evict = self.engine.block, self.prefix_cache.evict
    for sequence in list(self.active.values()):
      while sequence in self.active.values() and not self.pages.grow(sequence, sequence.used + block, evict):
        if self.running:
          return False
        slot, last = list(self.active.items())[-1]
        del self.active[slot]
        self.pages.release(last)
        self.queue.appendleft(last.requeued())
        self.preempted += 1
    return True

  def compact(self, live: dict[int, ActiveSequence]) -> dict[int, ActiveSequence]:
    """Moves the last slots into free ones if a smaller row bucket then suffices; returns the live sequences by slot."""
    bucket = self.engine.buckets.rows
    count = len(self.active)
    if bucket(count) == bucket(max(live) + 1):
      return live
    free = (slot for slot in range(count) if slot not in self.active)
    moves = {slot: next(free) for slot in sorted(self.active) if slot >= count}
    if not moves:
      return live
    self.relocate_cached(set(moves.values()))
    self.state = self.engine.move(self.state, moves)
    self.active = {moves.get(slot, slot): sequence for slot, sequence in self.active.items()}
    return {slot: sequence for slot, sequence in self.active.items() if sequence.remaining > 0}

  def relocate_cached(self, slots: set[int]) -> None:
    """Moves cached prefixes out of these slots, or evicts them."""
    if self.pages:
      return
    occupied = slots | {*self.prefix_cache.slots}
    free = [slot for slot in self.free_slots() if slot not in occupied]
    moves = {}
    for cached in self.prefix_cache.entries:
      if cached.slot in slots and free:
        moves[cached.slot] = cached.slot = free.pop()
    self.prefix_cache.evict(slots)
    if moves:
      self.state = self.engine.move(self.state, moves)

  def harvest(self) -> list[Completion]:
    """Reads the oldest block; returns the completions that ended in it."""
    slots, block, version = self.running.popleft()
    block = to_host(block, share=False)
    self.harvested_at = time.perf_counter()
    if block.broken.any():
      raise DivergedError(
        f'sampling at step {self.step}: logits of the weights after {version} updates are not finite (the run has '
        'diverged: lower the learning rate and restart from an earlier checkpoint), or forbidden_ids and '
        'min_new_tokens leave no token to draw'
      )
    finished = []
    for slot, sequence in slots.items():
      if sequence.done:
        continue
      sequence.append(block, slot, version)
      stop_string = sequence.cut_at_stop_string(
        self.engine.stop_strings(sequence.request),
        self.engine.decode,
        sequence.request.sampling.get('min_tokens', self.engine.config.min_new_tokens),
      )
      self.drawn += len(sequence.blocks[-1].tokens)
      sequence.done = bool(stop_string) or not block.active[slot]
      if self.on_tokens:
        self.on_tokens(sequence.request, sequence.blocks[-1].tokens)
      if sequence.done:
        finished.append(sequence.completion(stop_string, bool(stop_string) or bool(block.finished[slot])))
        if self.reuse_cache:
          self.prefix_cache.add(slot, sequence)
        elif self.pages:
          self.pages.release(sequence)
    self.active = {slot: sequence for slot, sequence in self.active.items() if not sequence.done}
    return finished

  def figures(self) -> dict:
    """Returns metrics of the whole call.

    occupancy: share of computed slot-steps that drew a token of a completion.
    time/dispatch_gap: mean seconds from a block's harvest to the next dispatch, 0 where the next one ran already.
    preempted: sequences that lost their slot because no page was free.
    tokens_prefilled: prompt tokens that were computed; tokens_cached: those found in the prefix cache.
    """
    paged = {'preempted': self.preempted} if self.pages else {}
    return {
      **paged,
      'occupancy': self.drawn / self.computed if self.computed else 0.0,
      'tokens_prefilled': self.tokens_prefilled,
      'tokens_cached': self.tokens_cached,
      'tokens_per_dispatch': self.drawn / max(self.dispatches, 1),
      'time/dispatch_gap': self.gap_s / max(self.dispatches, 1),
    }
