"""Fields of config.json that describe a mixture of experts <-> `ModelConfig.experts`.

`Family.experts` has their names. `raw` is a config.json completed by the family's defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError
from jaxpost.models.config import Experts, ModelConfig

if TYPE_CHECKING:
  from jaxpost.formats.family import Family

# The last layer with experts, in families that may end them before the last layer.
_END = 'moe_layer_end_index'


def read(raw: dict[str, Any], family: Family, where: str) -> Experts | None:
  """Returns `ModelConfig.experts`, None for dense models.

  Raises:
    InputError: for values that are impossible or not supported; it names the field.
  """
  fields = family.experts
  if fields is None or fields.optional and not raw[fields.num] or not raw.get(fields.switch, True):
    return None
  _check(raw, family, where)
  clipping, groups = {}, {}
  if fields.limit:
    clipping = dict(limit=float(raw[fields.limit]), alpha=float(raw[fields.alpha]))
  if fields.grouped:
    groups = dict(groups=raw['n_group'], top_groups=raw['topk_group'])
  found = Experts(
    num=raw[fields.num],
    top_k=raw['num_experts_per_tok'],
    size=raw[fields.size],
    normalize=raw.get('norm_topk_prob') if fields.normalize is None else fields.normalize,
    shared=raw[fields.shared] if fields.shared else 0,
    first_dense=raw[fields.first_dense] if fields.first_dense else 0,
    sigmoid=fields.sigmoid,
    choice_bias=fields.choice_bias,
    epsilon=fields.epsilon,
    scale=float(raw['routed_scaling_factor']) if fields.scaled else 1.0,
    **clipping,
    **groups,
  )
  _check_combinations(found, raw, family, where)
  return found


def _check(raw: dict[str, Any], family: Family, where: str) -> None:
  fields = family.experts
  lowest = {name: 1 for name in (fields.num, fields.size, 'num_experts_per_tok')}
  lowest |= {name: 0 for name in (fields.shared, fields.first_dense) if name}
  lowest |= dict(n_group=1, topk_group=1) if fields.grouped else {}
  for name, least in lowest.items():
    if type(raw[name]) is not int or raw[name] < least:
      raise InputError(f'{where}: {name}={raw[name]!r} must be a whole number above {least - 1}')
  scale = raw['routed_scaling_factor'] if fields.scaled else 1
  if type(scale) not in (int, float) or not scale > 0:
    raise InputError(f'{where}: routed_scaling_factor={scale!r} must be above 0')
  last = raw['num_hidden_layers'] - 1
  if _END in family.fields and raw.get(_END, -1) not in (-1, last):
    raise InputError(f'{where}: {_END}={raw[_END]!r} is not supported (only the last layer, {last})')


def _check_combinations(found: Experts, raw: dict[str, Any], family: Family, where: str) -> None:
  """Raises InputError for sizes that do not fit each other, the first that is found."""
  fields = family.experts
  size = found.num // found.groups
  layers = raw['num_hidden_layers']
  if found.limit and raw['hidden_act'] != 'silu':
    what = f'hidden_act={raw["hidden_act"]!r} is not supported (only silu)'
  elif found.top_k > found.num:
    what = f'num_experts_per_tok={found.top_k} of {found.num} experts'
  # A group is ranked by the sum of its two best experts (DeepSeek-V3, section 2.1.2).
  elif found.num % found.groups or (found.groups > 1 and size < 2):
    what = f'n_group={found.groups} of {found.num} experts is not supported'
  elif found.top_groups > found.groups:
    what = f'topk_group={found.top_groups} of {found.groups} groups is not supported'
  elif found.top_k > found.top_groups * size:
    what = f'num_experts_per_tok={found.top_k} of {found.top_groups} groups of {size} is not supported'
  elif found.first_dense >= layers:
    what = f'{fields.first_dense}={found.first_dense} of {layers} layers is not supported'
  else:
    return
  raise InputError(f'{where}: {what}')


def write(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the fields of config.json; the inverse of `read`."""
  experts, fields = cfg.experts, family.experts
  if not experts:
    return {fields.num: 0, 'num_experts_per_tok': 0} if fields else {}
  out = {
    fields.num: experts.num,
    fields.size: experts.size,
    'num_experts_per_tok': experts.top_k,
    'norm_topk_prob': experts.normalize,
    'swiglu_limit': experts.limit,
    'swiglu_alpha': experts.alpha,
    fields.shared: experts.shared,
    fields.first_dense: experts.first_dense,
    'n_group': experts.groups,
    'topk_group': experts.top_groups,
    'routed_scaling_factor': experts.scale,
    _END: cfg.num_layers - 1,
  }
  return {k: v for k, v in out.items() if k in family.fields}
