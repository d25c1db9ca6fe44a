"""Attention over rows that are split over the `context` axis of the mesh.

Legend: B rows, T tokens, n parts, t queries of a part, K kv heads, G queries
per kv head, h head size.

Token i of a row is token i // n of part i % n, so that every part has as much
of the early tokens, which see little, as of the late ones: chunk by chunk all
parts read the keys up to the same place, and no product behind it is computed
(striped attention, arXiv:2311.09431). Keys and values of a row are gathered,
in each layer once; nothing else of a layer crosses the axis.
"""

import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum
from jaxpost.models.config import ModelConfig
from jaxpost.models.scores import NEVER, capped, first_key, scaled, softmax
from jaxpost.sharding import Layout


def parts(layout) -> int:
  """Into how many a row is split; `layout` may be any `constrain`."""
  if not isinstance(layout, Layout) or layout.phase == 'rollout':
    return 1
  return layout.mesh.shape['context']


def stripe(x, n: int):
  """[B, T, ...] -> [B, T, ...] with the tokens of a part side by side."""
  split = x.reshape(len(x), -1, n, *x.shape[2:])
  return split.swapaxes(1, 2).reshape(x.shape)


def unstripe(x, n: int):
  split = x.reshape(len(x), n, -1, *x.shape[2:])
  return split.swapaxes(1, 2).reshape(x.shape)


def causal(q, k, v, segment_ids, compute: Compute, branch_ids, positions,
           window, cfg: ModelConfig, sinks, layout: Layout):
  """As `attention.attention`, of striped q, k and v; the rest is in order."""
  n, kv_heads = parts(layout), k.shape[2]
  batch, length, heads, size = q.shape
  part = length // n
  q = scaled(q, cfg).reshape(
      batch, n, part, kv_heads, heads // kv_heads, size)
  q = layout(q.swapaxes(2, 3), 'batch', 'time', 'kv_heads')
  k, v = (unstripe(layout(x.astype(compute.dtype), 'batch', None, 'kv_heads'),
                   n).swapaxes(1, 2) for x in (k, v))
  mine = lambda x: layout(
      stripe(x, n).reshape(batch, n, part), 'batch', 'time')
  both = lambda x, some, seen: (
      mine(x)[:, :, some, None], x[:, None, None, seen])
  place = jnp.arange(part) * n + jnp.arange(n)[:, None]  # in the row
  out = []
  for start in range(0, part, compute.q_chunk):
    end = min(start + compute.q_chunk, part)
    low = first_key(start * n, window, branch_ids)
    seen, some = slice(low, end * n), slice(start, end)
    here, there = both(segment_ids, some, seen)
    mask = here == there
    mask &= place[:, some, None] >= jnp.arange(low, end * n)
    if not isinstance(window, int) or window:
      here, there = both(positions, some, seen)
      mask &= (here - there < window) | (window == 0)
    if branch_ids is not None:
      here, there = both(branch_ids, some, seen)
      mask &= (there == 0) | (there == here)
    scores = einsum('bnktgh,bksh->bnktgs', q[:, :, :, some], k[:, :, seen],
                    compute.dtype)
    weights = softmax(
        jnp.where(mask[:, :, None, :, None], capped(scores, cfg),
                  NEVER),
        sinks if sinks is None else sinks.reshape(kv_heads, 1, -1, 1))
    out.append(einsum('bnktgs,bksh->bnktgh', weights, v[:, :, seen],
                      compute.dtype))
  out = jnp.concatenate(out, axis=3).swapaxes(2, 3)
  return out.reshape(batch, length, heads, -1)
