"""Writes model folders of Hugging Face, for `transformers` and vLLM.

An export is the inverse of `hf.load_params`: each layer is a tensor again, and the vocabulary has no padding.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxpost.distributed.transfer import to_host
from jaxpost.errors import InputError
from jaxpost.formats import config_export, families, safetensors_file, tensor_layout
from jaxpost.formats.tensor_layout import Stored
from jaxpost.models.parameters import Param, flatten, leaf, nest
from jaxpost.storage import object_store, seals

if TYPE_CHECKING:
  from jaxpost.formats.multimodal import Origin
  from jaxpost.models.model import Model

_GENERATION = 'generation_config.json'
_MARK = '- jaxpost'  # a tag in the README.md of every export
_CARD = 'README.md'


def check_target(folder: epath.PathLike) -> None:
  """Raises InputError if `save` would replace a folder that is not an export of this library."""
  folder = epath.Path(folder).expanduser()
  if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
    return
  card = folder / _CARD
  if not card.exists() or _MARK not in card.read_text().splitlines():
    raise InputError(f'{folder}: exists and is no export of jaxpost, so it is not replaced; export to another folder')


def save(
  folder: epath.PathLike,
  model: Model,
  params: dict,
  *,
  stop_ids: Sequence[int] = (),
  bos_id: int | None = None,
  pad_id: int | None = None,
  generation: dict | None = None,
  tokenizer_save: Callable | None = None,
  max_shard_bytes: int = 4 << 30,
  merge: Callable = lambda params: params,
  origin: Origin | None = None,
) -> None:
  """Writes a folder that `transformers` and vLLM load, all or nothing.

  Every process calls it; process 0 writes.

  Args:
    generation: sampling defaults, see `read_generation`.
    tokenizer_save: tokenizer_save(folder) writes the tokenizer's files.
    max_shard_bytes: largest size of a file of weights.
    merge: maps `params` to those of `model`, e.g. merging adapters; called for each layer.
    origin: the folder of the original model, if the export copies other parts from it (`multimodal`, `predictors`).
  """
  writes = jax.process_index() == 0
  if writes:
    check_target(folder)
  merged = jax.eval_shape(merge, params)
  dtype = np.dtype(jnp.result_type(*(leaf(merged, p).dtype for p, spec in model.table.items() if not spec.dtype)))
  with _staging(folder) if writes else contextlib.nullcontext() as staged:
    _write_weights(staged, model, params, dtype, max_shard_bytes, merge=merge, origin=origin)
    if staged is not None:
      config = config_export.to_hf(model.config, stop_ids, bos_id, pad_id)
      _write_configs(staged, config, dtype, generation or {}, origin)
      task = 'text-classification' if model.config.num_labels else 'text-generation'
      facts = f'library_name: transformers\npipeline_tag: {task}\ntags:\n- {model.config.family}\n{_MARK}'
      title = pathlib.PurePath(str(folder)).name
      (staged / _CARD).write_text(f'---\n{facts}\n---\n\n# {title}\n', encoding='utf-8')
      if tokenizer_save is not None:
        tokenizer_save(staged)
      if origin is not None:
        origin.copy_files(staged)
      seals.add(staged, [n for n in object_store.files(staged) if n != _CARD])  # users may edit it
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices('export')


@contextlib.contextmanager
def _staging(folder: epath.PathLike) -> Iterator[pathlib.Path]:
  """Yields a new folder that replaces `folder` on exit, unless an exception is raised."""
  if object_store.is_remote(folder):
    from jaxpost.storage import remote

    yield (staged := remote.folder())
    if epath.Path(folder).exists():
      epath.Path(folder).rmtree()
    # config.json goes last: a folder without it is not taken for a model.
    remote.upload(staged, folder, last='config.json')
    shutil.rmtree(staged)
    return
  folder = pathlib.Path(folder).expanduser().resolve()  # of a link, its target is replaced
  staged = folder.with_name(f'.{folder.name}.new')
  old = folder.with_name(f'.{folder.name}.old')
  shutil.rmtree(staged, ignore_errors=True)
  if folder.exists():
    shutil.rmtree(old, ignore_errors=True)
  staged.mkdir(parents=True)
  try:
    yield staged
    object_store.sync_all(staged)
    if folder.exists():
      os.rename(folder, old)
    os.rename(staged, folder)
    object_store.sync(folder.parent)
  finally:
    # After a failure between the two renames, in this process or an earlier one, only `old` holds an export.
    if old.exists() and not folder.exists():
      os.rename(old, folder)
    shutil.rmtree(staged, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _write_weights(
  staged: pathlib.Path | None,
  model: Model,
  params: dict,
  dtype: np.dtype,
  max_shard_bytes: int,
  *,
  merge: Callable,
  origin: Origin | None,
) -> None:
  """Fills shards with tensors in the order of the table, with one parameter on the host at a time."""
  table = tensor_layout.table(model.config, model.table)
  if origin:
    table = origin.with_copies(table)
  tensors = {
    name: (np.dtype(stored.spec.dtype or dtype), stored.shape)
    for group in tensor_layout.groups(table)
    for stored in group.values()
    for name in stored.names + stored.copies
  }
  sizes = {name: math.prod(shape) * tensor_dtype.itemsize for name, (tensor_dtype, shape) in tensors.items()}
  shards: list[list[str]] = [[]]
  shard_bytes = 0  # bytes of the last shard
  for name, size in sizes.items():
    if shards[-1] and shard_bytes + size > max_shard_bytes:
      shards.append([])
      shard_bytes = 0
    shards[-1].append(name)
    shard_bytes += size
  name_of = origin.name if origin else str
  files = [safetensors_file.SINGLE]
  if len(shards) > 1 or origin:
    files = [f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors' for i in range(len(shards))]
  exported = export_tensors(table, params, dtype, merge)
  for file_name, names in zip(files, shards):
    with contextlib.ExitStack() as stack:
      if staged is not None:
        file = stack.enter_context(open(staged / file_name, 'wb'))
        file.write(safetensors_file.header({name_of(n): tensors[n] for n in names}))
      for name, (exported_name, value) in zip(names, exported):  # `names` first, so that zip drops no tensor
        assert name == exported_name, (name, exported_name)
        if staged is not None:
          value.tofile(file)
  if staged is not None and files[0] != safetensors_file.SINGLE:
    places = {name_of(name): file for file, names in zip(files, shards) for name in names}
    total = sum(sizes.values())
    if origin:
      others = origin.others(tensors, families.of_model(model.config.family).unused)
      places |= origin.write_others(staged, others) if others else {}
      total += sum(tensor.size for tensor in others.values())
    object_store.write_json(staged / safetensors_file.INDEX, {'metadata': {'total_size': total}, 'weight_map': places})


def export_tensors(
  table: dict[str, Stored], params: dict, dtype: np.dtype, merge: Callable = lambda params: params
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (name, tensor) in the order of the table; a collective across processes.

  Merges one layer at a time, of the parameters that share a tensor; only that layer is on the host.
  """
  for group in tensor_layout.groups(table):
    entries = [_entries(params, path, stored.spec, merge) for path, stored in group.items()]
    stored = next(iter(group.values()))
    for name, *values in zip(stored.names, *entries, strict=True):
      value = tensor_layout.together(stored, list(map(tensor_layout.rows, group.values(), values)))
      value = np.ascontiguousarray(value.astype(stored.spec.dtype or dtype, copy=False))
      yield from ((copy, value) for copy in (name, *stored.copies))


