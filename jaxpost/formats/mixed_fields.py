"""Fields of config.json of models with heads of two sizes (`Family.mixed`) <-> fields of MixedConfig."""

import dataclasses
from typing import Any

from jaxpost.errors import InputError
from jaxpost.formats.config_fields import check_boolean, check_whole
from jaxpost.formats.family import FULL, Family
from jaxpost.models.config import ModelConfig
from jaxpost.models.decoder_configs import MixedConfig


def read(raw: dict[str, Any], cfg: ModelConfig, where: str, _family: Family) -> MixedConfig:
  """Returns the config of a folder; see `families.own_fields`."""
  for field in ('attention_k_eq_v', 'use_double_wide_mlp', 'enable_moe_block'):
    check_boolean(raw[field], field, where)
  for field in ('hidden_size_per_layer_input', 'vocab_size_per_layer_input', 'num_kv_shared_layers'):
    check_whole(raw[field], field, where, least=0)
  bidirectional = raw['use_bidirectional_attention']
  if bidirectional not in (None, False, 'vision'):  # 'vision' affects images only
    raise InputError(f'{where}: use_bidirectional_attention={bidirectional!r} is not supported (only None, vision)')
  side_size = raw['hidden_size_per_layer_input']
  vocab = raw['vocab_size_per_layer_input']
  if side_size and vocab != cfg.vocab_size:
    raise InputError(
      f'{where}: vocab_size_per_layer_input={vocab} is not supported (only the vocab_size of {cfg.vocab_size})'
    )
  has_window = [bool(kind.window) for kind in cfg.layer_kinds]
  if has_window[-1]:
    raise InputError(f'{where}: layer_types: the last layer has a sliding window, which is not supported')
  size, heads = _full_heads(raw, cfg, has_window, where)
  full_rope, local_rope = cfg.ropes[0], cfg.ropes[-1]  # the same one if both kinds of layers rotate alike
  shared = raw['num_kv_shared_layers']
  kinds_with_kv = {*has_window[: cfg.num_layers - shared]}  # kinds of layers with their own keys and values
  if shared >= cfg.num_layers or kinds_with_kv != {*has_window}:
    raise InputError(f'{where}: num_kv_shared_layers={shared}: no earlier layer of the same kind has keys and values')
  experts = cfg.experts and dataclasses.replace(cfg.experts, shared=1, shared_size=cfg.intermediate_size)
  if experts and shared and raw['use_double_wide_mlp']:
    raise InputError(f'{where}: use_double_wide_mlp=True is not supported beside experts')
  return MixedConfig(
    **vars(cfg)
    | dict(
      experts=experts,
      ropes=(dataclasses.replace(full_rope, size=size), dataclasses.replace(local_rope, size=cfg.head_dim)),
      layer_ropes=tuple(map(int, has_window)),
      full_head_dim=size,
      full_kv_heads=heads,
      values_are_keys=raw['attention_k_eq_v'],
      shared_layers=shared,
      wide_shared_mlp=raw['use_double_wide_mlp'],
      side_size=side_size,
    )
  )


def _full_heads(raw: dict[str, Any], cfg: ModelConfig, has_window: list[bool], where: str) -> tuple[int, int]:
  """Returns (head size, kv heads) of full layers, by the fields of published files or those of `transformers` 5.23."""
  size = raw['global_head_dim']
  heads = raw['num_global_key_value_heads'] if raw['attention_k_eq_v'] else None
  source = 'num_global_key_value_heads'
  if raw.get('per_layer_config') is not None:
    source = 'per_layer_config'
    block = _full_layer(raw['per_layer_config'], has_window, where)
    size = block.get('head_dim', cfg.head_dim)
    heads = block.get('num_key_value_heads')
  if heads is None:
    heads = cfg.num_kv_heads
  check_whole(size, 'global_head_dim', where)
  check_whole(heads, source, where)
  if cfg.num_heads % heads:
    raise InputError(f'{where}: {source}={heads} must divide num_attention_heads={cfg.num_heads}')
  if heads != cfg.num_kv_heads and not raw['attention_k_eq_v']:
    raise InputError(f'{where}: {source}={heads} is not supported without attention_k_eq_v')
  if size % 2:
    raise InputError(f'{where}: global_head_dim={size} must be even')
  return size, heads


def _full_layer(per_layer: Any, has_window: list[bool], where: str) -> dict[str, Any]:
  """Returns the fields in `per_layer_config`, {index of a layer: fields}, which are equal for all full layers."""
  full_layers = {i for i, windowed in enumerate(has_window) if not windowed}
  blocks = list(per_layer.values()) if isinstance(per_layer, dict) else []
  configured_layers = {int(name) if name.isdecimal() else name for name in per_layer} if blocks else ()  # '05' is 5
  if configured_layers != full_layers or any(block != blocks[0] for block in blocks):
    raise InputError(f'{where}: per_layer_config={per_layer!r} must have the same fields for each layer of {FULL}')
  if unknown := {*blocks[0]} - {'head_dim', 'num_key_value_heads'}:
    raise InputError(f'{where}: per_layer_config: {sorted(unknown)} of layers are not supported')
  return blocks[0]


def write(cfg: ModelConfig, _family: Family) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  assert isinstance(cfg, MixedConfig)
  return {
    'global_head_dim': cfg.full_head_dim,
    'num_global_key_value_heads': cfg.full_kv_heads,
    'attention_k_eq_v': cfg.values_are_keys,
    'num_kv_shared_layers': cfg.shared_layers,
    'use_double_wide_mlp': cfg.wide_shared_mlp,
    'hidden_size_per_layer_input': cfg.side_size,
    'vocab_size_per_layer_input': cfg.vocab_size,
    'enable_moe_block': bool(cfg.experts),
    'use_bidirectional_attention': None,
  }
