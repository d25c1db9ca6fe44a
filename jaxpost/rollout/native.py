"""The native sampler: it runs the model of the trainer, in the trainer's process.

A prompt is prefilled once and forked into its samples; a block of decode steps draws tokens in every slot.
`scheduler.py` has the loop, `programs/generate.py` the compiled programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost.errors import InputError
from jaxpost.programs import generate
from jaxpost.programs.compile import Ledger
from jaxpost.programs.generate import Block, DecodeState, Entry, Prefilled
from jaxpost.programs.reshard import Reshard
from jaxpost.rollout import engine_programs, sampler, sampler_config
from jaxpost.rollout.buckets import Buckets, cache_length
from jaxpost.rollout.engine_programs import EnginePrograms
from jaxpost.rollout.sampler_config import SamplerConfig
from jaxpost.rollout.scheduler import NextRequests, OnTokens, Scheduler
from jaxpost.rollout.sequence import ActiveSequence, Completion, Request
from jaxpost.types import Prompt, Rollout

if TYPE_CHECKING:
  from jaxpost.distributed.bridge import Bridge
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model
  from jaxpost.models.shared_weights import SharedWeights
  from jaxpost.rollout.engine import OnDispatch
  from jaxpost.rollout.page_table import PageCopy, PageTable


class NativeEngine:
  """`engine.Engine` with the model of the trainer, and its arrays on `layout`.

  decode: token ids -> text, with special tokens, for stop strings.
  bridge: copies weights to `layout`, if the trainer has other devices.
  reshard: makes the sampling weights from the trainer's parameters; None: `Reshard` makes a
    copy in the sampler's layout and type. See `models.shared_weights`, too.
  asynchronous: whether the trainer updates its parameters while the engine samples.
  """

  def __init__(
    self,
    model: Model,
    config: SamplerConfig,
    layout: Layout,
    compute: Compute,
    ledger: Ledger,
    decode: Callable | None = None,
    bridge: Bridge | None = None,
    reshard: Reshard | SharedWeights | None = None,
    asynchronous: bool = False,
  ):
    multiple = config.page_size
    if compute.decode_kernel:
      from jaxpost.models import decode_kernels

      compute = decode_kernels.compute_of_decoding(compute, model.config, config)
      multiple = multiple or decode_kernels.entries_multiple(compute, model.config)
    shards = layout.batch_shards
    sampler_config.check(model.config, config, shards)
    # XLA:CPU multiplies one bfloat16 row 11 x slower than two.
    min_rows = 1 if compute.dtype == 'float32' else 2
    slots = -(-max(config.slots, min_rows) // shards) * shards
    self.max_concurrent_decodes = slots
    self.config = config
    self.layout = layout
    self.decode = decode
    self.block = max(1, min(config.block, config.max_new_tokens))
    self.length = cache_length(config.room, self.block, multiple)
    if compute.decode_kernel:
      lengths = dict(entries=self.length, page_size=config.page_size, block=self.block)
      compute = decode_kernels.compute_of_engine(compute, model.config, layout, slots, **lengths)
    if reshard is None:
      source = bridge.source if bridge else layout
      reshard = Reshard(model, source, compute, ledger, share_buffers=not asynchronous)
    self.reshard = reshard
    self._model_config = model.config
    self._bridge = bridge
    self.cache_shape = self._cache_shape()
    self.buckets = self._make_buckets(min_rows, reads_filled=bool(compute.decode_kernel))
    self.programs = EnginePrograms(
      model,
      layout,
      compute,
      ledger,
      empty_state=generate.empty_state(model, slots, self.cache_shape, sampler_config.sampling(config, {}), compute),
      paged=bool(config.page_size),
      block=self.block,
      report=dict(top=config.top_logprobs, allowed=config.top_k if config.sampling_mask else 0),
    )
    self.can_reuse_cache = sampler_config.can_extend(model.config)
    self._scheduler: type[Scheduler] = Scheduler
    if config.speculation:
      from jaxpost.rollout import drafts

      self._scheduler = drafts.DraftingScheduler
    self.weights: Any = None
    self.version = 0
    self._fits = False

  def _make_buckets(self, min_rows: int, reads_filled: bool) -> Buckets:
    return Buckets(
      slots=self.max_concurrent_decodes,
      batch_shards=self.layout.batch_shards,
      min_rows=min_rows,
      max_length=self.config.room,
      cache_length=self.length,
      page_size=self.config.page_size,
      block=self.block,
      max_new_tokens=self.config.max_new_tokens,
      reads_filled=reads_filled,
    )

  def _cache_shape(self) -> tuple[int, int]:
    """Returns (slots or pages, entries of each); InputError if the pages do not hold the longest sequence."""
    slots, size = self.max_concurrent_decodes, self.config.page_size
    if not size:
      return slots, self.length
    entries = self.config.cache_tokens or max(slots * self.length // 2, self.length)
    pages = entries // size
    if pages * size < self.length:
      raise InputError(
        f'config.rollout.cache_tokens: {pages} pages of {size} do not hold one sequence of {self.length} entries; '
        'raise it'
      )
    return pages + 1, size  # page 0 is reserved

  def load(self, params: Any, version: int) -> dict:
    """Copies the trainer's parameters into the sampling layout; returns {'bytes': number of bytes moved}."""
    self.weights = None  # frees the last copy before the next is made
    self.weights = self.reshard(params)
    if self._bridge:  # asynchronous: training devices do not wait for sampling ones
      self.weights = self._bridge(self.weights)
    else:
      jax.block_until_ready(self.weights)
    self.version = version
    shared = 0 if self._bridge else self.reshard.shared_bytes
    return {'bytes': sum(x.nbytes for x in jax.tree.leaves(self.weights)) - shared}

  def unload(self) -> None:
    """Frees the weights until the next `load`."""
    self.weights = None

  @contextlib.contextmanager
  def preserve_weights(self) -> Iterator[None]:
    """Restores the current weights and version when the block ends."""
    weights, version = self.weights, self.version
    yield
    self.weights, self.version = weights, version

  # ------------------------------------------------------------------- verbs

  def init_decode_state(self) -> DecodeState:
    """Returns a decode state with empty slots; InputError if it does not fit the devices."""
    # Checked once: memory of a freed cache that the allocator keeps counts as in use.
    if not self._fits and self.cache_bytes() > sampler_config.free_bytes(self.layout):
      raise InputError(self._too_large())
    self._fits = True
    try:
      return self.programs.init()
    except jax.errors.JaxRuntimeError as e:
      if 'RESOURCE_EXHAUSTED' not in str(e):
        raise
      raise InputError(self._too_large()) from e

  def _too_large(self) -> str:
    slots = self.max_concurrent_decodes
    needed = self.cache_bytes()
    free = max(sampler_config.free_bytes(self.layout), 0)
    return (
      f'config.rollout.slots: {slots} slots of {self.length} cache entries take {needed / 2**30:.2f} GiB and '
      f'{free / 2**30:.2f} are free: {int(slots * free / max(needed, 1))} slots would fit; lower it, or the lengths'
    )

  def described(self, params: Any) -> tuple:
    """Returns shapes and shardings of the arrays that sampling holds: (weights, decode state)."""
    weights = self.reshard.outputs(params)
    if self._bridge:
      weights = self._bridge.arriving(weights)
    return weights, self.programs.init.outputs()

  def cache_bytes(self) -> int:
    """Bytes of the cache, on all devices together."""
    state = self.programs.init.outputs()
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))

  def prefill(self, prompts: Sequence[np.ndarray], rows: int = 0) -> Prefilled:
    """Prefills prompts, token ids, as one right-padded batch of `rows` (0: a row bucket)."""
    shape = rows or self.buckets.rows(len(prompts)), self.buckets.prompt(max(map(len, prompts)))
    tokens = np.zeros(shape, np.int32)
    lengths = np.ones(shape[0], np.int32)
    for i, prompt in enumerate(prompts):
      tokens[i, : len(prompt)] = prompt
      lengths[i] = len(prompt)
    put = self.layout.put
    return self.programs.prefill(self.weights, put(tokens, 'batch', None), put(lengths, 'batch'))

  def pages(self) -> PageTable | None:
    """Returns an empty page table, or None if the cache has no pages."""
    if not self.config.page_size:
      return None
    from jaxpost.rollout import page_table

    return page_table.PageTable(self.config.page_size, self.cache_shape[0])

  def insert(self, state: DecodeState, prefilled: Prefilled, entry: Entry, run_key: Any, step: int) -> DecodeState:
    """Forks prefilled sequences into their slots."""
    key, step = self.layout.put((run_key, np.int32(step)), None)
    return self.programs.insert(state, prefilled, self.layout.put(entry, 'batch', None), key, step)

  def extend(
    self,
    state: DecodeState,
    entry: Entry,
    suffixes: dict[int, tuple[int, np.ndarray]],
    run_key: Any,
    step: int,
    table: np.ndarray | None = None,
  ) -> DecodeState:
    """Continues sequences whose first cache entries are in their slots.

    Args:
      suffixes: {slot: (entries that stay, [n] token ids to prefill)}.
      table: [slots, pages] int32, where the cache has pages.
    """
    from jaxpost.programs import extend

    key, step = self.layout.put((run_key, np.int32(step)), None)
    entry = self.layout.put(entry, 'batch', None)
    read = self.buckets.read(max(filled + len(ids) for filled, ids in suffixes.values()))
    tables = () if table is None else (self.layout.put(table),)
    for chunk in extend.chunks(self.max_concurrent_decodes, suffixes, self.programs.platform):
      chunk = self.layout.put(chunk, 'batch', None)
      state = self.programs.extender(read)(self.weights, state, entry, chunk, key, step, *tables)
    return state

  def generate(
    self, state: DecodeState, read: int = 0, rows: int = 0, table: np.ndarray | None = None
  ) -> tuple[DecodeState, Block]:
    """Decodes a block in the first `rows` slots (0: all), attending to `read` cache entries (0: all filled ones)."""
    tables = () if table is None else (self.layout.put(table),)
    rows = rows or self.max_concurrent_decodes
    return self.programs.decoder(rows, read or self.buckets.decode(self.length, rows))(self.weights, state, *tables)

  def move(self, state: DecodeState, moves: dict[int, int]) -> DecodeState:
    """Moves the contents of slot s to slot moves[s]."""
    source = np.full(self.max_concurrent_decodes, -1, np.int32)
    source[list(moves.values())] = list(moves)
    return self.programs.move(state, self.layout.put(source, 'batch'))

  # ----------------------------------------------------------------- requests

  def prefill_rows(self, group_size: int) -> int:
    """Prompts of a prefill: as many as fill the slots once with `group_size` samples each."""
    return self.buckets.prefill_rows(max(group_size, self.config.group_size))

  def entry(self, sequences: dict[int, ActiveSequence], rows: dict[int, int], copies: Sequence[PageCopy] = ()) -> Entry:
    """Returns the argument `entry` of `insert`.

    Args:
      sequences: {slot: sequence that enters it}.
      rows: {slot: row of the `Prefilled` that its entries are copied from}.
    """
    slots = self.max_concurrent_decodes
    source = np.full(slots, -1, np.int32)
    index = np.zeros(slots, np.int32)
    sample = np.zeros(slots, np.int32)
    samplings = [sampler_config.sampling(self.config, {})] * slots
    for slot, sequence in sequences.items():
      request = sequence.request
      drawn = len(sequence.tokens) - len(request.tokens)
      source[slot] = rows[slot]
      index[slot] = request.prompt
      sample[slot] = request.sample
      s = sampler_config.sampling(self.config, request.sampling)
      samplings[slot] = s.replace(max_tokens=s.max_tokens - drawn, min_tokens=s.min_tokens - drawn)
    table = None
    if self.config.page_size:
      table = np.full((self.buckets.page_copies(len(copies)), 3), -1, np.int32)
      table[: len(copies)] = np.array(copies).reshape(-1, 3)
    return Entry(source, index, sample, jax.tree.map(lambda *x: np.stack(x), *samplings), table)

  def check(self, request: Request) -> None:
    """Raises InputError if a request cannot be served."""
    sampler_config.check_request(self.config, request, self._model_config.vocab_size)
    if self.stop_strings(request) and not self.decode:
      raise InputError(f'prompt {request.prompt}: stop_strings need a tokenizer')

  def stop_strings(self, request: Request) -> tuple[str, ...]:
    """Strings that end the completion of a request."""
    return request.sampling.get('stop_strings', self.config.stop_strings)

  # -------------------------------------------------------------------- calls

  def serve(
    self,
    requests: Iterable[Request],
    *,
    run_key: Any,
    step: int,
    next_requests: NextRequests,
    prefill_rows: int | None = None,
    on_tokens: OnTokens | None = None,
    reuse_cache: bool = True,
    on_dispatch: OnDispatch | None = None,
  ) -> dict:
    """Serves requests with continuous batching, until no more come; see `engine.Engine.serve`."""
    return self._scheduler(
      self,
      run_key,
      step,
      next_requests,
      prefill_rows=prefill_rows,
      on_tokens=on_tokens,
      reuse_cache=reuse_cache and self.can_reuse_cache,
      on_dispatch=on_dispatch,
    ).run(requests)

  def __call__(
    self,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    run_key: Any,
    step: int,
    sampling: dict | None = None,
    on_dispatch: OnDispatch | None = None,
  ) -> Rollout:
    """Samples `group_size` completions of each prompt, of one turn each; see `engine.Engine.__call__`."""
    max_length = max(len(p.tokens) for p in prompts)
    if max_length > self.config.max_prompt:
      raise InputError(
        f'a prompt of {max_length} tokens is longer than config.rollout.max_prompt_length={self.config.max_prompt}'
      )
    finished: list[Completion] = []

    def collect(completions: list[Completion], _idle: bool) -> Iterable[Request]:
      finished.extend(completions)
      return ()

    requests = [
      Request(p.tokens, p.index, i, p.source.get('sampling', {}) | (sampling or {}), n * group_size + i)
      for n, p in enumerate(prompts)
      for i in range(group_size)
    ]
    figures = self.serve(
      requests,
      run_key=run_key,
      step=step,
      next_requests=collect,
      prefill_rows=self.prefill_rows(group_size),
      on_dispatch=on_dispatch,
    )
    return sampler.to_rollout(prompts, finished, self.config, step, self.version, figures=figures)

  def jobs(self, params: Any, lengths: Sequence[int], group_size: int, turns: bool = False) -> list[Callable[[], Any]]:
    """Returns functions that compile the programs of sampling; see `engine.Engine.jobs`."""
    return engine_programs.compile_jobs(self, params, lengths, group_size, turns)
