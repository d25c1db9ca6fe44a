"""Reads and writes adapter folders of the `peft` library.

A folder has adapter_config.json and adapter_model.safetensors. Adapters of experts are written as one tensor per
expert, which `peft` joins for the modules of `transformers`; the joined form can be read as well (`peft_experts.py`).
"""

import contextlib
import dataclasses
import logging
import math
import pathlib
import re
from collections.abc import Callable

import numpy as np
import safetensors.numpy
from etils import epath

from jaxpost.errors import InputError
from jaxpost.formats import families, hf_export, model_folder, peft_experts, peft_layout, tensor_layout, tensor_reader
from jaxpost.formats.peft_layout import CONFIG, WEIGHTS
from jaxpost.formats.tensor_layout import Stored
from jaxpost.models import lora, parameters, transformer
from jaxpost.models import model as model_lib
from jaxpost.models.config import ModelConfig
from jaxpost.models.model import Model
from jaxpost.storage import object_store, seals

# Field of adapter_config.json -> supported values; with others, the adapter would compute something else.
_SUPPORTED = {
  'peft_type': ('LORA',),
  'bias': ('none',),
  'use_dora': (False,),
  'fan_in_fan_out': (False,),
  'lora_bias': (False,),
  'use_qalora': (False,),
  'alora_invocation_tokens': (None,),
  'layers_to_transform': (None,),
  'layer_replication': (None,),
  'trainable_token_indices': (None,),
  # Others, such as PiSSA, also change the weights of the model.
  'init_lora_weights': (True, False, 'gaussian', 'eva', 'orthogonal'),
}
# `peft` adds both names to `modules_to_save` of any classifier; decoders call their head 'score'.
_HEADS = {'score', 'classifier'}


def base_of(folder: epath.Path) -> str | None:
  """Returns the name or folder of the model that an adapter was trained on, or ''; None if the folder is no adapter."""
  if (folder / CONFIG).exists() and not (folder / 'config.json').exists():
    return object_store.read_json(folder / CONFIG).get('base_model_name_or_path') or ''
  return None


def is_judge(folder: epath.PathLike) -> bool:
  """Returns True if an adapter folder holds a scalar head of a reward model."""
  path = model_folder.opened(folder) / CONFIG
  return path.is_file() and 'score' in (object_store.read_json(path).get('modules_to_save') or ())


# -------------------------------------------------------------------- reading


def read_spec(folder: epath.PathLike, cfg: ModelConfig) -> tuple:
  """Returns `ModelConfig.lora` of an adapter folder, for the model `cfg`; reads headers only.

  Raises:
    InputError: the folder is no adapter, is one of another model, or has a setting that is not supported.
  """
  folder = model_folder.opened(folder)
  if not (folder / CONFIG).is_file():
    raise InputError(f'{folder}: no folder of an adapter (it has no {CONFIG})')
  raw = object_store.read_json(folder / CONFIG)
  _check_config(folder / CONFIG, raw, cfg)
  with contextlib.ExitStack() as stack:
    tensors, places, target_names = _open(folder, raw, cfg, stack)
    paths = [path for path, stored in places.items() if path.endswith('/a') and stored.names[0] in tensors]
    if not paths:
      example = next(iter(places.values())).names[0]
      raise peft_layout.other_model(folder, f'no tensor like {example} is in it')
    targets = [target_names[path.removeprefix(f'{parameters.ADAPTER_ROOT}/').removesuffix('/a')] for path in paths]
    if len({name.partition('/')[0] for name in target_names.values()}) == 1:  # one stack needs no name
      targets = [name.partition('/')[2] for name in targets]
    spec = (raw['r'], float(raw['lora_alpha']), bool(raw.get('use_rslora')), '|'.join(targets))
    plain = model_lib.build(dataclasses.replace(cfg, lora=()))
    model = lora.with_adapters(plain, dataclasses.replace(cfg, lora=spec))
    _check_tensors(folder, peft_layout.layout(model, _modules_with_own_a(raw)), tensors)
  return spec


