"""The one matrix product of the library, and how a program computes.

Legend: einsum letters are the caller's; of groups, N rows, E groups, D, F.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Compute:
  """How mathematics that is the same everywhere is carried out here.

  dtype: type of the operands of matrix products. 'bfloat16' and 'float16'
    accumulate in float32; 'float32' is the exact mode of tests and parity
    (without HIGHEST an accelerator would use TF32 or bfloat16 passes).
  residual: type of the residual stream and other activations.
  cache: type of cached keys and values, rounded to `dtype` before.
  unroll: layers as straight code (CPU, samplers) or as `lax.scan`.
  remat: what the backward pass keeps: 'none' (all), 'dots', 'full' (nothing).
  attention: what computes it, see `models/attention.py`; forced: and nothing
    else does, where it cannot. rejected_shapes: what of it (`flash.Work`) was found
    wrong on this device, which XLA does.
  q_chunk: rows of queries attended at a time.
  row_writes: a cache is written slot by slot: XLA:CPU's scatter copies it.
  micro_tokens: of a device at a time in an on-policy update; in small parts
    less is computed that completions leave empty.
  head_elements: most logits (tokens x vocabulary) that exist at a time.
  group_block: rows of a group that are multiplied at a time.
  ragged: `jax.lax.ragged_dot` instead, where there is a kernel for it; else
    it multiplies every row by every matrix, which it does everywhere for the
    gradient of the matrices, so that this goes by blocks.
  """

  dtype: str = 'bfloat16'
  residual: str = 'float32'
  cache: str = 'float32'
  unroll: bool = True
  remat: str = 'none'
  q_chunk: int = 128
  micro_tokens: int = 2048
  head_elements: int = 2**25
  row_writes: bool = True
  group_block: int = 32
  ragged: bool = False
  attention: str = 'chunked'
  forced: bool = False
  rejected_shapes: tuple = ()


def compute_for(platform: str, dtype: str, remat: str, attention: str = 'auto') -> Compute:
  """Measured choices per platform; docs/performance.md has the figures.

  Of attention, too: cuDNN's is never taken unasked.

  dtype: 'auto' is what `programs.probe` finds; bfloat16 where nobody asked it.
  """
  dtype = 'bfloat16' if dtype == 'auto' else dtype
  forced = attention != 'auto'
  if not forced:
    attention = 'splash' if platform == 'tpu' else 'chunked'
  rest = dict(dtype=dtype, cache=dtype, remat=remat, attention=attention, forced=forced)
  if platform == 'cpu':
    return Compute(**rest)
  # The residual stream of many models leaves the range of float16.
  residual = 'float32' if dtype == 'float16' else dtype
  return Compute(
    **rest,
    residual=residual,
    unroll=False,
    q_chunk=1024,
    micro_tokens=8192,
    head_elements=2**30,
    row_writes=False,
    group_block=256,
    ragged=platform == 'tpu',
  )


def einsum(spec: str, x, w, dtype: str, out: str = 'float32', layout=None):
  """`jnp.einsum(spec, x, w)` in float32 from operands of type `dtype`.

  Forward and backward products take `dtype` operands and accumulate in
  float32. JAX's own rule would feed float32 cotangents to the backward
  products, which then run at half the speed on CPU and miss the matrix units
  elsewhere. Every letter must occur in two of the three terms.

  `out` is the type of the result, accumulated in float32 on each device; what
  is summed over a mesh then travels in it.

  `layout`, a `sharding.Layout`, sums the gradient of a parameter w by who
  keeps it; x is [B, T, ...] then, and letters of w mean _DIMENSIONS.

  `w` may be a matrix with a `product` of its own, such as `lora.Adapted`.
  """
  return w.product(spec, x, dtype) if hasattr(w, 'product') else _einsum(spec, x, w, dtype, out, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5))
def _einsum(spec, x, w, dtype, out, layout):
  del layout
  return jnp.einsum(spec, x.astype(dtype), w.astype(dtype), precision=_precision(dtype), preferred_element_type=out)


def _forward(spec, x, w, dtype, out, layout):
  del layout
  # Residuals are the cast operands; the empty arrays carry the input types.
  saved = (x.astype(dtype), w.astype(dtype))
  kinds = (jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype))
  return einsum(spec, *saved, dtype, out), (saved, kinds)


def _backward(spec, dtype, result, layout, residuals, g):
  del result
  (x, w), (x_kind, w_kind) = residuals
  inputs, out = spec.split('->')
  x_term, w_term = inputs.split(',')
  g = g.astype(dtype)
  # Batch letters stay separate dimensions: XLA:CPU contracts [b, t] pairs at
  # full speed but not a flattened one.
  dx = einsum(f'{out},{w_term}->{x_term}', g, w, dtype, x_kind.dtype.name)
  dw = _matrix_gradient(spec, x, g, dtype, layout)
  return dx.astype(x_kind.dtype), dw.astype(w_kind.dtype)


# Letters of a parameter in an einsum and the logical axes they stand for.
_DIMENSIONS = {'d': 'embed', 'n': 'heads', 'f': 'mlp'}


def _matrix_gradient(spec, x, g, dtype, layout):
  inputs, out = spec.split('->')
  x_term, w_term = inputs.split(',')
  product = lambda x, g: einsum(f'{x_term},{out}->{w_term}', x, g, dtype)
  kept = None if layout is None else layout.sum_over_tokens(product, (x, g), *(_DIMENSIONS.get(c) for c in w_term))
  return product(x, g) if kept is None else kept


_einsum.defvjp(_forward, _backward)


# ------------------------------------------------------------------ of groups


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(x, w, sizes, compute: Compute):
  """Each group of rows times a matrix of its own, in float32: [N, F].

  Args:
    x: [N, D], the rows of the groups after each other; those beyond give 0.
    w: [E, D, F]; sizes: [E] int32, rows of each group.
    compute: the type of the operands, forward and backward, as of `einsum`.
  """
  return _rows_by_groups('nd,df->nf', x, w, sizes, compute)


def _grouped_forward(x, w, sizes, compute):
  kinds = (jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype))
  x, w = x.astype(compute.dtype), w.astype(compute.dtype)
  return grouped(x, w, sizes, compute), (x, w, sizes, kinds)


def _grouped_backward(compute, residuals, g):
  x, w, sizes, (x_kind, w_kind) = residuals
  g = g.astype(compute.dtype)
  dx = _rows_by_groups('nf,df->nd', g, w, sizes, compute)
  dw = _groups_of_rows(x, g, sizes, compute)
  return dx.astype(x_kind.dtype), dw.astype(w_kind.dtype), None


grouped.defvjp(_grouped_forward, _grouped_backward)


def _rows_by_groups(spec, x, w, sizes, compute):
  """`einsum(spec, x, w[e])` of the rows of each group e."""
  dtype = compute.dtype
  x, w = x.astype(dtype), w.astype(dtype)
  if compute.ragged:
    w = w if spec == 'nd,df->nf' else w.swapaxes(1, 2)
    y = jax.lax.ragged_dot(x, w, sizes, precision=_precision(dtype), preferred_element_type=jnp.float32)
    real = jnp.arange(len(x)) < jnp.sum(sizes)
    return jnp.where(real[:, None], y, 0)
  parts = _Parts(sizes, len(x), compute.group_block)
  width = w.shape[2 if spec == 'nd,df->nf' else 1]
  x = jnp.pad(x, ((0, parts.block), (0, 0)))

  def part(i, y):
    out = einsum(spec, parts.rows(x, i), _slice(w, parts.group[i]), dtype)
    # What it writes past the end of its group, the next one writes over.
    return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(parts.real(i), out, 0), parts.start[i], 0)

  y = jnp.zeros((len(x), width), jnp.float32)
  return parts.loop(part, y)[: len(x) - parts.block]


def _groups_of_rows(x, g, sizes, compute):
  """x^T g of the rows of each group: [E, D, F], the gradient of its matrix."""
  parts = _Parts(sizes, len(x), compute.group_block)
  x, g = (jnp.pad(y, ((0, parts.block), (0, 0))) for y in (x, g))

  def part(i, dw):
    rows = jnp.where(parts.real(i), parts.rows(g, i), 0)
    add = einsum('nd,nf->df', parts.rows(x, i), rows, compute.dtype)
    return jax.lax.dynamic_update_index_in_dim(dw, _slice(dw, parts.group[i]) + add, parts.group[i], 0)

  dw = jnp.zeros((len(sizes), x.shape[1], g.shape[1]), jnp.float32)
  return parts.loop(part, dw)


class _Parts:
  """Groups of rows in blocks of one size, as many as are needed.

  group, start: [blocks], the group of each and its first row.
  """

  def __init__(self, sizes, rows: int, block: int):
    self.block = min(block, max(8, rows // len(sizes)))
    per = -(-sizes // self.block)
    ends = jnp.cumsum(per)
    i = jnp.arange(rows // self.block + len(sizes))
    self.number = ends[-1]
    self.group = jnp.minimum(jnp.sum(i[:, None] >= ends, axis=1), len(sizes) - 1)
    self._end = jnp.cumsum(sizes)[self.group]
    self.start = self._end - sizes[self.group] + self.block * (i - (ends - per)[self.group])

  def loop(self, part, out):
    with jax.named_scope('blocks'):  # which plans look for
      return jax.lax.fori_loop(0, self.number, part, out)

  def rows(self, x, i):
    return _bits(lambda x: jax.lax.dynamic_slice_in_dim(x, self.start[i], self.block), x)

  def real(self, i):
    """[block, 1]: the rows that are of the group."""
    return (self.start[i] + jnp.arange(self.block) < self._end[i])[:, None]


def _slice(w, i):
  return _bits(lambda w: jax.lax.dynamic_index_in_dim(w, i, keepdims=False), w)


def _bits(fn, x):
  """`fn` of the bits of x: XLA:CPU widens all of a bfloat16 array to slice it,
  which takes ten times as long as a product with a few rows."""
  if x.dtype != jnp.bfloat16:
    return fn(x)
  return jax.lax.bitcast_convert_type(fn(jax.lax.bitcast_convert_type(x, jnp.uint16)), jnp.bfloat16)


def _precision(dtype: str):
  return jax.lax.Precision.HIGHEST if dtype == 'float32' else None


# --------------------------------------------------- several products of one x


def products(spec: str, x, ws: tuple, dtype: str, layout=None) -> list:
  """[einsum(spec, x, w) for w in ws], of matrices split over `tensor`.

  The gradient by x is a sum over the matrices and over the mesh. XLA would
  send each matrix's part around by itself; here they are added up before.
  """
  if layout is None or layout.mesh.shape['tensor'] == 1 or any(hasattr(w, 'product') for w in ws):
    return [einsum(spec, x, w, dtype, layout=layout) for w in ws]
  return _products(spec, x, tuple(ws), dtype, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _products(spec, x, ws, dtype, layout):
  return [einsum(spec, x, w, dtype) for w in _gathered(spec, ws, dtype, layout.mesh)]


def _gathered(spec, ws, dtype, mesh):
  """Matrices whole but for `tensor`; said alike each time, XLA does it once
  where a layer is recomputed and differentiated."""
  inputs, _ = spec.split('->')
  x_term, w_term = inputs.split(',')
  return [
    jax.lax.with_sharding_constraint(w.astype(dtype), NamedSharding(mesh, _cut(w_term, x_term, w_term, w.shape, mesh)))
    for w in ws
  ]


def _cut(term, x_term, w_term, w_shape, mesh) -> PartitionSpec:
  """Of an operand whose letters are `term`: over `tensor`, if it can be."""
  letter = next(c for c in w_term if c not in x_term)
  fits = w_shape[w_term.index(letter)] % mesh.shape['tensor'] == 0
  return PartitionSpec(*('tensor' if c == letter and fits else None for c in term))


def _products_forward(spec, x, ws, dtype, layout):
  saved = x.astype(dtype), tuple(w.astype(dtype) for w in ws)
  kinds = jnp.zeros((0,), x.dtype), tuple(jnp.zeros((0,), w.dtype) for w in ws)
  return _products(spec, *saved, dtype, layout), (saved, kinds)


def _products_backward(spec, dtype, layout, residuals, gs):
  (x, ws), (x_kind, w_kinds) = residuals
  mesh = layout.mesh
  inputs, out = spec.split('->')
  x_term, w_term = inputs.split(',')
  gs = [g.astype(dtype) for g in gs]
  dws = tuple(_matrix_gradient(spec, x, g, dtype, layout).astype(k.dtype) for g, k in zip(gs, w_kinds))
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
    pick = lambda values: [v for v, s in zip(values, split) if s]
    dx = dx + jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(pick(cuts[0]), pick(cuts[1])),
      out_specs=PartitionSpec(),
      axis_names={'tensor'},
      check_vma=False,
    )(pick(gs), pick(ws))
  return dx.astype(x_kind.dtype), dws


_products.defvjp(_products_forward, _products_backward)
