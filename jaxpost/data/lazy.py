"""Files whose rows are read one by one, in any order (`streaming`).

Only an index is kept in memory: 8 bytes a line, or what the format holds itself. Row groups of parquet are read whole,
at most twice each where the disk has room (`RowGroups`).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.data import binary_files, files
from jaxpost.errors import InputError

if TYPE_CHECKING:
  from etils import epath


_CHUNK = 1 << 22
_PIECE = 1 << 16  # bytes of a row group on the local disk that are read for one row
_MOST_ROWS = 256  # of such a piece: those of a dictionary may be far larger than its codes
_LARGEST = 1 << 30  # bytes that a row group may take there, if they are not four times its own
_SPACE = np.frombuffer(b' \t\n\r\x0b\x0c\xef', np.uint8)  # and of a BOM


class RandomAccess:
  """A file as rows that are read by their number, from 0: `len(file)` of them, each `file[i]`."""

  dropped = 0  # rows left out so far: they are dropped when they are reached

  def __init__(self, path: epath.Path, name: str):
    self._path = path
    self._name = name

  def where(self, i: int) -> str:
    """Returns the place of a row, for errors."""
    return f'{self._name}[{i}]'


class Caches:
  """The open files and row groups that all files of a source share."""

  def __init__(self):
    self.handles = _LeastRecent(32)
    self.groups = RowGroups()


class _LeastRecent:
  """A least-recently-used cache of `size` entries; hold `lock` while using one."""

  def __init__(self, size: int):
    self.lock = threading.RLock()
    self._size = size
    self._made: collections.OrderedDict[Any, Any] = collections.OrderedDict()

  def get(self, key: Any, make: Callable[[], Any]) -> Any:
    with self.lock:
      if key not in self._made:
        # Evicted first, so that no more than `size` are ever held.
        while len(self._made) >= self._size:
          self._made.popitem(last=False)
        self._made[key] = make()
      self._made.move_to_end(key)
      return self._made[key]

  def drop(self, key: Any) -> None:
    """Forgets an entry, if there is one."""
    self._made.pop(key, None)


class RowGroups:
  """The row groups of parquet files: the last four in memory, and those that were read again on the local disk.

  A random order comes back to each row group in every window of documents. From the second time on its rows are read
  from a temporary file, in small pieces; it has no name, so its space is free once the process ends. Where the disk has
  no room, groups that are not in the file are read again and again.
  """

  def __init__(self):
    self._recent = _LeastRecent(4)
    self._used = {}  # {group: rows taken from its table in memory since it was read last}
    self._pieces = {}  # {group: (rows of a piece, where pieces begin in the file, and end)}
    # Without a buffer, which keeps what a full disk did not take, and raises again at the next use.
    self._file, self._size, self._full = None, 0, False

  def row(self, key: Any, i: int, read: Callable[[], Any], arrow: Any) -> Any:
    """Returns row `i` of a group, as a table.

    Args:
      key: of the group. read: reads its table. arrow: the library.
    """

    def table() -> Any:
      found = read()
      # A group whose rows were mostly taken is read in their order, which needs it once a pass.
      if not self._full and self._used.get(key, len(found)) * 2 < len(found):
        self._keep(key, found, arrow)
      self._used[key] = 0
      return found

    with self._recent.lock:
      if key not in self._pieces:
        found = self._recent.get(key, table)
        self._used[key] += 1
      if key in self._pieces:
        self._recent.drop(key)
        rows, ends = self._pieces[key]
        self._file.seek(ends[i // rows])
        piece = self._file.read(ends[i // rows + 1] - ends[i // rows])
        found, i = arrow.ipc.open_stream(piece).read_all(), i % rows
      return found.slice(i, 1)

  def _keep(self, key: Any, table: Any, arrow: Any) -> None:
    """Writes a group to the local disk, if it has room for it; else this and all others are no longer written."""
    try:
      if self._file is None:
        self._file = tempfile.TemporaryFile(buffering=0)
      self._pieces[key] = self._write(table.replace_schema_metadata(None), arrow)
      self._size = self._pieces[key][1][-1]
    except (OSError, arrow.ArrowException) as error:
      self._full = True
      if self._file is not None:
        with contextlib.suppress(OSError):
          self._file.truncate(self._size)
      logging.warning(
        'row groups of parquet are read again and again, as a temporary file holds no more of them: %s; '
        'set TMPDIR to a folder with more room',
        error,
      )

  def _write(self, table: Any, arrow: Any) -> tuple[int, list[int]]:
    """Writes a table behind the groups in the file; returns the rows of a piece, and where pieces begin and end."""
    rows = min(max(1, _PIECE * len(table) // max(table.nbytes, 1)), _MOST_ROWS)
    # Each piece would have the whole dictionary of a column. Decoded, a few rows at a time, a group may be far larger.
    plain = [x.with_type(x.type.value_type) if arrow.types.is_dictionary(x.type) else x for x in table.schema]
    plain, most = arrow.schema(plain), max(_LARGEST, 4 * table.nbytes)
    folder, ends = tempfile.gettempdir(), [self._file.seek(self._size)]
    for start in range(0, len(table), rows):
      buffer = arrow.BufferOutputStream()
      with arrow.ipc.new_stream(buffer, plain) as writer:
        writer.write_table(table.slice(start, rows).cast(plain))
      piece = buffer.getvalue()
      ends.append(ends[-1] + piece.size)
      disk = shutil.disk_usage(folder)
      # Other processes may write such a file, too, so at least its size stays free, and a tenth of the disk.
      if disk.free - piece.size < max(ends[-1], disk.total // 10):
        raise OSError(f'{folder} has {disk.free >> 20} MiB left')
      if ends[-1] - ends[0] > most:
        raise OSError(f'a row group of {table.nbytes >> 20} MiB takes more than {most >> 20} MiB')
      if self._file.write(piece) < piece.size:
        raise OSError(f'{folder} is full')
    return rows, ends


class Lines(RandomAccess):
  """The lines of a .jsonl file that are not blank."""

  def __init__(self, path: epath.Path, name: str, caches: Caches):
    super().__init__(path, name)
    self._handles = caches.handles
    try:
      starts, firsts, size = self._scan()
    except OSError as error:
      raise InputError(f'{name}: unreadable: {error.strerror or error}') from error
    self._starts = np.append(starts, size)
    self._numbers = None  # line of each row; None: row i is line i + 1
    blank = [i for i in np.flatnonzero(np.isin(firsts, _SPACE)).tolist() if not self._line(i)]
    if blank:
      kept = np.setdiff1d(np.arange(len(starts)), blank)
      self._numbers = kept + 1
      self._starts = np.append(starts[kept], size)

  def _scan(self) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the offset of each line, its first byte, and the size of the file."""
    starts, firsts, offset, fresh = [], [], 0, True
    with self._path.open('rb') as file:
      while chunk := file.read(_CHUNK):
        data = np.frombuffer(chunk, np.uint8)
        at = np.flatnonzero(data[:-1] == 10) + 1
        if fresh:
          at = np.append(0, at)
        fresh = data[-1] == 10
        starts.append(at + offset)
        firsts.append(data[at])
        offset += len(chunk)
    if not starts:
      return np.zeros(0, np.int64), np.zeros(0, np.uint8), 0
    return np.concatenate(starts), np.concatenate(firsts), offset

  def _line(self, i: int) -> bytes:
    start, stop = map(int, self._starts[i : i + 2])
    with self._handles.lock:
      file = self._handles.get(self._name, lambda: self._path.open('rb'))
      file.seek(start)
      line = file.read(stop - start)
    if start == 0:
      line = line.removeprefix(b'\xef\xbb\xbf')
    # Blank lines may follow.
    line = line.partition(b'\n')[0]
    return line if line.strip() else b''

  def __len__(self) -> int:
    return len(self._starts) - 1

  def __getitem__(self, i: int) -> Any:
    number = self._number(i)
    text = files.decode(self._line(i), self._name, number)
    return files.parse(text, self._name, number)

  def _number(self, i: int) -> int:
    return i + 1 if self._numbers is None else int(self._numbers[i])

  def where(self, i: int) -> str:
    """Returns the place of a row, for errors."""
    return f'{self._name}:{self._number(i)}'


