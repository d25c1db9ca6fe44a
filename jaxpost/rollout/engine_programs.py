"""The compiled programs of the native engine, the shapes that they have, and the host arrays that they take.

There are finitely many shapes: a prompt is padded to a power of two, attention reads a power of two of cache entries,
and a block computes all slots or a part of them. So nothing is compiled while a run samples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost.programs import generate
from jaxpost.programs.compile import Ledger, Program
from jaxpost.programs.generate import Entry
from jaxpost.rollout import sampler_config

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model
  from jaxpost.programs.sampling import Sampling
  from jaxpost.rollout.native import NativeEngine
  from jaxpost.rollout.page_table import PageCopy
  from jaxpost.rollout.sequence import ActiveSequence


def bucket(length: int, longest: int, smallest: int = 32, factor: int = 2) -> int:
  """Smallest of `smallest`, `smallest * factor`, ... that holds `length`; at most `longest`."""
  size = smallest
  while size < length:
    size *= factor
  return min(size, longest)


def cache_length(longest: int, block: int, page_size: int) -> int:
  """Cache entries of a slot for sequences of `longest` tokens, in whole pages: a block may run past the last token."""
  page = page_size or 1
  return -(-(longest + block) // page) * page


def entries_read(length: int, cache_length: int, page_size: int) -> int:
  """Cache entries that attention by XLA reads where `length` are filled."""
  return bucket(length, cache_length, max(64, page_size))


@dataclasses.dataclass(frozen=True)
class Buckets:
  """Shapes of an engine.

  slots: sequences decoded at the same time.
  batch_shards: parts that a mesh splits the slots into.
  least_rows: rows that the matrix product of this platform wants at least.
  longest: tokens of the longest sequence.
  cache_length: cache entries of a slot.
  page_size: entries of a page; 0: there are no pages.
  block: decode steps of a dispatch.
  max_new_tokens: of a completion.
  reads_filled: whether decoding reads the entries that are filled, wherever the cache ends.
  """

  slots: int
  batch_shards: int
  least_rows: int
  longest: int
  cache_length: int
  page_size: int
  block: int
  max_new_tokens: int
  reads_filled: bool = False

  def prompt(self, length: int) -> int:
    """Tokens that a prompt of `length` is padded to."""
    return bucket(length, self.longest)

  def read(self, length: int) -> int:
    """Cache entries that attention reads where `length` are filled."""
    return entries_read(length, self.cache_length, self.page_size)

  def decode(self, length: int) -> int:
    """Cache entries that a block of decoding reads; 0 means that the kernel reads exactly the filled entries."""
    return 0 if self.reads_filled else self.read(length)

  def rows(self, count: int) -> int:
    """Slots that are computed where the first `count` are in use."""
    return min(size for size in self.row_sizes() if size >= count)

  def row_sizes(self) -> list[int]:
    """All slots, a half, a quarter and an eighth of them.

    Only all of them where few blocks follow the first, and on a mesh that
    splits the slots: the first half of these is on the first half of its devices.
    """
    if self.batch_shards > 1 or self.max_new_tokens <= 4 * self.block:
      return [self.slots]
    return [self.slots // n for n in (1, 2, 4, 8) if self.slots // n >= self.least_rows]

  def copy_sizes(self, rows: int, length: int) -> list[int]:
    """Sizes of the table of page copies, where a prefill is `rows` prompts padded to `length`."""
    most = self.slots + rows * (length // self.page_size)  # each slot has a last page of its own
    return sorted({self.page_copies(n) for n in range(most + 1)})

  def page_copies(self, count: int) -> int:
    """Rows of the table for `count` page copies: few sizes, as each is a program of its own."""
    return bucket(count, 1 << 30, factor=8)

  def prefill_rows(self, group_size: int) -> int:
    """Prompts of a prefill: as many as fill the slots once with `group_size` samples each."""
    rows = -(-self.slots // group_size)
    return -(-rows // self.batch_shards) * self.batch_shards


class EnginePrograms:
  """Programs of one engine on one layout.

  init: () -> DecodeState with empty slots.
  prefill: (weights, tokens, lengths) -> Prefilled.
  insert: (state, prefilled, entry, run key, step) -> state.
  move: (state, source slots) -> state.
  """

  def __init__(
    self,
    model: Model,
    layout: Layout,
    compute: Compute,
    ledger: Ledger,
    *,
    slots: int,
    cache_shape: tuple[int, int],
    paged: bool,
    block: int,
    report: dict[str, int],
    sampling: Sampling,
  ):
    """Creates the programs; nothing is compiled yet.

    Args:
      slots: sequences decoded at the same time.
      cache_shape: (slots, entries of each), or (pages, entries of each).
      paged: whether the cache has pages.
      block: decode steps of a dispatch.
      report: `top` and `allowed` of `sampling.draw`.
      sampling: of an empty slot.
    """
    self._model = model
    self._placed = dict(layout=layout, compute=compute, ledger=ledger)
    self.ledger = ledger
    self.platform = compute.platform
    self._block = block
    self._report = report
    empty = generate.empty_state(model, slots, cache_shape, sampling, compute)
    self.init = Program('init_state', empty, ledger, generate.slot_shardings(layout))
    self.prefill = generate.make_prefill(model, layout, compute, ledger)
    self.insert = generate.make_insert(layout, ledger)
    self.move = generate.make_move(layout, ledger, paged=paged)
    self._made: dict[tuple, Program] = {}

  def decoder(self, rows: int, read: int) -> Program:
    """The program that decodes a block in `rows` slots, attending to `read` cache entries."""
    return self._once(generate.make_generate, self._block, rows, read, report=self._report)

  def extender(self, read: int) -> Program:
    """The program that extends cached prefixes, attending to `read` cache entries."""
    from jaxpost.programs import extend

    return self._once(extend.make_extend, read)

  def verifier(self, rows: int, read: int) -> Program:
    """The program that verifies drafts in `rows` slots, attending to `read` cache entries."""
    from jaxpost.programs import verify

    return self._once(verify.make_verify, rows, read, report=self._report)

  def _once(self, make: Callable[..., Program], *sizes: int, **options: Any) -> Program:
    """make(model, *sizes, ...), called once for the same sizes."""
    if (make, *sizes) not in self._made:
      self._made[make, *sizes] = make(self._model, *sizes, **options, **self._placed)
    return self._made[make, *sizes]


def make_entry(
  engine: NativeEngine, sequences: dict[int, ActiveSequence], rows: dict[int, int], copies: Collection[PageCopy] = ()
) -> Entry:
  """The argument of `insert`.

  Args:
    sequences: {slot: `ActiveSequence`}.
    rows: {slot: row of the `Prefilled`}.
    copies: pages to be filled.
  """
  slots = engine.max_concurrent_decodes
  source = np.full(slots, -1, np.int32)
  index = np.zeros(slots, np.int32)
  sample = np.zeros(slots, np.int32)
  each = [sampler_config.sampling(engine.config, {})] * slots
  for slot, sequence in sequences.items():
    request = sequence.request
    drawn = len(sequence.tokens) - len(request.tokens)
    source[slot] = rows[slot]
    index[slot] = request.prompt
    sample[slot] = request.sample
    s = sampler_config.sampling(engine.config, request.sampling)
    each[slot] = s.replace(max_tokens=s.max_tokens - drawn, min_tokens=s.min_tokens - drawn)
  table = None
  if engine.page:
    table = np.full((engine.buckets.page_copies(len(copies)), 3), -1, np.int32)
    table[: len(copies)] = np.array([dataclasses.astuple(copy) for copy in copies]).reshape(-1, 3)
  return Entry(source, index, sample, jax.tree.map(lambda *x: np.stack(x), *each), table)


def compile_jobs(
  engine: NativeEngine, params: Any, lengths: Sequence[int], group_size: int, turns: bool
) -> list[Callable[[], Any]]:
  """Functions that compile what sampling from prompts needs; see `engine.Engine.jobs`."""
  buckets = engine.buckets
  programs = engine.programs
  weights, state = engine.described(params)
  key = _abstract(engine, (2,), np.uint32, axes=(None,))
  step = _abstract(engine, (), np.int32, axes=())
  entry = jax.tree.map(lambda x: _abstract(engine, x.shape, x.dtype), engine.entry({}, {}))

  def tables(rows, read):
    return [_abstract(engine, (rows, read // engine.page), np.int32, axes=())] if engine.page else []

  jobs: list[Callable[[], Any]] = [functools.partial(engine.reshard.compile, params), programs.init.compile]
  low = min(lengths)
  high = engine.config.room
  if not turns:  # an environment's first message may make prompts longer
    high = min(max(lengths) + engine.config.max_new_tokens, high)
  # Preempted sequences are prefilled again, with what they have drawn.
  again = range(low, high) if turns or engine.page else ()
  rows = buckets.prefill_rows(group_size)
  for size in sorted({buckets.prompt(n) for n in (*lengths, *again)}):
    tokens, counts = _abstract(engine, (rows, size)), _abstract(engine, (rows,))
    prefilled = programs.prefill.outputs(weights, tokens, counts)
    jobs.append(functools.partial(programs.prefill.compile, weights, tokens, counts))
    for copies in buckets.copy_sizes(rows, size) if engine.page else [0]:
      enters = entry.replace(copies=_abstract(engine, (copies, 3))) if copies else entry
      jobs.append(functools.partial(programs.insert.compile, state, prefilled, enters, key, step))
  for read in sorted({buckets.decode(n + engine.block) for n in range(low, high)}):
    for count in buckets.row_sizes():
      jobs.append(functools.partial(programs.decoder(count, read).compile, weights, state, *tables(count, read)))
      if engine.config.speculation:
        from jaxpost.rollout import drafts

        draft = jax.tree.map(lambda x: _abstract(engine, x.shape, x.dtype), drafts.no_draft(count, engine.block - 1))
        verify = programs.verifier(count, read)
        jobs.append(functools.partial(verify.compile, weights, state, draft, *tables(count, read)))
  if turns and engine.can_reuse_cache:
    from jaxpost.programs import extend

    for read in sorted({buckets.read(n + engine.block) for n in range(low, high)}):
      chunk = jax.tree.map(
        lambda x: _abstract(engine, x.shape, x.dtype), extend.make_chunk(engine.max_concurrent_decodes, {}, 0)
      )
      table = tables(engine.max_concurrent_decodes, read)
      jobs.append(functools.partial(programs.extender(read).compile, weights, state, entry, chunk, key, step, *table))
  if len(buckets.row_sizes()) > 1:
    jobs.append(functools.partial(programs.move.compile, state, _abstract(engine, (engine.max_concurrent_decodes,))))
  return jobs


def _abstract(engine: NativeEngine, shape: tuple, dtype: Any = np.int32, axes: tuple | None = None):
  """Shape, type and sharding of an argument; its first dimension is the batch unless `axes` are given."""
  if axes is None:
    axes = ('batch', *(None,) * (len(shape) - 1))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=engine.layout.sharding(axes, shape))
