"""Prefill, insert and generate: the programs of a sampler.

Legend: S slots, N prompts, P prompt tokens (padded to a rung), C completion
tokens, K kv heads, h head size, D hidden size, L layers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxpost.losses import head as head_lib
from jaxpost.matmul import Compute
from jaxpost.models.model import Model
from jaxpost.models.transformer import flops_per_token, nest, unstack_layers
from jaxpost.programs import sampling as sampling_lib
from jaxpost.programs.compile import Ledger, Program
from jaxpost.programs.score import narrow
from jaxpost.sharding import Layout
from jaxpost.types import Array, Cache, Sampling


@struct.dataclass
class Prefix:
  """Prompts read once, to be forked into any number of samples."""

  cache: Cache  # L x [N, K, P, h]
  hidden: Array  # [N, D], of the last prompt token
  lengths: Array  # [N] int32


@struct.dataclass
class DecodeState:
  """Everything the sampler keeps on the device."""

  cache: Cache  # L x [S, K, length, h]
  hidden: Array  # [S, D], from which the next token is drawn
  positions: Array  # [S] int32, where that token will be written
  counts: Array  # [S] int32, tokens drawn so far
  active: Array  # [S] bool
  finished: Array  # [S] bool: a stop id was drawn
  sampling: Sampling
  keys: Array  # [S, 2] uint32
  tokens: Array  # [S, C] int32
  logprobs: Array  # [S, C] float32
  behaviour_logprobs: Array  # [S, C] float32


@struct.dataclass
class Entry:
  """What goes into the slots; `source` is -1 where a slot stays as it is."""

  source: Array  # [S] int32, row of the Prefix
  prompts: Array  # [S] int32, global prompt index
  samples: Array  # [S] int32, index within the group
  sampling: Sampling


def empty_state(model: Model, slots: int, length: int, new_tokens: int,
                stop_ids: int, compute: Compute) -> Callable:
  """A function that returns a DecodeState of `length` cache entries a slot."""
  cfg = model.config
  shape = (slots, cfg.num_kv_heads, length, cfg.head_dim)

  def init():
    zeros = lambda *s, dtype=jnp.int32: jnp.zeros((slots, *s), dtype)
    cache = lambda: tuple(
        jnp.zeros(shape, compute.cache) for _ in range(cfg.num_layers))
    float32, e = jnp.float32, cfg.experts
    experts = tuple(
        jnp.zeros((slots, 1, length, e.top_k), jnp.uint16)
        for _ in range(cfg.num_layers)) if e and e.record else ()
    return DecodeState(
        Cache(cache(), cache(), experts),
        zeros(cfg.hidden_size, dtype=compute.residual), zeros(), zeros(),
        zeros(dtype=bool), zeros(dtype=bool),
        # Not 0: a slot that was never used must not look greedy.
        Sampling(zeros(dtype=float32) + 1, zeros(), zeros(dtype=float32),
                 zeros(stop_ids), zeros()),
        zeros(2, dtype=jnp.uint32), zeros(new_tokens),
        zeros(new_tokens, dtype=float32), zeros(new_tokens, dtype=float32))

  return init


def slot_shardings(layout: Layout) -> Callable:
  """Shapes -> shardings: rows over the batch axes, heads over tensor."""
  def place(x):
    axes = ('batch', 'kv_heads') if len(x.shape) == 4 else ('batch',)
    return layout.sharding((*axes, *(None,) * (len(x.shape) - len(axes))),
                           x.shape)
  return lambda shapes: jax.tree.map(place, shapes)


def make_prefill(model: Model, layout: Layout, compute: Compute,
                 ledger: Ledger) -> Program:
  """prefill(weights, tokens [N, P], lengths [N]) -> Prefix."""

  def prefill(weights, tokens, lengths):
    cache, hidden = model.prefill(
        weights, tokens, lengths, compute=compute, constrain=layout)
    return Prefix(cache, hidden, lengths)

  def flops(weights, tokens, lengths):
    del weights, lengths
    return tokens.size * flops_per_token(model.config, tokens.shape[1] / 2)

  return Program('prefill', prefill, ledger, slot_shardings(layout),
                 flops=flops)


def make_insert(layout: Layout, ledger: Ledger) -> Program:
  """insert(state, prefix, entry, run_key, step) -> state, which is donated."""

  def insert(state, prefix, entry, run_key, step):
    new = entry.source >= 0
    source = jnp.maximum(entry.source, 0)
    room = prefix.cache.k[0].shape[2]

    def fork(old, rows):
      head = jnp.where(new[:, None, None, None], rows[source], old[:, :, :room])
      return jax.lax.dynamic_update_slice_in_dim(old, head, 0, axis=2)

    def pick(value, old):
      mask = new.reshape(-1, *(1,) * (old.ndim - 1))
      return jnp.where(mask, value, old).astype(old.dtype)

    keys = sampling_lib.slot_keys(run_key, step, entry.prompts, entry.samples)
    return state.replace(
        cache=jax.tree.map(fork, state.cache, prefix.cache),
        hidden=pick(prefix.hidden[source], state.hidden),
        positions=pick(prefix.lengths[source], state.positions),
        counts=pick(0, state.counts), active=pick(True, state.active),
        finished=pick(False, state.finished),
        sampling=jax.tree.map(pick, entry.sampling, state.sampling),
        keys=pick(keys, state.keys), tokens=pick(0, state.tokens),
        logprobs=pick(0.0, state.logprobs),
        behaviour_logprobs=pick(0.0, state.behaviour_logprobs))

  return Program('insert', insert, ledger, slot_shardings(layout),
                 donate=(0,))


def make_generate(model: Model, steps: int, read: int, layout: Layout,
                  compute: Compute, ledger: Ledger) -> Program:
  """generate(weights, state) -> (state, active [S]): `steps` tokens a slot.

  Attention reads the first `read` entries of the cache; the caller knows
  that no slot gets past them. The state is donated; `active` is a copy that
  the host can look at while the next call runs.
  """

  def step(weights, state, uniform):
    head = model.head(weights)
    logits = head_lib.logits(
        state.hidden, head, model.config.logit_form, compute.dtype)
    if model.config.vocab_size < head.shape[0]:
      real = jnp.arange(head.shape[0]) < model.config.vocab_size
      logits = jnp.where(real, logits, sampling_lib._HIDE)
    tokens, logp, behaviour = sampling_lib.draw(
        logits, state.sampling, uniform)
    state = record(state, tokens, logp, behaviour)
    cache, hidden = model.decode(
        weights, state.cache, tokens, state.positions, compute=compute,
        read=read, constrain=layout)
    return state.replace(
        cache=cache, hidden=hidden.astype(state.hidden.dtype),
        positions=state.positions + 1)

  def generate(weights, state):
    # All numbers of the block at once: the generator is a loop of its own.
    positions = state.positions + jnp.arange(steps)[:, None]
    uniform = jax.vmap(
        lambda p: sampling_lib.uniforms(state.keys, p))(positions)
    state = jax.lax.fori_loop(
        0, steps, lambda i, s: step(weights, s, uniform[i]), state)
    return state, state.active | False

  def flops(weights, state):
    del weights
    return steps * state.counts.shape[0] * flops_per_token(model.config, read)

  def shardings(shapes):
    return slot_shardings(layout)(shapes[0]), layout.sharding()

  return Program('generate', generate, ledger, shardings, donate=(1,),
                 flops=flops)


def record(state: DecodeState, tokens, logprobs, behaviour) -> DecodeState:
  """Appends what was drawn to the active slots and retires those that end."""
  room = state.tokens.shape[1]
  here = (jnp.arange(room) == state.counts[:, None]) & state.active[:, None]
  put = lambda old, x: jnp.where(here, x[:, None], old)
  stop = jnp.any(tokens[:, None] == state.sampling.stop_ids, axis=-1)
  counts = state.counts + state.active
  full = counts >= state.sampling.max_tokens
  return state.replace(
      tokens=put(state.tokens, tokens), logprobs=put(state.logprobs, logprobs),
      behaviour_logprobs=put(state.behaviour_logprobs, behaviour),
      counts=counts, finished=state.finished | (state.active & stop),
      active=state.active & ~stop & ~full)


def make_prepare(model: Model, layout: Layout, compute: Compute,
                 ledger: Ledger) -> Program:
  """prepare(params) -> sampler weights: cast, resharded, one dict a layer."""

  def prepare(params):
    cast = jax.tree.map(
        lambda x, p: narrow(x, p, compute), merge(params), nest(model.table))
    if apart:
      cast |= dict(embed=jnp.copy(params['embed']), head=cast['embed'])
    return unstack_layers(cast, model.config.num_layers)

  merge, model = model.merge, model.base or model
  # XLA:CPU widens a whole bfloat16 table to look up a few of its rows.
  apart = compute.cache != compute.dtype and model.config.tie_embeddings
  layers = {
      k.split('/')[1]: layout.sharding(p.axes[1:], p.shape[1:])
      for k, p in model.table.items() if p.stacked}
  shardings = {**model.shardings(layout),
               'layers': [layers] * model.config.num_layers}
  if apart:
    shardings['head'] = shardings['embed']
  return Program('reshard', prepare, ledger, shardings)
