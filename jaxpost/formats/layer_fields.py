"""Fields of config.json that may differ by layer: rotary embeddings and sliding windows.

`raw` is a config.json completed by the defaults of its family.
"""

from collections.abc import Sequence
from typing import Any

from jaxpost.errors import InputError
from jaxpost.formats.config_fields import check_boolean, check_positive
from jaxpost.formats.family import FULL, LOCAL, ORIGINAL, QUERY_SCALE, Family
from jaxpost.models.config import Rope

# Type of rope scaling -> the keys it needs and those it may have.
_SCALINGS = {
  'linear': (('factor',), ()),
  'proportional': ((), ('factor', 'partial_rotary_factor')),
  'ntk_alpha': (('alpha',), ('factor',)),  # the factor has no effect, but readers require it
  'dynamic': (('factor',), ()),
  'llama3': (('factor', 'low_freq_factor', 'high_freq_factor'), ()),
  'yarn': (('factor',), ('attention_factor', 'beta_fast', 'beta_slow', 'mscale', 'mscale_all_dim', 'truncate')),
  'longrope': (('short_factor', 'long_factor'), ('attention_factor',)),
}


def ropes(
  raw: dict[str, Any], family: Family, layers: int, head_dim: int, where: str
) -> tuple[dict[str, Any], list[str]]:
  """Returns the fields `ropes`, `layer_ropes` and `rotary_dim` of ModelConfig, and the rope parameters without effect.

  `head_dim` is the number of entries of a head that may be rotated.
  """
  main, local = _rope_parameters(raw, family, where)
  unrotated = family.rope_optional and main.get('rope_theta', raw['rope_theta']) is None
  if unrotated:
    main['rope_theta'] = 1.0  # of a table that no layer reads; a model always has one
  # 'proportional' rotates some entries without changing shapes; latent attention has a separate size for them.
  all_entries = family.latent or main.get('rope_type') == 'proportional'
  dim = head_dim if all_entries else _rotary_dim(main, raw, family, head_dim, where)
  first, unknown = _rope(main, raw['rope_theta'], raw, family, dim, where=where)
  tables: tuple[Rope, ...] = (first,)
  layer_ropes = (-1,) * layers if unrotated else ()
  if 'no_rope_layers' in family.fields:
    layer_ropes = _no_rope(raw, layers, where)
  if family.local_rope:
    second, local_unknown = _rope(local, raw[family.local_rope], raw, family, dim, where=where)
    unknown += local_unknown
    types = layer_types(raw, family, layers, (), where)
    if second != first and LOCAL in types:
      tables = (first, second)
      layer_ropes = tuple(int(layer_type == LOCAL) for layer_type in types)
  return dict(ropes=tables, layer_ropes=layer_ropes, rotary_dim=0 if dim == head_dim else dim), unknown


def _rope_parameters(raw: dict, family: Family, where: str) -> tuple[dict, dict]:
  """Returns the rope parameters, and those for sliding-window layers only ({} if there are none)."""
  scaling, raw_params = raw.get('rope_scaling') or {}, raw.get('rope_parameters')
  if raw_params is None:
    raw_params = {} if scaling else family.rope
  layer_kinds = {FULL, LOCAL} & {*scaling, *raw_params}
  if family.local_rope and set(raw_params) - layer_kinds:
    raise InputError(f'{where}: rope_parameters must hold {FULL} and {LOCAL}, for the two kinds of layers')
  if layer_kinds and not family.local_rope:
    raise InputError(f'{where}: rope_parameters of {sorted(layer_kinds)} not supported')
  older, newer = (_standard(block, family) for block in (scaling, raw_params))
  for name, value in older.items():
    if newer.get(name, value) != value:
      other = f'{newer[name]!r} in rope_parameters'
      raise InputError(f'{where}: rope_scaling: {name}={value!r} contradicts {other}; remove one of the blocks')
  return older | newer, _standard(raw_params.get(LOCAL) or scaling.get(LOCAL) or {}, family)


