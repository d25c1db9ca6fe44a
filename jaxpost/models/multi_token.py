"""A module on top of a decoder that predicts the token after the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2).

At each position its inputs are the hidden state that the model gives its head and the embedding of the next token. Both
are normed, concatenated, projected to the hidden size and processed by one more layer with attention. The module uses
the embedding and the head of the model. `programs/multi_token.py` computes it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxpost.models.parameters import LAYER, MTP, Param

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

OUTSIDE = ('embed_norm', 'hidden_norm', 'in', 'norm')  # parameters that are not those of its layer


def rows(table: dict[str, Param], cfg: ModelConfig) -> dict[str, Param]:
  """Returns the rows of the module; its layer has the rows of those in the stack 'layers' of `table`."""
  d, numbers, scale = cfg.hidden_size, (cfg.num_layers,), 'zeros' if cfg.norm_offset else 'ones'
  layer = {path.removeprefix('layers/'): spec for path, spec in table.items() if path.startswith('layers/')}
  out = {name: dataclasses.replace(spec, shape=(1, *spec.shape[1:]), numbers=numbers) for name, spec in layer.items()}
  for name, hf in ('embed_norm', 'enorm'), ('hidden_norm', 'hnorm'), ('norm', 'shared_head.norm'):
    out[name] = Param((1, d), ('layers', None), f'{LAYER}{hf}.weight', scale, exact=True, numbers=numbers)
  shape, axes = (1, 2 * d, d), ('layers', 'embed', None)
  out['in'] = Param(shape, axes, f'{LAYER}eh_proj.weight', matrix=True, numbers=numbers)
  return {f'{MTP}/{name}': spec for name, spec in out.items()}


def one_layer(cfg: ModelConfig) -> ModelConfig:
  """Returns the config of the module's layer, which is like the last layer with attention."""
  last = max(i for i, name in enumerate(cfg.layer_stacks) if name == 'layers')
  per_layer = dict(layer_ropes=cfg.layer_ropes[last : last + 1], layer_windows=cfg.layer_windows[last : last + 1])
  if cfg.state_shapes:
    per_layer['mixers'] = ('layers',)
  experts = cfg.experts and dataclasses.replace(cfg.experts, first_dense=0)
  return dataclasses.replace(cfg, num_layers=1, more_heads=(), experts=experts, **per_layer)
