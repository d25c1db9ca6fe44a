"""Reads parameters from the tensors of a Hugging Face folder, a piece at a time.

`tensor_layout` knows which rows of which tensors a parameter is.
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
from jaxpost.models.parameters import input_dims

if TYPE_CHECKING:
  from jaxpost.formats.tensor_layout import Stored
  from jaxpost.models.parameters import Param

_PIECE = 16 << 20  # bytes that are read at a time


def _row(spec: Param) -> int:
  """Returns the dimension of a parameter along which a tensor has its rows."""
  return spec.stack + (input_dims(spec) if spec.matrix else 0)


def _by_rows(spec: Param, to: NamedSharding) -> tuple[NamedSharding, tuple]:
  """Splits the reading of a parameter between the devices that need it.

  Axes of the mesh that split columns, and those of replicas, split rows: no
  byte is asked for twice, and whole rows are.

  Returns:
    The sharding, and the moves that undo it (`write`).
  """
  row, parts = _row(spec), [axes_of(part) for part in to.spec]
  parts += [()] * (len(spec.shape) - len(parts))
  moves: list[tuple] = [(i, axes) for i, axes in enumerate(parts) if axes and i >= spec.stack and i != row]
  used = {a for axes in parts for a in axes}
  moves += [(None, (a,)) for a in to.mesh.shape if a not in used]
  rows, out = to.shard_shape(spec.shape)[row], []
  for i, axes in moves:
    size = math.prod(to.mesh.shape[a] for a in axes)
    if size == 1 or rows % size:
      continue
    rows //= size
    parts[row] += axes
    if i is not None:
      parts[i] = ()
    out.append((i, axes))
  return NamedSharding(to.mesh, PartitionSpec(*(part or None for part in parts))), tuple(out)


def _flat(spec: Param, to: NamedSharding) -> tuple[Param, NamedSharding]:
  """Flattens the outputs of a matrix to one dimension, as it is stored.

  Then the rows of a head can be split, too.
  """
  row, parts = _row(spec), [*to.spec, *[None] * len(spec.shape)]
  if not spec.matrix or any(parts[row + 1 :]):
    return spec, to
  shape = *spec.shape[:row], math.prod(spec.shape[row:])
  flat = dataclasses.replace(spec, shape=shape, axes=spec.axes[: row + 1])
  return flat, NamedSharding(to.mesh, PartitionSpec(*parts[: row + 1]))


def _piece(spec: Param, shape: Sequence[int], limit: int, unit: int = 1) -> tuple[int, ...]:
  """Returns the shape of the pieces in which a shard of `shape` is read.

  Several layers (or experts), or some rows of one, a multiple of `unit`; at most `limit`
  elements, if one unit has no more. The shard is a whole number of pieces.
  """
  shape = list(shape)
  for i, step in *((i, 1) for i in range(spec.stack)), (_row(spec), unit):
    fits = limit // math.prod(shape[:i] + shape[i + 1 :])
    shape[i] = next(n for n in range(min(max(fits, step), shape[i]), 0, -1) if shape[i] % n == 0 == n % step)
  return tuple(shape)


def read(stored: Stored, tensors: dict[str, Any], bounds: Sequence[tuple[int, int]], dtype: Any) -> np.ndarray:
  """Reads the elements `bounds` = ((start, end), ...) of a parameter.

  Args:
    tensors: name -> open slice of a safetensors file.
  """
  spec = stored.spec
  out = np.empty([end - start for start, end in bounds], dtype)
  if not spec.stack:
    value = _read(stored, tensors[stored.names[0]], spec.shape, bounds)
    out[: len(value)] = value
    out[len(value) :] = 0  # padding beyond the vocabulary
    return out
  kept, n = spec.shape[: spec.stack], spec.stack
  for at in np.ndindex(out.shape[:n]):
    number = np.ravel_multi_index([start + i for (start, _), i in zip(bounds, at)], kept)
    out[at] = _read(stored, tensors[stored.names[number]], spec.shape[n:], bounds[n:])
  return out


def load(stored: Stored, tensors: dict[str, Any], to: NamedSharding, dtype: np.dtype, write: Callable) -> jax.Array:
  """Loads a parameter with one piece of it on the host at a time.

  A parameter larger than a piece is read by all devices together, a part each, and they
  exchange the parts: a collective.

  Args:
    tensors: name -> open slice of a safetensors file.
    write: see `hf.load_params`.
  """
  whole = stored.spec.shape
  if not to.addressable_devices_indices_map(whole):  # others have some of it
    return jax.make_array_from_single_device_arrays(whole, to, [], dtype=dtype)
  if math.prod(whole) * dtype.itemsize <= _PIECE:
    return _place(stored, tensors, to, to.shard_shape(whole), 1, dtype=dtype, at=[0] * len(whole))
  spec, goal = _flat(stored.spec, to)
  stored, row = dataclasses.replace(stored, spec=spec), _row(spec)
  sharding, moves = _by_rows(spec, goal)
  local = sharding.shard_shape(spec.shape)
  split = goal.shard_shape(spec.shape)[row] // local[row]
  # A device gathers a piece with its copies; its rows are whole heads.
  copies = math.prod(to.mesh.shape[a] for dimension, axes in moves for a in axes if dimension is None)
  head = 1 if spec.shape == whole else math.prod(whole[row + 1 :])
  size = _piece(spec, local, _PIECE // dtype.itemsize // copies, head // math.gcd(head, split))
  out = None
  for number in np.ndindex(*(n // s for n, s in zip(local, size))):
    at = np.multiply(number, size)
    at[row] *= split
    piece = _place(stored, tensors, sharding, size, split, dtype=dtype, at=at)
    start = np.zeros(len(whole), np.int32)
    start[: row + 1] = *at[:row], at[row] // head
    jax.block_until_ready(out)  # at most two pieces are in memory, however slow the device is
    out = write(out, piece, start, to, whole, rows=sharding, row=row, moves=moves)
  return relabelled(out, to)


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
  """`x` with `piece` written at offset `at` of each shard; an `x` of None is zeros of `shape`.

  Args:
    piece: sharded by `rows`; its dimensions from `row` on may be flattened to one.
    at: [dimensions] int32, the offset inside a shard.
    moves: ((dimension or None, axes), ...): mesh axes that split dimension
      `row` of pieces, and in `x` split `dimension`, or nothing.
  """

  # Bits are moved, since XLA:CPU would convert all of a bfloat16 x to float32.
  def bits(x, to):
    return x if x.dtype.itemsize != 2 else (jax.lax.bitcast_convert_type(x, to))

  def local(x, piece, at):
    if x is None:
      x = jnp.zeros(sharding.shard_shape(shape), piece.dtype)
    dtype, piece = piece.dtype, bits(piece, jnp.uint16)
    for dimension, axes in reversed(moves):
      if dimension is None:
        piece = jax.lax.all_gather(piece, axes, axis=row, tiled=True)
      else:
        piece = jax.lax.all_to_all(piece, axes, dimension, row, tiled=True)
    piece = piece.reshape(*piece.shape[:row], -1, *shape[row + 1 :]) if (piece.ndim < len(shape)) else piece
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
  at: Sequence[int] | np.ndarray,
) -> jax.Array:
  """Reads the piece that begins at `at` in each shard, `size` of it on each device.

  split: the number of devices that read a piece of a shard's rows together, a part each.
  """
  shape, row = stored.spec.shape, _row(stored.spec)
  holders: dict[tuple[int, ...], list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    starts = tuple(s.indices(n)[0] for s, n in zip(index, shape))
    holders.setdefault(starts, []).append(device)  # replicas are read once
  local, arrays = sharding.shard_shape(shape), []
  for starts, devices in holders.items():
    begin = np.add(starts, at)
    # The devices split the piece, and not the shard: theirs are side by side.
    begin[row] += starts[row] // local[row] % split * (size[row] - local[row])
    part = read(stored, tensors, list(zip(begin, begin + size)), dtype)
    arrays += [jax.device_put(part, device) for device in devices]
    jax.block_until_ready(arrays)  # the host keeps one, not all
  whole = tuple(n // m * s for n, m, s in zip(shape, local, size))
  return jax.make_array_from_single_device_arrays(whole, sharding, arrays, dtype=dtype)


def _read(stored: Stored, tensor: Any, shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> np.ndarray:
  """Reads the elements `bounds` of one stored tensor, in the table's shape."""
  if len(stored.shape) > len(shape):  # with a first dimension of 1
    return tensor[(slice(0, 1), *_slices(bounds))][0]
  if stored.spec.matrix:
    return _read_matrix(stored, tensor, shape, bounds)
  (start, end), *rest = bounds
  end = min(end, tensor.get_shape()[0])
  if start >= end:  # only padding beyond the vocabulary; safetensors refuses empty slices
    return np.zeros((0, *(high - low for low, high in rest)))
  if stored.order:
    return _read_fused(stored, tensor, slice(start, end), rest)
  return tensor[(slice(stored.first + start, stored.first + end), *_slices(rest))]


