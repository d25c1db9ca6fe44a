"""Exports the policy of a stage as a Hugging Face folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pathlib
from typing import TYPE_CHECKING

from jaxpost.formats import hf_export
from jaxpost.models import model as model_lib
from jaxpost.models import parameters
from jaxpost.programs.compile import after
from jaxpost.storage import object_store

if TYPE_CHECKING:
  from etils import epath

  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.stage.records import Inputs


def export(inputs: Inputs, folder: epath.PathLike, params: dict) -> None:
  """Writes a folder that `transformers` loads; adapter/ in it is for `peft`."""
  tokenizer, model, section = inputs.tokenizer, inputs.model, inputs.config.model
  policy = inputs.sources['policy']
  base = policy.base or policy
  pad, save = tokenizer.pad_id, tokenizer.save
  if inputs.algorithm.scalar_head:
    pad = pad_id(tokenizer)
    save = functools.partial(save_tokenizer, tokenizer)
  merge = model.merge  # operation by operation: fused, sums round otherwise
  if model.quantized:
    from jaxpost.models import quantization

    merge = after(functools.partial(quantization.convert_params, model=model.base), merge)
  origin = None
  if section.path:  # random weights have no other parts
    from jaxpost.stage import model_folders

    origin = model_folders.origin(section, model.config)
  save_beside = save
  # The tensors of a multimodal base have other names than an adapter of the text model would ask for.
  if model.config.lora and not (origin and origin.renames):
    from jaxpost.formats import peft

    save_adapter = peft.writer(model, params, adapter_base(inputs))

    def save_beside(path: epath.Path) -> None:
      save(path)
      save_adapter(path / 'adapter')

  with origin or contextlib.nullcontext():
    hf_export.save(
      folder,
      model_lib.build(dataclasses.replace(model_lib.with_value_head(model.config, False), lora=())),
      params,
      merge=merge,
      stop_ids=tokenizer.stop_ids,
      bos_id=tokenizer.bos_id,
      pad_id=pad,
      # The model's, also where the tokenizer is from elsewhere.
      generation=hf_export.read_generation(str(base.folder or section.path) if section.tokenizer else tokenizer.source),
      tokenizer_save=save_beside,
      origin=origin,
    )


def adapter_base(inputs: Inputs) -> str:
  """Returns the name of the model that a stage's adapter is for.

  '' if it has no name, or if more is trained than the adapter.
  """
  source, model = inputs.sources['policy'], inputs.model
  while source.base is not None and source.config.lora == model.config.lora:
    source = source.base
  trained = set(model.table) - model.frozen
  only_adapter = all(parameters.is_adapter(path) or path == 'score' for path in trained)
  return source.name if only_adapter and source.base is None else ''


def pad_id(tokenizer: Tokenizer) -> int:
  """Returns a padding token that is not a stop token.

  transformers reads the score at the last token that is not padding: where
  the end of a turn pads, too, it would read one token early.
  """
  known = (tokenizer.pad_id, tokenizer.bos_id, *sorted(tokenizer.hf.added_tokens_decoder))
  good = [i for i in known if i is not None and i not in tokenizer.stop_ids]
  if not good:
    logging.warning(
      '%s: has no token but those that end a text to pad with; read scores of one text at a time', tokenizer.source
    )
  return (good or known)[0]


def save_tokenizer(tokenizer: Tokenizer, folder: epath.PathLike) -> None:
  """Writes the tokenizer's files so that it pads with `pad_id`."""
  tokenizer.save(folder)
  if (pad := pad_id(tokenizer)) != tokenizer.pad_id:
    path = pathlib.Path(folder) / 'tokenizer_config.json'
    saved = object_store.read_json(path) if path.exists() else {}
    object_store.write_json(path, saved | {'pad_token': tokenizer.hf.convert_ids_to_tokens(pad)})
