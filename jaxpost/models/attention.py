"""Attention over packed rows, and over a cache.

Legend: B rows, T queries, S keys, K kv heads, G queries per kv head, h head
size.
"""

import math

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum

_NEVER = -1e30  # finite: a fully masked row must not become NaN


def causal(q, k, v, segment_ids, compute: Compute, branch_ids=None):
  """Causal attention inside each document of a packed row.

  Branches of a document (`types.Batch`) see its shared part and themselves.

  Queries go in chunks, each against the keys up to its own end, so that half
  of the products is never computed and [T, T] never exists. Heads come before
  time, so that a chunk is one contiguous matrix per head and row.

  Args:
    q: [B, T, H, h]; k, v: [B, T, K, h]; segment_ids, branch_ids:
      [B, T].

  Returns:
    [B, T, H, h].
  """
  batch, length, heads, size = q.shape
  kv_heads = k.shape[2]
  shape = batch, length, kv_heads, heads // kv_heads, size
  q = (q.reshape(shape) / math.sqrt(size)).swapaxes(1, 2)
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  out = []
  for start in range(0, length, compute.q_chunk):
    end = min(start + compute.q_chunk, length)
    mask = segment_ids[:, start:end, None] == segment_ids[:, None, :end]
    mask &= (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None]
    if branch_ids is not None:
      keys = branch_ids[:, None, :end]
      mask &= (keys == 0) | (keys == branch_ids[:, start:end, None])
    scores = einsum('bktgh,bksh->bktgs', q[:, :, start:end], k[:, :, :end],
                    compute.dtype)
    weights = jax.nn.softmax(
        jnp.where(mask[:, None, :, None], scores, _NEVER), axis=-1)
    out.append(einsum('bktgs,bksh->bktgh', weights, v[:, :, :end],
                      compute.dtype))
  out = jnp.concatenate(out, axis=2).swapaxes(1, 2)
  return out.reshape(batch, length, heads, size)


def cached(q, k_cache, v_cache, lengths, compute: Compute):
  """One query per row against the filled part of its cache.

  Args:
    q: [B, 1, H, h]; k_cache, v_cache: [B, K, S, h]; lengths: [B], how many
      entries of each row count.

  Returns:
    [B, 1, H, h].
  """
  batch, _, heads, size = q.shape
  kv_heads, room = k_cache.shape[1:3]
  kind = k_cache.dtype.name  # holds values of the operand type, see Compute
  q = (q / math.sqrt(size)).astype(compute.dtype)
  q = q.reshape(batch, kv_heads, heads // kv_heads, size)
  scores = einsum('bkgh,bksh->bkgs', q, k_cache, kind)
  mask = jnp.arange(room) < lengths[:, None]
  weights = jax.nn.softmax(
      jnp.where(mask[:, None, None], scores, _NEVER), axis=-1)
  out = einsum(
      'bkgs,bksh->bkgh', weights.astype(compute.dtype), v_cache, kind)
  return out.reshape(batch, 1, heads, size)
