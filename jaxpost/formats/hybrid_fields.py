"""Fields of config.json of models with mixers beside attention <-> fields of HybridConfig.

`Family.hybrid` says which fields those are: of Qwen3-Next, Qwen3.5 and OLMo Hybrid ('delta') and, with latent attention
(`Family.latent`), Kimi Linear; of LFM2 ('convolution'); or of Granite 4 ('state_space') and, where layers have one part
each (`Family.single`), Nemotron-H.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError
from jaxpost.formats import latent_fields
from jaxpost.formats.family import FULL
from jaxpost.models.config import ModelConfig, Rope
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
# Kimi Linear has the same fields in the object `linear_attn_config`, with these names and defaults.
_KIMI_SIZES = {
  'linear_num_heads': ('num_heads', 32),
  'linear_head_dim': ('head_dim', 128),
  'linear_conv_kernel_dim': ('short_conv_kernel_size', 4),
}
_NESTED, _MLPS, _DENSE = 'linear_attn_config', 'mlp_layer_types', 'first_k_dense_replace'
# Fields of config.json -> those of HybridConfig, for each mixer.
_SIZES = {
  'delta': _DELTA_SIZES,
  'latent': {'linear_num_heads': 'value_heads', 'linear_head_dim': 'key_size', 'linear_conv_kernel_dim': 'taps'},
  'convolution': {'conv_L_cache': 'taps'},
  'state_space': _SPACE_SIZES,
}
_INFINITY = {'__float__': 'Infinity'}  # as transformers writes it
_NEGATIVE = 'linear_allow_neg_eigval'  # steps of up to 2 (Grazzi et al., arXiv:2411.12537)
_SHARED_SINGLE = 'moe_shared_expert_intermediate_size'
_SHARED, _INTERVAL = 'shared_expert_intermediate_size', 'full_attention_interval'
# Name of the other mixer in `layer_types`, beside FULL, and other spellings of both.
_TYPES = {'delta': 'linear_attention', 'convolution': 'conv', 'state_space': 'linear_attention'}
_SPELLINGS = {'mamba': 'linear_attention', 'attention': FULL}
_PARTS = {'mlp': 'mlp', 'moe': 'moe'}  # layers without a mixer, where a layer has one part
_PATTERN, _BLOCKS = 'hybrid_override_pattern', 'layers_block_type'
_LETTERS = {'M': 'mamba', '*': 'attention', '-': 'mlp', 'E': 'moe'}  # of the pattern of all layers


def completed(raw: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
  """Returns a config.json with the fields that follow from others.

  Raises:
    InputError: for a pattern of layers that is impossible; it names the field.
  """
  raw = dict(raw)
  if family.single:
    pattern = raw.get(_PATTERN)
    if pattern is not None and (not isinstance(pattern, str) or {*pattern} - {*_LETTERS}):
      raise InputError(f'{where}: {_PATTERN}={pattern!r} must be a name of letters among {" ".join(_LETTERS)}')
    types = raw.get(_BLOCKS) or raw.get('layer_types') or [_LETTERS[x] for x in pattern or '']
    if not isinstance(types, list) or not types or not all(isinstance(x, str) for x in types):
      raise InputError(f'{where}: {_BLOCKS}={types!r} must be a list of names')
    raw |= {_BLOCKS: types, 'num_hidden_layers': raw.get('num_hidden_layers', len(types))}
  if family.latent:
    return _completed_latent(raw, where)
  if family.hybrid == 'delta':
    heads = raw['num_attention_heads']
    for field in ('linear_num_key_heads', 'linear_num_value_heads'):
      raw[field] = heads if raw[field] is None else raw[field]
    if raw['linear_key_head_dim'] is None:
      raw['linear_key_head_dim'] = int(0.75 * raw['hidden_size'] / raw['linear_num_key_heads'])
    if raw['linear_value_head_dim'] is None:
      raw['linear_value_head_dim'] = 2 * raw['linear_key_head_dim']
  return raw


def _completed_latent(raw: dict[str, Any], where: str) -> dict[str, Any]:
  """Returns the config.json of a Kimi Linear with what it says in one of two ways, or in both alike."""

  def agreed(field, value, other, name):
    if None not in (value, other) and value != other:
      raise InputError(f'{where}: {field}={value!r} beside {name}={other!r}')
    return other if value is None else value

  count, nested = raw['num_hidden_layers'], raw.get(_NESTED) or {}
  if not isinstance(nested, dict):
    raise InputError(f'{where}: {_NESTED}={nested!r} must be an object')
  for name in nested.keys() - {'full_attn_layers', 'kda_layers', *(inner for inner, _ in _KIMI_SIZES.values())}:
    raise InputError(f'{where}: {_NESTED}.{name} is not supported')
  for field, (inner, default) in _KIMI_SIZES.items():
    found = agreed(field, raw.get(field), nested.get(inner), f'{_NESTED}.{inner}')
    raw[field] = default if found is None else found
  full, linear = nested.get('full_attn_layers'), nested.get('kda_layers')  # numbers from 1 on
  types = None
  if full is not None or linear is not None:
    if not all(isinstance(x, list) for x in (full, linear)) or sorted([*full, *linear]) != [*range(1, count + 1)]:
      raise InputError(
        f'{where}: {_NESTED} with full_attn_layers={full!r} and kda_layers={linear!r} must name each of the '
        f'{count} layers once'
      )
    types = [FULL if i + 1 in full else _TYPES['delta'] for i in range(count)]
  types = agreed('layer_types', raw.get('layer_types'), types, _NESTED)
  raw['layer_types'] = types or [FULL if i and i % 4 == 0 else _TYPES['delta'] for i in range(count)]
  mlps, dense = raw.get(_MLPS), None
  if mlps is not None:
    dense = mlps.count('dense') if isinstance(mlps, list) else 0
    if mlps != ['dense'] * dense + ['sparse'] * (count - dense):
      raise InputError(f'{where}: {_MLPS}={mlps!r} is not supported (only dense layers first, then sparse ones)')
  dense = agreed(_DENSE, raw.get(_DENSE), dense, f'dense layers in {_MLPS}')
  raw[_DENSE] = 1 if dense is None else dense
  if raw.get('head_dim') and raw['head_dim'] * raw['num_attention_heads'] == raw['hidden_size']:
    raw['head_dim'] = None  # as published, of no effect
  return raw


def read(raw: dict[str, Any], cfg: ModelConfig, where: str, family: Family) -> ModelConfig:
  """Returns the config of a folder, from the common fields `cfg` and its config.json `raw`.

  Of a model without other mixers than attention, where its family has such, it is a plain one.

  Raises:
    InputError: for values that are impossible or not supported; it names the field.
  """
  field, only = family.activation_field, next(iter(family.activations), 'silu')
  if cfg.activation != only:
    raise InputError(f'{where}: {field}={raw[field]!r} is not supported (only {only})')
  delta = _latent_delta if family.latent else _delta
  readers = {'delta': delta, 'convolution': _convolution, 'state_space': _single if family.single else _state_space}
  own = readers[family.hybrid](raw, cfg, where)
  if not own['mixers']:
    return dataclasses.replace(cfg, **{k: own[k] for k in own.keys() & vars(cfg)})
  return HybridConfig(**vars(cfg) | own | dict(family.mixer))


def _delta(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Reads what models with the gated delta rule have."""
  sizes = _sizes(raw, 'delta', where)
  for field in (_INTERVAL, *((_SHARED,) if cfg.experts else ())):
    _check_whole(raw[field], field, 1, where)
  if sizes['value_heads'] % sizes['key_heads']:
    raise InputError(
      f'{where}: linear_num_key_heads={sizes["key_heads"]} must divide linear_num_value_heads={sizes["value_heads"]}'
    )
  types = raw.get('layer_types')
  if types is None:
    types = [_TYPES['delta'] if (i + 1) % raw[_INTERVAL] else FULL for i in range(cfg.num_layers)]
  experts = cfg.experts and dataclasses.replace(cfg.experts, shared=1, shared_size=raw[_SHARED], shared_gate=True)
  own = dict(experts=experts, mixers=_mixers(types, 'delta', cfg, where))
  return sizes | own | dict(beta_scale=2.0 if raw.get(_NEGATIVE) else 1.0)


