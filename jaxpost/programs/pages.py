"""A key-value cache in pages (`rollout.page_size`), on the device: writing prefills and new entries into pages.

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
    row, part, page = copies[i]

    def put_page(old, rows):
      entries = jax.lax.dynamic_slice(rows, (row, 0, part * size, 0), (1, *old.shape[1:]))
      return jax.lax.dynamic_update_slice(old, entries, (page, 0, 0, 0))

    return jax.tree.map(put_page, pool, rows)

  return jax.lax.fori_loop(0, jnp.sum(copies[:, 0] >= 0), write, pool)


def extend(pool: Cache, table: jax.Array, recent: Cache, filled: jax.Array, platform: str) -> Cache:
  """Appends `recent` to the filled part of slots, in place; entries past the end go to the last page of their slot.

  Args:
    pool: L x [pages, K, p, h].
    table: [S, n], pages of each slot.
    recent: L x [S, K, T, h].
    filled: [S], number of valid entries.
    platform: on GPUs a scatter writes, see `cache_storage.extend`; elsewhere entry by entry.
  """
  rows, _, steps, _ = recent.k[0].shape
  size = pool.k[0].shape[2]
  entry = filled[:, None] + jnp.arange(steps)
  page = table[jnp.arange(rows)[:, None], jnp.minimum(entry // size, table.shape[1] - 1)]
  entry = entry % size
  if platform == 'gpu':
    return jax.tree.map(lambda old, new: old.at[page, :, entry].set(new.swapaxes(1, 2), mode='drop'), pool, recent)

  def write(i, pool):
    s, t = i // steps, i % steps

    def put_entry(old, new):
      new = jax.lax.dynamic_slice(new, (s, 0, t, 0), (1, new.shape[1], 1, new.shape[3]))
      return jax.lax.dynamic_update_slice(old, new, (page[s, t], 0, entry[s, t], 0))

    return jax.tree.map(put_entry, pool, recent)

  return jax.lax.fori_loop(0, rows * steps, write, pool)
