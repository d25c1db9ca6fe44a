"""Reads model folders of Hugging Face; `hf_export.py` writes them.

`tensor_layout` maps each parameter to rows of tensors. In memory, layers are stacked and the vocabulary is padded with
zero rows.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

from jaxpost.errors import InputError
from jaxpost.formats import config_json, families, model_folder, safetensors_file, tensor_layout, tensor_reader
from jaxpost.formats.model_folder import Path
from jaxpost.formats.tensor_layout import Stored
from jaxpost.models.parameters import Param, join, leaf, nest
from jaxpost.storage import object_store, seals

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.model import Model

# Beginnings of tensor names that only multimodal folders have.
_MULTIMODAL = ('language_model.', 'model.language_model.', 'visual.')
_HEAD = 'lm_head.weight'


def read_config(folder: epath.PathLike, text_only: bool = False) -> ModelConfig:
  """Reads the ModelConfig of a folder, or of its text model; warns of fields without effect here."""
  folder = model_folder.opened(folder)
  path = folder / 'config.json'
  if not path.is_file():
    model_folder.weight_files(folder)  # has a better error if the weights are pickles
    raise InputError(f'{path}: no such file; a model folder has config.json and {safetensors_file.SINGLE}')
  seals.warn(folder, [path.name])
  cfg, unknown = config_json.from_hf(object_store.read_json(path), str(path), text_only)
  if unknown:
    logging.warning('%s: fields without effect on the model: %s', path, ', '.join(unknown))
  return cfg


def check(folder: epath.PathLike, cfg: ModelConfig, rows: dict[str, Param] | None = None) -> None:
  """Raises InputError unless the weights are exactly those of `cfg`.

  Reads headers, and of a head beside a tied embedding some rows.
  """
  with contextlib.ExitStack() as stack:
    _open(model_folder.opened(folder), tensor_layout.table(cfg, rows), cfg, stack)


def load_params(
  folder: epath.PathLike,
  model: Model,
  shardings: dict,
  dtype: Any,
  keep: Callable = lambda params: params,
  write: Callable = tensor_reader.write,
) -> dict:
  """Loads the parameters of a folder, nested, as arrays with these shardings.

  Each process reads the slices that its devices hold, a piece at a time: the memory of the host holds one piece.

  Args:
    keep: maps each {path: parameter}, nested, to the parameters that are kept, such as quantized ones.
    write: see `tensor_reader.write`; it should be compiled so that the buffers of its first argument are donated,
      or else a parameter is in memory twice.
  """
  folder = model_folder.opened(folder)
  if jax.process_index() == 0 and not object_store.is_remote(folder):  # object stores verify their files themselves
    seals.check(folder, [path.name for path in model_folder.weight_files(folder)[0]])
  out: dict[str, Any] = {}
  with contextlib.ExitStack() as stack:
    table = tensor_layout.table(model.config, model.table)
    tensors = _open(folder, table, model.config, stack)
    for path, stored in table.items():
      param_dtype = np.dtype(stored.spec.dtype or dtype)
      value = tensor_reader.load(stored, tensors, leaf(shardings, path), param_dtype, write)
      out = join(out, keep(nest({path: value})))
  return out


def _open(folder: Path, table: dict[str, Stored], cfg: ModelConfig, stack: contextlib.ExitStack) -> dict[str, Any]:
  """Opens the tensors of the table by name, after checking names, shapes and types."""
  tensors = model_folder.open_tensors(folder, stack)
  if any(name.startswith(_MULTIMODAL) for name in tensors):
    from jaxpost.formats import multimodal

    tensors = multimodal.text_tensors(tensors, apart=not families.of_model(cfg.family).fused)
  for spelling, standard in families.of_model(cfg.family).spellings.items():
    tensors = {name.replace(spelling, standard): opened for name, opened in tensors.items()}
  shapes = {name: stored.shape for stored in table.values() for name in stored.names}
  for name, shape in shapes.items():
    if name not in tensors:
      hint = ' (or set tie_word_embeddings to true in config.json)' if name == _HEAD else ''
      raise InputError(
        f'{folder}: tensor {name} {list(shape)} is missing; config.json asks for it, so the folder is incomplete{hint}'
      )
    file, tensor = tensors[name]
    if tensor.shape != shape:
      raise InputError(
        f'{file}: tensor {name} has shape {list(tensor.shape)}, '
        f'config.json asks for {list(shape)}; they are of different models'
      )
    if tensor.dtype not in safetensors_file.FLOATS:
      raise InputError(
        f'{file}: tensor {name} has type {tensor.dtype}; supported: '
        f'{", ".join(safetensors_file.FLOATS)}: use an unquantized model'
      )
  _check_extra(folder, tensors, shapes, cfg)
  return {name: tensors[name][1] for name in shapes}


def same_values(a: Any, b: Any) -> bool:
  """Returns True if two tensors have the same shape, and the same values in 17 parts of 64 rows from first to last."""
  shape = a.shape
  starts = {*np.linspace(0, max(0, shape[0] - 64), 17, dtype=int).tolist()}
  return shape == b.shape and all(np.array_equal(a[i : i + 64, :], b[i : i + 64, :]) for i in starts)


def _check_extra(folder: Path, tensors: dict, shapes: dict, cfg: ModelConfig) -> None:
  """Raises InputError for tensors that are not part of the model, except those known to be unused."""
  _, embedding = tensors[next(iter(shapes))]  # the first row of the table
  extra_layers, family = 0, families.of_model(cfg.family)
  if family.extra_layers:
    extra_layers = object_store.read_json(folder / 'config.json').get('num_nextn_predict_layers') or 0
  extra = [
    name
    for name, (_, tensor) in tensors.items()
    if name not in shapes
    and not name.endswith('rotary_emb.inv_freq')
    and not (family.unused and re.fullmatch(family.unused, name))
    and not is_predictor(name, cfg, extra_layers)
    and not (name == _HEAD and (cfg.num_labels or same_values(tensor, embedding)))
  ]
  if extra:
    file, tensor = tensors[extra[0]]
    hint = ', or the head is right where it differs from the embedding: set tie_word_embeddings to false in config.json'
    raise InputError(
      f'{file}: tensor {extra[0]} {list(tensor.shape)} and {len(extra) - 1} more '
      f'have no place in a {cfg.family} model of {cfg.num_layers} layers; '
      'config.json and weights are of different models' + (hint if extra[0] == _HEAD else '')
    )


def is_predictor(name: str, cfg: ModelConfig, count: int) -> bool:
  """Returns whether a tensor is of modules for multi-token prediction: the `count` layers after the last, or 'mtp'."""
  family = families.of_model(cfg.family)
  if family.hybrid and name.startswith('mtp.'):
    return True
  match = re.match(r'model\.layers\.(\d+)\.', name)
  is_extra_layer = match is not None and 0 <= int(match[1]) - cfg.num_layers < count
  return family.extra_layers and (is_extra_layer or bool(count) and name.startswith('model.mtp_'))
