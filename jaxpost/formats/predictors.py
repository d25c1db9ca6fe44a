"""Modules that predict several tokens at once (DeepSeek-V3, arXiv:2412.19437, section 2.2), which exports keep.

One of them can be trained (`with_module`). Nothing is sampled with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection
from typing import Any

from jaxpost.errors import InputError
from jaxpost.formats import families, hf, model_folder, multimodal, safetensors_file, tensor_layout
from jaxpost.models.config import ModelConfig
from jaxpost.storage import object_store

_FIELDS = (
  'num_nextn_predict_layers',
  'num_mtp_layers',
  'mtp_num_hidden_layers',
  'mtp_use_dedicated_embeddings',
  'mtp_layers_block_type',
  'mtp_hybrid_override_pattern',
)

_COUNTS = ('num_nextn_predict_layers', 'mtp_num_hidden_layers')


def with_module(cfg: ModelConfig, folder: model_folder.Path | None, key: str) -> ModelConfig:
  """Returns the config with the module that `folder` has beside `cfg`, or a random one.

  Args:
    folder: None where weights are random.
    key: the config field that asks for it, for errors.

  Raises:
    InputError: there is no such module, or it cannot be trained.
  """
  if families.of_model(cfg.family).predictor is None:
    able = sorted(name for name, family in families.every().items() if family.predictor is not None)
    raise InputError(
      f'{key}: a module for multi-token prediction can be trained in {", ".join(able)}, not in {cfg.family}, whose '
      'module has other layers or names; set it to 0, and an export keeps the module as it is'
    )
  cfg = dataclasses.replace(cfg, more_heads=(*cfg.more_heads, 'mtp'))
  if folder is None:
    return cfg
  folder = model_folder.opened(folder)
  raw = object_store.read_json(folder / 'config.json')
  text = raw.get('text_config') or raw
  count = next((text[name] for name in _COUNTS if text.get(name) is not None), 1)
  with contextlib.ExitStack() as stack:
    found = {multimodal.text_name(name) or name for name in model_folder.open_tensors(folder, stack)}
  missing = tensor_layout.table(cfg)['mtp/in'].names[0] not in found
  if missing or count != 1:
    what = 'no module' if missing else f'{count} modules'
    raise InputError(
      f'{key}: {folder} has {what} for multi-token prediction, and only a single one can be trained; set it to 0'
    )
  if text.get('mtp_use_dedicated_embeddings'):
    raise InputError(
      f'{key}: mtp_use_dedicated_embeddings=true of {folder / "config.json"} is not built: the module would need an '
      'embedding of its own; set it to 0'
    )
  hf.check(folder, cfg)
  return cfg


class Predictors(multimodal.Origin):
  """A folder of a text model that an export takes such modules from; closes its files as a context."""

  renames = False

  def __init__(self, folder: model_folder.Path, cfg: ModelConfig):
    super().__init__(folder)
    self._cfg = cfg

  def completed(self, config: dict[str, Any]) -> dict[str, Any]:
    return config | {field: self._config[field] for field in _FIELDS if field in self._config}

  def name(self, text: str) -> str:
    return text

  def others(self, written: Collection[str] = (), unused: str = '') -> dict[str, Any]:
    """Returns {name: tensor} of the modules; none if they are in blocks of float8, of which an export has no scales."""
    del unused
    count = self._config.get('num_nextn_predict_layers') or 0
    found = {k: v for k, v in self._found.items() if tensor_layout.is_predictor(k, self._cfg, count)}
    found = {k: v for k, v in found.items() if k not in written}
    if any(tensor.dtype == safetensors_file.FLOAT8 for tensor in found.values()):
      logging.warning(
        '%s: the modules that predict several tokens at once are in float8, and an export has none', self._folder
      )
      return {}
    return found

  def copy_files(self, staged: Any) -> None:
    del staged
