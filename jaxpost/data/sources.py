"""Reads rows (plain dicts) from files, folders, the hub, or a generator.

    read('train.jsonl')                     read('folder:train')
    read('openai/gsm8k:main/train.parquet') read('generated:arithmetic:max=9')

Columns are TRL's: `text`; `messages`; `prompt` + `completion`; `prompt` + `chosen` + `rejected`; ... Sharegpt and
alpaca rows are mapped to them. With `streaming`, each row is read on access.
"""

from __future__ import annotations

import collections.abc
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from jaxpost.errors import InputError, type_of

if TYPE_CHECKING:
  from jaxpost.data.files import NumberedRows
  from jaxpost.data.row_views import Chain, Lazy

Row = dict[str, Any]
MapFn = Callable[[Row], Row | None]
_MEDIA_FILES = tuple('.jpg .jpeg .png .webp .gif .bmp .mp4 .webm .mov .wav .mp3 .flac .ogg'.split())


class Rows(collections.abc.Sequence):
  """A sequence of dict rows, with the place of each.

  Attributes:
    name: the path that was read.
    dropped: number of rows for which the map function returned None.
    sizes: number of rows of each source, in order.
    weights: share of each source in the documents; () for shares by size.
    streaming: True if rows are read on access; a row that the map drops is then None.
  """

  streaming = False
  weights = ()

  def __init__(self, name: str, rows: list[Row], places: list[tuple[str, int]], dropped: int = 0):
    self.name = name
    self.dropped = dropped
    self._rows = rows
    self._places = places
    self.sizes = (len(rows),)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, i: int | slice) -> Any:
    if isinstance(i, slice):
      return Rows(self.name, self._rows[i], self._places[i])
    return self._rows[i]

  def where(self, i: int) -> str:
    """Returns 'file.jsonl:12' (a line, from 1) or 'file.parquet[12]' (from 0)."""
    return _where(*self._places[i])


def read_sources(
  path: str | Sequence[str],
  columns: str | Sequence[str] = '',
  map_fn: MapFn | str | Sequence[str] | None = None,
  weights: Sequence[float] = (),
  streaming: bool = False,
) -> Rows | Chain | Lazy:
  """Reads the rows of one source, or of several one after the other.

  Args:
    path: see `read`; several paths as a tuple, or joined by ' + '.
    columns, map_fn: see `read`; one for all sources or one each.
    weights: share of each source in the documents of a run, in any unit; () for shares by size.
    streaming: see `read`.
  """
  paths = split(path)
  if not paths or '' in paths:
    raise InputError(f'data: {path!r}: has an empty source; name a file, a folder or org/name')
  columns = _for_all(columns, paths, 'columns')
  maps_ = _for_all(map_fn, paths, 'map')
  weights = tuple(weights)
  if weights and len(weights) != len(paths):
    raise InputError(f'data: {len(weights)} weights for {len(paths)} sources; give one each')
  for path, weight in zip(paths, weights):
    if not 0 < weight < math.inf:
      raise InputError(f'data: the weight of {path} is {weight:g}; it must be above 0 (or leave out the source)')
  parts = [read(p, c, m or None, streaming=streaming) for p, c, m in zip(paths, columns, maps_)]
  if len(parts) == 1:
    return parts[0]
  from jaxpost.data.row_views import Chain

  return Chain(' + '.join(paths), parts, weights, streaming)


def first(rows: Any, count: int) -> Any:
  """Returns the first `count` rows, or all if there are fewer; of a mixture, each source gives its proportion."""
  if count >= len(rows):
    return rows
  from jaxpost.data.row_views import First

  return First(rows, count)


