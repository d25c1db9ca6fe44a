"""Attention of single tokens over a KV cache on TPUs, in Pallas for Mosaic.

The grid is a list of chunks of slots that is made while the program runs, so that only chunks with filled entries are
read, from slots or from pages. While one chunk is computed, the next one is copied to vector memory. A slot without
entries has an item for the tokens of the block, which reads nothing else. The list has two parts, one for each core of
a v4 or v5p.

Legend: S slots, K kv heads, G queries per kv head, h head size, hv that of values, N entries of a slot, C entries of a
chunk, W chunks of all slots, T tokens of a block, p entries of a page.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxpost.models.attention_xla import scale_queries, softcap
from jaxpost.types import MASKED_LOGIT

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

_LANES = 128
_CHUNK_BYTES = 2**20  # keys and values of a chunk; with much less, a copy would wait for its start
_MAX_ENTRIES = 512  # of a chunk
_SCALAR_BYTES, _BLOCK_BYTES = 3 * 2**18, 2**22  # of scalars, and of the tokens of a block, at most
_CORES = 2


class _Items(NamedTuple):
  """The chunks that the kernel goes through, and what else it reads from scalar memory, all int32."""

  slots: jax.Array  # [W] of each chunk
  chunks: jax.Array  # [W] number of the chunk in its slot
  sources: jax.Array  # [W] the slot, or where that has no entries, the slot of the item before, whose chunk is there
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
  """Computes `decode_triton.attend`, which describes arguments and result."""
  _, heads, group, _ = q.shape
  length, sizes = cache[0].shape[2], [x.shape[3] for x in cache]
  chunk = min(_entries_of_chunk(heads, sizes), length if table is None else table.shape[1] * length)
  room, pages = length, 1  # pages of a chunk
  if table is not None:
    pages = max(1, chunk // length)
    room, chunk = table.shape[1] * length, min(chunk, length) * pages
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
  items = _list_chunks(jnp.minimum(filled, room), step, table, room=room, chunk=chunk, window=window, cfg=cfg)

  def of_slot(x):
    return pl.BlockSpec((None, *x.shape[1:]), lambda part, i, items: (items.slots[_item(part, i, items)], 0, 0, 0))

  arrays, specs, turned = zip(*(_as_read(x, chunk, pages, table) for x in cache))
  if sinks is not None:
    sinks = sinks.astype(jnp.float32)[..., None]
  of_sinks = None if sinks is None else pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0))
  q = scale_queries(q, cfg).astype(cache[0].dtype)
  return pl.pallas_call(
    functools.partial(_kernel, turned=turned, window=window, cfg=cfg),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(len(items.ends) - 1, jnp.max(items.ends[1:] - items.ends[:-1])),
      in_specs=[of_slot(q), list(specs), [of_slot(x) for x in recent], of_sinks],
      out_specs=pl.BlockSpec((None, heads, group, sizes[1]), of_slot(q).index_map),
      scratch_shapes=[pltpu.VMEM((heads, group, n), jnp.float32) for n in (1, 1, sizes[1])],
    ),
    out_shape=jax.ShapeDtypeStruct((*q.shape[:3], sizes[1]), cache[1].dtype),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
    interpret=interpret,
    name=f'decode_{window}_{chunk}{"" if table is None else "_pages"}',  # `planning.kernels` reads it
  )(items, q, list(arrays), list(recent), sinks)


def refusal(slots: int, heads: int, sizes: Sequence[int], *, entries: int, page_size: int, block: int) -> str:
  """Returns what the memories for scalars and vectors of a core do not hold of such a sampler, or ''.

  Args:
    slots, heads: of a device; sizes: of a key and a value.
    entries: of a slot. page_size: entries of a page, or 0. block: tokens of a block.
  """
  items = slots * pl.cdiv(entries, _entries_of_chunk(heads, sizes))
  if 4 * (3 * items + (slots * entries // page_size if page_size else 0)) > _SCALAR_BYTES:
    return f'{slots} slots of {entries} entries' + (f' in pages of {page_size}' if page_size else '')
  return f'blocks of {block} tokens' if 2 * heads * sum(sizes) * block > _BLOCK_BYTES else ''


def _entries_of_chunk(heads: int, sizes: Sequence[int]) -> int:
  """Returns how many entries are copied at a time."""
  wanted = _CHUNK_BYTES // (2 * heads * sum(sizes))
  least = _LANES if any(size % _LANES for size in sizes) else 16
  return min(_MAX_ENTRIES, max(least, 2 ** max(0, wanted.bit_length() - 1)))


def _list_chunks(filled, step, table, *, room: int, chunk: int, window: int, cfg: ModelConfig) -> _Items:
  """Lists the chunks of all slots that have entries in the window of a token; each slot has at least one item."""
  slots = len(filled)
  first = jnp.zeros_like(filled)
  if window:  # of the first token of the block, so that the list is the same for all of its tokens
    first = filled - filled % window if cfg.chunked else jnp.maximum(0, filled - window + 1)
  last = jnp.maximum(pl.cdiv(filled, chunk) - 1, 0)
  first = jnp.minimum(first // chunk, last)
  ends = jnp.cumsum(last - first + 1)
  number = jnp.arange(slots * pl.cdiv(room, chunk))
  slot = jnp.minimum(jnp.sum(number[:, None] >= ends, axis=1), slots - 1)
  with_entries = jax.lax.cummax(jnp.where(filled[slot] > 0, number, 0))  # the last such item up to each
  source = slot[with_entries]
  chunks = last[source] - (ends[source] - 1 - with_entries)
  borders = [0, ends[-1]]
  if slots >= _CORES:  # the border of two slots at which half of the list is done; each part has a slot
    half = jnp.sum(ends <= ends[-1] // 2)
    borders.insert(1, ends[jnp.maximum(half, 1) - 1])
  flat = jnp.zeros(1) if table is None else table.reshape(-1)
  arrays = slot, chunks, source, jnp.stack(borders), filled, jnp.reshape(step, (1,)), flat
  return _Items(*(x.astype(jnp.int32) for x in arrays))


def _item(part: jax.Array, i: jax.Array, items: _Items) -> jax.Array:
  """Returns the place in the list of item i of a part, or of its last one if it has fewer, which is then skipped."""
  return jnp.minimum(items.ends[part] + i, items.ends[part + 1] - 1)


def _as_read(x: jax.Array, chunk: int, pages: int, table: jax.Array | None) -> tuple[list, list, bool]:
  """Returns keys or values as arguments of the kernel, their blocks, and whether entries are the last axis of these.

  Each of the `pages` of a chunk is an argument of its own; a large page has several chunks. Heads that do not fill the
  lanes are read as [heads, size, entries], which is how XLA keeps them, see `decode_kernels.entries_multiple`.
  """
  heads, size, entries = x.shape[1], x.shape[3], chunk // pages
  turned = size % _LANES > 0

  def index(part, i, items, page):
    at = _item(part, i, items)
    row, number = items.sources[at], items.chunks[at]
    if table is not None:
      per_page = x.shape[2] // entries
      # Signed division and remainder would ask the device for its generation, which a plan does not have.
      row = items.table[row * table.shape[1] + jax.lax.div(number * pages + page, per_page)]
      number = jax.lax.rem(number, per_page)
    return (row, 0, 0, number) if turned else (row, 0, number, 0)

  block = (None, heads, size, entries) if turned else (None, heads, entries, size)
  specs = [pl.BlockSpec(block, functools.partial(index, page=page)) for page in range(pages)]
  return [x.swapaxes(2, 3) if turned else x] * len(specs), specs, turned


def _numbers(size: int, axis: int) -> jax.Array:
  """Returns 0, 1, ... along one of three axes."""
  return jax.lax.broadcasted_iota(jnp.int32, [size if n == axis else 1 for n in range(3)], axis)


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
  items, q_ref, cache_refs, recent_refs, sinks_ref, out_ref, *carry_refs, turned, window, cfg: ModelConfig
) -> None:
  """Attends to a chunk of a slot; the first one includes the tokens of the block, and the last one ends the slot.

  carry_refs: `_attended` of the chunks so far.
  """
  part, i = pl.program_id(0), pl.program_id(1)
  at, end = _item(part, i, items), items.ends[part + 1]
  slot, is_one = items.slots[at], items.ends[part] + i < end
  is_first = (i == 0) | (items.slots[jnp.maximum(at - 1, 0)] != slot)
  is_last = (at == end - 1) | (items.slots[jnp.minimum(at + 1, end - 1)] != slot)
  filled, step = items.filled[slot], items.step[0]
  position = filled + step  # of the query
  visible = 0  # the first position that it attends to
  if window:
    visible = position - jax.lax.rem(position, window) if cfg.chunked else position - window + 1

  def add(keys, values, turned, start, count, before=None):
    """Adds entries at the positions `start`, ..., of which `count` are there; the memory of others may have NaN."""
    axis = 2 if turned[1] else 1
    values = jnp.where(_numbers(values.shape[axis], axis) < count, values, jnp.zeros_like(values))
    number = _numbers(values.shape[axis], 2)
    mask = (number < count) & (start + number >= visible)
    after = _attended(q_ref[...], keys, values, mask, turned=turned, cfg=cfg, before=before)
    for ref, x in zip(carry_refs, after, strict=True):
      ref[...] = x

  @pl.when(is_one & is_first)
  def _():
    add(*(ref[...] for ref in recent_refs), turned=(False, False), start=filled, count=step + 1)

  @pl.when(is_one & (filled > 0))
  def _():
    entries = [
      jnp.concatenate([ref[...] for ref in refs], axis=2 if is_turned else 1)
      for refs, is_turned in zip(cache_refs, turned)
    ]
    start = items.chunks[at] * entries[1].shape[2 if turned[1] else 1]
    add(*entries, turned=turned, start=start, count=filled - start, before=[ref[...] for ref in carry_refs])

  @pl.when(is_one & is_last)
  def _():
    largest, total, out = (ref[...] for ref in carry_refs)
    if sinks_ref is not None:  # a key without a value
      total += jnp.exp(sinks_ref[...] - largest)
    out_ref[...] = (out / total).astype(out_ref.dtype)
