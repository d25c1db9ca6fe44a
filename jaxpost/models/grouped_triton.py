"""Products of groups of rows with a matrix for each group on NVIDIA GPUs, in Pallas for Triton.

One kernel multiplies all groups. Each of its programs computes a tile of the result: some rows of one group, and some
columns. Which rows these are depends on the sizes of the groups, which only the device knows, so there are as many
programs as any sizes may need, and those without rows end at once.

The callers run on one device or inside a `jax.shard_map` over all axes of the mesh (`models/moe.py`), so that a kernel
never sees arrays that XLA would have to partition.

Legend: N rows, E groups, D inputs, F outputs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_BAND = 8  # tiles of rows in a band, see `_Places`


class _Tile(NamedTuple):
  """Sides of a tile, the number of terms (`depth`) of its sums that a step adds, and settings of Triton."""

  rows: int
  columns: int
  depth: int
  warps: int
  stages: int = 3


class _Places(NamedTuple):
  """The numbers of tiles along both sides, and the order in which programs compute them.

  Programs compute a band of `_BAND` tiles of rows for all columns before the next band, so that those which run at the
  same time read the same data.
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
    x: [N, D], bfloat16 or float16: the rows of group 0, then of group 1, ...; further rows are not read.
    w: [E, D, F] of the same type.
    sizes: [E] int32, rows of each group.
    transposed: w is [E, F, D]; it is not copied.
    out: type of the result; sums are in float32.
    interpret: run it on the CPU, for tests.

  Returns:
    [N, F]; rows that belong to no group are 0.
  """
  (count, inner), groups = x.shape, len(sizes)
  width = w.shape[1 if transposed else 2]
  tile = _tile(count // groups, width, inner)
  # Rows that belong to no group form one more group, for which zeros are written and nothing is computed.
  row_tiles = _row_tiles(jnp.append(sizes, count - jnp.sum(sizes)), count, tile.rows)
  places = _Places(row_tiles.shape[1], pl.cdiv(width, tile.columns))
  return pl.pallas_call(
    functools.partial(_rows_kernel, tile=tile, places=places, sides=(inner, width), transposed=transposed),
    grid=(places.rows * places.columns,),
    out_shape=jax.ShapeDtypeStruct((count, width), out),
    compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    interpret=interpret,
    name=f'grouped_rows{"_transposed" * transposed}',
  )(x, w, row_tiles)


def groups_of_rows(
  x: jax.Array, g: jax.Array, sizes: jax.Array, *, out: str = 'float32', interpret: bool = False
) -> jax.Array:
  """Computes x^T g for the rows of each group: the gradient of its matrix.

  Args:
    x: [N, D], bfloat16 or float16, sorted as for `rows_by_groups`.
    g: [N, F] of the same type.
    sizes, out, interpret: as in `rows_by_groups`.

  Returns:
    [E, D, F], zeros for groups without rows.
  """
  (_, inputs), outputs = x.shape, g.shape[1]
  tile = _Tile(_side(128, inputs), _side(128, outputs), 64, warps=8 if min(inputs, outputs) > 64 else 4)
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
  """Returns the tile of `rows_by_groups` for groups of `rows` rows on average; small groups need small tiles."""
  columns, depth = _side(128, width), _side(64, inner)
  if rows >= 192:
    return _Tile(128, columns, depth, warps=8)
  return _Tile(64 if rows >= 48 else 16, columns, depth, warps=4)


def _side(limit: int, size: int) -> int:
  return min(limit, pl.next_power_of_2(max(size, 16)))  # 16: the smallest side of a matrix product


def _row_tiles(sizes: jax.Array, count: int, block: int) -> jax.Array:
  """Returns (group, first row, end of the group) of each tile of `block` rows, [3, tiles]; the last ones are empty."""
  num_tiles, ends = -(-sizes // block), jnp.cumsum(sizes)
  tile_ends = jnp.cumsum(num_tiles)
  i = jnp.arange(count // block + len(sizes))
  group = jnp.minimum(jnp.sum(i[:, None] >= tile_ends, axis=1), len(sizes) - 1)
  start = (ends - sizes)[group] + block * (i - (tile_ends - num_tiles)[group])
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
  # The next group may begin in the same tile of the array; another program computes its rows.
  row_mask, column_mask = _below(start, tile.rows, end), _below(column * tile.columns, tile.columns, width)

  def step(j, total):
    terms, term_mask = pl.ds(j * tile.depth, tile.depth), _below(j * tile.depth, tile.depth, inner)
    x = _load(x_ref.at[rows, terms], row_mask, term_mask)
    if transposed:
      w = _load(w_ref.at[group, columns, terms], column_mask, term_mask)
    else:
      w = _load(w_ref.at[group, terms, columns], term_mask, column_mask)
    return total + plgpu.dot(x, w, trans_b=transposed)

  computed = (start < end) & (group < w_ref.shape[0])
  steps = computed.astype(jnp.int32) * pl.cdiv(inner, tile.depth)
  total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
  _store(out_ref.at[rows, columns], total, row_mask, column_mask)


def _groups_kernel(x_ref, g_ref, bounds_ref, out_ref, *, tile: _Tile, places: _Places):
  """Computes a tile of the gradient of a group's matrix."""
  group = pl.program_id(1)
  start, end = bounds_ref[0, group], bounds_ref[1, group]
  down, across = places.of(pl.program_id(0))
  inputs, outputs = pl.ds(down * tile.rows, tile.rows), pl.ds(across * tile.columns, tile.columns)
  input_mask = _below(down * tile.rows, tile.rows, x_ref.shape[1])
  output_mask = _below(across * tile.columns, tile.columns, g_ref.shape[1])

  def step(j, total):
    first = start + j * tile.depth
    rows, row_mask = pl.ds(first, tile.depth), _below(first, tile.depth, end)
    x, g = _load(x_ref.at[rows, inputs], row_mask, input_mask), _load(g_ref.at[rows, outputs], row_mask, output_mask)
    return total + plgpu.dot(x, g, trans_a=True)

  steps = pl.cdiv(end - start, tile.depth)
  total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
  _store(out_ref.at[group, inputs, outputs], total, input_mask, output_mask)


def _below(start: Any, size: int, end: Any) -> jax.Array | None:
  """Returns [size] bool: which of the numbers from `start` on are below `end`; None if all are known to be."""
  if isinstance(end, int) and end % size == 0:  # a side of the whole array
    return None
  return start + jnp.arange(size) < end


def _mask(shape: tuple[int, int], down: jax.Array | None, across: jax.Array | None) -> jax.Array | None:
  mask = None if down is None else down[:, None]
  if across is not None:
    mask = across[None] if mask is None else mask & across[None]
  return None if mask is None else jnp.broadcast_to(mask, shape)


def _load(ref: Any, down: jax.Array | None, across: jax.Array | None) -> jax.Array:
  """Reads a tile; rows and columns that the masks exclude are 0."""
  mask = _mask(ref.shape, down, across)
  return plgpu.load(ref, mask=mask, other=None if mask is None else 0)


def _store(ref: Any, x: jax.Array, down: jax.Array | None, across: jax.Array | None) -> None:
  plgpu.store(ref, x.astype(ref.dtype), mask=_mask(ref.shape, down, across))