def load(folder: epath.PathLike, model: Model, shardings: dict, write: Callable = tensor_reader.write) -> dict:
  """Returns the adapters of a folder, nested, as float32 arrays with these shardings; `write`: see `hf.load_params`.

  Raises:
    InputError: the folder is damaged, or of another model.
  """
  folder = model_folder.opened(folder)
  seals.check(folder, [WEIGHTS])
  seals.warn(folder, [CONFIG])
  with contextlib.ExitStack() as stack:
    raw = object_store.read_json(folder / CONFIG)
    tensors, _, _ = _open(folder, raw, model.config, stack)
    places = peft_layout.layout(model, _modules_with_own_a(raw))
    _check_tensors(folder, places, tensors)
    _check_columns(folder, places, tensors)
    return parameters.nest(
      {
        path: tensor_reader.load(stored, tensors, parameters.leaf(shardings, path), np.dtype(np.float32), write)
        for path, stored in places.items()
      }
    )


def _open(
  folder: epath.Path, raw: dict, cfg: ModelConfig, stack: contextlib.ExitStack
) -> tuple[dict, dict[str, Stored], dict[str, str]]:
  """Opens the tensors of a folder, which are closed with `stack`.

  Returns:
    {name: open tensor}; {path of an adapter row: its place} of all adapters that the model could have; and {path of a
    matrix: its name in `config.lora.targets`}.
  """
  table = transformer.param_table(dataclasses.replace(cfg, lora=()))
  target_names = {path: lora.target_name(path, table[path]) for path in lora.targets(table)}
  all_targets = dataclasses.replace(cfg, lora=(1, 1.0, False, '|'.join(target_names.values())))
  places = tensor_layout.table(cfg, lora.adapter_rows(table, all_targets))
  tensors = model_folder.open_file(folder / WEIGHTS, stack)
  return peft_experts.split(folder, raw, tensors, places, cfg), places, target_names


def _modules_with_own_a(raw: dict) -> set[str]:
  """Returns the modules of several matrices in which each matrix has its own A; see `peft_layout`."""
  return {name.rpartition('.')[2] for name in raw.get('rank_pattern') or {}}


def _check_config(path: epath.Path, raw: dict, cfg: ModelConfig) -> None:
  """Raises InputError for settings of adapter_config.json that are not supported."""
  for field, values in _SUPPORTED.items():
    if field in raw and raw[field] not in values:
      raise InputError(f'{path}: {field}={raw[field]!r} is not supported (only {values[0]!r})')
  saved = raw.get('modules_to_save') or []
  if not isinstance(saved, list) or not {*map(str, saved)} <= _HEADS:
    raise InputError(f'{path}: modules_to_save={saved!r} is not supported (only the head of a reward model, score)')
  rank, alpha = raw.get('r'), raw.get('lora_alpha')
  if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
    raise InputError(f'{path}: r={rank!r} and lora_alpha={alpha!r} must be a rank and a number')
  _check_patterns(path, raw, cfg)


def _check_patterns(path: epath.Path, raw: dict, cfg: ModelConfig) -> None:
  """Raises InputError for ranks and alphas of single modules, except modules of several matrices (`peft_layout`)."""
  patterns = {field: raw.get(field) or {} for field in ('rank_pattern', 'alpha_pattern')}
  for field, pattern in patterns.items():
    if not isinstance(pattern, dict):
      raise InputError(f'{path}: {field}={pattern!r} must be an object')
  if not any(patterns.values()):
    return
  matrices = peft_layout.matrices_of_modules(cfg)

  def multiplied(value):
    return {name: value * matrices.get(name.rpartition('.')[2], 0) for name in patterns['rank_pattern']}

  supported = {'rank_pattern': multiplied(raw['r']), 'alpha_pattern': multiplied(raw['lora_alpha'])}
  if patterns != supported or raw.get('use_rslora'):
    given = ', '.join(f'{field}={pattern!r}' for field, pattern in patterns.items() if pattern)
    known = ', '.join(f'{n} times r and lora_alpha for {name}' for name, n in matrices.items())
    raise InputError(f'{path}: {given} is not supported (only {known or "none of this model"}, without use_rslora)')


