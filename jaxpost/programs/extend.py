"""The extend program: continues sequences in the cache by new tokens, such as the next turn of a dialogue.

Legend: S slots, R of them extended at a time, T new tokens of each, K kv heads, h head size, D hidden size, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpost.models.transformer import flops_per_token
from jaxpost.programs import cache_storage, generate
from jaxpost.programs.compile import Ledger, Program
from jaxpost.types import Array, Cache

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model

# (Slots that are extended at a time, tokens of each.) On a CPU a row of padding costs as much as a real one; on an
# accelerator each part costs a pass over all weights.
_CPU = 1, 32
_ACCELERATOR = 8, 128


@struct.dataclass
class More:
  """Tokens that continue the sequences of some slots, which an `Entry` names."""

  tokens: Array  # [S, T] int32, padded on the right
  lengths: Array  # [S] int32, number of tokens; a slot with 0 does not change
  filled: Array  # [S] int32, number of cache entries that are kept


def chunks(slots: int, suffixes: dict[int, tuple[int, np.ndarray]], platform: str) -> Iterator[More]:
  """Yields the tokens of suffixes, {slot: (number of kept entries, [n] token ids)}, in parts of T tokens."""
  length = (_CPU if platform == 'cpu' else _ACCELERATOR)[1]
  for start in range(0, max(len(ids) for _, ids in suffixes.values()), length):
    tokens = np.zeros((slots, length), np.int32)
    lengths = np.zeros(slots, np.int32)
    filled = np.zeros(slots, np.int32)
    for slot, (kept, ids) in suffixes.items():
      part = ids[start : start + length]
      tokens[slot, : len(part)] = part
      lengths[slot] = len(part)
      filled[slot] = kept + start
    yield More(tokens, lengths, filled)


def make_extend(model: Model, read: int, layout: Layout, compute: Compute, ledger: Ledger) -> Program:
  """Makes the program extend(weights, state, entry, more, run_key, step, table) -> state.

  It continues sequences whose first entries are in the cache of their slot, or in the pages of `table` [S, n];
  attention reads `read` entries. It donates the state.
  """
  extend_slots = _together  # for slots that a mesh splits
  if layout.batch_shards == 1:
    extend_slots = functools.partial(_in_parts, rows=(_CPU if compute.platform == 'cpu' else _ACCELERATOR)[0])

  def hidden_of(weights, cache, more):
    recent, hidden = after_tokens(model, weights, cache, more.tokens, more.filled, compute=compute, layout=layout)
    last = jnp.maximum(more.lengths - 1, 0)[:, None, None]
    return cache_storage.stored(recent, compute.platform), jnp.take_along_axis(hidden, last, axis=1)[:, 0]

  def extend(weights, state, entry, more, run_key, step, table=None):
    new = (entry.source >= 0) & (more.lengths > 0)
    cache, hidden = extend_slots(functools.partial(hidden_of, weights), state, new, more, table, read)
    state, entry = state.replace(cache=cache), entry.replace(source=jnp.where(new, 0, -1))
    return generate.enter(state, entry, hidden, more.filled + more.lengths, run_key, step=step)

  def flops(_weights, _state, _entry, more, *_):
    return more.tokens.size * flops_per_token(model.config, read)

  return Program('extend', extend, ledger, generate.slot_shardings(layout), donate=(1,), flops=flops)


def after_tokens(
  model: Model, weights: Any, cache: Cache, tokens: jax.Array, filled: jax.Array, *, compute: Compute, layout: Layout
) -> tuple[Cache, jax.Array]:
  """Reads several tokens [R, T] of each slot in one pass, after the `filled` [R] entries of a cache of these slots.

  Returns:
    The entries of the tokens, and the hidden state of each [R, T, D].
  """
  recent = cache_storage.empty_block(model, cache.replace(table=None), *tokens.shape)
  return model.decode(weights, cache, recent, tokens, filled, step=0, compute=compute, constrain=layout)


def _in_parts(hidden_of, state, new, more: More, table, read: int, rows: int):
  """Extends the slots that are `new` [S], `rows` of them at a time; returns (cache, hidden states [S, D]).

  All parts have the same size: the last one may have slots again, or slots that are not new and do not change.
  """
  order, rows = jnp.argsort(~new, stable=True), min(rows, len(new))

  def extend_part(i, carry):
    cache, hidden = carry
    slots = jax.lax.dynamic_slice_in_dim(order, i * rows, rows)

    def pick(x):
      return jnp.concatenate([jax.lax.dynamic_slice_in_dim(x, slots[j], 1) for j in range(rows)])

    part = jax.tree.map(pick, more)
    if table is None:
      recent, last = hidden_of(cache_storage.view(jax.tree.map(lambda x: pick(x)[:, :, :read], cache)), part)
      cache = jax.lax.fori_loop(0, rows, functools.partial(_write, recent=recent, slots=slots, more=part), cache)
    else:
      recent, last = hidden_of(cache.replace(table=pick(table)), part)
      if rows == 1:
        cache = _write_pages(cache, recent, table[slots[0]], part)
      else:
        cache = _scatter(cache, recent, slots, new=new[slots], more=part, table=table)
    for j in range(rows):
      hidden = jax.lax.dynamic_update_slice_in_dim(hidden, last[j : j + 1].astype(hidden.dtype), slots[j], 0)
    return cache, hidden

  return jax.lax.fori_loop(0, -(-jnp.sum(new) // rows), extend_part, (state.cache, state.hidden))


def _together(hidden_of, state, new, more: More, table, read: int):
  """Extends all slots at once; returns (cache, hidden states [S, D])."""
  if table is None:
    cache = cache_storage.view(jax.tree.map(lambda x: x[:, :, :read], state.cache))
  else:
    cache = state.cache.replace(table=table)
  recent, hidden = hidden_of(cache, more)
  return _scatter(state.cache, recent, jnp.arange(len(new)), new=new, more=more, table=table), hidden


def _write(j, cache: Cache, recent: Cache, slots: jax.Array, more: More) -> Cache:
  """Writes the first lengths[j] entries of row j of `recent` [R, K, T, h] after the filled ones of slots[j].

  Padding, which may reach past the end of the cache, is not written.
  """
  filled, steps = more.filled[j], more.tokens.shape[1]

  def put(old, new):
    size = min(steps, old.shape[2])
    # The slice that is written must not reach past the end: it begins earlier there, and the new entries later in it.
    start = jnp.clip(filled, 0, old.shape[2] - size)
    place = slots[j], 0, start, 0
    present = jax.lax.dynamic_slice(old, place, (1, old.shape[1], size, old.shape[3]))
    index = start + jnp.arange(size) - filled  # of the new entry
    real = (index >= 0) & (index < more.lengths[j])
    new = jax.lax.dynamic_slice_in_dim(new, j, 1)
    new = jnp.roll(new, filled - start, axis=2)[:, :, :size]
    return jax.lax.dynamic_update_slice(old, jnp.where(real[:, None], new, present), place)

  return jax.tree.map(put, cache, recent)


def _write_pages(pool: Cache, recent: Cache, table, more: More) -> Cache:
  """Writes the new entries of a single slot into its pages, `table` [n], one by one."""
  size = pool.k[0].shape[2]

  def write(t, pool):
    page, offset = table[(more.filled[0] + t) // size], (more.filled[0] + t) % size

    def put(old, new):
      return jax.lax.dynamic_update_slice(old, jax.lax.dynamic_slice_in_dim(new, t, 1, axis=2), (page, 0, offset, 0))

    return jax.tree.map(put, pool, recent)

  return jax.lax.fori_loop(0, more.lengths[0], write, pool)


def _scatter(cache: Cache, recent: Cache, slots: jax.Array, *, new: jax.Array, more: More, table) -> Cache:
  """Writes the new entries of these slots at the same time, into the slots or into the pages of `table` [S, n]."""
  steps = jnp.arange(more.tokens.shape[1])
  entry, row = more.filled[:, None] + steps, slots[:, None]
  size = cache.k[0].shape[2]
  if table is not None:
    row = table[row, jnp.minimum(entry // size, table.shape[1] - 1)]
    entry = entry % size
  real = new[:, None] & (steps < more.lengths[:, None])
  entry = jnp.where(real, entry, size)  # past the end: dropped
  return jax.tree.map(lambda old, x: old.at[row, :, entry].set(x.swapaxes(1, 2), mode='drop'), cache, recent)
