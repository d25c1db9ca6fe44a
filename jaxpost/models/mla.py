"""Multi-head latent attention (MLA) of DeepSeek-V3 (arXiv:2412.19437) and Kimi K2.

Legend: B rows, T tokens, D hidden size, H heads, h head size (of which the
last d entries are rotated), hv that of values, r rank of the latents, S slots.

Keys and values of all heads are projections of one latent of r numbers per
token, plus one rotated key of d numbers that heads share. Training computes
them; a cache stores the latents, r + d numbers per token, and decoding projects
queries into the latent space instead ("absorbed" matrices).
"""

import dataclasses
import math

import jax.numpy as jnp

from jaxpost.errors import InputError
from jaxpost.matmul import Compute, einsum
from jaxpost.models import layers, rope
from jaxpost.models.config import LatentConfig, ModelConfig
from jaxpost.models.parameters import Param

_BLOCK = 'model.layers.{}.'
_EPS = 1e-6  # norm epsilon of the latents, independent of the config


def table(plain: dict, cfg: LatentConfig) -> dict[str, Param]:
  """Returns the parameter table, with the dense layers in a stack of their own.

  Args:
    plain: the table of the same model with plain attention, in which all layers
      have experts.
  """
  d, f = cfg.hidden_size, cfg.intermediate_size
  old = {k.split('/')[1]: v for k, v in plain.items() if v.stacked}

  def matrix(hf, shape, axes):
    return Param((cfg.first_dense, *shape), ('layers', *axes), f'{_BLOCK}mlp.{hf}_proj.weight', matrix=True)

  def norms(n, first):
    return {
      k: dataclasses.replace(v, shape=(n, *v.shape[1:]), first=first) for k, v in old.items() if k.endswith('_norm')
    }

  dense = (
    _rows(cfg, cfg.first_dense, 0)
    | norms(cfg.first_dense, 0)
    | {
      'gate': matrix('gate', (d, f), ('embed', 'mlp')),
      'up': matrix('up', (d, f), ('embed', 'mlp')),
      'down': matrix('down', (f, d), ('mlp', 'embed')),
    }
  )
  rest = cfg.sparse_layers, cfg.first_dense
  sparse = (
    _rows(cfg, *rest)
    | norms(*rest)
    | {k: v for k, v in old.items() if k not in (*'qkvo',) and (not k.endswith('_norm'))}
  )
  stacks = {'dense': dense} if cfg.first_dense else {}
  return {
    'embed': plain['embed'],
    **{f'{stack}/{k}': v for stack, rows in (stacks | {'layers': sparse}).items() for k, v in rows.items()},
    **{k: v for k, v in plain.items() if not v.stacked and k != 'embed'},
  }


def _rows(cfg: LatentConfig, n: int, first: int) -> dict:
  """Returns the attention rows that replace q, k, v, o, for `n` layers from `first` on."""
  d, h, r = cfg.hidden_size, cfg.num_heads, cfg.kv_rank

  def matrix(shape, axes, hf):
    return Param((n, *shape), ('layers', *axes), f'{_BLOCK}self_attn.{hf}.weight', matrix=True, first=first)

  def norm(size, hf):
    return Param((n, size), ('layers', None), f'{_BLOCK}self_attn.{hf}.weight', 'ones', exact=True, first=first)

  heads = ('embed', 'heads', None)
  queries = {'q': matrix((d, h, cfg.head_dim), heads, 'q_proj')}
  if cfg.q_rank:
    queries = {
      'q_a': matrix((d, cfg.q_rank), ('embed', None), 'q_a_proj'),
      'q_a_norm': norm(cfg.q_rank, 'q_a_layernorm'),
      'q_b': matrix((cfg.q_rank, h, cfg.head_dim), heads, 'q_b_proj'),
    }
  return queries | {
    'kv_a': matrix((d, r + cfg.rope_dim), ('embed', None), 'kv_a_proj_with_mqa'),
    'kv_a_norm': norm(r, 'kv_a_layernorm'),
    'kv_b': matrix((r, h, cfg.head_dim - cfg.rope_dim + cfg.v_dim), heads, 'kv_b_proj'),
    'o': matrix((h, cfg.v_dim, d), ('heads', None, 'embed'), 'o_proj'),
  }


def attend(p, y, table, attend_to, cfg: LatentConfig, compute: Compute, absorbed: bool, layout=None):
  """Computes the attention of a layer, without the output projection.

  Args:
    p: parameters of the layer.
    y: [B, T, D], the normed input.
    table: one of `rope.tables`.
    attend_to: (q, k, v, (latents [B, T, 1, r + d],)) -> (out, kept).
    absorbed: q and `out` are in the latent space; k and v are None.

  Returns:
    ([B, T, H, hv], what `attend_to` returned as `kept`).
  """
  norm = lambda x, name: layers.rms_norm(x, p[name], dataclasses.replace(cfg, norm_eps=_EPS))
  project = lambda spec, x, name: layers.project(spec, x, p, name, compute, layout)
  if cfg.q_rank:
    q = project('btr,rnh->btnh', norm(project('btd,dr->btr', y, 'q_a'), 'q_a_norm'), 'q_b')
  else:
    q = project('btd,dnh->btnh', y, 'q')
  plain = cfg.head_dim - cfg.rope_dim
  low = project('btd,dr->btr', y, 'kv_a')
  latent = norm(low[..., : cfg.kv_rank], 'kv_a_norm')[:, :, None]
  rotated = _rotate(low[:, :, None, cfg.kv_rank :], table, cfg)
  q_rotated = _rotate(q[..., plain:], table, cfg)
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


