"""Weights and caches of samplers in 8 bits: codes, with a scale for each group of them.

A weight has a scale for each output of its product (FlashRL, Yao et al. 2025), a cached key or value one for each token
and head. Codes become operands of products as they are, which is exact, and scales multiply what the products
accumulate: a sampler computes what dequantized arrays would give. Nothing here has a gradient, and what is trained and
scored is not rounded; `rl.importance` weighs the difference.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpost.errors import refuse
from jaxpost.matmul import einsum
from jaxpost.models.config import CustomConfig
from jaxpost.models.layers import FUSED
from jaxpost.models.parameters import input_dims
from jaxpost.models.quantization import block_axes

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model

# Type of the codes, and their largest magnitude, by the names of `config.rollout.weights` and `cache`. Those of float8
# are its bits: XLA:CPU converts a whole float8 array to update a part of it.
KINDS = {'int8': ('int8', 127), 'float8': ('uint8', 448)}
_LARGEST, _FLOAT8 = dict(KINDS.values()), jnp.float8_e4m3fn


@functools.partial(jax.tree_util.register_dataclass, data_fields=('codes', 'scales'), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Scaled:
  """An array codes * scales, which `matmul.einsum` accepts as an operand.

  Attributes:
    codes: int8, or the bits of float8 (e4m3) as uint8.
    scales: of the same number of dimensions, with size 1 where entries share one.
  """

  codes: Any
  scales: Any

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the array."""
    return self.codes.shape

  @property
  def dtype(self) -> Any:
    """The type of the operands of products with it."""
    return self.scales.dtype

  def product(self, spec: str, x: jax.Array, dtype: str, result: str = 'float32') -> jax.Array:
    """Computes `einsum(spec, x, array)`, before it is scaled in the type `result`.

    The barrier keeps XLA from converting all codes before the loop over tokens, which would hold them in `dtype`.
    """
    x_term, w_term, out = spec.replace('->', ',').split(',')
    x, codes = jax.lax.optimization_barrier((x, self.codes))
    scales, letters = self.scales.astype(jnp.float32), [c for c, n in zip(w_term, self.scales.shape) if n > 1]
    if set(letters) <= set(out):
      return einsum(spec, x, _operand(codes, dtype), dtype, result) * _aligned(scales, w_term, out)
    return einsum(spec, x * _aligned(scales, w_term, x_term), _operand(codes, dtype), dtype, result)

  def dense(self, dtype: Any) -> jax.Array:
    """Returns the array in this type."""
    return (_operand(self.codes, jnp.float32) * self.scales.astype(jnp.float32)).astype(dtype)


def _operand(codes: jax.Array, dtype: Any) -> jax.Array:
  """Returns the codes in the type of a product's operands.

  XLA:CPU looks them up: it expands conversions of float8 into so many operations that decoding takes minutes to
  compile.
  """
  if codes.dtype == jnp.int8:
    return codes.astype(dtype)
  values = np.arange(256, dtype=np.uint8).view(_FLOAT8).astype(np.float32)
  return jax.lax.platform_dependent(
    codes,
    cpu=lambda x: jnp.asarray(values, dtype).at[x].get(mode='promise_in_bounds'),
    default=lambda x: jax.lax.bitcast_convert_type(x, _FLOAT8).astype(dtype),
  )


def _aligned(scales: jax.Array, term: str, to: str) -> jax.Array:
  """Returns scales with the letters `term` as they broadcast over an array with the letters `to`."""
  kept = [c for c in term if c in to]
  scales = scales.reshape([n for c, n in zip(term, scales.shape) if c in to])
  scales = scales.transpose(sorted(range(len(kept)), key=lambda i: to.index(kept[i])))
  return jnp.expand_dims(scales, [i for i, c in enumerate(to) if c not in kept])


def encode(x: jax.Array, code: str, axes: tuple[int, ...], dtype: Any) -> Scaled:
  """Rounds an array to codes of this type, with scales in `dtype` that are shared along `axes`."""
  x, largest = x.astype(jnp.float32), _LARGEST[code]
  scales = (jnp.max(jnp.abs(x), axes, keepdims=True) / largest).astype(dtype)
  by = scales.astype(jnp.float32)  # the rounded scale, which products multiply by
  x = jnp.clip(x / jnp.where(by > 0, by, 1), -largest, largest)
  codes = jnp.round(x).astype(code) if code == 'int8' else jax.lax.bitcast_convert_type(x.astype(_FLOAT8), code)
  return Scaled(codes, scales)


