"""Fields of config.json of models with latent attention (MLA) <-> fields of LatentConfig.

They are the fields of DeepSeek-V3 and its relatives (`Family.latent`): the sizes of the
latents. Those of their experts are read by `expert_fields`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError
from jaxpost.formats.latent_families import SIZES
from jaxpost.models.config import LatentConfig, ModelConfig

if TYPE_CHECKING:
  from jaxpost.formats.family import Family


def read(raw: dict[str, Any], cfg: ModelConfig, where: str, family: Family) -> LatentConfig:
  """Returns the config of a folder, from the common fields `cfg` and its config.json `raw`.

  Raises:
    InputError: for values that are impossible or not supported; it names the field.
  """
  del family
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
  for field in (*SIZES, 'q_lora_rank'):
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
  share = (raw.get('rope_parameters') or {}).get('partial_rotary_factor', 1)
  if share not in (1, raw['qk_rope_head_dim'] / size):
    refuse(f'partial_rotary_factor={share!r} beside qk_rope_head_dim={raw["qk_rope_head_dim"]} of {size}')
  if raw['qk_rope_head_dim'] % 2:
    raise InputError(f'{where}: qk_rope_head_dim={raw["qk_rope_head_dim"]} must be even')
  if cfg.num_kv_heads != cfg.num_heads:
    refuse(f'num_key_value_heads={cfg.num_kv_heads} of {cfg.num_heads} heads')


def _attention_scale(cfg: ModelConfig, size: int) -> float:
  """Returns 1 / sqrt(size), times the factor of YaRN (arXiv:2309.00071) for MLA."""
  scaling = dict(cfg.ropes[0].scaling)
  mscale = scaling.get('mscale_all_dim', 0)
  factor = scaling.get('factor', 1)
  grown = 0.1 * mscale * math.log(factor) + 1 if mscale and factor > 1 else 1.0
  return size**-0.5 * grown * grown  # for the queries and for the keys


def write(cfg: LatentConfig, family: Family) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  del family
  return dict(
    head_dim=cfg.rope_dim,
    kv_lora_rank=cfg.kv_rank,
    q_lora_rank=cfg.q_rank or None,
    qk_rope_head_dim=cfg.rope_dim,
    qk_nope_head_dim=cfg.head_dim - cfg.rope_dim,
    v_head_dim=cfg.v_dim,
  )
