"""Products of groups of rows with a matrix for each group on NVIDIA GPUs, in Pallas for Triton.

One kernel multiplies all groups. Each of its programs computes a tile of rows of one group by a tile of columns. Which
group that is depends on the sizes of the groups, which only the device knows, so there are as many tiles as there can
be, and those that have no rows end at once.

The callers run on one device or inside a `jax.shard_map` over all axes of the mesh (`models/moe.py`), so that a kernel
never sees arrays that XLA would have to partition.

Legend: N rows, E groups, D inputs, F outputs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_BAND = 8  # tiles along rows that are next to each other in time, for each tile of columns


class _Tile(NamedTuple):
  """Sides of a tile, and how much of the sum is added at a time."""

  rows: int
  columns: int
  depth: int
  warps: int
  stages: int = 3


class _Places(NamedTuple):
  """How many tiles there are along both sides, in the order in which programs compute them.

  Programs that run at the same time share what they read: a band of tiles of rows goes through all columns.
  """

  rows: int
  columns: int

  def of(self, program):
    """Returns (tile along rows, tile along columns) of a program."""
    band, inside = program // (_BAND * self.columns), program % (_BAND * self.columns)
    height = jnp.minimum(self.rows - band * _BAND, _BAND)
    return band * _BAND + inside % height, inside // height


def rows_by_groups(
  x: jax.Array,
  w: jax.Array,
  sizes: jax.Array,
  *,
  transposed: bool = False,
  out: str = 'float32',
  interpret: bool = False,
) -> jax.Array:
  """Multiplies each group of rows by its own matrix.

  Args:
    x: [N, D], bfloat16 or float16: the rows of group 0, then of group 1, ...; what further rows hold is not read.
    w: [E, D, F] of the same type.
    sizes: [E] int32, rows of each group.
    transposed: w is [E, F, D]; it is read in place.
    out: type of the result; sums are in float32.
    interpret: run it on the CPU, for tests.

  Returns:
    [N, F], in which rows of no group are 0.
  """
  (count, inner), groups = x.shape, len(sizes)
  width = w.shape[1 if transposed else 2]
  tile = _tile(count // groups, width, inner)
  # The rows of no group are one more, which is written and not computed.
  rows = _row_tiles(jnp.append(sizes, count - jnp.sum(sizes)), count, tile.rows)
  places = _Places(rows.shape[1], pl.cdiv(width, tile.columns))
  return pl.pallas_call(
    functools.partial(_rows_kernel, tile=tile, places=places, sides=(inner, width), transposed=transposed),
    grid=(places.rows * places.columns,),
    out_shape=jax.ShapeDtypeStruct((count, width), out),
    compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    interpret=interpret,
    name=f'grouped_rows{"_transposed" * transposed}',
  )(x, w, rows)


def groups_of_rows(
  x: jax.Array, g: jax.Array, sizes: jax.Array, *, out: str = 'float32', interpret: bool = False
) -> jax.Array:
  """Computes x^T g for the rows of each group: the gradient of its matrix.

  Args:
    x: [N, D], bfloat16 or float16, sorted as for `rows_by_groups`.
    g: [N, F] of the same type.
    sizes, out, interpret: as of `rows_by_groups`.

  Returns:
    [E, D, F], zeros for groups without rows.
  """
  (_, inputs), outputs = x.shape, g.shape[1]
  tile = _matrix_tile(inputs, outputs)
  places = _Places(pl.cdiv(inputs, tile.rows), pl.cdiv(outputs, tile.columns))
  ends = jnp.cumsum(sizes)
  return pl.pallas_call(
    functools.partial(_groups_kernel, tile=tile, places=places),
    grid=(places.rows * places.columns, len(sizes)),
    out_shape=jax.ShapeDtypeStruct((len(sizes), inputs, outputs), out),
    compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    interpret=interpret,
    name='grouped_matrices',
  )(x, g, jnp.stack([ends - sizes, ends]).astype(jnp.int32))


def _tile(rows: int, width: int, inner: int) -> _Tile:
  """Returns the tile of `rows_by_groups` for groups of `rows` rows on average; small ones waste fewer rows."""
  columns, depth = _side(128, width), _side(64, inner)
  if rows >= 192:
    return _Tile(128, columns, depth, warps=8)
  return _Tile(64 if rows >= 48 else 16, columns, depth, warps=4)


def _matrix_tile(inputs: int, outputs: int) -> _Tile:
  return _Tile(_side(128, inputs), _side(128, outputs), 64, warps=8 if min(inputs, outputs) > 64 else 4)


def _side(most: int, size: int) -> int:
  return min(most, pl.next_power_of_2(max(size, 16)))  # 16: the least side of a matrix product


def _row_tiles(sizes: jax.Array, count: int, block: int) -> jax.Array:
  """Returns (group, first row, end of the group) of each tile of `block` rows, [3, tiles]; the last ones are empty."""
  per, ends = -(-sizes // block), jnp.cumsum(sizes)
  tile_ends = jnp.cumsum(per)
  i = jnp.arange(count // block + len(sizes))
  group = jnp.minimum(jnp.sum(i[:, None] >= tile_ends, axis=1), len(sizes) - 1)
  start = (ends - sizes)[group] + block * (i - (tile_ends - per)[group])
  return jnp.stack([group, jnp.minimum(start, count), ends[group]]).astype(jnp.int32)


# -------------------------------------------------------------------- kernels


def _rows_kernel(
  x_ref, w_ref, tiles_ref, out_ref, *, tile: _Tile, places: _Places, sides: tuple[int, int], transposed: bool
):
  """Computes a tile of the rows of a group."""
  inner, width = sides
  number, column = places.of(pl.program_id(0))
  group, start, end = tiles_ref[0, number], tiles_ref[1, number], tiles_ref[2, number]
  rows, columns = pl.ds(start, tile.rows), pl.ds(column * tile.columns, tile.columns)
  # The next group begins in the same tile of the array; another program computes its rows.
  real, wanted = _below(start, tile.rows, end), _below(column * tile.columns, tile.columns, width)

  def step(j, total):
    some, there = pl.ds(j * tile.depth, tile.depth), _below(j * tile.depth, tile.depth, inner)
    x = _load(x_ref.at[rows, some], real, there)
    if transposed:
      w = _load(w_ref.at[group, columns, some], wanted, there)
    else:
      w = _load(w_ref.at[group, some, columns], there, wanted)
    return total + plgpu.dot(x, w, trans_b=transposed)

  computed = (start < end) & (group < w_ref.shape[0])
  steps = computed.astype(jnp.int32) * pl.cdiv(inner, tile.depth)
  total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
  _store(out_ref.at[rows, columns], total, real, wanted)


def _groups_kernel(x_ref, g_ref, bounds_ref, out_ref, *, tile: _Tile, places: _Places):
  """Computes a tile of the gradient of a group's matrix."""
  group = pl.program_id(1)
  start, end = bounds_ref[0, group], bounds_ref[1, group]
  down, across = places.of(pl.program_id(0))
  inputs, outputs = (pl.ds(i * side, side) for i, side in ((down, tile.rows), (across, tile.columns)))
  wanted = _below(down * tile.rows, tile.rows, x_ref.shape[1])
  wanted_too = _below(across * tile.columns, tile.columns, g_ref.shape[1])

  def step(j, total):
    first = start + j * tile.depth
    rows, real = pl.ds(first, tile.depth), _below(first, tile.depth, end)
    x, g = _load(x_ref.at[rows, inputs], real, wanted), _load(g_ref.at[rows, outputs], real, wanted_too)
    return total + plgpu.dot(x, g, trans_a=True)

  steps = pl.cdiv(end - start, tile.depth)
  total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
  _store(out_ref.at[group, inputs, outputs], total, wanted, wanted_too)


def _below(start: Any, size: int, end: Any) -> jax.Array | None:
  """Returns [size] bool: which numbers from `start` on are below `end`; None if that is known of all."""
  if isinstance(end, int) and end % size == 0:  # a side of the whole array
    return None
  return start + jnp.arange(size) < end


def _mask(shape: tuple[int, int], down: jax.Array | None, across: jax.Array | None) -> jax.Array | None:
  mask = None if down is None else down[:, None]
  if across is not None:
    mask = across[None] if mask is None else mask & across[None]
  return None if mask is None else jnp.broadcast_to(mask, shape)


def _load(ref: Any, down: jax.Array | None, across: jax.Array | None) -> jax.Array:
  """Reads a tile, in which rows and columns beyond those that exist are 0."""
  mask = _mask(ref.shape, down, across)
  return plgpu.load(ref, mask=mask, other=None if mask is None else 0)


def _store(ref: Any, x: jax.Array, down: jax.Array | None, across: jax.Array | None) -> None:
  plgpu.store(ref, x.astype(ref.dtype), mask=_mask(ref.shape, down, across))
