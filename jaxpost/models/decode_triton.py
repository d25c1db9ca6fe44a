"""Attention of single tokens over a KV cache on NVIDIA GPUs, in Pallas for Triton.

One kernel reads only the filled entries of each slot, each of them once. If there are few slots, the entries of a slot
are split over several programs (Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A kernel
before it normalizes and rotates the heads of a token, and writes its keys and values to the cache: six kernels of XLA.

Legend: S slots, K kv heads, G queries per kv head, h head size, hv that of values, N entries of a slot, T those of a
block of new tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxpost.distributed.mesh import Layout
from jaxpost.models import attention_triton
from jaxpost.models.attention_triton import load
from jaxpost.models.attention_xla import scale_queries
from jaxpost.types import MASKED_LOGIT

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

_PROGRAMS = 192  # as many keep a device busy
_MIN_ENTRIES = 256  # of a program: fewer are not worth one
_ENTRIES, _WARPS, _STAGES = 32, 4, 4  # the fastest of six settings on an H200
# Stages hold entries in shared memory: heads of more than _WIDE need fewer stages to fit an L4.
_WIDE, _WIDE_STAGES = 128, 3


def rotates(cfg: ModelConfig, table: tuple | None, layout: Callable) -> bool:
  """Returns whether `rotate_and_write` supports the heads of a layer, whose RoPE table is `table`."""
  if (isinstance(layout, Layout) and layout.mesh.size > 1) or cfg.mixed or cfg.latent or cfg.gated:
    return False
  whole_heads = cfg.rotary_dim in (0, cfg.head_dim) and not cfg.ropes[0].interleaved
  return whole_heads and cfg.qk_norm in ('', 'head') and table is not None and len(table) == 2 and table[0] is not None


def rotate_and_write(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  recent: Sequence[jax.Array],
  step: int | jax.Array,
  *,
  p: dict,
  table: tuple[jax.Array, jax.Array],
  cfg: ModelConfig,
  interpret: bool = False,
) -> list[jax.Array]:
  """Normalizes and rotates the heads of one token per slot, and writes its keys and values to `recent` at `step`.

  Args:
    q: [S, 1, H, h]; k, v: [S, 1, K, h]; projections of the token.
    recent: keys and values [S, K, T, h], updated in place.
    p: parameters of the layer, with the scales [h] of the norms if the model has them.
    table: (cos, sin) of the tokens, see `rope.tables`.
    interpret: run it on the CPU, for tests.

  Returns:
    Queries [S, 1, H, h] float32, keys and values [S, K, T, h].
  """
  # The projections are parts of one product, whose concatenation XLA takes as that product.
  projected = jnp.concatenate([q, k, v], axis=2)[:, 0]
  norms = (p['q_norm'], p['k_norm']) if cfg.qk_norm else ()
  arrays = projected, *(x[:, 0, 0] for x in table), jnp.reshape(step, (1,)).astype(jnp.int32), *norms, *recent
  last = len(arrays) - 1
  return pl.pallas_call(
    functools.partial(_rotate_kernel, cfg=cfg),
    grid=(k.shape[2], len(k)),
    out_shape=[jax.ShapeDtypeStruct(q.shape, jnp.float32), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in recent)],
    input_output_aliases={last - 1: 1, last: 2},
    compiler_params=plgpu.CompilerParams(num_warps=1),
    interpret=interpret,
    name='rotate',
  )(*arrays)


def _rotate_kernel(projected_ref, cos_ref, sin_ref, step_ref, *refs, cfg: ModelConfig):
  """Makes the queries of one kv head of a slot, and writes its key and value; each head is read as two halves."""
  *norm_refs, _, _, q_ref, k_ref, v_ref = refs  # the first two are the old entries, in the memory of the last two
  kv_head, slot, step = pl.program_id(0), pl.program_id(1), step_ref[0]
  (heads, size), kv_heads = q_ref.shape[2:], k_ref.shape[1]
  group = heads // kv_heads
  columns = jnp.arange(pl.next_power_of_2(size // 2))
  halves, mask = (columns, columns + size // 2), columns < size // 2

  def read(ref, *i):
    return [plgpu.load(ref.at[*i, half], mask=mask, other=0).astype(jnp.float32) for half in halves]

  def write(ref, *i, x):
    for half, y in zip(halves, x):
      plgpu.store(ref.at[*i, half], y.astype(ref.dtype), mask=mask)

  (cos, _), (sin, _) = read(cos_ref, slot), read(sin_ref, slot)

  def rotated(i, norm_ref):
    x = read(projected_ref, slot, i)
    if norm_ref is not None:
      inverse = jax.lax.rsqrt(sum(jnp.sum(y * y) for y in x) / size + cfg.norm_eps)
      x = [y * inverse * (scale + cfg.norm_offset) for y, scale in zip(x, read(norm_ref))]
      x = [y.astype(projected_ref.dtype).astype(jnp.float32) for y in x]
    return x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin

  q_norm, k_norm = norm_refs or (None, None)
  for head in [kv_head * group + i for i in range(group)]:
    write(q_ref, slot, 0, head, x=rotated(head, q_norm))
  write(k_ref, slot, kv_head, step, x=rotated(heads + kv_head, k_norm))
  write(v_ref, slot, kv_head, step, x=read(projected_ref, slot, heads + kv_heads + kv_head))


def attend(
  q: jax.Array,
  cache: tuple[jax.Array, jax.Array],
  recent: tuple[jax.Array, jax.Array],
  filled: jax.Array,
  step: jax.Array,
  sinks: jax.Array | None,
  table: jax.Array | None = None,
  *,
  window: int,
  cfg: ModelConfig,
  interpret: bool = False,
) -> jax.Array:
  """Attends to the filled entries of a cache and to the tokens of the current block.

  Args:
    q: [S, K, G, h], not multiplied by the attention scale yet.
    cache: keys [S, K, N, h] and values [S, K, N, hv], of which the first `filled` [S] are valid; it may have more
      slots, which are not read. With a table, pages [., K, p, h] and [., K, p, hv].
    recent: keys [S, K, T, h] and values [S, K, T, hv] of the next tokens, of which the first `step` + 1 are valid.
    sinks: [K, G], or None. table: [S, n] int32, pages of each slot, or None.
    interpret: run it on the CPU, for tests.

  Returns:
    [S, K, G, hv].
  """
  slots, heads, group, size = q.shape
  held, length, block, values = len(cache[0]), cache[0].shape[2], recent[0].shape[2], cache[1].shape[3]
  room = length if table is None else length * table.shape[1]
  filled = jnp.minimum(filled, room)  # the position of an idle slot keeps growing past its cache
  parts = max(1, min(-(-_PROGRAMS // (slots * heads)), room // _MIN_ENTRIES))
  wide, wide_v, rows, new = map(attention_triton.padded, (size, values, group, block))
  arrays = [
    (q, (None, None, rows, wide), lambda h, s, i: (s, h, 0, 0)),
    (cache[0], (held, None, length, wide), lambda h, s, i: (0, h, 0, 0)),
    (cache[1], (held, None, length, wide_v), lambda h, s, i: (0, h, 0, 0)),
    (recent[0], (None, None, new, wide), lambda h, s, i: (s, h, 0, 0)),
    (recent[1], (None, None, new, wide_v), lambda h, s, i: (s, h, 0, 0)),
    (filled.astype(jnp.int32), (slots,), lambda h, s, i: (0,)),
    (jnp.reshape(step, (1,)).astype(jnp.int32), (1,), lambda h, s, i: (0,)),
    *([] if table is None else [(table.astype(jnp.int32), table.shape, lambda h, s, i: (0, 0))]),
  ]
  stages = _STAGES if max(wide, wide_v) <= _WIDE else _WIDE_STAGES
  out, lse2 = pl.pallas_call(
    functools.partial(_kernel, sizes=(group, size, values), parts=parts, window=window, cfg=cfg),
    grid=(heads, slots, parts),
    in_specs=[pl.BlockSpec(shape, index) for _, shape, index in arrays],
    out_specs=[
      pl.BlockSpec((None, None, None, rows, wide_v), lambda h, s, i: (i, s, h, 0, 0)),
      pl.BlockSpec((None, None, None, rows), lambda h, s, i: (i, s, h, 0)),
    ],
    out_shape=[
      jax.ShapeDtypeStruct((parts, slots, heads, group, values), jnp.float32 if parts > 1 else cache[1].dtype),
      jax.ShapeDtypeStruct((parts, slots, heads, group), jnp.float32),
    ],
    compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=stages),
    interpret=interpret,
    name=f'decode_{window}{"" if table is None else "_pages"}',  # `planning.kernels` reads it
  )(*(x for x, *_ in arrays))
  return _merged(out, lse2, sinks).astype(cache[1].dtype)


def _merged(out: jax.Array, lse2: jax.Array, sinks: jax.Array | None) -> jax.Array:
  """Returns [S, K, G, hv], the attention to all n parts of the entries.

  Args:
    out: [n, S, K, G, hv], the attention to each part alone.
    lse2: [n, S, K, G], log2 of the sum of exp(scores) of each part.
  """
  if len(out) == 1 and sinks is None:
    return out[0]
  lse = lse2 * math.log(2)
  total = jax.nn.logsumexp(lse, axis=0)
  if sinks is not None:  # a key without a value
    total = jnp.logaddexp(total, sinks.astype(jnp.float32))
  return jnp.sum(out * jnp.exp(lse - total)[..., None], axis=0)


def _kernel(q_ref, k_ref, v_ref, new_k_ref, new_v_ref, filled_ref, step_ref, *refs, sizes, parts, window, cfg):
  """Attends from the queries of a kv head to a part of the entries of its slot; part 0 includes the recent tokens.

  refs: perhaps the table of pages, and the results. sizes: (G, h, hv). parts: number of the parts of entries.
  """
  *table_refs, out_ref, lse2_ref = refs
  group, size, values = sizes
  slot, part = pl.program_id(1), pl.program_id(2)
  filled, step = filled_ref[slot], step_ref[0]
  length = k_ref.shape[1]
  entries = min(_ENTRIES, length) if table_refs else _ENTRIES
  position = filled + step  # of the query
  first = jnp.int32(0)
  if window:
    first = jnp.maximum(0, position - position % window if cfg.chunked else position - window + 1)
  real = jnp.arange(q_ref.shape[0]) < group
  q = scale_queries(load(q_ref, size, real).astype(jnp.float32), cfg).astype(k_ref.dtype)

  def add(carry, keys, vals, mask):
    s, _ = attention_triton.scores(q, keys, cfg.attention_softcap)
    return attention_triton.add_keys(carry, jnp.where(mask[None], s * attention_triton.LOG2_E, MASKED_LOGIT), vals)

  def add_cached(j, carry):
    start = j * entries
    places = start + jnp.arange(entries)
    mask = (places >= first) & (places < filled)
    at = slot, pl.ds(start, entries)
    if table_refs:
      at = table_refs[0][slot, start // length], pl.ds(start % length, entries)
    return add(carry, load(k_ref.at[at], size, mask), load(v_ref.at[at], values, mask), mask)

  def add_recent(carry):
    steps = jnp.arange(new_k_ref.shape[0])
    mask = (steps <= step) & (filled + steps >= first)
    return add(carry, load(new_k_ref, size, mask), load(new_v_ref, values, mask), mask)

  low, high = first // entries, pl.cdiv(filled, entries)
  blocks_per_part = pl.cdiv(high - low, parts)
  begin = low + part * blocks_per_part
  carry = attention_triton.nothing(len(q), v_ref.shape[-1])
  carry = jax.lax.fori_loop(begin, jnp.minimum(high, begin + blocks_per_part), add_cached, carry)
  out, max_score, total = jax.lax.cond(part == 0, add_recent, lambda carry: carry, carry)
  total = jnp.where(total > 0, total, 1)  # part 0 has at least the token itself; others may have no entries
  attention_triton.store(out_ref, out / total[:, None], values, real)
  plgpu.store(lse2_ref, max_score + jnp.log2(total), mask=real)
