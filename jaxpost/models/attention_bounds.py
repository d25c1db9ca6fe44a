"""Which keys of a packed row its queries attend to, as bounds by which a kernel skips blocks.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
  from jaxpost.models.attention_xla import PackedRows


class Bounds(NamedTuple):
  """Places in a row, all int32.

  A query attends to the keys from `first_key` to itself, except those of the gap, and a key is attended to by queries
  from itself to `last_query`. This is exact without branches; with branches, `ids` exclude further keys.
  """

  first_key: jax.Array  # [B, T]
  last_query: jax.Array  # [B, T]
  gap: tuple[jax.Array, jax.Array] | None = None  # [B, T] each: its first place and the first one after it
  ids: jax.Array | None = None  # [B, 2, T]: branch and position


def of_rows(rows: PackedRows, window: int) -> Bounds:
  """Returns the bounds of rows; `window` is that of `layers.attention`."""
  segment_ids, positions, branch_ids = rows
  index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
  starts_document = _starts(segment_ids).at[:, 0].set(True)
  first_key, last_query = _spans(starts_document)
  if branch_ids is None:
    if window:
      first_key, last_query = jnp.maximum(first_key, index - window + 1), jnp.minimum(last_query, index + window - 1)
    return Bounds(first_key, last_query)
  # A window does not bound places: the shared part is closer to a branch in positions than in places.
  own_first, own_last = _spans(starts_document | _starts(branch_ids))
  last_query = jnp.where(branch_ids > 0, own_last, last_query)
  follows_shared = _starts(branch_ids) & (branch_ids > 0) & (jnp.roll(branch_ids, 1, axis=1) == 0)
  other_branches = jnp.maximum(first_key, jax.lax.cummax(jnp.where(follows_shared, index, 0), axis=1)), own_first
  return Bounds(first_key, last_query, other_branches, jnp.stack([branch_ids, positions], axis=1).astype(jnp.int32))


def _starts(ids: jax.Array) -> jax.Array:
  """Returns [B, T]: whether the id of a token differs from that of the token before it."""
  return jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))


def _spans(starts: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the first and the last place [B, T] of each token's part of the row; `starts` says where parts begin."""
  index = jnp.arange(starts.shape[1], dtype=jnp.int32)
  first = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
  ends = jnp.roll(starts, -1, axis=1)  # the last place, too, as a part starts at the first one
  return first, jax.lax.cummin(jnp.where(ends, index, index[-1]), axis=1, reverse=True)


def extremes(bounds: jax.Array, block: int, last: bool = False) -> jax.Array:
  """Returns the minimum (`last`: the maximum) of `bounds` [B, T] in each block of tokens."""
  blocks = bounds.reshape(len(bounds), -1, block)
  return blocks.max(axis=2) if last else blocks.min(axis=2)


def visible(
  rows: jax.Array,
  first_key: jax.Array,
  columns: jax.Array,
  query_ids: tuple[jax.Array, jax.Array] | None,
  key_ids: tuple[jax.Array, jax.Array] | None,
  window: int,
) -> jax.Array:
  """Returns [q, k]: which keys of a block each of its queries attends to.

  Without branches, `first_key` already accounts for the window. With branches, other branches lie between a token and
  its prompt, so the window is measured here, in positions.

  rows, columns: places of queries and keys. first_key: [q]. query_ids, key_ids: (branch, position) of each, or None.
  """
  mask = (columns[None] >= first_key[:, None]) & (columns[None] <= rows[:, None])
  if query_ids is None or key_ids is None:
    return mask
  mask &= (key_ids[0][None] == 0) | (key_ids[0][None] == query_ids[0][:, None])
  return mask & (query_ids[1][:, None] - key_ids[1][None] < window) if window else mask
