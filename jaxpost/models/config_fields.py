"""Fields of a `config.json` <-> fields of ModelConfig, for any family.

Whether a family has a field stands in `families.FAMILIES`, whose entries are
the `spec` here; `raw` is its `config.json` with the family's defaults.
"""

import dataclasses

from jaxpost.errors import InputError
from jaxpost.models.config import Experts, ModelConfig, Rope

_FULL, _LOCAL = 'full_attention', 'sliding_attention'
_ACTIVATIONS = {
    'silu': 'silu', 'swish': 'silu', 'gelu': 'gelu',
    'gelu_pytorch_tanh': 'gelu_tanh', 'gelu_new': 'gelu_tanh'}
# Field -> ModelConfig's, and the way there and back; None is off.
_SCALARS = {
    'query_pre_attn_scalar': (
        'attention_scale', lambda x: x ** -0.5, lambda y: _plain(y ** -2)),
    'attention_multiplier': ('attention_scale', float, float),
    'attn_logit_softcapping': (
        'attention_softcap', lambda x: x or 0.0, lambda y: y or None),
    'final_logit_softcapping': (
        'logit_softcap', lambda x: x or 0.0, lambda y: y or None),
    'logits_scaling': ('logit_divisor', float, float),
    'embedding_multiplier': ('embed_scale', float, float),
    'residual_multiplier': ('residual_scale', float, float),
}
_MAY_BE_OFF = ('attn_logit_softcapping', 'final_logit_softcapping')
_BIASES = {'attention_bias': ('q', 'k', 'v', 'o'),
           'mlp_bias': ('gate', 'up', 'down')}
# Of families that do not read these, what says nothing; else it is refused.
_NEUTRAL = {
    'attention_bias': (False, None), 'mlp_bias': (False, None),
    'use_sliding_window': (False, None), 'sliding_window': (None,),
    'auto_map': (None,), 'partial_rotary_factor': (1, None),
    'pretraining_tp': (1, None), 'use_bidirectional_attention': (False, None),
    'quantization_config': (None,), 'no_rope_layers': (None,),
    'decoder_sparse_step': (1, None), 'mlp_only_layers': ([], None),
    'router_jitter_noise': (0.0, None), 'clip_qkv': (None,),
}
READ = frozenset('''
    vocab_size hidden_size intermediate_size num_hidden_layers hidden_act
    num_attention_heads num_key_value_heads head_dim rope_theta rms_norm_eps
    tie_word_embeddings max_position_embeddings rope_scaling rope_parameters
    layer_types
    '''.split())
# These do not change the function computed here.
_IGNORED = frozenset('''
    architectures model_type torch_dtype dtype transformers_version use_cache
    bos_token_id eos_token_id pad_token_id attention_dropout initializer_range
    _name_or_path output_attentions output_hidden_states return_dict
    chunk_size_feed_forward id2label label2id is_encoder_decoder problem_type
    cache_implementation max_window_layers output_router_logits
    router_aux_loss_coef
    '''.split())
# Type of rope scaling -> the keys it needs and those it may have.
_SCALINGS = {
    'linear': (('factor',), ()),
    'dynamic': (('factor',), ()),
    'llama3': (('factor', 'low_freq_factor', 'high_freq_factor'), ()),
    'yarn': (('factor',), ('attention_factor', 'beta_fast', 'beta_slow',
                           'mscale', 'mscale_all_dim', 'truncate')),
    'longrope': (('short_factor', 'long_factor'), ('attention_factor',)),
}
_ORIGINAL = 'original_max_position_embeddings'


def unread(raw: dict, spec: dict) -> set:
  """Names of the fields of a config.json that have no effect and might."""
  silent = {*READ, *_IGNORED, *_NEUTRAL, *spec['reads'],
            spec.get('local_rope'), spec.get('activation_field'),
            *spec.get('ignored', ()), *spec.get('reported', ())}
  loud = {*spec.get('reported', ())}
  if 'activation_field' in spec:
    loud.add('hidden_act')
  return set(raw) - silent | {k for k in loud if raw.get(k)}


