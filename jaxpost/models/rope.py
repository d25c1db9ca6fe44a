"""Rotary position embedding: frequencies and the rotation; `rope_scalings.py` has scaled frequencies.

Legend: B rows, T tokens, N heads, h head size, d rotated entries of a head.

Frequencies are computed on the host: `pow` on an accelerator is less accurate, and positions multiply the error. They
are rounded where `transformers` rounds.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.models.config import ModelConfig, Rope

# Scalings whose frequencies depend on the length of the document. Where a text grows
# beyond the limit, sampling used other frequencies for early tokens than training does.
BY_LENGTH = ('dynamic', 'longrope')


def by_length(cfg: ModelConfig) -> int:
  """Returns the length up to which frequencies do not depend on it; 0: they never do."""
  limits = [dict(r.scaling)['original_max_position_embeddings'] for r in cfg.ropes if _kind(r) in BY_LENGTH]
  return min(limits, default=0)


def document_lengths(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """Returns [B, T]: the last position of each token's document, plus 1."""

  def lengths_of_row(positions, segments):
    last = jax.ops.segment_max(positions, segments, positions.shape[0] + 1)
    return last[segments] + 1

  return jax.vmap(lengths_of_row)(positions, segment_ids)


def tables(positions: jax.Array, lengths: jax.Array | None, cfg: ModelConfig) -> list[tuple]:
  """Returns (cos, sin) for each of `cfg.ropes`, each [B, T, 1, h] float32.

  Where queries are scaled by position, a third array [B, T, 1, 1] has the factors.

  Args:
    positions: [B, T].
    lengths: length of each token's document, [B, T] or [B, 1]; read only if `by_length` is not 0.
  """
  return [_table(positions, lengths, rope, cfg) for rope in cfg.ropes]


def pick(tables: list[tuple], index: int | jax.Array) -> tuple | None:
  """Returns the table of a layer, None for no rotation; `index` may be traced."""
  if isinstance(index, int):
    return None if index < 0 else tables[index]
  cos, sin, *factors = tables[0]
  identity = (jnp.ones_like(cos), jnp.zeros_like(sin), *map(jnp.ones_like, factors))  # for index -1
  return tuple(jnp.stack(x)[index] for x in zip(*tables, identity, strict=True))


def rotate(x: jax.Array, table: tuple | None, cfg: ModelConfig) -> jax.Array:
  """Rotates [B, T, N, h] in float32, first half against second half (as in HF).

  Interleaved pairs are separated into halves first: the order of the entries does not matter to the products of queries
  and keys.
  """
  if table is None or table[0] is None:
    return x
  cos, sin, *_ = table
  x = x.astype(jnp.float32)
  half = (cfg.rotary_dim or x.shape[-1]) // 2
  if cfg.ropes[0].interleaved:
    x = jnp.concatenate([x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]], axis=-1)
  # Entries that are not rotated have sin = 0.
  swapped = jnp.concatenate([-x[..., half : 2 * half], x[..., :half], x[..., 2 * half :]], axis=-1)
  return x * cos + swapped * sin


def scale_queries(q: jax.Array, table: tuple | None) -> jax.Array:
  """Multiplies queries [B, T, N, h] by the factors of their positions, where the table has some.

  They keep attention sharp beyond the length of pre-training (Nakanishi, arXiv:2501.19399).
  """
  return q if table is None or len(table) == 2 else q * table[2].astype(q.dtype)


def _kind(rope: Rope) -> str:
  return dict(rope.scaling).get('rope_type', 'default')


def _table(positions, lengths, rope, cfg):
  size = rope.size or cfg.rope_size
  dim = cfg.rotary_dim or size
  p, scale = dict(rope.scaling), 1.0
  kind = _kind(rope)
  factors = ()
  if kind == 'default':
    freq = np.float32(1) / _periods(rope.theta, dim)
  else:
    from jaxpost.models import rope_scalings

    factors = rope_scalings.query_factors(positions, p)
    if kind == 'none':
      return None, None, *factors
    freq, scale = rope_scalings.frequencies(rope.theta, dim, p, lengths, _periods)
  angle = positions[..., None].astype(jnp.float32) * freq
  angle = jnp.concatenate([angle, angle], axis=-1)[..., None, :]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  if scale != 1:
    cos, sin = cos * scale, sin * scale
  if dim < size:  # entries that are not rotated
    padding = ((0, 0),) * 3 + ((0, size - dim),)
    cos, sin = jnp.pad(cos, padding, constant_values=1), jnp.pad(sin, padding)
  return cos, sin, *factors


def _periods(theta: float, dim: int):
  """Returns the periods [d / 2], in tokens per radian."""
  half = dim // 2
  return (theta ** (np.arange(half) / half)).astype(np.float32)