class Parquet(RandomAccess):
  """The rows of a parquet file, through its row groups."""

  def __init__(self, path: epath.Path, name: str, caches: Caches):
    super().__init__(path, name)
    self._groups = caches.groups
    self._arrow, self._lib, self._parquet = binary_files.import_reader(name, 'parquet', *binary_files.PARQUET)

    def group_sizes(file: Any) -> list[int]:
      return [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]

    sizes = self._with_file(group_sizes)
    self._starts = np.append(0, np.cumsum(sizes, dtype=np.int64))

  def _with_file(self, use: Callable[[Any], Any]) -> Any:
    try:
      with self._path.open('rb') as raw:
        return use(self._parquet.ParquetFile(raw))
    except (self._lib.ArrowException, OSError) as error:
      raise binary_files.damaged(self._name, 'parquet', error) from error

  def __len__(self) -> int:
    return int(self._starts[-1])

  def __getitem__(self, i: int) -> Any:
    group = int(np.searchsorted(self._starts, i, 'right')) - 1
    key, place = (self._name, group), i - int(self._starts[group])
    row = self._groups.row(key, place, lambda: self._with_file(lambda f: f.read_row_group(group)), self._arrow)
    return binary_files.rows_of(row, self._name)[0]


class ArrayRecord(RandomAccess):
  """The records of an ArrayRecord file, each JSON."""

  def __init__(self, path: epath.Path, name: str, caches: Caches):
    super().__init__(path, name)
    self._handles = caches.handles
    _, self._module = binary_files.import_reader(name, 'ArrayRecord', *binary_files.ARRAY_RECORD)
    self._size = self._with_reader(lambda reader: reader.num_records())

  def _open(self):
    reader = self._module.ArrayRecordReader(str(self._path))
    if not reader.ok():
      reader.close()  # raises the error
    return reader

  def _with_reader(self, use: Callable[[Any], Any]) -> Any:
    try:
      with self._handles.lock:
        return use(self._handles.get(self._name, self._open))
    except (RuntimeError, ValueError, OSError, IndexError) as error:
      raise binary_files.damaged(self._name, 'ArrayRecord', error) from error

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, i: int) -> Any:
    (record,) = self._with_reader(lambda reader: reader.read([i]))
    return files.parse(files.decode(record, self.where(i), 1), self.where(i))
