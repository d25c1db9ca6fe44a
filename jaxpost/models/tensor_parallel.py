"""Tensor parallelism: products of one x with several matrices that are split over the `tensor` axis of the mesh.

Legend: x, w and g (the gradient of a product) have the dimensions that the letters of an einsum `spec` name.
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
  return [y + w.change(spec, x, compute.dtype) if is_adapted else y for y, w, is_adapted in zip(ys, ws, adapted)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5))
def products(spec: str, x: jax.Array, ws: tuple, dtype: str, out: str, layout: Layout) -> list:
  """Returns [einsum(spec, x, w, dtype, out) for w in ws].

  The gradient of x is a sum over the matrices and over tensor shards. XLA would all-reduce the part of each matrix
  separately; here the parts are added first, and all-reduced once.
  """
  return [einsum(spec, x, w, dtype, out) for w in _gathered(spec, ws, dtype, layout.mesh)]


def _gathered(spec, ws, dtype, mesh):
  """Gathers the matrices over all mesh axes except `tensor`.

  The constraints of forward pass, recomputation and backward pass are equal, so that XLA can gather once for them.
  """
  x_term, w_term, _ = spec.replace('->', ',').split(',')
  return [
    jax.lax.with_sharding_constraint(w.astype(dtype), NamedSharding(mesh, _cut(w_term, x_term, w_term, w.shape, mesh)))
    for w in ws
  ]


def _cut(term, x_term, w_term, w_shape, mesh) -> PartitionSpec:
  """Returns the partition of the operand `term`, over `tensor` in the first output dimension of W if that divides."""
  letter = next(c for c in w_term if c not in x_term)
  divides = w_shape[w_term.index(letter)] % mesh.shape['tensor'] == 0
  return PartitionSpec(*('tensor' if c == letter and divides else None for c in term))


def _forward(spec, x, ws, dtype, out, layout):
  saved = x.astype(dtype), tuple(w.astype(dtype) for w in ws)
  like = jnp.zeros((0,), x.dtype), tuple(jnp.zeros((0,), w.dtype) for w in ws)  # for the types of the gradients
  return products(spec, *saved, dtype, out, layout=layout), (saved, like)


def _backward(spec, dtype, _out, layout, residuals, gs):
  (x, ws), (x_like, ws_like) = residuals
  mesh = layout.mesh
  x_term, w_term, out_term = spec.replace('->', ',').split(',')
  gs = [g.astype(dtype) for g in gs]
  dws = tuple(matrix_gradient(spec, x, g, dtype, layout).astype(like.dtype) for g, like in zip(gs, ws_like))
  dx_spec = f'{out_term},{w_term}->{x_term}'
  g_cuts, w_cuts = ([_cut(term, x_term, w_term, w.shape, mesh) for w in ws] for term in (out_term, w_term))
  is_split = ['tensor' in cut for cut in w_cuts]
  ws = _gathered(spec, ws, dtype, mesh)

  def sum_over_shards(gs, ws):
    local_dx = sum(einsum(dx_spec, g, w, dtype) for g, w in zip(gs, ws))
    if mesh.devices.flat[0].platform != 'cpu':  # XLA:CPU crashes on bfloat16
      local_dx = local_dx.astype(x_like.dtype)
    return jax.lax.psum(local_dx, 'tensor')

  dx = sum(einsum(dx_spec, g, w, dtype, x_like.dtype.name) for g, w, split in zip(gs, ws, is_split) if not split)
  if any(is_split):
    g_specs, w_specs, split_gs, split_ws = (list(itertools.compress(x, is_split)) for x in (g_cuts, w_cuts, gs, ws))
    dx = dx + jax.shard_map(
      sum_over_shards,
      mesh=mesh,
      in_specs=(g_specs, w_specs),
      out_specs=PartitionSpec(),
      axis_names={'tensor'},
      check_vma=False,
    )(split_gs, split_ws)
  return dx.astype(x_like.dtype), dws


products.defvjp(_forward, _backward)