def _check_tensors(folder: epath.Path, places: dict[str, Stored], tensors: dict) -> None:
  """Raises InputError unless the folder has the tensors of these places, and no other."""
  shapes = {name: stored.shape for stored in places.values() for name in stored.names}
  for name, shape in shapes.items():
    if name not in tensors:
      raise peft_layout.other_model(folder, f'tensor {name} {list(shape)} is missing')
    actual_shape = tensors[name].shape
    if actual_shape != shape:
      raise peft_layout.other_model(folder, f'tensor {name} has shape {list(actual_shape)}, not {list(shape)}')
  extra = sorted(set(tensors) - set(shapes))
  if extra:
    raise peft_layout.other_model(folder, f'tensor {extra[0]} and {len(extra) - 1} more have no place')


def _check_columns(folder: epath.Path, places: dict[str, Stored], tensors: dict) -> None:
  """Raises InputError where a matrix with its own A uses columns of B that belong to another."""
  for path, stored in places.items():
    if not path.endswith('/b'):
      continue
    rank, *out = stored.spec.shape[stored.spec.stack :]
    if stored.shape[1] == rank:
      continue
    own_columns = slice(stored.column, stored.column + rank)
    for name in stored.names:
      own_rows = tensors[name][:][stored.first : stored.first + math.prod(out)]
      if np.delete(own_rows, own_columns, axis=1).any():
        raise peft_layout.other_model(folder, f'tensor {name} mixes the matrices in it')


# -------------------------------------------------------------------- writing


def writer(model: Model, params: dict, base: str) -> Callable | None:
  """Returns a function that writes the folder of a model's adapter; None, with a warning, if `peft` could not use it.

  Every process calls this, which is a collective; one writes. `base` names the base model of the adapter, or is ''.
  """
  # The merged folder is complete without an adapter folder, so a reason not to write one is only a warning.
  if not base:
    logging.warning('no adapter/ is written: its base model has no name (set model.path, not init_from) or is trained')
    return None
  try:
    places = peft_layout.layout(model)
  except InputError as e:
    logging.warning('no adapter/ is written: %s', e)
    return None
  # Adapters that `peft` 0.21 drops, or puts elsewhere, when it loads the folder; `load` reads them.
  pattern = families.of_model(model.config.family).lost_adapters
  lost = sorted(name for stored in places.values() for name in stored.names if pattern and re.search(pattern, name))
  if lost:
    logging.warning(
      'adapter/: `peft` does not load adapters such as %s of a %s model; jaxpost does, and the merged export has them',
      lost[0],
      model.config.family,
    )
  tensors = dict(hf_export.export_tensors(places, params, np.dtype(np.float32)))
  config = _config(model, places, base)

  def write(folder: epath.PathLike) -> None:
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / WEIGHTS, metadata={'format': 'pt'})
    object_store.write_json(folder / CONFIG, config)
    seals.add(folder, [WEIGHTS, CONFIG])

  return write


def _config(model: Model, places: dict[str, Stored], base: str) -> dict:
  """Returns the content of adapter_config.json."""
  rank, alpha, rslora, _ = model.config.lora
  adapters = {path: stored for path, stored in places.items() if parameters.is_adapter(path)}
  matrices = {
    peft_layout.module_of(stored): stored.shape[1] // rank
    for path, stored in adapters.items()
    if path.endswith('/b') and stored.shape[1] > rank
  }
  has_experts = any(stored.spec.stack > 1 for stored in adapters.values())
  if rslora and (matrices or has_experts):
    # `peft` would divide by the root of the whole tensor's rank.
    alpha, rslora = alpha * math.sqrt(rank), False
  is_judge = bool(model.config.num_labels)
  return {
    'peft_type': 'LORA',
    'task_type': 'SEQ_CLS' if is_judge else 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'r': rank,
    'lora_alpha': alpha,
    'use_rslora': rslora,
    'target_modules': sorted({peft_layout.module_of(stored) for stored in adapters.values()}),
    'lora_dropout': model.dropout,
    'rank_pattern': {name: n * rank for name, n in matrices.items()},
    'alpha_pattern': {name: n * alpha for name, n in matrices.items()},
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
    'modules_to_save': ['score'] if is_judge else None,
  }
