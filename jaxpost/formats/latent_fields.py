"""Fields of config.json of models with latent attention (MLA) <-> fields of LatentConfig.

They are the fields of DeepSeek-V3 and its relatives (`Family.latent`): sizes of the
latents, experts in groups, and dense layers before the sparse ones.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxpost.errors import InputError
from jaxpost.models.config import LatentConfig, ModelConfig

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
# For `Family.reads`, beside those of `ExpertFields`.
READS = (*_SIZES, 'q_lora_rank', 'first_k_dense_replace', 'rope_interleave', 'routed_scaling_factor')
# Fields of which one value is supported.
FIXED = {'scoring_func': 'sigmoid', 'topk_method': 'noaux_tc', 'moe_layer_freq': 1}


def read(raw: dict[str, Any], cfg: ModelConfig, where: str) -> LatentConfig:
  """Returns the config of a folder, from the common fields `cfg` and its config.json `raw`.

  Raises:
    InputError: for values that are impossible or not supported; it names the field.
  """
  _check_types(raw, where)
  _check_combinations(raw, cfg, where)
  size = raw['qk_nope_head_dim'] + raw['qk_rope_head_dim']
  experts = dataclasses.replace(
    cfg.experts,
    sigmoid=True,
    groups=raw['n_group'],
    top_groups=raw['topk_group'],
    scale=float(raw['routed_scaling_factor']),
    shared=raw['n_shared_experts'],
  )
  latent = dict(
    head_dim=size,
    attention_scale=_attention_scale(cfg, size),
    q_rank=raw['q_lora_rank'] or 0,
    kv_rank=raw['kv_lora_rank'],
    rope_dim=raw['qk_rope_head_dim'],
    v_dim=raw['v_head_dim'],
    first_dense=raw['first_k_dense_replace'],
    interleaved=raw['rope_interleave'],
    experts=experts,
  )
  return LatentConfig(**vars(cfg) | latent)


def _check_types(raw: dict[str, Any], where: str) -> None:
  for field, value in FIXED.items():
    if raw.get(field, value) != value:
      raise InputError(f'{where}: {field}={raw[field]!r} is not supported (only {value!r})')
  for field in (*_SIZES, 'first_k_dense_replace', 'q_lora_rank'):
    lowest = 0 if field == 'first_k_dense_replace' else 1
    # Without a rank, queries are projected in one step.
    is_off = field == 'q_lora_rank' and raw[field] is None
    if not is_off and (type(raw[field]) is not int or raw[field] < lowest):
      raise InputError(f'{where}: {field}={raw[field]!r} must be a whole number above {lowest - 1}')
  if type(raw['rope_interleave']) is not bool:
    raise InputError(f'{where}: rope_interleave={raw["rope_interleave"]!r} must be true or false')
  scale = raw['routed_scaling_factor']
  if type(scale) not in (int, float) or not scale > 0:
    raise InputError(f'{where}: routed_scaling_factor={scale!r} must be above 0')


def _check_combinations(raw: dict[str, Any], cfg: ModelConfig, where: str) -> None:
  """Raises InputError for sizes that do not fit each other, the first that is found."""

  def refuse(what: str) -> None:
    raise InputError(f'{where}: {what} is not supported')

  size = raw['qk_nope_head_dim'] + raw['qk_rope_head_dim']
  if raw.get('head_dim') not in (None, size, raw['qk_rope_head_dim']):
    refuse(f'head_dim={raw.get("head_dim")} beside qk_nope_head_dim and qk_rope_head_dim')
  if cfg.num_kv_heads != cfg.num_heads:
    refuse(f'num_key_value_heads={cfg.num_kv_heads} of {cfg.num_heads} heads')
  experts = raw['n_routed_experts']
  groups = raw['n_group']
  group_size = experts // groups
  # A group is ranked by the sum of its two best experts (DeepSeek-V3, section 2.1.2).
  if experts % groups or group_size < 2:
    refuse(f'n_group={groups} of {experts} experts')
  if raw['topk_group'] > groups:
    refuse(f'topk_group={raw["topk_group"]} of {groups} groups')
  if raw['num_experts_per_tok'] > raw['topk_group'] * group_size:
    refuse(f'num_experts_per_tok={raw["num_experts_per_tok"]} of {raw["topk_group"]} groups of {group_size}')
  if raw['first_k_dense_replace'] >= cfg.num_layers:
    refuse(f'first_k_dense_replace={raw["first_k_dense_replace"]} of {cfg.num_layers} layers')


def _attention_scale(cfg: ModelConfig, size: int) -> float:
  """Returns 1 / sqrt(size), times the factor of YaRN (arXiv:2309.00071) for MLA."""
  scaling = dict(cfg.ropes[0].scaling)
  mscale = scaling.get('mscale_all_dim', 0)
  factor = scaling.get('factor', 1)
  grown = 0.1 * mscale * math.log(factor) + 1 if mscale and factor > 1 else 1.0
  return size**-0.5 * grown * grown  # for the queries and for the keys


def write(cfg: LatentConfig) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  experts = cfg.experts
  return dict(
    head_dim=cfg.rope_dim,
    kv_lora_rank=cfg.kv_rank,
    q_lora_rank=cfg.q_rank or None,
    qk_rope_head_dim=cfg.rope_dim,
    qk_nope_head_dim=cfg.head_dim - cfg.rope_dim,
    v_head_dim=cfg.v_dim,
    first_k_dense_replace=cfg.first_dense,
    rope_interleave=cfg.interleaved,
    n_routed_experts=experts.num,
    n_shared_experts=experts.shared,
    n_group=experts.groups,
    topk_group=experts.top_groups,
    routed_scaling_factor=experts.scale,
    num_nextn_predict_layers=0,
    **FIXED,
  )