def _read_matrix(stored: Stored, tensor: Any, shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> np.ndarray:
  """Reads a part of a matrix, which is stored as [outputs, inputs], each side flattened to one dimension.

  Of a side of several dimensions, such as heads and head size, whole entries of the first are read, and cut afterwards.
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


def _read_fused(stored: Stored, tensor: Any, first: slice, rest: Sequence[tuple[int, int]]) -> np.ndarray:
  """Reads a part of a parameter that shares a tensor of experts with others; `stored.order` says how.

  Args:
    first: entries of the first dimension. rest: bounds of the other dimensions.
  """
  if stored.order == 'interleaved':
    *outer, (low, high) = rest
    step = stored.shape[-1] // stored.spec.shape[-1]
    # Every `step`-th output is of this parameter.
    return tensor[(first, *_slices(outer), slice(step * low, step * high))][..., stored.first :: step]
  inputs, (low, high) = rest
  outputs = slice(stored.first + low, stored.first + high)
  if stored.order == 'joined':
    return tensor[first, slice(*inputs), outputs]
  return tensor[first, outputs, slice(*inputs)].swapaxes(1, 2)  # 'transposed'


def _slices(bounds: Sequence[tuple[int, int]]) -> list[slice]:
  return [slice(*pair) for pair in bounds]
