"""Fields of config.json of models with recurrent layers <-> fields of HybridConfig.

They are the fields of Qwen3-Next and its relatives (`Family.hybrid`): the mixer of each
layer, sizes of the gated delta rule, and a gated shared expert.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxpost.errors import InputError
from jaxpost.formats.layer_fields import FULL
from jaxpost.models.config import HybridConfig, ModelConfig

LINEAR = 'linear_attention'  # of `layer_types`, beside FULL
_SIZES = {
  'linear_num_key_heads': 'key_heads',
  'linear_num_value_heads': 'value_heads',
  'linear_key_head_dim': 'key_size',
  'linear_value_head_dim': 'value_size',
  'linear_conv_kernel_dim': 'taps',
}
_SHARED, _INTERVAL = 'shared_expert_intermediate_size', 'full_attention_interval'


def read(raw: dict[str, Any], cfg: ModelConfig, where: str, joined: bool) -> HybridConfig:
  """Returns the config of a folder, from the common fields `cfg` and its config.json `raw`.

  joined: one projection makes queries, keys, values and gates, as in Qwen3-Next.

  Raises:
    InputError: for values that are impossible or not supported; it names the field.
  """
  for field in (*_SIZES, _INTERVAL, *((_SHARED,) if cfg.experts else ())):
    lowest = 2 if field == 'linear_conv_kernel_dim' else 1
    if type(raw[field]) is not int or raw[field] < lowest:
      raise InputError(f'{where}: {field}={raw[field]!r} must be a whole number above {lowest - 1}')
  if raw.get('attn_output_gate', True) is not True:
    raise InputError(f'{where}: attn_output_gate={raw["attn_output_gate"]!r} is not supported (only True)')
  sizes = {ours: raw[field] for field, ours in _SIZES.items()}
  if sizes['value_heads'] % sizes['key_heads']:
    raise InputError(
      f'{where}: linear_num_key_heads={sizes["key_heads"]} must divide linear_num_value_heads={sizes["value_heads"]}'
    )
  types = raw.get('layer_types')
  if types is None:
    types = [LINEAR if (i + 1) % raw[_INTERVAL] else FULL for i in range(cfg.num_layers)]
  if len(types) != cfg.num_layers or not set(types) <= {LINEAR, FULL}:
    raise InputError(f'{where}: layer_types={types!r} must be {cfg.num_layers} times {FULL} or {LINEAR}')
  if FULL not in types or LINEAR not in types:
    raise InputError(f'{where}: layer_types={types[0]!r} alone is not supported; a model needs layers of both kinds')
  if cfg.activation != 'silu':
    raise InputError(f'{where}: hidden_act={raw["hidden_act"]!r} is not supported (only silu)')
  experts = cfg.experts and dataclasses.replace(cfg.experts, shared=1, shared_size=raw[_SHARED], shared_gate=True)
  mixers = tuple('layers' if kind == FULL else 'delta' for kind in types)
  return HybridConfig(**vars(cfg) | sizes | dict(experts=experts, mixers=mixers, joined=joined))


def write(cfg: HybridConfig) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  out = {field: vars(cfg)[ours] for field, ours in _SIZES.items()}
  out['layer_types'] = [FULL if name == 'layers' else LINEAR for name in cfg.mixers]
  return out | ({_SHARED: cfg.experts.shared_size} if cfg.experts else {})
