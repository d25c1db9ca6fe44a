"""The one matrix product of the library, and how a program computes.

Legend: einsum letters are the caller's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Compute:
  """How mathematics that is the same everywhere is carried out here.

  dtype: type of the operands of matrix products. 'bfloat16' accumulates in
    float32; 'float32' is the exact mode of tests and parity (without HIGHEST
    an accelerator would use TF32 or bfloat16 passes).
  residual: type of the residual stream and other activations.
  cache: type that keys and values are stored in, rounded to `dtype` before.
    XLA:CPU updates float32 in place but widens and narrows a bfloat16 array.
  unroll: layers as straight code (CPU, samplers) or as `lax.scan`.
  remat: what the backward pass keeps: 'none' (all), 'dots', 'full' (nothing).
  q_chunk: rows of queries attended at a time.
  row_writes: a cache is written slot by slot: XLA:CPU's scatter copies it.
  head_elements: most logits (tokens x vocabulary) that exist at a time.
  mesh: that training runs on; None is one device.
  """

  dtype: str = 'bfloat16'
  residual: str = 'float32'
  cache: str = 'float32'
  unroll: bool = True
  remat: str = 'none'
  q_chunk: int = 128
  head_elements: int = 2**25
  row_writes: bool = True
  mesh: Mesh | None = None


def compute_for(platform: str, dtype: str, remat: str) -> Compute:
  """Measured choices per platform; docs/performance.md has the figures."""
  if platform == 'cpu':
    return Compute(dtype=dtype, remat=remat)
  return Compute(
      dtype=dtype, residual=dtype, cache=dtype, unroll=False, remat=remat,
      q_chunk=1024, head_elements=2**30, row_writes=False)


def einsum(spec: str, x, w, dtype: str, out: str = 'float32'):
  """`jnp.einsum(spec, x, w)` in float32 from operands of type `dtype`.

  Forward and backward products take `dtype` operands and accumulate in
  float32. JAX's own rule would feed float32 cotangents to the backward
  products, which then run at half the speed on CPU and miss the matrix units
  elsewhere. Every letter must occur in two of the three terms.

  `out` is the type of the result, accumulated in float32 on each device; what
  is summed over a mesh then travels in it.

  `w` may be a matrix with a `product` of its own, such as `lora.Adapted`.
  """
  return w.product(spec, x, dtype) if hasattr(w, 'product') else _einsum(
      spec, x, w, dtype, out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _einsum(spec, x, w, dtype, out):
  precision = jax.lax.Precision.HIGHEST if dtype == 'float32' else None
  return jnp.einsum(
      spec, x.astype(dtype), w.astype(dtype), precision=precision,
      preferred_element_type=out)


def _forward(spec, x, w, dtype, out):
  # Residuals are the cast operands; the empty arrays carry the input types.
  saved = (x.astype(dtype), w.astype(dtype))
  kinds = (jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype))
  return einsum(spec, *saved, dtype, out), (saved, kinds)


def _backward(spec, dtype, result, residuals, g):
  del result
  (x, w), (x_kind, w_kind) = residuals
  inputs, out = spec.split('->')
  x_term, w_term = inputs.split(',')
  g = g.astype(dtype)
  # Batch letters stay separate dimensions: XLA:CPU contracts [b, t] pairs at
  # full speed but not a flattened one.
  dx = einsum(f'{out},{w_term}->{x_term}', g, w, dtype, x_kind.dtype.name)
  dw = einsum(f'{x_term},{out}->{w_term}', x, g, dtype)
  return dx.astype(x_kind.dtype), dw.astype(w_kind.dtype)


_einsum.defvjp(_forward, _backward)


# --------------------------------------------------- several products of one x


def products(spec: str, x, ws: tuple, compute: Compute) -> list:
  """[einsum(spec, x, w) for w in ws], of matrices split over `tensor`.

  The gradient by x is a sum over the matrices and over the mesh. XLA would
  send each matrix's part around by itself; here they are added up before.
  """
  mesh = compute.mesh
  if mesh is None or mesh.shape['tensor'] == 1 or any(
      hasattr(w, 'product') for w in ws):
    return [einsum(spec, x, w, compute.dtype) for w in ws]
  return _products(spec, x, tuple(ws), compute.dtype, mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _products(spec, x, ws, dtype, mesh):
  return [einsum(spec, x, w, dtype) for w in _gathered(spec, ws, dtype, mesh)]


def _gathered(spec, ws, dtype, mesh):
  """Matrices whole but for `tensor`; said alike each time, XLA does it once
  where a layer is recomputed and differentiated."""
  inputs, _ = spec.split('->')
  x_term, w_term = inputs.split(',')
  return [jax.lax.with_sharding_constraint(w.astype(dtype), NamedSharding(
      mesh, _cut(w_term, x_term, w_term, w.shape, mesh))) for w in ws]


def _cut(term, x_term, w_term, w_shape, mesh) -> PartitionSpec:
  """Of an operand whose letters are `term`: over `tensor`, if it can be."""
  letter = next(c for c in w_term if c not in x_term)
  fits = w_shape[w_term.index(letter)] % mesh.shape['tensor'] == 0
  return PartitionSpec(*(
      'tensor' if c == letter and fits else None for c in term))


def _products_forward(spec, x, ws, dtype, mesh):
  saved = x.astype(dtype), tuple(w.astype(dtype) for w in ws)
  kinds = jnp.zeros((0,), x.dtype), tuple(jnp.zeros((0,), w.dtype) for w in ws)
  return _products(spec, *saved, dtype, mesh), (saved, kinds)


def _products_backward(spec, dtype, mesh, residuals, gs):
  (x, ws), (x_kind, w_kinds) = residuals
  inputs, out = spec.split('->')
  x_term, w_term = inputs.split(',')
  gs = [g.astype(dtype) for g in gs]
  dws = tuple(einsum(f'{x_term},{out}->{w_term}', x, g, dtype).astype(k.dtype)
              for g, k in zip(gs, w_kinds))
  back = f'{out},{w_term}->{x_term}'
  cuts = [tuple(_cut(term, x_term, w_term, w.shape, mesh) for w in ws)
          for term in (out, w_term)]
  split = ['tensor' in cut for cut in cuts[1]]
  ws = _gathered(spec, ws, dtype, mesh)

  def local(gs, ws):
    own = sum(einsum(back, g, w, dtype) for g, w in zip(gs, ws))
    if mesh.devices.flat[0].platform != 'cpu':  # XLA:CPU crashes on bfloat16
      own = own.astype(x_kind.dtype)
    return jax.lax.psum(own, 'tensor')

  dx = sum(einsum(back, g, w, dtype, x_kind.dtype.name)
           for g, w, s in zip(gs, ws, split) if not s)
  if any(split):
    pick = lambda values: [v for v, s in zip(values, split) if s]
    dx = dx + jax.shard_map(
        local, mesh=mesh, in_specs=(pick(cuts[0]), pick(cuts[1])),
        out_specs=PartitionSpec(), axis_names={'tensor'}, check_vma=False)(
            pick(gs), pick(ws))
  return dx.astype(x_kind.dtype), dws


_products.defvjp(_products_forward, _products_backward)
