"""Weights and caches of samplers in 8 bits: codes, with a scale for each group of them.

A weight has a scale for each output of its product (FlashRL, Yao et al. 2025), a cached key or value one for each token
and head. Codes are exact as operands of products, and scales multiply the results, so that a sampler computes the same
as with dequantized arrays. Nothing here has a gradient. Training and scoring use the weights without rounding;
importance weights (`rl.importance`) correct for the difference.
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
from jaxpost.matmul import Compute, einsum
from jaxpost.models.config import CustomConfig
from jaxpost.models.layers import FUSED
from jaxpost.models.parameters import input_dims
from jaxpost.models.quantization import block_axes

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.model import Model

# {value of `config.rollout.weights` or `cache`: (type of the codes, largest magnitude)}. The codes of float8 are its
# bits as integers, because XLA:CPU converts a whole float8 array to update a part of it.
KINDS = {'int8': ('int8', 127), 'float8': ('uint8', 448)}
_LARGEST, _FLOAT8 = dict(KINDS.values()), jnp.float8_e4m3fn


@functools.partial(jax.tree_util.register_dataclass, data_fields=('codes', 'scales'), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Scaled:
  """An array codes * scales, which `matmul.einsum` accepts as an operand."""

  codes: Any  # int8, or the bits of float8 (e4m3) as uint8
  scales: Any  # an array of as many dimensions, of size 1 along those that share a scale

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the array."""
    return self.codes.shape

  @property
  def dtype(self) -> Any:
    """The type of the operands of products with it."""
    return self.scales.dtype

  def product(self, spec: str, x: jax.Array, dtype: str, result: str = 'float32') -> jax.Array:
    """Computes `einsum(spec, x, array)`; the product with the codes has the type `result`.

    The barrier keeps XLA from converting all codes before the loop over tokens, which would hold them in `dtype`.
    """
    x_term, w_term, out = spec.replace('->', ',').split(',')
    x, codes = jax.lax.optimization_barrier((x, self.codes))
    scales = self.scales.astype(jnp.float32)
    scaled_axes = {c for c, n in zip(w_term, scales.shape) if n > 1}
    if scaled_axes <= set(out):  # scales the result, elsewhere x
      return einsum(spec, x, _operand(codes, dtype), dtype, result) * _aligned(scales, w_term, out)
    return einsum(spec, x * _aligned(scales, w_term, x_term), _operand(codes, dtype), dtype, result)

  def dense(self, dtype: Any) -> jax.Array:
    """Returns the array in this type."""
    return (_operand(self.codes, jnp.float32) * self.scales.astype(jnp.float32)).astype(dtype)


def _operand(codes: jax.Array, dtype: Any) -> jax.Array:
  """Returns the codes in the type of a product's operands.

  On the CPU this is a lookup: XLA:CPU expands conversions of float8 into so many operations that decoding takes minutes
  to compile.
  """
  if codes.dtype == jnp.int8:
    return codes.astype(dtype)
  values = np.arange(256, dtype=np.uint8).view(_FLOAT8).astype(np.float32)
  return jax.lax.platform_dependent(
    codes,
    cpu=lambda x: jnp.asarray(values, dtype).at[x].get(mode='promise_in_bounds'),
    default=lambda x: jax.lax.bitcast_convert_type(x, _FLOAT8).astype(dtype),
  )


def _aligned(scales: jax.Array, axes: str, target: str) -> jax.Array:
  """Returns scales with dimensions `axes`, reshaped to broadcast over an array with dimensions `target`."""
  kept = [c for c in axes if c in target]
  scales = scales.reshape([n for c, n in zip(axes, scales.shape) if c in target])
  scales = scales.transpose(sorted(range(len(kept)), key=lambda i: target.index(kept[i])))
  return jnp.expand_dims(scales, [i for i, c in enumerate(target) if c not in kept])


