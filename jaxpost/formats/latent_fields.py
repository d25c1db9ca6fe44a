"""Fields of config.json of models with latent attention (MLA) <-> fields of LatentConfig.

DeepSeek-V3 and related families (`Family.latent`) have them: the sizes of the latents and of the indexer of sparse
attention. `config_fields` reads the fields of their experts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError
from jaxpost.formats.config_fields import check_boolean, check_whole
from jaxpost.formats.other_families import INDEX_SIZES, SIZES
from jaxpost.models.config import ModelConfig
from jaxpost.models.decoder_configs import HybridConfig, LatentConfig

if TYPE_CHECKING:
  from jaxpost.formats.family import Family

_INDEXED = 'indexed_attention'  # of `layer_types`


def completed(raw: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
  """Returns `raw` with the per-layer fields of `transformers` 5 in their older spelling; see `families.own_fields`."""
  if 'index_topk' not in family.fields:
    return raw
  layers = raw['num_hidden_layers']
  dense = raw['first_k_dense_replace']
  if (mlp_types := raw.get('mlp_layer_types')) is not None:  # takes precedence: the other field may be a default
    dense = leading_dense(mlp_types, layers, where)
  if raw.get('layer_types') not in (None, [_INDEXED] * layers):
    raise InputError(f'{where}: layer_types={raw["layer_types"]!r} must be {layers} times {_INDEXED}')
  if (types := _indexers(raw)) != ['full'] * layers:
    reason = 'sharing the indexer of another layer is not built'
    raise InputError(f'{where}: indexers of layers={types!r} must be {layers} times full; {reason}')
  return raw | dict(first_k_dense_replace=dense, layer_types=None)


def leading_dense(mlp_types: list[str], layers: int, where: str) -> int:
  """Returns the number of dense layers in `mlp_layer_types`; InputError unless they are the first ones."""
  dense = mlp_types.count('dense')
  if mlp_types != ['dense'] * dense + ['sparse'] * (layers - dense):
    raise InputError(f'{where}: mlp_layer_types={mlp_types!r} must be {layers} times dense or sparse, dense ones first')
  return dense


def _indexers(raw: dict[str, Any]) -> list[str]:
  """Returns 'full' for each layer with its own indexer and 'shared' for others, from any of three fields."""
  if raw.get('indexer_types') is not None:
    return raw['indexer_types']
  if raw.get('index_topk_pattern') is not None:
    return [{'F': 'full', 'S': 'shared'}.get(letter, letter) for letter in raw['index_topk_pattern']]
  period, first = max(raw.get('index_topk_freq', 1), 1), raw.get('index_skip_topk_offset', 2)
  return ['shared' if max(i - first + 1, 0) % period else 'full' for i in range(raw['num_hidden_layers'])]


def read(raw: dict[str, Any], cfg: ModelConfig, where: str, family: Family) -> LatentConfig:
  """Returns the config of a folder; see `families.own_fields`."""
  latent = sizes(raw, cfg, where)
  if 'index_topk' not in family.fields:
    return LatentConfig(**vars(cfg) | latent)
  for field in (*INDEX_SIZES, 'q_lora_rank'):  # the indexer projects its queries from the query latent
    check_whole(raw[field], field, where)
  size, rotated = raw['index_head_dim'], raw['qk_rope_head_dim']
  if size < rotated:
    raise InputError(f'{where}: index_head_dim={size} must be at least qk_rope_head_dim={rotated}')
  indexer = dict(
    index_heads=raw['index_n_heads'],
    index_dim=raw['index_head_dim'],
    index_topk=raw['index_topk'],
    index_interleaved=family.only['indexer_rope_interleave'],
  )
  return LatentConfig(**vars(cfg) | latent | indexer)


def sizes(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Returns the sizes of latent attention, fields of LatentConfig and of HybridConfig; see `read`."""
  for field in SIZES:
    check_whole(raw[field], field, where)
  if raw['q_lora_rank'] is not None:  # without a rank, queries are projected in one step
    check_whole(raw['q_lora_rank'], 'q_lora_rank', where)
  check_boolean(raw.get('rope_interleave', True), 'rope_interleave', where)
  _check_combinations(raw, cfg, where)
  size = raw['qk_nope_head_dim'] + raw['qk_rope_head_dim']
  scaling = dict(cfg.ropes[0].scaling)
  mscale_all_dim, factor = scaling.get('mscale_all_dim', 0), scaling.get('factor', 1)
  yarn_mscale = 0.1 * mscale_all_dim * math.log(factor) + 1 if mscale_all_dim and factor > 1 else 1.0
  return dict(
    head_dim=size,
    attention_scale=size**-0.5 * yarn_mscale * yarn_mscale,  # once for queries, once for keys (arXiv:2309.00071)
    q_rank=raw['q_lora_rank'] or 0,
    kv_rank=raw['kv_lora_rank'],
    rope_dim=raw['qk_rope_head_dim'],
    v_dim=raw['v_head_dim'],
  )


def _check_combinations(raw: dict[str, Any], cfg: ModelConfig, where: str) -> None:
  """Raises InputError for the first combination of sizes that is impossible or not supported."""

  def refuse(setting: str) -> None:
    raise InputError(f'{where}: {setting} is not supported')

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


def write(cfg: LatentConfig | HybridConfig, _family: Family) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  out: dict[str, Any] = {}
  if isinstance(cfg, LatentConfig) and cfg.index_topk:
    indexer = cfg.index_heads, cfg.index_dim, cfg.index_topk
    out = dict(zip(INDEX_SIZES, indexer)) | dict(indexer_types=['full'] * cfg.num_layers)
  return out | dict(
    head_dim=cfg.rope_dim,
    kv_lora_rank=cfg.kv_rank,
    q_lora_rank=cfg.q_rank or None,
    qk_rope_head_dim=cfg.rope_dim,
    qk_nope_head_dim=cfg.head_dim - cfg.rope_dim,
    v_head_dim=cfg.v_dim,
  )
