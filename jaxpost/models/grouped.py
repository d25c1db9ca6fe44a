"""`grouped`: products of groups of rows with a matrix for each group, as experts need them.

Legend: N rows, E groups, D inputs, F outputs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum, on_bits, precision_of

# On a GPU, by how much copies of matrices for each block may exceed the matrices, so that there is no loop.
_COPIES = 4


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped(x: jax.Array, w: jax.Array, sizes: jax.Array, compute: Compute, out: str = 'float32') -> jax.Array:
  """Multiplies each group of rows by its own matrix: [N, F].

  With `compute.grouped_kernel` this is one kernel for all groups (`grouped_triton.py`). It is for one device, or for
  code inside a `jax.shard_map` over the whole mesh, as in `moe.py`.

  Args:
    x: [N, D], the rows of group 0, then of group 1, ...; further rows give 0.
    w: [E, D, F].
    sizes: [E] int32, rows of each group.
    compute: defines the type of the operands, forward and backward.
    out: type of the result, accumulated in float32.
  """
  return _rows_by_groups('nd,df->nf', x, w, sizes, compute, out=out)


def _grouped_forward(x, w, sizes, compute, out):
  kinds = (jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype))
  x, w = x.astype(compute.dtype), w.astype(compute.dtype)
  return grouped(x, w, sizes, compute, out), (x, w, sizes, kinds)


def _grouped_backward(compute, out, residuals, g):
  del out
  x, w, sizes, (x_kind, w_kind) = residuals
  g = g.astype(compute.dtype)
  dx = _rows_by_groups('nf,df->nd', g, w, sizes, compute, out=x_kind.dtype.name)
  return dx, _groups_of_rows(x, g, sizes, compute, w_kind.dtype.name), None


grouped.defvjp(_grouped_forward, _grouped_backward)


def _rows_by_groups(spec, x, w, sizes, compute, out):
  """Computes `einsum(spec, x, w[e])` for the rows of each group e."""
  x, w = x.astype(compute.dtype), w.astype(compute.dtype)
  if compute.grouped_kernel:
    from jaxpost.models import grouped_triton

    return grouped_triton.rows_by_groups(x, w, sizes, transposed=spec != 'nd,df->nf', out=out)
  return _rows_by_xla(spec, x, w, sizes, compute).astype(out)


def _rows_by_xla(spec, x, w, sizes, compute):
  dtype = compute.dtype
  if compute.ragged:
    w = w if spec == 'nd,df->nf' else w.swapaxes(1, 2)
    y = jax.lax.ragged_dot(x, w, sizes, precision=precision_of(dtype), preferred_element_type=jnp.float32)
    real = jnp.arange(len(x)) < jnp.sum(sizes)
    return jnp.where(real[:, None], y, 0)
  parts = _Parts(sizes, len(x), compute)
  if compute.platform == 'gpu' and len(parts.group) <= _COPIES * len(w):
    return _all_blocks(spec, x, w, sizes, parts, dtype=dtype)
  width = w.shape[2 if spec == 'nd,df->nf' else 1]
  x = jnp.pad(x, ((0, parts.block), (0, 0)))

  def part(i, y):
    out = einsum(spec, parts.rows(x, i), _slice(w, parts.group[i]), dtype)
    # Rows past the end of the group are overwritten by the next group.
    return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(parts.real(i), out, 0), parts.start[i], 0)

  y = jnp.zeros((len(x), width), jnp.float32)
  return parts.loop(part, y)[: len(x) - parts.block]


def _all_blocks(spec, x, w, sizes, parts, dtype):
  """Computes `_rows_by_groups` as one product of all blocks, each with a copy of its matrix."""
  rows = parts.start[:, None] + jnp.arange(parts.block)
  out = einsum(f'b{spec.replace(",", ",b").replace("->", "->b")}', x[rows], w[parts.group], dtype)
  row, ends = jnp.arange(len(x)), jnp.cumsum(sizes)
  group = jnp.minimum(jnp.sum(row[:, None] >= ends, axis=1), len(sizes) - 1)
  # Blocks are full but for the last of each group: row n of a group is row n of its blocks.
  place = parts.first[group] * parts.block + row - (ends - sizes)[group]
  return jnp.where((row < ends[-1])[:, None], out.reshape(-1, out.shape[-1])[place], 0)


def _groups_of_rows(x, g, sizes, compute, out):
  """Computes x^T g for the rows of each group, [E, D, F]: the gradient of its matrix."""
  if compute.grouped_kernel:
    from jaxpost.models import grouped_triton

    return grouped_triton.groups_of_rows(x, g, sizes, out=out)
  parts = _Parts(sizes, len(x), compute)
  x, g = (jnp.pad(y, ((0, parts.block), (0, 0))) for y in (x, g))

  def part(i, dw):
    rows = jnp.where(parts.real(i), parts.rows(g, i), 0)
    add = einsum('nd,nf->df', parts.rows(x, i), rows, compute.dtype)
    return jax.lax.dynamic_update_index_in_dim(dw, _slice(dw, parts.group[i]) + add, parts.group[i], 0)

  dw = jnp.zeros((len(sizes), x.shape[1], g.shape[1]), jnp.float32)
  return parts.loop(part, dw).astype(out)


class _Parts:
  """Cuts groups of rows into blocks of one size.

  Attributes:
    number: number of blocks in use, known at run time; on a GPU all blocks, the last of which may have no rows, because
      the host would wait for the device at every turn of a loop whose end the device decides.
    group, start: [blocks], the group and the first row of each block.
    first: [E], the first block of each group.
  """

  def __init__(self, sizes, rows: int, compute: Compute):
    self.block = min(compute.group_block, max(8, rows // len(sizes)))
    per = -(-sizes // self.block)
    ends = jnp.cumsum(per)
    i = jnp.arange(rows // self.block + len(sizes))
    self.number = len(i) if compute.platform == 'gpu' else ends[-1]
    self.first = ends - per
    self.group = jnp.minimum(jnp.sum(i[:, None] >= ends, axis=1), len(sizes) - 1)
    self._end = jnp.cumsum(sizes)[self.group]
    self.start = self._end - sizes[self.group] + self.block * (i - self.first[self.group])

  def loop(self, part, out):
    with jax.named_scope('blocks'):  # planning finds the loop by this name
      return jax.lax.fori_loop(0, self.number, part, out)

  def rows(self, x, i):
    return on_bits(lambda x: jax.lax.dynamic_slice_in_dim(x, self.start[i], self.block), x)

  def real(self, i):
    """Returns [block, 1] bool: rows of the block that belong to its group."""
    return (self.start[i] + jnp.arange(self.block) < self._end[i])[:, None]


def _slice(w, i):
  return on_bits(lambda w: jax.lax.dynamic_index_in_dim(w, i, keepdims=False), w)