def _latent_delta(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Reads what models have with latent attention, without rotation, beside the gated delta rule of Kimi Linear."""
  sizes = _sizes(raw, 'latent', where)
  size, still = sizes['key_size'], dict(ropes=(Rope(),), layer_ropes=(-1,) * cfg.num_layers)
  own = dict(key_heads=sizes['value_heads'], value_size=size, gate_rank=size)
  mixers = _mixers(raw['layer_types'], 'delta', cfg, where)
  _check_sparse(mixers, cfg, _DENSE, where)
  return latent_fields.sizes(raw, dataclasses.replace(cfg, **still), where) | sizes | own | still | dict(mixers=mixers)


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
  _check_sparse(mixers, cfg, 'num_dense_layers', where)
  return _sizes(raw, 'convolution', where) | dict(mixers=mixers, intermediate_size=size)


def _check_sparse(mixers: tuple[str, ...], cfg: ModelConfig, field: str, where: str) -> None:
  first = cfg.experts.first_dense if cfg.experts else 0
  if 'layers' not in mixers[first:]:
    raise InputError(f'{where}: {field}={first} leaves no layer with attention and experts, which is needed')


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
  own = dict(intermediate_size=cfg.intermediate_size if experts else size, experts=experts)
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
  return own | sizes | dict(mixers=_mixers(types, 'state_space', cfg, where))


def _single(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Reads what models with state spaces have whose layers have one part each."""
  mixers = _mixers(raw[_BLOCKS], 'state_space', cfg, where, _PARTS)
  if {'mlp', 'moe'}.isdisjoint(mixers):
    raise InputError(f'{where}: {_BLOCKS}={raw[_BLOCKS]!r} without an MLP or experts is not supported')
  least, latent = raw['time_step_min'], raw['moe_latent_size']
  if type(least) not in (int, float) or least < 0:
    raise InputError(f'{where}: time_step_min={least!r} must not be below 0')
  if latent is not None:
    _check_whole(latent, 'moe_latent_size', 1, where)
  _check_whole(raw[_SHARED_SINGLE], _SHARED_SINGLE, 1, where)
  experts = None
  if 'moe' in mixers:
    _check_whole(raw['n_routed_experts'], 'n_routed_experts', 1, where)
    experts = dataclasses.replace(cfg.experts, shared=1, shared_size=raw[_SHARED_SINGLE], latent=latent or 0)
  own = dict(mixers=mixers, experts=experts, step_min=float(least), layer_ropes=(-1,) * cfg.num_layers)
  return own | _sizes(raw, 'state_space', where)


def _sizes(raw: dict[str, Any], mixer: str, where: str) -> dict[str, int]:
  """Returns {name in HybridConfig: value} of whole numbers."""
  for field, ours in _SIZES[mixer].items():
    _check_whole(raw[field], field, 2 if ours == 'taps' else 1, where)
  sizes = {ours: raw[field] for field, ours in _SIZES[mixer].items()}
  if mixer == 'state_space' and sizes['value_heads'] % sizes['key_heads']:
    raise InputError(f'{where}: mamba_n_groups={sizes["key_heads"]} must divide mamba_n_heads={sizes["value_heads"]}')
  return sizes


def _check_whole(value: Any, field: str, lowest: int, where: str) -> None:
  if type(value) is not int or value < lowest:
    raise InputError(f'{where}: {field}={value!r} must be a whole number above {lowest - 1}')


def _mixers(
  types: Any, mixer: str, cfg: ModelConfig, where: str, parts: Mapping[str, str] | None = None
) -> tuple[str, ...]:
  """Returns `HybridConfig.mixers`; `parts` are layers without a mixer."""
  other, types = _TYPES[mixer], [_SPELLINGS.get(name, name) for name in types]
  known = {FULL: 'layers', other: mixer, **(parts or {})}
  if len(types) != cfg.num_layers or not {*types} <= {*known}:
    raise InputError(f'{where}: layer_types={types!r} must be {cfg.num_layers} times {" or ".join(known)}')
  if FULL not in types or other not in types:
    raise InputError(f'{where}: layer_types={types[0]!r} alone is not supported; a model needs layers of both kinds')
  return tuple(known[kind] for kind in types)


def write(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  hybrid = isinstance(cfg, HybridConfig)
  names = {'layers': FULL, family.hybrid: _TYPES[family.hybrid]} | {ours: theirs for theirs, ours in _PARTS.items()}
  out = {'layer_types': [names[name] for name in (cfg.mixers if hybrid else cfg.layer_stacks)]}
  if hybrid:
    out |= {field: vars(cfg)[ours] for field, ours in _SIZES['latent' if family.latent else cfg.mixer].items()}
    if _NEGATIVE in family.fields:
      out[_NEGATIVE] = cfg.beta_scale > 1
  if isinstance(cfg, HybridConfig) and family.latent and cfg.experts:
    dense = cfg.experts.first_dense
    places = {name: [i + 1 for i, x in enumerate(cfg.mixers) if x == name] for name in ('layers', 'delta')}
    nested = {inner: out[field] for field, (inner, _) in _KIMI_SIZES.items()}
    out |= latent_fields.write(cfg, family) | {_MLPS: ['dense'] * dense + ['sparse'] * (cfg.num_layers - dense)}
    out[_NESTED] = nested | dict(full_attn_layers=places['layers'], kda_layers=places['delta'])
  if family.hybrid == 'convolution':
    out['norm_eps'] = cfg.norm_eps
    if 'block_auto_adjust_ff_dim' in family.fields:  # the size of an MLP is written as it is
      out['block_auto_adjust_ff_dim'] = False
  if family.single:
    out[_BLOCKS] = out['layer_types']
    out |= {ours: out[name] for ours, name in family.aliases.items() if name in out}
    out |= dict(layer_norm_epsilon=cfg.norm_eps, time_step_min=cfg.step_min)
    if cfg.experts:
      out |= {'moe_latent_size': cfg.experts.latent or None, _SHARED_SINGLE: cfg.experts.shared_size}
  elif family.hybrid == 'state_space':
    position = None if -1 in cfg.layer_ropes else 'rope'
    shared = cfg.experts.shared_size if cfg.experts else cfg.intermediate_size
    out |= dict(shared_intermediate_size=shared, position_embedding_type=position)
    # The sizes of state spaces have to be possible where there are none, too.
    sizes = dict(mamba_expand=2, mamba_n_heads=1)
    if isinstance(cfg, HybridConfig):
      sizes = dict(mamba_expand=cfg.value_heads * cfg.value_size // cfg.hidden_size)
    out |= sizes
  return out | ({_SHARED: cfg.experts.shared_size} if cfg.experts and cfg.experts.shared_gate else {})