def check(raw: dict, spec: dict, where: str):
  """InputError for what is not built, by name, and for impossible values."""
  for field in ('quantization_config', 'rope_scaling', 'rope_parameters'):
    if not isinstance(raw.get(field) or {}, dict):
      raise InputError(f'{where}: {field}={raw[field]!r} must be an object')
  method = (raw.get('quantization_config') or {}).get('quant_method')
  if method and method == spec.get('quantized'):
    raw = raw | {'quantization_config': None}
  for field, values in _NEUTRAL.items():
    known = field in spec['reads'] or field in spec.get('reported', ())
    if not known and raw.get(field) not in values:
      raise InputError(
          f'{where}: {field}={raw[field]!r} is not supported (only '
          f'{values[0]!r})')
  for field in ('use_sliding_window', 'tie_word_embeddings',
                'norm_topk_prob', *_BIASES):
    if raw.get(field) not in (True, False, None):
      raise InputError(
          f'{where}: {field}={raw[field]!r} must be true or false')
  optional = ('head_dim', 'num_key_value_heads', 'sliding_window')
  for field in ('vocab_size', 'hidden_size', 'intermediate_size',
                'num_hidden_layers', 'num_attention_heads', 'max_window_layers',
                'sliding_window_pattern', 'no_rope_layer_interval',
                'max_position_embeddings', 'num_experts', 'num_local_experts',
                'num_experts_per_tok', 'moe_intermediate_size', _ORIGINAL,
                'qk_rope_head_dim', 'n_routed_experts', *optional):
    value = raw.get(field)
    low = 0 if field == 'max_window_layers' else 1
    missing = field not in raw or (value is None and field in optional)
    if not missing and (type(value) is not int or value < low):
      raise InputError(
          f'{where}: {field}={value!r} must be a whole number above {low - 1}')
  for field in ('rope_theta', 'rms_norm_eps', *_SCALARS, 'swiglu_limit',
                'swiglu_alpha', 'partial_rotary_factor',
                'rope_local_base_freq'):
    if field in raw and not (field in _MAY_BE_OFF and raw[field] is None):
      _positive(raw[field], field, where)
  if type(raw['tie_word_embeddings']) is not bool:
    raise InputError(
        f'{where}: tie_word_embeddings={raw["tie_word_embeddings"]!r} must '
        'be true or false')
  heads = raw.get('num_attention_heads')
  kv_heads = raw.get('num_key_value_heads') or heads
  if heads and heads % kv_heads:
    raise InputError(
        f'{where}: num_key_value_heads={kv_heads} must divide '
        f'num_attention_heads={heads}')


def _positive(value, field: str, where: str):
  if type(value) not in (int, float) or not 0 < value < float('inf'):
    raise InputError(f'{where}: {field}={value!r} must be above 0')


def activation(raw: dict, spec: dict, where: str) -> str:
  """ModelConfig.activation."""
  known = _ACTIVATIONS | spec.get('activations', {})
  field = spec.get('activation_field', 'hidden_act')
  value = raw[field] or spec.get('defaults', {}).get(field, 'silu')
  if value not in known:
    raise InputError(
        f'{where}: {field}={value!r} is not supported (only '
        f'{", ".join(known)})')
  return known[value]


def biases(raw: dict, spec: dict) -> tuple:
  return tuple(name for field, names in _BIASES.items()
               if field in spec['reads'] and raw.get(field) for name in names)


