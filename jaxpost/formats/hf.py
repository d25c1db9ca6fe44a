"""Hugging Face folders in and out: the only place that imports safetensors.

`stored.py` says which rows of which tensors a parameter is; layers are
stacked, and the vocabulary is padded with zero rows here and cut on export.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import mmap
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from etils import epath

from jaxpost.distributed import transfer
from jaxpost.distributed.transfer import to_host
from jaxpost.errors import InputError
from jaxpost.formats import config_json, families, mxfp4, safetensors_file, tensor_layout
from jaxpost.models.parameters import held_parts, join, leaf, nest
from jaxpost.storage import object_store

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.model import Model

_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_PICKLES = ('.bin', '.pt', '.pth', '.ckpt')
_DTYPES = {'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16}
_GENERATION = 'generation_config.json'
_MARK = '- jaxpost'  # a tag in the README.md of every export
_HEAD = 'lm_head.weight'
write_file = functools.partial(safetensors.numpy.save_file, metadata={'format': 'pt'})


def read_config(folder) -> ModelConfig:
  """The ModelConfig of a folder; fields that nobody reads are named once."""
  folder = opened(folder)
  path = folder / 'config.json'
  if not path.is_file():
    _weight_files(folder)  # says it better if the weights are pickles
    raise InputError(f'{path}: no such file; a model folder has config.json and {_SINGLE}')
  cfg, unknown = config_json.from_hf(read_json(path), str(path))
  if unknown:
    logging.warning('%s: fields without effect here: %s', path, ', '.join(unknown))
  return cfg


def check(folder, cfg: ModelConfig, rows=None):
  """Raises InputError unless the weights are exactly those of `cfg`.

  Reads headers only.
  """
  with contextlib.ExitStack() as stack:
    _open(opened(folder), tensor_layout.table(cfg, rows), cfg, stack)


def load_params(
  folder, model: Model, shardings: dict, dtype, keep: Callable = lambda params: params, write: Callable = transfer.write
) -> dict:
  """The parameters of a folder, nested, as arrays with these shardings.

  Each process reads the slices that its devices hold, a piece at a time: the
  host has no more than that. `keep` makes of {path: parameter}, nested, what
  is kept in its place; `write` may take over the buffers of its first
  argument, or else a parameter is in memory twice.
  """
  out = {}
  with contextlib.ExitStack() as stack:
    table = tensor_layout.table(model.config, model.table)
    tensors = _open(opened(folder), table, model.config, stack)
    for path, kept in table.items():
      out = join(
        out,
        keep(
          nest(
            {path: tensor_layout.load(kept, tensors, leaf(shardings, path), np.dtype(kept.spec.dtype or dtype), write)}
          )
        ),
      )
  return out


def _open(folder, table, cfg, stack) -> dict:
  """Tensor name -> open slice, after checking names, shapes and types."""
  found = _slices(folder, stack)
  wanted = {name: kept.shape for kept in table.values() for name in kept.names}
  for name, shape in wanted.items():
    if name not in found:
      hint = ' (or set tie_word_embeddings to true in config.json)' if name == _HEAD else ''
      raise InputError(
        f'{folder}: tensor {name} {list(shape)} is missing; config.json asks for it, so the folder is incomplete{hint}'
      )
    file, tensor = found[name]
    if tuple(tensor.get_shape()) != shape:
      raise InputError(
        f'{file}: tensor {name} has shape {list(tensor.get_shape())}, '
        f'config.json asks for {list(shape)}; they are of different models'
      )
    if tensor.get_dtype() not in _DTYPES:
      raise InputError(
        f'{file}: tensor {name} has type {tensor.get_dtype()}; supported: '
        f'{", ".join(_DTYPES)}: use an unquantized model'
      )
  tied = wanted.get('model.embed_tokens.weight')
  more = 0
  if families.of_model(cfg.family).extra_layers:
    more = read_json(folder / 'config.json').get('num_nextn_predict_layers') or 0
  extra = [
    name
    for name, (_, tensor) in found.items()
    if name not in wanted
    and not name.endswith('rotary_emb.inv_freq')
    and not tensor_layout.beyond(name, cfg, more)
    and not (name == _HEAD and tuple(tensor.get_shape()) == tied)
  ]
  if extra:
    raise InputError(
      f'{found[extra[0]][0]}: tensor {extra[0]} '
      f'{list(found[extra[0]][1].get_shape())} and {len(extra) - 1} more '
      f'have no place in a {cfg.family} model of {cfg.num_layers} layers; '
      'config.json and weights are of different models'
    )
  return {name: found[name][1] for name in wanted}


def _slices(folder, stack) -> dict:
  """Every tensor in the folder: name -> (file, open slice)."""
  files, index = _weight_files(folder)
  found = {k: (file, v) for file in files for k, v in open_file(file, stack).items()}
  for name, file in index.items():
    if name not in found or found[name][0].name != file:
      raise InputError(
        f'{folder / file}: lacks tensor {name}, which {_INDEX} places there; copy or download both again'
      )
  return mxfp4.joined(found)


def open_file(file, stack) -> dict:
  """Tensor name -> open slice, until `stack` is left."""
  try:
    handle = stack.enter_context(file.open('rb'))
    if object_store.is_remote(file):
      return safetensors_file.tensors(object_store.exactly(handle), file.stat().length)
    mapped = stack.enter_context(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
    return safetensors_file.tensors(mapped, len(mapped))
  except (OSError, ValueError) as e:
    raise InputError(f'{file}: unreadable ({e}); copy or download it again') from e


def _weight_files(folder) -> tuple[list[pathlib.Path], dict[str, str]]:
  """(files of weights, the index: tensor name -> file name)."""
  if (folder / _SINGLE).is_file():
    return [folder / _SINGLE], {}
  path = folder / _INDEX
  if not path.is_file():
    names = sorted(p.name for p in folder.iterdir())
    pickles = [n for n in names if n.endswith(_PICKLES)]
    if pickles:
      raise InputError(
        f'{folder / pickles[0]}: pickled weights can run code and are not '
        'read; convert to safetensors with transformers: AutoModelForCausal'
        'LM.from_pretrained(folder).save_pretrained(new_folder)'
      )
    raise InputError(
      f'{folder}: no weights ({_SINGLE} or {_INDEX}); the folder has {", ".join(names[:8]) or "nothing"}'
    )
  index = read_json(path).get('weight_map')
  if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
    raise InputError(f'{path}: has no "weight_map" of tensor to file name')
  for name, file in index.items():
    # By name, not by where it lands: download caches are links.
    if file != pathlib.PurePath(file).name or file in ('', '..'):
      raise InputError(f'{path}: tensor {name} is in {file!r}, which is no file name inside the folder')
    if not (folder / file).is_file():
      raise InputError(f'{folder / file}: no such file, but {_INDEX} places {name} there; copy or download it again')
  return [folder / file for file in dict.fromkeys(index.values())], index


def opened(folder) -> pathlib.Path | epath.Path:
  """The folder of a model, which is there."""
  object_store.check(str(folder), 'model')
  folder = (epath if object_store.is_remote(folder) else pathlib).Path(folder).expanduser()
  if not folder.is_dir():
    raise InputError(f'{folder}: no such folder; a model is a Hugging Face folder with config.json and {_SINGLE}')
  return folder


def read_json(path) -> dict:
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except json.JSONDecodeError as e:
    raise InputError(f'{path}:{e.lineno}:{e.colno}: bad JSON: {e.msg}; copy or download it again') from e
  except (UnicodeDecodeError, OSError) as e:
    raise InputError(f'{path}: unreadable ({e}); copy or download it again') from e
  if not isinstance(value, dict):
    raise InputError(f'{path}: not a JSON object; copy or download it again')
  return value


def check_target(folder):
  """Raises InputError if `save` would replace what is no export of ours."""
  folder = epath.Path(folder)
  if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
    return
  card = folder / 'README.md'
  if not card.exists() or _MARK not in card.read_text().splitlines():
    raise InputError(f'{folder}: exists and is no export of jaxpost, so it is not replaced; export to another folder')


def save(
  folder,
  model: Model,
  params: dict,
  *,
  stop_ids=(),
  bos_id=None,
  pad_id=None,
  generation: dict | None = None,
  tokenizer_save: Callable | None = None,
  max_shard_bytes: int = 4 << 30,
  merge: Callable = lambda params: params,
):
  """Writes a folder that `transformers` and vLLM load, all or nothing.

  Every process calls it; process 0 writes.

  Args:
    generation: how to sample, as `read_generation` gives it.
    tokenizer_save: tokenizer_save(folder) writes the tokenizer's files.
    merge: makes `params` those of `model`; asked layer by layer.
  """
  writes = jax.process_index() == 0
  if writes:
    check_target(folder)
  made = jax.eval_shape(merge, params)
  dtype = np.dtype(jnp.result_type(*(leaf(made, p).dtype for p, spec in model.table.items() if not spec.dtype)))
  with _staging(folder) if writes else contextlib.nullcontext() as staged:
    _write_weights(staged, model, params, dtype, max_shard_bytes, merge)
    if writes:
      _write_texts(
        staged, pathlib.PurePath(str(folder)).name, model.config, dtype, stop_ids, bos_id, pad_id, generation or {}
      )
      if tokenizer_save is not None:
        tokenizer_save(staged)
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices('export')


@contextlib.contextmanager
def _staging(folder):
  """A new folder that takes the place of `folder` if nothing fails."""
  if object_store.is_remote(folder):
    yield (staged := object_store.folder())
    if epath.Path(folder).exists():
      epath.Path(folder).rmtree()
    # A folder without config.json is no model: it goes last.
    object_store.upload(staged, folder, last='config.json')
    shutil.rmtree(staged)
    return
  folder = pathlib.Path(folder).expanduser().absolute()
  staged = folder.with_name(f'.{folder.name}.new')
  old = folder.with_name(f'.{folder.name}.old')
  for left_over in (staged, old):
    shutil.rmtree(left_over, ignore_errors=True)
  staged.mkdir(parents=True)
  try:
    yield staged
    if folder.exists():
      os.rename(folder, old)
    os.rename(staged, folder)
  finally:
    shutil.rmtree(staged, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _write_weights(staged, model, params, dtype, max_shard_bytes, merge):
  """Shards in the order of the table, one parameter on the host at a time."""
  table = tensor_layout.table(model.config, model.table)
  made = {
    name: (np.dtype(kept.spec.dtype or dtype), kept.shape)
    for group in tensor_layout.groups(table)
    for kept in group.values()
    for name in kept.names
  }
  sizes = {k: math.prod(v) * t.itemsize for k, (t, v) in made.items()}
  shards = [[]]
  for name, size in sizes.items():
    full = sum(sizes[n] for n in shards[-1]) + size > max_shard_bytes
    if full and shards[-1]:
      shards.append([])
    shards[-1].append(name)
  files = (
    [_SINGLE]
    if len(shards) == 1
    else [f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors' for i in range(len(shards))]
  )
  every = export_tensors(table, params, dtype, merge)
  for at, names in enumerate(shards):
    with contextlib.ExitStack() as stack:
      if staged is not None:
        file = stack.enter_context(open(staged / files[at], 'wb'))
        file.write(safetensors_file.header({n: made[n] for n in names}))
      for name, (found, value) in zip(names, every):
        assert name == found, (name, found)
        if staged is not None:
          value.tofile(file)
  if len(shards) > 1 and staged is not None:
    write_json(
      staged / _INDEX,
      {'metadata': {'total_size': sum(sizes.values())}, 'weight_map': {n: f for f, s in zip(files, shards) for n in s}},
    )


def export_tensors(table, params, dtype, merge=lambda params: params):
  """(name, tensor) in the order of the table; a collective across processes.

  One layer of the parameters in a tensor is merged, and on the host, at a time.
  """
  for group in tensor_layout.groups(table):
    entries = [_entries(held_parts(params, path), path, kept.spec, merge) for path, kept in group.items()]
    kept = next(iter(group.values()))
    for name, *values in zip(kept.names, *entries, strict=True):
      value = tensor_layout.together(kept, list(map(tensor_layout.rows, group.values(), values)))
      yield name, np.ascontiguousarray(value.astype(kept.spec.dtype or dtype, copy=False))


def _entries(made_of, path, spec, merge):
  """What is stored by itself of a parameter, in order; fetched by the layer."""
  own, beside = made_of
  for i in range(spec.shape[0] if spec.stack else 1):
    some = jax.tree.map(lambda x, i=i: x[i][None] if spec.stack else x, own)
    layer = to_host(leaf(merge(beside | some), path))
    yield from layer.reshape(-1, *spec.shape[spec.stack :])


def read_generation(folder) -> dict:
  """What a folder says of sampling: temperature, top_p and so on."""
  path = epath.Path(folder) / _GENERATION
  if not path.is_file():
    return {}
  return {k: v for k, v in read_json(path).items() if not k.startswith(('_', 'transformers')) and not k.endswith('_id')}


def _write_texts(staged, name, cfg, dtype, stop_ids, bos_id, pad_id, generation):
  config = config_json.to_hf(cfg, stop_ids, bos_id, pad_id)
  # transformers 5 reads `dtype`, older releases and vLLM `torch_dtype`.
  config |= {'torch_dtype': dtype.name, 'dtype': dtype.name}
  write_json(staged / 'config.json', config)
  ids = {k: config[k] for k in ('bos_token_id', 'eos_token_id', 'pad_token_id') if config[k] is not None}
  write_json(staged / _GENERATION, generation | ids)
  task = 'text-classification' if cfg.num_labels else 'text-generation'
  (staged / 'README.md').write_text(
    f'---\nlibrary_name: transformers\npipeline_tag: {task}\ntags:\n- {cfg.family}\n{_MARK}\n---\n\n# {name}\n',
    encoding='utf-8',
  )


def write_json(path, value):
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')
