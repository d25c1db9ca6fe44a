"""The text model of a multimodal folder: it is read alone, trained, and exported together with the other parts.

Such a folder also has a vision or an audio tower. The tensors of the text model have other names there, and its
config.json is the object `text_config` in that of the folder. An export copies all other tensors byte by byte, so that
the folder still loads as a multimodal model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shutil
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError
from jaxpost.formats import config_fields, model_folder, safetensors_file
from jaxpost.storage import object_store, seals

if TYPE_CHECKING:
  from jaxpost.formats.tensor_layout import Stored

OTHERS = 'model-other-parts.safetensors'
# Beginning of tensor names of the text model in a multimodal folder -> in a folder of the text model alone.
_PREFIXES = {
  'model.language_model.': 'model.',
  'language_model.model.': 'model.',
  'language_model.lm_head.': 'lm_head.',
  # Qwen2-VL and Qwen2.5-VL.
  'model.layers.': 'model.layers.',
  'model.embed_tokens.': 'model.embed_tokens.',
  'model.norm.': 'model.norm.',
  'lm_head.': 'lm_head.',
  'mtp.': 'mtp.',
}
# model_type of a text model -> that of the family that computes the same for text.
_FAMILIES = {
  'gemma3': 'gemma3_text',
  'qwen2_vl': 'qwen2',
  'qwen2_vl_text': 'qwen2',
  'qwen2_5_vl': 'qwen2',
  'qwen2_5_vl_text': 'qwen2',
  'qwen3_vl_text': 'qwen3',
}
# Fields that a text_config may leave out, but not the config.json of its family.
_DEFAULTS = {'gemma3_text': dict(vocab_size=262_208, num_attention_heads=8)}
# All experts of a layer in one tensor, as in published folders of Qwen 3.5.
_EXPERTS = re.compile(r'((?:model|mtp)\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj')
# Positions along time, height and width, which are equal in text: plain rotary embeddings.
_SECTIONS = ('mrope_section', 'mrope_interleaved')
_NOT_COPIED = ('.safetensors', '.py', '.bin', '.pt', '.pth', '.ckpt', '.h5', '.msgpack')


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
  """Returns the config.json that a folder of the text model alone would have."""
  nested = raw.get('text_config')
  others = config_fields.other_parts(raw)
  text = dict(nested) if isinstance(nested, dict) else {k: v for k, v in raw.items() if k not in others}
  kind: Any = text.get('model_type') or raw.get('model_type')
  text['model_type'] = _FAMILIES.get(kind, kind)
  # transformers prefers the field outside of text_config.
  if 'tie_word_embeddings' in raw:
    text['tie_word_embeddings'] = raw['tie_word_embeddings']
  for name in ('rope_scaling', 'rope_parameters'):
    if isinstance(text.get(name), dict):
      block = {k: v for k, v in text[name].items() if k not in _SECTIONS}
      text[name] = block | {key: 'default' for key in ('type', 'rope_type') if block.get(key) == 'mrope'}
  return {**_DEFAULTS.get(text['model_type'], {}), **text}


def _unquantized(config: dict[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in config.items() if k != 'quantization_config'}


def text_name(name: str) -> str | None:
  """Returns the name of a tensor in a folder of the text model alone; None if it is not of the text model."""
  for prefix, own_prefix in _PREFIXES.items():
    if name.startswith(prefix):
      return own_prefix + name.removeprefix(prefix)
  return None


def text_tensors(tensors: dict[str, tuple], apart: bool) -> dict[str, tuple]:
  """Returns the tensors of the text model, {name in a folder of its own: (file, slice)}, among those of a folder.

  apart: the family has one tensor per expert, so a tensor of all experts of a layer is split.
  """
  out: dict[str, tuple] = {}
  for name, (file, tensor) in tensors.items():
    if (own_name := text_name(name)) is not None:
      parts = _experts(own_name, tensor) if apart else {own_name: tensor}
      out |= {part_name: (file, part) for part_name, part in parts.items()}
  return out


def _experts(name: str, tensor: Any) -> dict[str, Any]:
  """Returns {name: tensor} of each of E experts in a tensor [E, F, D] or [E, 2 F, D]; other tensors as they are."""
  match = _EXPERTS.fullmatch(name)
  if not match or not isinstance(tensor, safetensors_file.Tensor) or len(tensor.shape) != 3:
    return {name: tensor}
  matrices = match[2].split('_')  # ('gate', 'up'), whose rows follow each other, or ('down',)
  experts, rows, columns = tensor.shape
  shape, size = (rows // len(matrices), columns), tensor.size // experts // len(matrices)
  return {
    f'{match[1]}{i // len(matrices)}.{matrices[i % len(matrices)]}_proj.weight': dataclasses.replace(
      tensor, shape=shape, start=tensor.start + i * size, size=size
    )
    for i in range(experts * len(matrices))
  }


class Origin(contextlib.AbstractContextManager):
  """A multimodal folder from which an export of its text model copies the other parts; a context that closes its files.

  Attributes:
    renames: whether tensors of the text model have other names in the folder.
  """

  renames = True

  def __init__(self, folder: model_folder.Path):
    self._folder = folder
    self._config = object_store.read_json(folder / 'config.json')
    self._stack = contextlib.ExitStack()
    files, _ = model_folder.weight_files(folder)
    self._found = {name: tensor for file in files for name, tensor in model_folder.open_file(file, self._stack).items()}
    self._names = {own_name: name for name in self._found if (own_name := text_name(name)) is not None}
    # An export has one tensor per expert, even if this folder has one for all experts of a layer.
    for own_name, name in [*self._names.items()]:
      for part in _experts(own_name, self._found[name]):
        self._names[part] = name.removesuffix(own_name.removeprefix('model.')) + part.removeprefix('model.')

  def __exit__(self, *error: Any) -> None:
    self._stack.close()

  def completed(self, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of an export: the folder's, instead of `config` of the text model.

    Fields about quantization are removed, because the text model is exported without it.
    """
    del config
    text = self._config.get('text_config')
    nested = {'text_config': _unquantized(text)} if isinstance(text, dict) else {}
    return _unquantized(self._config) | nested

  def name(self, text: str) -> str:
    """Returns the name of a tensor of the text model in this folder; 'lm_head.weight' need not be in it."""
    if text in self._names:
      return self._names[text]
    raise InputError(f'{self._folder}: has no tensor for {text}, so an export cannot be completed; restore the folder')

  def others(self, written: Collection[str], unused: str) -> dict[str, Any]:
    """Returns {name: tensor} of those that are not of the text model, or without effect on it (`Family.unused`).

    written: names of the tensors of the text model.
    """

    def is_other(own_name: str | None, tensor: Any) -> bool:
      if own_name is None:
        return True
      if own_name.removesuffix('_scale_inv') in written:  # the export replaces float8 weights and their scales
        return False
      may_be_unused = own_name.startswith('mtp.') or bool(unused) and bool(re.fullmatch(unused, own_name))
      return may_be_unused and _experts(own_name, tensor).keys().isdisjoint(written)

    others = {name: tensor for name, tensor in self._found.items() if is_other(text_name(name), tensor)}
    modules = {name: others.pop(name) for name in list(others) if (text_name(name) or '').startswith('mtp.')}
    return others | self.without_float8(modules)

  def without_float8(self, modules: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors of modules for multi-token prediction; none, with a warning, if any is in float8.

    An export has no scales for float8 weights.
    """
    if any(tensor.dtype == safetensors_file.FLOAT8 for tensor in modules.values()):
      logging.warning(
        '%s: modules for multi-token prediction are in float8 and are left out of the export', self._folder
      )
      return {}
    return modules

  def with_copies(self, table: dict[str, Stored]) -> dict[str, Stored]:
    """Returns `table` with the names of copies of tensors that this folder has."""
    return table

  def write_others(self, staged: Any, others: dict[str, Any]) -> dict[str, str]:
    """Writes `others` to a file of `staged`; returns {name: file}."""
    with open(staged / OTHERS, 'wb') as file:
      file.write(safetensors_file.header({k: (t.dtype, t.shape, t.size) for k, t in others.items()}))
      for tensor in others.values():
        for piece in tensor.pieces():
          file.write(piece)
    return dict.fromkeys(others, OTHERS)

  def copy_files(self, staged: Any) -> None:
    """Copies the files that an export does not write itself, such as those of the image processor."""
    written = (safetensors_file.INDEX, seals.NAME, 'README.md')
    for path in self._folder.iterdir():
      target = staged / path.name
      hidden = path.name.startswith('.')
      if path.is_dir() or hidden or path.name in written or path.name.endswith(_NOT_COPIED) or target.exists():
        continue
      with path.open('rb') as source, target.open('wb') as copy:
        shutil.copyfileobj(source, copy)
