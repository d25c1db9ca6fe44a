"""Files whose rows are read one by one, in any order.

Only an index is kept in memory: 8 bytes a line, or what the format holds
itself. Row groups of parquet are read whole, so files that are read in a
random order should have small ones (a few MB).
"""

import collections
import threading

import numpy as np

from jaxpost.data import files
from jaxpost.errors import InputError

KINDS = ('.jsonl', '.parquet', '.array_record')
_CHUNK = 1 << 22
_SPACE = np.frombuffer(b' \t\n\r\x0b\x0c\xef', np.uint8)  # and of a BOM


def open_files(found):
  """Sequences of rows, with `where(i)`, one a file that holds any.

  Args:
    found: [(an `epath.Path`, what to call it in errors)].
  """
  makers = {'.jsonl': _Lines, '.parquet': _Parquet, '.array_record': _ArrayRecord}
  handles, groups = _Recent(32), _Recent(4)
  opened = []
  for path, name in found:
    kind = files.kind(path.name)
    if kind not in makers or path.name.lower().endswith('.gz'):
      raise InputError(
        f'{name}: cannot be read with streaming, only {", ".join(KINDS)}; make it one of them, or turn streaming off'
      )
    opened.append(makers[kind](path, name, groups if kind == '.parquet' else handles))
  return opened


class _Recent:
  """What was made last, at most `size` of it; the lock guards its use."""

  def __init__(self, size):
    self.lock = threading.RLock()
    self._size = size
    self._made = collections.OrderedDict()

  def get(self, key, make):
    with self.lock:
      if key not in self._made:
        # First room, then what takes it.
        while len(self._made) >= self._size:
          self._made.popitem(last=False)
        self._made[key] = make()
      self._made.move_to_end(key)
      return self._made[key]


class _Lines:
  """The lines of a .jsonl file that are not blank."""

  dropped = 0

  def __init__(self, path, name, handles):
    self._path, self._name, self._handles = path, name, handles
    try:
      starts, firsts, size = self._scan()
    except OSError as error:
      raise InputError(f'{name}: unreadable: {error.strerror or error}') from error
    self._starts = np.append(starts, size)
    self._numbers = None  # i + 1
    blank = [i for i in np.flatnonzero(np.isin(firsts, _SPACE)) if not self._line(i)]
    if blank:
      kept = np.setdiff1d(np.arange(len(starts)), blank)
      self._numbers = kept + 1
      self._starts = np.append(starts[kept], size)

  def _scan(self):
    """Where each line starts, its first byte, and the size of the file."""
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

  def _line(self, i):
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

  def __len__(self):
    return len(self._starts) - 1

  def __getitem__(self, i):
    number = self._number(i)
    text = files.decode(self._line(i), self._name, number)
    return files.parse(text, self._name, number)

  def _number(self, i):
    return i + 1 if self._numbers is None else int(self._numbers[i])

  def where(self, i):
    return files.where(f'{self._name}:', self._number(i))


class _Parquet:
  """The rows of a parquet file, through its row groups."""

  dropped = 0

  def __init__(self, path, name, groups):
    self._path, self._name, self._groups = path, name, groups
    self._lib, self._parquet = files.import_parquet(name)
    sizes = self._with_file(
      lambda file: [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
    )
    self._starts = np.append(0, np.cumsum(sizes, dtype=np.int64))

  def _with_file(self, use):
    try:
      with self._path.open('rb') as raw:
        return use(self._parquet.ParquetFile(raw))
    except (self._lib.ArrowException, OSError) as error:
      raise files.damaged(self._name, 'parquet', error) from error

  def __len__(self):
    return int(self._starts[-1])

  def __getitem__(self, i):
    group = int(np.searchsorted(self._starts, i, 'right')) - 1
    table = self._groups.get((self._name, group), lambda: self._with_file(lambda file: file.read_row_group(group)))
    return table.slice(i - int(self._starts[group]), 1).to_pylist()[0]

  def where(self, i):
    return files.where(f'{self._name}[', i)


class _ArrayRecord:
  """The records of an ArrayRecord file, each JSON."""

  dropped = 0

  def __init__(self, path, name, handles):
    self._path, self._name, self._handles = path, name, handles
    self._module = files.import_array_record(name)
    self._size = self._with_reader(lambda reader: reader.num_records())

  def _open(self):
    reader = self._module.ArrayRecordReader(str(self._path))
    if not reader.ok():
      reader.close()  # raises what is wrong
    return reader

  def _with_reader(self, use):
    try:
      with self._handles.lock:
        return use(self._handles.get(self._name, self._open))
    except (RuntimeError, ValueError, OSError, IndexError) as error:
      raise files.damaged(self._name, 'ArrayRecord', error) from error

  def __len__(self):
    return self._size

  def __getitem__(self, i):
    (record,) = self._with_reader(lambda reader: reader.read([i]))
    return files.parse(files.decode(record, self.where(i), 1), self.where(i))

  def where(self, i):
    return files.where(f'{self._name}[', i)
