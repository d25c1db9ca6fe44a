"""Attention over packed rows, and over a cache.

Legend: B rows, T queries, S keys, K kv heads, G queries per kv head, h head
size.
"""

import math

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum

_NEVER = -1e30  # finite: a fully masked row must not become NaN


def causal(q, k, v, segment_ids, compute: Compute):
  """Causal attention inside each document of a packed row.

  Queries go in chunks, each against the keys up to its own end, so that half
  of the products is never computed and [T, T] never exists.

  Args:
    q: [B, T, H, h]; k, v: [B, T, K, h]; segment_ids: [B, T].

  Returns:
    [B, T, H, h].
  """
  batch, length, heads, size = q.shape
  kv_heads = k.shape[2]
  q = q.reshape(batch, length, kv_heads, heads // kv_heads, size)
  out = []
  for start in range(0, length, compute.q_chunk):
    end = min(start + compute.q_chunk, length)
    mask = segment_ids[:, start:end, None] == segment_ids[:, None, :end]
    mask &= (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None]
    out.append(_attend(
        q[:, start:end], k[:, :end], v[:, :end], mask[:, None, None], compute))
  return jnp.concatenate(out, axis=1).reshape(batch, length, heads, size)


def _attend(q, k, v, mask, compute):
  scores = einsum('btkgh,bskh->bkgts', q, k, compute.dtype)
  scores = jnp.where(mask, scores / math.sqrt(q.shape[-1]), _NEVER)
  weights = jax.nn.softmax(scores, axis=-1)
  return einsum('bkgts,bskh->btkgh', weights, v, compute.dtype)


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
  q = q.reshape(batch, kv_heads, heads // kv_heads, size)
  scores = einsum('bkgh,bksh->bkgs', q, k_cache, compute.dtype)
  mask = jnp.arange(room) < lengths[:, None]
  scores = jnp.where(
      mask[:, None, None], scores / math.sqrt(size), _NEVER)
  weights = jax.nn.softmax(scores, axis=-1)
  out = einsum('bkgs,bksh->bkgh', weights, v_cache, compute.dtype)
  return out.reshape(batch, 1, heads, size)
