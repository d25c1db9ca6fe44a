"""Multi-head latent attention (MLA) of DeepSeek-V3 (arXiv:2412.19437) and Kimi K2.

Legend: B rows, T tokens, D hidden size, H heads, h head size (of which the
last d entries are rotated), hv that of values, r rank of the latents, S slots.

Keys and values of all heads are projections of one latent of r numbers per
token, plus one rotated key of d numbers that heads share. Training computes
them; a cache stores the latents, r + d numbers per token, and decoding projects
queries into the latent space instead ("absorbed" matrices).
"""

import dataclasses

import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum
from jaxpost.models import layers, rope
from jaxpost.models.config import LatentConfig
from jaxpost.models.parameters import Param

_BLOCK = 'model.layers.{}.'
_EPS = 1e-6  # norm epsilon of the latents, independent of the config


def table(plain: dict, cfg: LatentConfig) -> dict[str, Param]:
  """Returns the parameter table: that of the same model with plain attention, with other rows for q, k, v and o."""
  n, d, h, r = cfg.num_layers, cfg.hidden_size, cfg.num_heads, cfg.kv_rank

  def matrix(shape, axes, hf):
    return Param((n, *shape), ('layers', *axes), f'{_BLOCK}self_attn.{hf}.weight', matrix=True)

  def norm(size, hf):
    return Param((n, size), ('layers', None), f'{_BLOCK}self_attn.{hf}.weight', 'ones', exact=True)

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
  return {
    'embed': plain['embed'],
    **{f'layers/{k}': v for k, v in rows.items()},
    **{k: v for k, v in plain.items() if k not in ('embed', *(f'layers/{name}' for name in 'qkvo'))},
  }


def attend(p, y, table, attend_to, cfg: LatentConfig, compute: Compute, absorbed: bool, layout=None):
  """Computes the attention of a layer, without the output projection.

  Args:
    y: [B, T, D], the normed input.
    table: one of `rope.tables`.
    attend_to: (q, k, v, (latents [B, T, 1, r + d],)) -> (out, kept).
    absorbed: q and `out` are in the latent space; k and v are None.

  Returns:
    ([B, T, H, hv], what `attend_to` returned as `kept`).
  """

  def norm(x, name):
    return layers.rms_norm(x, p[name], dataclasses.replace(cfg, norm_eps=_EPS))

  def project(spec, x, name):
    return layers.project(spec, x, p, name, compute, layout=layout)

  if cfg.q_rank:
    q = project('btr,rnh->btnh', norm(project('btd,dr->btr', y, 'q_a'), 'q_a_norm'), 'q_b')
  else:
    q = project('btd,dnh->btnh', y, 'q')
  q = rope.scale_queries(q, table)
  plain = cfg.head_dim - cfg.rope_dim
  low = project('btd,dr->btr', y, 'kv_a')
  latent = norm(low[..., : cfg.kv_rank], 'kv_a_norm')[:, :, None]
  rotated = rope.rotate(low[:, :, None, cfg.kv_rank :], table, cfg)
  q_rotated = rope.rotate(q[..., plain:], table, cfg)
  keep = (jnp.concatenate([latent, rotated.astype(latent.dtype)], -1),)
  if absorbed:
    w = p['kv_b']
    if hasattr(w, 'dense'):  # with an adapter, or in codes
      w = w.dense(compute.dtype)
    up, down = w[..., :plain], w[..., plain:]
    q = einsum('btnh,rnh->btnr', q[..., :plain], up, compute.dtype)
    q = jnp.concatenate([q, q_rotated.astype(q.dtype)], axis=-1)
    out, kept = attend_to(q, None, None, keep)
    return einsum('btnr,rnh->btnh', out, down, compute.dtype), kept
  both = project('btr,rnh->btnh', latent[:, :, 0], 'kv_b')
  rotated = jnp.broadcast_to(rotated, q_rotated.shape)
  q, k = (jnp.concatenate([x[..., :plain], y.astype(x.dtype)], axis=-1) for x, y in ((q, q_rotated), (both, rotated)))
  return attend_to(q, k, both[..., plain:], keep)


def values(latents, cfg: LatentConfig):
  """Returns the part [..., r] of cached latents [S, 1, length, r + d] that acts as values."""
  return latents[..., : cfg.kv_rank]
