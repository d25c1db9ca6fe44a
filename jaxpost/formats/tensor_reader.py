"""Reads parameters from the tensors of a Hugging Face folder, a piece at a time.

`tensor_layout` maps each parameter to rows of tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpost.distributed.mesh import axes_of
from jaxpost.distributed.transfer import relabelled
from jaxpost.models.parameters import Param, input_dims

if TYPE_CHECKING:
  from jaxpost.formats.tensor_layout import Stored

_PIECE = 16 << 20  # bytes that are read at a time


def _row_axis(spec: Param) -> int:
  """Returns the axis of a parameter along which the rows of its tensors lie."""
  return spec.stack + (input_dims(spec) if spec.matrix else 0)


def _by_rows(spec: Param, to: NamedSharding) -> tuple[NamedSharding, tuple]:
  """Returns the sharding with which a parameter is read, and the moves that lead from it to `to` (see `write`).

  Mesh axes that split columns, and those of replicas, split rows instead: each device reads whole rows, and no byte is
  read twice.
  """
  row_axis, parts = _row_axis(spec), [axes_of(part) for part in to.spec]
  parts += [()] * (len(spec.shape) - len(parts))
  moves: list[tuple] = [(i, axes) for i, axes in enumerate(parts) if axes and i >= spec.stack and i != row_axis]
  used = {name for axes in parts for name in axes}
  moves += [(None, (name,)) for name in to.mesh.shape if name not in used]
  local_rows, out = to.shard_shape(spec.shape)[row_axis], []
  for axis, axes in moves:
    devices = math.prod(to.mesh.shape[name] for name in axes)
    if devices == 1 or local_rows % devices:
      continue
    local_rows //= devices
    parts[row_axis] += axes
    if axis is not None:
      parts[axis] = ()
    out.append((axis, axes))
  return NamedSharding(to.mesh, PartitionSpec(*(part or None for part in parts))), tuple(out)


def _flat(spec: Param, to: NamedSharding) -> tuple[Param, NamedSharding]:
  """Flattens the outputs of a matrix to one dimension, as it is stored.

  Then the rows of a head can be split between devices as well.
  """
  row_axis, parts = _row_axis(spec), [*to.spec, *[None] * len(spec.shape)]
  if not spec.matrix or any(parts[row_axis + 1 :]):
    return spec, to
  shape = *spec.shape[:row_axis], math.prod(spec.shape[row_axis:])
  flat = dataclasses.replace(spec, shape=shape, axes=spec.axes[: row_axis + 1])
  return flat, NamedSharding(to.mesh, PartitionSpec(*parts[: row_axis + 1]))


def _piece_shape(spec: Param, shape: Sequence[int], limit: int, unit: int = 1) -> tuple[int, ...]:
  """Returns the shape of the pieces in which a shard of `shape` is read.

  A piece is several layers (or experts), or some rows of one, a multiple of `unit`. It has at most `limit` elements,
  unless one unit has more, and divides the shard evenly.
  """
  shape = list(shape)
  for axis, multiple in [*((i, 1) for i in range(spec.stack)), (_row_axis(spec), unit)]:
    fits = limit // math.prod(shape[:axis] + shape[axis + 1 :])
    largest = min(max(fits, multiple), shape[axis])
    shape[axis] = next(n for n in range(largest, 0, -1) if shape[axis] % n == 0 == n % multiple)
  return tuple(shape)


def read(stored: Stored, tensors: dict[str, Any], bounds: Sequence[tuple[int, int]], dtype: Any) -> np.ndarray:
  """Reads the elements `bounds` = ((start, end), ...) of a parameter from `tensors`, {name: open tensor}."""
  shape, stack = stored.spec.shape, stored.spec.stack
  out = np.zeros([end - start for start, end in bounds], dtype)  # padding beyond the vocabulary stays 0
  for entry in np.ndindex(out.shape[:stack]):  # without a stack, the only entry is ()
    index = np.ravel_multi_index([start + i for (start, _), i in zip(bounds, entry)], shape[:stack]) if stack else 0
    value = _read(stored, tensors[stored.names[index]], shape[stack:], bounds[stack:])
    out[entry][: len(value)] = value
  return out


def load(stored: Stored, tensors: dict[str, Any], to: NamedSharding, dtype: np.dtype, write: Callable) -> jax.Array:
  """Loads a parameter with one piece of it on the host at a time.

  Of a parameter larger than a piece, each device reads a part, and the devices exchange the parts: a collective.

  `write`: see `hf.load_params`.
  """
  full_shape = stored.spec.shape
  if not to.addressable_devices_indices_map(full_shape):  # it is on devices of other processes only
    return jax.make_array_from_single_device_arrays(full_shape, to, [], dtype=dtype)
  if math.prod(full_shape) * dtype.itemsize <= _PIECE:
    return _place(stored, tensors, to, to.shard_shape(full_shape), 1, dtype=dtype, offset=[0] * len(full_shape))
  spec, target = _flat(stored.spec, to)
  stored, row_axis = dataclasses.replace(stored, spec=spec), _row_axis(spec)
  sharding, moves = _by_rows(spec, target)
  local = sharding.shard_shape(spec.shape)
  split = target.shard_shape(spec.shape)[row_axis] // local[row_axis]
  # Gathering over replicas makes a piece `copies` times as large; its rows are whole heads.
  copies = math.prod(to.mesh.shape[a] for dimension, axes in moves for a in axes if dimension is None)
  head_rows = 1 if spec.shape == full_shape else math.prod(full_shape[row_axis + 1 :])
  piece_shape = _piece_shape(spec, local, _PIECE // dtype.itemsize // copies, head_rows // math.gcd(head_rows, split))
  loaded = None
  for piece_index in np.ndindex(*(n // s for n, s in zip(local, piece_shape))):
    offset = np.multiply(piece_index, piece_shape)
    offset[row_axis] *= split
    piece = _place(stored, tensors, sharding, piece_shape, split, dtype=dtype, offset=offset)
    start = np.zeros(len(full_shape), np.int32)
    start[: row_axis + 1] = *offset[:row_axis], offset[row_axis] // head_rows
    jax.block_until_ready(loaded)  # at most two pieces are in memory, however slow the device is
    loaded = write(loaded, piece, start, to, full_shape, rows=sharding, row=row_axis, moves=moves)
  return relabelled(loaded, to)


def write(
  x: jax.Array | None,
  piece: jax.Array,
  at: jax.Array,
  sharding: NamedSharding,
  shape: tuple[int, ...],
  rows: NamedSharding,
  row: int,
  moves: tuple,
) -> jax.Array:
  """Returns `x` with `piece` written at offset `at` of each shard; an `x` of None stands for zeros of `shape`.

  Args:
    piece: sharded by `rows`; its dimensions from `row` on may be flattened to one.
    at: [dimensions] int32, the offset inside a shard.
    moves: ((dimension or None, mesh axes), ...): axes that split dimension `row` of a piece, but in `x` split
      `dimension`, or nothing if it is None.
  """

  # Moved as integers, because XLA:CPU would convert a whole bfloat16 x to float32.
  def bits(x, to):
    return x if x.dtype.itemsize != 2 else jax.lax.bitcast_convert_type(x, to)

  def local(x, piece, at):
    if x is None:
      x = jnp.zeros(sharding.shard_shape(shape), piece.dtype)
    dtype, piece = piece.dtype, bits(piece, jnp.uint16)
    for dimension, axes in reversed(moves):
      if dimension is None:
        piece = jax.lax.all_gather(piece, axes, axis=row, tiled=True)
      else:
        piece = jax.lax.all_to_all(piece, axes, dimension, row, tiled=True)
    if piece.ndim < len(shape):
      piece = piece.reshape(*piece.shape[:row], -1, *shape[row + 1 :])
    return bits(jax.lax.dynamic_update_slice(bits(x, jnp.uint16), piece, list(at)), dtype)

  spec = sharding.spec
  return jax.shard_map(
    local, mesh=sharding.mesh, out_specs=spec, check_vma=False, in_specs=(spec, rows.spec, PartitionSpec())
  )(x, piece, at)


def _place(
  stored: Stored,
  tensors: dict[str, Any],
  sharding: NamedSharding,
  size: Sequence[int],
  split: int,
  dtype: Any,
  offset: Sequence[int] | np.ndarray,
) -> jax.Array:
  """Reads the piece that begins at `offset` in each shard; a device gets an array of shape `size`.

  split: number of devices that each read a part of the rows of a piece.
  """
  shape, row_axis = stored.spec.shape, _row_axis(stored.spec)
  holders: dict[tuple[int, ...], list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    starts = tuple(s.indices(n)[0] for s, n in zip(index, shape))
    holders.setdefault(starts, []).append(device)  # replicas are read once
  local, arrays = sharding.shard_shape(shape), []
  for starts, devices in holders.items():
    begin = np.add(starts, offset)
    # The devices split the rows of a piece, not those of the shard: their parts are adjacent.
    begin[row_axis] += starts[row_axis] // local[row_axis] % split * (size[row_axis] - local[row_axis])
    part = read(stored, tensors, list(zip(begin, begin + size)), dtype)
    arrays += [jax.device_put(part, device) for device in devices]
    jax.block_until_ready(arrays)  # the host holds one part, not all
  whole = tuple(n // m * s for n, m, s in zip(shape, local, size))
  return jax.make_array_from_single_device_arrays(whole, sharding, arrays, dtype=dtype)


def _read(stored: Stored, tensor: Any, shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> np.ndarray:
  """Reads the elements `bounds` of one stored tensor, in the shape of the parameter without its stack axes."""
  if len(stored.shape) > len(shape):  # with a first dimension of 1
    return tensor[(slice(0, 1), *_slices(bounds))][0]
  if stored.spec.matrix:
    return _read_matrix(stored, tensor, shape, bounds)
  (start, end), *inner_bounds = bounds
  end = min(end, tensor.shape[0])
  if start >= end:  # only padding beyond the vocabulary; safetensors refuses empty slices
    return np.zeros((0, *(upper - lower for lower, upper in inner_bounds)))
  if stored.order:
    return _read_fused(stored, tensor, slice(start, end), inner_bounds)
  return tensor[(slice(stored.first + start, stored.first + end), *_slices(inner_bounds))]


def _read_matrix(stored: Stored, tensor: Any, shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> np.ndarray:
  """Reads a part of a matrix, which is stored as [outputs, inputs], each side flattened to one dimension.

  If a side has several dimensions, such as heads and head size, whole entries of the first are read and cut afterwards.
  """
  cut = input_dims(stored.spec)  # the first dimension of the outputs
  (in_start, in_end), (out_start, out_end) = bounds[0], bounds[cut]
  in_size, out_size = math.prod(shape[1:cut]), math.prod(shape[cut + 1 :])
  columns = slice(stored.column + in_start * in_size, stored.column + in_end * in_size)
  rows = slice(stored.first + out_start * out_size, stored.first + out_end * out_size)
  value = tensor[rows, columns].T  # [inputs, outputs]
  value = value.reshape(in_end - in_start, *shape[1:cut], out_end - out_start, *shape[cut + 1 :])
  parts = _slices(bounds)
  parts[0] = parts[cut] = slice(None)  # as it was read
  return value[tuple(parts)]


def _read_fused(stored: Stored, tensor: Any, first: slice, inner_bounds: Sequence[tuple[int, int]]) -> np.ndarray:
  """Reads a part of a parameter that shares a tensor of experts with others, in the order `stored.order`.

  Args:
    first: entries of the first dimension. inner_bounds: of the other dimensions.
  """
  if stored.order == 'interleaved':
    *outer, (start, end) = inner_bounds
    step = stored.shape[-1] // stored.spec.shape[-1]
    # Every `step`-th output is of this parameter.
    return tensor[(first, *_slices(outer), slice(step * start, step * end))][..., stored.first :: step]
  inputs, (start, end) = inner_bounds
  outputs = slice(stored.first + start, stored.first + end)
  if stored.order == 'joined':
    return tensor[first, slice(*inputs), outputs]
  return tensor[first, outputs, slice(*inputs)].swapaxes(1, 2)  # 'transposed'


def _slices(bounds: Sequence[tuple[int, int]]) -> list[slice]:
  return [slice(*pair) for pair in bounds]
