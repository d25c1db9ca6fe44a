"""Modules that predict several tokens at once (DeepSeek-V3, arXiv:2412.19437, section 2.2).

Exports copy them from the original folder. One of them can be trained (`with_module`). Sampling does not use them.
"""

import contextlib
import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxpost.errors import InputError
from jaxpost.formats import families, hf, model_folder, multimodal, tensor_layout
from jaxpost.formats.tensor_layout import Stored
from jaxpost.models.config import ModelConfig
from jaxpost.storage import object_store

# Fields of config.json: the number of such modules, which families name differently, and their settings.
_COUNTS = ('num_nextn_predict_layers', 'num_mtp_layers', 'mtp_num_hidden_layers')
_FIELDS = (*_COUNTS, 'mtp_use_dedicated_embeddings', 'mtp_layers_block_type', 'mtp_hybrid_override_pattern')


def with_module(cfg: ModelConfig, folder: model_folder.Path | None, key: str) -> ModelConfig:
  """Returns `cfg` with one more module: that of `folder`, or a random one without a folder.

  InputError, which names the config field `key`, if there is no such module, or it cannot be trained.
  """
  if families.of_model(cfg.family).predictor is None:
    trainable = sorted(name for name, family in families.every().items() if family.predictor is not None)
    raise InputError(
      f'{key}: a module for multi-token prediction can be trained in {", ".join(trainable)}, not in {cfg.family}, '
      'whose module has other layers or names; set it to 0: an export keeps the module unchanged'
    )
  if 'layers' not in cfg.layer_stacks:
    raise InputError(f'{key}: {cfg.family} with dense layers alone has no layer like that of the module; set it to 0')
  cfg = dataclasses.replace(cfg, more_heads=(*cfg.more_heads, 'mtp'))
  if folder is None:
    return cfg
  folder = model_folder.opened(folder)
  raw = object_store.read_json(folder / 'config.json')
  fields = raw.get('text_config') or raw
  with contextlib.ExitStack() as stack:
    opened = model_folder.open_tensors(folder, stack)
    tensors = {multimodal.text_name(name) or name: tensor for name, (_, tensor) in opened.items()}
    table = tensor_layout.table(cfg)
    missing = table['mtp/in'].names[0] not in tensors
    root, first = ('model', cfg.num_layers) if families.of_model(cfg.family).extra_layers else ('mtp', 0)
    numbers = {int(match[1]) for name in tensors if (match := re.match(rf'{root}\.layers\.(\d+)\.', name))}
    count = max(sum(number >= first for number in numbers), *(fields.get(name) or 0 for name in _COUNTS))
    if missing or count != 1:
      have = 'no module' if missing else f'{count} modules'
      raise InputError(
        f'{key}: {folder} has {have} for multi-token prediction, and only a single one can be trained; set it to 0'
      )
    for copy, path in _copies(table, cfg).items():
      name = table[path].names[0]
      if copy in tensors and not hf.same_values(tensors[copy], tensors[name]):
        raise InputError(
          f'{key}: {folder}: {copy} is another tensor than {name}, and a module with tables of its own is not built; '
          'set it to 0'
        )
  if fields.get('mtp_use_dedicated_embeddings'):
    raise InputError(
      f'{key}: mtp_use_dedicated_embeddings=true of {folder / "config.json"} is not built: the module would need an '
      'embedding of its own; set it to 0'
    )
  hf.check(folder, cfg)
  return cfg


def _copies(table: Mapping[str, Stored], cfg: ModelConfig) -> dict[str, str]:
  """Returns {tensor: parameter} of copies of the embedding and head that a module may hold."""
  if not families.of_model(cfg.family).extra_layers:
    return {}
  block = f'model.layers.{cfg.num_layers}'
  return {
    f'{block}.embed_tokens.weight': 'embed',
    f'{block}.shared_head.head.weight': 'head' if 'head' in table else 'embed',
  }


class Predictors(multimodal.Origin):
  """A folder of a text model from which an export copies such modules; a context that closes its files."""

  renames = False

  def __init__(self, folder: model_folder.Path, cfg: ModelConfig):
    super().__init__(folder)
    self._cfg = cfg

  def completed(self, config: dict[str, Any]) -> dict[str, Any]:
    counted = _COUNTS if 'mtp' in self._cfg.more_heads else ()  # `config` counts the module that is written
    return config | {k: self._config[k] for k in _FIELDS if k in self._config and not (k in counted and k in config)}

  def name(self, text: str) -> str:
    return text

  def with_copies(self, table: dict[str, Stored]) -> dict[str, Stored]:
    if 'mtp' not in self._cfg.more_heads:
      return table
    out = dict(table)
    for copy, path in _copies(table, self._cfg).items():
      if copy in self._found:
        out[path] = dataclasses.replace(out[path], copies=(*out[path].copies, copy))
    return out

  def others(self, written: Collection[str] = (), unused: str = '') -> dict[str, Any]:
    """Returns {name: tensor} of the modules; none if they are in float8 (see `without_float8`)."""
    del unused
    count = self._config.get('num_nextn_predict_layers') or 0
    modules = {name: tensor for name, tensor in self._found.items() if hf.is_predictor(name, self._cfg, count)}
    modules = {name: tensor for name, tensor in modules.items() if name.removesuffix('_scale_inv') not in written}
    return self.without_float8(modules)

  def copy_files(self, staged: Any) -> None:
    del staged
