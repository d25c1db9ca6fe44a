"""Matrix products (`einsum`) and `Compute`, their settings; `models/grouped.py` has those of experts.

Legend: einsum letters are the caller's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Compute:
  """How a program computes on a platform: types, memory and implementations.

  Attributes:
    dtype: type of the operands of matrix products. 'bfloat16' and 'float16' accumulate in float32; 'float32' is the
      exact mode of tests and parity (without HIGHEST an accelerator would use TF32 or bfloat16 passes).
    residual: type of the residual stream and other activations.
    cache: type of cached keys and values, which are rounded to `dtype` before; types of 8 bits have scales.
    unroll: layers as straight-line code (CPU, samplers) instead of `lax.scan`.
    remat: what the backward pass does not store but recomputes: 'none'; 'dots', all but the results of
      projections and attention; 'full', all but the input of each layer.
    q_chunk: queries attended to at a time.
    micro_tokens: tokens of a device at a time in an on-policy update; small parts waste less on padding.
    head_elements: upper bound of logits (tokens x vocabulary) in memory.
    decode_block: tokens that a sampler decodes per dispatch (`rollout.block=0`).
    platform: 'cpu', 'gpu' or 'tpu', for what XLA does well on one of them only.
    group_block: rows of a group that are multiplied at a time.
    ragged: use `jax.lax.ragged_dot` where it has a kernel. Elsewhere it multiplies every row by every matrix, as it
      does everywhere for the gradient of the matrices, which it therefore does not compute.
    attention: implementation, see `models.layers.attention`.
    forced: raise an error where it does not support something, instead of using another one.
    decode_kernel: kernel of `models/decode_kernels.py` for decoding; an engine clears it for models that it does not
      support; '': none.
    grouped_kernel: multiply groups of rows, of 16 bits, by a kernel, see `models.grouped.grouped`.
    recurrence_kernel: kernel of `models/recurrence_kernels.py` for the recurrences that it supports; '': none.
    rejected_shapes: `AttentionShape`s for which the attention kernel is wrong on this device; XLA computes those.
  """

  dtype: str = 'bfloat16'
  residual: str = 'float32'
  cache: str = 'float32'
  unroll: bool = True
  remat: str = 'none'
  q_chunk: int = 128
  micro_tokens: int = 2048
  head_elements: int = 2**25
  decode_block: int = 8
  platform: str = 'cpu'
  group_block: int = 32
  ragged: bool = False
  attention: str = 'chunked'
  forced: bool = False
  decode_kernel: str = ''
  grouped_kernel: bool = False
  recurrence_kernel: str = ''
  rejected_shapes: tuple = ()

  @property
  def uses_kernel(self) -> bool:
    """True if attention is by a kernel of an accelerator, which `hardware.kernel_check` verifies."""
    return self.attention != 'chunked'


# Values of `config.model.attention` that cannot attend from a part of a row.
WHOLE_ROW_KERNELS = ('triton',)


def compute_for(
  platform: str, dtype: str, remat: str, attention: str = 'auto', memory: float = 0.0, triton: bool = True
) -> Compute:
  """Returns measured choices for a platform; docs/performance.md has the figures.

  Args:
    dtype: 'auto' is bfloat16; `hardware.probe` may have replaced it before.
    remat: 'auto' is 'dots' on accelerators, and 'none' on CPU, where memory is not short.
    attention: 'auto' is splash on TPU, a Triton kernel on GPU and chunked on CPU; `hardware.kernel_check`
      leaves shapes to XLA that the kernel of this device gets wrong.
    memory: bytes of a device, of which the logits that are there at a time take up to an eighth; 0: unknown.
    triton: whether XLA compiles Triton for the GPU, which it does from compute capability 8 on.
  """
  dtype = 'bfloat16' if dtype == 'auto' else dtype
  forced = attention != 'auto'
  if not forced:
    attention = {'cpu': 'chunked', 'tpu': 'splash'}.get(platform, 'triton' if triton else 'chunked')
  remat = {'auto': 'none' if platform == 'cpu' else 'dots'}.get(remat, remat)
  rest = dict(dtype=dtype, cache=dtype, remat=remat, attention=attention, forced=forced)
  if platform == 'cpu':
    return Compute(**rest)
  has_kernels = triton and dtype in (('bfloat16',) if platform == 'tpu' else ('bfloat16', 'float16'))
  # The residual stream of many models leaves the range of float16.
  residual = 'float32' if dtype == 'float16' else dtype
  return Compute(
    **rest,
    residual=residual,
    unroll=False,
    q_chunk=1024,
    micro_tokens=16_384,
    head_elements=min(2**30, 2 ** int(math.log2(memory / 64))) if memory else 2**30,
    decode_block=32,
    platform='tpu' if platform == 'tpu' else 'gpu',
    group_block=256,
    ragged=platform == 'tpu',
    decode_kernel={'triton': 'triton', 'splash': 'mosaic'}.get(attention, '') if has_kernels else '',
    grouped_kernel=has_kernels,
    recurrence_kernel=('mosaic' if platform == 'tpu' else 'triton') if has_kernels else '',
  )


def einsum(spec: str, x: Any, w: Any, dtype: str, out: str = 'float32', layout: Any = None) -> jax.Array:
  """`jnp.einsum(spec, x, w)` in float32 from operands of type `dtype`.

  Forward and backward products take `dtype` operands and accumulate in float32. JAX's own rule would feed float32
  cotangents to the backward products, which then run at half the speed on CPU and miss the matrix units elsewhere.
  Every letter must occur in two of the three terms.

  Args:
    w: array, or a matrix with its own `product` method, such as `lora.Adapted`.
    out: type of the result, accumulated in float32 on each device; sums over a
      mesh are sent in this type.
    layout: a `Layout`: each device reduces the part of the gradient of w that it
      stores. x is [B, T, ...] then, and letters of w mean _DIMENSIONS.
  """
  return w.product(spec, x, dtype, out) if hasattr(w, 'product') else _einsum(spec, x, w, dtype, out, layout=layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5))
def _einsum(spec, x, w, dtype, out, layout):
  del layout
  # `jnp.einsum` sums over letters in alphabetical order; if that is not the order of the axes, as with n and h of
  # 'btnh,nhd->btd', XLA transposes both operands. So letters are renamed in the order in which they occur.
  letters = dict.fromkeys(filter(str.isalpha, spec))
  spec = spec.translate({ord(letter): chr(ord('a') + i) for i, letter in enumerate(letters)})
  return jnp.einsum(spec, x.astype(dtype), w.astype(dtype), precision=precision_of(dtype), preferred_element_type=out)


def _forward(spec, x, w, dtype, out, _layout):
  # Residuals are the cast operands; the empty arrays carry the input types.
  saved = (x.astype(dtype), w.astype(dtype))
  kinds = (jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype))
  return einsum(spec, *saved, dtype, out), (saved, kinds)


def _backward(spec, dtype, _out, layout, residuals, g):
  (x, w), (x_kind, w_kind) = residuals
  x_term, w_term, out = spec.replace('->', ',').split(',')
  g = g.astype(dtype)
  # Batch letters stay separate dimensions: XLA:CPU contracts [b, t] pairs at full speed but not a flattened one.
  dx = einsum(f'{out},{w_term}->{x_term}', g, w, dtype, x_kind.dtype.name)
  dw = matrix_gradient(spec, x, g, dtype, layout)
  return dx.astype(x_kind.dtype), dw.astype(w_kind.dtype)


# Letters of a parameter in an einsum and the logical axes they stand for.
_DIMENSIONS = {'d': 'embed', 'n': 'heads', 'f': 'mlp'}


def matrix_gradient(spec: str, x: jax.Array, g: jax.Array, dtype: str, layout: Any) -> jax.Array:
  """Returns the gradient of the w of `einsum(spec, x, w)`, from that of its result; `layout`: see `einsum`."""
  x_term, w_term, out = spec.replace('->', ',').split(',')

  def product(x, g):
    return einsum(f'{x_term},{out}->{w_term}', x, g, dtype)

  kept = None if layout is None else layout.sum_over_tokens(product, (x, g), *(_DIMENSIONS.get(c) for c in w_term))
  return product(x, g) if kept is None else kept


_einsum.defvjp(_forward, _backward)


def as_bits(x: jax.Array) -> jax.Array:
  """Returns a bfloat16 array as uint16 integers, its bits; other types as they are.

  XLA:CPU converts a whole bfloat16 array to float32 (and back) to slice or update a
  part of it: ten times the cost of a product with a few rows.
  """
  return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
  """Returns the bfloat16 array of `as_bits`; other types than uint16 as they are."""
  return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def on_bits(fn: Callable, x: jax.Array) -> jax.Array:
  """Applies `fn`, which moves elements and computes nothing, to `as_bits(x)`; returns the type of x."""
  return from_bits(fn(as_bits(x))) if x.dtype == jnp.bfloat16 else fn(x)


def precision_of(dtype: str) -> jax.lax.Precision | None:
  """Returns the precision of products of this type: that of float32 is exact."""
  return jax.lax.Precision.HIGHEST if dtype == 'float32' else None
