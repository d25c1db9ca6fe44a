"""TODO."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import pathlib
from typing import TYPE_CHECKING

from jaxpost.formats import hf, peft
from jaxpost.models import model as model_lib
from jaxpost.models import quantization
from jaxpost.programs.compile import after
from jaxpost.stage import export as export_lib
from jaxpost.stage import sources

if TYPE_CHECKING:
  from jaxpost.stage.prepare import Prepared


def export(p: Prepared, folder, params):
  """A folder that `transformers` loads; adapter/ in it is for `peft`."""
  t, pad, save = p.tokenizer, p.tokenizer.pad_id, p.tokenizer.save
  if p.algorithm.scalar_head:
    pad = export_lib.pad_id(t)
    save = functools.partial(export_lib.save_tokenizer, t)
  merge = p.model.merge  # operation by operation: fused, sums round otherwise
  if p.model.quantized:
    merge = after(functools.partial(quantization.convert_params, model=p.model.base), merge)
  adapter = peft.writer(p.model, params, sources.below_adapter(p))
  hf.save(
    folder,
    model_lib.build(dataclasses.replace(p.model.config, value_head=False, lora=())),
    params,
    merge=merge,
    stop_ids=t.stop_ids,
    bos_id=t.bos_id,
    pad_id=pad,
    # Of the model, whoever the tokenizer is from.
    generation=hf.read_generation(p.config.model.path if p.config.model.tokenizer else t.source),
    tokenizer_save=lambda path: (save(path), adapter(path / 'adapter')),
  )


def pad_id(tokenizer) -> int:
  """A token to pad with at which no text ends.

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


def save_tokenizer(tokenizer, folder):
  """Its files, padding with `pad_id`."""
  tokenizer.save(folder)
  if (pad := pad_id(tokenizer)) != tokenizer.pad_id:
    path = pathlib.Path(folder) / 'tokenizer_config.json'
    saved = json.loads(path.read_text()) if path.exists() else {}
    saved['pad_token'] = tokenizer.hf.convert_ids_to_tokens(pad)
    path.write_text(json.dumps(saved, indent=2) + '\n')
