"""Applies the Muon of optax.contrib to the matrices of a model's layers."""

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

  Each matrix of a stack is orthogonalized by itself. Updates are scaled by 0.2 sqrt(max(inputs, outputs)), which gives
  them the RMS of AdamW's, so that its learning rates and weight decay apply (arXiv:2502.16982, section 2.2).

  Args:
    options: weight_decay of `config.optim`, and those of its b1, b2 and eps that are set.
    part: the model of the trained parameters.
    decayed: tree of bool, the parameters that AdamW decays.
  """
  dimensions, scales = {}, {}  # by parameter path; MaskedNode for parameters of AdamW
  for path, spec in part.table.items():
    dimensions[path] = scales[path] = optax.MaskedNode()
    if spec.matrix and not spec.exact and spec.stack:
      # Dimensions of a parameter: stack (layers, experts), inputs, outputs.
      first_output = spec.stack + input_dims(spec)
      dims = tuple(range(len(spec.shape)))
      dimensions[path] = contrib.MuonDimensionNumbers(dims[spec.stack : first_output], dims[first_output:])
      inputs, outputs = math.prod(spec.shape[spec.stack : first_output]), math.prod(spec.shape[first_output:])
      scales[path] = 0.2 * max(inputs, outputs) ** 0.5
  muon = optax.chain(
    contrib.scale_by_muon(eps=options.get('eps', 1e-8), weight_dimension_numbers=lambda updates: nest(dimensions)),
    optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, nest(scales))),
    optax.add_decayed_weights(options['weight_decay']),
    optax.scale_by_learning_rate(schedule),
  )
  adamw = optax.adamw(schedule, **options, mask=decayed)
  labels = nest({path: 'muon' if isinstance(scale, float) else 'adamw' for path, scale in scales.items()})
  return optax.partition({'muon': muon, 'adamw': adamw}, labels)