def encode(x: jax.Array, code: str, axes: tuple[int, ...], dtype: Any) -> Scaled:
  """Rounds an array to codes of this type, with scales in `dtype` that are shared along `axes`."""
  x, largest = x.astype(jnp.float32), _LARGEST[code]
  scales = (jnp.max(jnp.abs(x), axes, keepdims=True) / largest).astype(dtype)
  divisor = scales.astype(jnp.float32)  # the rounded scale, by which products are multiplied
  x = jnp.clip(x / jnp.where(divisor > 0, divisor, 1), -largest, largest)
  codes = jnp.round(x).astype(code) if code == 'int8' else jax.lax.bitcast_convert_type(x.astype(_FLOAT8), code)
  return Scaled(codes, scales)


def input_axes(model: Model) -> dict[str, tuple[int, ...]]:
  """Returns {name: dimensions of a layer's matrix that a product sums over, counted from the end}."""
  table = (model.base or model).table
  return {
    path.split('/')[1]: tuple(last_input - i for i in range(input_dims(table[path])))
    for path, last_input in block_axes(table).items()
  }


def for_sampler(model: Model, compute: Compute, rollout: Any) -> tuple[Model, Compute]:
  """Returns the model and `compute` for a sampler with the weights and the cache of `config.rollout`."""
  if rollout.cache:
    compute = dataclasses.replace(compute, cache=KINDS[rollout.cache][0])
  if rollout.weights:
    model = dataclasses.replace(model, store=_layer_encoder(model, rollout.weights))
  return model, compute


def _layer_encoder(model: Model, kind: str) -> Callable[[dict], dict]:
  """Returns a function that encodes the matrices of a sampler's layer, or the shardings of matrices: `Model.store`.

  The matrices are those of `quantization.block_axes`, some of them fused; embedding, head, norms and biases stay.
  """
  axes, code = input_axes(model), KINDS[kind][0]
  axes |= {name: axes[first] for name, (first, *_) in FUSED.items() if first in axes}

  def encode_layer(p: dict) -> dict:
    return {name: encode_leaf(x, axes[name]) if name in axes else x for name, x in p.items()}

  def encode_leaf(x: Any, shared_axes: tuple[int, ...]) -> Scaled:
    if not isinstance(x, NamedSharding):
      return encode(x, code, shared_axes, jnp.float32)
    parts = list(x.spec)
    for axis in shared_axes:
      parts[axis] = None
    return Scaled(x, NamedSharding(x.mesh, PartitionSpec(*parts)))

  return encode_layer


def bytes_saved(model: Model, layout: Layout, width: int) -> float:
  """Returns how many bytes of a device the 8-bit weights save, compared to `width` bytes for each number."""
  base, saved = model.base or model, 0.0
  for path in block_axes(base.table):
    spec = base.table[path]
    shard = layout.sharding(spec.axes, spec.shape).shard_shape(spec.shape)
    inputs = shard[spec.stack : spec.stack + input_dims(spec)]
    saved += math.prod(shard) * (width - 1 - 4 / math.prod(inputs))
  return saved


def empty_cache(shape: tuple[int, ...], compute: Compute) -> Scaled:
  """Returns the empty keys or values of a layer in a cache."""
  return Scaled(jnp.zeros(shape, compute.cache), jnp.zeros((*shape[:-1], 1), compute.dtype))


def check(rollout: Any, model: Model) -> None:
  """Raises InputError if `config.rollout` asks for 8 bits where the model or its sampler does not support them."""
  cfg, weights, cache = model.config, rollout.weights, rollout.cache
  is_custom = isinstance(cfg, CustomConfig)
  refuse(
    bool(weights) and rollout.share_base,
    'config.rollout.weights: rollout.share_base samples from the matrices of training, which this would not round; '
    'set only one of them (config.model.quantize is for the base of adapters)',
  )
  refuse(
    bool(weights) and (is_custom or not block_axes((model.base or model).table)),
    f'config.rollout.weights: no matrices of layers are known in {cfg.family} models; leave it empty',
  )
  refuse(
    bool(weights) and not is_custom and bool(cfg.experts),
    'config.rollout.weights: the matrices of experts would all be converted at every token; leave it empty '
    '(config.rollout.cache is also for mixtures of experts)',
  )
  refuse(
    bool(cache) and (is_custom or cfg.latent or len(cfg.cached[1]) < 2),
    f'config.rollout.cache: {cfg.family} models do not cache keys and values of heads; leave it empty',
  )
