"""Adapter folders of the `peft` library, in and out.

A folder has adapter_config.json and adapter_model.safetensors; its tensors
are the adapter rows of the parameter table under their HF names.
"""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Callable

import numpy as np

from jaxpost.errors import InputError
from jaxpost.models import hf, lora, stored, transformer
from jaxpost.models import table as tables
from jaxpost.models.config import ModelConfig
from jaxpost.models.model import Model

CONFIG, _WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
# What changes the function, and the values at which it does not.
_PLAIN = {
    'peft_type': ('LORA',), 'bias': ('none',), 'use_dora': (False,),
    'fan_in_fan_out': (False,), 'lora_bias': (False,), 'use_qalora': (False,),
    'alora_invocation_tokens': (None,), 'layers_to_transform': (None,),
    'layer_replication': (None,), 'rank_pattern': ({}, None),
    'alpha_pattern': ({}, None), 'modules_to_save': (None, [], ['score']),
    'target_parameters': (None, []), 'trainable_token_indices': (None,),
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
  table = transformer.param_table(dataclasses.replace(cfg, lora=()))
  names = {path: lora.name(path, table[path]) for path in lora.targets(table)}
  every = stored.table(cfg, lora.adapter_rows(table, dataclasses.replace(
      cfg, lora=(1, 1.0, False, '|'.join(names.values())))))
  with contextlib.ExitStack() as stack:
    have = hf.open_file(folder / _WEIGHTS, stack)
    paths = [names[path[len(lora.ROOT) + 1:-2]].partition('/')[2]
             for path, kept in every.items()
             if kept.names[0] in have and path.endswith('/a')]
    if not paths:
      first = next(iter(every.values())).names[0]
      raise _other(folder, f'no tensor like {first} is in it')
    spec = (rank, float(alpha), bool(raw.get('use_rslora')), '|'.join(paths))
    _check(folder, lora.build(dataclasses.replace(cfg, lora=spec)), have)
  return spec


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
  fused = [k.names[0] for k in kept.values() if k.first]
  if fused:
    raise InputError(f'{fused[0]}: is one adapter in `peft` and several here, '
                     'as this family keeps the matrices in one tensor')
  return kept


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


def load(folder, model: Model, shardings: dict) -> dict:
  """The adapters of a folder, nested, as float32 arrays."""
  with contextlib.ExitStack() as stack:
    have = hf.open_file(hf.opened(folder) / _WEIGHTS, stack)
    _check(hf.opened(folder), model, have)
    return tables.nest({
        path: hf.load_leaf(
            kept, have, tables.leaf(shardings, path), np.dtype(np.float32))
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
