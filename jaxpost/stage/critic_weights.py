"""The model and the first weights of a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.models import model as model_lib
from jaxpost.models import partition
from jaxpost.models.parameters import join
from jaxpost.stage import load_weights

if TYPE_CHECKING:
  from etils import epath

  from jaxpost.models.model import Model
  from jaxpost.stage.place import PlacedStage


def load(placed: PlacedStage, params: dict, workdir: epath.PathLike | None) -> tuple[Model, dict]:
  """Returns the model of the critic and its parameters: its own weights or, under adapters, where it can, the policy's.

  Args:
    params: initial parameters of the policy, in `placed.train`; the critic shares frozen ones and copies others.
  """
  dtype = placed.config.model.param_dtype
  policy, source = placed.model, placed.inputs.sources['critic']
  cfg = model_lib.with_scalar_head(source.config, policy.config.lora)
  # Without adapters all weights of the critic are trained, and codes cannot be.
  model = partition.frozen_base_model(cfg, policy.quantized if cfg.lora else '')
  if model.frozen and model.frozen <= policy.frozen and source == placed.inputs.sources['policy']:
    trained, frozen = partition.split(partition.adopt(params, policy, model, placed.train, dtype), model)
    return model, join(jax.tree.map(jnp.copy, trained), frozen)
  return model, load_weights.load(
    source, model, placed.train, dtype, workdir, seed=placed.config.seed, ledger=placed.ledger
  )
