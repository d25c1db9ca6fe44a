"""`grouped`: products of groups of rows with a matrix for each group, as experts need them.

Legend: N rows, E groups, D inputs, F outputs.
"""

import functools

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum, on_bits, precision_of

# On a GPU, the largest number of blocks per matrix for which each block gets a copy of its matrix, instead of a loop.
_COPIES = 4
_TPU_TILE = 256, 1024, 768  # rows, inputs and outputs that `_groups_by_megablox` multiplies at a time


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped(x: jax.Array, w: jax.Array, sizes: jax.Array, compute: Compute, out: str = 'float32') -> jax.Array:
  """Multiplies each group of rows by its own matrix: [N, F].

  With `compute.grouped_kernel` this is one kernel for all groups: on GPUs `grouped_triton.py`, on TPUs
  `jax.lax.ragged_dot` and, for the gradient of the matrices, the kernel that comes with JAX. It is for one device, or
  for code inside a `jax.shard_map` over the whole mesh, as in `moe.py`.

  Args:
    x: [N, D], the rows of group 0, then of group 1, ...; results of further rows are 0.
    w: [E, D, F].
    sizes: [E] int32, rows of each group.
    compute: defines the type of the operands, forward and backward.
    out: type of the result, accumulated in float32.
  """
  return _rows_by_groups('nd,df->nf', x, w, sizes, compute, out=out)


def _grouped_forward(x, w, sizes, compute, out):
  like = (jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype))  # empty arrays, for the types of the gradients
  x, w = x.astype(compute.dtype), w.astype(compute.dtype)
  return grouped(x, w, sizes, compute, out), (x, w, sizes, like)


def _grouped_backward(compute, _out, residuals, g):
  x, w, sizes, (x_like, w_like) = residuals
  g = g.astype(compute.dtype)
  dx = _rows_by_groups('nf,df->nd', g, w, sizes, compute, out=x_like.dtype.name)
  return dx, _groups_of_rows(x, g, sizes, compute, w_like.dtype.name), None


grouped.defvjp(_grouped_forward, _grouped_backward)


def _rows_by_groups(spec, x, w, sizes, compute, out):
  """Computes `einsum(spec, x, w[e])` for the rows of each group e."""
  x, w = x.astype(compute.dtype), w.astype(compute.dtype)
  if compute.grouped_kernel and not compute.ragged:
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
  blocks = _Blocks(sizes, len(x), compute)
  if compute.platform == 'gpu' and len(blocks.group) <= _COPIES * len(w):
    return _all_blocks(spec, x, w, sizes, blocks, dtype=dtype)
  width = w.shape[2 if spec == 'nd,df->nf' else 1]
  x = jnp.pad(x, ((0, blocks.size), (0, 0)))

  def multiply_block(i, y):
    out = einsum(spec, blocks.rows(x, i), _slice(w, blocks.group[i]), dtype)
    # Rows past the end of the group are overwritten by the next group.
    return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(blocks.real(i), out, 0), blocks.start[i], 0)

  y = jnp.zeros((len(x), width), jnp.float32)
  return blocks.loop(multiply_block, y)[: len(x) - blocks.size]


def _all_blocks(spec, x, w, sizes, blocks, dtype):
  """Computes `_rows_by_groups` as one product of all blocks, each with a copy of its matrix."""
  rows = blocks.start[:, None] + jnp.arange(blocks.size)
  out = einsum(f'b{spec.replace(",", ",b").replace("->", "->b")}', x[rows], w[blocks.group], dtype)
  row, ends = jnp.arange(len(x)), jnp.cumsum(sizes)
  group = jnp.minimum(jnp.sum(row[:, None] >= ends, axis=1), len(sizes) - 1)
  # All blocks of a group except the last are full, so that row n of a group is row n of its blocks.
  place = blocks.first[group] * blocks.size + row - (ends - sizes)[group]
  return jnp.where((row < ends[-1])[:, None], out.reshape(-1, out.shape[-1])[place], 0)


def _groups_of_rows(x, g, sizes, compute, out):
  """Computes x^T g for the rows of each group, [E, D, F]: the gradient of its matrix."""
  if compute.grouped_kernel and compute.ragged:
    return _groups_by_megablox(x, g, sizes, out)
  if compute.grouped_kernel:
    from jaxpost.models import grouped_triton

    return grouped_triton.groups_of_rows(x, g, sizes, out=out)
  blocks = _Blocks(sizes, len(x), compute)
  x, g = jnp.pad(x, ((0, blocks.size), (0, 0))), jnp.pad(g, ((0, blocks.size), (0, 0)))

  def add_block(i, dw):
    rows = jnp.where(blocks.real(i), blocks.rows(g, i), 0)
    block_dw = einsum('nd,nf->df', blocks.rows(x, i), rows, compute.dtype)
    return jax.lax.dynamic_update_index_in_dim(dw, _slice(dw, blocks.group[i]) + block_dw, blocks.group[i], 0)

  dw = jnp.zeros((len(sizes), x.shape[1], g.shape[1]), jnp.float32)
  return blocks.loop(add_block, dw).astype(out)


def _groups_by_megablox(x, g, sizes, out):
  """Computes `_groups_of_rows` by a kernel for TPUs, which reads and writes a matrix once and not for each block."""
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  rows, inputs, outputs = _TPU_TILE
  x, g = (jnp.pad(y, ((0, -len(y) % rows), (0, 0))) for y in (x, g))
  # The kernel transposes x back, so that XLA removes both.
  return tgmm(x.T, g, sizes, jnp.dtype(out), (rows, min(inputs, x.shape[1]), min(outputs, g.shape[1])))


class _Blocks:
  """Groups of rows, cut into blocks of `size` rows.

  Attributes:
    number: number of blocks in use, known at run time. On a GPU it is that of all blocks, the last of which may have no
      rows, because the host would wait for the device in each iteration of a loop whose end the device decides.
    group, start: [blocks], the group and the first row of each block.
    first: [E], the first block of each group.
  """

  def __init__(self, sizes, rows: int, compute: Compute):
    self.size = min(compute.group_block, max(8, rows // len(sizes)))
    counts = -(-sizes // self.size)  # of blocks in each group
    ends = jnp.cumsum(counts)
    i = jnp.arange(rows // self.size + len(sizes))
    self.number = len(i) if compute.platform == 'gpu' else ends[-1]
    self.first = ends - counts
    self.group = jnp.minimum(jnp.sum(i[:, None] >= ends, axis=1), len(sizes) - 1)
    self._end = jnp.cumsum(sizes)[self.group]
    self.start = self._end - sizes[self.group] + self.size * (i - self.first[self.group])

  def loop(self, body, carry):
    with jax.named_scope('blocks'):  # `jaxpost.planning` finds the loop by this name
      return jax.lax.fori_loop(0, self.number, body, carry)

  def rows(self, x, i):
    return on_bits(lambda x: jax.lax.dynamic_slice_in_dim(x, self.start[i], self.size), x)

  def real(self, i):
    """Returns [size, 1] bool: which rows of the block belong to its group."""
    return (self.start[i] + jnp.arange(self.size) < self._end[i])[:, None]


def _slice(w, i):
  return on_bits(lambda w: jax.lax.dynamic_index_in_dim(w, i, keepdims=False), w)
