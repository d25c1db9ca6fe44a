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
  'ntk_alpha': (('alpha',), ('factor',)),  # the factor has no effect, but readers ask for it
  'dynamic': (('factor',), ()),
  'llama3': (('factor', 'low_freq_factor', 'high_freq_factor'), ()),
  'yarn': (('factor',), ('attention_factor', 'beta_fast', 'beta_slow', 'mscale', 'mscale_all_dim', 'truncate')),
  'longrope': (('short_factor', 'long_factor'), ('attention_factor',)),
}


def ropes(
  raw: dict[str, Any], family: Family, layers: int, head_dim: int, where: str
) -> tuple[dict[str, Any], list[str]]:
  """Reads the rotary embeddings of all layers.

  Args:
    layers: their number.
    head_dim: entries of a head that may be rotated.

  Returns:
    The fields `ropes`, `layer_ropes` and `rotary_dim` of ModelConfig, and the names of
    the rope parameters that have no effect.
  """
  main, local = _rope_parameters(raw, family, where)
  off = family.rope_optional and main.get('rope_theta', raw['rope_theta']) is None
  if off:
    main['rope_theta'] = 1.0  # of the one table that a model has in any case, which no layer reads
  # In the type 'proportional' the part that turns is no matter of shapes; in latent attention it has a size of its own.
  whole = family.latent or main.get('rope_type') == 'proportional'
  dim = head_dim if whole else _rotary_dim(main, raw, family, head_dim, where)
  first, unknown = _rope(main, raw['rope_theta'], raw, family, dim, where=where)
  tables: tuple[Rope, ...] = (first,)
  by_layer = (-1,) * layers if off else ()
  if 'no_rope_layers' in family.fields:
    by_layer = _no_rope(raw, layers, where)
  if family.local_rope:
    second, more = _rope(local, raw[family.local_rope], raw, family, dim, where=where)
    unknown += more
    types = layer_types(raw, family, layers, (), where)
    if second != first and LOCAL in types:
      tables = (first, second)
      by_layer = tuple(int(t == LOCAL) for t in types)
  return dict(ropes=tables, layer_ropes=by_layer, rotary_dim=0 if dim == head_dim else dim), unknown


def _rope_parameters(raw: dict, family: Family, where: str) -> tuple[dict, dict]:
  """Returns the rope parameters, and those of sliding-window layers alone where they have some."""
  scaling, given = raw.get('rope_scaling') or {}, raw.get('rope_parameters')
  if given is None:
    given = {} if scaling else family.rope
  params = {**scaling, **given}
  nested = {FULL, LOCAL} & set(params)
  if family.local_rope and set(given) - nested:
    raise InputError(f'{where}: rope_parameters must hold {FULL} and {LOCAL}, for the two kinds of layers')
  if nested and not family.local_rope:
    raise InputError(f'{where}: rope_parameters of {sorted(nested)} not supported')
  main = {k: v for k, v in params.items() if k not in nested}
  return main | (params.get(FULL) or {}), params.get(LOCAL) or {}


def _rotary_dim(main: dict, raw: dict, family: Family, head_dim: int, where: str) -> int:
  """Returns how many entries of a head are rotated."""
  share = main.get('partial_rotary_factor', 1)
  if 'partial_rotary_factor' in family.fields:
    given = raw.get('rotary_dim') if 'rotary_dim' in family.fields else None
    share = main.get('partial_rotary_factor', raw.get('partial_rotary_factor', (given or head_dim) / head_dim))
    check_positive(share, 'partial_rotary_factor', where)
    if given not in (None, int(head_dim * share)):
      raise InputError(f'{where}: rotary_dim={given!r} beside partial_rotary_factor={share!r} of {head_dim}')
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
  rotates = raw.get('no_rope_layers')
  if rotates in (None, []):  # as published for Llama 4 Scout
    interval = raw['no_rope_layer_interval']
    rotates = [int((i + 1) % interval != 0) for i in range(layers)]
  if not isinstance(rotates, list) or len(rotates) != layers or not set(rotates) <= {0, 1}:
    raise InputError(f'{where}: no_rope_layers={rotates!r} must be {layers} times 0 or 1')
  return tuple(int(r) - 1 for r in rotates) if 0 in rotates else ()


def _rope(params: dict, theta: float, raw: dict, family: Family, dim: int, where: str) -> tuple[Rope, list[str]]:
  """Returns one Rope, and the names of its parameters that have no effect."""
  theta = params.get('rope_theta', theta)
  check_positive(theta, 'rope_theta', where)
  kind = str(params.get('rope_type', params.get('type', 'default')))
  kind = family.rope_types.get(kind, kind)
  interleaved = raw['rope_interleave'] if 'rope_interleave' in family.fields else family.interleaved
  if kind == 'default':
    return Rope(float(theta), interleaved=interleaved), _without_effect(params, ())
  if kind not in _SCALINGS:
    raise InputError(f'{where}: rope type {kind!r} is not supported (default, {", ".join(_SCALINGS)})')
  required, optional = _SCALINGS[kind]
  if missing := [n for n in required if n not in params]:
    raise InputError(f'{where}: rope type {kind} lacks {", ".join(missing)}')
  if kind == 'yarn' and QUERY_SCALE in family.fields:
    optional = (*optional, QUERY_SCALE)
  values = _scaling(kind, (*required, *optional), params, raw, family, where=where)
  for name, value in values.items():
    _check_scaling(name, value, dim, where)
  if kind == 'llama3' and values['low_freq_factor'] > values['high_freq_factor']:
    raise InputError(f'{where}: rope_parameters.low_freq_factor must not be above the high one')
  pairs = [(k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(values.items())]
  unused = _without_effect(params, (*required, *optional, 'factor'))
  return Rope(float(theta), (('rope_type', kind), *pairs), interleaved), unused


def _scaling(kind: str, names: Sequence[str], params: dict, raw: dict, family: Family, where: str) -> dict[str, Any]:
  """Returns the parameters of a scaling: those of `names` that are given, and those that follow from other fields."""
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
  """Returns the names of rope parameters besides those `used` and those that are read, or repeated, in any type."""
  read = {'rope_theta', 'rope_type', 'type', 'partial_rotary_factor', 'max_position_embeddings', ORIGINAL, *used}
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
  """Returns `ModelConfig.layer_windows`: tokens that each layer sees, 0 for all; () if all do."""
  types = [] if family.hybrid or family.chunked else layer_types(raw, family, layers, layer_ropes, where)
  size = _window(raw, family)
  if LOCAL not in types:
    return ()
  if size is None:
    raise InputError(f'{where}: layer_types has {LOCAL}, but there is no sliding_window')
  return tuple(size if t == LOCAL else 0 for t in types)


def _window(raw: dict, family: Family) -> int | None:
  off = 'use_sliding_window' in family.fields and not raw.get('use_sliding_window')
  return None if family.window is None or off else raw.get('sliding_window')


def layer_types(raw: dict[str, Any], family: Family, layers: int, layer_ropes: Sequence[int], where: str) -> list[str]:
  """Returns FULL or LOCAL for each layer: as given, or by the family's rule (`Family.window`)."""
  types = raw.get('layer_types')
  if types is not None:
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {FULL, LOCAL}:
      raise InputError(f'{where}: layer_types={types!r} must be {layers} times {FULL} or {LOCAL}')
    if 'layer_types' in family.fields:
      return types
    # Other families do not read the field, so windows in it have to be those of the rule.
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
