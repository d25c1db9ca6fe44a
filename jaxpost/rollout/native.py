"""The sampler that ships: the trainer's own model, in the trainer's process.

Legend: S slots, N prompts, P prompt tokens, C completion tokens, K kv heads.

Texts are read once and forked into their samples; a block draws some tokens
in every slot. `serve.py` has the loop, `programs/generate.py` what it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxpost.errors import InputError
from jaxpost.models.config import CustomConfig
from jaxpost.programs import extend as extending
from jaxpost.programs import generate as programs
from jaxpost.programs.compile import Ledger, Program
from jaxpost.programs.reshard import Reshard
from jaxpost.rollout import sampler, sampler_config
from jaxpost.rollout.kv_cache import Copy, Pages
from jaxpost.rollout.sampler_config import SamplerConfig, rung
from jaxpost.rollout.scheduler import Follow, Serving, Tell
from jaxpost.types import Completion, Prompt, Request, Rollout

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.distributed.transfer import Bridge
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model

_CHUNK = 32  # tokens that a conversation goes on by, at a time


class NativeEngine:
  """`engine.Engine` on the trainer's own model. Arrays live on `layout`.

  decode: token ids -> text, for stop strings; special tokens are text, too.
  bridge: to `layout`, where the trainer has other devices.
  share: sample from the trainer's frozen leaves, not from a copy.
  ahead: sampling goes on while the trainer updates its parameters.
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
    share: bool = False,
    ahead: bool = False,
  ):
    shards = layout.batch_shards
    sampler_config.check(model.config, config, shards)
    # Than two rows, XLA:CPU multiplies one 11 x slower in bfloat16.
    self.least = 1 if compute.dtype == 'float32' else 2
    slots = -(-max(config.slots, self.least) // shards) * shards
    self.max_concurrent_decodes = slots
    self.config, self.layout, self.decode = config, layout, decode
    self.block = max(1, min(config.block, config.max_new_tokens))
    # A block may run past the last token that counts.
    self.length = config.room + self.block
    if share:
      from jaxpost.models import shared_weights

      self._reshard = shared_weights.SharedWeights(model, layout)
      model = shared_weights.sampling_model(model)
    else:
      self._reshard = Reshard(model, bridge.source if bridge else layout, compute, ledger, lent=not ahead)
    self._model, self._compute, self._ledger = model, compute, ledger
    self._bridge = bridge
    self.page = config.page_size
    shape = slots, self.length
    if self.page:
      # A text takes whole pages; one more is nobody's.
      self.length = -(-self.length // self.page) * self.page
      entries = config.cache_tokens or max(slots * self.length // 2, self.length)
      shape = entries // self.page + 1, self.page
    self.cache_shape = shape
    self.pages()  # InputError where one text does not fit
    empty = programs.empty_state(model, slots, shape, sampler_config.sampling(config, {}), compute)
    self._init = Program('init_state', empty, ledger, programs.slot_shardings(layout))
    self._prefill = programs.make_prefill(model, layout, compute, ledger)
    self._insert = programs.make_insert(layout, compute, ledger)
    self._move = programs.make_move(layout, compute, ledger, paged=bool(self.page))
    self._generate = {}  # (rows, entries read) -> program
    self._extend = {}  # entries read -> program
    # A model of one's own reads one token after a cache, or all of a text.
    own = isinstance(model.config, CustomConfig)
    self.can_reuse_cache = not own and not (model.config.experts and model.config.experts.record)
    self.weights, self.version, self._fits = None, 0, False

  def load(self, params, version: int) -> dict:
    self.weights = None  # frees the last copy before the next is made
    self.weights = self._reshard(params)
    if self._bridge:  # whoever trains does not wait for those who sample
      self.weights = self._bridge(self.weights)
    else:
      jax.block_until_ready(self.weights)
    self.version = version
    shared = 0 if self._bridge else self._reshard.shared_bytes
    return {'bytes': sum(x.nbytes for x in jax.tree.leaves(self.weights)) - shared}

  def unload(self):
    self.weights = None

  @contextlib.contextmanager
  def preserve_weights(self) -> Iterator[None]:
    """Restores the present weights and version when the block ends."""
    weights = self.weights
    version = self.version
    yield
    self.weights = weights
    self.version = version

  # ------------------------------------------------------------------- verbs

  def init_decode_state(self):
    self._check_memory()
    try:
      return self._init()
    except jax.errors.JaxRuntimeError as e:
      if 'RESOURCE_EXHAUSTED' not in str(e):
        raise
      raise InputError(self._too_large()) from e

  def _check_memory(self):
    """InputError where the cache is larger than what the devices have left."""
    # Once: what the allocator keeps for the next cache looks taken.
    if not self._fits and self.cache_bytes() > sampler_config.free_bytes(self.layout):
      raise InputError(self._too_large())
    self._fits = True

  def _too_large(self) -> str:
    return sampler_config.too_large(
      self.max_concurrent_decodes, self.length, self.cache_bytes(), sampler_config.free_bytes(self.layout)
    )

  def described(self, params) -> tuple:
    """Shapes and shardings of its weights and of what `serve` keeps."""
    weights = self._reshard.outputs(params)
    if self._bridge:
      weights = self._bridge.arriving(weights)
    return weights, self._init.outputs()

  def cache_bytes(self) -> int:
    """Of the cache, on all devices together."""
    state = self._init.outputs()
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))

  def prefill(self, texts: Sequence[np.ndarray], rows: int = 0):
    """Reads token ids as one right-padded batch of `rows` (default: 2^n)."""
    shape = rows or self.row_rung(len(texts)), self.rung(max(map(len, texts)))
    tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
    for i, text in enumerate(texts):
      tokens[i, : len(text)] = text
      lengths[i] = len(text)
    put = self.layout.put
    return self._prefill(self.weights, put(tokens, 'batch', None), put(lengths, 'batch'))

  def pages(self) -> Pages | None:
    """An empty pool, of an engine that has one."""
    return Pages(self.page, self.cache_shape[0], self.length) if self.page else None

  def insert(self, state, prefix, entry, run_key, step):
    key, step = self.layout.put((run_key, np.int32(step)), None)
    return self._insert(state, prefix, self.layout.put(entry, 'batch', None), key, step)

  def extend(self, state, entry, more: dict, run_key, step, table=None):
    """As `insert`, of texts whose first entries are in their slots' caches.

    more: {slot: (entries that stay, [n] token ids that follow)}.
    """
    key, step = self.layout.put((run_key, np.int32(step)), None)
    entry = self.layout.put(entry, 'batch', None)
    read = self.read_rung(max(at + len(ids) for at, ids in more.values()))
    tables = () if table is None else (self.layout.put(table),)
    for start in range(0, max(len(x) for _, x in more.values()), _CHUNK):
      state = self._extender(read)(
        self.weights, state, entry, self.layout.put(self._chunk(more, start), 'batch', None), key, step, *tables
      )
    return state

  def _chunk(self, more: dict, start: int) -> extending.More:
    """The tokens of each from `start` on."""
    slots = self.max_concurrent_decodes
    tokens = np.zeros((slots, _CHUNK), np.int32)
    lengths, filled = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    for slot, (at, ids) in more.items():
      part = ids[start : start + _CHUNK]
      tokens[slot, : len(part)], lengths[slot] = part, len(part)
      filled[slot] = at + start
    return extending.More(tokens, lengths, filled)

  def _extender(self, read: int) -> Program:
    if read not in self._extend:
      self._extend[read] = extending.make_extend(self._model, read, self.layout, self._compute, self._ledger)
    return self._extend[read]

  def generate(self, state, read: int = 0, rows: int = 0, table=None):
    tables = () if table is None else (self.layout.put(table),)
    return self._reader(rows or self.max_concurrent_decodes, read or self.length)(self.weights, state, *tables)

  def move(self, state, moves: dict[int, int]):
    """The state with what is in slot s in moves[s]."""
    source = np.full(self.max_concurrent_decodes, -1, np.int32)
    source[list(moves.values())] = list(moves)
    return self._move(state, self.layout.put(source, 'batch'))

  def _reader(self, rows: int, read: int) -> Program:
    if (rows, read) not in self._generate:
      self._generate[rows, read] = programs.make_generate(
        self._model, self.block, rows, read, self.config.top_logprobs, self.layout, self._compute, self._ledger
      )
    return self._generate[rows, read]

  # ------------------------------------------------------------------ ladders

  def rung(self, length: int) -> int:
    """Tokens that a text of `length` is padded to."""
    return rung(length, self.config.room)

  def read_rung(self, length: int) -> int:
    """Cache entries that attention reads where `length` are filled."""
    return rung(length, self.length, max(64, self.page))

  def row_rung(self, rows: int) -> int:
    """Slots computed where the first `rows` are in use."""
    return min(x for x in self.row_rungs() if x >= rows)

  def row_rungs(self) -> list[int]:
    """All slots, a half, a quarter and an eighth of them.

    Only all where few blocks follow the first, and on a mesh that splits
    them: the first half of the slots is the first half of the devices.
    """
    slots = self.max_concurrent_decodes
    if self.layout.batch_shards > 1 or (self.config.max_new_tokens <= 4 * self.block):
      return [slots]
    return [slots // n for n in (1, 2, 4, 8) if slots // n >= self.least]

  def prefix_rows(self, group_size: int) -> int:
    """Prompts read at a time: those whose samples fill the slots once."""
    shards = self.layout.batch_shards
    rows = -(-self.max_concurrent_decodes // group_size)
    return -(-rows // shards) * shards

  # ----------------------------------------------------------------- requests

  def check(self, request: Request):
    """InputError where a request cannot be served."""
    sampler_config.check_request(self.config, request, self._model.config.vocab_size)
    if self.stop_strings(request) and not self.decode:
      raise InputError(f'prompt {request.prompt}: stop_strings need a tokenizer')

  def max_tokens(self, request: Request) -> int:
    return request.sampling.get('max_tokens', self.config.max_new_tokens)

  def stop_strings(self, request: Request) -> tuple[str, ...]:
    return request.sampling.get('stop_strings', self.config.stop_strings)

  def entry(self, seats: dict, rows: dict[int, int], copies: Sequence[Copy] = ()):
    """What `insert` takes, of {slot: serve.Seat} and {slot: row of a prefix}."""
    slots = self.max_concurrent_decodes
    source = np.full(slots, -1, np.int32)
    index, sample = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    each = [sampler_config.sampling(self.config, {})] * slots
    for slot, seat in seats.items():
      request, drawn = seat.request, len(seat.tokens) - len(seat.request.tokens)
      source[slot], index[slot] = rows[slot], request.prompt
      sample[slot] = request.sample
      s = sampler_config.sampling(self.config, request.sampling)
      each[slot] = s.replace(max_tokens=s.max_tokens - drawn, min_tokens=s.min_tokens - drawn)
    table = None
    if self.page:
      table = np.full((rung(len(copies), 1 << 30), 3), -1, np.int32)
      for i, copy in enumerate(copies):
        table[i] = dataclasses.astuple(copy)
    return programs.Entry(source, index, sample, jax.tree.map(lambda *x: np.stack(x), *each), table)

  # -------------------------------------------------------------------- calls

  def serve(
    self,
    requests: Iterable[Request],
    *,
    run_key,
    step: int,
    follow: Follow,
    read_rows: int | None = None,
    tell: Tell | None = None,
    reuse_cache: bool = True,
    on_dispatch: Callable[[int], None] | None = None,
  ) -> dict:
    """Samples whatever is asked for, until nobody asks for more.

    Turns of conversations, and anything whose next request depends on what
    was drawn, go through `follow`. Slots that wait for nobody are filled by
    others; what is drawn depends on (run key, step, prompt, sample, position
    in the text), never on who else is there or when a request came.

    Args:
      requests: to begin with; texts of any length that fits `room`.
      run_key: key data, [2] uint32.
      follow: follow(completions, idle) -> requests, between any two blocks:
        gets the completions that ended since (often none) and returns the
        requests that became ready (often none), of these or of earlier ones.
        With `idle` nothing is decoded and nothing waits: it may block until
        something is ready, and returning nothing ends the call. Of several
        processes every one must return the same.
      read_rows: texts read at a time; None: as many as wait, up to the slots.
      tell: tell(request, ids so far) hears of each block, before `follow`.
      reuse_cache: a request that begins with a finished text continues from
        its cache; False prefills it from its beginning.
      on_dispatch: called before each block with the number of blocks
        dispatched so far; it may `load` newer weights. Cache entries that
        were filled with the old ones stay as they are.

    Returns:
      figures: see `serve.Serving.figures`.
    """
    return Serving(
      self,
      run_key,
      step,
      follow,
      read_rows,
      tell,
      reuse_cache=reuse_cache and self.can_reuse_cache,
      on_dispatch=on_dispatch,
    ).run(requests)

  def __call__(
    self,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    run_key,
    step: int,
    sampling: dict | None = None,
    on_dispatch: Callable[[int], None] | None = None,
  ) -> Rollout:
    """Samples `group_size` completions of each prompt: one turn of each.

    Args:
      run_key: key data, [2] uint32; with step, prompt index and sample index
        it decides every draw.
      sampling: fields of `Sampling` that differ from the config, as scalars.
      on_dispatch: as in `serve`.
    """
    longest = max(len(p.tokens) for p in prompts)
    if longest > self.config.max_prompt:
      raise InputError(
        f'a prompt of {longest} tokens is longer than config.rollout.max_prompt_length={self.config.max_prompt}'
      )
    done: list[Completion] = []
    follow = lambda completions, idle: done.extend(completions) or ()
    requests = [
      Request(p.tokens, p.index, i, sampling or {}, n * group_size + i)
      for n, p in enumerate(prompts)
      for i in range(group_size)
    ]
    figures = self.serve(
      requests,
      run_key=run_key,
      step=step,
      follow=follow,
      read_rows=self.prefix_rows(group_size),
      on_dispatch=on_dispatch,
    )
    return sampler.to_rollout(prompts, done, self.config, step, self.version, figures)

  # ------------------------------------------------------------------ compile

  def jobs(self, params, lengths: Sequence[int], group_size: int, turns: bool = False) -> list:
    """Compilations that sampling from prompts of these lengths will need.

    Independent of each other, so that several can run at a time. turns:
    conversations will go on.
    """
    weights, state = self.described(params)
    rows, whole = self.prefix_rows(group_size), self.layout.sharding()
    jobs = [lambda: self._reshard.compile(params), self._init.compile]
    low, high = min(lengths), self.config.room
    if not turns:  # what an environment says first makes prompts longer, too
      high = min(max(lengths) + self.config.max_new_tokens, high)
    # A full pool sends texts back, to be read with what they have drawn.
    again = range(low, high) if turns or self.page else ()
    given = lambda made: jax.tree.map(lambda x: self._abstract(x.shape, x.dtype), made)
    entry = given(self.entry({}, {}))
    key = jax.ShapeDtypeStruct((2,), np.uint32, sharding=self.layout.sharding((None,)))
    step = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
    tables = lambda rows, read: (
      [jax.ShapeDtypeStruct((rows, read // self.page), np.int32, sharding=whole)] if self.page else []
    )
    for size in sorted({self.rung(n) for n in (*lengths, *again)}):
      tokens, counts = self._abstract((rows, size)), self._abstract((rows,))
      prefix = self._prefill.outputs(weights, tokens, counts)
      jobs += [
        functools.partial(self._prefill.compile, weights, tokens, counts),
        functools.partial(self._insert.compile, state, prefix, entry, key, step),
      ]
    for read in sorted({self.read_rung(n + self.block) for n in range(low, high)}):
      jobs += [
        functools.partial(self._reader(n, read).compile, weights, state, *tables(n, read)) for n in self.row_rungs()
      ]
      if turns and self.can_reuse_cache:
        jobs.append(
          functools.partial(
            self._extender(read).compile,
            weights,
            state,
            entry,
            given(self._chunk({}, 0)),
            key,
            step,
            *tables(self.max_concurrent_decodes, read),
          )
        )
    if len(self.row_rungs()) > 1:
      jobs.append(functools.partial(self._move.compile, state, self._abstract((self.max_concurrent_decodes,))))
    return jobs

  def _abstract(self, shape, dtype=np.int32):
    axes = ('batch', *(None,) * (len(shape) - 1))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=self.layout.sharding(axes, shape))
