"""Fields of config.json of models with heads of two sizes (`Family.mixed`) <-> fields of MixedConfig."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError
from jaxpost.formats.family import FULL
from jaxpost.models.config import ModelConfig
from jaxpost.models.mixed_config import MixedConfig

if TYPE_CHECKING:
  from jaxpost.formats.family import Family

_SIDE, _VOCAB = 'hidden_size_per_layer_input', 'vocab_size_per_layer_input'
_BOTH_WAYS = 'use_bidirectional_attention'
_SHARED, _WIDE = 'num_kv_shared_layers', 'use_double_wide_mlp'
_SIZE, _HEADS, _ALIKE = 'global_head_dim', 'num_global_key_value_heads', 'attention_k_eq_v'


def read(raw: dict[str, Any], cfg: ModelConfig, where: str, family: Family) -> MixedConfig:
  """Returns the config of a folder, from the common fields `cfg` and its config.json `raw`.

  Raises:
    InputError: for values that are impossible or not supported; it names the field.
  """
  del family
  for field in (_ALIKE, _WIDE, 'enable_moe_block'):
    if type(raw[field]) is not bool:
      raise InputError(f'{where}: {field}={raw[field]!r} must be true or false')
  for field in (_SIDE, _VOCAB, _SHARED):
    if type(raw[field]) is not int or raw[field] < 0:
      raise InputError(f'{where}: {field}={raw[field]!r} must be a whole number')
  if raw[_BOTH_WAYS] not in (None, False, 'vision'):  # of images
    raise InputError(f'{where}: {_BOTH_WAYS}={raw[_BOTH_WAYS]!r} is not supported (only None, vision)')
  if raw[_SIDE] and raw[_VOCAB] != cfg.vocab_size:
    raise InputError(f'{where}: {_VOCAB}={raw[_VOCAB]} is not supported (only the vocab_size of {cfg.vocab_size})')
  windows = [bool(kind.window) for kind in cfg.layer_kinds]
  if windows[-1]:
    raise InputError(f'{where}: layer_types: the last layer has a sliding window, which is not supported')
  size, heads = _full_heads(raw, cfg, windows, where)
  first, *others = cfg.ropes  # of full layers, and of those with a window
  local = others[0] if others else first
  shared = raw[_SHARED]
  own = {*windows[: cfg.num_layers - shared]}
  if shared >= cfg.num_layers or own != {*windows}:
    raise InputError(f'{where}: {_SHARED}={shared}: no earlier layer of the same kind has keys and values')
  experts = cfg.experts and dataclasses.replace(cfg.experts, shared=1, shared_size=cfg.intermediate_size)
  if experts and shared and raw[_WIDE]:
    raise InputError(f'{where}: {_WIDE}=True is not supported beside experts')
  return MixedConfig(
    **vars(cfg)
    | dict(
      experts=experts,
      ropes=(dataclasses.replace(first, size=size), dataclasses.replace(local, size=cfg.head_dim)),
      layer_ropes=tuple(map(int, windows)),
      full_head_dim=size,
      full_kv_heads=heads,
      values_are_keys=raw[_ALIKE],
      shared_layers=shared,
      wide_shared_mlp=raw[_WIDE],
      side_size=raw[_SIDE],
    )
  )


def _full_heads(raw: dict[str, Any], cfg: ModelConfig, windows: list[bool], where: str) -> tuple[int, int]:
  """Returns (head size, kv heads) of full layers, by the fields of published files or those of `transformers` 5.23."""
  size, heads = raw[_SIZE], raw[_HEADS] if raw[_ALIKE] else None
  source = _HEADS
  if (of_layers := raw.get('per_layer_config')) is not None:
    full = {i for i, window in enumerate(windows) if not window}
    blocks = list(of_layers.values()) if isinstance(of_layers, dict) else []
    layers = {int(name) if name.isdecimal() else name for name in of_layers} if blocks else ()  # '05' is 5
    if layers != full or any(block != blocks[0] for block in blocks):
      raise InputError(f'{where}: per_layer_config={of_layers!r} must have the same fields for each layer of {FULL}')
    if unknown := {*blocks[0]} - {'head_dim', 'num_key_value_heads'}:
      raise InputError(f'{where}: per_layer_config: {sorted(unknown)} of layers are not supported')
    size, heads = blocks[0].get('head_dim', cfg.head_dim), blocks[0].get('num_key_value_heads')
    source = 'per_layer_config'
  heads = cfg.num_kv_heads if heads is None else heads
  for value, field in ((size, _SIZE), (heads, source)):
    if type(value) is not int or value < 1:
      raise InputError(f'{where}: {field}={value!r} must be a whole number above 0')
  if cfg.num_heads % heads:
    raise InputError(f'{where}: {source}={heads} must divide num_attention_heads={cfg.num_heads}')
  if heads != cfg.num_kv_heads and not raw[_ALIKE]:
    raise InputError(f'{where}: {source}={heads} is not supported without {_ALIKE}')
  if size % 2:
    raise InputError(f'{where}: {_SIZE}={size} must be even')
  return size, heads


def write(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  del family
  assert isinstance(cfg, MixedConfig)
  return {
    _SIZE: cfg.full_head_dim,
    _HEADS: cfg.full_kv_heads,
    _ALIKE: cfg.values_are_keys,
    _SHARED: cfg.shared_layers,
    _WIDE: cfg.wide_shared_mlp,
    _SIDE: cfg.side_size,
    _VOCAB: cfg.vocab_size,
    'enable_moe_block': bool(cfg.experts),
    _BOTH_WAYS: None,
  }
