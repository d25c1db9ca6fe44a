"""Attention of single tokens over a KV cache on TPUs, in Pallas for Mosaic.

The grid is a list of chunks of slots that is made while the program runs, so that only chunks with filled entries are
read, from slots or from pages. While one chunk is computed, the next one is copied to vector memory. The list has two
parts, one for each core of a v4 or v5p.

Legend: S slots, K kv heads, G queries per kv head, h head size, hv that of values, N entries of a slot, C entries of a
chunk, W chunks of all slots, T tokens of a block, p entries of a page.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxpost.models.attention_xla import scale_queries, softcap
from jaxpost.types import MASKED_LOGIT

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

_LANES, _SUBLANES = 128, 8  # of the registers of a TPU, and of the tiles of its main memory
_CHUNK_BYTES = 2**20  # keys and values of a chunk; with much less, a copy would wait for its start
_MIN_ENTRIES, _MAX_ENTRIES = 128, 512  # of a chunk
_CORES = 2


class _Work(NamedTuple):
  """What the kernel reads from scalar memory, all int32."""

  slots: jax.Array  # [W] of each chunk
  chunks: jax.Array  # [W] number of the chunk in its slot
  ends: jax.Array  # [parts + 1] where the parts of the list begin and end
  filled: jax.Array  # [S]
  step: jax.Array  # [1]
  table: jax.Array  # [S * pages of a slot], or [1] without pages


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
    sinks: [K, G], or None.
    table: [S, n] int32, pages of each slot, or None.
    interpret: run it on the CPU, for tests.

  Returns:
    [S, K, G, hv].
  """
  _, heads, group, _ = q.shape
  length, sizes = cache[0].shape[2], [x.shape[3] for x in cache]
  chunk = _entries_of_chunk(heads, sum(sizes))
  if table is None:
    pages, room, chunk = 0, length, min(chunk, length)
  else:
    pages = max(1, chunk // length)
    room, chunk = table.shape[1] * length, pages * length
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
  work = _work(jnp.minimum(filled, room), step, table, room=room, chunk=chunk, window=window, cfg=cfg)

  def of_slot(x):
    return pl.BlockSpec((None, *x.shape[1:]), lambda part, i, work: (_item(part, i, work)[0], 0, 0, 0))

  arrays, specs, turned = zip(*(_as_read(x, min(chunk, length), pages, table) for x in cache))
  if sinks is not None:
    sinks = sinks.astype(jnp.float32)[..., None]
  of_sinks = None if sinks is None else pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0))
  q = scale_queries(q, cfg).astype(cache[0].dtype)
  return pl.pallas_call(
    functools.partial(_kernel, turned=turned, window=window, room=room, cfg=cfg),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(len(work.ends) - 1, jnp.max(work.ends[1:] - work.ends[:-1])),
      in_specs=[of_slot(q), list(specs), [of_slot(x) for x in recent], of_sinks],
      out_specs=pl.BlockSpec((None, heads, group, sizes[1]), of_slot(q).index_map),
      scratch_shapes=[pltpu.VMEM((heads, group, n), jnp.float32) for n in (1, 1, sizes[1])],
    ),
    out_shape=jax.ShapeDtypeStruct((*q.shape[:3], sizes[1]), cache[1].dtype),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
    interpret=interpret,
    name=f'decode_{window}_{chunk}' + '_pages' * (table is not None),  # `planning.kernels` reads it
  )(work, q, list(arrays), list(recent), sinks)


def _entries_of_chunk(heads: int, size: int) -> int:
  """Returns how many entries, of `heads` keys and values that have `size` elements together, are copied at a time."""
  wanted = _CHUNK_BYTES // (2 * heads * size)
  return min(_MAX_ENTRIES, max(_MIN_ENTRIES, 2 ** (wanted.bit_length() - 1)))


