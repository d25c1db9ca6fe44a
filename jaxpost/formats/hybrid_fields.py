"""Fields of config.json of models with attention and another mixer <-> fields of HybridConfig.

There are five kinds of such families: 'delta' (Qwen3-Next, Qwen3.5, OLMo Hybrid), 'kimi' (the delta rule and latent
attention), 'convolution' (LFM2), 'state_space' (Granite 4) and 'nemotron' (state spaces and layers of one part each).
"""

import dataclasses
from typing import Any

from jaxpost.errors import InputError
from jaxpost.formats import latent_fields
from jaxpost.formats.config_fields import check_boolean, check_positive, check_whole
from jaxpost.formats.family import FULL, Family
from jaxpost.models.config import ModelConfig, Rope
from jaxpost.models.decoder_configs import HybridConfig

_LINEAR = 'linear_attention'  # of `layer_types`
# Kind -> {name in `layer_types`: name in `HybridConfig.mixers`}: attention, the other mixer, and layers without either.
_TYPES = {
  'delta': {FULL: 'layers', _LINEAR: 'delta'},
  'kimi': {FULL: 'layers', _LINEAR: 'delta'},
  'convolution': {FULL: 'layers', 'conv': 'convolution'},
  'state_space': {FULL: 'layers', _LINEAR: 'state_space'},
  'nemotron': {FULL: 'layers', _LINEAR: 'state_space', 'mlp': 'mlp', 'moe': 'moe'},
}
_SPELLINGS = {'mamba': _LINEAR, 'attention': FULL}  # other names in `layer_types`
_LETTERS = {'M': 'mamba', '*': 'attention', '-': 'mlp', 'E': 'moe'}  # of `hybrid_override_pattern`
_STATE_SPACE = {
  'mamba_n_groups': 'key_heads',
  'mamba_n_heads': 'value_heads',
  'mamba_d_state': 'key_size',
  'mamba_d_head': 'value_size',
  'mamba_d_conv': 'taps',
}
# Kind -> {field of config.json: field of HybridConfig} of whole numbers.
_SIZES = {
  'delta': {
    'linear_num_key_heads': 'key_heads',
    'linear_num_value_heads': 'value_heads',
    'linear_key_head_dim': 'key_size',
    'linear_value_head_dim': 'value_size',
    'linear_conv_kernel_dim': 'taps',
  },
  'kimi': {'linear_num_heads': 'value_heads', 'linear_head_dim': 'key_size', 'linear_conv_kernel_dim': 'taps'},
  'convolution': {'conv_L_cache': 'taps'},
  'state_space': _STATE_SPACE,
  'nemotron': _STATE_SPACE,
}
# Kimi Linear has its sizes in the object `linear_attn_config` as well, with these names and defaults.
_KIMI_SIZES = {
  'linear_num_heads': ('num_heads', 32),
  'linear_head_dim': ('head_dim', 128),
  'linear_conv_kernel_dim': ('short_conv_kernel_size', 4),
}
_INFINITY = {'__float__': 'Infinity'}  # as transformers writes it


def _kind(family: Family) -> str:
  return 'kimi' if family.latent else 'nemotron' if family.single else family.hybrid


