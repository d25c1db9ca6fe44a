"""Fields of config.json of models with mixers beside attention <-> fields of HybridConfig.

`Family.hybrid` says which fields those are: of Qwen3-Next and its relatives ('joined', 'apart'),
of LFM2 ('convolution'), or of Granite 4 ('state_space').
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError
from jaxpost.formats.layer_fields import FULL
from jaxpost.models.config import ModelConfig
from jaxpost.models.hybrid_config import HybridConfig

if TYPE_CHECKING:
  from jaxpost.formats.family import Family

_DELTA_SIZES = {
  'linear_num_key_heads': 'key_heads',
  'linear_num_value_heads': 'value_heads',
  'linear_key_head_dim': 'key_size',
  'linear_value_head_dim': 'value_size',
  'linear_conv_kernel_dim': 'taps',
}
_SPACE_SIZES = {
  'mamba_n_groups': 'key_heads',
  'mamba_n_heads': 'value_heads',
  'mamba_d_state': 'key_size',
  'mamba_d_head': 'value_size',
  'mamba_d_conv': 'taps',
}
# Fields of config.json -> those of HybridConfig, for each mixer.
_SIZES = {'delta': _DELTA_SIZES, 'convolution': {'conv_L_cache': 'taps'}, 'state_space': _SPACE_SIZES}
_INFINITY = {'__float__': 'Infinity'}  # as transformers writes it
_SHARED, _INTERVAL = 'shared_expert_intermediate_size', 'full_attention_interval'
# Name of the other mixer in `layer_types`, beside FULL, and other spellings of both.
_TYPES = {'delta': 'linear_attention', 'convolution': 'conv', 'state_space': 'linear_attention'}
_SPELLINGS = {'mamba': 'linear_attention', 'attention': FULL}


def read(raw: dict[str, Any], cfg: ModelConfig, where: str, family: Family) -> ModelConfig:
  """Returns the config of a folder, from the common fields `cfg` and its config.json `raw`.

  Of a model without other mixers than attention, where its family has such, it is a plain one.

  Raises:
    InputError: for values that are impossible or not supported; it names the field.
  """
  if cfg.activation != 'silu':
    raise InputError(f'{where}: hidden_act={raw["hidden_act"]!r} is not supported (only silu)')
  own = {'convolution': _convolution, 'state_space': _state_space}.get(family.hybrid, _delta)(raw, cfg, where)
  if not own['mixers']:
    return dataclasses.replace(cfg, **{k: own[k] for k in own.keys() & vars(cfg)})
  return HybridConfig(**vars(cfg) | own | dict(joined=family.hybrid == 'joined'))


def _delta(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Reads what models with the gated delta rule have."""
  sizes = _sizes(raw, 'delta', where)
  for field in (_INTERVAL, *((_SHARED,) if cfg.experts else ())):
    _check_whole(raw[field], field, 1, where)
  if raw.get('attn_output_gate', True) is not True:
    raise InputError(f'{where}: attn_output_gate={raw["attn_output_gate"]!r} is not supported (only True)')
  if sizes['value_heads'] % sizes['key_heads']:
    raise InputError(
      f'{where}: linear_num_key_heads={sizes["key_heads"]} must divide linear_num_value_heads={sizes["value_heads"]}'
    )
  types = raw.get('layer_types')
  if types is None:
    types = [_TYPES['delta'] if (i + 1) % raw[_INTERVAL] else FULL for i in range(cfg.num_layers)]
  experts = cfg.experts and dataclasses.replace(cfg.experts, shared=1, shared_size=raw[_SHARED], shared_gate=True)
  return sizes | dict(experts=experts, mixers=_mixers(types, 'delta', cfg, where))