def _standard(block: dict, family: Family) -> dict[str, Any]:
  """Returns the rope parameters of layers without a window in a block, with the newer spelling of their type."""
  params = {k: v for k, v in block.items() if k not in (FULL, LOCAL)} | (block.get(FULL) or {})
  kind = params.pop('rope_type', params.pop('type', None))
  return params if kind is None else params | {'rope_type': family.rope_types.get(str(kind), str(kind))}


def _rotary_dim(main: dict, raw: dict, family: Family, head_dim: int, where: str) -> int:
  """Returns how many entries of a head are rotated."""
  share = main.get('partial_rotary_factor', 1)
  if 'partial_rotary_factor' in family.fields:
    rotary_dim = raw.get('rotary_dim') if 'rotary_dim' in family.fields else None
    share = main.get('partial_rotary_factor', raw.get('partial_rotary_factor', (rotary_dim or head_dim) / head_dim))
    check_positive(share, 'partial_rotary_factor', where)
    if rotary_dim not in (None, int(head_dim * share)):
      raise InputError(f'{where}: rotary_dim={rotary_dim!r} contradicts partial_rotary_factor={share!r} of {head_dim}')
  elif share != 1:
    raise InputError(f'{where}: partial_rotary_factor is not supported')
  dim = int(head_dim * share)
  if dim % 2 or dim > head_dim:
    raise InputError(
      f'{where}: partial_rotary_factor={share!r} rotates {dim} of '
      f'{head_dim} entries of a head; it must be an even number of them'
    )
  return dim


def _no_rope(raw: dict, layers: int, where: str) -> tuple[int, ...]:
  """Returns layer_ropes: 0 for layers with rotary embeddings, -1 for those without."""
  has_rope = raw.get('no_rope_layers')
  if has_rope in (None, []):  # [] is published for Llama 4 Scout
    interval = raw['no_rope_layer_interval']
    has_rope = [int((i + 1) % interval != 0) for i in range(layers)]
  if not isinstance(has_rope, list) or len(has_rope) != layers or not set(has_rope) <= {0, 1}:
    raise InputError(f'{where}: no_rope_layers={has_rope!r} must be {layers} times 0 or 1')
  return tuple(int(rotated) - 1 for rotated in has_rope) if 0 in has_rope else ()


