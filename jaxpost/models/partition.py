"""Which parameters of a model are trained, and the conversion of weights from another form of the same model.

A model is a decoder that may have adapters (`lora.py`), quantized matrices
(`quantization.py`) and frozen parameters. Runs without the first two do not import these files.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.models.parameters import flatten, is_adapter, leaf, match_paths, nest

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.model import Model


def build(cfg: ModelConfig, dropout: float = 0.0) -> Model:
  """Builds the model of `cfg`, with the adapters of `cfg.lora` if there are any."""
  plain = model_lib.build(dataclasses.replace(cfg, lora=()))
  if not cfg.lora:
    return plain
  from jaxpost.models import lora

  return lora.with_adapters(plain, cfg, dropout)


def freeze(model: Model, pattern: str, mtp: bool = False) -> Model:
  """Returns the model with `frozen` set: the paths that are not trained.

  Args:
    pattern: regular expression that matches whole paths. With '', a model with adapters trains only these and a scalar
      head, and another model trains everything. `Param.frozen` are always frozen.
    mtp: whether to train a module for multi-token prediction.
  """
  if pattern:
    frozen = set(match_paths(model.table, pattern, 'config.train.freeze'))
  else:
    frozen = {p for p in model.table if model.config.lora and not is_adapter(p) and p != 'score'}
  frozen |= {p for p, spec in model.table.items() if spec.frozen} | (frozenset() if mtp else model.mtp)
  if len(frozen) == len(model.table):
    raise InputError(f'config.train.freeze: {pattern!r} leaves nothing to train')
  # An update costs as much as a forward pass, a second one for the gradients of activations,
  # and a third one for those of parameters, of which only the trained share is computed.
  sizes = {path: math.prod(spec.shape) for path, spec in model.table.items() if path not in model.mtp}
  share = 1 - sum(sizes.get(path, 0) for path in frozen) / sum(sizes.values())
  return dataclasses.replace(model, frozen=frozenset(frozen), passes=2 + share)


def frozen_base_model(cfg: ModelConfig, kind: str = '') -> Model:
  """Builds the model of `cfg` with trained adapters on a frozen base, quantized to `kind` (`quantized`)."""
  return quantized(freeze(build(cfg), ''), kind)


def quantized(model: Model, kind: str) -> Model:
  """Returns `quantization.quantize_model(model, kind)`, which is only imported if `kind` is not ''."""
  if not kind:
    return model
  from jaxpost.models import quantization

  return quantization.quantize_model(model, kind)


def convert(params: dict, theirs: Model, model: Model) -> dict:
  """Returns the parameters of `theirs`, with matrices quantized or dequantized to the form that `model` has."""
  if not (theirs.quantized or model.quantized):
    return params
  from jaxpost.models import quantization

  return quantization.convert_params(params, model)


def trained_part(model: Model) -> Model:
  """Returns the model with the trained rows of its table only."""
  return dataclasses.replace(model, table={p: spec for p, spec in model.table.items() if p not in model.frozen})


def split(params: dict, model: Model) -> tuple[dict, dict]:
  """Splits parameters into (trained, frozen); `parameters.join` merges them."""
  trained = {p: leaf(params, p) for p in model.table if p not in model.frozen}
  return nest(trained), nest({p: leaf(params, p) for p in model.table if p in model.frozen})


def adopt(params: dict, theirs: Model, model: Model, layout: Layout, dtype: Any, seed: int = 0) -> dict:
  """Converts parameters of `theirs` to those of `model`, the same decoder in another form.

  Adapters of `theirs` are merged unless `model` has the same; new adapters are initialized, and a new scalar head is 0.
  Leaves that `model` lacks are dropped. Matrices are quantized or dequantized to the form that `model` has; others get
  the type of their row in its table or, if that is '', `dtype`.
  """
  if theirs.config.lora not in ((), model.config.lora):
    params = theirs.merge(params)
  converted = flatten(convert(params, theirs, model))
  key = jax.random.key(seed)
  out = {}
  for i, (path, spec) in enumerate(model.table.items()):
    sharding = layout.sharding(spec.axes, spec.shape)
    if path in converted:
      value = in_type(converted[path], spec.dtype or dtype)
      out[path] = jax.device_put(value, sharding) if model.quantized else value
      continue
    value = np.zeros(spec.shape)  # of a scalar head
    if is_adapter(path):
      from jaxpost.models import lora

      value = np.asarray(lora.fresh(i, spec, key))
    out[path] = jax.device_put(value.astype(spec.dtype or dtype), sharding)
  return nest(out)


def in_type(x: jax.Array, dtype: Any) -> jax.Array:
  """Returns the array in the type `dtype`; the array itself if it already has that type."""
  return x if x.dtype == dtype else x.astype(dtype)
