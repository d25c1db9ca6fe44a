"""Sampling from the trainer's frozen weights, without a copy.

A sampler usually has a copy with one array per layer, merged adapters and fused matrices, which is faster. Here a
frozen base is in memory once: one layer at a time, decoding slices the stacked matrices of training, dequantizes them
if they are quantized, and adds the adapters as separate products.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.models.parameters import flatten, leaf, nest

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.model import Model


def share(model: Model, layout: Layout) -> tuple[SharedWeights, Model]:
  """Returns the `SharedWeights`, used instead of a `reshard.Reshard`, and the model for a sampler that reads them."""

  def prefill(weights, *args, **kwargs):
    return model.prefill(model.view(weights), *args, **kwargs)

  def decode(weights, *args, **kwargs):
    weights, stacks = model.view(weights), model.config.layer_stacks
    layers = [functools.partial(_layer, weights[name], stacks[:i].count(name)) for i, name in enumerate(stacks)]
    return model.decode(weights | {'layers': layers}, *args, **kwargs)

  return SharedWeights(model, layout), dataclasses.replace(model, prefill=prefill, decode=decode)


def _layer(stack: dict, i: int, x: jax.Array) -> dict:
  """Slices layer i from the stack, when its input x exists."""
  # The barrier keeps XLA from slicing all layers before the loop over tokens.
  stack, _ = jax.lax.optimization_barrier((stack, x))
  return jax.tree.map(lambda y: y[i], stack)


class SharedWeights:
  """Makes a sampler's weights: frozen leaves are shared, trained ones copied.

  A frozen leaf that the sampler's layout shards differently is copied, too. The methods are those of `reshard.Reshard`.
  """

  def __init__(self, model: Model, layout: Layout):
    self._model = model
    self._shardings = model.shardings(layout)

  def __call__(self, params: dict) -> dict:
    """Returns the weights, and sets `shared_bytes` to the number of bytes that are not copied."""
    placed = flatten(jax.device_put(params, self._shardings))
    weights = {path: x if path in self._model.frozen else jnp.copy(x) for path, x in placed.items()}
    sources = flatten(params)
    self.shared_bytes = sum(x.nbytes for path, x in weights.items() if x is sources[path])
    return nest(weights)

  def compile(self, params: dict) -> None:
    """Does nothing: there is no program."""

  def outputs(self, params: dict) -> dict:
    """Returns the tree of weights: arrays that are shared, and `ShapeDtypeStruct`s with shardings of copies."""

    def weight(path: str, x: jax.Array) -> jax.Array | jax.ShapeDtypeStruct:
      sharding = leaf(self._shardings, path)
      shared = path in self._model.frozen and x.sharding.is_equivalent_to(sharding, x.ndim)
      return x if shared else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return nest({path: weight(path, x) for path, x in flatten(params).items()})
