"""Fields of config.json of models with attention and another mixer <-> fields of HybridConfig.

`Family.hybrid` is the other mixer: 'delta' in Qwen3-Next, Qwen3.5, OLMo Hybrid and, with latent attention
(`Family.latent`), Kimi Linear; 'convolution' in LFM2; 'state_space' in Granite 4 and, with layers of one part each
(`Family.single`), Nemotron-H.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError
from jaxpost.formats import latent_fields
from jaxpost.formats.config_fields import check_boolean, check_positive, check_whole
from jaxpost.formats.family import FULL
from jaxpost.models.config import ModelConfig, Rope
from jaxpost.models.hybrid_config import HybridConfig

if TYPE_CHECKING:
  from jaxpost.formats.family import Family

# Fields of config.json -> those of HybridConfig, by mixer; 'latent' is the delta rule of models with latent attention.
_SIZES = {
  'delta': {
    'linear_num_key_heads': 'key_heads',
    'linear_num_value_heads': 'value_heads',
    'linear_key_head_dim': 'key_size',
    'linear_value_head_dim': 'value_size',
    'linear_conv_kernel_dim': 'taps',
  },
  'latent': {'linear_num_heads': 'value_heads', 'linear_head_dim': 'key_size', 'linear_conv_kernel_dim': 'taps'},
  'convolution': {'conv_L_cache': 'taps'},
  'state_space': {
    'mamba_n_groups': 'key_heads',
    'mamba_n_heads': 'value_heads',
    'mamba_d_state': 'key_size',
    'mamba_d_head': 'value_size',
    'mamba_d_conv': 'taps',
  },
}
# Kimi Linear has the same fields in the object `linear_attn_config`, with these names and defaults.
_KIMI_SIZES = {
  'linear_num_heads': ('num_heads', 32),
  'linear_head_dim': ('head_dim', 128),
  'linear_conv_kernel_dim': ('short_conv_kernel_size', 4),
}
_INFINITY = {'__float__': 'Infinity'}  # as transformers writes it
# Name of the other mixer in `layer_types`; attention is FULL. Then other spellings of both.
_TYPES = {'delta': 'linear_attention', 'convolution': 'conv', 'state_space': 'linear_attention'}
_SPELLINGS = {'mamba': 'linear_attention', 'attention': FULL}
_PARTS = {'mlp': 'mlp', 'moe': 'moe'}  # layers without a mixer, in families of one part per layer
_LETTERS = {'M': 'mamba', '*': 'attention', '-': 'mlp', 'E': 'moe'}  # of `hybrid_override_pattern`


def completed(raw: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
  """Returns a config.json with the fields that are derived from others.

  Raises:
    InputError: for a pattern of layers that is impossible; it names the field.
  """
  if family.single:
    return raw | _blocks(raw, where)
  if family.latent:
    return raw | _kimi_fields(raw, where)
  if family.hybrid == 'delta':
    return raw | _delta_sizes(raw, where)
  return raw


def _blocks(raw: dict[str, Any], where: str) -> dict[str, Any]:
  """Returns the types of layers with one part each, from a list or a pattern of letters, and their number."""
  pattern = raw.get('hybrid_override_pattern')
  if pattern is not None and (not isinstance(pattern, str) or {*pattern} - {*_LETTERS}):
    raise InputError(f'{where}: hybrid_override_pattern={pattern!r} must be letters among {" ".join(_LETTERS)}')
  types = raw.get('layers_block_type') or raw.get('layer_types') or [_LETTERS[letter] for letter in pattern or '']
  if not isinstance(types, list) or not types or not all(isinstance(name, str) for name in types):
    raise InputError(f'{where}: layers_block_type={types!r} must be a list of names')
  return {'layers_block_type': types, 'num_hidden_layers': raw.get('num_hidden_layers', len(types))}


def _delta_sizes(raw: dict[str, Any], where: str) -> dict[str, int]:
  """Returns the heads of the delta rule and their sizes; those that are null are derived from attention."""
  sizes = {field: raw[field] for field in _SIZES['delta']}
  for field in ('linear_num_key_heads', 'linear_num_value_heads'):
    if sizes[field] is None:
      sizes[field] = raw['num_attention_heads']
    check_whole(sizes[field], field, where)
  if sizes['linear_key_head_dim'] is None:
    sizes['linear_key_head_dim'] = int(0.75 * raw['hidden_size'] / sizes['linear_num_key_heads'])
  if sizes['linear_value_head_dim'] is None:
    sizes['linear_value_head_dim'] = 2 * sizes['linear_key_head_dim']
  return sizes


def _kimi_fields(raw: dict[str, Any], where: str) -> dict[str, Any]:
  """Returns the fields that a Kimi Linear has at the top level of config.json, in `linear_attn_config`, or in both."""
  nested = raw.get('linear_attn_config') or {}
  if not isinstance(nested, dict):
    raise InputError(f'{where}: linear_attn_config={nested!r} must be an object')
  supported = {'full_attn_layers', 'kda_layers', *(nested_name for nested_name, _ in _KIMI_SIZES.values())}
  for name in sorted(nested.keys() - supported):
    raise InputError(f'{where}: linear_attn_config.{name} is not supported')
  out: dict[str, Any] = {}
  for field, (nested_name, default) in _KIMI_SIZES.items():
    size = _agreed(raw, field, nested.get(nested_name), f'linear_attn_config.{nested_name}', where)
    out[field] = default if size is None else size
  dense = None
  if (mlp_types := raw.get('mlp_layer_types')) is not None:
    dense = latent_fields.leading_dense(mlp_types, raw['num_hidden_layers'], where)
  dense = _agreed(raw, 'first_k_dense_replace', dense, 'dense layers in mlp_layer_types', where)
  out |= {'first_k_dense_replace': 1 if dense is None else dense, 'layer_types': _kimi_types(raw, nested, where)}
  if raw.get('head_dim') and raw['head_dim'] * raw['num_attention_heads'] == raw['hidden_size']:
    out['head_dim'] = None  # published files have it, without effect
  return out


def _kimi_types(raw: dict[str, Any], nested: dict[str, Any], where: str) -> list[str]:
  """Returns `layer_types`, by default full attention in the layers with indices 4, 8, 12, ..."""
  count = raw['num_hidden_layers']
  full, linear = nested.get('full_attn_layers'), nested.get('kda_layers')  # numbers from 1 on
  types = None
  if full is not None or linear is not None:
    numbers = [*range(1, count + 1)]
    if not (isinstance(full, list) and isinstance(linear, list)) or sorted(full + linear) != numbers:
      raise InputError(
        f'{where}: linear_attn_config with full_attn_layers={full!r} and kda_layers={linear!r} must name each of the '
        f'{count} layers once'
      )
    types = [FULL if number in full else _TYPES['delta'] for number in numbers]
  types = _agreed(raw, 'layer_types', types, 'linear_attn_config', where)
  return types or [FULL if i and i % 4 == 0 else _TYPES['delta'] for i in range(count)]


def _agreed(raw: dict[str, Any], field: str, other: Any, name: str, where: str) -> Any:
  """Returns the value of a field, or `other`, its value under another name; InputError if the two differ."""
  value = raw.get(field)
  if None not in (value, other) and value != other:
    raise InputError(f'{where}: {field}={value!r} contradicts {name}={other!r}')
  return other if value is None else value


def read(raw: dict[str, Any], cfg: ModelConfig, where: str, family: Family) -> ModelConfig:
  """Returns the config of a folder, from the common fields `cfg` and its config.json `raw`.

  A model of such a family that has attention in all layers gets a plain ModelConfig.

  Raises:
    InputError: for values that are impossible or not supported; it names the field.
  """
  name, supported = family.activation_field, next(iter(family.activations), 'silu')
  if cfg.activation != supported:
    raise InputError(f'{where}: {name}={raw[name]!r} is not supported (only {supported})')
  delta = _latent_delta if family.latent else _delta
  readers = {'delta': delta, 'convolution': _convolution, 'state_space': _single if family.single else _state_space}
  fields = readers[family.hybrid](raw, cfg, where)
  if not fields['mixers']:
    return dataclasses.replace(cfg, **{k: fields[k] for k in fields.keys() & vars(cfg)})
  return HybridConfig(**vars(cfg) | fields | family.mixer)


def _delta(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Returns the fields of HybridConfig of models with the gated delta rule."""
  sizes = _sizes(raw, 'delta', where)
  check_whole(raw['full_attention_interval'], 'full_attention_interval', where)
  experts = cfg.experts
  if experts:
    size = check_whole(raw['shared_expert_intermediate_size'], 'shared_expert_intermediate_size', where)
    experts = dataclasses.replace(experts, shared=1, shared_size=size, shared_gate=True)
  if sizes['value_heads'] % sizes['key_heads']:
    raise InputError(
      f'{where}: linear_num_key_heads={sizes["key_heads"]} must divide linear_num_value_heads={sizes["value_heads"]}'
    )
  types = raw.get('layer_types')
  if types is None:
    types = [_TYPES['delta'] if (i + 1) % raw['full_attention_interval'] else FULL for i in range(cfg.num_layers)]
  # Step sizes of up to 2 allow negative eigenvalues (Grazzi et al., arXiv:2411.12537).
  beta_scale = 2.0 if raw.get('linear_allow_neg_eigval') else 1.0
  return sizes | dict(experts=experts, mixers=_mixers(types, 'delta', cfg, where), beta_scale=beta_scale)