# ------------------------------------------------------------------ weights


def input_axes(model: Model) -> dict[str, tuple[int, ...]]:
  """Returns {name: dimensions of a layer's matrix that its product sums over, from the end}."""
  table = (model.base or model).table
  return {
    path.split('/')[1]: tuple(last - i for i in range(input_dims(table[path])))
    for path, last in block_axes(table).items()
  }


def for_sampler(model: Model, compute: Compute, rollout: Any) -> tuple[Model, Compute]:
  """Returns both as a sampler takes them whose weights and cache are those of `config.rollout`."""
  if rollout.cache:
    compute = dataclasses.replace(compute, cache=KINDS[rollout.cache][0])
  if rollout.weights:
    model = dataclasses.replace(model, store=_layer_encoder(model, rollout.weights))
  return model, compute


def _layer_encoder(model: Model, kind: str) -> Callable[[dict], dict]:
  """Returns a function that encodes the matrices of a sampler's layer, and maps shardings of matrices to theirs.

  The matrices are those that `quantization` takes, after `layers.fuse`; embedding, head, norms and biases stay.
  """
  axes, code = input_axes(model), KINDS[kind][0]
  axes |= {name: axes[first] for name, (first, *_) in FUSED.items() if first in axes}

  def encode_layer(p: dict) -> dict:
    return {name: of(x, axes[name]) if name in axes else x for name, x in p.items()}

  def of(x: Any, along: tuple[int, ...]) -> Scaled:
    if not isinstance(x, NamedSharding):
      return encode(x, code, along, jnp.float32)
    parts = list(x.spec)
    for axis in along:
      parts[axis] = None
    return Scaled(x, NamedSharding(x.mesh, PartitionSpec(*parts)))

  return encode_layer


def bytes_saved(model: Model, layout: Layout, width: int) -> float:
  """Returns by how many bytes of a device the weights are smaller than with `width` bytes for each number."""
  base, saved = model.base or model, 0.0
  for path in block_axes(base.table):
    spec = base.table[path]
    shard = layout.sharding(spec.axes, spec.shape).shard_shape(spec.shape)
    inputs = shard[spec.stack : spec.stack + input_dims(spec)]
    saved += math.prod(shard) * (width - 1 - 4 / math.prod(inputs))
  return saved


# -------------------------------------------------------------------- cache


def cached(x: jax.Array, compute: Compute) -> Scaled:
  """Encodes keys or values [..., h] as the cache keeps them: a scale for each token and head."""
  return encode(x, compute.cache, (-1,), compute.dtype)


def empty_cache(shape: tuple[int, ...], compute: Compute) -> Scaled:
  """Returns an empty array of a cache, keys or values of a layer."""
  return Scaled(jnp.zeros(shape, compute.cache), jnp.zeros((*shape[:-1], 1), compute.dtype))


# ------------------------------------------------------------------- checks


def check(rollout: Any, model: Model) -> None:
  """Raises InputError where `config.rollout` asks for 8 bits that this model, or its sampler, does not have."""
  cfg, weights, cache = model.config, rollout.weights, rollout.cache
  own = isinstance(cfg, CustomConfig)
  refuse(
    bool(weights) and rollout.share_base,
    'config.rollout.weights: rollout.share_base samples from the matrices of training; leave one of them out '
    '(config.model.quantize is for the base of adapters)',
  )
  refuse(
    bool(weights) and (own or not block_axes((model.base or model).table)),
    f'config.rollout.weights: {cfg.family} models have no matrices of layers that are known as such; leave it empty',
  )
  refuse(
    bool(weights) and not own and bool(cfg.experts),
    'config.rollout.weights: the matrices of experts would be converted whole at every token; leave it empty '
    '(config.rollout.cache is for mixtures of experts, too)',
  )
  refuse(
    bool(cache) and (own or cfg.latent),
    f'config.rollout.cache: {cfg.family} models do not cache keys and values of heads; leave it empty',
  )
