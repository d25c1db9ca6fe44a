"""The key-value cache on the device: how it is stored, and how prefills are copied into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.matmul import as_bits, from_bits
from jaxpost.models import routing
from jaxpost.types import Cache

if TYPE_CHECKING:
  from jaxpost.models.model import Model


def put_rows(cache: Cache, rows: Cache | None, new: jax.Array, source: jax.Array) -> Cache:
  """Copies rows [N, K, P, h] into slots [S, K, length, h]: cache[s, :, :P] = rows[source[s]] where new[s].

  Without `rows`, from slots of the cache itself; then no slot is both read and written.
  """
  order = jnp.argsort(~new, stable=True)

  def write(i, cache):  # in place, and of new slots only
    slot = order[i]
    return jax.tree.map(
      lambda old, rows: jax.lax.dynamic_update_slice(
        old, jax.lax.dynamic_slice_in_dim(rows, source[slot], 1), (slot, 0, 0, 0)
      ),
      cache,
      rows or cache,
    )

  return jax.lax.fori_loop(0, jnp.sum(new), write, cache)


def put_pages(pool: Cache, rows: Cache, copies: jax.Array) -> Cache:
  """Copies parts of `rows` [N, K, P, h] into pages [pages, K, p, h], in place; `copies` as in `generate.Entry`."""
  size = pool.k[0].shape[2]
  rows = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % size), (0, 0))), rows)

  def write(i, pool):
    row, place, page = copies[i]
    return jax.tree.map(
      lambda old, rows: jax.lax.dynamic_update_slice(
        old, jax.lax.dynamic_slice(rows, (row, 0, place * size, 0), (1, *old.shape[1:])), (page, 0, 0, 0)
      ),
      pool,
      rows,
    )

  return jax.lax.fori_loop(0, jnp.sum(copies[:, 0] >= 0), write, pool)


def empty_block(model: Model, cache: Cache, rows: int, steps: int) -> Cache:
  """Returns empty cache entries [rows, K, steps, h] for a block of `steps` tokens."""
  recent = jax.tree.map(lambda x: jnp.zeros((rows, x.shape[1], steps, x.shape[3]), x.dtype), cache)
  return view(recent).replace(experts=routing.no_record(model.config, rows, steps))


def stored(cache: Cache) -> Cache:
  """Returns the cache as it is stored: bfloat16 as integers, which XLA:CPU updates in place."""
  return jax.tree.map(as_bits, cache)


def view(cache: Cache) -> Cache:
  """Returns the `stored` cache in the type that programs compute with."""
  return jax.tree.map(from_bits, cache)


def where(new: jax.Array, value: jax.Array, old: jax.Array) -> jax.Array:
  """Returns `value` in the slots that are `new` [S], else `old`; in the type of `old`."""
  mask = new.reshape(-1, *(1,) * (old.ndim - 1))
  return jnp.where(mask, value, old).astype(old.dtype)
