"""Adapter folders of the `peft` library, in and out.

A folder has adapter_config.json and adapter_model.safetensors; its tensors
are the adapter rows of the parameter table under their HF names. Those of
experts are written a tensor for each, which `peft` puts together for the
modules of its `transformers`; what it has put together is read, too. Matrices
that a family keeps in one tensor have one adapter there (`_kept`).

Legend: E experts, r rank, F size of an expert.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import pathlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from etils import epath

from jaxpost.distributed import transfer
from jaxpost.errors import InputError
from jaxpost.formats import families, hf_export, model_folder, tensor_layout, tensor_reader
from jaxpost.models import layers, lora, parameters, transformer
from jaxpost.models import model as model_lib
from jaxpost.storage import object_store, seals

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.model import Model

CONFIG, _WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
# Fields that change the function, and the values at which they do not.
_PLAIN = {
  'peft_type': ('LORA',),
  'bias': ('none',),
  'use_dora': (False,),
  'fan_in_fan_out': (False,),
  'lora_bias': (False,),
  'use_qalora': (False,),
  'alora_invocation_tokens': (None,),
  'layers_to_transform': (None,),
  'layer_replication': (None,),
  'modules_to_save': (None, [], ['score']),
  'trainable_token_indices': (None,),
  # Others, as PiSSA, change the weights below, too.
  'init_lora_weights': (True, False, 'gaussian', 'eva', 'orthogonal'),
}


def read_spec(folder: epath.PathLike, cfg: ModelConfig) -> tuple:
  """`ModelConfig.lora` of an adapter folder, for the model `cfg`.

  Reads headers only. InputError where the folder is no adapter of it.
  """
  folder = model_folder.opened(folder)
  if not (folder / CONFIG).is_file():
    raise InputError(f'{folder}: no folder of an adapter (it has no {CONFIG})')
  raw = object_store.read_json(folder / CONFIG)
  for field, values in _PLAIN.items():
    if field in raw and raw[field] not in values:
      raise InputError(f'{folder / CONFIG}: {field}={raw[field]!r} is not supported (only {values[0]!r})')
  rank, alpha = raw.get('r'), raw.get('lora_alpha')
  if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
    raise InputError(f'{folder / CONFIG}: r={rank!r} and lora_alpha={alpha!r} must be a rank and a number')
  _check_patterns(folder / CONFIG, raw, cfg)
  with contextlib.ExitStack() as stack:
    have, every, names = _open(folder, raw, cfg, stack)
    paths = [
      names[path.removeprefix(f'{parameters.ADAPTER_ROOT}/')[:-2]]
      for path, kept in every.items()
      if kept.names[0] in have and path.endswith('/a')
    ]
    if not paths:
      first = next(iter(every.values())).names[0]
      raise _other(folder, f'no tensor like {first} is in it')
    if len({name.partition('/')[0] for name in names.values()}) == 1:
      paths = [path.partition('/')[2] for path in paths]  # of one stack: short
    spec = (rank, float(alpha), bool(raw.get('use_rslora')), '|'.join(paths))
    plain = model_lib.build(dataclasses.replace(cfg, lora=()))
    model = lora.with_adapters(plain, dataclasses.replace(cfg, lora=spec))
    _check(folder, _kept(model, _with_own_a(raw)), have)
  return spec


def _check_patterns(path, raw: dict, cfg: ModelConfig):
  """InputError for other ranks than `r`, but of matrices in one tensor.

  Those have so many times the rank and alpha as there are of them.
  """
  given = {k: raw.get(k) or {} for k in ('rank_pattern', 'alpha_pattern')}
  for field, patterns in given.items():
    if not isinstance(patterns, dict):
      raise InputError(f'{path}: {field}={patterns!r} must be an object')
  names = [k.names[0] for k in tensor_layout.table(dataclasses.replace(cfg, lora=())).values()]
  parts = {
    name.split('.')[-2]: n for name, n in collections.Counter(names).items() if n > 1 and name.endswith('.weight')
  }
  if cfg.experts and not families.of_model(cfg.family).fused:
    parts['gate_up_proj'] = 2  # in `peft`
  wanted = {
    field: {k: x * parts.get(k.rpartition('.')[2], 0) for k in given['rank_pattern']}
    for field, x in (('rank_pattern', raw['r']), ('alpha_pattern', raw['lora_alpha']))
  }
  if any(given.values()) and (given != wanted or raw.get('use_rslora')):
    said = ', '.join(f'{k}={v!r}' for k, v in given.items() if v)
    some = ', '.join(f'{n} times r and lora_alpha for {k}' for k, n in parts.items()) or 'none of this model'
    raise InputError(f'{path}: {said} is not supported (only {some}, without use_rslora)')


def _with_own_a(raw: dict) -> set:
  """The modules whose matrices have an A each."""
  return {k.rpartition('.')[2] for k in raw.get('rank_pattern') or {}}


def _open(folder, raw: dict, cfg: ModelConfig, stack) -> tuple:
  """(tensors, {path: `Stored`} of all possible adapters, {path: its name})."""
  table = transformer.param_table(dataclasses.replace(cfg, lora=()))
  names = {path: lora.target_name(path, table[path]) for path in lora.targets(table)}
  every = tensor_layout.table(
    cfg, lora.adapter_rows(table, dataclasses.replace(cfg, lora=(1, 1.0, False, '|'.join(names.values()))))
  )
  have = model_folder.open_file(folder / _WEIGHTS, stack)
  given = raw.get('target_parameters') or []
  if not isinstance(given, list) or any(type(x) is not str for x in given):
    raise InputError(f'{folder / CONFIG}: target_parameters={given!r} must be a list of names')
  given = {x.rpartition('.')[2] for x in given}
  if given:
    _check_experts(folder / CONFIG, given, cfg)
    have = _apart(folder, have, given, raw, every, cfg=cfg)
  return have, every, names


def _check_experts(path, given: set, cfg: ModelConfig):
  if given - {'gate_up_proj', 'down_proj'} or not cfg.experts or families.of_model(cfg.family).fused:
    raise InputError(
      f'{path}: target_parameters={sorted(given)} is not '
      'supported (only gate_up_proj and down_proj of experts, '
      'of families whose folders have a tensor for each)'
    )


@dataclasses.dataclass(frozen=True)
class _Part:
  """One expert's part of a tensor that holds all experts."""

  read: Callable
  shape: list
  index: tuple

  def get_shape(self):
    return [len(range(*s.indices(n))) for s, n in zip(self.index, self.shape)]

  def __getitem__(self, index):
    return self.read()[self.index][index]


