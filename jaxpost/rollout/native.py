"""The sampler that ships: the trainer's own model, in the trainer's process.

Legend: S slots, N prompts, P prompt tokens, C completion tokens, K kv heads.

Texts are read once and forked into their samples; a block draws some tokens
in every slot. `serve.py` has the loop, `programs/generate.py` what it runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jaxpost.errors import InputError
from jaxpost.matmul import Compute
from jaxpost.models import rope
from jaxpost.models.model import Model
from jaxpost.programs import generate as programs
from jaxpost.programs.compile import Ledger, Program
from jaxpost.rollout.serve import Follow, Serving
from jaxpost.sharding import Layout
from jaxpost.types import Completion, Prompt, Request, Rollout, Sampling

_IDS = 8  # at least so many stop ids and forbidden ids fit a request


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """How completions are sampled; requests may differ, see `Request.sampling`.

  slots: sequences in flight. max_prompt: longest prompt, in tokens.
  max_context: longest text with what is drawn; 0: the sum of the two others.
  stop_ids: any of these ends a completion and is part of it; below 0: none.
  stop_strings: likewise, and needs `decode` of the engine.
  block: tokens per dispatch.
  top_logprobs: how many of the likeliest tokens to report at each place.
  """

  slots: int
  max_prompt: int
  max_new_tokens: int
  stop_ids: tuple[int, ...]
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  forbidden_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  min_new_tokens: int = 0
  block: int = 8
  max_context: int = 0
  top_logprobs: int = 0


def rung(length: int, longest: int, smallest: int = 32) -> int:
  """The least of 32, 64, 128, ... that holds `length`, at most `longest`."""
  size = smallest
  while size < length:
    size *= 2
  return min(size, longest)


def _check_lengths(cfg, config: SamplerConfig):
  """Cached keys must be those that training would make of the whole text."""
  limit, longest = rope.by_length(cfg), config.max_context or (
      config.max_prompt + config.max_new_tokens)
  if limit and longest > limit:
    kinds = {dict(r.scaling).get('rope_type') for r in cfg.ropes}
    raise InputError(
        f'config.rollout: max_prompt_length + max_new_tokens = {longest}, but '
        f'rope scaling {"".join(kinds & set(rope.BY_LENGTH))} turns keys '
        f'otherwise once a text is longer than {limit}; lower them to that')


class NativeEngine:
  """`engine.Engine` on the trainer's own model. Arrays live on `layout`.

  decode: token ids -> text, for stop strings.
  """

  def __init__(self, model: Model, config: SamplerConfig, layout: Layout,
               compute: Compute, ledger: Ledger,
               decode: Callable | None = None):
    _check_lengths(model.config, config)
    for name in 'stop_ids', 'forbidden_ids':
      check_ids(vars(config)[name], model.config.vocab_size, f'sampler: {name}')
    shards = layout.batch_shards
    # One row makes a vector product, which XLA:CPU runs 8 x slower than two.
    slots = -(-max(config.slots, 2) // shards) * shards
    self.max_concurrent_decodes = slots
    self.config, self.layout, self.decode = config, layout, decode
    self.block = max(1, min(config.block, config.max_new_tokens))
    self.room = config.max_context or config.max_prompt + config.max_new_tokens
    # A block may run past the last token that counts.
    self.length = self.room + self.block
    self._model, self._compute, self._ledger = model, compute, ledger
    self._widths = dict(
        stop_ids=max(_IDS, len(config.stop_ids)),
        forbidden_ids=max(_IDS, len(config.forbidden_ids)))
    self._prepare = programs.make_prepare(model, layout, compute, ledger)
    empty = programs.empty_state(
        model, slots, self.length, self.sampling({}), compute)
    self._init = Program(
        'init_state', empty, ledger, programs.slot_shardings(layout))
    self._prefill = programs.make_prefill(model, layout, compute, ledger)
    self._insert = programs.make_insert(layout, compute, ledger)
    self._move = programs.make_move(layout, compute, ledger)
    self._generate = {}  # (rows, entries read) -> program
    self.weights, self.version = None, 0

  def load(self, params, version: int) -> dict:
    self.weights = None  # frees the last copy before the next is made
    self.weights = jax.block_until_ready(self._prepare(params))
    self.version = version
    return {'bytes': sum(x.nbytes for x in jax.tree.leaves(self.weights))}

  def unload(self):
    self.weights = None

  # ------------------------------------------------------------------- verbs

  def init_decode_state(self):
    return self._init()

  def prefill(self, texts: Sequence[np.ndarray], rows: int = 0):
    """Reads token ids as one right-padded batch of `rows` (default: 2^n)."""
    shape = rows or self.row_rung(len(texts)), self.rung(
        max(map(len, texts)))
    tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
    for i, text in enumerate(texts):
      tokens[i, :len(text)] = text
      lengths[i] = len(text)
    put = self.layout.put
    return self._prefill(
        self.weights, put(tokens, 'batch', None), put(lengths, 'batch'))

  def insert(self, state, prefix, entry, run_key, step):
    return self._insert(
        state, prefix, self.layout.put(entry, 'batch', None),
        self.layout.put(run_key, None), self.layout.put(np.int32(step)))

  def generate(self, state, read: int = 0, rows: int = 0):
    return self._reader(
        rows or self.max_concurrent_decodes, read or self.length)(
            self.weights, state)

  def move(self, state, moves: dict[int, int]):
    """The state with what is in slot s in moves[s]."""
    source = np.full(self.max_concurrent_decodes, -1, np.int32)
    source[list(moves.values())] = list(moves)
    return self._move(state, self.layout.put(source, 'batch'))

  def _reader(self, rows: int, read: int) -> Program:
    if (rows, read) not in self._generate:
      self._generate[rows, read] = programs.make_generate(
          self._model, self.block, rows, read, self.config.top_logprobs,
          self.layout, self._compute, self._ledger)
    return self._generate[rows, read]

  # ------------------------------------------------------------------ ladders

  def rung(self, length: int) -> int:
    """Tokens that a text of `length` is padded to."""
    return rung(length, self.room)

  def read_rung(self, length: int) -> int:
    """Cache entries that attention reads where `length` are filled."""
    return rung(length, self.length, 64)

  def row_rung(self, rows: int) -> int:
    """Slots computed where the first `rows` are in use."""
    return min(x for x in self.row_rungs() if x >= rows)

  def row_rungs(self) -> list[int]:
    """All slots, a half, a quarter and an eighth of them.

    Only all where few blocks follow the first, and on a mesh that splits
    them: the first half of the slots is the first half of the devices.
    """
    slots = self.max_concurrent_decodes
    if self.layout.batch_shards > 1 or (
        self.config.max_new_tokens <= 4 * self.block):
      return [slots]
    return [slots] + [x for x in (slots // 2, slots // 4, slots // 8) if x > 1]

  def prefix_rows(self, group_size: int) -> int:
    """Prompts read at a time: those whose samples fill the slots once."""
    shards = self.layout.batch_shards
    rows = -(-self.max_concurrent_decodes // group_size)
    return -(-rows // shards) * shards

  # ----------------------------------------------------------------- requests

  def check(self, request: Request):
    """InputError where a request cannot be served."""
    size, given = len(request.tokens), request.sampling
    name = f'prompt {request.prompt}'
    if not size:
      raise InputError(f'{name}: is empty; a text begins with some token')
    most = self.max_tokens(request)
    if most < 1 or size + most > self.room:
      raise InputError(
          f'{name}: {size} tokens and {most} to draw do not fit the '
          f'{self.room} of a slot; shorten it, or raise '
          'config.rollout.max_prompt_length')
    if given.get('stop_strings', self.config.stop_strings) and not self.decode:
      raise InputError(f'{name}: stop_strings need a tokenizer')
    for key, width in self._widths.items():
      ids = given.get(key, ())
      if len(ids) > width:
        raise InputError(
            f'{name}: {len(ids)} {key}, of {width} that fit; name as many in '
            'the config of the engine')
      check_ids(ids, self._model.config.vocab_size, f'{name}: {key}')

  def max_tokens(self, request: Request) -> int:
    return request.sampling.get('max_tokens', self.config.max_new_tokens)

  def stop_strings(self, request: Request) -> tuple[str, ...]:
    return request.sampling.get('stop_strings', self.config.stop_strings)

  def sampling(self, given: dict) -> Sampling:
    """One slot's, as numpy scalars and [M] ids: `given`, else the config."""
    c = self.config
    own = dict(stop_ids=c.stop_ids, forbidden_ids=c.forbidden_ids)
    ids = lambda name: np.array(
        (*given.get(name, own[name]), *(-1,) * self._widths[name])[
            :self._widths[name]], np.int32)
    f, i = np.float32, np.int32
    return Sampling(
        f(given.get('temperature', c.temperature)),
        i(given.get('top_k', c.top_k)), f(given.get('top_p', c.top_p)),
        f(given.get('min_p', c.min_p)), ids('stop_ids'), ids('forbidden_ids'),
        i(given.get('min_tokens', c.min_new_tokens)),
        i(given.get('max_tokens', c.max_new_tokens)), i(given.get('seed', 0)))

  def entry(self, requests: dict[int, Request], rows: dict[int, int]):
    """What `insert` takes, of {slot: request} and {slot: row of a prefix}."""
    slots = self.max_concurrent_decodes
    source = np.full(slots, -1, np.int32)
    index, sample = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    each = [self.sampling({})] * slots
    for slot, request in requests.items():
      source[slot], index[slot] = rows[slot], request.prompt
      sample[slot] = request.sample
      each[slot] = self.sampling(request.sampling)
    return programs.Entry(
        source, index, sample, jax.tree.map(lambda *x: np.stack(x), *each))

  def check_finite(self, block, step: int):
    if block.broken.any():
      raise FloatingPointError(
          f'sampling at step {step}: logits of the weights after '
          f'{self.version} updates are not finite; the run has diverged: '
          'lower the learning rate and restart from an earlier checkpoint')

  # -------------------------------------------------------------------- calls

  def serve(self, requests: Iterable[Request], *, run_key, step: int,
            follow: Follow, read_rows: int | None = None) -> dict:
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

    Returns:
      figures: occupancy, tokens_per_dispatch, time/host_gap (seconds).
    """
    return Serving(self, run_key, step, follow, read_rows).run(requests)

  def __call__(self, prompts: Sequence[Prompt], *, group_size: int, run_key,
               step: int, sampling: dict | None = None) -> Rollout:
    """Samples `group_size` completions of each prompt: one turn of each.

    Args:
      run_key: key data, [2] uint32; with step, prompt index and sample index
        it decides every draw.
      sampling: fields of `Sampling` that differ from the config, as scalars.
    """
    longest = max(len(p.tokens) for p in prompts)
    if longest > self.config.max_prompt:
      raise InputError(
          f'a prompt of {longest} tokens is longer than '
          f'config.rollout.max_prompt_length={self.config.max_prompt}')
    done: list[Completion] = []

    def follow(completions, idle):
      del idle
      done.extend(completions)
      return ()

    requests = [
        Request(p.tokens, p.index, i, sampling or {}, n * group_size + i)
        for n, p in enumerate(prompts) for i in range(group_size)]
    figures = self.serve(
        requests, run_key=run_key, step=step, follow=follow,
        read_rows=self.prefix_rows(group_size))
    done.sort(key=lambda c: c.request.tag)
    room = self.config.max_new_tokens
    pad = lambda name: np.stack([
        np.pad(x, (0, room - len(x)))
        for x in (vars(c)[name] for c in done)])
    return Rollout(
        tuple(prompts), pad('tokens'),
        np.array([len(c.tokens) for c in done], np.int32), pad('logprobs'),
        pad('behaviour_logprobs'), np.array([c.finished for c in done]),
        step, self.version, figures.pop('occupancy'), figures)

  # ------------------------------------------------------------------ compile

  def jobs(self, params, lengths: Sequence[int], group_size: int) -> list:
    """Compilations that sampling from prompts of these lengths will need.

    Independent of each other, so that several can run at a time.
    """
    weights, state = self._prepare.outputs(params), self._init.outputs()
    rows = self.prefix_rows(group_size)
    jobs = [lambda: self._prepare.compile(params), self._init.compile]
    for size in sorted({self.rung(n) for n in lengths}):
      tokens, counts = self._abstract((rows, size)), self._abstract((rows,))
      prefix = self._prefill.outputs(weights, tokens, counts)
      entry = jax.tree.map(
          lambda x: self._abstract(x.shape, x.dtype), self.entry({}, {}))
      key = jax.ShapeDtypeStruct(
          (2,), np.uint32, sharding=self.layout.sharding((None,)))
      step = jax.ShapeDtypeStruct((), np.int32, sharding=self.layout.sharding())
      jobs += [
          functools.partial(self._prefill.compile, weights, tokens, counts),
          functools.partial(
              self._insert.compile, state, prefix, entry, key, step)]
    low, high = min(lengths), max(lengths) + self.config.max_new_tokens
    reads = sorted({self.read_rung(n + self.block)
                    for n in range(low, high)})
    for rows in self.row_rungs():
      jobs += [functools.partial(
          self._reader(rows, read).compile, weights, state) for read in reads]
    if len(self.row_rungs()) > 1:
      jobs.append(functools.partial(self._move.compile, state, self._abstract(
          (self.max_concurrent_decodes,))))
    return jobs

  def _abstract(self, shape, dtype=np.int32):
    axes = ('batch', *(None,) * (len(shape) - 1))
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=self.layout.sharding(axes, shape))


def check_ids(ids: Sequence[int], vocab_size: int, where: str):
  """InputError for ids outside the vocabulary; those below 0 mean none."""
  wrong = [i for i in ids if i >= vocab_size]
  if wrong:
    raise InputError(
        f'{where}: {wrong[0]} is outside the vocabulary of {vocab_size}')
