"""Opens the model folders that a config names: Hugging Face, PEFT adapters, exported custom models.

Only headers and config.json are read here; `load_weights.py` reads the tensors. Imported only if a config names a
folder: a run that starts from random weights or from a checkpoint needs no file format.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from etils import epath

from jaxpost.errors import InputError, did_you_mean
from jaxpost.formats import config_fields, families, hf, model_folder, multimodal, peft, predictors, tensor_layout
from jaxpost.models import model as model_lib
from jaxpost.models.config import CustomConfig, ModelConfig
from jaxpost.stage.schema import ModelSection
from jaxpost.storage import hub, manifest, object_store

if TYPE_CHECKING:
  from jaxpost.stage.config import Config
  from jaxpost.stage.records import Source
  from jaxpost.types import Objective


def open_folder(text: str, key: str, text_only: bool = False) -> tuple[epath.Path, ModelConfig]:
  """Returns the local folder of a Hugging Face model and its shape, downloading org/name.

  Args:
    text_only: whether to return the shape of the text model of a multimodal folder.

  Raises:
    InputError: `text`, the value of the config field `key`, names no such folder.
  """
  folder = local_folder(text, key)
  config = hf.read_config(folder, text_only)
  hf.check(folder, config)
  return folder, config


def local_folder(text: str, key: str) -> epath.Path:
  """Returns the local folder of a Hugging Face model, downloading org/name; InputError if there is none."""
  folder = epath.Path(text).expanduser()
  if not folder.exists():
    hint = did_you_mean(str(folder), [str(other) for other in folder.parent.glob('*')])
    if not (on_hub := hub.parse(text)):
      raise InputError(f'{key}: {text} does not exist; {hint}name a folder, a run or org/name of the hub')
    repo, revision, file = on_hub
    try:
      folder = epath.Path(hub.download(repo, 'model', revision, file))
    except InputError as error:
      raise InputError(f'{key}: {hint}{error}') from error
  if folder.is_dir() and not (folder / 'config.json').exists():
    raise InputError(f'{key}: {text} is neither the folder of a run nor a Hugging Face folder; it has no config.json')
  return folder


def origin(section: ModelSection, cfg: ModelConfig) -> multimodal.Origin | None:
  """Returns the folder of `config.model`, or of its adapter's base, if it has parts that `cfg` lacks and exports copy.

  These are the other parts of a multimodal folder, and modules for multi-token prediction.
  """
  path, family = section.path, families.of_model(cfg.family)
  if not (section.text_only or family.hybrid or family.extra_layers):
    return None
  run_folder, _ = manifest.split_run(path)
  is_run = (epath.Path(run_folder).expanduser() / 'checkpoints').exists()
  if not path or is_run:  # random weights and checkpoints have no other parts
    return None
  path = peft.base_of(epath.Path(path).expanduser()) or path
  folder = model_folder.opened(local_folder(path, 'config.model.path'))
  if section.text_only and config_fields.other_parts(object_store.read_json(folder / 'config.json')):
    return multimodal.Origin(folder)
  modules = predictors.Predictors(folder, cfg)
  written = {name for stored in tensor_layout.table(cfg).values() for name in stored.names}
  return modules if modules.others(written) or 'mtp' in cfg.more_heads else None


def source_with_module(source: Source, config: Config, objective: Objective) -> Source:
  """Returns the source with its module for multi-token prediction, which `config.nll.mtp_weight` trains."""
  key = 'config.nll.mtp_weight'
  if isinstance(source.config, CustomConfig):  # refused by `model_limits.check`
    return source
  if not objective.mtp_weight:
    raise InputError(f'{key}: {config.algorithm} does not train the module for multi-token prediction; set it to 0')
  if config.lora.rank or config.lora.path or config.model.quantize:
    raise InputError(f"{key}: trains all of a module; set config.lora.rank=0, lora.path='' and model.quantize=''")
  if 'mtp' in source.config.more_heads:  # an earlier run or stage has trained it
    return source
  if source.base or source.checkpoints or source.stage:
    raise InputError(
      f'{key}: these weights are of a run without a module for multi-token prediction; start from a folder with one, '
      'such as the export of that run, or set it to 0'
    )
  return dataclasses.replace(source, config=predictors.with_module(source.config, source.folder, key))


def open_custom(path: str, model: model_lib.Model) -> epath.Path:
  """Returns the folder `path` after checking that it was exported from the custom model `model`."""
  folder = epath.Path(path).expanduser()
  if not folder.is_dir():
    raise InputError(f'config.model.path: {path} is no folder; a custom model reads what was exported from it')
  hf.check(folder, model.config, model.table)
  return folder


def with_adapter(config: ModelConfig, path: str, rank: int = 0) -> ModelConfig:
  """Returns the shape `config` with the adapter of a PEFT folder, and with its scalar head if it has one.

  Raises:
    InputError: it is no adapter of this model, or `rank` is neither 0 nor the adapter's rank.
  """
  if peft.is_judge(path) and not config.num_labels:
    config = model_lib.with_scalar_head(config)
  spec = peft.read_spec(path, config)
  adapter_rank, *_ = spec
  if rank not in (0, adapter_rank):
    raise InputError(f'config.lora.rank: {rank} is not the rank of the adapter {path}, {adapter_rank}; leave it 0')
  return dataclasses.replace(config, lora=spec)
