"""Adapter folders of the `peft` library, in and out.

A folder has adapter_config.json and adapter_model.safetensors; its tensors
are the adapter rows of the parameter table under their HF names. Those of
experts are written a tensor for each, which `peft` puts together for the
modules of its `transformers`; what it has put together is read, too.

Legend: E experts, r rank, F size of an expert.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import pathlib
from collections.abc import Callable

import numpy as np

from jaxpost import sharding
from jaxpost.errors import InputError
from jaxpost.models import families, hf, lora, stored, transformer
from jaxpost.models import table as tables
from jaxpost.models.config import ModelConfig
from jaxpost.models.model import Model

CONFIG, _WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
# What changes the function, and the values at which it does not.
_PLAIN = {
    'peft_type': ('LORA',), 'bias': ('none',), 'use_dora': (False,),
    'fan_in_fan_out': (False,), 'lora_bias': (False,), 'use_qalora': (False,),
    'alora_invocation_tokens': (None,), 'layers_to_transform': (None,),
    'layer_replication': (None,), 'modules_to_save': (None, [], ['score']),
    'trainable_token_indices': (None,),
    # Others, as PiSSA, change the weights below, too.
    'init_lora_weights': (True, False, 'gaussian', 'eva', 'orthogonal'),
}


def read_spec(folder, cfg: ModelConfig) -> tuple:
  """`ModelConfig.lora` of an adapter folder, for the model `cfg`.

  Reads headers only. InputError where the folder is no adapter of it.
  """
  folder = hf.opened(folder)
  if not (folder / CONFIG).is_file():
    raise InputError(f'{folder}: no folder of an adapter (it has no {CONFIG})')
  raw = hf.read_json(folder / CONFIG)
  for field, values in _PLAIN.items():
    if field in raw and raw[field] not in values:
      raise InputError(f'{folder / CONFIG}: {field}={raw[field]!r} is not '
                       f'supported (only {values[0]!r})')
  rank, alpha = raw.get('r'), raw.get('lora_alpha')
  if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
    raise InputError(
        f'{folder / CONFIG}: r={rank!r} and lora_alpha={alpha!r} must be a '
        'rank and a number')
  _check_patterns(folder / CONFIG, raw)
  with contextlib.ExitStack() as stack:
    have, every, names = _open(folder, raw, cfg, stack)
    paths = [names[path.removeprefix(f'{lora.ROOT}/')[:-2]]
             for path, kept in every.items()
             if kept.names[0] in have and path.endswith('/a')]
    if not paths:
      first = next(iter(every.values())).names[0]
      raise _other(folder, f'no tensor like {first} is in it')
    if len({name.partition('/')[0] for name in names.values()}) == 1:
      paths = [path.partition('/')[2] for path in paths]  # of one stack: short
    spec = (rank, float(alpha), bool(raw.get('use_rslora')), '|'.join(paths))
    _check(folder, lora.build(dataclasses.replace(cfg, lora=spec)), have)
  return spec


def _check_patterns(path, raw: dict):
  """InputError for other ranks than `r`, but twice of gate and up together."""
  twice = {'rank_pattern': 'r', 'alpha_pattern': 'lora_alpha'}
  given = {k: raw.get(k) or {} for k in twice}
  for field, patterns in given.items():
    if not isinstance(patterns, dict):
      raise InputError(f'{path}: {field}={patterns!r} must be an object')
  for field, patterns in given.items():
    if patterns and (raw.get('use_rslora') or len(patterns) > 1 or any(
        patterns.keys() != x.keys() for x in given.values()) or any(
            not k.endswith('gate_up_proj') or v != 2 * raw[twice[field]]
            for k, v in patterns.items())):
      raise InputError(f'{path}: {field}={patterns!r} is not supported (only '
                       'twice the rank and alpha of gate_up_proj, without '
                       'use_rslora)')


def _open(folder, raw: dict, cfg: ModelConfig, stack) -> tuple:
  """(tensors, {path: `Stored`} of all possible adapters, {path: its name})."""
  table = transformer.param_table(dataclasses.replace(cfg, lora=()))
  names = {path: lora.name(path, table[path]) for path in lora.targets(table)}
  every = stored.table(cfg, lora.adapter_rows(table, dataclasses.replace(
      cfg, lora=(1, 1.0, False, '|'.join(names.values())))))
  have = hf.open_file(folder / _WEIGHTS, stack)
  given = raw.get('target_parameters') or []
  if not isinstance(given, list) or any(type(x) is not str for x in given):
    raise InputError(f'{folder / CONFIG}: target_parameters={given!r} must be '
                     'a list of names')
  given = {x.rpartition('.')[2] for x in given}
  if given:
    _check_experts(folder / CONFIG, given, cfg)
    have = _apart(folder, have, given, raw, every, cfg)
  return have, every, names


def _check_experts(path, given: set, cfg: ModelConfig):
  if given - {'gate_up_proj', 'down_proj'} or not cfg.experts or (
      'fused' in families.FAMILIES.get(cfg.family, {})):
    raise InputError(f'{path}: target_parameters={sorted(given)} is not '
                     'supported (only gate_up_proj and down_proj of experts, '
                     'of families whose folders have a tensor for each)')


@dataclasses.dataclass(frozen=True)
class _Part:
  """What one expert has of a tensor that is of all of them."""

  read: Callable
  shape: list
  index: tuple

  def get_shape(self):
    return [len(range(*s.indices(n))) for s, n in zip(self.index, self.shape)]

  def __getitem__(self, index):
    return self.read()[self.index][index]


def _apart(folder, have: dict, given: set, raw: dict, every: dict,
           cfg: ModelConfig) -> dict:
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
    if both and (value[f:, :r * e].any() or value[:f, r * e:].any()):
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
      layer, i = kept.spec.first + at // e, at % e
      theirs = (f'base_model.model.model.layers.{layer}.mlp.experts.{inner}'
                f'lora_{side.upper()}.weight')
      if theirs not in have:
        continue
      shape = have[theirs].get_shape()
      if shape[side == 'b'] != e * rank:
        raise _other(folder, f'tensor {theirs} has shape {shape}')
      rows = {'gate': slice(f), 'up': slice(f, None)}.get(name, slice(None))
      index = (slice(i * rank + skip, i * rank + skip + r), slice(None)) if (
          side == 'a') else (rows, slice(i + skip * e, (skip + r) * e, e))
      out.pop(theirs, None)
      out[own] = _Part(functools.partial(
          whole, theirs, side == 'b' and rank > r), shape, index)
  return out


def base_of(folder) -> str:
  """Name or folder of the model that an adapter was trained on."""
  return hf.read_json(hf.opened(folder) / CONFIG).get(
      'base_model_name_or_path') or ''


def is_judge(folder) -> bool:
  """Whether an adapter has a scalar head of its own."""
  path = hf.opened(folder) / CONFIG
  return path.is_file() and hf.read_json(path).get(
      'modules_to_save') == ['score']


def _other(folder, why) -> InputError:
  return InputError(f'{folder / _WEIGHTS}: {why}; the adapter is of another '
                    'model than this one')


def _kept(model: Model) -> dict:
  """Where an adapter folder has the rows of the table: path -> `Stored`."""
  rows = {p: s for p, s in model.table.items() if lora.is_adapter(p)}
  if model.config.num_labels:
    score = model.table['score']
    rows['score'] = dataclasses.replace(
        score, hf=f'base_model.model.{score.hf}')
  kept = stored.table(model.config, rows)
  below = stored.table(model.config, (model.base or model).table)
  count = collections.Counter(k.names[0] for k in below.values())
  fused = [kept[p].names[0] for p in rows if lora.is_adapter(p) and count[
      below[p.removeprefix(f'{lora.ROOT}/')[:-2]].names[0]] > 1]
  if fused:
    raise InputError(f'{fused[0]}: is one adapter in `peft` and several here, '
                     'as this family keeps the matrices in one tensor')
  _check_written(model, kept)
  return kept


def _check_written(model: Model, kept: dict):
  """InputError where `peft` would not put adapters of experts together."""
  paths = {path[:-2]: k for path, k in kept.items() if path.endswith('/a')}
  experts = {p.rpartition('/')[2] for p, k in paths.items()
             if k.spec.stack > 1}
  module = lambda k: k.names[0].split('.lora_')[0].rpartition('.')[2]
  taken = {module(k) for k in paths.values() if k.spec.stack > 1}
  if not experts:
    return
  if len(experts & {'gate', 'up'}) == 1:
    raise InputError('experts/gate and experts/up are one matrix in `peft`: '
                     'both need adapters, or neither')
  if 'fused' in families.FAMILIES.get(model.config.family, {}) or any(
      module(k) in taken for k in paths.values() if k.spec.stack == 1):
    raise InputError('`peft` cannot tell which matrices adapters of experts '
                     f'are of in a {model.config.family} model')


def _check(folder, model: Model, have: dict):
  """InputError unless the tensors are those of the rows."""
  wanted = {name: kept.shape for kept in _kept(model).values()
            for name in kept.names}
  for name, shape in wanted.items():
    if name not in have:
      raise _other(folder, f'tensor {name} {list(shape)} is missing')
    if tuple(have[name].get_shape()) != shape:
      raise _other(folder, f'tensor {name} has shape '
                   f'{have[name].get_shape()}, not {list(shape)}')
  extra = sorted(set(have) - set(wanted))
  if extra:
    raise _other(folder, f'tensor {extra[0]} and {len(extra) - 1} more have '
                 'no place')


def load(folder, model: Model, shardings: dict,
         write: Callable = sharding.write) -> dict:
  """The adapters of a folder, nested, as float32 arrays."""
  folder = hf.opened(folder)
  with contextlib.ExitStack() as stack:
    have, *_ = _open(
        folder, hf.read_json(folder / CONFIG), model.config, stack)
    _check(folder, model, have)
    return tables.nest({
        path: stored.load(
            kept, have, tables.leaf(shardings, path), np.dtype(np.float32),
            write)
        for path, kept in _kept(model).items()})


def writer(model: Model, params: dict, base: str) -> Callable:
  """What writes an adapter folder; nothing where there is no adapter.

  Every process calls this, which is a collective; one writes.

  Args:
    base: name or folder of the model below the adapter; '' writes nothing.
  """
  if not model.config.lora or not base:
    return lambda folder: None
  rank, alpha, rslora, _ = model.config.lora
  try:
    table = _kept(model)
  except InputError as e:  # the merged folder is whole without it
    logging.warning('no adapter/ is written: %s', e)
    return lambda folder: None
  tensors = dict(hf.export_tensors(table, params, np.dtype(np.float32)))
  if rslora and any(k.spec.stack > 1 for k in table.values()):
    # `peft` doubles the rank of gate and up, whose root would count.
    alpha, rslora = alpha * math.sqrt(rank), False
  modules = sorted({
      kept.names[0].split('.lora_')[0].rpartition('.')[2]
      for path, kept in table.items() if lora.is_adapter(path)})
  scalar = bool(model.config.num_labels)
  spec = dict(
      peft_type='LORA', task_type='SEQ_CLS' if scalar else 'CAUSAL_LM',
      base_model_name_or_path=base, r=rank, lora_alpha=alpha,
      use_rslora=rslora, target_modules=modules, lora_dropout=model.dropout,
      bias='none', fan_in_fan_out=False, inference_mode=True,
      modules_to_save=['score'] if scalar else None)

  def write(folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hf.write_file(tensors, folder / _WEIGHTS)
    hf.write_json(folder / CONFIG, spec)

  return write