def digest(rows: Any) -> str:
  """Returns a checksum of up to 20,000 evenly spread rows, or 16 if they are read on access."""
  count = min(len(rows), 16 if rows.streaming else 20_000)
  checksum = 0
  for i in range(count):
    row = rows[i * (len(rows) - 1) // max(count - 1, 1)]
    checksum = zlib.crc32(repr(row).encode(), checksum)
  return f'{checksum:08x}'


def split(value: str | Sequence[Any]) -> list[str]:
  """Returns the parts of 'a + b', or of a tuple."""
  if isinstance(value, (tuple, list)):
    return list(map(str, value))
  return [part.strip() for part in str(value).split(' + ')]


def _for_all(value: Any, paths: list[str], option: str) -> list:
  """Returns one value of an option for each source."""
  if value is None or callable(value):
    return [value] * len(paths)
  if isinstance(value, str):
    value = split(value)
  if len(value) == 1:
    return list(value) * len(paths)
  if value and len(value) != len(paths):
    raise InputError(f'data: {len(value)} {option} for {len(paths)} sources; give one for all or one each')
  return list(value) or [''] * len(paths)


def read(
  path: str | epath.PathLike,
  columns: str = '',
  map_fn: MapFn | str | None = None,
  fake_rows: Iterable[Row] | None = None,
  streaming: bool = False,
) -> Rows | Lazy:
  """Reads the rows of one source.

  Args:
    path: a file (see `source_files.FORMATS`), a folder of them or one saved by `datasets` (':split' picks one),
      'generated:NAME[:key=value,...]', or 'org/name[@revision][:file or split]' on the hub, unless it exists locally.
    columns: 'prompt=question,completion=answer' renames columns (target=source); others are kept.
    map_fn: (row with renamed columns) -> row, or None to drop it; or the import path of such a function.
    fake_rows: rows to use instead of reading the path, which only names them.
    streaming: whether to read each row on access, for data larger than memory; not all formats can.
  """
  steps: list[Callable[[Row, str], Row | None]] = []
  if columns or map_fn is not None:
    from jaxpost.data import maps

    steps += [maps.rename(columns)] if columns else []
    steps += [maps.load(map_fn)] if map_fn is not None else []

  def prepare(row: Any, where: str) -> Row | None:
    if not isinstance(row, dict):
      raise InputError(f'{where}: the row is {type_of(row)}, must be an object')
    for step in steps:
      row = step(row, where)
    return row if row is None else _recognize(row, where)

  if fake_rows is not None:
    opened: list[tuple[str, NumberedRows]] = [(f'{path}[', enumerate(fake_rows))]
  elif str(path).startswith('generated:'):
    from jaxpost.data import generated

    _, name, *options = str(path).split(':', 2)
    opened = [(f'{path}[', enumerate(generated.rows(name, ''.join(options))))]
  else:
    from jaxpost.data import source_files

    files = source_files.find_files(str(path))
    if streaming:
      from jaxpost.data.row_views import Lazy

      rows = Lazy(str(path), source_files.open_streaming(files), prepare)
      if not len(rows):
        raise InputError(f'{path}: holds no rows')
      return rows
    opened = [source_files.open_file(*file) for file in files]
  return _read_all(path, opened, prepare)


def _read_all(path: Any, opened: Iterable[tuple[str, NumberedRows]], prepare: Callable) -> Rows:
  rows, places, dropped = [], [], 0
  for prefix, numbered in opened:
    for number, row in numbered:
      row = prepare(row, _where(prefix, number))
      if row is None:
        dropped += 1
        continue
      rows.append(row)
      places.append((prefix, number))
  if not rows:
    problem = f'map_fn dropped all {dropped} rows: it returned None for each of them' if dropped else 'holds no rows'
    raise InputError(f'{path}: {problem}')
  return Rows(str(path), rows, places, dropped)


def _where(prefix: str, number: int) -> str:
  return f'{prefix}{number}' + (']' if prefix.endswith('[') else '')


def _recognize(row: Row, where: str) -> Row:
  """Maps sharegpt and alpaca rows to TRL's columns; returns others unchanged. InputError for other media than text."""
  for name in ('images', 'videos', 'audios', 'image', 'video', 'audio'):
    value = row.get(name)
    is_text = isinstance(value, str) and not (value.startswith('data:') or value.lower().endswith(_MEDIA_FILES))
    if value and (name.endswith('s') or not is_text):  # `image` may name a container
      raise InputError(f'{where}: {name}: only text is supported; drop the row, or the column, in config.data.map')
  is_sharegpt = 'conversations' in row and not {'messages', 'prompt'} & set(row)
  is_alpaca = {'instruction', 'output'} <= set(row) and not {'messages', 'prompt', 'completion'} & set(row)
  if not is_sharegpt and not is_alpaca:
    return row
  from jaxpost.data import maps

  return maps.sharegpt(row, where) if is_sharegpt else maps.alpaca(row, where)
