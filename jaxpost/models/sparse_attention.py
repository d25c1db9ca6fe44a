"""DeepSeek sparse attention: a query attends to the k earlier tokens that an indexer scores highest.

DeepSeek-V3.2 (arXiv:2512.02556, section 2.1) and GLM-5 use it with latent attention (`mla.py`).

Legend: B rows, T queries, S keys, D hidden size, H heads, h head size, r rank of queries, I heads of the indexer,
e their size.

The score of key s for query t is sum_i w_ti relu(q_ti . k_s) / sqrt(e I). The indexer's queries are projections of the
latent of attention's queries; its keys, one for all heads, and the weights w are projections of the input. Among equal
scores, of which the relu makes many, the earliest tokens are chosen, in rows as in a cache. The choice has no gradient,
so the indexer is not trained (`Param.frozen`).

All scores of attention are computed and those of other tokens masked, so the cost is that of dense attention. Rows that
are not longer than k use dense attention and its kernels.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxpost.errors import InputError
from jaxpost.matmul import Compute, einsum
from jaxpost.models import attention_xla, rope
from jaxpost.models.decoder_configs import LatentConfig
from jaxpost.models.parameters import Param

_BLOCK = 'model.layers.{}.self_attn.indexer.'
_EPS = 1e-6  # of the norm of keys, independent of the config


class Queries(NamedTuple):
  """Queries of attention, with those of the indexer and their weights."""

  heads: jax.Array  # [B, T, H, h]
  index: jax.Array  # [B, T, I, e]
  weights: jax.Array  # [B, T, I]


class Keys(NamedTuple):
  """Keys of attention, and those of the indexer."""

  heads: jax.Array  # [B, S, H, h]
  index: jax.Array  # [B, S, 1, e]


def rows(cfg: LatentConfig) -> dict[str, Param]:
  """Returns the rows of a layer's indexer in the parameter table."""
  n, d, size = cfg.num_layers, cfg.hidden_size, cfg.index_dim

  def row(shape, axes, hf, init='normal'):
    matrix = len(shape) > 1
    return Param((n, *shape), ('layers', *axes), _BLOCK + hf, init, matrix=matrix, exact=True, frozen=True)

  return {
    'index_q': row((cfg.q_rank, cfg.index_heads, size), ('embed', None, None), 'wq_b.weight'),
    'index_k': row((d, size), ('embed', None), 'wk.weight'),
    'index_k_norm': row((size,), (None,), 'k_norm.weight', 'ones'),
    'index_k_norm_bias': row((size,), (None,), 'k_norm.bias', 'zeros'),
    'index_weights': row((d, cfg.index_heads), ('embed', None), 'weights_proj.weight'),
  }


def index(p: dict, y: jax.Array, low_q: jax.Array, table: tuple, cfg: LatentConfig, compute: Compute) -> tuple:
  """Returns queries [B, T, I, e], their weights [B, T, I] and keys [B, T, 1, e] of the indexer.

  Args:
    y: [B, T, D], the normed input of attention.
    low_q: [B, T, r], the normed latent of its queries.
    table: one of `rope.tables`.
  """
  # `layers.project` would keep these products for the backward pass, which does not need most of them.
  y, low_q = jax.lax.stop_gradient((y, low_q))
  q = einsum('btr,rie->btie', low_q, p['index_q'], compute.dtype, compute.residual)
  k = einsum('btd,de->bte', y, p['index_k'], compute.dtype, compute.residual).astype(jnp.float32)
  k = k - jnp.mean(k, -1, keepdims=True)
  k = k * jax.lax.rsqrt(jnp.mean(k * k, -1, keepdims=True) + _EPS) * p['index_k_norm'] + p['index_k_norm_bias']
  weights = einsum('btd,di->bti', y, p['index_weights'], 'float32') * (cfg.index_heads * cfg.index_dim) ** -0.5
  q, k = (_rotate(x, table, cfg).astype(compute.residual) for x in (q, k[:, :, None]))
  return jax.lax.stop_gradient((q, weights, k))


def _rotate(x: jax.Array, table: tuple, cfg: LatentConfig) -> jax.Array:
  """Rotates the first `rope_dim` entries of [B, T, N, e]; heads of attention rotate their last ones."""
  index_rope = dataclasses.replace(cfg.ropes[0], interleaved=cfg.index_interleaved)
  rotated = rope.rotate(x[..., : cfg.rope_dim], table, dataclasses.replace(cfg, ropes=(index_rope,)))
  return jnp.concatenate([rotated, x[..., cfg.rope_dim :].astype(rotated.dtype)], -1)


def choose(
  mask: jax.Array, queries: jax.Array, weights: jax.Array, keys: jax.Array, cfg: LatentConfig, compute: Compute
) -> jax.Array:
  """Returns the mask [B, T, S], reduced to the `index_topk` keys of each query with the highest scores.

  queries, weights: `index` and `weights` of `Queries`. keys: [B, S, e].
  """
  scores = einsum('btie,bse->btis', queries, keys, compute.dtype)
  scores = jnp.sum(jax.nn.relu(scores) * weights[..., None], axis=2)
  scores = jnp.where(mask, scores, -jnp.inf)
  threshold = jax.lax.top_k(scores, cfg.index_topk)[0][..., -1:]
  above, tied = scores > threshold, scores == threshold
  num_tied = cfg.index_topk - jnp.sum(above, -1, keepdims=True)  # how many of the tied keys are chosen
  return mask & (above | tied & (jnp.cumsum(tied, -1) <= num_tied))


def attend(
  q: Queries,
  k: Keys,
  v: jax.Array,
  rows: attention_xla.PackedRows,
  window: int | jax.Array,
  cfg: LatentConfig,
  compute: Compute,
  sinks: jax.Array | None,
  parts: int,
) -> jax.Array:
  """Attention over packed rows that are longer than `index_topk`; see `layers.attention`.

  Raises:
    InputError: a kernel was asked for, or rows are split.
  """
  if parts > 1:
    raise InputError(
      'config.mesh: context cannot split rows longer than the index_topk of a model with sparse attention, whose '
      'indexer would have to score keys of other devices; set it to 1'
    )
  if compute.forced and compute.attention != 'chunked':
    raise InputError(
      f'config.model.attention: {compute.attention} cannot attend to the tokens that an indexer chooses; leave it auto'
    )

  def choose_keys(mask, low, end, queries, weights):
    if end - low <= cfg.index_topk:
      return mask
    return choose(mask, queries, weights, k.index[:, low:end, 0], cfg, compute=compute)

  queries = (*rows, np.arange(v.shape[1])[None], q.index, q.weights)
  options: dict[str, Any] = dict(cfg=cfg, compute=compute, sinks=sinks, queries=queries, choose=choose_keys)
  out = attention_xla.attend_in_chunks(q.heads, k.heads, v, rows, window, **options)
  return checkpoint_name(out.astype(compute.residual), 'dots')


def chooser(q: Queries, old: jax.Array, new: jax.Array, cfg: LatentConfig, compute: Compute) -> Callable | None:
  """Returns the `choose` of `decoding.cached_attention`; None if a cache has no more than `index_topk` entries.

  old, new: keys of the indexer [S, 1, length, e], in the cache and after it.
  """
  if old.shape[2] + new.shape[2] <= cfg.index_topk:
    return None
  keys = jnp.concatenate([x[:, 0].astype(compute.dtype) for x in (old, new)], axis=1)
  return lambda mask: choose(mask, q.index, q.weights, keys, cfg, compute=compute)
