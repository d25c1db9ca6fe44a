"""Fields of config.json that differ by layer: rotary embeddings and windows, read and written."""

from jaxpost.errors import InputError
from jaxpost.models.config import ModelConfig, Rope

FULL, LOCAL = 'full_attention', 'sliding_attention'


# Type of rope scaling -> the keys it needs and those it may have.
_SCALINGS = {
  'linear': (('factor',), ()),
  'dynamic': (('factor',), ()),
  'llama3': (('factor', 'low_freq_factor', 'high_freq_factor'), ()),
  'yarn': (('factor',), ('attention_factor', 'beta_fast', 'beta_slow', 'mscale', 'mscale_all_dim', 'truncate')),
  'longrope': (('short_factor', 'long_factor'), ('attention_factor',)),
}


ORIGINAL = 'original_max_position_embeddings'


def positive(value, field: str, where: str):
  if type(value) not in (int, float) or not 0 < value < float('inf'):
    raise InputError(f'{where}: {field}={value!r} must be above 0')


def ropes(raw: dict, spec: dict, layers: int, head_dim: int, where: str) -> tuple[dict, list]:
  """(ropes, layer_ropes and rotary_dim of ModelConfig, keys nobody reads)."""
  params = {**(raw.get('rope_scaling') or {}), **(raw.get('rope_parameters') or {})}
  nested = {FULL, LOCAL} & set(params)
  if 'local_rope' in spec and set(raw.get('rope_parameters') or ()) - nested:
    raise InputError(f'{where}: rope_parameters must hold {FULL} and {LOCAL}, for the two kinds of layers')
  if nested and 'local_rope' not in spec:
    raise InputError(f'{where}: rope_parameters of {sorted(nested)} not supported')
  main = {**{k: v for k, v in params.items() if k not in nested}, **(params.get(FULL) or {})}
  share = main.get('partial_rotary_factor', 1)
  if 'partial_rotary_factor' in spec['reads']:
    share = main.get('partial_rotary_factor', raw.get('partial_rotary_factor', 1))
    positive(share, 'partial_rotary_factor', where)
  elif share != 1:
    raise InputError(f'{where}: partial_rotary_factor is not supported')
  dim = int(head_dim * share)
  if dim % 2 or dim > head_dim:
    raise InputError(
      f'{where}: partial_rotary_factor={share!r} rotates {dim} of '
      f'{head_dim} entries of a head; it must be an even number of them'
    )
  first, unknown = _rope(main, raw['rope_theta'], raw, spec, dim, where)
  out = dict(ropes=(first,), layer_ropes=(), rotary_dim=0 if dim == head_dim else dim)
  if 'no_rope_layers' in spec['reads']:
    out['layer_ropes'] = _no_rope(raw, layers, where)
  if 'local_rope' in spec:
    local = dict(params.get(LOCAL) or {})
    second, more = _rope(local, local.get('rope_theta') or raw[spec['local_rope']], raw, spec, dim, where)
    unknown = unknown + more
    types = layer_types(raw, spec, layers, (), where)
    if second != first and LOCAL in types:
      out['ropes'] = (first, second)
      out['layer_ropes'] = tuple(int(t == LOCAL) for t in types)
  return out, unknown


def _no_rope(raw: dict, layers: int, where: str) -> tuple:
  """layer_ropes: 0 of layers that rotate, -1 of those that do not."""
  rotates = raw.get('no_rope_layers')
  if rotates is None:
    every = raw['no_rope_layer_interval']
    rotates = [int((i + 1) % every != 0) for i in range(layers)]
  if not isinstance(rotates, list) or len(rotates) != layers or not set(rotates) <= {0, 1}:
    raise InputError(f'{where}: no_rope_layers={rotates!r} must be {layers} times 0 or 1')
  return tuple(int(r) - 1 for r in rotates) if 0 in rotates else ()


