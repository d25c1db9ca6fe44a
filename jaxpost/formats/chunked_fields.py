"""Fields of config.json of models with attention in chunks (`Family.chunked`) <-> fields of ChunkedConfig.

In Llama 4, layers with rotary embeddings attend inside chunks of a document. Layers without them attend to the whole
document, with queries that are scaled by position. Some layers have experts, others a dense MLP.
"""

import dataclasses
from typing import Any

from jaxpost.errors import InputError
from jaxpost.formats.config_fields import check_positive, check_whole
from jaxpost.formats.family import FULL, ORIGINAL, QUERY_SCALE, Family
from jaxpost.models.config import ModelConfig, Rope
from jaxpost.models.decoder_configs import ChunkedConfig

_CHUNKED = 'chunked_attention'  # of `layer_types`


def read(raw: dict[str, Any], cfg: ModelConfig, where: str, _family: Family) -> ChunkedConfig:
  """Returns the config of a folder; see `families.own_fields`."""
  for field in ('attention_chunk_size', 'intermediate_size_mlp', 'interleave_moe_layer_step', 'floor_scale'):
    check_whole(raw[field], field, where)
  tuned = raw['attn_temperature_tuning']
  if type(tuned) not in (bool, int):  # published files have a number, which means true
    raise InputError(f'{where}: attn_temperature_tuning={tuned!r} must be true or false')
  check_positive(raw['attn_scale'], 'attn_scale', where)
  rotated = [rope >= 0 for rope, _ in cfg.layer_kinds]
  types = raw.get('layer_types')
  if types is None:
    types = [_CHUNKED if rotates else FULL for rotates in rotated]
  if len(types) != cfg.num_layers or not {*types} <= {FULL, _CHUNKED}:
    raise InputError(f'{where}: layer_types={types!r} must be {cfg.num_layers} times {FULL} or {_CHUNKED}')
  ropes, layer_ropes = cfg.ropes, cfg.layer_ropes
  if tuned and layer_ropes:
    # Layers without rotation get a second rope table, which scales queries by position without rotating them.
    scaling = ((QUERY_SCALE, float(raw['attn_scale'])), (ORIGINAL, raw['floor_scale']), ('query_offset', 1))
    ropes += (Rope(scaling=(('rope_type', 'none'), *scaling)),)
    layer_ropes = tuple(0 if rotates else 1 for rotates in rotated)
  sparse_layers = raw.get('moe_layers')  # indices of the layers with experts, from 0 on
  if sparse_layers is None:
    step = raw['interleave_moe_layer_step']
    sparse_layers = list(range(step - 1, cfg.num_layers, step))
  valid = isinstance(sparse_layers, list) and all(type(i) is int and 0 <= i < cfg.num_layers for i in sparse_layers)
  if not valid or sorted({*sparse_layers}) != sparse_layers or not sparse_layers:
    raise InputError(
      f'{where}: moe_layers={sparse_layers!r} must be ascending indices among the {cfg.num_layers} layers'
    )
  assert cfg.experts
  return ChunkedConfig(
    **vars(cfg)
    | dict(
      intermediate_size=raw['intermediate_size_mlp'],
      ropes=ropes,
      layer_ropes=layer_ropes,
      layer_windows=tuple(raw['attention_chunk_size'] if kind == _CHUNKED else 0 for kind in types),
      experts=dataclasses.replace(cfg.experts, shared=1, on_inputs=True),
      sparse=tuple(sparse_layers),
    )
  )


def write(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  assert isinstance(cfg, ChunkedConfig) and cfg.experts
  query_scaling = dict(cfg.ropes[-1].scaling) if len(cfg.ropes) > 1 else {}
  return {
    'intermediate_size': cfg.experts.size,
    'intermediate_size_mlp': cfg.intermediate_size,
    'attention_chunk_size': max(cfg.layer_windows) or family.defaults['attention_chunk_size'],
    'interleave_moe_layer_step': 1,
    'attn_temperature_tuning': bool(query_scaling),
    'floor_scale': query_scaling.get(ORIGINAL, family.defaults['floor_scale']),
    'attn_scale': query_scaling.get(QUERY_SCALE, family.defaults['attn_scale']),
    'moe_layers': [*cfg.sparse],
    'layer_types': [_CHUNKED if window else FULL for window in cfg.layer_windows],
    'no_rope_layers': [int(kind.rope == 0) for kind in cfg.layer_kinds],
  }
