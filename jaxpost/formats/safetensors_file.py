"""Reads safetensors files by byte ranges, on disks and object stores, and writes their headers.

A file begins with the length of its header (8 bytes, little endian) and the header: JSON of name -> type, shape and
byte range after the header.
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

# Files of a model folder: all of its weights, and an index of which file holds which tensor.
SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
FLOATS = {'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16}
FLOAT8 = 'F8_E4M3'
_DTYPES = FLOATS | {'U8': np.uint8, FLOAT8: ml_dtypes.float8_e4m3fn}
_PIECE = 1 << 24  # bytes copied at a time
_HEADER = 100_000_000  # bytes at most, as in the library of that name


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor in a file, parts of which are read by indexing.

  Of a memory-mapped file, only the indexed part is copied, and its pages are released. Of other files, whole rows are
  read.
  """

  file: typing.BinaryIO | mmap.mmap
  dtype: str  # as the file names it, such as 'BF16'
  shape: tuple[int, ...]
  start: int  # first byte in the file
  where: str  # file and name, for errors
  size: int  # in bytes

  def __getitem__(self, index) -> np.ndarray:
    """Returns the indexed part of the tensor; InputError if it holds NaN or infinity."""
    value = self._read(index)
    if not _all_finite(value):
      raise InputError(f'{self.where}: holds NaN or infinity; make or download the weights again')
    return value

  def pieces(self) -> Iterator[bytes]:
    """Yields the stored bytes, for any type."""
    self.file.seek(self.start)
    for offset in range(0, self.size, _PIECE):
      yield self.file.read(min(_PIECE, self.size - offset))

  def _read(self, index) -> np.ndarray:
    rows, *inner_index = index if isinstance(index, tuple) else (index,)
    start, stop, _ = rows.indices(self.shape[0])
    dtype, inner = np.dtype(_DTYPES[self.dtype]), self.shape[1:]
    row_bytes = math.prod(inner) * dtype.itemsize
    first_byte, num_bytes = self.start + start * row_bytes, (stop - start) * row_bytes

    def part(data):
      return np.frombuffer(data, dtype).reshape(-1, *inner)[(slice(None), *inner_index)]

    if not isinstance(self.file, mmap.mmap):
      self.file.seek(first_byte)
      return part(self.file.read(num_bytes))
    # Released here, because a thread that inspects the stack (`watchdog.place`) keeps the objects of a frame alive,
    # and a mapping that is still referenced cannot be closed.
    with memoryview(self.file)[first_byte : first_byte + num_bytes] as data:
      out = part(data).copy()
    first_page = first_byte - first_byte % mmap.PAGESIZE
    self.file.madvise(mmap.MADV_DONTNEED, first_page, first_byte + num_bytes - first_page)
    return out


def _all_finite(x: np.ndarray) -> bool:
  """Compares bit patterns as integers, which is nine times as fast as np.isfinite of bfloat16."""
  if x.dtype == np.uint8 or not x.size:
    return True
  signed, unsigned = f'i{x.itemsize}', f'u{x.itemsize}'
  infinity = np.array([np.inf, -np.inf], x.dtype)
  return bool(x.view(signed).max() < infinity.view(signed)[0] and x.view(unsigned).max() < infinity.view(unsigned)[1])


def header(tensors: dict[str, tuple]) -> bytes:
  """Returns the header of a file of {name: (dtype, shape) or (type in the file, shape, bytes)}, in this order."""
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
  """Returns {name: tensor} of an open file of `size` bytes; ValueError if it is damaged. `path` is for errors."""
  header_bytes = int.from_bytes(file.read(8), 'little')
  if not 2 <= header_bytes <= min(_HEADER, size):
    raise ValueError('it has no header of safetensors')
  try:
    header = json.loads(file.read(header_bytes))
    header.pop('__metadata__', None)
    entries = {name: (entry['dtype'], tuple(entry['shape']), *entry['data_offsets']) for name, entry in header.items()}
    for kind, shape, start, end in entries.values():
      if (
        any(type(number) is not int for number in (*shape, start, end))
        or not 0 <= start <= end
        or min(shape, default=0) < 0
        or kind in _DTYPES
        and (end - start != math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize)
      ):
        raise ValueError('its header is damaged')
    ends = sorted((start, end) for *_, start, end in entries.values())
    if any(start != previous_end for (start, _), (_, previous_end) in zip(ends, [(0, 0), *ends])):
      raise ValueError('its header is damaged: tensors overlap, or leave bytes between them')
  except (AttributeError, KeyError, TypeError, RecursionError) as e:
    raise ValueError('its header is damaged') from e
  data_start = 8 + header_bytes
  end = data_start + max((entry[3] for entry in entries.values()), default=0)
  if end != size:
    raise ValueError(f'its header describes {end} bytes, but the file has {size}')
  return {
    name: Tensor(file, kind, shape, data_start + start, f'{path}: tensor {name}', size=stop - start)
    for name, (kind, shape, start, stop) in entries.items()
  }
