"""Safetensors files by ranges of bytes, on disks and object stores, or written.

The file begins with the length of its header (8 bytes, little endian) and the
header, JSON of name -> type, shape and where the bytes are behind it.
"""

import dataclasses
import json
import math
import mmap
import typing
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from jaxpost.errors import InputError

# Files of a model folder with all of its weights, and with which file holds which tensor.
SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
FLOATS = {'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16}
FLOAT8 = 'F8_E4M3'
_DTYPES = FLOATS | {'U8': np.uint8, FLOAT8: ml_dtypes.float8_e4m3fn}
_PIECE = 1 << 24  # bytes copied at a time
_HEADER = 100_000_000  # bytes at most, as in the library of that name


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor in a file, with the interface of `safetensors.safe_open(...).get_slice(name)`.

  Of a mapped file what is asked for is read, and is then on the host once:
  its pages are given back. Of others, whole rows are.
  """

  file: typing.BinaryIO | mmap.mmap
  dtype: str
  shape: tuple[int, ...]
  start: int  # of its bytes in the file
  where: str  # file and name, for errors
  size: int  # of its bytes

  def get_shape(self) -> list[int]:
    return list(self.shape)

  def get_dtype(self) -> str:
    return self.dtype

  def __getitem__(self, index) -> np.ndarray:
    """Rows that are read, and a part of them.

    Raises:
      InputError: the part holds NaN or infinity.
    """
    value = self._read(index)
    if not _all_finite(value):
      raise InputError(f'{self.where}: holds NaN or infinity; make or download the weights again')
    return value

  def pieces(self) -> Iterator[bytes]:
    """Yields its bytes as they are, of any type."""
    self.file.seek(self.start)
    for at in range(0, self.size, _PIECE):
      yield self.file.read(min(_PIECE, self.size - at))

  def _read(self, index) -> np.ndarray:
    rows, *rest = index if isinstance(index, tuple) else (index,)
    start, stop, _ = rows.indices(self.shape[0])
    dtype, inner = np.dtype(_DTYPES[self.dtype]), self.shape[1:]
    size = math.prod(inner) * dtype.itemsize
    begin, count = self.start + start * size, (stop - start) * size

    def part(data):
      return np.frombuffer(data, dtype).reshape(-1, *inner)[(slice(None), *rest)]

    if not isinstance(self.file, mmap.mmap):
      self.file.seek(begin)
      return part(self.file.read(count))
    # Given back here: a thread that looks at the stack (`watchdog.place`) keeps
    # what a frame holds, and a file that is still referenced cannot be closed.
    with memoryview(self.file)[begin : begin + count] as data:
      out = part(data).copy()
    page = begin - begin % mmap.PAGESIZE
    self.file.madvise(mmap.MADV_DONTNEED, page, begin + count - page)
    return out


def _all_finite(x: np.ndarray) -> bool:
  """Compares bit patterns as integers: at memory speed, where isfinite of a bfloat16 takes nine times as long."""
  if x.dtype == np.uint8 or not x.size:
    return True
  signed, unsigned = f'i{x.itemsize}', f'u{x.itemsize}'
  infinity = np.array([np.inf, -np.inf], x.dtype)
  return bool(x.view(signed).max() < infinity.view(signed)[0] and x.view(unsigned).max() < infinity.view(unsigned)[1])


def header(tensors: dict[str, tuple]) -> bytes:
  """Returns the start of a file of {name: (dtype, shape), or (type in the file, shape, bytes)}, all in this order."""
  names = {np.dtype(v): k for k, v in _DTYPES.items()}
  out: dict[str, dict[str, typing.Any]] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for key, (kind, shape, *size) in tensors.items():
    start, end = end, end + (size[0] if size else math.prod(shape) * kind.itemsize)
    out[key] = dict(dtype=kind if size else names[kind], shape=list(shape), data_offsets=[start, end])
  text = json.dumps(out, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  return len(text).to_bytes(8, 'little') + text


def tensors(file: typing.BinaryIO | mmap.mmap, size: int, path: object = 'weights') -> dict[str, Tensor]:
  """Name -> tensor of an open file; ValueError where it is none, or cut. `path` is for errors."""
  length = int.from_bytes(file.read(8), 'little')
  if not 2 <= length <= min(_HEADER, size):
    raise ValueError('it has no header of safetensors')
  try:
    header = json.loads(file.read(length))
    header.pop('__metadata__', None)
    found = {name: (x['dtype'], tuple(x['shape']), *x['data_offsets']) for name, x in header.items()}
    for kind, shape, start, end in found.values():
      if (
        any(type(number) is not int for number in (*shape, start, end))
        or not 0 <= start <= end
        or min(shape, default=0) < 0
        or kind in _DTYPES
        and (end - start != math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize)
      ):
        raise ValueError('its header is damaged')
    ends = sorted((start, end) for *_, start, end in found.values())
    if any(start != before for (start, _), (_, before) in zip(ends, [(0, 0), *ends])):
      raise ValueError('its header is damaged: tensors overlap, or leave bytes between them')
  except (AttributeError, KeyError, TypeError, RecursionError) as e:
    raise ValueError('its header is damaged') from e
  begin = 8 + length
  end = begin + max((x[3] for x in found.values()), default=0)
  if end != size:
    raise ValueError(f'its header speaks of {end} bytes and it has {size}')
  return {
    name: Tensor(file, kind, shape, begin + start, f'{path}: tensor {name}', size=stop - start)
    for name, (kind, shape, start, stop) in found.items()
  }
