"""The key-value cache on the device: how it is stored, and how prefills are copied into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.models import routing
from jaxpost.types import Cache

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model


def put_rows(cache, rows, new, source, compute: Compute):
  """cache[s, :, :P] = rows[source[s]] where new[s]; P entries in `rows`.

  Without `rows`, of the cache itself; then no slot is both read and written.
  """
  if not compute.row_writes:

    def put(old, rows):
      head = where(new, rows[source], old[:, :, : rows.shape[2]])
      return jax.lax.dynamic_update_slice_in_dim(old, head, 0, axis=2)

    return jax.tree.map(put, cache, rows or cache)
  order = jnp.argsort(~new, stable=True)

  def write(i, cache):  # only what changes, in place
    slot = order[i]
    return jax.tree.map(
      lambda old, rows: jax.lax.dynamic_update_slice(
        old, jax.lax.dynamic_slice_in_dim(rows, source[slot], 1), (slot, 0, 0, 0)
      ),
      cache,
      rows or cache,
    )

  return jax.lax.fori_loop(0, jnp.sum(new), write, cache)


def put_pages(pool, rows, copies):
  """Parts of `rows` [N, K, P, h] into pages [pages, K, p, h], in place."""
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
  """The empty cache entries of a block of `steps` tokens."""
  recent = jax.tree.map(lambda x: jnp.zeros((rows, x.shape[1], steps, x.shape[3]), x.dtype), cache)
  return view(recent).replace(experts=routing.no_record(model.config, rows, steps))


def stored(cache: Cache) -> Cache:
  """The cache as it is stored: bfloat16 as integers.

  XLA:CPU updates integers in place, but converts a whole bfloat16 array to
  float32 and back.
  """
  return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x, cache)


def view(cache: Cache) -> Cache:
  """The `stored` cache in its own type, to compute with."""
  return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x, cache)


def where(new: jax.Array, value: jax.Array, old: jax.Array) -> jax.Array:
  """`value` in the slots that are `new` [S], else `old`; in the type of `old`."""
  mask = new.reshape(-1, *(1,) * (old.ndim - 1))
  return jnp.where(mask, value, old).astype(old.dtype)
