"""The one matrix product of the library, and how a program computes.

Legend: einsum letters are the caller's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Compute:
  """How mathematics that is the same everywhere is carried out here.

  dtype: type of the operands of matrix products. 'bfloat16' accumulates in
    float32; 'float32' is the exact mode of tests and parity (without HIGHEST
    an accelerator would use TF32 or bfloat16 passes).
  residual: type of the residual stream and other activations.
  cache: type of cached keys and values, rounded to `dtype` before.
  unroll: layers as straight code (CPU, samplers) or as `lax.scan`.
  remat: what the backward pass keeps: 'none' (all), 'dots', 'full' (nothing).
  q_chunk: rows of queries attended at a time.
  row_writes: a cache is written slot by slot: XLA:CPU's scatter copies it.
  head_elements: most logits (tokens x vocabulary) that exist at a time.
  """

  dtype: str = 'bfloat16'
  residual: str = 'float32'
  cache: str = 'float32'
  unroll: bool = True
  remat: str = 'none'
  q_chunk: int = 128
  head_elements: int = 2**25
  row_writes: bool = True


def compute_for(platform: str, dtype: str, remat: str) -> Compute:
  """Measured choices per platform; docs/performance.md has the figures."""
  if platform == 'cpu':
    return Compute(dtype=dtype, cache=dtype, remat=remat)
  return Compute(
      dtype=dtype, residual=dtype, cache=dtype, unroll=False, remat=remat,
      q_chunk=1024, head_elements=2**30, row_writes=False)


def einsum(spec: str, x, w, dtype: str):
  """`jnp.einsum(spec, x, w)` in float32 from operands of type `dtype`.

  Forward and backward products take `dtype` operands and accumulate in
  float32. JAX's own rule would feed float32 cotangents to the backward
  products, which then run at half the speed on CPU and miss the matrix units
  elsewhere. Every letter must occur in two of the three terms.

  `w` may be a matrix with a `product` of its own, such as `lora.Adapted`.
  """
  return w.product(spec, x, dtype) if hasattr(w, 'product') else _einsum(
      spec, x, w, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _einsum(spec, x, w, dtype):
  precision = jax.lax.Precision.HIGHEST if dtype == 'float32' else None
  return jnp.einsum(
      spec, x.astype(dtype), w.astype(dtype), precision=precision,
      preferred_element_type=jnp.float32)


def _forward(spec, x, w, dtype):
  # Residuals are the cast operands; the empty arrays carry the input types.
  saved = (x.astype(dtype), w.astype(dtype))
  kinds = (jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype))
  return einsum(spec, *saved, dtype), (saved, kinds)


def _backward(spec, dtype, residuals, g):
  (x, w), (x_kind, w_kind) = residuals
  inputs, out = spec.split('->')
  x_term, w_term = inputs.split(',')
  g = g.astype(dtype)
  # Batch letters stay separate dimensions: XLA:CPU contracts [b, t] pairs at
  # full speed but not a flattened one.
  dx = einsum(f'{out},{w_term}->{x_term}', g, w, dtype)
  dw = einsum(f'{x_term},{out}->{w_term}', x, g, dtype)
  return dx.astype(x_kind.dtype), dw.astype(w_kind.dtype)


_einsum.defvjp(_forward, _backward)
