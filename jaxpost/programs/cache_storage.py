"""The key-value cache on the device: how it is stored, and how prefills are copied into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpost.matmul import as_bits, from_bits
from jaxpost.types import Cache

if TYPE_CHECKING:
  from jaxpost.models.model import Model


def put_rows(cache: Cache, rows: Cache | None, new: jax.Array, source: jax.Array) -> Cache:
  """Copies rows [N, K, P, h] into slots [S, K, length, h]: cache[s, :, :P] = rows[source[s]] where new[s].

  Without `rows`, it copies slots of the cache itself, none of which may be both read and written.
  """
  order = jnp.argsort(~new, stable=True)

  def write(i, cache):  # writes new slots only, in place
    slot = order[i]

    def put(old, rows):
      return jax.lax.dynamic_update_slice(old, jax.lax.dynamic_slice_in_dim(rows, source[slot], 1), (slot, 0, 0, 0))

    return jax.tree.map(put, cache, rows or cache)

  return jax.lax.fori_loop(0, jnp.sum(new), write, cache)


def empty_block(model: Model, cache: Cache, rows: int, steps: int) -> Cache:
  """Returns a cache of empty entries [rows, K, steps, h] for a block of `steps` tokens, with the states of `cache`."""
  entries = cache.replace(states=())
  recent = jax.tree.map(lambda x: jnp.zeros((rows, x.shape[1], steps, x.shape[3]), x.dtype), entries)
  states = jax.tree.map(lambda x: x[:rows], cache.states)
  experts = ()
  if model.config.experts and model.config.experts.record:
    from jaxpost.models import routing

    experts = routing.no_record(model.config, rows, steps)
  return view(recent).replace(experts=experts, states=states)


def first_entries(cache: Cache, rows: int, read: int) -> Cache:
  """Returns the first `read` entries of the first `rows` slots, or, with read=0, the whole cache without a copy."""
  cache = cache.replace(states=())
  return view(jax.tree.map(lambda x: x[:rows, :, :read], cache) if read else cache)


def append(cache: Cache, recent: Cache, filled: jax.Array, *, table: jax.Array | None, platform: str) -> Cache:
  """Appends the entries of a block to the cache, in pages if there is a table, and replaces states; see `extend`."""
  entries, states = stored(recent.replace(experts=(), states=()), platform), cache.states
  cache = cache.replace(states=())
  if table is None:
    cache = extend(cache, entries, filled, platform)
  else:
    from jaxpost.programs import pages

    cache = pages.extend(cache, table, entries, filled, platform)
  return cache.replace(states=replace_first(states, recent.states))


def replace_first(old: Any, new: Any) -> Any:
  """Returns trees of arrays whose first rows are replaced by those of `new`."""
  return jax.tree.map(lambda old, new: old.at[: len(new)].set(new) if len(new) < len(old) else new, old, new)


def stored(cache: Cache, platform: str) -> Cache:
  """Returns the cache as it is stored: on CPUs by `as_bits`. On TPUs the conversion would copy all of it."""
  return jax.tree.map(as_bits, cache) if platform == 'cpu' else cache


def view(cache: Cache) -> Cache:
  """Undoes `stored`: returns the cache in the type that programs compute with."""
  return jax.tree.map(from_bits, cache)


def where(new: jax.Array, value: jax.Array, old: jax.Array) -> jax.Array:
  """Returns `old` [S, ...] with `value` in the slots where `new` [S] is True."""
  mask = new.reshape(-1, *(1,) * (old.ndim - 1))
  return jnp.where(mask, value, old).astype(old.dtype)


def extend(cache: Cache, recent: Cache, filled: jax.Array, platform: str) -> Cache:
  """Appends `recent` to the filled part of the first slots of the cache, in place.

  Entries past the end, which only finished slots have, overwrite the last ones of their slot or are dropped.

  Args:
    cache: L x [S', K, length, h].
    recent: L x [S, K, T, h].
    filled: [S], number of valid entries.
    platform: on GPUs a scatter writes; on CPUs it would copy the cache, and on TPUs change its layout.
  """
  rows, _, steps, _ = recent.k[0].shape
  if platform == 'gpu':
    row, entry = jnp.arange(rows)[:, None], filled[:, None] + jnp.arange(steps)
    return jax.tree.map(lambda old, new: old.at[row, :, entry].set(new.swapaxes(1, 2), mode='drop'), cache, recent)

  def write(s, cache):
    # XLA:TPU (jax 0.10) fails to compile this loop, with an internal error, where it merges slice and update.
    entries = jax.lax.optimization_barrier(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, s, 1), recent))
    place = (s, 0, filled[s], 0)
    return jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice(old, new, place), cache, entries)

  return jax.lax.fori_loop(0, rows, write, cache)
