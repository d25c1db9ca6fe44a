"""Sampling from the trainer's own leaves: a frozen base is in memory once.

A sampler's copy has an array for each layer, adapters merged and matrices
joined, which is faster. Here decoding reads the rows of stacked matrices, with
adapters beside them and codes made into numbers, one layer at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.models.parameters import STACKS, flatten, leaf, nest

if TYPE_CHECKING:
  from jaxpost.models.model import Model


def sampling_model(model: Model) -> Model:
  """The model for a sampler whose weights are those that training has."""
  return dataclasses.replace(
    model, prefill=functools.partial(_prefill, model), decode=functools.partial(_decode, model)
  )


def _prefill(model, weights, *args, **kwargs):
  return model.prefill(model.view(weights), *args, **kwargs)


def _decode(model, weights, *args, **kwargs):
  weights = model.view(weights)
  layers = [
    functools.partial(_layer, weights[name], i)
    for name in STACKS
    if name in weights
    for i in range(len(jax.tree.leaves(weights[name])[0]))
  ]
  return model.decode(weights | {'layers': layers}, *args, **kwargs)


def _layer(stack, i, x):
  # Taken when x is there: XLA would take all rows before the loop of tokens.
  stack, _ = jax.lax.optimization_barrier((stack, x))
  return jax.tree.map(lambda y: y[i], stack)


class SharedWeights:
  """Weights of a sampler: the frozen leaves, and a copy of the trained.

  A leaf that the sampler's layout has in another way is a copy, too.
  """

  def __init__(self, model: Model, layout):
    self._model, self._shardings = model, model.shardings(layout)

  def __call__(self, params) -> dict:
    placed, given = jax.device_put(params, self._shardings), flatten(params)
    weights = {path: x if path in self._model.frozen else jnp.copy(x) for path, x in flatten(placed).items()}
    self.shared_bytes = sum(x.nbytes for path, x in weights.items() if x is given[path])
    return nest(weights)

  def compile(self, params):
    pass

  def outputs(self, params) -> dict:
    return nest(
      {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=leaf(self._shardings, path))
        for path, x in flatten(params).items()
      }
    )