def completed(raw: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
  """Returns a config.json with `layer_types` and other derived fields; see `families.own_fields`."""
  complete, _ = _READERS[_kind(family)]
  return raw | complete(raw, where)


def _complete_delta(raw: dict[str, Any], where: str) -> dict[str, Any]:
  """Returns the sizes, of which those that are null are derived from attention, and the types of layers."""
  out = {field: raw[field] for field in _SIZES['delta']}
  for field in ('linear_num_key_heads', 'linear_num_value_heads'):
    if out[field] is None:
      out[field] = raw['num_attention_heads']
    check_whole(out[field], field, where)
  if out['linear_key_head_dim'] is None:
    out['linear_key_head_dim'] = int(0.75 * raw['hidden_size'] / out['linear_num_key_heads'])
  if out['linear_value_head_dim'] is None:
    out['linear_value_head_dim'] = 2 * out['linear_key_head_dim']
  interval = check_whole(raw['full_attention_interval'], 'full_attention_interval', where)
  if raw.get('layer_types') is None:
    out['layer_types'] = [_LINEAR if (i + 1) % interval else FULL for i in range(raw['num_hidden_layers'])]
  return out


def _complete_convolution(raw: dict[str, Any], where: str) -> dict[str, Any]:
  """Returns the types of layers, from one or both of two fields; by default all have attention."""
  count, full_indices, types = raw['num_hidden_layers'], raw.get('full_attn_idxs'), None
  if full_indices is not None:
    if not isinstance(full_indices, list) or not all(type(i) is int and 0 <= i < count for i in full_indices):
      raise InputError(f'{where}: full_attn_idxs={full_indices!r} must be a list of numbers below {count}')
    types = [FULL if i in full_indices else 'conv' for i in range(count)]
    if raw.get('layer_types') not in (None, types):
      raise InputError(f'{where}: layer_types={raw["layer_types"]!r} contradicts full_attn_idxs={full_indices!r}')
  return {'layer_types': raw.get('layer_types') or types or [FULL] * count}


def _complete_state_space(raw: dict[str, Any], where: str) -> dict[str, Any]:
  """Returns the types of layers, by default without attention, and the size of a head, which may be 'auto'."""
  types = raw.get('layer_types') or raw.get('layers_block_type') or ['mamba'] * raw['num_hidden_layers']
  size = raw['mamba_d_head']
  if size == 'auto' and not {*types} <= {FULL, 'attention'}:
    inner_size = check_whole(raw['mamba_expand'], 'mamba_expand', where) * raw['hidden_size']
    size = inner_size // check_whole(raw['mamba_n_heads'], 'mamba_n_heads', where)
  return {'layer_types': types, 'mamba_d_head': size}


def _complete_nemotron(raw: dict[str, Any], where: str) -> dict[str, Any]:
  """Returns the types of layers with one part each, from a list or a pattern of letters, and their number."""
  pattern = raw.get('hybrid_override_pattern')
  if pattern is not None and (not isinstance(pattern, str) or {*pattern} - {*_LETTERS}):
    raise InputError(f'{where}: hybrid_override_pattern={pattern!r} must be letters among {" ".join(_LETTERS)}')
  types = raw.get('layers_block_type') or raw.get('layer_types') or [_LETTERS[letter] for letter in pattern or '']
  if not isinstance(types, list) or not types or not all(isinstance(name, str) for name in types):
    raise InputError(f'{where}: layers_block_type={types!r} must be a list of names')
  return {'layer_types': types, 'num_hidden_layers': raw.get('num_hidden_layers', len(types))}


def _complete_kimi(raw: dict[str, Any], where: str) -> dict[str, Any]:
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
    types = [FULL if number in full else _LINEAR for number in numbers]
  types = _agreed(raw, 'layer_types', types, 'linear_attn_config', where)
  return types or [FULL if i and i % 4 == 0 else _LINEAR for i in range(count)]


def _agreed(raw: dict[str, Any], field: str, other: Any, name: str, where: str) -> Any:
  """Returns the value of a field, or `other`, its value under another name; InputError if the two differ."""
  value = raw.get(field)
  if None not in (value, other) and value != other:
    raise InputError(f'{where}: {field}={value!r} contradicts {name}={other!r}')
  return other if value is None else value


def read(raw: dict[str, Any], cfg: ModelConfig, where: str, family: Family) -> ModelConfig:
  """Returns the config of a folder; see `families.own_fields`.

  A model of such a family that has attention in all layers gets a plain ModelConfig.
  """
  name, supported = family.activation_field, next(iter(family.activations), 'silu')
  if cfg.activation != supported:
    raise InputError(f'{where}: {name}={raw[name]!r} is not supported (only {supported})')
  kind = _kind(family)
  types = [_SPELLINGS.get(name, name) for name in raw['layer_types']]
  if kind != 'state_space' or {*types} != {FULL}:  # a Granite 4 may have no other mixer, and then is a plain model
    mixers = _mixers(types, cfg, where, family)
    cfg = HybridConfig(**vars(cfg) | _sizes(raw, kind, where) | family.mixer | dict(mixers=mixers))
  _, read_others = _READERS[kind]
  return dataclasses.replace(cfg, **read_others(raw, cfg, where))


def _mixers(types: list[str], cfg: ModelConfig, where: str, family: Family) -> tuple[str, ...]:
  """Returns `HybridConfig.mixers` for the `layer_types` of a model."""
  names = _TYPES[_kind(family)]
  if len(types) != cfg.num_layers or not {*types} <= {*names}:
    raise InputError(f'{where}: layer_types={types!r} must be {cfg.num_layers} times {" or ".join(names)}')
  if not {*types} >= {*list(names)[:2]}:
    raise InputError(f'{where}: layer_types={types[0]!r} alone is not supported; a model needs layers of both kinds')
  mixers = tuple(names[name] for name in types)
  if cfg.experts and family.experts and 'layers' not in mixers[cfg.experts.first_dense :]:
    first = f'{family.experts.first_dense}={cfg.experts.first_dense}'
    raise InputError(f'{where}: {first} leaves no layer with attention and experts, which is needed')
  return mixers


def _sizes(raw: dict[str, Any], kind: str, where: str) -> dict[str, int]:
  """Returns {field of HybridConfig: whole number}."""
  fields = {ours: field for field, ours in _SIZES[kind].items()}
  sizes = {
    ours: check_whole(raw[field], field, where, least=2 if ours == 'taps' else 1) for ours, field in fields.items()
  }
  if 'key_heads' in sizes and sizes['value_heads'] % sizes['key_heads']:
    keys, values = (f'{fields[ours]}={sizes[ours]}' for ours in ('key_heads', 'value_heads'))
    raise InputError(f'{where}: {keys} must divide {values}')
  return sizes


def _read_delta(raw: dict[str, Any], cfg: HybridConfig, where: str) -> dict[str, Any]:
  """Returns the other fields of models with the gated delta rule."""
  experts = cfg.experts
  if experts:
    size = check_whole(raw['shared_expert_intermediate_size'], 'shared_expert_intermediate_size', where)
    experts = dataclasses.replace(experts, shared=1, shared_size=size, shared_gate=True)
  # Step sizes of up to 2 allow negative eigenvalues (Grazzi et al., arXiv:2411.12537).
  return dict(experts=experts, beta_scale=2.0 if raw.get('linear_allow_neg_eigval') else 1.0)


def _read_kimi(raw: dict[str, Any], cfg: HybridConfig, where: str) -> dict[str, Any]:
  """Returns the other fields of Kimi Linear: the gated delta rule, and latent attention without rotary embeddings."""
  unrotated: dict[str, Any] = dict(ropes=(Rope(),), layer_ropes=(-1,) * cfg.num_layers)
  latent = latent_fields.sizes(raw, dataclasses.replace(cfg, **unrotated), where)
  # Queries, keys and values have the same number and size of heads; that size is the rank of the gates as well.
  return latent | unrotated | dict(key_heads=cfg.value_heads, value_size=cfg.key_size, gate_rank=cfg.key_size)


def _read_convolution(raw: dict[str, Any], cfg: HybridConfig, where: str) -> dict[str, Any]:
  """Returns the other fields of models with short convolutions: the size of the MLP, which LFM2 may derive."""
  if cfg.hidden_size % cfg.num_heads:
    raise InputError(
      f'{where}: hidden_size={cfg.hidden_size} is not supported (only multiples of the {cfg.num_heads} attention '
      'heads, into which the channels of convolutions are split)'
    )
  size = raw['intermediate_size']
  if check_boolean(raw['block_auto_adjust_ff_dim'], 'block_auto_adjust_ff_dim', where):
    size = int(2 * size / 3)
    if raw['block_ffn_dim_multiplier'] is not None:
      size = int(size * check_positive(raw['block_ffn_dim_multiplier'], 'block_ffn_dim_multiplier', where))
    multiple = check_whole(raw['block_multiple_of'], 'block_multiple_of', where)
    size = -(-size // multiple) * multiple  # rounded up
  return dict(intermediate_size=size)


def _read_state_space(raw: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
  """Returns the other fields of a Granite 4."""
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
  if not isinstance(cfg, HybridConfig):
    return fields | dict(biases=tuple(name for name in cfg.biases if name != 'conv'))
  if cfg.value_heads * cfg.value_size != check_whole(raw['mamba_expand'], 'mamba_expand', where) * cfg.hidden_size:
    raise InputError(
      f'{where}: mamba_n_heads={cfg.value_heads} of mamba_d_head={cfg.value_size} are not '
      f'mamba_expand={raw["mamba_expand"]!r} times the hidden_size of {cfg.hidden_size}'
    )
  return fields


def _read_nemotron(raw: dict[str, Any], cfg: HybridConfig, where: str) -> dict[str, Any]:
  """Returns the other fields of models with state spaces and layers of one part each."""
  if not cfg.single:
    raise InputError(f'{where}: layers_block_type={raw["layer_types"]!r} without an MLP or experts is not supported')
  step_min = raw['time_step_min']
  if type(step_min) not in (int, float) or not 0 <= step_min < float('inf'):
    raise InputError(f'{where}: time_step_min={step_min!r} must not be below 0')
  latent = raw['moe_latent_size']
  if latent is not None:
    check_whole(latent, 'moe_latent_size', where)
  shared_size = check_whole(raw['moe_shared_expert_intermediate_size'], 'moe_shared_expert_intermediate_size', where)
  experts = None
  if 'moe' in cfg.mixers:
    check_whole(raw['n_routed_experts'], 'n_routed_experts', where)
    assert cfg.experts  # n_routed_experts is not 0
    experts = dataclasses.replace(cfg.experts, shared=1, shared_size=shared_size, latent=latent or 0)
  return dict(experts=experts, step_min=float(step_min), layer_ropes=(-1,) * cfg.num_layers)


# Kind -> (function that adds what config.json leaves out, function that reads what `_SIZES` and `_TYPES` leave out).
_READERS = {
  'delta': (_complete_delta, _read_delta),
  'kimi': (_complete_kimi, _read_kimi),
  'convolution': (_complete_convolution, _read_convolution),
  'state_space': (_complete_state_space, _read_state_space),
  'nemotron': (_complete_nemotron, _read_nemotron),
}


def write(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  kind, mixers = _kind(family), cfg.layer_stacks
  out: dict[str, Any] = {}
  if isinstance(cfg, HybridConfig):
    mixers = cfg.mixers
    out = {field: vars(cfg)[ours] for field, ours in _SIZES[kind].items()}
    if 'linear_allow_neg_eigval' in family.fields:
      out['linear_allow_neg_eigval'] = cfg.beta_scale > 1
  types = {ours: name for name, ours in _TYPES[kind].items()}
  out['layer_types'] = [types[name] for name in mixers]
  if cfg.experts and cfg.experts.shared_gate:
    out['shared_expert_intermediate_size'] = cfg.experts.shared_size
  if kind == 'convolution':
    out['norm_eps'] = cfg.norm_eps
    if 'block_auto_adjust_ff_dim' in family.fields:  # intermediate_size is written as adjusted
      out['block_auto_adjust_ff_dim'] = False
  writers = {'kimi': _write_kimi, 'state_space': _write_state_space, 'nemotron': _write_nemotron}
  return out | writers[kind](cfg, family, out) if kind in writers else out


def _write_kimi(cfg: HybridConfig, family: Family, common: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of a Kimi Linear, both nested and at the top level."""
  assert cfg.experts
  nested = {nested_name: common[field] for field, (nested_name, _) in _KIMI_SIZES.items()}
  for name, mixer in ('full_attn_layers', 'layers'), ('kda_layers', 'delta'):
    nested[name] = [number for number, layer_mixer in enumerate(cfg.mixers, 1) if layer_mixer == mixer]
  dense = cfg.experts.first_dense
  mlp_types = ['dense'] * dense + ['sparse'] * (cfg.num_layers - dense)
  return latent_fields.write(cfg, family) | dict(linear_attn_config=nested, mlp_layer_types=mlp_types)


def _write_state_space(cfg: ModelConfig, _family: Family, _common: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of a Granite 4, which may have no state space."""
  out: dict[str, Any] = {
    'shared_intermediate_size': cfg.experts.shared_size if cfg.experts else cfg.intermediate_size,
    'position_embedding_type': None if -1 in cfg.layer_ropes else 'rope',
  }
  if isinstance(cfg, HybridConfig):
    return out | dict(mamba_expand=cfg.value_heads * cfg.value_size // cfg.hidden_size)
  return out | dict(mamba_expand=2, mamba_n_heads=1)  # without effect, but readers check them


def _write_nemotron(cfg: HybridConfig, family: Family, common: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of a Nemotron-H, in its own spelling."""
  out = dict(layers_block_type=common['layer_types'], layer_norm_epsilon=cfg.norm_eps, time_step_min=cfg.step_min)
  out |= {alias: common[name] for alias, name in family.aliases.items() if name in common}
  if cfg.experts:
    out['moe_latent_size'] = cfg.experts.latent or None
    out['moe_shared_expert_intermediate_size'] = cfg.experts.shared_size
  return out