def _rope(params: dict, theta: float, raw: dict, family: Family, dim: int, where: str) -> tuple[Rope, list[str]]:
  """Returns the Rope of `params`, and the names of those that have no effect."""
  theta = params.get('rope_theta', theta)
  check_positive(theta, 'rope_theta', where)
  rope_type = params.get('rope_type', 'default')
  interleaved = raw['rope_interleave'] if 'rope_interleave' in family.fields else family.interleaved
  if rope_type == 'default':
    return Rope(float(theta), interleaved=interleaved), _without_effect(params, ())
  if rope_type not in _SCALINGS:
    raise InputError(f'{where}: rope type {rope_type!r} is not supported (default, {", ".join(_SCALINGS)})')
  required, optional = _SCALINGS[rope_type]
  if missing := [n for n in required if n not in params]:
    raise InputError(f'{where}: rope type {rope_type} lacks {", ".join(missing)}')
  if rope_type == 'yarn' and QUERY_SCALE in family.fields:
    optional = (*optional, QUERY_SCALE)
  values = _scaling(rope_type, (*required, *optional), params, raw, family, where=where)
  for name, value in values.items():
    _check_scaling(name, value, dim, where)
  if rope_type == 'llama3' and values['low_freq_factor'] > values['high_freq_factor']:
    raise InputError(f'{where}: rope_parameters.low_freq_factor must not be above the high one')
  pairs = [(k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(values.items())]
  unused = _without_effect(params, (*required, *optional, 'factor'))
  return Rope(float(theta), (('rope_type', rope_type), *pairs), interleaved), unused


def _scaling(kind: str, names: Sequence[str], params: dict, raw: dict, family: Family, where: str) -> dict[str, Any]:
  """Returns the parameters of a scaling: those in `names` that are set, and those derived from other fields."""
  length = raw['max_position_embeddings']
  original = length if kind == 'dynamic' else params.get(ORIGINAL) or length
  if ORIGINAL in family.fields:
    original = raw[ORIGINAL]
    if params.get(ORIGINAL, original) != original:
      raise InputError(f'{where}: {ORIGINAL} is {original!r}, and {params[ORIGINAL]!r} among the rope parameters')
  values = {name: params[name] for name in names if params.get(name) is not None}
  # An mscale of 0 means none, as in Hugging Face.
  values = {name: x for name, x in values.items() if x or not ('mscale' in name or name == QUERY_SCALE)}
  if kind in ('yarn', 'longrope'):
    values['factor'] = params.get('factor') or length / original
  if kind not in ('linear', 'ntk_alpha', 'proportional'):
    values[ORIGINAL] = original
  return values


def _without_effect(params: dict, used: Sequence[str]) -> list[str]:
  """Returns the names of rope parameters that are neither `used` nor read (or repeated fields) in all types."""
  read = {'rope_theta', 'rope_type', 'partial_rotary_factor', 'max_position_embeddings', ORIGINAL, *used}
  return [f'rope_parameters.{name}' for name in params if name not in read]


def _check_scaling(name: str, value: Any, dim: int, where: str) -> None:
  if name == 'truncate':
    check_boolean(value, name, where)
  elif not name.endswith(('short_factor', 'long_factor')):
    check_positive(value, f'rope_parameters.{name}', where)
  elif not isinstance(value, list) or len(value) != dim // 2:
    raise InputError(
      f'{where}: rope_parameters.{name} must be a list of {dim // 2} numbers, half the rotated entries of a head'
    )
  else:
    for x in value:
      check_positive(x, f'rope_parameters.{name}', where)


def windows(
  raw: dict[str, Any], family: Family, layers: int, layer_ropes: Sequence[int], where: str
) -> tuple[int, ...]:
  """Returns `ModelConfig.layer_windows`: the tokens that each layer attends to, 0 for all; () if all are 0."""
  types = [] if family.hybrid or family.chunked else layer_types(raw, family, layers, layer_ropes, where)
  size = _window(raw, family)
  if LOCAL not in types:
    return ()
  if size is None:
    raise InputError(f'{where}: layer_types has {LOCAL}, but there is no sliding_window')
  return tuple(size if layer_type == LOCAL else 0 for layer_type in types)


def _window(raw: dict, family: Family) -> int | None:
  disabled = 'use_sliding_window' in family.fields and not raw.get('use_sliding_window')
  return None if family.window is None or disabled else raw.get('sliding_window')


def layer_types(raw: dict[str, Any], family: Family, layers: int, layer_ropes: Sequence[int], where: str) -> list[str]:
  """Returns FULL or LOCAL for each layer: as given, or by the family's rule (`Family.window`)."""
  types = raw.get('layer_types')
  if types is not None:
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {FULL, LOCAL}:
      raise InputError(f'{where}: layer_types={types!r} must be {layers} times {FULL} or {LOCAL}')
    if 'layer_types' in family.fields:
      return types
    # Other families do not read the field, so it must agree with the rule.
    if LOCAL in types and (family.window != 'all' or set(types) != {LOCAL}):
      raise InputError(f'{where}: layer_types {sorted(set(types))} not supported')
  rule = family.window
  if rule is None or _window(raw, family) is None:
    return [FULL] * layers
  if rule == 'all':
    return [LOCAL] * layers
  if rule == 'upper':
    return [LOCAL if i >= raw['max_window_layers'] else FULL for i in range(layers)]
  if rule == 'no_rope':
    return [LOCAL if layer_ropes and layer_ropes[i] < 0 else FULL for i in range(layers)]
  pattern = 'sliding_window_pattern'
  period = raw.get(pattern, rule) if pattern in family.fields else rule
  return [LOCAL if (i + 1) % period else FULL for i in range(layers)]
