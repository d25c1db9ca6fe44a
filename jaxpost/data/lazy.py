"""Files whose rows are read one by one, in any order (`streaming`).

Only an index is kept in memory: 8 bytes per line, or the index of the file format. Row groups of parquet are read as a
whole, at most twice each if the local disk has room (`RowGroups`).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epath

from jaxpost.data import file_readers, files
from jaxpost.errors import InputError

_CHUNK = 1 << 22  # bytes that the search for line breaks reads at a time
_PIECE = 1 << 16  # bytes of a row group on the local disk that are read for one row
_MAX_ROWS = 256  # of such a piece: rows may be far larger than the dictionary codes by which their size is estimated
_LARGEST = 1 << 30  # bytes that any row group may take on the local disk; one may also take four times its own bytes
_SPACE = np.frombuffer(b' \t\n\r\x0b\x0c\xef', np.uint8)  # bytes that may begin a blank line, and that of a BOM


class RandomAccess:
  """A file as a sequence: `len(file)` rows, of which `file[i]` reads one."""

  dropped = 0  # a map drops rows only when they are read

  def __init__(self, path: epath.Path, name: str, caches: Caches):
    self._path, self._name = path, name
    self._handles, self._groups = caches.handles, caches.groups

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
    self._entries: collections.OrderedDict[Any, Any] = collections.OrderedDict()

  def get(self, key: Any, make: Callable[[], Any]) -> Any:
    with self.lock:
      if key not in self._entries:
        # Evict first, so that there are never more than `size` entries.
        while len(self._entries) >= self._size:
          self._entries.popitem(last=False)
        self._entries[key] = make()
      self._entries.move_to_end(key)
      return self._entries[key]

  def drop(self, key: Any) -> None:
    """Removes an entry, if there is one."""
    self._entries.pop(key, None)


class RowGroups:
  """The row groups of parquet files: the last four in memory, and those that are read repeatedly on the local disk.

  A random order returns to each row group in every window of documents. From the second time on, its rows are read in
  small pieces from a temporary file. The file has no name, so the system frees its space when the process ends. If the
  disk has no room, the remaining groups are read from their parquet files each time.
  """

  def __init__(self):
    self._recent = _LeastRecent(4)
    self._used = {}  # {group: rows taken from its table in memory since it was last read}
    self._pieces = {}  # {group: (rows of a piece, offsets of the pieces in the file and of the end)}
    self._file, self._size, self._full = None, 0, False

  def row(self, key: Any, i: int, read: Callable[[], Any], arrow: Any) -> Any:
    """Returns row `i` of the group `key`, as a table; `read` reads the group, and `arrow` is the module pyarrow."""

    def read_group() -> Any:
      table = read()
      # If most of its rows were used since the last read, rows are read in file order: once per pass is enough.
      if not self._full and self._used.get(key, len(table)) * 2 < len(table):
        self._keep(key, table, arrow)
      self._used[key] = 0
      return table

    with self._recent.lock:
      if key not in self._pieces:
        table = self._recent.get(key, read_group)
        self._used[key] += 1
      if key in self._pieces:  # perhaps since `read_group`
        self._recent.drop(key)
        rows, offsets = self._pieces[key]
        self._file.seek(offsets[i // rows])
        piece = self._file.read(offsets[i // rows + 1] - offsets[i // rows])
        table, i = arrow.ipc.open_stream(piece).read_all(), i % rows
      return table.slice(i, 1)

  def _keep(self, key: Any, table: Any, arrow: Any) -> None:
    """Writes a group to the local disk; if the disk has no room for it, no group is written from then on."""
    try:
      if self._file is None:
        # Unbuffered: a buffer would keep data for which a full disk had no room, and raise again at the next use.
        self._file = tempfile.TemporaryFile(buffering=0)
      self._pieces[key] = self._write(table.replace_schema_metadata(None), arrow)
      self._size = self._pieces[key][1][-1]
    except (OSError, arrow.ArrowException) as error:
      self._full = True
      if self._file is not None:
        with contextlib.suppress(OSError):
          self._file.truncate(self._size)
      logging.warning(
        'row groups of parquet are read again and again, as a temporary file has no room for more: %s; set TMPDIR to a '
        'folder with more room',
        error,
      )

  def _write(self, table: Any, arrow: Any) -> tuple[int, list[int]]:
    """Appends a table to the file; returns the rows of a piece, and the offsets of the pieces and of the end."""
    rows = min(max(1, _PIECE * len(table) // max(table.nbytes, 1)), _MAX_ROWS)
    # Decode dictionaries: each piece would have the whole dictionary of a column. A group may become far larger.
    plain = [x.with_type(x.type.value_type) if arrow.types.is_dictionary(x.type) else x for x in table.schema]
    plain, limit = arrow.schema(plain), max(_LARGEST, 4 * table.nbytes)
    folder, offsets = tempfile.gettempdir(), [self._file.seek(self._size)]
    for start in range(0, len(table), rows):
      buffer = arrow.BufferOutputStream()
      with arrow.ipc.new_stream(buffer, plain) as writer:
        writer.write_table(table.slice(start, rows).cast(plain))
      piece = buffer.getvalue()
      offsets.append(offsets[-1] + piece.size)
      disk = shutil.disk_usage(folder)
      # Leave a tenth of the disk free, and as much as the file takes, as other processes may write one, too.
      if disk.free - piece.size < max(offsets[-1], disk.total // 10):
        raise OSError(f'{folder} has {disk.free >> 20} MiB left')
      if offsets[-1] - offsets[0] > limit:
        raise OSError(f'a row group of {table.nbytes >> 20} MiB takes more than {limit >> 20} MiB')
      if self._file.write(piece) < piece.size:
        raise OSError(f'{folder} is full')
    return rows, offsets


class Lines(RandomAccess):
  """The lines of a .jsonl file that are not blank."""

  def __init__(self, path: epath.Path, name: str, caches: Caches):
    super().__init__(path, name, caches)
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
    """Returns the offset and the first byte of each line, and the size of the file."""
    starts, firsts, offset, begins_line = [], [], 0, True
    with self._path.open('rb') as file:
      while chunk := file.read(_CHUNK):
        data = np.frombuffer(chunk, np.uint8)
        line_starts = np.flatnonzero(data[:-1] == ord('\n')) + 1
        if begins_line:
          line_starts = np.append(0, line_starts)
        begins_line = data[-1] == ord('\n')
        starts.append(line_starts + offset)
        firsts.append(data[line_starts])
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
    line = line.partition(b'\n')[0]  # without blank lines that follow
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
    return f'{self._name}:{self._number(i)}'


class Parquet(RandomAccess):
  """The rows of a parquet file, through its row groups."""

  def __init__(self, path: epath.Path, name: str, caches: Caches):
    super().__init__(path, name, caches)
    self._arrow, self._lib, self._parquet = file_readers.import_reader(name, 'parquet', *file_readers.PARQUET)
    metadata = self._with_file(lambda file: file.metadata)
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    self._starts = np.append(0, np.cumsum(sizes, dtype=np.int64))

  def _with_file(self, use: Callable[[Any], Any]) -> Any:
    try:
      with self._path.open('rb') as raw:
        return use(self._parquet.ParquetFile(raw))
    except (self._lib.ArrowException, OSError) as error:
      raise file_readers.damaged(self._name, 'parquet', error) from error

  def __len__(self) -> int:
    return int(self._starts[-1])

  def __getitem__(self, i: int) -> Any:
    group = int(np.searchsorted(self._starts, i, 'right')) - 1
    index = i - int(self._starts[group])

    def read() -> Any:
      return self._with_file(lambda file: file.read_row_group(group))

    row = self._groups.row((self._name, group), index, read, self._arrow)
    return file_readers.rows_of(row, self._name)[0]


class ArrayRecord(RandomAccess):
  """The records of an ArrayRecord file, each JSON."""

  def __init__(self, path: epath.Path, name: str, caches: Caches):
    super().__init__(path, name, caches)
    _, self._module = file_readers.import_reader(name, 'ArrayRecord', *file_readers.ARRAY_RECORD)
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
      raise file_readers.damaged(self._name, 'ArrayRecord', error) from error

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, i: int) -> Any:
    (record,) = self._with_reader(lambda reader: reader.read([i]))
    return files.parse(files.decode(record, self.where(i), 1), self.where(i))
