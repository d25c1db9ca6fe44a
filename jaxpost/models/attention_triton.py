"""Flash attention over packed rows for NVIDIA GPUs, in Pallas for Triton.

The algorithm is FlashAttention-2 (https://arxiv.org/abs/2307.08691). Blocks of keys that no query of a block may attend
to, because of the causal mask, a window, or the boundaries of documents and branches, are never read: the cost grows
with the length of the documents and not with that of the row.

Legend: B rows, T tokens, H heads, K kv heads, G queries per kv head, h head size, hv that of values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxpost.models import attention_bounds
from jaxpost.models.attention_bounds import extremes, visible
from jaxpost.types import MASKED_LOGIT

if TYPE_CHECKING:
  from jaxpost.models.attention_xla import PackedRows
  from jaxpost.models.config import ModelConfig

LOG2_E = math.log2(math.e)
_Carry = tuple[jax.Array, jax.Array, jax.Array]  # of an online softmax: weighted values, maximal score, sum of weights


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Sizes of blocks of the three kernels: (queries, keys, warps, stages)."""

  forward: tuple[int, int, int, int] = (64, 64, 4, 3)
  queries: tuple[int, int, int, int] = (64, 64, 4, 2)  # gradient of the queries
  keys: tuple[int, int, int, int] = (64, 64, 4, 2)  # gradients of keys and values


