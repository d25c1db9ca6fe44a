"""A key-value cache in pages (`rollout.page_size`), on the device: how prefills and new entries get into their pages.

Legend: N prompts, P prompt tokens, S slots, T steps of a block, K kv heads, h head size, p entries of a page, L layers.

`rollout/page_table.py` decides on the host which sequence has which pages.
"""

import jax
import jax.numpy as jnp

from jaxpost.types import Cache


def put(pool: Cache, rows: Cache, copies: jax.Array) -> Cache:
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


def extend(pool: Cache, table: jax.Array, recent: Cache, filled: jax.Array, one_by_one: bool) -> Cache:
  """Appends `recent` to the filled part of slots, in place; entries past the end go to the last page of their slot.

  Args:
    pool: L x [pages, K, p, h].
    table: [S, n], pages of each slot.
    recent: L x [S, K, T, h].
    filled: [S], valid entries.
    one_by_one: write entry by entry instead of by a scatter, see `cache_storage.extend`.
  """
  rows, _, steps, _ = recent.k[0].shape
  size = pool.k[0].shape[2]
  at = filled[:, None] + jnp.arange(steps)
  page = table[jnp.arange(rows)[:, None], jnp.minimum(at // size, table.shape[1] - 1)]
  at = at % size
  if not one_by_one:
    return jax.tree.map(lambda old, new: old.at[page, :, at].set(new.swapaxes(1, 2), mode='drop'), pool, recent)

  def write(i, pool):
    s, t = i // steps, i % steps
    return jax.tree.map(
      lambda old, new: jax.lax.dynamic_update_slice(
        old, jax.lax.dynamic_slice(new, (s, 0, t, 0), (1, new.shape[1], 1, new.shape[3])), (page[s, t], 0, at[s, t], 0)
      ),
      pool,
      recent,
    )

  return jax.lax.fori_loop(0, rows * steps, write, pool)