def experts(raw: dict, spec: dict, where: str) -> Experts | None:
  """ModelConfig.experts."""
  if not (said := spec.get('experts')):
    return None
  found = Experts(
      raw[said['num']], raw['num_experts_per_tok'], raw[said['size']],
      said.get('normalize', raw.get('norm_topk_prob')),
      *(float(raw[said[k]]) for k in ('limit', 'alpha') if k in said))
  if found.limit and raw['hidden_act'] != 'silu':
    raise InputError(f'{where}: hidden_act={raw["hidden_act"]!r} is not '
                     'supported (only silu)')
  if found.top_k > found.num:
    raise InputError(
        f'{where}: num_experts_per_tok={found.top_k} of {found.num} experts')
  return found


def scalars(raw: dict, spec: dict) -> dict:
  """The ModelConfig fields that are one number here and there."""
  return {_SCALARS[f][0]: _SCALARS[f][1](raw[f])
          for f in spec['reads'] if f in _SCALARS}


def _plain(x: float):
  """Without what rounding left; whole numbers as such."""
  x = float(f'{x:.12g}')
  return int(x) if x == int(x) else x


def windows(raw: dict, spec: dict, layers: int, ropes: tuple,
            where: str) -> tuple:
  """ModelConfig.layer_windows."""
  types = layer_types(raw, spec, layers, ropes, where)
  size = _window(raw, spec)
  if _LOCAL not in types:
    return ()
  if size is None:
    raise InputError(
        f'{where}: layer_types has {_LOCAL}, but there is no sliding_window')
  return tuple(size if t == _LOCAL else 0 for t in types)


def _window(raw: dict, spec: dict):
  off = 'use_sliding_window' in spec['reads'] and not raw.get(
      'use_sliding_window')
  return raw.get('sliding_window') if 'window' in spec and not off else None


def layer_types(raw: dict, spec: dict, layers: int, ropes: tuple,
                where: str) -> list[str]:
  """The type of each layer, given or by the family's rule."""
  types, rule = raw.get('layer_types'), spec.get('window')
  size = _window(raw, spec)
  if types is not None and (
      not isinstance(types, list) or len(types) != layers
      or not set(types) <= {_FULL, _LOCAL}):
    raise InputError(
        f'{where}: layer_types={types!r} must be {layers} times {_FULL} or '
        f'{_LOCAL}')
  if 'layer_types' not in spec['reads'] and _LOCAL in (types or ()):
    if rule != 'all' or set(types) != {_LOCAL}:
      raise InputError(f'{where}: layer_types {sorted(set(types))} not '
                       'supported')
  if types is not None and 'layer_types' in spec['reads']:
    return types
  pattern = 'sliding_window_pattern'
  local = {
      'all': lambda i: True,
      'upper': lambda i: i >= raw['max_window_layers'],
      'no_rope': lambda i: ropes and ropes[i] < 0,
  }.get(rule, lambda i: (i + 1) % (
      raw.get(pattern, rule) if pattern in spec['reads'] else rule))
  return [_LOCAL if size is not None and local(i) else _FULL
          for i in range(layers)]


