"""The optimizer Muon, as optax.contrib has it, on the matrices of a model's layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxpost.models.parameters import input_dims, nest

if TYPE_CHECKING:
  from jaxpost.models.model import Model


def make_muon(schedule: optax.Schedule, options: dict, part: Model, decayed: dict) -> optax.GradientTransformation:
  """Returns Muon for the matrices of layers, AdamW for embeddings, heads, norms, biases and routers.

  Each matrix of a stack is orthogonalized by itself. Updates are scaled to the size of AdamW's, 0.2 sqrt(larger side),
  so that its learning rates and weight decay apply (arXiv:2502.16982, section 2.2).

  Args:
    schedule: step -> learning rate.
    options: weight_decay of `config.optim`, and those of its b1, b2 and eps that are set.
    part: the model with the rows that are trained.
    decayed: tree of bool, the parameters that AdamW decays.
  """
  sides, sizes = {}, {}
  for path, spec in part.table.items():
    sides[path] = sizes[path] = optax.MaskedNode()  # not of Muon
    if spec.matrix and not spec.exact and spec.stack:
      split = spec.stack + input_dims(spec)  # dimensions: stack (layers, experts), inputs, outputs
      dims = tuple(range(len(spec.shape)))
      sides[path] = contrib.MuonDimensionNumbers(dims[spec.stack : split], dims[split:])
      sizes[path] = 0.2 * max(math.prod(spec.shape[spec.stack : split]), math.prod(spec.shape[split:])) ** 0.5
  matrices = optax.chain(
    contrib.scale_by_muon(eps=options.get('eps', 1e-8), weight_dimension_numbers=lambda updates: nest(sides)),
    optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, nest(sizes))),
    optax.add_decayed_weights(options['weight_decay']),
    optax.scale_by_learning_rate(schedule),
  )
  others = optax.adamw(schedule, **options, mask=decayed)
  labels = nest({path: 'muon' if isinstance(size, float) else 'adamw' for path, size in sizes.items()})
  return optax.partition({'muon': matrices, 'adamw': others}, labels)
