"""Maps parameters to the tensors of a Hugging Face folder, and reads them piece by piece.

Matrices are stored transposed ([out, in]) and reshaped to the table's shape; the vocabulary is cut to the tokens that
there are. Where a family keeps several parameters in one tensor, they are its rows in the order of the table.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpost.distributed.mesh import axes_of
from jaxpost.distributed.transfer import relabelled
from jaxpost.formats import families
from jaxpost.models import transformer
from jaxpost.models.parameters import Param, input_dims, is_mtp

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

_AXES = {'joined': 2, 'transposed': 1}  # the dimension of a tensor in which parameters follow each other
_PIECE = 16 << 20  # bytes that are read at a time


@dataclasses.dataclass(frozen=True)
class Stored:
  """The place of a parameter: rows of tensors, one for each layer (or expert).

  names: of the tensors. shape: of each tensor. first: the first row in each, or the first entry where `order` (of
  `Family.fused`) is not ''. column: the first column of a matrix. copies: further tensors that an export has of it.
  """

  spec: Param
  names: tuple[str, ...]
  shape: tuple[int, ...]
  first: int = 0
  order: str = ''
  column: int = 0
  copies: tuple[str, ...] = ()


def table(cfg: ModelConfig, rows: dict[str, Param] | None = None) -> dict[str, Stored]:
  """Returns path -> place, for `rows` or the whole parameter table."""
  family = families.of_model(cfg.family)
  out, ends = {}, {}
  for path, spec in (rows or transformer.param_table(cfg)).items():
    inside = f'layers/{path.partition("/")[2]}'
    if 'expert' in spec.axes and inside in family.fused:
      name, order = family.fused[inside]
      spec = dataclasses.replace(spec, hf=name, matrix=False)
      *outer, last = spec.shape[spec.stack :]
      names = _names(spec.hf, spec)
      if order == 'interleaved':
        turns = [x for x, (tensor, _) in family.fused.items() if tensor == name]
        shape, first = (*outer, last * len(turns)), turns.index(inside)
      else:
        shape = (outer[0], last, outer[1]) if order == 'transposed' else (*outer, last)
        first = ends.get(names, 0)
        ends[names] = first + last
      out[path] = Stored(spec, names, shape, first, order)
      continue
    name = f'.{re.sub("^model(?=[.])", family.prefix, spec.hf)}.'
    for ours, theirs in family.names.items():
      name = name.replace(f'.{ours}.', f'.{theirs}.')
    names = _names(name.strip('.'), spec)
    if is_mtp(path):
      names = tuple(_of_predictor(name, family.predictor or {}, cfg) for name in names)
    if path in family.rows:
      out[path] = Stored(spec, names, (1, *_shape(spec, cfg)))
      continue
    shape, first = _shape(spec, cfg), ends.get(names, 0)
    ends[names] = first + shape[0]
    out[path] = Stored(spec, names, shape, first)
  return {path: dataclasses.replace(s, shape=_whole(s, ends.get(s.names))) for path, s in out.items()}


def _of_predictor(name: str, names: Mapping[str, str], cfg: ModelConfig) -> str:
  """Returns what a family calls a tensor of the layer behind the last one; `names` has the beginnings it replaces."""
  block = f'model.layers.{cfg.num_layers}.'
  rest = name.removeprefix(block)
  ours = next((ours for ours in names if rest.startswith(ours)), None)
  return name if ours is None else names[ours] + rest.removeprefix(ours)


def _whole(stored: Stored, rows: int | None) -> tuple[int, ...]:
  """Returns the shape of the tensors of a parameter, which have `rows` rows of all their parameters, if several."""
  if rows is None:
    return stored.shape
  at = _AXES.get(stored.order, 0)
  return (*stored.shape[:at], rows, *stored.shape[at + 1 :])


def _names(name: str, spec: Param) -> tuple[str, ...]:
  if not spec.stack:
    return (name,)
  return tuple(name.format(spec.number(i), *rest) for i, *rest in np.ndindex(spec.shape[: spec.stack]))


def is_predictor(name: str, cfg: ModelConfig, count: int) -> bool:
  """True for tensors of modules that predict several tokens at once: the `count` layers after the last, or 'mtp'."""
  family = families.of_model(cfg.family)
  if family.hybrid and name.startswith('mtp.'):
    return True
  found = family.extra_layers and re.match(r'model\.layers\.(\d+)\.', name)
  behind = bool(found) and 0 <= int(found[1]) - cfg.num_layers < count
  return behind or family.extra_layers and bool(count) and name.startswith('model.mtp_')


def groups(table: dict[str, Stored]) -> list[dict[str, Stored]]:
  """Groups the rows of a table that share tensors."""
  out = {}
  for path, stored in table.items():
    out.setdefault(stored.names[0], {})[path] = stored
  return list(out.values())


def _shape(spec: Param, cfg: ModelConfig) -> tuple[int, ...]:
  """Returns the shape that one tensor of a parameter has in the folder."""
  shape = spec.shape[spec.stack :]
  if spec.axes[0] == 'vocab':
    return (cfg.vocab_size, *shape[1:])
  if not spec.matrix:
    return shape
  cut = input_dims(spec)
  return math.prod(shape[cut:]), math.prod(shape[:cut])


def _row(spec: Param) -> int:
  """Returns the dimension of a parameter along which a tensor has its rows."""
  return spec.stack + (input_dims(spec) if spec.matrix else 0)


def _by_rows(spec: Param, to: NamedSharding) -> tuple[NamedSharding, tuple]:
  """Splits the reading of a parameter between the devices that need it.

  Axes of the mesh that split columns, and those of replicas, split rows: no
  byte is asked for twice, and whole rows are.

  Returns:
    The sharding, and the moves that undo it (`transfer.write`).
  """
  row, parts = _row(spec), [axes_of(part) for part in to.spec]
  parts += [()] * (len(spec.shape) - len(parts))
  moves = [(i, axes) for i, axes in enumerate(parts) if axes and i >= spec.stack and i != row]
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
  return dataclasses.replace(spec, shape=shape, axes=spec.axes[: row + 1]), NamedSharding(
    to.mesh, PartitionSpec(*parts[: row + 1])
  )


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
  for at in np.ndindex(*(n // s for n, s in zip(local, size))):
    at = np.multiply(at, size)
    at[row] *= split
    piece = _place(stored, tensors, sharding, size, split, dtype=dtype, at=at)
    start = np.zeros(len(whole), np.int32)
    start[: row + 1] = *at[:row], at[row] // head
    jax.block_until_ready(out)  # at most two pieces are in memory, however slow the device is
    out = write(out, piece, start, to, whole, rows=sharding, row=row, moves=moves)
  return relabelled(out, to)


def _place(
  stored: Stored,
  tensors: dict[str, Any],
  sharding: NamedSharding,
  size: Sequence[int],
  split: int,
  dtype: Any,
  at: Sequence[int],
) -> jax.Array:
  """Reads the piece that begins at `at` in each shard, `size` of it on each device.

  split: the number of devices that read a piece of a shard's rows together, a part each.
  """
  shape, row, holders = stored.spec.shape, _row(stored.spec), {}
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
  return jax.make_array_from_single_device_arrays(
    tuple(n // m * s for n, m, s in zip(shape, local, size)), sharding, arrays, dtype=dtype
  )


def _read(stored: Stored, tensor: Any, shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> np.ndarray:
  """Reads the elements `bounds` of one stored tensor, in the table's shape."""
  if len(stored.shape) > len(shape):  # a matrix of one row
    return tensor[(slice(0, 1), *(slice(*x) for x in bounds))][0]
  if not stored.spec.matrix:
    (start, end), *rest = bounds
    end = min(end, tensor.get_shape()[0])
    if start >= end:  # only padding; safetensors refuses empty slices
      return np.zeros((0, *(b - a for a, b in rest)))
    if stored.order in _AXES:
      inputs, (low, high) = rest
      rows = slice(stored.first + low, stored.first + high)
      if stored.order == 'joined':
        return tensor[(slice(start, end), slice(*inputs), rows)]
      return tensor[(slice(start, end), rows, slice(*inputs))].swapaxes(1, 2)
    if stored.order == 'interleaved':
      turns = stored.shape[-1] // stored.spec.shape[-1]
      rest[-1] = tuple(turns * x for x in rest[-1])
      return tensor[(slice(start, end), *(slice(*x) for x in rest))][..., stored.first :: turns]
    rows = slice(stored.first + start, stored.first + end)
    return tensor[(rows, *(slice(*x) for x in rest))]
  cut = input_dims(stored.spec)
  sides = [(shape[:cut], bounds[:cut], stored.column), (shape[cut:], bounds[cut:], stored.first)]
  # A side of several dimensions is read whole below its first one.
  ranges = [slice(first + b[0][0] * math.prod(s[1:]), first + b[0][1] * math.prod(s[1:])) for s, b, first in sides]
  value = tensor[ranges[1], ranges[0]].T
  value = value.reshape([n for s, b, _ in sides for n in (b[0][1] - b[0][0], *s[1:])])
  inner = [(slice(None), *(slice(*x) for x in b[1:])) for _, b, _ in sides]
  return value[(*inner[0], *inner[1])]


def rows(stored: Stored, value: np.ndarray) -> np.ndarray:
  """Returns an entry of a parameter as it is stored: its rows of the tensor."""
  if stored.spec.matrix:
    size = math.prod(value.shape[: input_dims(stored.spec)])
    value = value.reshape(size, -1).T
    others = stored.shape[1] - size  # columns of other parameters
    return np.pad(value, ((0, 0), (stored.column, others - stored.column))) if others else value
  if stored.order == 'transposed':
    return value.swapaxes(1, 2)
  return value[None] if len(stored.shape) > value.ndim else value[: stored.shape[0]]


def together(stored: Stored, parts: list[np.ndarray]) -> np.ndarray:
  """Joins the `rows` of all parameters in a tensor."""
  if stored.order == 'interleaved':
    return np.stack(parts, axis=-1).reshape(stored.shape)
  return np.concatenate(parts, axis=_AXES.get(stored.order, 0)) if len(parts) > 1 else parts[0]