def _entries(params: dict, path: str, spec: Param, merge: Callable) -> Iterator[np.ndarray]:
  """Yields the values of a parameter for one tensor after the other, merged and fetched layer by layer.

  `merge` reads the parameter's own leaves (its values or quantized codes, and its adapter) and, unless these are its
  values alone, the final norm, whose type quantized matrices get.
  """
  own_leaves = {p: x for p, x in flatten(params).items() if f'/{path}/' in f'/{p}/'}
  other_leaves = {k: x for k, x in params.items() if k == 'norm' and own_leaves.keys() != {path}}
  for i in range(spec.shape[0] if spec.stack else 1):
    # The slices keep the axis of layers.
    one_layer = {p: x[i][None] if spec.stack else x for p, x in own_leaves.items()}
    layer = to_host(leaf(merge(other_leaves | nest(one_layer)), path))
    yield from layer.reshape(-1, *spec.shape[spec.stack :])  # [1 or experts, ...]


def read_generation(folder: epath.PathLike) -> dict[str, Any]:
  """Reads the sampling defaults of a folder: temperature, top_p and so on."""
  path = epath.Path(folder) / _GENERATION
  if not path.is_file():
    return {}
  seals.warn(path.parent, [path.name])
  defaults = object_store.read_json(path)
  return {k: v for k, v in defaults.items() if not k.startswith(('_', 'transformers')) and not k.endswith('_id')}


def _write_configs(
  staged: pathlib.Path, config: dict, dtype: np.dtype, generation: dict, origin: Origin | None
) -> None:
  # transformers 5 reads `dtype`, older releases and vLLM `torch_dtype`.
  config |= {'torch_dtype': dtype.name, 'dtype': dtype.name}
  object_store.write_json(staged / 'config.json', origin.completed(config) if origin else config)
  ids = {k: config[k] for k in ('bos_token_id', 'eos_token_id', 'pad_token_id') if config[k] is not None}
  object_store.write_json(staged / _GENERATION, generation | ids)