def ropes(raw: dict, spec: dict, layers: int, head_dim: int,
          where: str) -> tuple[dict, list]:
  """(ropes, layer_ropes and rotary_dim of ModelConfig, keys nobody reads)."""
  params = {**(raw.get('rope_scaling') or {}),
            **(raw.get('rope_parameters') or {})}
  nested = {_FULL, _LOCAL} & set(params)
  if 'local_rope' in spec and set(raw.get('rope_parameters') or ()) - nested:
    raise InputError(
        f'{where}: rope_parameters must hold {_FULL} and {_LOCAL}, for the '
        'two kinds of layers')
  if nested and 'local_rope' not in spec:
    raise InputError(f'{where}: rope_parameters of {sorted(nested)} not '
                     'supported')
  main = {**{k: v for k, v in params.items() if k not in nested},
          **(params.get(_FULL) or {})}
  share = main.get('partial_rotary_factor', 1)
  if 'partial_rotary_factor' in spec['reads']:
    share = main.get('partial_rotary_factor',
                     raw.get('partial_rotary_factor', 1))
    _positive(share, 'partial_rotary_factor', where)
  elif share != 1:
    raise InputError(f'{where}: partial_rotary_factor is not supported')
  dim = int(head_dim * share)
  if dim % 2 or dim > head_dim:
    raise InputError(
        f'{where}: partial_rotary_factor={share!r} rotates {dim} of '
        f'{head_dim} entries of a head; it must be an even number of them')
  first, unknown = _rope(main, raw['rope_theta'], raw, spec, dim, where)
  out = dict(ropes=(first,), layer_ropes=(),
             rotary_dim=0 if dim == head_dim else dim)
  if 'no_rope_layers' in spec['reads']:
    out['layer_ropes'] = _no_rope(raw, layers, where)
  if 'local_rope' in spec:
    local = dict(params.get(_LOCAL) or {})
    second, more = _rope(local, local.get('rope_theta') or raw[
        spec['local_rope']], raw, spec, dim, where)
    unknown = unknown + more
    types = layer_types(raw, spec, layers, (), where)
    if second != first and _LOCAL in types:
      out['ropes'] = (first, second)
      out['layer_ropes'] = tuple(int(t == _LOCAL) for t in types)
  return out, unknown


def _no_rope(raw: dict, layers: int, where: str) -> tuple:
  """layer_ropes: 0 of layers that rotate, -1 of those that do not."""
  rotates = raw.get('no_rope_layers')
  if rotates is None:
    every = raw['no_rope_layer_interval']
    rotates = [int((i + 1) % every != 0) for i in range(layers)]
  if not isinstance(rotates, list) or len(rotates) != layers or not set(
      rotates) <= {0, 1}:
    raise InputError(
        f'{where}: no_rope_layers={rotates!r} must be {layers} times 0 or 1')
  return tuple(int(r) - 1 for r in rotates) if 0 in rotates else ()


def _rope(params: dict, theta, raw: dict, spec: dict, dim: int,
          where: str) -> tuple[Rope, list]:
  """One Rope of its parameters, and the keys of those that nobody reads."""
  theta = params.get('rope_theta', theta)
  _positive(theta, 'rope_theta', where)
  kind = str(params.get('rope_type', params.get('type', 'default')))
  kind = spec.get('rope_types', {}).get(kind, kind)
  known = {'rope_theta', 'rope_type', 'type', 'partial_rotary_factor'}
  if kind == 'default':
    return Rope(float(theta)), _extra(params, known | {_ORIGINAL})
  if kind not in _SCALINGS:
    raise InputError(
        f'{where}: rope type {kind!r} is not supported (default, '
        f'{", ".join(_SCALINGS)})')
  needs, may = _SCALINGS[kind]
  if missing := [n for n in needs if n not in params]:
    raise InputError(f'{where}: rope type {kind} lacks {", ".join(missing)}')
  length = raw['max_position_embeddings']
  original = kind != 'dynamic' and params.get(_ORIGINAL) or length
  if _ORIGINAL in spec['reads']:
    original = raw[_ORIGINAL]
    if params.get(_ORIGINAL, original) != original:
      raise InputError(
          f'{where}: {_ORIGINAL} is {original!r}, and '
          f'{params[_ORIGINAL]!r} among the rope parameters')
  values = {n: params[n] for n in (*needs, *may) if params.get(n) is not None
            and (params[n] or 'mscale' not in n)}  # 0 is none, as in HF
  if kind in ('yarn', 'longrope'):
    values['factor'] = params.get('factor') or length / original
  if kind != 'linear':
    values[_ORIGINAL] = original
  for name, value in values.items():
    _check_scaling(name, value, dim, where)
  if kind == 'llama3' and (
      values['low_freq_factor'] >= values['high_freq_factor']):
    raise InputError(
        f'{where}: rope_parameters.low_freq_factor must be below the high one')
  pairs = [(k, tuple(v) if isinstance(v, list) else v)
           for k, v in sorted(values.items())]
  return Rope(float(theta), (('rope_type', kind), *pairs)), _extra(
      params, known | set(needs) | set(may) | {_ORIGINAL, 'factor'})


