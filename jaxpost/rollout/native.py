"""The sampler that ships: slots, filled from a queue, in the trainer's process.

Legend: S slots, N prompts, P prompt tokens, C completion tokens, K kv heads.

Prompts are read once and forked into their samples; a block decodes K tokens
in every slot; slots that are done take the next sample. The host looks at a
block's result while the next one runs, so no decision waits for the device
and none depends on the clock.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from jaxpost.errors import InputError
from jaxpost.matmul import Compute
from jaxpost.models import rope
from jaxpost.models.model import Model
from jaxpost.programs import generate as programs
from jaxpost.programs.compile import Ledger, Program
from jaxpost.sharding import Layout, to_host
from jaxpost.types import Prompt, Rollout, Sampling


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """How completions are sampled.

  slots: sequences in flight. max_prompt: longest prompt, in tokens.
  stop_ids: any of these ends a completion and is part of it.
  block: tokens per dispatch.
  """

  slots: int
  max_prompt: int
  max_new_tokens: int
  stop_ids: tuple[int, ...]
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  block: int = 16


def rung(length: int, longest: int, smallest: int = 32) -> int:
  """The least of 32, 64, 128, ... that holds `length`, at most `longest`."""
  size = smallest
  while size < length:
    size *= 2
  return min(size, longest)


def _check_lengths(cfg, config: SamplerConfig):
  """Cached keys must be those that training would make of the whole text."""
  limit, longest = rope.by_length(cfg), (
      config.max_prompt + config.max_new_tokens)
  if limit and longest > limit:
    kinds = {dict(r.scaling).get('rope_type') for r in cfg.ropes}
    raise InputError(
        f'config.rollout: max_prompt_length + max_new_tokens = {longest}, but '
        f'rope scaling {"".join(kinds & set(rope.BY_LENGTH))} turns keys '
        f'otherwise once a text is longer than {limit}; lower them to that')


class NativeEngine:
  """`engine.Engine` on the trainer's own model. Arrays live on `layout`."""

  def __init__(self, model: Model, config: SamplerConfig, layout: Layout,
               compute: Compute, ledger: Ledger):
    _check_lengths(model.config, config)
    shards = layout.batch_shards
    # One row makes a vector product, which XLA:CPU runs 8 x slower than two.
    slots = -(-max(config.slots, 2) // shards) * shards
    self.max_concurrent_decodes = slots
    self.config, self.layout = config, layout
    self.block = max(1, min(config.block, config.max_new_tokens))
    # A block may run past the last token that counts.
    self.length = config.max_prompt + -(
        -config.max_new_tokens // self.block) * self.block
    self._model, self._compute, self._ledger = model, compute, ledger
    self._prepare = programs.make_prepare(model, layout, compute, ledger)
    empty = programs.empty_state(
        model, slots, self.length, config.max_new_tokens,
        len(config.stop_ids), compute)
    self._init = Program(
        'init_state', empty, ledger, programs.slot_shardings(layout))
    self._prefill = programs.make_prefill(model, layout, compute, ledger)
    self._insert = programs.make_insert(layout, ledger)
    self._generate = {}  # entries read -> program
    self.weights, self.version = None, 0

  def load(self, params, version: int) -> dict:
    self.weights = None  # frees the last copy before the next is made
    self.weights = jax.block_until_ready(self._prepare(params))
    self.version = version
    return {'bytes': sum(x.nbytes for x in jax.tree.leaves(self.weights))}

  def unload(self):
    self.weights = None

  def init_decode_state(self):
    return self._init()

  def prefill(self, prompts: Sequence[Prompt], rows: int = 0):
    """Reads prompts as one right-padded batch of `rows` (default: as many)."""
    longest = max(len(p.tokens) for p in prompts)
    if longest > self.config.max_prompt:
      raise InputError(
          f'a prompt of {longest} tokens is longer than '
          f'config.rollout.max_prompt_length={self.config.max_prompt}')
    shape = rows or len(prompts), rung(longest, self.config.max_prompt)
    tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
    for i, p in enumerate(prompts):
      tokens[i, :len(p.tokens)] = p.tokens
      lengths[i] = len(p.tokens)
    put = self.layout.put
    return self._prefill(
        self.weights, put(tokens, 'batch', None), put(lengths, 'batch'))

  def insert(self, state, prefix, entry, run_key, step):
    return self._insert(
        state, prefix, self.layout.put(entry, 'batch', None),
        self.layout.put(run_key, None), self.layout.put(np.int32(step)))

  def generate(self, state, read: int = 0):
    return self._reader(read or self.length)(self.weights, state)

  def _reader(self, read: int) -> Program:
    if read not in self._generate:
      self._generate[read] = programs.make_generate(
          self._model, self.block, read, self.layout, self._compute,
          self._ledger)
    return self._generate[read]

  def jobs(self, params, lengths: Sequence[int], group_size: int) -> list:
    """Compilations that sampling from prompts of these lengths will need.

    Independent of each other, so that several can run at a time.
    """
    weights, state = self._prepare.outputs(params), self._init.outputs()
    rows = self.prefix_rows(group_size)
    longest = self.config.max_prompt
    jobs = [lambda: self._prepare.compile(params), self._init.compile]
    for size in sorted({rung(n, longest) for n in lengths}):
      tokens, counts = self._abstract((rows, size)), self._abstract((rows,))
      prefix = self._prefill.outputs(weights, tokens, counts)
      entry = jax.tree.map(
          lambda x: self._abstract(x.shape, x.dtype), _empty_entry(self))
      key = jax.ShapeDtypeStruct(
          (2,), np.uint32, sharding=self.layout.sharding((None,)))
      step = jax.ShapeDtypeStruct((), np.int32, sharding=self.layout.sharding())
      jobs += [
          functools.partial(self._prefill.compile, weights, tokens, counts),
          functools.partial(
              self._insert.compile, state, prefix, entry, key, step)]
    blocks = -(-self.config.max_new_tokens // self.block)
    low, high = (min(n + self.block * k, self.length) for n, k in (
        (min(lengths), 1), (max(lengths), blocks)))
    for read in sorted({rung(n, self.length, 64)
                        for n in range(low, high + 1)}):
      jobs.append(functools.partial(
          self._reader(read).compile, weights, state))
    return jobs

  def prefix_rows(self, group_size: int) -> int:
    """Prompts read at a time: those whose samples fill the slots once."""
    shards = self.layout.batch_shards
    rows = -(-self.max_concurrent_decodes // group_size)
    return -(-rows // shards) * shards

  def _abstract(self, shape, dtype=np.int32):
    axes = ('batch', *(None,) * (len(shape) - 1))
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=self.layout.sharding(axes, shape))

  def __call__(self, prompts: Sequence[Prompt], *, group_size: int, run_key,
               step: int, sampling: dict | None = None) -> Rollout:
    """Samples `group_size` completions of each prompt.

    Args:
      run_key: key data, [2] uint32; with step, prompt index and sample index
        it decides every draw.
      sampling: fields of `Sampling` that differ from the config, as scalars.
    """
    run = _Run(self, prompts, group_size, run_key, step, sampling or {})
    while run.busy():
      run.fill()
      run.advance()
    return run.rollout()


def _empty_entry(engine) -> programs.Entry:
  """All slots stay as they are."""
  slots, stops = engine.max_concurrent_decodes, len(engine.config.stop_ids)
  zeros = lambda *s, dtype=np.int32: np.zeros((slots, *s), dtype)
  return programs.Entry(zeros() - 1, zeros(), zeros(), Sampling(
      zeros(dtype=np.float32), zeros(), zeros(dtype=np.float32), zeros(stops),
      zeros()))


class _Run:
  """One call of the engine: the queue, and who sits in which slot."""

  def __init__(self, engine, prompts, group_size, run_key, step, sampling):
    self.engine, self.prompts, self.group = engine, tuple(prompts), group_size
    self.run_key, self.step, self.overrides = run_key, step, sampling
    slots = engine.max_concurrent_decodes
    total = len(prompts) * group_size
    self.queue = collections.deque(range(total))
    self.owner = np.full(slots, -1)  # sequence in each slot
    self.used = np.zeros(slots, np.int64)  # cache entries, an upper bound
    self.left = np.zeros(slots, np.int64)  # tokens still to draw, at most
    self.state = engine.init_decode_state()
    self.flags = None  # of the last block dispatched: who goes on
    self.fresh = np.zeros(slots, bool)  # seated since: not in the flags
    self.rows = engine.prefix_rows(group_size)
    self.prefix, self.first = None, 0  # prefilled prompts: first, +1, ...
    room = engine.config.max_new_tokens
    self.tokens = np.zeros((total, room), np.int32)
    self.logprobs = np.zeros((total, room), np.float32)
    self.behaviour = np.zeros((total, room), np.float32)
    self.lengths = np.zeros(total, np.int32)
    self.finished = np.zeros(total, bool)
    self.experts = None  # or what each token chose
    self.steps = 0

  def busy(self) -> bool:
    return bool(self.queue) or bool((self.owner >= 0).any())

  def fill(self):
    """Gives free slots the next samples, reading their prompts if needed."""
    free = [s for s, owner in enumerate(self.owner) if owner < 0]
    while free and self.queue:
      prompt = self.queue[0] // self.group
      if self.prefix is None or prompt >= self.first + self.rows:
        self.first = prompt
        self.prefix = self.engine.prefill(
            self.prompts[prompt:prompt + self.rows], self.rows)
      taken = {}
      while (free and self.queue and
             self.queue[0] // self.group < self.first + self.rows):
        taken[free.pop(0)] = self.queue.popleft()
      self.seat(taken)

  def seat(self, taken: dict[int, int]):
    """Inserts sequences {slot: n} from the current prefix."""
    slots = len(self.owner)
    source = np.full(slots, -1, np.int32)
    index, sample = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    for slot, n in taken.items():
      prompt, sample[slot] = divmod(n, self.group)
      source[slot] = prompt - self.first
      index[slot] = self.prompts[prompt].index
      self.owner[slot] = n
      self.used[slot] = len(self.prompts[prompt].tokens)
      self.left[slot] = self.engine.config.max_new_tokens
    entry = programs.Entry(source, index, sample, self.sampling(slots))
    self.state = self.engine.insert(
        self.state, self.prefix, entry, self.run_key, self.step)
    self.fresh |= source >= 0

  def sampling(self, slots: int) -> Sampling:
    c, given = self.engine.config, self.overrides
    full = lambda name, value, dtype: np.full(
        slots, given.get(name, value), dtype)
    return Sampling(
        full('temperature', c.temperature, np.float32),
        full('top_k', c.top_k, np.int32), full('top_p', c.top_p, np.float32),
        np.tile(np.asarray(c.stop_ids, np.int32), (slots, 1)),
        full('max_tokens', c.max_new_tokens, np.int32))

  def advance(self):
    """Dispatches a block and harvests what the one before it finished."""
    engine = self.engine
    spent = (self.owner >= 0) & (self.left <= 0)
    if spent.any():  # the host need not be told that these are done
      self.harvest(np.flatnonzero(spent))
      return
    busy = self.owner >= 0
    most = int(self.used[busy].max()) + engine.block
    read = rung(most, engine.length, 64)
    self.state, active = engine.generate(self.state, read)
    self.used += engine.block
    self.left -= engine.block
    self.steps += engine.block
    before, self.flags = self.flags, active
    fresh, self.fresh = self.fresh, np.zeros_like(self.fresh)
    if before is None:
      return
    done = busy & ~fresh & ~to_host(before)
    if done.any():
      self.harvest(np.flatnonzero(done))

  def harvest(self, slots):
    s = self.state
    tokens, logprobs, behaviour, counts, finished = to_host(
        (s.tokens, s.logprobs, s.behaviour_logprobs, s.counts, s.finished))
    rows = self.owner[slots]
    self.tokens[rows], self.logprobs[rows] = tokens[slots], logprobs[slots]
    self.behaviour[rows], self.lengths[rows] = behaviour[slots], counts[slots]
    self.finished[rows] = finished[slots]
    if s.cache.experts:
      found = np.stack([x[slots, 0] for x in to_host(s.cache.experts)], axis=2)
      if self.experts is None:
        self.experts = np.zeros(
            (len(self.tokens), *found.shape[1:]), found.dtype)
      self.experts[rows] = found
    self.owner[slots] = -1

  def rollout(self) -> Rollout:
    return Rollout(
        self.prompts, self.tokens, self.lengths, self.logprobs,
        self.behaviour, self.finished, self.step, self.engine.version,
        self.occupancy(), experts=self.experts)

  def occupancy(self) -> float:
    """Share of slot-steps that drew a token somebody asked for."""
    total = self.steps * len(self.owner)
    return float(self.lengths.sum()) / total if total else 0.0