def _rotate(x, table, cfg: LatentConfig):
  """Rotates [B, T, N, d]; interleaved pairs are separated into halves first."""
  if cfg.interleaved:
    x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
  return rope.rotate(x, table, cfg)


def values(latents, cfg: LatentConfig):
  """Returns the part [..., r] of cached latents [S, 1, length, r + d] that acts as values."""
  return latents[..., : cfg.kv_rank]


# ---------------------------------------------------------------- config.json

_SIZES = (
  'kv_lora_rank',
  'qk_rope_head_dim',
  'qk_nope_head_dim',
  'v_head_dim',
  'n_routed_experts',
  'n_shared_experts',
  'n_group',
  'topk_group',
)
READS = (
  *_SIZES,
  'q_lora_rank',
  'first_k_dense_replace',
  'rope_interleave',
  'routed_scaling_factor',
  'norm_topk_prob',
  'moe_intermediate_size',
  'num_experts_per_tok',
)
# Fields of which only one value is supported.
_ONLY = {'scoring_func': ('sigmoid',), 'topk_method': ('noaux_tc',), 'moe_layer_freq': (1,)}
ONLY = tuple(_ONLY)


def fields(raw: dict, cfg: ModelConfig, where: str) -> LatentConfig:
  """Returns the config of a folder, from the common fields `cfg` and its config.json `raw`."""
  for field, values_ in _ONLY.items():
    if raw.get(field, values_[0]) not in values_:
      raise InputError(f'{where}: {field}={raw[field]!r} is not supported (only {values_[0]!r})')
  for field in (*_SIZES, 'first_k_dense_replace', 'q_lora_rank'):
    low = 0 if field == 'first_k_dense_replace' else 1
    none = field == 'q_lora_rank' and raw[field] is None
    if not none and (type(raw[field]) is not int or raw[field] < low):
      raise InputError(f'{where}: {field}={raw[field]!r} must be a whole number above {low - 1}')
  if type(raw['rope_interleave']) is not bool:
    raise InputError(f'{where}: rope_interleave={raw["rope_interleave"]!r} must be true or false')
  scale, groups = raw['routed_scaling_factor'], raw['n_group']
  if type(scale) not in (int, float) or not scale > 0:
    raise InputError(f'{where}: routed_scaling_factor={scale!r} must be above 0')
  size = raw['qk_nope_head_dim'] + raw['qk_rope_head_dim']
  each = raw['n_routed_experts'] // groups
  for wrong, what in (
    (
      raw.get('head_dim') not in (None, size, raw['qk_rope_head_dim']),
      f'head_dim={raw.get("head_dim")} beside qk_nope_head_dim and qk_rope_head_dim',
    ),
    (cfg.num_kv_heads != cfg.num_heads, f'num_key_value_heads={cfg.num_kv_heads} of {cfg.num_heads} heads'),
    (raw['n_routed_experts'] % groups or each < 2, f'n_group={groups} of {raw["n_routed_experts"]} experts'),
    (raw['topk_group'] > groups, f'topk_group={raw["topk_group"]} of {groups} groups'),
    (
      raw['num_experts_per_tok'] > raw['topk_group'] * each,
      f'num_experts_per_tok={raw["num_experts_per_tok"]} of {raw["topk_group"]} groups of {each}',
    ),
    (
      raw['first_k_dense_replace'] >= cfg.num_layers,
      f'first_k_dense_replace={raw["first_k_dense_replace"]} of {cfg.num_layers} layers',
    ),
  ):
    if wrong:
      raise InputError(f'{where}: {what} is not supported')
  return LatentConfig(
    **vars(cfg)
    | dict(
      head_dim=size,
      attention_scale=_scale(cfg, size),
      q_rank=raw['q_lora_rank'] or 0,
      kv_rank=raw['kv_lora_rank'],
      rope_dim=raw['qk_rope_head_dim'],
      v_dim=raw['v_head_dim'],
      first_dense=raw['first_k_dense_replace'],
      interleaved=raw['rope_interleave'],
      experts=dataclasses.replace(
        cfg.experts,
        sigmoid=True,
        groups=groups,
        top_groups=raw['topk_group'],
        scale=float(scale),
        shared=raw['n_shared_experts'],
      ),
    )
  )


def _scale(cfg: ModelConfig, size: int) -> float:
  """Returns 1 / sqrt(h), times the factor of YaRN (arXiv:2309.00071) for MLA."""
  scaling = dict(cfg.ropes[0].scaling)
  grow, factor = scaling.get('mscale_all_dim', 0), scaling.get('factor', 1)
  both = 0.1 * grow * math.log(factor) + 1 if grow and factor > 1 else 1.0
  return size**-0.5 * both * both


def write(cfg: LatentConfig) -> dict:
  """Returns the fields of config.json; the inverse of `fields`."""
  e = cfg.experts
  return dict(
    head_dim=cfg.rope_dim,
    kv_lora_rank=cfg.kv_rank,
    q_lora_rank=cfg.q_rank or None,
    qk_rope_head_dim=cfg.rope_dim,
    qk_nope_head_dim=cfg.head_dim - cfg.rope_dim,
    v_head_dim=cfg.v_dim,
    first_k_dense_replace=cfg.first_dense,
    rope_interleave=cfg.interleaved,
    n_routed_experts=e.num,
    n_shared_experts=e.shared,
    n_group=e.groups,
    topk_group=e.top_groups,
    routed_scaling_factor=e.scale,
    scoring_func='sigmoid',
    topk_method='noaux_tc',
    moe_layer_freq=1,
    num_nextn_predict_layers=0,
  )
