"""Fields of config.json of models with latent attention (MLA) <-> fields of LatentConfig.

They are the fields of DeepSeek-V3 and its relatives (`Family.latent`): the sizes of the
latents. Those of their experts are read by `expert_fields`.
"""

from __future__ import annotations

import math
from typing import Any

from jaxpost.errors import InputError
from jaxpost.models.config import LatentConfig, ModelConfig

_SIZES = ('kv_lora_rank', 'qk_rope_head_dim', 'qk_nope_head_dim', 'v_head_dim')
# For `Family.reads`, beside those of `ExpertFields`.
READS = (*_SIZES, 'q_lora_rank', 'rope_interleave')
# Values of fields that config.json may leave out: those of DeepSeek-V3.
DEFAULTS = dict(
  kv_lora_rank=512,
  q_lora_rank=1536,
  qk_rope_head_dim=64,
  qk_nope_head_dim=128,
  v_head_dim=128,
  rope_interleave=True,
  max_position_embeddings=4096,
  first_k_dense_replace=3,
  moe_intermediate_size=2048,
  n_shared_experts=1,
  n_routed_experts=256,
  num_experts_per_tok=8,
  n_group=8,
  topk_group=4,
  norm_topk_prob=True,
  routed_scaling_factor=2.5,
)


def read(raw: dict[str, Any], cfg: ModelConfig, where: str) -> LatentConfig:
  """Returns the config of a folder, from the common fields `cfg` and its config.json `raw`.

  Raises:
    InputError: for values that are impossible or not supported; it names the field.
  """
  _check_types(raw, where)
  _check_combinations(raw, cfg, where)
  size = raw['qk_nope_head_dim'] + raw['qk_rope_head_dim']
  latent = dict(
    head_dim=size,
    attention_scale=_attention_scale(cfg, size),
    q_rank=raw['q_lora_rank'] or 0,
    kv_rank=raw['kv_lora_rank'],
    rope_dim=raw['qk_rope_head_dim'],
    v_dim=raw['v_head_dim'],
  )
  return LatentConfig(**vars(cfg) | latent)


def _check_types(raw: dict[str, Any], where: str) -> None:
  for field in (*_SIZES, 'q_lora_rank'):
    # Without a rank, queries are projected in one step.
    is_off = field == 'q_lora_rank' and raw[field] is None
    if not is_off and (type(raw[field]) is not int or raw[field] < 1):
      raise InputError(f'{where}: {field}={raw[field]!r} must be a whole number above 0')
  if type(raw['rope_interleave']) is not bool:
    raise InputError(f'{where}: rope_interleave={raw["rope_interleave"]!r} must be true or false')


def _check_combinations(raw: dict[str, Any], cfg: ModelConfig, where: str) -> None:
  """Raises InputError for sizes that do not fit each other, the first that is found."""

  def refuse(what: str) -> None:
    raise InputError(f'{where}: {what} is not supported')

  size = raw['qk_nope_head_dim'] + raw['qk_rope_head_dim']
  if raw.get('head_dim') not in (None, size, raw['qk_rope_head_dim']):
    refuse(f'head_dim={raw.get("head_dim")} beside qk_nope_head_dim and qk_rope_head_dim')
  if cfg.num_kv_heads != cfg.num_heads:
    refuse(f'num_key_value_heads={cfg.num_kv_heads} of {cfg.num_heads} heads')


def _attention_scale(cfg: ModelConfig, size: int) -> float:
  """Returns 1 / sqrt(size), times the factor of YaRN (arXiv:2309.00071) for MLA."""
  scaling = dict(cfg.ropes[0].scaling)
  mscale = scaling.get('mscale_all_dim', 0)
  factor = scaling.get('factor', 1)
  grown = 0.1 * mscale * math.log(factor) + 1 if mscale and factor > 1 else 1.0
  return size**-0.5 * grown * grown  # for the queries and for the keys


def write(cfg: LatentConfig) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  return dict(
    head_dim=cfg.rope_dim,
    kv_lora_rank=cfg.kv_rank,
    q_lora_rank=cfg.q_rank or None,
    qk_rope_head_dim=cfg.rope_dim,
    qk_nope_head_dim=cfg.head_dim - cfg.rope_dim,
    v_head_dim=cfg.v_dim,
  )
