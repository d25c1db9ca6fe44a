"""Modules that predict several tokens at once (DeepSeek-V3, arXiv:2412.19437, section 2.2), which exports keep.

They are not trained, and nothing is sampled with them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from jaxpost.formats import model_folder, multimodal, safetensors_file, tensor_layout
from jaxpost.models.config import ModelConfig

_FIELDS = (
  'num_nextn_predict_layers',
  'num_mtp_layers',
  'mtp_num_hidden_layers',
  'mtp_use_dedicated_embeddings',
  'mtp_layers_block_type',
  'mtp_hybrid_override_pattern',
)


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
    del written, unused
    count = self._config.get('num_nextn_predict_layers') or 0
    found = {k: v for k, v in self._found.items() if tensor_layout.is_predictor(k, self._cfg, count)}
    if any(tensor.dtype == safetensors_file.FLOAT8 for tensor in found.values()):
      logging.warning(
        '%s: the modules that predict several tokens at once are in float8, and an export has none', self._folder
      )
      return {}
    return found

  def copy_files(self, staged: Any) -> None:
    del staged
