"""The model and the first weights of a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.models import model as model_lib
from jaxpost.models.model import Model
from jaxpost.models.parameters import join, leaf, nest
from jaxpost.stage import load_weights

if TYPE_CHECKING:
  from etils import epath

  from jaxpost.stage.place import PlacedStage
  from jaxpost.stage.records import Inputs


def load(placed: PlacedStage, params: dict, workdir: epath.PathLike | None) -> tuple[Model, dict]:
  """Returns the model of the critic and its initial parameters.

  With adapters, a critic that starts from the policy's weights shares the frozen ones.

  Args:
    params: initial parameters of the policy, in the layout `placed.train`.
  """
  config, layout, ledger, dtype = placed.config, placed.train, placed.ledger, placed.config.model.param_dtype
  model, shares = model_of(placed.inputs)
  if not shares:
    source = placed.inputs.sources['critic']
    return model, load_weights.load(source, model, layout, dtype, workdir, seed=config.seed, ledger=ledger)
  if ledger.dry:
    trained = load_weights.described(model_lib.trained_part(model), layout, dtype)
  else:
    adopted, _ = model_lib.split(model_lib.adopt(params, placed.model, model, layout, dtype), model)
    trained = jax.tree.map(jnp.copy, adopted)
  return model, join(trained, nest({path: leaf(params, path) for path in model.frozen}))


def model_of(inputs: Inputs) -> tuple[Model, bool]:
  """Returns the model of the critic, and whether it shares its frozen weights with the policy."""
  policy, source = inputs.model, inputs.sources['critic']
  cfg = model_lib.with_scalar_head(source.config, policy.config.lora)
  # Without adapters all weights of the critic are trained, and quantized weights cannot be.
  model = model_lib.frozen_base_model(cfg, policy.quantized if cfg.lora else '')
  return model, bool(model.frozen) and model.frozen <= policy.frozen and source == inputs.sources['policy']