def _convolution(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Reads what models with short convolutions have."""
  types, attending = raw.get('layer_types'), raw.get('full_attn_idxs')
  by_index = None
  if attending is not None:
    if not isinstance(attending, list) or not all(type(i) is int and 0 <= i < cfg.num_layers for i in attending):
      raise InputError(f'{where}: full_attn_idxs={attending!r} must be a list of numbers below {cfg.num_layers}')
    by_index = [FULL if i in attending else _TYPES['convolution'] for i in range(cfg.num_layers)]
    if types not in (None, by_index):
      raise InputError(f'{where}: layer_types={types!r} beside full_attn_idxs={attending!r}')
  mixers = _mixers(types or by_index or [FULL] * cfg.num_layers, 'convolution', cfg, where)
  if cfg.hidden_size % cfg.num_heads:
    raise InputError(
      f'{where}: hidden_size={cfg.hidden_size} is not supported (only multiples of the {cfg.num_heads} attention '
      'heads, into which the channels of convolutions are split)'
    )
  size = _inner_size(raw, where)
  return _sizes(raw, 'convolution', where) | dict(mixers=mixers, gated=False, intermediate_size=size)


def _inner_size(raw: dict[str, Any], where: str) -> int:
  """Returns the hidden size of an MLP, as LFM2 derives it from the one that it is given."""
  size, adjust = raw['intermediate_size'], raw['block_auto_adjust_ff_dim']
  if type(adjust) is not bool:
    raise InputError(f'{where}: block_auto_adjust_ff_dim={adjust!r} must be true or false')
  if not adjust:
    return size
  multiple, factor = raw['block_multiple_of'], raw['block_ffn_dim_multiplier']
  _check_whole(multiple, 'block_multiple_of', 1, where)
  if factor is not None and (type(factor) not in (int, float) or not factor > 0):
    raise InputError(f'{where}: block_ffn_dim_multiplier={factor!r} must be above 0')
  size = int(int(2 * size / 3) * (1 if factor is None else factor))
  return -(-size // multiple) * multiple


def _state_space(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Reads what models with state spaces have, and the layers of which there are none in such a family."""
  limit = raw.get('time_step_limit') or [0, _INFINITY]
  if not isinstance(limit, (list, tuple)) or limit[0] != 0 or limit[1:] not in ([_INFINITY], [float('inf')]):
    raise InputError(f'{where}: time_step_limit={limit!r} is not supported (only from 0 to infinity)')
  _check_whole(raw['shared_intermediate_size'], 'shared_intermediate_size', 1, where)
  position = raw['position_embedding_type']
  if position not in ('rope', 'nope', None):
    raise InputError(f'{where}: position_embedding_type={position!r} is not supported (only rope, nope)')
  size = raw['shared_intermediate_size']  # beside experts
  experts = cfg.experts and dataclasses.replace(cfg.experts, shared=1, shared_size=size)
  own = dict(intermediate_size=cfg.intermediate_size if experts else size, gated=False, experts=experts)
  own |= dict(layer_ropes=() if position == 'rope' else (-1,) * cfg.num_layers)
  types = raw.get('layer_types') or raw.get('layers_block_type') or ['mamba'] * cfg.num_layers
  if not {*types} - {FULL, 'attention'}:
    return own | dict(mixers=(), biases=tuple(name for name in cfg.biases if name != 'conv'))
  if raw['mamba_d_head'] == 'auto':
    _check_whole(raw['mamba_n_heads'], 'mamba_n_heads', 1, where)
    raw = raw | {'mamba_d_head': raw['mamba_expand'] * cfg.hidden_size // raw['mamba_n_heads']}
  sizes = _sizes(raw, 'state_space', where)
  if sizes['value_heads'] * sizes['value_size'] != raw['mamba_expand'] * cfg.hidden_size:
    raise InputError(
      f'{where}: mamba_n_heads={sizes["value_heads"]} of mamba_d_head={sizes["value_size"]} are not '
      f'mamba_expand={raw["mamba_expand"]!r} times the hidden_size of {cfg.hidden_size}'
    )
  if sizes['value_heads'] % sizes['key_heads']:
    raise InputError(f'{where}: mamba_n_groups={sizes["key_heads"]} must divide mamba_n_heads={sizes["value_heads"]}')
  return own | sizes | dict(mixers=_mixers(types, 'state_space', cfg, where))


def _sizes(raw: dict[str, Any], mixer: str, where: str) -> dict[str, int]:
  """Returns {name in HybridConfig: value} of whole numbers."""
  for field, ours in _SIZES[mixer].items():
    _check_whole(raw[field], field, 2 if ours == 'taps' else 1, where)
  return {ours: raw[field] for field, ours in _SIZES[mixer].items()}


def _check_whole(value: Any, field: str, lowest: int, where: str) -> None:
  if type(value) is not int or value < lowest:
    raise InputError(f'{where}: {field}={value!r} must be a whole number above {lowest - 1}')


def _mixers(types: Any, mixer: str, cfg: ModelConfig, where: str) -> tuple[str, ...]:
  """Returns `HybridConfig.mixers`."""
  other, types = _TYPES[mixer], [_SPELLINGS.get(name, name) for name in types]
  if len(types) != cfg.num_layers or not set(types) <= {FULL, other}:
    raise InputError(f'{where}: layer_types={types!r} must be {cfg.num_layers} times {FULL} or {other}')
  if FULL not in types or other not in types:
    raise InputError(f'{where}: layer_types={types[0]!r} alone is not supported; a model needs layers of both kinds')
  return tuple('layers' if kind == FULL else mixer for kind in types)


def write(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  mixers = cfg.layer_stacks
  out = {'layer_types': [FULL if name == 'layers' else _TYPES[name] for name in mixers]}
  if isinstance(cfg, HybridConfig):
    out |= {field: vars(cfg)[ours] for field, ours in _SIZES[cfg.mixer].items()}
  if family.hybrid == 'convolution':
    # The size of an MLP is written as it is.
    out |= dict(norm_eps=cfg.norm_eps, block_auto_adjust_ff_dim=False)
  if family.hybrid == 'state_space':
    position = None if -1 in cfg.layer_ropes else 'rope'
    shared = cfg.experts.shared_size if cfg.experts else cfg.intermediate_size
    out |= dict(shared_intermediate_size=shared, position_embedding_type=position)
    # The sizes of state spaces have to be possible where there are none, too.
    sizes = dict(mamba_expand=2, mamba_n_heads=1)
    if isinstance(cfg, HybridConfig):
      sizes = dict(mamba_expand=cfg.value_heads * cfg.value_size // cfg.hidden_size)
    out |= sizes
  return out | ({_SHARED: cfg.experts.shared_size} if cfg.experts and cfg.experts.shared_gate else {})
