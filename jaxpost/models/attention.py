"""Attention over packed rows, and over a cache.

Legend: B rows, T queries, S keys, K kv heads, G queries per kv head, h head
size, hv that of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpost.matmul import Compute, einsum, from_bits
from jaxpost.models import context_parallel
from jaxpost.models.attention_xla import attend_in_chunks, chunked, scale_queries, softcap, softmax
from jaxpost.types import MASKED_LOGIT

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.config import ModelConfig
  from jaxpost.types import Cache


def attention(
  q, k, v, segment_ids, compute: Compute, branch_ids, positions, window, cfg: ModelConfig, sinks=None, layout=None
):
  """Computes causal attention inside each document of a packed row.

  Branches of a document (`types.Batch`) attend to its shared part and to
  themselves. `compute.attention` selects the implementation, where it supports
  the arguments; `attention_kernels.py` has the kernels of accelerators and their
  limits.

  Args:
    q: [B, T, H, h]; k: [B, T, K, h]; v: [B, T, K, hv]; segment_ids,
      positions: [B, T]; branch_ids: [B, T] or None.
    window: sliding window: a token attends to tokens of its document less than
      this far back; 0: all. An array in a scan over layers that differ.
    cfg: for the scale and the soft cap of the scores.
    sinks: [H], the score of an extra key without value for each head, or None.
    layout: a `Layout`, or any function on a single device. Where it splits
      rows, q, k and v are striped, see `context_parallel.py`.

  Returns:
    [B, T, H, hv].

  Raises:
    InputError: the requested implementation does not support the arguments.
  """
  rest = segment_ids, compute, branch_ids, positions, window, cfg, sinks
  parts = context_parallel.num_shards(layout)
  if uses_kernel(compute):
    from jaxpost.models import attention_kernels

    if attention_kernels.kernel_fits(q, v, branch_ids, compute, cfg, sinks=sinks, parts=parts):
      return attention_kernels.attend(q, k, v, *rest, layout, parts)
  if parts > 1:
    return _split(q, k, v, *rest, layout, parts)
  return checkpoint_name(chunked(q, k, v, *rest).astype(compute.residual), 'dots')


def uses_kernel(compute: Compute) -> bool:
  """True if `compute.attention` is a kernel of an accelerator, which `hardware.kernel_check` verifies."""
  return compute.attention != 'chunked'


def _split(
  q, k, v, segment_ids, compute: Compute, branch_ids, positions, window, cfg: ModelConfig, sinks, layout: Layout, n: int
):
  """Attention of rows in n parts: q, k and v are striped, the rest is in order.

  In a `shard_map`: the partitioner would sum the gradients of keys and values
  over the whole mesh.
  """
  length = q.shape[1]
  k, v = (x.astype(compute.dtype) for x in (k, v))
  if layout.mesh.devices.flat[0].platform == 'cpu':
    k, v = (x.astype(jnp.float32) for x in (k, v))  # XLA:CPU sums no bfloat16
  rows = segment_ids, positions, branch_ids
  mine = (
    *(x if x is None else context_parallel.stripe(x, n) for x in rows),
    (context_parallel.stripe(jnp.arange(length)[None], n)),
  )
  split = layout.spec(('batch', 'time', 'kv_heads'), k.shape)
  rest = (PartitionSpec(*split[:2]),) * 3 + (PartitionSpec(None, split[1]),), (PartitionSpec(split[0]))

  def local(q, k, v, mine, rows, window, sinks):
    k, v = map(context_parallel.gather_stripes, (k, v))
    return attend_in_chunks(q, k, v, mine, rows, window=window, compute=compute, cfg=cfg, sinks=sinks, n=n)

  # An int is static; in a scan over layers the window is traced.
  number = isinstance(window, int)
  return jax.shard_map(
    lambda *given: local(*given[:5], window if number else given[5], given[6]),
    **context_parallel.shard_map_axes(layout, split),
    in_specs=(split,) * 3 + (*rest, PartitionSpec(), PartitionSpec(split[2])),
    out_specs=split,
  )(q, k, v, mine, rows, None if number else window, sinks)


def layer_entries(cache: Cache, layer: int, step):
  """Returns keys and values of a layer, [S, K, length, h], gathered from pages if any.

  Pages are gathered at every step: gathered for all layers at once, for a block
  of steps, they would take the memory that paging saves.
  """
  pair = [x[layer] for x in (cache.k, cache.v) if x]
  table = cache.table
  if table is None:
    return pair
  table, _ = jax.lax.optimization_barrier((table, step))

  def gather(pool):
    some = pool[table].swapaxes(1, 2)  # [S, K, n, p, h]
    return from_bits(some.reshape(*some.shape[:2], -1, some.shape[-1]))

  return [gather(pool) for pool in pair]


def cached_attention(q, cache, recent, filled, step, compute: Compute, window: int, cfg: ModelConfig, sinks=None):
  """Attends from new tokens to the filled part of the KV cache.

  Args:
    q: [B, T', H, h], of one token or of several consecutive ones.
    cache: keys and values [B, K, S, h], of which the first `filled` [B] are valid.
    recent: keys and values [B, K, T, h] of the tokens after those. The first
      query is at `step` there; each query attends up to itself.
    window, cfg, sinks: see `attention`.

  Returns:
    [B, T', H, h].
  """
  batch, count, heads, size = q.shape
  kv_heads, room = cache[0].shape[1:3]
  kind = cache[0].dtype.name  # its values are rounded to the operand type, see Compute
  q = scale_queries(q, cfg).astype(compute.dtype)
  q = q.reshape(batch, count, kv_heads, heads // kv_heads, size).swapaxes(1, 2)
  q = q.reshape(batch, kv_heads, -1, size)  # queries by time, then by head
  # Of two products of one q XLA:GPU would make one, and copy the cache at every token.
  pairs = (q, cache[0]), (jax.lax.optimization_barrier(q), recent[0])
  scores = jnp.concatenate([einsum('bkgh,bksh->bkgs', q, keys, kind) for q, keys in pairs], axis=-1)
  flat, scores = scores.shape, scores.reshape(batch, kv_heads, count, -1, scores.shape[-1])
  entry, new = jnp.arange(room), jnp.arange(recent[0].shape[2])
  stands = step + jnp.arange(count)[:, None]
  mask = jnp.concatenate(
    [
      jnp.broadcast_to(entry < filled[:, None, None], (batch, count, room)),
      jnp.broadcast_to(new <= stands, (batch, count, len(new))),
    ],
    axis=-1,
  )
  if window:
    at = jnp.concatenate([jnp.broadcast_to(entry, (batch, room)), filled[:, None] + new], -1)
    mask &= at[:, None] > filled[:, None, None] + stands - window
  weights = softmax(
    jnp.where(mask[:, None, :, None], softcap(scores, cfg), MASKED_LOGIT),
    sinks if sinks is None else sinks.reshape(kv_heads, 1, -1, 1),
  )
  weights = weights.reshape(flat).astype(compute.dtype)
  out = sum(
    einsum('bkgs,bksh->bkgh', part, v, kind)
    for part, v in zip(jnp.split(weights, [room], axis=-1), (cache[1], recent[1]))
  )
  out = out.reshape(batch, kv_heads, count, -1, out.shape[-1]).swapaxes(1, 2)
  return out.reshape(batch, count, heads, -1)


def extend(cache: Cache, recent: Cache, filled, one_by_one: bool) -> Cache:
  """Appends `recent` to the filled part of the cache, in place.

  Entries past the end overwrite the last ones of their slot, or are dropped:
  only finished slots get there.

  Args:
    cache: L x [S', K, length, h], of which the first S rows are extended; or
      pages and a table.
    recent: L x [S, K, T, h].
    filled: [S], valid entries.
    one_by_one: write slot by slot (or entry by entry, in pages) instead of by
      a scatter.
  """
  rows, _, steps, _ = recent.k[0].shape
  at, row = filled[:, None] + jnp.arange(steps), jnp.arange(rows)[:, None]
  if cache.table is not None:
    size, last = cache.k[0].shape[2], cache.table.shape[1] - 1
    row = cache.table[row, jnp.minimum(at // size, last)]
    at = at % size
  new = jax.tree.map(lambda x: x.swapaxes(1, 2), recent)  # [S, T, K, h]
  old, table = cache.replace(table=None), cache.table
  if not one_by_one:
    out = jax.tree.map(lambda old, new: old.at[row, :, at].set(new, mode='drop'), old, new)
    return out.replace(table=table)
  # The scatter copies the cache on CPU, and its layout on TPU; slices are updated in place.
  each = steps if table is not None else 1

  def write(i, cache):
    s, t = i // each, i % each
    place = (row[s, t if each > 1 else 0], 0, at[s, t], 0)
    return jax.tree.map(
      lambda old, new: jax.lax.dynamic_update_slice(
        old, jax.lax.dynamic_slice(new, (s, 0, t, 0), (1, new.shape[1], steps // each, new.shape[3])), place
      ),
      cache,
      recent,
    )

  out = jax.lax.fori_loop(0, rows * each, write, old)
  return out.replace(table=table)
