"""Multi-head latent attention (MLA) of DeepSeek-V3 (arXiv:2412.19437) and Kimi K2.

Legend: B rows, T tokens, D hidden size, H heads, h head size (of which the
last d entries are rotated), hv that of values, r rank of the latents, S slots.

Keys and values of all heads are projections of one latent of r numbers per token; a key also has a rotated part of d
numbers, which all heads share. Training computes both. A cache stores the latent and the rotated part, r + d numbers
per token, and decoding projects queries into the latent space instead ("absorbed" matrices).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum
from jaxpost.models import layers, rope
from jaxpost.models.decoder_configs import LatentConfig
from jaxpost.models.parameters import LAYER, Param

_EPS = 1e-6  # norm epsilon of the latents, independent of the config


def table(plain: dict, cfg: LatentConfig) -> dict[str, Param]:
  """Returns the parameter table: `plain`, that of the model with ordinary attention, with other rows for q, k, v, o."""
  n, d, h, r = cfg.num_layers, cfg.hidden_size, cfg.num_heads, cfg.kv_rank

  def matrix(shape, axes, hf):
    return Param((n, *shape), ('layers', *axes), f'{LAYER}self_attn.{hf}.weight', matrix=True)

  def norm(size, hf):
    return Param((n, size), ('layers', None), f'{LAYER}self_attn.{hf}.weight', 'ones', exact=True)

  heads = ('embed', 'heads', None)
  queries = {'q': matrix((d, h, cfg.head_dim), heads, 'q_proj')}
  if cfg.q_rank:
    queries = {
      'q_a': matrix((d, cfg.q_rank), ('embed', None), 'q_a_proj'),
      'q_a_norm': norm(cfg.q_rank, 'q_a_layernorm'),
      'q_b': matrix((cfg.q_rank, h, cfg.head_dim), heads, 'q_b_proj'),
    }
  rows = queries | {
    'kv_a': matrix((d, r + cfg.rope_dim), ('embed', None), 'kv_a_proj_with_mqa'),
    'kv_a_norm': norm(r, 'kv_a_layernorm'),
    'kv_b': matrix((r, h, cfg.head_dim - cfg.rope_dim + cfg.v_dim), heads, 'kv_b_proj'),
    'o': matrix((h, cfg.v_dim, d), ('heads', None, 'embed'), 'o_proj'),
  }
  if cfg.index_topk:
    from jaxpost.models import sparse_attention

    rows |= sparse_attention.rows(cfg)
  return {
    'embed': plain['embed'],
    **{f'layers/{k}': v for k, v in rows.items()},
    **{k: v for k, v in plain.items() if k not in ('embed', *(f'layers/{name}' for name in 'qkvo'))},
  }


def attend(
  p: dict,
  y: jax.Array,
  table: tuple,
  attend_to: Callable,
  cfg: LatentConfig,
  compute: Compute,
  absorbed: bool,
  layout: Callable,
) -> tuple[jax.Array, Any]:
  """Computes the attention of a layer, without the output projection.

  Args:
    y: [B, T, D], the normed input.
    table: one of `rope.tables`.
    attend_to: (q, k, v, (latents [B, T, 1, r + d], ...)) -> (out, kept). The last argument is the cache entries. Where
      an indexer chooses keys, q and k are `sparse_attention.Queries` and `Keys`.
    absorbed: q and `out` are in the latent space; k and v are None.

  Returns:
    ([B, T, H, hv], the `kept` of `attend_to`).
  """

  def norm(x, name):
    return layers.rms_norm(x, p[name], dataclasses.replace(cfg, norm_eps=_EPS))

  def project(spec, x, name):
    return layers.project(spec, x, p, name, compute, layout=layout)

  if cfg.q_rank:
    low_q = norm(project('btd,dr->btr', y, 'q_a'), 'q_a_norm')
    q = project('btr,rnh->btnh', low_q, 'q_b')
  else:
    q = project('btd,dnh->btnh', y, 'q')
  q = rope.scale_queries(q, table)
  nope_dim = cfg.head_dim - cfg.rope_dim  # entries of a head that are not rotated
  low_kv = project('btd,dr->btr', y, 'kv_a')
  latent = norm(low_kv[..., : cfg.kv_rank], 'kv_a_norm')[:, :, None]
  k_rotated = rope.rotate(low_kv[:, :, None, cfg.kv_rank :], table, cfg)
  q_rotated = rope.rotate(q[..., nope_dim:], table, cfg)
  entries: tuple = (jnp.concatenate([latent, k_rotated.astype(latent.dtype)], -1),)
  if cfg.index_topk:
    from jaxpost.models import sparse_attention

    *index_q, index_k = sparse_attention.index(p, y, low_q, table, cfg, compute=compute)
    entries = (*entries, index_k)
  if absorbed:  # q . (W_k latent) = (W_k^T q) . latent, and the weighted sum of W_v latent is W_v times that of latents
    w = p['kv_b'].dense(compute.dtype) if hasattr(p['kv_b'], 'dense') else p['kv_b']  # with an adapter, or quantized
    w_k, w_v = w[..., :nope_dim], w[..., nope_dim:]
    q = einsum('btnh,rnh->btnr', q[..., :nope_dim], w_k, compute.dtype)
    q = jnp.concatenate([q, q_rotated.astype(q.dtype)], axis=-1)
    out, kept = attend_to(sparse_attention.Queries(q, *index_q) if cfg.index_topk else q, None, None, entries)
    return einsum('btnr,rnh->btnh', out, w_v, compute.dtype), kept
  kv = project('btr,rnh->btnh', latent[:, :, 0], 'kv_b')
  k_rotated = jnp.broadcast_to(k_rotated, q_rotated.shape)
  q = jnp.concatenate([q[..., :nope_dim], q_rotated.astype(q.dtype)], axis=-1)
  k = jnp.concatenate([kv[..., :nope_dim], k_rotated.astype(kv.dtype)], axis=-1)
  if 0 < cfg.index_topk < y.shape[1]:  # in shorter rows the indexer would exclude nothing
    q, k = sparse_attention.Queries(q, *index_q), sparse_attention.Keys(k, index_k)
  return attend_to(q, k, kv[..., nope_dim:], entries)


def from_cache(q: Any, old: list, new: list, cfg: LatentConfig, compute: Compute) -> tuple:
  """Returns the arguments q, cache, recent and `choose` of `decoding.cached_attention`.

  q: queries in the latent space, or `sparse_attention.Queries`.
  old, new: entries of a layer in the cache, and of the tokens after it: latents [S, 1, length, r + d], and keys of
    an indexer, if the model has one. The first r numbers of a latent act as values.
  """
  cache, recent = ((latents, latents[..., : cfg.kv_rank]) for latents in (old[0], new[0]))
  if not cfg.index_topk:
    return q, cache, recent, None
  from jaxpost.models import sparse_attention

  return q.heads, cache, recent, sparse_attention.chooser(q, old[1], new[1], cfg, compute)
