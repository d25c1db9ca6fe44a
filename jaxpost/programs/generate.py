"""Prefill, insert and generate: the programs of a sampler.

`extend.py` has the program that continues a cached prefix.

Legend: S slots, R of them in a block, T steps of a block, N prompts, P prompt tokens (padded to a bucket),
K kv heads, h head size, D hidden size, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import Layout
from jaxpost.losses import head_chunk
from jaxpost.models.config import CustomConfig
from jaxpost.models.parameters import STATEFUL
from jaxpost.models.transformer import flops_per_token, unconstrained
from jaxpost.programs import cache_storage
from jaxpost.programs import sampling as sampling_lib
from jaxpost.programs.compile import Ledger, Program
from jaxpost.programs.sampling import Sampling
from jaxpost.types import MASKED_LOGIT, Array, Cache

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model


@struct.dataclass
class Prefilled:
  """The result of a prefill: prompts from which any number of samples can be forked."""

  cache: Cache  # L x [N, K, P, h]
  hidden: Array  # [N, D], of the last prompt token
  lengths: Array  # [N] int32
  experts: tuple = ()  # L x [N, 1, P, k] uint16, where routing is recorded


@struct.dataclass
class DecodeState:
  """Everything the sampler keeps on the device."""

  cache: Cache  # L x [S, K, length, h], or pages
  hidden: Array  # [S, D], from which the next token is drawn
  positions: Array  # [S] int32, where that token will be written
  counts: Array  # [S] int32, tokens drawn so far
  active: Array  # [S] bool
  sampling: Sampling
  keys: Array  # [S, 2] uint32


@struct.dataclass
class Entry:
  """Sequences that enter slots; `source` is -1 for slots that do not change."""

  source: Array  # [S] int32, row of the Prefilled
  prompts: Array  # [S] int32, global prompt index
  samples: Array  # [S] int32, index within the group
  sampling: Sampling
  # For a cache in pages, [M, 3] int32: row of the Prefilled, number of the page in that row, target page; -1: no copy.
  copies: Array | None = None


@struct.dataclass
class Block:
  """Tokens that a call of `generate` drew, which the host reads."""

  tokens: Array  # [T, R] int32 of T steps and R rows
  logprobs: Array  # [T, R] float32
  behavior_logprobs: Array  # [T, R] float32
  drawn: Array  # [T, R] bool: the slot was active, so the token belongs to its completion
  active: Array  # [R] bool: the completion goes on after the block
  finished: Array  # [R] bool: a stop id was drawn
  broken: Array  # [R] bool: logits were not finite
  top: tuple  # ids and log-probs [T, R, n] of the top-n tokens, or ()
  allowed: tuple  # ([T, R, k] int32,), see `sampling.Drawn`, or ()
  experts: tuple  # ([T, R, L, k] uint16,), the experts of the tokens, or ()


def empty_state(
  model: Model, slots: int, cache_shape: tuple[int, int], sampling: Sampling, compute: Compute
) -> Callable:
  """Returns a function that returns a DecodeState without sequences.

  Args:
    cache_shape: (slots, entries of each) or (pages, entries of each).
    sampling: the initial parameters of every slot.
  """
  cfg = model.config

  def empty_cache():
    if model.empty_cache:
      return model.empty_cache(*cache_shape, compute)

    zeros = functools.partial(jnp.zeros, dtype=compute.cache)
    if jnp.dtype(compute.cache).itemsize == 1:
      from jaxpost.models import scaled

      zeros = functools.partial(scaled.empty_cache, compute=compute)

    def empty_layers(part):  # 0: keys, 1: values
      return tuple(zeros((cache_shape[0], heads, cache_shape[1], sizes[part])) for heads, sizes in cfg.layer_caches)

    keys, *values = map(empty_layers, range(len(cfg.cached[1])))  # latent attention caches one array per layer
    num_stateful = sum(stack in STATEFUL for stack in cfg.layer_stacks)
    # Recurrent states decay slowly; rounding them to bfloat16 each step would erase small contributions.
    states = tuple(tuple(jnp.zeros((slots, *shape)) for shape in cfg.state_shapes) for _ in range(num_stateful))
    return cache_storage.stored(Cache(keys, values[0] if values else (), states=states), compute.platform)

  def init():
    return DecodeState(
      cache=empty_cache(),
      hidden=jnp.zeros((slots, cfg.hidden_size), compute.residual),
      positions=jnp.zeros(slots, jnp.int32),
      counts=jnp.zeros(slots, jnp.int32),
      active=jnp.zeros(slots, bool),
      sampling=jax.tree.map(lambda x: jnp.broadcast_to(x, (slots, *jnp.shape(x))), sampling),
      keys=jnp.zeros((slots, 2), jnp.uint32),
    )

  return init


def slot_shardings(layout: Layout) -> Callable:
  """Returns a function from shapes to shardings: rows over the batch axes, heads over `tensor`."""

  def place(x):
    axes = ('batch', 'kv_heads') if len(x.shape) == 4 else ('batch',)
    return layout.sharding((*axes, *(None,) * (len(x.shape) - len(axes))), x.shape)

  return functools.partial(jax.tree.map, place)


def block_shardings(layout: Layout) -> Callable:
  """Returns a function from the shapes of (state, Block) to shardings: all devices have the whole block."""
  return lambda shapes: (slot_shardings(layout)(shapes[0]), layout.sharding())


def make_prefill(model: Model, layout: Layout, compute: Compute, ledger: Ledger) -> Program:
  """Makes the program prefill(weights, tokens [N, P], lengths [N]) -> Prefilled."""

  def prefill(weights, tokens, lengths):
    cache, hidden = model.prefill(weights, tokens, lengths, compute=compute, constrain=layout)
    return Prefilled(cache_storage.stored(cache.replace(experts=()), compute.platform), hidden, lengths, cache.experts)

  def flops(_weights, tokens, _lengths):
    return tokens.size * flops_per_token(model.config, tokens.shape[1] / 2)

  return Program('prefill', prefill, ledger, slot_shardings(layout), flops=flops)


def make_insert(layout: Layout, ledger: Ledger) -> Program:
  """Makes the program insert(state, prefilled, entry, run_key, step) -> state, which donates the state."""

  def insert(state, prefilled, entry, run_key, step):
    source = jnp.maximum(entry.source, 0)
    if entry.copies is None:
      cache = cache_storage.put_rows(state.cache, prefilled.cache, entry.source >= 0, source)
    else:
      from jaxpost.programs import pages

      cache = pages.put(state.cache, prefilled.cache, entry.copies)
    hidden, positions = prefilled.hidden[source], prefilled.lengths[source]
    return enter(state.replace(cache=cache), entry, hidden, positions, run_key, step=step)

  return Program('insert', insert, ledger, slot_shardings(layout), donate=(0,))


def enter(
  state: DecodeState, entry: Entry, hidden: jax.Array, positions: jax.Array, run_key: jax.Array, step: jax.Array
) -> DecodeState:
  """Returns the state with new sequences in their slots, where the cache already has the entries of their prompts.

  hidden: [S, D] and positions: [S], at the end of each prompt.
  """
  pick = functools.partial(cache_storage.where, entry.source >= 0)
  keys = sampling_lib.slot_keys(run_key, step, entry.prompts, entry.samples, entry.sampling.seed)
  return state.replace(
    hidden=pick(hidden, state.hidden),
    positions=pick(positions, state.positions),
    counts=pick(0, state.counts),
    active=pick(True, state.active),
    sampling=jax.tree.map(pick, entry.sampling, state.sampling),
    keys=pick(keys, state.keys),
  )


def make_move(layout: Layout, ledger: Ledger, *, paged: bool) -> Program:
  """Makes the program move(state, source [S]) -> state, which donates the state.

  It moves the sequence of slot source[s], if that is not -1, to slot s; slot source[s] is free afterwards.
  """

  def move(state, source):
    new, slots = source >= 0, jnp.arange(len(source))
    source = jnp.maximum(source, 0)
    cache = state.cache if paged else cache_storage.put_rows(state.cache, None, new, source)
    moved = jax.tree.map(lambda x: cache_storage.where(new, x[source], x), state.replace(cache=None))
    is_source = jnp.any(new & (source == slots[:, None]), axis=1)
    return moved.replace(cache=cache, active=moved.active & ~is_source)

  return Program('move', move, ledger, slot_shardings(layout), donate=(0,))


def make_generate(
  model: Model,
  steps: int,
  rows: int,
  read: int,
  report: dict[str, int],
  layout: Layout,
  compute: Compute,
  ledger: Ledger,
) -> Program:
  """Makes the program generate(weights, state, table) -> (state, Block): `steps` tokens per slot.

  It decodes the first `rows` slots; attention reads the first `read` entries of their caches, or the pages of `table`
  [rows, n]. The caller makes sure that no other slot is in use, and that none grows past `read`. The state is donated;
  the host can read the block while the next call runs.

  Args:
    read: 0 passes the whole cache, uncopied, to the kernel of `models/decode_kernels.py`, which reads filled entries.
    report: the arguments `top` and `allowed` of `sampling.draw`.
  """
  decode = functools.partial(decode_block, model=model, compute=compute, steps=steps, read=read, report=report)
  shards = layout.mesh.shape['data'] * layout.mesh.shape['fsdp']  # weights of samplers are replicated over these axes
  # A custom model may use the mesh in its own way.
  independent = shards > 1 and layout.mesh.size == shards and not isinstance(model.config, CustomConfig)

  def generate(weights, state, table=None):
    if not independent or table is not None or rows < len(state.active):
      return decode(weights, state, table, rows=rows, constrain=layout)
    # Each device decodes its own slots, which are independent of each other. The partitioner would all-reduce the
    # branch of every draw, and all-gather the entries that are written to a cache.
    split = layout.spec(('batch',))
    by_step = PartitionSpec(None, *split)
    return jax.shard_map(
      functools.partial(decode, rows=rows // shards, constrain=unconstrained),
      mesh=layout.mesh,
      check_vma=False,
      in_specs=(PartitionSpec(), split),
      out_specs=(
        split,
        Block(
          **dict.fromkeys(('tokens', 'logprobs', 'behavior_logprobs', 'drawn', 'top', 'allowed', 'experts'), by_step),
          **dict.fromkeys(('active', 'finished', 'broken'), split),
        ),
      ),
    )(weights, state)

  def flops(_weights, state, table=None):
    held = state.cache.k[0].shape[2] * (1 if table is None else table.shape[1])
    return steps * rows * flops_per_token(model.config, read or held)

  return Program('generate', generate, ledger, block_shardings(layout), donate=(1,), flops=flops, read=read)


def decode_block(
  weights: Any,
  state: DecodeState,
  table: jax.Array | None = None,
  *,
  model: Model,
  compute: Compute,
  steps: int,
  rows: int,
  read: int,
  report: dict[str, int],
  constrain: Callable,
) -> tuple[DecodeState, Block]:
  """Decodes `steps` tokens of the first `rows` slots, of all devices or of one; see `make_generate`.

  constrain: a `Layout` or, in a shard_map, where each device decodes its own slots, `unconstrained`.
  """
  slots, cache = first_slots(state, table, rows=rows, read=read)
  filled, numbers = slots.positions, jnp.arange(steps)
  attended = jnp.where(slots.active, filled, 0)  # kernels read no entries of idle slots

  def step(carry, inputs):
    slots, recent = carry
    number, uniform = inputs
    drawn = draw(model, weights, slots, uniform, report=report, compute=compute, layout=constrain)
    entries = cache
    if compute.platform == 'tpu' and read and table is None:  # sliced before the loop, they would be copied
      entries = cache_storage.first_entries(jax.lax.optimization_barrier((state.cache, number))[0], rows, read)
    recent, hidden = model.decode(
      weights, entries, recent, drawn.tokens, attended, step=number, compute=compute, constrain=constrain
    )
    after, stopped = advance(slots, drawn.tokens)
    after = after.replace(hidden=hidden.astype(slots.hidden.dtype))
    return (after, recent), (drawn, slots.active, stopped)

  recent = cache_storage.empty_block(model, state.cache, rows, steps)
  # All uniforms of the block at once: the generator is a loop of its own.
  uniforms = jax.vmap(lambda n: sampling_lib.uniforms(slots.keys, filled + n))(numbers)
  (slots, recent), (drawn, active, stopped) = jax.lax.scan(step, (slots, recent), (numbers, uniforms))
  slots = slots.replace(positions=filled + steps)
  experts = ()
  if recent.experts:
    from jaxpost.models import routing

    experts = routing.recorded(recent.experts)
  block = Block(
    tokens=drawn.tokens,
    logprobs=drawn.logprobs,
    behavior_logprobs=drawn.behavior_logprobs,
    drawn=active,
    # A buffer of its own: slots.active is also in the state, which is donated while the host still reads this block.
    active=slots.active | False,
    finished=jnp.any(stopped, axis=0),
    broken=jnp.any(active & drawn.broken, axis=0),
    top=drawn.top,
    allowed=drawn.allowed,
    experts=experts,
  )
  return with_first_slots(state, slots, recent, table, compute=compute, layout=constrain), block


def first_slots(state: DecodeState, table: jax.Array | None, rows: int, read: int) -> tuple[DecodeState, Cache]:
  """Returns (the state of the first `rows` slots without cache, the cache that they attend to); see `make_generate`."""
  slots = jax.tree.map(lambda x: x[:rows], state.replace(cache=None))
  if table is not None:
    return slots, state.cache.replace(table=table)
  return slots, cache_storage.first_entries(state.cache, rows, read)


def with_first_slots(
  state: DecodeState, slots: DecodeState, recent: Cache, table: jax.Array | None, *, compute: Compute, layout: Callable
) -> DecodeState:
  """Returns the state with the first slots replaced by `slots`, and `recent` appended to their caches."""
  all_slots = cache_storage.replace_first(state.replace(cache=None), slots)
  append = functools.partial(cache_storage.append, table=table, platform=compute.platform)
  args = state.cache, recent, state.positions[: len(slots.positions)]
  if isinstance(layout, Layout) and layout.batch_shards > 1:  # XLA would gather `recent` for each slot of the loop
    assert len(args[2]) == len(state.positions), 'a mesh that splits the slots decodes all of them'
    specs = jax.tree.map(lambda sharding: sharding.spec, slot_shardings(layout)(args))
    append = jax.shard_map(append, mesh=layout.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
  return all_slots.replace(cache=append(*args))


def draw(
  model: Model, weights: dict, state: DecodeState, uniform: jax.Array, report: dict, compute: Compute, layout: Any
) -> sampling_lib.Drawn:
  """Draws the next token of each slot from its hidden state, with the random numbers `uniform` [S].

  report: see `sampling.draw`.
  layout: the `constrain` of `decode_block`. A device of the `tensor` axis computes the logits of its part of the
    vocabulary; an all-to-all then gives it all logits of its part of the slots, for which it draws.
  """
  assert model.head, 'a scalar head has no logits'
  head = model.head(weights)
  logits = head_chunk.logits(state.hidden, head, model.config.logit_form, compute.dtype)
  if model.config.vocab_size < head.shape[0]:  # padding of the vocabulary is masked
    logits = jnp.where(jnp.arange(head.shape[0]) < model.config.vocab_size, logits, MASKED_LOGIT)
  logits = layout(layout(logits, 'batch', 'vocab'), 'slots', None)
  options = dict(unroll=compute.platform == 'gpu', vocab_tile=sampling_lib.TILES[compute.platform])
  drawn = sampling_lib.draw(logits, state.sampling, uniform, state.counts, **report, **options)
  return jax.tree.map(lambda x: layout(x, 'batch', *[None] * (x.ndim - 1)), drawn)


def advance(state: DecodeState, tokens: jax.Array) -> tuple[DecodeState, jax.Array]:
  """Returns (the state after these tokens [S], [S] bool: whether an active slot drew a stop id)."""
  stop = jnp.any(tokens[:, None] == state.sampling.stop_ids, axis=-1)
  counts = state.counts + state.active
  full = counts >= state.sampling.max_tokens
  return state.replace(counts=counts, active=state.active & ~stop & ~full), state.active & stop