def _work(filled, step, table, *, room: int, chunk: int, window: int, cfg: ModelConfig) -> _Work:
  """Lists the chunks of all slots that have entries in the window of a token; each slot has at least one chunk."""
  slots = len(filled)
  first = jnp.zeros_like(filled)
  if window:  # of the first token of the block, so that the list is the same for all of its tokens
    first = filled - filled % window if cfg.chunked else jnp.maximum(0, filled - window + 1)
  first //= chunk
  counts = jnp.maximum(1, pl.cdiv(filled, chunk) - first)
  ends = jnp.cumsum(counts)
  items = jnp.arange(slots * pl.cdiv(room, chunk))
  slot = jnp.minimum(jnp.sum(items[:, None] >= ends, axis=1), slots - 1)
  number = first[slot] + items - (ends - counts)[slot]
  borders = [0, ends[-1]]
  if slots >= _CORES:  # the border of two slots at which half of the list is done; each part has a slot
    half = jnp.sum(ends <= ends[-1] // 2)
    borders.insert(1, ends[jnp.clip(half, 1, slots - 1) - 1])
  flat = jnp.zeros(1) if table is None else table.reshape(-1)
  arrays = slot, number, jnp.stack(borders), filled, jnp.reshape(step, (1,)), flat
  return _Work(*(x.astype(jnp.int32) for x in arrays))


def _item(part: jax.Array, i: jax.Array, work: _Work) -> tuple[jax.Array, jax.Array]:
  """Returns (slot, chunk) of item i of a part of the list, or of its last one if it has fewer."""
  at = jnp.minimum(work.ends[part] + i, work.ends[part + 1] - 1)
  return work.slots[at], work.chunks[at]


def _as_read(x: jax.Array, entries: int, pages: int, table: jax.Array | None) -> tuple[list, list, bool]:
  """Returns keys or values as arguments of the kernel, their blocks, and whether entries are the last axis of these.

  Each page of a chunk is an argument of its own. XLA for TPU keeps heads that do not fill the lanes of a register with
  their entries in the lanes, where [heads, size, entries] is the same memory.
  """
  heads, size = x.shape[1], x.shape[3]
  turned = size % _LANES > 0

  def index(part, i, work, page):
    slot, chunk = _item(part, i, work)
    if table is not None:
      return work.table[slot * table.shape[1] + chunk * pages + page], 0, 0, 0
    return (slot, 0, 0, chunk) if turned else (slot, 0, chunk, 0)

  block = (None, heads, size, entries) if turned else (None, heads, entries, size)
  specs = [pl.BlockSpec(block, functools.partial(index, page=page)) for page in range(pages or 1)]
  return [x.swapaxes(2, 3) if turned else x] * len(specs), specs, turned


def _attended(q, keys, values, mask, *, turned, cfg: ModelConfig, before=None) -> tuple[jax.Array, ...]:
  """Adds entries to the attention `before`, which is made of what is returned.

  Args:
    q: [K, G, h]; keys: [K, C, h] and values [K, C, hv], or with the last two axes `turned`; mask: [1, 1, C].

  Returns:
    The largest score [K, G, 1], the sum of exp(score - largest) [K, G, 1], and of the values weighted so [K, G, hv].
  """
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  scores = softcap(product('kgh,khc->kgc' if turned[0] else 'kgh,kch->kgc', q, keys), cfg)
  scores = jnp.where(mask, scores, MASKED_LOGIT)
  largest = jnp.max(scores, axis=-1, keepdims=True)
  if before:
    largest = jnp.maximum(before[0], largest)
  weights = jnp.exp(scores - largest)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  out = product('kgc,khc->kgh' if turned[1] else 'kgc,kch->kgh', weights.astype(values.dtype), values)
  if before:
    kept = jnp.exp(before[0] - largest)
    total, out = total + kept * before[1], out + kept * before[2]
  return largest, total, out


def _kernel(
  work, q_ref, cache_refs, recent_refs, sinks_ref, out_ref, *carry_refs, turned, window, room, cfg: ModelConfig
) -> None:
  """Attends to a chunk of a slot; the first one includes the tokens of the block, and the last one ends the slot.

  carry_refs: `_attended` of the chunks so far.
  """
  part, i = pl.program_id(0), pl.program_id(1)
  at, end = work.ends[part] + i, work.ends[part + 1]
  slot, number = _item(part, i, work)
  is_first = (i == 0) | (work.slots[jnp.clip(at - 1, 0, end - 1)] != slot)
  is_last = (at == end - 1) | (work.slots[jnp.minimum(at + 1, end - 1)] != slot)
  filled, step = work.filled[slot], work.step[0]
  position = filled + step  # of the query
  visible = 0  # the first position that it attends to
  if window:
    visible = position - position % window if cfg.chunked else position - window + 1

  def add(*entries, **options):
    for ref, x in zip(carry_refs, _attended(q_ref[...], *entries, cfg=cfg, **options), strict=True):
      ref[...] = x

  @pl.when((at < end) & is_first)
  def _():
    keys, values = (ref[...] for ref in recent_refs)
    steps = jax.lax.broadcasted_iota(jnp.int32, (1, 1, keys.shape[1]), 2)
    add(keys, values, (steps <= step) & (filled + steps >= visible), turned=(False, False))

  @pl.when((at < end) & (filled > 0))
  def _():
    keys, values = (
      jnp.concatenate([ref[...] for ref in refs], axis=2 if is_turned else 1)
      for refs, is_turned in zip(cache_refs, turned)
    )
    chunk = values.shape[2 if turned[1] else 1]

    def places(axis):
      return number * chunk + jax.lax.broadcasted_iota(jnp.int32, [chunk if n == axis else 1 for n in range(3)], axis)

    mask = (places(2) >= visible) & (places(2) < filled)
    if room % chunk:  # what follows the last entry of the cache is not even a number, perhaps
      values = jnp.where(places(2 if turned[1] else 1) < room, values, jnp.zeros_like(values))
    add(keys, values, mask, turned=turned, before=[ref[...] for ref in carry_refs])

  @pl.when((at < end) & is_last)
  def _():
    largest, total, out = (ref[...] for ref in carry_refs)
    if sinks_ref is not None:  # a key without a value
      total += jnp.exp(sinks_ref[...] - largest)
    out_ref[...] = (out / total).astype(out_ref.dtype)
