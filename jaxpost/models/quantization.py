"""Quantization of frozen matrices to 8 or 4 bits (QLoRA, arXiv:2305.14314).

Legend: a matrix W [L, (E,) in, out], where `in` and `out` may be several dimensions;
n blocks of b <= 64 entries along its last input dimension.

A quantized matrix has two rows in the parameter table instead of one: `codes`, and `scales` in bfloat16, the largest
magnitude of each block. Matrices are dequantized on use, one at a time, in the forward and in the backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.errors import InputError
from jaxpost.matmul import einsum
from jaxpost.models.parameters import input_dims, is_mtp, join, leaf, nest

if TYPE_CHECKING:
  from jaxpost.models.model import Model

KINDS = ('int8', 'nf4')
_BLOCK = 64
# The NF4 data type: quantiles of a normal distribution (QLoRA, appendix E), and
# the decision thresholds between neighbors.
_NF4 = np.array(
  [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
  ],
  np.float32,
)
_BETWEEN = (_NF4[1:] + _NF4[:-1]) / 2


@functools.partial(jax.tree_util.register_dataclass, data_fields=('codes', 'scales'), meta_fields=('axis',))
@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
  """A quantized matrix, which `matmul.einsum` accepts as an operand."""

  codes: jax.Array  # int8; or uint8 with two 4-bit codes, those of the first half of a block in the low bits
  scales: jax.Array  # bfloat16, one for each block
  axis: int  # dimension that is cut into blocks, counted from the end

  def product(self, spec: str, x: jax.Array, dtype: str, out: str = 'float32') -> jax.Array:
    """Computes `einsum(spec, x, W)` in the type `out`; no gradient for the matrix."""
    return _product(spec, x, self, dtype, out)

  def dense(self, dtype: Any) -> jax.Array:
    """Returns the dequantized matrix in this type."""
    axis = self.codes.ndim + self.axis

    def blocks(x):
      return x.reshape(*x.shape[:axis], self.scales.shape[axis], -1, *x.shape[axis + 1 :])

    x = blocks(self.codes)
    if x.dtype == jnp.uint8:
      x = _nf4_values(jnp.concatenate([x & 15, x >> 4], axis + 1))
    else:
      x = x.astype(jnp.float32) / 127
    x = x * blocks(self.scales).astype(jnp.float32)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _product(spec, x, w, dtype, out):
  return einsum(spec, x, _materialize_after(x, w).dense(dtype), dtype, out)


def _forward(spec, x, w, dtype, out):
  return _product(spec, x, w, dtype, out), (w, jnp.zeros((0,), x.dtype))


def _backward(spec, dtype, _out, residuals, g):
  w, kind = residuals
  x_term, w_term, out = spec.replace('->', ',').split(',')
  g = g.astype(dtype)
  dx = einsum(f'{out},{w_term}->{x_term}', g, _materialize_after(g, w).dense(dtype), dtype, kind.dtype.name)
  return dx.astype(kind.dtype), None


_product.defvjp(_forward, _backward)


def _materialize_after(x, w):
  """Returns w behind a barrier, so that it is not dequantized before x exists.

  XLA would hoist dequantization out of loops over micro-batches and tokens, and keep all matrices dequantized at once.
  """
  return jax.lax.optimization_barrier((x, w))[1]


def _nf4_values(x):
  """Looks up the NF4 values of 4-bit codes.

  Accelerators, where a gather is slow, select by the bits of a code. XLA:CPU would
  store each step of that selection, so there it is a gather.
  """
  return jax.lax.platform_dependent(
    x, cpu=lambda x: jnp.asarray(_NF4).at[x].get(mode='promise_in_bounds'), default=_nf4_by_bits
  )


def _nf4_by_bits(x):
  values = [jnp.float32(v) for v in _NF4]
  for bit in range(4):  # halves the candidates
    is_set = (x >> bit) & 1 > 0
    values = [jnp.where(is_set, b, a) for a, b in zip(values[::2], values[1::2])]
  return values[0]


def quantize(w: jax.Array, kind: str, axis: int) -> dict[str, jax.Array]:
  """Quantizes a matrix of any type along `axis`; returns {'codes', 'scales'}."""
  axis %= w.ndim
  block = _block(w.shape[axis], kind)
  x = w.astype(jnp.float32).reshape(*w.shape[:axis], -1, block, *w.shape[axis + 1 :])
  scales = jnp.max(jnp.abs(x), axis + 1).astype(jnp.bfloat16)
  # Divide by the rounded scale, the one that dequantization multiplies by.
  divisor = jnp.expand_dims(scales.astype(jnp.float32), axis + 1)
  x = x / jnp.where(divisor > 0, divisor, 1)
  if kind == 'nf4':
    codes = sum((x > t).astype(jnp.uint8) for t in _BETWEEN)
    low, high = jnp.split(codes, 2, axis + 1)
    codes = low | high << 4
  else:
    codes = jnp.clip(jnp.round(127 * x), -127, 127).astype(jnp.int8)
  return {'codes': codes.reshape(*w.shape[:axis], -1, *w.shape[axis + 1 :]), 'scales': scales}


def _block(size: int, kind: str) -> int:
  """Returns the largest block length <= 64 that divides `size`."""
  step = 2 if kind == 'nf4' else 1
  divisors = [b for b in range(step, _BLOCK + 1, step) if size % b == 0]
  if not divisors:
    raise InputError(f'config.model.quantize: nf4 packs pairs, and a matrix of this model has {size} inputs; take int8')
  return divisors[-1]


# ------------------------------------------------------------------ in a model


def block_axes(table: dict) -> dict[str, int]:
  """Returns {path: dimension of the blocks, from the end} of the quantizable matrices.

  These are the matrices of layers, experts included, but not routers, embedding and head.
  """
  return {
    path: spec.stack + input_dims(spec) - 1 - len(spec.shape)
    for path, spec in table.items()
    if spec.matrix and spec.stacked and not spec.exact and '/' in path and not spec.dtype and not is_mtp(path)
  }


def quantize_model(model: Model, kind: str) -> Model:
  """Returns the model with its matrices in 8 (`kind` 'int8') or 4 bits ('nf4')."""
  base = model.base or model
  axes = block_axes(base.table)
  table = {}
  frozen = set(model.frozen)
  if not axes:
    raise InputError(
      f'config.model.quantize: no matrices of layers are known in {base.config.family} models; leave it empty'
    )
  for path, spec in model.table.items():
    if path not in axes:
      table[path] = spec
      continue
    arrays = jax.eval_shape(
      functools.partial(quantize, kind=kind, axis=axes[path]), jax.ShapeDtypeStruct(spec.shape, jnp.float32)
    )
    for name, x in arrays.items():
      table[f'{path}/{name}'] = dataclasses.replace(spec, shape=x.shape, dtype=x.dtype.name, exact=True, matrix=False)
      if path in frozen:
        frozen.add(f'{path}/{name}')
  out = dataclasses.replace(model, table=table, base=base, quantized=kind, frozen=frozenset(frozen & set(table)))

  def view(params: dict) -> dict:  # with `QuantizedMatrix` leaves, dequantized on use
    return join(params, nest({path: QuantizedMatrix(axis=axis, **leaf(params, path)) for path, axis in axes.items()}))

  return dataclasses.replace(
    out,
    forward=lambda params, *args, **kwargs: model.forward(view(params), *args, **kwargs),
    view=lambda params: model.view(view(params)),
    init=lambda key, dtype=jnp.float32: convert_params(model.init(key, dtype=dtype), out),
    merge=lambda params: model.merge(convert_params(params, base)),
  )


def check_frozen(model: Model) -> None:
  """Raises InputError if a quantized matrix is trained."""
  for path in block_axes((model.base or model).table):
    if f'{path}/codes' not in model.frozen:
      raise InputError(
        f'config.model.quantize: {model.quantized!r} is for weights that are not trained, and {path} is trained; set '
        'config.lora.rank, or freeze it with config.train.freeze'
      )


def convert_params(params: dict, model: Model) -> dict:
  """Quantizes, requantizes or dequantizes matrices to the form that `model` has, one layer at a time.

  Matrices that `params` lacks are skipped.
  """
  dtype = params['norm'].dtype if 'norm' in params else jnp.float32  # of dequantized matrices
  for path, axis in block_axes((model.base or model).table).items():
    try:
      x = leaf(params, path)
    except KeyError:
      continue
    kind = ''
    if isinstance(x, dict):
      kind = 'nf4' if x['codes'].dtype == jnp.uint8 else 'int8'
    if kind == model.quantized:
      continue
    if kind:
      x = jax.lax.map(lambda layer: layer.dense(dtype), QuantizedMatrix(axis=axis, **x))
    if model.quantized:
      x = jax.lax.map(functools.partial(quantize, kind=model.quantized, axis=axis), x)
    params = join(params, nest({path: x}))
  return params
