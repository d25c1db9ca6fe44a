"""Attention by plain XLA operations, in chunks of queries.

Legend: B rows, T tokens (t of a part), S keys, H heads, K kv heads, G queries per kv head, h head size, hv that of
values. Arguments that are not documented here are those of `layers.attention`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.matmul import Compute, einsum
from jaxpost.models.config import ModelConfig
from jaxpost.types import MASKED_LOGIT

_LONG = 2048  # rows longer than this trade time for memory


class PackedRows(NamedTuple):
  """Which tokens of packed rows belong together, each [B, T]; see `types.Batch`."""

  segment_ids: jax.Array
  positions: jax.Array
  branch_ids: jax.Array | None = None


def attend_in_chunks(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  rows: PackedRows,
  window: int | jax.Array,
  cfg: ModelConfig,
  compute: Compute,
  sinks: jax.Array | None = None,
  queries: tuple | None = None,
  n: int = 1,
  choose: Callable | None = None,
) -> jax.Array:
  """Attends from the queries of one of n parts of a row to all earlier keys.

  Each chunk of queries uses only the keys up to its own end, so half of the products are never computed and scores
  [T, T] never exist; keys before the window of a chunk are skipped, too. Heads come before time, so that a chunk is one
  contiguous matrix per head and row. In long rows each quarter (less, with a short window) uses the keys up to its end,
  its chunks are processed one after the other, and the backward pass recomputes their weights: only one chunk's weights
  exist at a time.

  Args:
    q: [B, t, H, h], every nth of T = n t tokens.
    k, v: [B, T, K, h].
    rows: ids and positions of the keys, all T tokens.
    queries: segment ids, positions, branch ids (or None) and places in the row of the queries, each [B or 1, t];
      further arrays [B, t, ...] are passed to `choose`. None: the queries are those of all tokens, in order.
    choose: (mask [B, t, keys], first key, end, *further arrays of these queries) -> mask.
  """
  batch, length, heads, size = q.shape
  queries = queries or (*rows, np.arange(length)[None])
  kv_heads = k.shape[2]
  shape = batch, length, kv_heads, heads // kv_heads, size
  q = scale_queries(q.reshape(shape), cfg).swapaxes(1, 2)
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)

  def attend(low, end, q, *queries):
    """Attends to the keys from `low` to `end`."""
    mask = _visible(queries, rows, low, end, window)
    mask = choose(mask, low, end, *queries[4:]) if choose else mask
    scores = einsum('bktgh,bksh->bktgs', q, k[:, :, low:end], compute.dtype)
    scores = jnp.where(mask[:, None, :, None], softcap(scores, cfg), MASKED_LOGIT)
    weights = softmax(scores, sinks if sinks is None else sinks.reshape(kv_heads, 1, -1, 1))
    return einsum('bktgs,bksh->bktgh', weights, v[:, :, low:end], compute.dtype)

  outs, step = [], min(compute.q_chunk, length)
  if is_long := n * length > _LONG:
    step = -(-length // 4)
    if isinstance(window, int) and window:
      step = min(step, max(window // n, 4 * compute.q_chunk))
  for start in range(0, length, step):
    end = min(start + step, length)
    run = functools.partial(attend, first_key(n * start, window, rows.branch_ids), n * end)
    part = q[:, :, start:end], *(x if x is None else x[:, start:end] for x in queries)
    outs.append(_map_chunks(run, min(compute.q_chunk, step // 4), *part) if is_long else run(*part))
  out = jnp.concatenate(outs, axis=2).swapaxes(1, 2)
  return out.reshape(batch, length, heads, v.shape[-1])


def _visible(queries: Sequence, rows: PackedRows, low: int, end: int, window: int | jax.Array) -> jax.Array:
  """Returns [B, t, end - low]: whether `queries` of `attend_in_chunks` may attend to the keys from `low` to `end`."""
  segments, positions, branches, places = queries[:4]
  mask = segments[:, :, None] == rows.segment_ids[:, None, low:end]
  mask &= places[:, :, None] >= jnp.arange(low, end)
  if not isinstance(window, int) or window:
    mask &= (positions[:, :, None] - rows.positions[:, None, low:end] < window) | (window == 0)
  if rows.branch_ids is not None:  # all branches attend to the shared part, 0
    branch_ids = rows.branch_ids[:, None, low:end]
    mask &= (branch_ids == 0) | (branch_ids == branches[:, :, None])
  return mask


def _map_chunks(run, step: int, q, *queries):
  """Computes `run(q, *queries)` for chunks of `step` queries, one at a time, which the backward pass computes again."""
  count = q.shape[2] // step  # of whole chunks

  def split(x, axis):
    whole = jax.lax.slice_in_dim(x, 0, count * step, axis=axis)
    return jnp.moveaxis(whole.reshape(*x.shape[:axis], count, step, *x.shape[axis + 1 :]), axis, 0)

  run = jax.checkpoint(run)
  out = jax.lax.map(lambda xs: run(*xs), (split(q, 2), *jax.tree.map(lambda x: split(x, 1), queries)))
  out = jnp.moveaxis(out, 0, 2).reshape(*q.shape[:2], count * step, *out.shape[4:])
  if remainder := q.shape[2] - count * step:
    last = run(q[:, :, -remainder:], *jax.tree.map(lambda x: x[:, -remainder:], queries))
    out = jnp.concatenate([out, last], axis=2)
  return out


def first_key(start: int, window: int | jax.Array, branch_ids: jax.Array | None) -> int:
  """Returns the first key that the query at `start` of a row may attend to.

  It is 0 for rows with branches: windows count positions, and the shared part is closer in positions than in places.
  """
  if branch_ids is not None or not isinstance(window, int) or not window:
    return 0
  return max(0, start - window + 1)


def scale_queries(q: jax.Array, cfg: ModelConfig) -> jax.Array:
  """Multiplies queries by the attention scale, 1 / sqrt(head_dim) by default."""
  if cfg.attention_scale:
    return q * cfg.attention_scale
  return q / math.sqrt(cfg.head_dim)


def softcap(scores: jax.Array, cfg: ModelConfig) -> jax.Array:
  """Applies the soft cap c tanh(score / c), if the model has one."""
  cap = cfg.attention_softcap
  return cap * jnp.tanh(scores / cap) if cap else scores


def softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
  """Softmax over keys; `sinks` is the score of one more key, whose weight is dropped."""
  if sinks is None:
    return jax.nn.softmax(scores, axis=-1)
  top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
  scores = jnp.exp(scores - top)
  return scores / (jnp.sum(scores, axis=-1, keepdims=True) + jnp.exp(sinks - top))
