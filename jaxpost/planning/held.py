"""Exact sizes of what stays on the devices of a stage: weights, optimizer states, critic, frozen models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.hardware import memory as memory_lib
from jaxpost.models import model as model_lib
from jaxpost.models.model import Model
from jaxpost.models.parameters import nest
from jaxpost.programs import train as programs
from jaxpost.stage import assemble, critic_weights, frozen_roles, load_weights

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.planning.case import Case
  from jaxpost.stage.records import Inputs


def elements(model: Model, layout: Layout) -> float:
  """Returns the number of parameters of `model` on a device."""
  return float(sum(math.prod(layout.sharding(x.axes, x.shape).shard_shape(x.shape)) for x in model.table.values()))


def optimizer(inputs: Inputs, layout: Layout, dtype: str, role: str = 'policy', model: Model | None = None) -> float:
  """Returns the bytes of an optimizer's state on a device, with the weights of a reference that follows the policy.

  Args:
    dtype: of matrix products.
    model: of the role; None: the policy's.
  """
  part = model_lib.trained_part(model or inputs.model)
  transformation, _ = assemble.make_optimizer(inputs, role, part, dtype)
  params = nest({path: jax.ShapeDtypeStruct(x.shape, jnp.float32) for path, x in part.table.items()})
  shardings = programs.state_shardings(part, transformation, layout).opt_state
  state = jax.tree.map(lambda x, s: x.update(sharding=s), jax.eval_shape(transformation.init, params), shardings)
  return float(memory_lib.size(state))


def memory(case: Case) -> dict[str, float]:
  """Returns {purpose: bytes} on a training device."""
  inputs, train, dtype = case.inputs, case.train, case.inputs.config.model.param_dtype
  out = dict(
    parameters=float(memory_lib.size(load_weights.described(inputs.model, train, dtype))),
    optimizer=optimizer(inputs, train, case.compute.dtype),
  )
  if 'critic' in inputs.sources:
    model, shares = critic_weights.model_of(inputs)
    critic_part = model_lib.trained_part(model) if shares else model
    states = optimizer(inputs, train, case.compute.dtype, 'critic', model)
    out['critic'] = memory_lib.size(load_weights.described(critic_part, train, dtype)) + states
  if frozen_bytes := teacher_heads(case) + (0.0 if inputs.config.mesh.score_devices else frozen(case)):
    out['frozen'] = frozen_bytes
  return out


def frozen(case: Case) -> float:
  """Returns the bytes of frozen models' weights that are not shared with the policy, on a scoring device."""
  inputs, config = case.inputs, case.inputs.config
  roles = inputs.sources.keys() - {'policy', 'critic', *inputs.algorithm.precompute(config)}
  if config.reference.every:  # its weights are in the optimizer state
    roles -= {'reference'}
  parts = (frozen_roles.models_of(inputs, name, case.scores_beside)[1] for name in roles)
  return case.width * sum(elements(part, case.score) for part in parts)


def teacher_heads(case: Case) -> float:
  """Returns the bytes of copies of teachers' output embeddings, which the loss reads, on a training device."""
  inputs = case.inputs
  if case.scores_beside or inputs.algorithm.objective(inputs.config).divergence is None:
    return 0.0
  total = 0.0
  for name, source in inputs.sources.items():
    if name.startswith('teacher_'):
      shape = inputs.model.config.padded_vocab_size, source.config.hidden_size
      total += math.prod(case.train.sharding(('vocab', 'embed'), shape).shard_shape(shape))
  return case.width * total