@dataclasses.dataclass(frozen=True)
class _Static:
  """Settings that a kernel is compiled for."""

  window: int
  cap: float
  tiles: Tiles
  interpret: bool


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  rows: PackedRows,
  sinks: jax.Array | None,
  *,
  window: int,
  cfg: ModelConfig,
  tiles: Tiles | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Attends inside each document of a packed row, see `layers.attention`.

  Args:
    q: [B, T, H, h], scaled; k: [B, T, K, h]; v: [B, T, K, hv]. T is a multiple of 128.
    tiles: sizes of blocks; None: the default for h and hv.
    interpret: run it on the CPU, for tests.

  Returns:
    [B, T, H, hv].
  """
  sinks = sinks if sinks is None else sinks.astype(jnp.float32)
  if tiles is None and max(q.shape[3], v.shape[3]) > 128:
    tiles = Tiles(forward=(64, 64, 8, 1), queries=(32, 32, 4, 1), keys=(32, 32, 4, 1))
  static = _Static(window, cfg.attention_softcap, tiles or Tiles(), interpret)
  bounds = attention_bounds.of_rows(rows, window)
  return _attend(static, (q, k, v), sinks, bounds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, qkv, sinks, bounds: attention_bounds.Bounds):
  return _forward(static, qkv, sinks, bounds)[0]


def _attend_fwd(static, qkv, sinks, bounds):
  out, lse2 = _forward(static, qkv, sinks, bounds)
  # Rematerialization ('dots') keeps both, so that the backward pass does not run the kernel again.
  out, lse2 = checkpoint_name(out, 'dots'), checkpoint_name(lse2, 'dots')
  return out, (qkv, sinks, bounds, out, lse2)


def _attend_bwd(static, saved, g):
  qkv, sinks, bounds, out, lse2 = saved
  delta = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1).swapaxes(1, 2)  # [B, H, T]
  residuals = dict(g=g.astype(out.dtype), lse2=lse2, delta=delta)
  dq = _backward_queries(static, qkv, bounds, **residuals)
  dk, dv = _backward_keys(static, qkv, bounds, **residuals)
  dsinks = None
  if sinks is not None:
    dsinks = -jnp.sum(jnp.exp2(sinks[:, None] * LOG2_E - lse2) * delta, axis=(0, 2)).astype(sinks.dtype)
  return (dq, dk, dv), dsinks, None


_attend.defvjp(_attend_fwd, _attend_bwd)

# -------------------------------------------------------------------- kernels


def load(ref: Any, size: int, rows: jax.Array | None = None) -> jax.Array:
  """Reads a block [n, h padded to a power of 2]; columns from `size` on, and rows where `rows` is False, are 0."""
  if rows is None and ref.shape[-1] == size:
    return ref[...]
  return plgpu.load(ref, mask=_mask(ref, size, rows), other=0)


def store(ref: Any, x: jax.Array, size: int, rows: jax.Array | None = None) -> None:
  """Writes the part of a block that `load` reads."""
  x = x.astype(ref.dtype)
  if rows is None and ref.shape[-1] == size:
    ref[...] = x
  else:
    plgpu.store(ref, x, mask=_mask(ref, size, rows))


def _mask(ref: Any, size: int, rows: jax.Array | None) -> jax.Array:
  columns = (jnp.arange(ref.shape[-1]) < size)[None]
  return jnp.broadcast_to(columns if rows is None else rows[:, None] & columns, ref.shape)


def _dot(a: jax.Array, b: jax.Array, trans_a: bool = False, trans_b: bool = False) -> jax.Array:
  # Operands are float32 only in tests.
  precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return plgpu.dot(a, b, trans_a=trans_a, trans_b=trans_b, precision=precision)


def scores(q: jax.Array, k: jax.Array, cap: float) -> tuple[jax.Array, jax.Array | float]:
  """Returns capped scores [q, k] and the derivative of the cap."""
  s = _dot(q, k, trans_b=True)
  if not cap:
    return s, 1.0
  s = jnp.tanh(s / cap)
  return s * cap, 1 - s * s


def nothing(rows: int, width: int) -> _Carry:
  """Returns the carry of `add_keys` before any keys: zeros [rows, width], minimal scores and zero sums [rows]."""
  return jnp.zeros((rows, width), jnp.float32), jnp.full(rows, MASKED_LOGIT), jnp.zeros(rows, jnp.float32)


def add_keys(carry: _Carry, s: jax.Array, v: jax.Array) -> _Carry:
  """Adds keys with scores `s` [rows, keys], in units of log2, and their values, to an online softmax."""
  out, old_max, total = carry
  new_max = jnp.maximum(old_max, jnp.max(s, axis=1))
  weights, rescale = jnp.exp2(s - new_max[:, None]), jnp.exp2(old_max - new_max)
  out = out * rescale[:, None] + _dot(weights.astype(v.dtype), v)
  return out, new_max, total * rescale + jnp.sum(weights, axis=1)


def _ids(ref, tokens) -> tuple[jax.Array, jax.Array] | None:
  """Returns (branches, positions) of a slice of tokens."""
  return None if ref is None else (ref[0, tokens], ref[1, tokens])


def _over_keys(step, carry, min_key_ref, gap_ref, *, cols: int, high):
  """Folds step(block, carry) over the blocks of `cols` keys below block `high` to which some query attends."""
  i = pl.program_id(0)
  low = min_key_ref[i] // cols
  if gap_ref is None:
    return jax.lax.fori_loop(low, high, step, carry)
  gap = jnp.maximum(pl.cdiv(gap_ref[0, i], cols), low)  # the first block that is skipped
  skipped = jnp.maximum(gap_ref[1, i] // cols - gap, 0)  # how many are
  return jax.lax.fori_loop(low, high - skipped, lambda j, x: step(jnp.where(j < gap, j, j + skipped), x), carry)


def _forward_kernel(
  q_ref, k_ref, v_ref, first_key_ref, min_key_ref, gap_ref, ids_ref, sinks_ref, out_ref, lse2_ref, *, static, dims
):
  rows, cols, *_ = static.tiles.forward
  size, values = dims
  begin = pl.program_id(0) * rows
  q, query_places = load(q_ref, size), begin + jnp.arange(rows)
  first_key, query_ids = first_key_ref[...], _ids(ids_ref, pl.ds(begin, rows))

  def step(j, carry):
    keys = pl.ds(j * cols, cols)
    s, _ = scores(q, load(k_ref.at[keys], size), static.cap)
    key_places = j * cols + jnp.arange(cols)
    mask = visible(query_places, first_key, key_places, query_ids, _ids(ids_ref, keys), window=static.window)
    return add_keys(carry, jnp.where(mask, s * LOG2_E, MASKED_LOGIT), load(v_ref.at[keys], values))

  carry = nothing(rows, v_ref.shape[-1])
  out, max_score, total = _over_keys(step, carry, min_key_ref, gap_ref, cols=cols, high=pl.cdiv(begin + rows, cols))
  if sinks_ref is not None:  # a key without a value
    sink = sinks_ref[pl.program_id(1)] * LOG2_E
    new_max = jnp.maximum(max_score, sink)
    rescale = jnp.exp2(max_score - new_max)
    out, total, max_score = out * rescale[:, None], total * rescale + jnp.exp2(sink - new_max), new_max
  store(out_ref, out / total[:, None], values)
  lse2_ref[...] = max_score + jnp.log2(total)


def _queries_kernel(
  q_ref, k_ref, v_ref, first_key_ref, min_key_ref, gap_ref, ids_ref, g_ref, lse2_ref, delta_ref, dq_ref, *, static, dims
):
  rows, cols, *_ = static.tiles.queries
  size, values = dims
  begin = pl.program_id(0) * rows
  q, g, query_places = load(q_ref, size), load(g_ref, values), begin + jnp.arange(rows)
  first_key, query_ids = first_key_ref[...], _ids(ids_ref, pl.ds(begin, rows))
  lse2, delta = lse2_ref[...], delta_ref[...]

  def step(j, dq):
    keys = pl.ds(j * cols, cols)
    k = load(k_ref.at[keys], size)
    s, slope = scores(q, k, static.cap)
    key_places = j * cols + jnp.arange(cols)
    mask = visible(query_places, first_key, key_places, query_ids, _ids(ids_ref, keys), window=static.window)
    weights = jnp.exp2(jnp.where(mask, s * LOG2_E, MASKED_LOGIT) - lse2[:, None])
    ds = weights * (_dot(g, load(v_ref.at[keys], values), trans_b=True) - delta[:, None]) * slope
    return dq + _dot(ds.astype(k.dtype), k)

  carry = jnp.zeros((rows, q_ref.shape[-1]), jnp.float32)
  store(dq_ref, _over_keys(step, carry, min_key_ref, gap_ref, cols=cols, high=pl.cdiv(begin + rows, cols)), size)


def _keys_kernel(
  q_ref, k_ref, v_ref, first_key_ref, max_q_ref, ids_ref, g_ref, lse2_ref, delta_ref, dk_ref, dv_ref, *, static, dims
):
  rows, cols, *_ = static.tiles.keys
  size, values = dims
  begin = pl.program_id(0) * cols
  k, v, key_places = load(k_ref, size), load(v_ref, values), begin + jnp.arange(cols)
  key_ids = _ids(ids_ref, pl.ds(begin, cols))
  low, high = begin // rows, max_q_ref[pl.program_id(0)] // rows + 1
  count = high - low

  def step(n, carry):
    dk, dv = carry
    # One loop over (query head of the group) x (block of queries).
    head, i = n // count, low + n % count
    queries = pl.ds(i * rows, rows)
    q, g = load(q_ref.at[queries, head], size), load(g_ref.at[queries, head], values)
    s, slope = scores(q, k, static.cap)
    query_places, first_key = i * rows + jnp.arange(rows), first_key_ref[queries]
    mask = visible(query_places, first_key, key_places, _ids(ids_ref, queries), key_ids, window=static.window)
    weights = jnp.exp2(jnp.where(mask, s * LOG2_E, MASKED_LOGIT) - lse2_ref[head, queries][:, None])
    dv += _dot(weights.astype(g.dtype), g, trans_a=True)
    ds = weights * (_dot(g, v, trans_b=True) - delta_ref[head, queries][:, None]) * slope
    return dk + _dot(ds.astype(q.dtype), q, trans_a=True), dv

  zeros = jnp.zeros((cols, k_ref.shape[-1]), jnp.float32), jnp.zeros((cols, v_ref.shape[-1]), jnp.float32)
  dk, dv = jax.lax.fori_loop(0, q_ref.shape[1] * count, step, zeros)
  store(dk_ref, dk, size)
  store(dv_ref, dv, values)


# ---------------------------------------------------------------------- calls


def padded(size: int) -> int:
  return pl.next_power_of_2(max(size, 16))  # the smallest side of a matrix product


def _call(kernel, part: str, static: _Static, inputs, outputs, grid):
  """Calls a kernel with the blocks of a field (`part`) of `Tiles`.

  inputs, outputs: (array, block, index map) of each; inputs begin with q, k and v, and their arrays may be None.
  """
  arrays = [x for x in inputs if x[0] is not None]
  dims = inputs[1][0].shape[3], inputs[2][0].shape[3]  # (h, hv)
  *_, warps, stages = getattr(static.tiles, part)

  def with_absent_inputs(*refs):
    input_refs = iter(refs[: len(arrays)])
    all_refs = [None if x[0] is None else next(input_refs) for x in inputs]
    kernel(*all_refs, *refs[len(arrays) :], static=static, dims=dims)

  return pl.pallas_call(
    with_absent_inputs,
    grid=grid,
    in_specs=[pl.BlockSpec(block, index) for _, block, index in arrays],
    out_specs=[pl.BlockSpec(block, index) for _, block, index in outputs],
    out_shape=[x for x, *_ in outputs],
    compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
    interpret=static.interpret,
    name=f'attention_{part}_{static.window}',
  )(*(x for x, *_ in arrays))


def _by_query(rows: int, qkv, bounds):
  """Returns (inputs of `_call`, grid) for a kernel whose programs loop over the keys of `rows` queries."""
  q, k, v = qkv
  gap = bounds.gap
  if gap is not None:
    gap = jnp.stack([extremes(gap[0], rows, last=True), extremes(gap[1], rows)], axis=1)
  batch, length, heads, _ = q.shape
  group, wide, wide_v = heads // k.shape[2], padded(q.shape[3]), padded(v.shape[3])
  inputs = [
    (q, (None, rows, None, wide), lambda i, h, b: (b, i, h, 0)),
    (k, (None, length, None, wide), lambda i, h, b: (b, 0, h // group, 0)),
    (v, (None, length, None, wide_v), lambda i, h, b: (b, 0, h // group, 0)),
    (bounds.first_key, (None, rows), lambda i, h, b: (b, i)),
    (extremes(bounds.first_key, rows), (None, length // rows), lambda i, h, b: (b, 0)),
    (gap, (None, 2, length // rows), lambda i, h, b: (b, 0, 0)),
    (bounds.ids, (None, 2, length), lambda i, h, b: (b, 0, 0)),
  ]
  return inputs, (length // rows, heads, batch)


def _forward(static, qkv, sinks, bounds):
  """Returns the result [B, T, H, hv] and log2 of the sum of exp(scores) of each query [B, H, T]."""
  (batch, length, heads, _), values, rows = qkv[0].shape, qkv[2].shape[3], static.tiles.forward[0]
  inputs, grid = _by_query(rows, qkv, bounds)
  inputs.append((sinks, (heads,), lambda i, h, b: (0,)))
  out = jax.ShapeDtypeStruct((batch, length, heads, values), qkv[0].dtype)
  lse2 = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
  outputs = [
    (out, (None, rows, None, padded(values)), lambda i, h, b: (b, i, h, 0)),
    (lse2, (None, None, rows), lambda i, h, b: (b, h, i)),
  ]
  return _call(_forward_kernel, 'forward', static, inputs, outputs, grid=grid)


def _backward_queries(static, qkv, bounds, *, g, lse2, delta):
  """Returns the gradient of the queries."""
  rows = static.tiles.queries[0]
  inputs, grid = _by_query(rows, qkv, bounds)
  inputs += [
    (g, (None, rows, None, padded(g.shape[3])), lambda i, h, b: (b, i, h, 0)),
    (lse2, (None, None, rows), lambda i, h, b: (b, h, i)),
    (delta, (None, None, rows), lambda i, h, b: (b, h, i)),
  ]
  q, *block = inputs[0]
  outputs = [(jax.ShapeDtypeStruct(q.shape, q.dtype), *block)]
  (dq,) = _call(_queries_kernel, 'queries', static, inputs, outputs, grid=grid)
  return dq


def _backward_keys(static, qkv, bounds, *, g, lse2, delta):
  """Returns the gradients of keys and values, summed over the queries of each kv head."""
  q, k, v = qkv
  batch, length, heads, _ = q.shape
  cols, kv_heads = static.tiles.keys[1], k.shape[2]
  group, wide, wide_v = heads // kv_heads, padded(q.shape[3]), padded(v.shape[3])
  inputs = [
    (q, (None, length, group, wide), lambda j, h, b: (b, 0, h, 0)),
    (k, (None, cols, None, wide), lambda j, h, b: (b, j, h, 0)),
    (v, (None, cols, None, wide_v), lambda j, h, b: (b, j, h, 0)),
    (bounds.first_key, (None, length), lambda j, h, b: (b, 0)),
    (extremes(bounds.last_query, cols, last=True), (None, length // cols), lambda j, h, b: (b, 0)),
    (bounds.ids, (None, 2, length), lambda j, h, b: (b, 0, 0)),
    (g, (None, length, group, wide_v), lambda j, h, b: (b, 0, h, 0)),
    (lse2, (None, group, length), lambda j, h, b: (b, h, 0)),
    (delta, (None, group, length), lambda j, h, b: (b, h, 0)),
  ]
  outputs = [(jax.ShapeDtypeStruct(x.shape, x.dtype), *block) for x, *block in inputs[1:3]]
  return _call(_keys_kernel, 'keys', static, inputs, outputs, grid=(length // cols, kv_heads, batch))