def _extra(params: dict, known: set) -> list:
  return [f'rope_parameters.{k}' for k in params if k not in known]


def _check_scaling(name: str, value, dim: int, where: str):
  if name == 'truncate' and type(value) is bool:
    return
  if name == 'truncate':
    raise InputError(f'{where}: {name}={value!r} must be true or false')
  if not name.endswith(('short_factor', 'long_factor')):
    return _positive(value, f'rope_parameters.{name}', where)
  if not isinstance(value, list) or len(value) != dim // 2:
    raise InputError(f'{where}: rope_parameters.{name} must be a list of '
                     f'{dim // 2} numbers, half the rotated entries of a head')
  for x in value:
    _positive(x, f'rope_parameters.{name}', where)


def write(cfg: ModelConfig, spec: dict) -> dict:
  """The fields of a config.json that say what `cfg` does."""
  reads, types = spec['reads'], [
      _LOCAL if size else _FULL for size in cfg.layer_windows] or [
          _FULL] * cfg.num_layers
  local = _LOCAL in types
  names = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
  out = {spec.get('activation_field', 'hidden_act'): names[cfg.activation],
         **_write_rope(cfg, spec, types)}
  for field in reads:
    if field in _SCALARS:
      ours, _, back = _SCALARS[field]
      out[field] = back(dataclasses.asdict(cfg)[ours])
    if field in _BIASES:
      out[field] = set(_BIASES[field]) <= set(cfg.biases)
  every = {
      'sliding_window': max(cfg.layer_windows, default=None),
      'layer_types': types, 'use_sliding_window': local,
      'max_window_layers': types.index(_LOCAL) if local else cfg.num_layers,
      'no_rope_layers': [1 + i for i in cfg.layer_ropes] or [
          1] * cfg.num_layers}
  if cfg.experts:
    said, e = spec['experts'], cfg.experts
    every |= {said['num']: e.num, said['size']: e.size,
              'num_experts_per_tok': e.top_k, 'norm_topk_prob': e.normalize,
              'swiglu_limit': e.limit, 'swiglu_alpha': e.alpha}
  out |= {k: v for k, v in every.items() if k in reads}
  return out | {k: out[v] for k, v in spec.get('aliases', {}).items()}


def _write_rope(cfg: ModelConfig, spec: dict, types: list) -> dict:
  """In both spellings: older readers know rope_theta and rope_scaling."""
  def block(rope):
    pairs = {k: list(v) if isinstance(v, tuple) else v
             for k, v in rope.scaling}
    if pairs.get('rope_type') == 'dynamic':
      del pairs[_ORIGINAL]
    share = {'partial_rotary_factor': (
        cfg.rotary_dim or cfg.head_dim) / cfg.head_dim} if (
            'partial_rotary_factor' in spec['reads']) else {}
    return {'rope_type': 'default', **pairs, **share,
            'rope_theta': rope.theta}

  main = block(cfg.ropes[0])
  out = {'rope_theta': cfg.ropes[0].theta, 'rope_parameters': main,
         'rope_scaling': {k: v for k, v in main.items() if k != 'rope_theta'}
         if cfg.ropes[0].scaling else None}
  if 'partial_rotary_factor' in main:
    out['partial_rotary_factor'] = main['partial_rotary_factor']
  if _ORIGINAL in spec['reads'] and _ORIGINAL in main:
    out[_ORIGINAL] = main[_ORIGINAL]
  if 'local_rope' in spec:
    other = cfg.ropes[-1]
    out['rope_parameters'] = {_FULL: main, _LOCAL: block(other)}
    out.setdefault(spec['local_rope'], other.theta)
  return out