def _latent_delta(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Returns the fields of Kimi Linear: the gated delta rule, and latent attention without rotary embeddings."""
  mixers = _mixers(raw['layer_types'], 'delta', cfg, where)
  _check_sparse(mixers, cfg, 'first_k_dense_replace', where)
  unrotated: dict[str, Any] = dict(ropes=(Rope(),), layer_ropes=(-1,) * cfg.num_layers)
  sizes = _sizes(raw, 'latent', where)
  # Queries, keys and values have the same number and size of heads; that size is the rank of the gates as well.
  sizes |= dict(key_heads=sizes['value_heads'], value_size=sizes['key_size'], gate_rank=sizes['key_size'])
  latent = latent_fields.sizes(raw, dataclasses.replace(cfg, **unrotated), where)
  return latent | sizes | unrotated | dict(mixers=mixers)


def _convolution(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Returns the fields of HybridConfig of models with short convolutions."""
  types = raw.get('layer_types')
  full_indices = raw.get('full_attn_idxs')
  types_by_index = None
  if full_indices is not None:
    if not isinstance(full_indices, list) or not all(type(i) is int and 0 <= i < cfg.num_layers for i in full_indices):
      raise InputError(f'{where}: full_attn_idxs={full_indices!r} must be a list of numbers below {cfg.num_layers}')
    types_by_index = [FULL if i in full_indices else _TYPES['convolution'] for i in range(cfg.num_layers)]
    if types not in (None, types_by_index):
      raise InputError(f'{where}: layer_types={types!r} contradicts full_attn_idxs={full_indices!r}')
  mixers = _mixers(types or types_by_index or [FULL] * cfg.num_layers, 'convolution', cfg, where)
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
  """Returns the hidden size of an MLP, which LFM2 derives from `intermediate_size`."""
  if not check_boolean(raw['block_auto_adjust_ff_dim'], 'block_auto_adjust_ff_dim', where):
    return raw['intermediate_size']
  size = int(2 * raw['intermediate_size'] / 3)
  if raw['block_ffn_dim_multiplier'] is not None:
    size = int(size * check_positive(raw['block_ffn_dim_multiplier'], 'block_ffn_dim_multiplier', where))
  multiple = check_whole(raw['block_multiple_of'], 'block_multiple_of', where)
  return -(-size // multiple) * multiple  # rounded up


def _state_space(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Returns the fields of HybridConfig of models with state spaces; `mixers` is () if no layer has one."""
  limit = raw.get('time_step_limit') or [0, _INFINITY]
  if not isinstance(limit, (list, tuple)) or limit[0] != 0 or limit[1:] not in ([_INFINITY], [float('inf')]):
    raise InputError(f'{where}: time_step_limit={limit!r} is not supported (only from 0 to infinity)')
  position = raw['position_embedding_type']
  if position not in ('rope', 'nope', None):
    raise InputError(f'{where}: position_embedding_type={position!r} is not supported (only rope, nope)')
  fields: dict[str, Any] = dict(layer_ropes=() if position == 'rope' else (-1,) * cfg.num_layers)
  # The size of the MLP of each layer; in models with experts it is a shared expert.
  size = check_whole(raw['shared_intermediate_size'], 'shared_intermediate_size', where)
  if cfg.experts:
    fields['experts'] = dataclasses.replace(cfg.experts, shared=1, shared_size=size)
  else:
    fields['intermediate_size'] = size
  types = raw.get('layer_types') or raw.get('layers_block_type') or ['mamba'] * cfg.num_layers
  if not {*types} - {FULL, 'attention'}:
    return fields | dict(mixers=(), biases=tuple(name for name in cfg.biases if name != 'conv'))
  inner_size = check_whole(raw['mamba_expand'], 'mamba_expand', where) * cfg.hidden_size
  if raw['mamba_d_head'] == 'auto':
    raw = raw | {'mamba_d_head': inner_size // check_whole(raw['mamba_n_heads'], 'mamba_n_heads', where)}
  sizes = _sizes(raw, 'state_space', where)
  if sizes['value_heads'] * sizes['value_size'] != inner_size:
    raise InputError(
      f'{where}: mamba_n_heads={sizes["value_heads"]} of mamba_d_head={sizes["value_size"]} are not '
      f'mamba_expand={raw["mamba_expand"]!r} times the hidden_size of {cfg.hidden_size}'
    )
  return fields | sizes | dict(mixers=_mixers(types, 'state_space', cfg, where))


def _single(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Returns the fields of HybridConfig of models with state spaces and layers of one part each."""
  types = raw['layers_block_type']
  mixers = _mixers(types, 'state_space', cfg, where, _PARTS)
  if {'mlp', 'moe'}.isdisjoint(mixers):
    raise InputError(f'{where}: layers_block_type={types!r} without an MLP or experts is not supported')
  step_min = raw['time_step_min']
  if type(step_min) not in (int, float) or not 0 <= step_min < float('inf'):
    raise InputError(f'{where}: time_step_min={step_min!r} must not be below 0')
  latent = raw['moe_latent_size']
  if latent is not None:
    check_whole(latent, 'moe_latent_size', where)
  shared_size = check_whole(raw['moe_shared_expert_intermediate_size'], 'moe_shared_expert_intermediate_size', where)
  experts = None
  if 'moe' in mixers:
    check_whole(raw['n_routed_experts'], 'n_routed_experts', where)
    assert cfg.experts  # n_routed_experts is not 0
    experts = dataclasses.replace(cfg.experts, shared=1, shared_size=shared_size, latent=latent or 0)
  fields = dict(mixers=mixers, experts=experts, step_min=float(step_min), layer_ropes=(-1,) * cfg.num_layers)
  return fields | _sizes(raw, 'state_space', where)


def _sizes(raw: dict[str, Any], mixer: str, where: str) -> dict[str, int]:
  """Returns {field of HybridConfig: whole number}."""
  for field, ours in _SIZES[mixer].items():
    check_whole(raw[field], field, where, least=2 if ours == 'taps' else 1)
  sizes = {ours: raw[field] for field, ours in _SIZES[mixer].items()}
  if mixer == 'state_space' and sizes['value_heads'] % sizes['key_heads']:
    raise InputError(f'{where}: mamba_n_groups={sizes["key_heads"]} must divide mamba_n_heads={sizes["value_heads"]}')
  return sizes


def _mixers(
  types: Any, mixer: str, cfg: ModelConfig, where: str, parts: Mapping[str, str] | None = None
) -> tuple[str, ...]:
  """Returns `HybridConfig.mixers`; `parts` has types of layers without a mixer -> their names in it."""
  other = _TYPES[mixer]
  types = [_SPELLINGS.get(name, name) for name in types]
  mixer_names = {FULL: 'layers', other: mixer, **(parts or {})}
  if len(types) != cfg.num_layers or not {*types} <= {*mixer_names}:
    raise InputError(f'{where}: layer_types={types!r} must be {cfg.num_layers} times {" or ".join(mixer_names)}')
  if FULL not in types or other not in types:
    raise InputError(f'{where}: layer_types={types[0]!r} alone is not supported; a model needs layers of both kinds')
  return tuple(mixer_names[kind] for kind in types)


def write(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  mixers = cfg.layer_stacks
  out: dict[str, Any] = {}
  if isinstance(cfg, HybridConfig):
    mixers = cfg.mixers
    sizes = _SIZES['latent' if family.latent else cfg.mixer]
    out = {field: vars(cfg)[ours] for field, ours in sizes.items()}
    if 'linear_allow_neg_eigval' in family.fields:
      out['linear_allow_neg_eigval'] = cfg.beta_scale > 1
    if family.latent:
      out |= _write_kimi(cfg, family, out)
  names = {'layers': FULL, family.hybrid: _TYPES[family.hybrid]} | {ours: theirs for theirs, ours in _PARTS.items()}
  out['layer_types'] = [names[name] for name in mixers]
  if family.hybrid == 'convolution':
    out['norm_eps'] = cfg.norm_eps
    if 'block_auto_adjust_ff_dim' in family.fields:  # intermediate_size is written as adjusted
      out['block_auto_adjust_ff_dim'] = False
  if family.single:
    assert isinstance(cfg, HybridConfig)  # `_single` reads no other
    out |= dict(layers_block_type=out['layer_types'], layer_norm_epsilon=cfg.norm_eps, time_step_min=cfg.step_min)
    out |= {theirs: out[ours] for theirs, ours in family.aliases.items() if ours in out}
    if cfg.experts:
      out['moe_latent_size'] = cfg.experts.latent or None
      out['moe_shared_expert_intermediate_size'] = cfg.experts.shared_size
  elif family.hybrid == 'state_space':
    out |= _write_state_space(cfg)
  if cfg.experts and cfg.experts.shared_gate:
    out['shared_expert_intermediate_size'] = cfg.experts.shared_size
  return out


def _write_kimi(cfg: HybridConfig, family: Family, sizes: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of a Kimi Linear, both nested and at the top level."""
  assert cfg.experts
  nested = {nested_name: sizes[field] for field, (nested_name, _) in _KIMI_SIZES.items()}
  for name, mixer in ('full_attn_layers', 'layers'), ('kda_layers', 'delta'):
    nested[name] = [number for number, layer_mixer in enumerate(cfg.mixers, 1) if layer_mixer == mixer]
  dense = cfg.experts.first_dense
  mlp_types = ['dense'] * dense + ['sparse'] * (cfg.num_layers - dense)
  return latent_fields.write(cfg, family) | dict(linear_attn_config=nested, mlp_layer_types=mlp_types)


def _write_state_space(cfg: ModelConfig) -> dict[str, Any]:
  """Returns the fields of a Granite 4, which may have no state space."""
  out: dict[str, Any] = {
    'shared_intermediate_size': cfg.experts.shared_size if cfg.experts else cfg.intermediate_size,
    'position_embedding_type': None if -1 in cfg.layer_ropes else 'rope',
  }
  if isinstance(cfg, HybridConfig):
    return out | dict(mamba_expand=cfg.value_heads * cfg.value_size // cfg.hidden_size)
  return out | dict(mamba_expand=2, mamba_n_heads=1)  # without effect, but readers check them