def _apart(folder, have: dict, given: set, raw: dict, every: dict, cfg: ModelConfig) -> dict:
  """Tensors of single experts in place of those that `peft` keeps of all.

  There A is [E r, in] and B [out, r E], in which all experts are beside each
  other in each rank. Of gate and up B is [2 F, ...]; they have one A, or, of
  rank 2 r, one each.
  """
  e, f, r = cfg.experts.num, cfg.experts.size, raw['r']
  pairs, out = bool(raw.get('rank_pattern')), dict(have)

  @functools.lru_cache(maxsize=1)
  def whole(name, both):
    value = have[name][:]
    if both and (value[f:, : r * e].any() or value[:f, r * e :].any()):
      raise _other(folder, f'tensor {name} mixes gate and up')
    return value

  for path, kept in every.items():
    name, side = path.split('/')[-2:]
    fused = 'down_proj' if name == 'down' else 'gate_up_proj'
    if kept.spec.stack < 2 or fused not in given:
      continue
    inner = 'base_layer.' if fused != 'down_proj' and len(given) > 1 else ''
    rank = r * (1 + (pairs and name != 'down'))
    skip = r * (pairs and name == 'up')
    for at, own in enumerate(kept.names):
      layer, i = kept.spec.number(at // e), at % e
      theirs = f'base_model.model.model.layers.{layer}.mlp.experts.{inner}lora_{side.upper()}.weight'
      if theirs not in have:
        continue
      shape = have[theirs].get_shape()
      if shape[side == 'b'] != e * rank:
        raise _other(folder, f'tensor {theirs} has shape {shape}')
      rows = {'gate': slice(f), 'up': slice(f, None)}.get(name, slice(None))
      index = (
        (slice(i * rank + skip, i * rank + skip + r), slice(None))
        if (side == 'a')
        else (rows, slice(i + skip * e, (skip + r) * e, e))
      )
      out.pop(theirs, None)
      out[own] = _Part(functools.partial(whole, theirs, side == 'b' and rank > r), shape, index)
  return out


def base_of(folder: epath.PathLike) -> str:
  """Name or folder of the model that an adapter was trained on."""
  return object_store.read_json(model_folder.opened(folder) / CONFIG).get('base_model_name_or_path') or ''


def is_judge(folder: epath.PathLike) -> bool:
  """Returns True if an adapter folder holds a scalar head of a reward model."""
  path = model_folder.opened(folder) / CONFIG
  return path.is_file() and object_store.read_json(path).get('modules_to_save') == ['score']


def _other(folder, why) -> InputError:
  return InputError(f'{folder / _WEIGHTS}: {why}; the adapter is of another model than this one')


def _kept(model: Model, own_a: set | None = None) -> dict:
  """Returns the places of the table's rows in an adapter folder: path -> `Stored`.

  own_a: modules of several matrices where each has rows of A, and columns of
    B, of its own; None is all. In others they share A.
  """
  rows = {p: s for p, s in model.table.items() if parameters.is_adapter(p)}
  if model.config.num_labels:
    score = model.table['score']
    rows['score'] = dataclasses.replace(score, hf=f'base_model.model.{score.hf}')
  kept = tensor_layout.table(model.config, rows)
  _check_written(model, kept)
  below = tensor_layout.table(model.config, (model.base or model).table)
  count = collections.Counter(k.names[0] for k in below.values())
  here = collections.Counter(k.names[0] for k in kept.values())
  for path in [p[:-2] for p in rows if p.endswith('/a')]:
    a, b = kept[f'{path}/a'], kept[f'{path}/b']
    parts = count[below[path.removeprefix(f'{parameters.ADAPTER_ROOT}/')].names[0]]
    if here[a.names[0]] < parts:
      raise InputError(
        f'{a.names[0]}: is of {parts} matrices in `peft`, which '
        'this family keeps in one tensor: all need adapters, '
        'or none'
      )
    if own_a is None or _module(a) in own_a:
      kept[f'{path}/b'] = dataclasses.replace(b, column=a.first, shape=(b.shape[0], a.shape[0]))
    else:
      kept[f'{path}/a'] = dataclasses.replace(a, first=0, shape=(a.shape[0] // parts, a.shape[1]))
  return kept


def _module(kept: tensor_layout.Stored) -> str:
  return kept.names[0].split('.lora_')[0].rpartition('.')[2]


def _check_written(model: Model, kept: dict):
  """InputError where `peft` would not put adapters of experts together."""
  paths = {path[:-2]: k for path, k in kept.items() if path.endswith('/a')}
  experts = {p.rpartition('/')[2] for p, k in paths.items() if k.spec.stack > 1}
  taken = {_module(k) for k in paths.values() if k.spec.stack > 1}
  if not experts:
    return
  if model.config.activation in layers.UNGATED:
    raise InputError('adapters of experts without a gate are in the merged export only')
  if len(experts & {'gate', 'up'}) == 1:
    raise InputError('experts/gate and experts/up are one matrix in `peft`: both need adapters, or neither')
  if families.of_model(model.config.family).fused or any(
    _module(k) in taken for k in paths.values() if k.spec.stack == 1
  ):
    raise InputError(f'`peft` cannot tell which matrices adapters of experts are of in a {model.config.family} model')


def _warn_of_lost(model: Model, kept: dict):
  """Warns of adapters that `peft` 0.21 drops, or puts elsewhere, when it loads the folder; `load` reads them."""
  family = families.of_model(model.config.family)
  names = [name for k in kept.values() for name in k.names]
  lost = sorted({name for name in names if family.lost_adapters and re.search(family.lost_adapters, name)})
  if lost:
    logging.warning(
      'adapter/: `peft` does not load adapters such as %s of a %s model; jaxpost does, and the merged export has them',
      lost[0],
      model.config.family,
    )


def _check(folder, kept: dict, have: dict):
  """InputError unless the tensors are those of the rows."""
  wanted = {name: k.shape for k in kept.values() for name in k.names}
  for name, shape in wanted.items():
    if name not in have:
      raise _other(folder, f'tensor {name} {list(shape)} is missing')
    if tuple(have[name].get_shape()) != shape:
      raise _other(folder, f'tensor {name} has shape {have[name].get_shape()}, not {list(shape)}')
  extra = sorted(set(have) - set(wanted))
  if extra:
    raise _other(folder, f'tensor {extra[0]} and {len(extra) - 1} more have no place')


def load(folder: epath.PathLike, model: Model, shardings: dict, write: Callable = transfer.write) -> dict:
  """The adapters of a folder, nested, as float32 arrays."""
  folder = model_folder.opened(folder)
  seals.check(folder, [_WEIGHTS])
  seals.warn(folder, [CONFIG])
  with contextlib.ExitStack() as stack:
    raw = object_store.read_json(folder / CONFIG)
    have, *_ = _open(folder, raw, model.config, stack)
    kept = _kept(model, _with_own_a(raw))
    _check(folder, kept, have)
    _check_blocks(folder, kept, have)
    return parameters.nest(
      {
        path: tensor_reader.load(k, have, parameters.leaf(shardings, path), np.dtype(np.float32), write)
        for path, k in kept.items()
      }
    )


def _check_blocks(folder, kept: dict, have: dict):
  """InputError where a matrix uses columns of B that are of another."""
  for k in [k for p, k in kept.items() if p.endswith('/b')]:
    rank, *out = k.spec.shape[k.spec.stack :]
    for name in k.names if k.shape[1] > rank else ():
      rows = have[name][:][k.first : k.first + math.prod(out)]
      if np.delete(rows, slice(k.column, k.column + rank), axis=1).any():
        raise _other(folder, f'tensor {name} mixes the matrices in it')


def writer(model: Model, params: dict, base: str) -> Callable:
  """Returns a function that writes an adapter folder, or nothing where there is no adapter.

  Every process calls this, which is a collective; one writes.

  Args:
    base: name or folder of the model below the adapter; '' writes nothing, and warns.
  """
  if not model.config.lora:
    return lambda folder: None
  if not base:  # the merged folder is whole without it
    logging.warning('no adapter/ is written: it has no base with a name, or more than the adapter was trained')
    return lambda folder: None
  rank, alpha, rslora, _ = model.config.lora
  try:
    table = _kept(model)
  except InputError as e:  # the merged folder is whole without it
    logging.warning('no adapter/ is written: %s', e)
    return lambda folder: None
  _warn_of_lost(model, table)
  tensors = dict(hf_export.export_tensors(table, params, np.dtype(np.float32)))
  wide = {_module(k): k.shape[1] // rank for p, k in table.items() if p.endswith('/b') and k.shape[1] > rank}
  if rslora and (wide or any(k.spec.stack > 1 for k in table.values())):
    # `peft` would take the root of all ranks in a tensor together.
    alpha, rslora = alpha * math.sqrt(rank), False
  modules = sorted({_module(k) for path, k in table.items() if parameters.is_adapter(path)})
  scalar = bool(model.config.num_labels)
  spec = dict(
    peft_type='LORA',
    task_type='SEQ_CLS' if scalar else 'CAUSAL_LM',
    base_model_name_or_path=base,
    r=rank,
    lora_alpha=alpha,
    use_rslora=rslora,
    target_modules=modules,
    lora_dropout=model.dropout,
    rank_pattern={k: n * rank for k, n in wide.items()},
    alpha_pattern={k: n * alpha for k, n in wide.items()},
    bias='none',
    fan_in_fan_out=False,
    inference_mode=True,
    modules_to_save=['score'] if scalar else None,
  )

  def write(folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hf_export.write_file(tensors, folder / _WEIGHTS)
    object_store.write_json(folder / CONFIG, spec)
    seals.add(folder, [_WEIGHTS, CONFIG])

  return write