def _rope(params: dict, theta, raw: dict, spec: dict, dim: int, where: str) -> tuple[Rope, list]:
  """One Rope of its parameters, and the keys of those that nobody reads."""
  theta = params.get('rope_theta', theta)
  positive(theta, 'rope_theta', where)
  kind = str(params.get('rope_type', params.get('type', 'default')))
  kind = spec.get('rope_types', {}).get(kind, kind)
  known = {'rope_theta', 'rope_type', 'type', 'partial_rotary_factor'}
  if kind == 'default':
    return Rope(float(theta)), _extra(params, known | {ORIGINAL})
  if kind not in _SCALINGS:
    raise InputError(f'{where}: rope type {kind!r} is not supported (default, {", ".join(_SCALINGS)})')
  needs, may = _SCALINGS[kind]
  if missing := [n for n in needs if n not in params]:
    raise InputError(f'{where}: rope type {kind} lacks {", ".join(missing)}')
  length = raw['max_position_embeddings']
  original = kind != 'dynamic' and params.get(ORIGINAL) or length
  if ORIGINAL in spec['reads']:
    original = raw[ORIGINAL]
    if params.get(ORIGINAL, original) != original:
      raise InputError(f'{where}: {ORIGINAL} is {original!r}, and {params[ORIGINAL]!r} among the rope parameters')
  values = {
    n: params[n] for n in (*needs, *may) if params.get(n) is not None and (params[n] or 'mscale' not in n)
  }  # 0 is none, as in HF
  if kind in ('yarn', 'longrope'):
    values['factor'] = params.get('factor') or length / original
  if kind != 'linear':
    values[ORIGINAL] = original
  for name, value in values.items():
    _check_scaling(name, value, dim, where)
  if kind == 'llama3' and (values['low_freq_factor'] >= values['high_freq_factor']):
    raise InputError(f'{where}: rope_parameters.low_freq_factor must be below the high one')
  pairs = [(k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(values.items())]
  return Rope(float(theta), (('rope_type', kind), *pairs)), _extra(
    params, known | set(needs) | set(may) | {ORIGINAL, 'factor'}
  )


def _extra(params: dict, known: set) -> list:
  return [f'rope_parameters.{k}' for k in params if k not in known]


def _check_scaling(name: str, value, dim: int, where: str):
  if name == 'truncate' and type(value) is bool:
    return
  if name == 'truncate':
    raise InputError(f'{where}: {name}={value!r} must be true or false')
  if not name.endswith(('short_factor', 'long_factor')):
    return positive(value, f'rope_parameters.{name}', where)
  if not isinstance(value, list) or len(value) != dim // 2:
    raise InputError(
      f'{where}: rope_parameters.{name} must be a list of {dim // 2} numbers, half the rotated entries of a head'
    )
  for x in value:
    positive(x, f'rope_parameters.{name}', where)


def write_rope(cfg: ModelConfig, spec: dict, types: list) -> dict:
  """In both spellings: older readers know rope_theta and rope_scaling."""

  def block(rope):
    pairs = {k: list(v) if isinstance(v, tuple) else v for k, v in rope.scaling}
    if pairs.get('rope_type') == 'dynamic':
      del pairs[ORIGINAL]
    share = (
      {'partial_rotary_factor': (cfg.rotary_dim or cfg.head_dim) / cfg.head_dim}
      if ('partial_rotary_factor' in spec['reads'])
      else {}
    )
    return {'rope_type': 'default', **pairs, **share, 'rope_theta': rope.theta}

  main = block(cfg.ropes[0])
  out = {
    'rope_theta': cfg.ropes[0].theta,
    'rope_parameters': main,
    'rope_scaling': {k: v for k, v in main.items() if k != 'rope_theta'} if cfg.ropes[0].scaling else None,
  }
  if 'partial_rotary_factor' in main:
    out['partial_rotary_factor'] = main['partial_rotary_factor']
  if ORIGINAL in spec['reads'] and ORIGINAL in main:
    out[ORIGINAL] = main[ORIGINAL]
  if 'local_rope' in spec:
    other = cfg.ropes[-1]
    out['rope_parameters'] = {FULL: main, LOCAL: block(other)}
    out.setdefault(spec['local_rope'], other.theta)
  return out


def windows(raw: dict, spec: dict, layers: int, ropes: tuple, where: str) -> tuple:
  """ModelConfig.layer_windows."""
  types = layer_types(raw, spec, layers, ropes, where)
  size = _window(raw, spec)
  if LOCAL not in types:
    return ()
  if size is None:
    raise InputError(f'{where}: layer_types has {LOCAL}, but there is no sliding_window')
  return tuple(size if t == LOCAL else 0 for t in types)


def _window(raw: dict, spec: dict):
  off = 'use_sliding_window' in spec['reads'] and not raw.get('use_sliding_window')
  return raw.get('sliding_window') if 'window' in spec and not off else None


def layer_types(raw: dict, spec: dict, layers: int, ropes: tuple, where: str) -> list[str]:
  """The type of each layer, given or by the family's rule."""
  types, rule = raw.get('layer_types'), spec.get('window')
  size = _window(raw, spec)
  if types is not None and (not isinstance(types, list) or len(types) != layers or not set(types) <= {FULL, LOCAL}):
    raise InputError(f'{where}: layer_types={types!r} must be {layers} times {FULL} or {LOCAL}')
  if 'layer_types' not in spec['reads'] and LOCAL in (types or ()):
    if rule != 'all' or set(types) != {LOCAL}:
      raise InputError(f'{where}: layer_types {sorted(set(types))} not supported')
  if types is not None and 'layer_types' in spec['reads']:
    return types
  pattern = 'sliding_window_pattern'
  local = {
    'all': lambda i: True,
    'upper': lambda i: i >= raw['max_window_layers'],
    'no_rope': lambda i: ropes and ropes[i] < 0,
  }.get(rule, lambda i: (i + 1) % (raw.get(pattern, rule) if pattern in spec['reads'] else rule))
  return [LOCAL if size is not None and local(i) else FULL for i in range(layers)]
