"""Tensor parallelism: products of one x with several matrices that are split over the `tensor` axis of the mesh.

Legend: einsum letters are the caller's.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpost.distributed.mesh import Layout
from jaxpost.matmul import Compute, einsum, matrix_gradient


def adapted_products(spec: str, x: jax.Array, ws: tuple, compute: Compute, layout: Layout) -> list:
  """Returns [einsum(spec, x, w) for w in ws], in float32 if one of them has an adapter, else in the residual type."""
  bases = tuple(getattr(w, 'w', w) for w in ws)
  adapted = [hasattr(w, 'change') for w in ws]
  ys = products(spec, x, bases, compute.dtype, 'float32' if any(adapted) else compute.residual, layout=layout)
  return [y + w.change(spec, x, compute.dtype) if has else y for y, w, has in zip(ys, ws, adapted)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5))
def products(spec: str, x: jax.Array, ws: tuple, dtype: str, out: str, layout: Layout) -> list:
  """Returns [einsum(spec, x, w, dtype, out) for w in ws].

  The gradient by x is a sum over the matrices and over the mesh. XLA would all-reduce the part of each matrix
  separately; here they are added first.
  """
  return [einsum(spec, x, w, dtype, out) for w in _gathered(spec, ws, dtype, layout.mesh)]


def _gathered(spec, ws, dtype, mesh):
  """Gathers the matrices over all axes but `tensor`.

  Constraints that are equal each time let XLA gather once where a layer is recomputed and differentiated.
  """
  x_term, w_term, _ = spec.replace('->', ',').split(',')
  return [
    jax.lax.with_sharding_constraint(w.astype(dtype), NamedSharding(mesh, _cut(w_term, x_term, w_term, w.shape, mesh)))
    for w in ws
  ]


def _cut(term, x_term, w_term, w_shape, mesh) -> PartitionSpec:
  """Returns the partition over `tensor`, if it divides, of the operand with letters `term`."""
  letter = next(c for c in w_term if c not in x_term)
  fits = w_shape[w_term.index(letter)] % mesh.shape['tensor'] == 0
  return PartitionSpec(*('tensor' if c == letter and fits else None for c in term))


def _forward(spec, x, ws, dtype, out, layout):
  saved = x.astype(dtype), tuple(w.astype(dtype) for w in ws)
  kinds = jnp.zeros((0,), x.dtype), tuple(jnp.zeros((0,), w.dtype) for w in ws)
  return products(spec, *saved, dtype, out, layout=layout), (saved, kinds)


def _backward(spec, dtype, result, layout, residuals, gs):
  del result
  (x, ws), (x_kind, w_kinds) = residuals
  mesh = layout.mesh
  x_term, w_term, out = spec.replace('->', ',').split(',')
  gs = [g.astype(dtype) for g in gs]
  dws = tuple(matrix_gradient(spec, x, g, dtype, layout).astype(k.dtype) for g, k in zip(gs, w_kinds))
  back = f'{out},{w_term}->{x_term}'
  cuts = [tuple(_cut(term, x_term, w_term, w.shape, mesh) for w in ws) for term in (out, w_term)]
  split = ['tensor' in cut for cut in cuts[1]]
  ws = _gathered(spec, ws, dtype, mesh)

  def local(gs, ws):
    own = sum(einsum(back, g, w, dtype) for g, w in zip(gs, ws))
    if mesh.devices.flat[0].platform != 'cpu':  # XLA:CPU crashes on bfloat16
      own = own.astype(x_kind.dtype)
    return jax.lax.psum(own, 'tensor')

  dx = sum(einsum(back, g, w, dtype, x_kind.dtype.name) for g, w, s in zip(gs, ws, split) if not s)
  if any(split):
    g_specs, w_specs, some_gs, some_ws = (list(itertools.compress(of, split)) for of in (*cuts, gs, ws))
    dx = dx + jax.shard_map(
      local, mesh=mesh, in_specs=(g_specs, w_specs), out_specs=PartitionSpec(), axis_names={'tensor'}, check_vma=False
    )(some_gs, some_ws)
  return dx.astype(x_kind.dtype), dws


products.defvjp(_forward, _backward)
