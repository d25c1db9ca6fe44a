"""Rows (plain dicts) from files, folders, the hub, or a generator.

    read('train.jsonl')                     read('folder:train')
    read('openai/gsm8k:main/train.parquet') read('generated:arithmetic:max=9')

Columns are TRL's: `text`; `messages`; `prompt` + `completion`; `prompt` +
`chosen` + `rejected`; ... Sharegpt and alpaca rows are mapped to them. With
`streaming` rows are read when they are asked for.
"""

import bisect
import collections.abc
import difflib
import itertools
import math
import re

from etils import epath

from jaxpost import imports
from jaxpost.data import file_formats, files, generated, maps
from jaxpost.errors import InputError
from jaxpost.storage import hub

_SPLIT_WORDS = {
  'train': 'train',
  'training': 'train',
  'test': 'test',
  'testing': 'test',
  'validation': 'validation',
  'valid': 'validation',
  'val': 'validation',
  'dev': 'validation',
  'eval': 'validation',
}


class Rows(collections.abc.Sequence):
  """A sequence of dict rows that knows where each one stands.

  Attributes:
    name: what was read.
    dropped: rows for which the map function returned None.
    sizes: rows of each source, in their order.
    weights: share of each source in the documents, () for that of its size.
    streaming: rows are read when asked for, and None where the map drops one.
  """

  streaming = False
  weights = ()

  def __init__(self, name, rows, places, dropped=0):
    self.name = name
    self.dropped = dropped
    self._rows = rows
    self._places = places

  def __len__(self):
    return len(self._rows)

  def __getitem__(self, i):
    if isinstance(i, slice):
      return Rows(self.name, self._rows[i], self._places[i])
    return self._rows[i]

  @property
  def sizes(self):
    return (len(self),)

  def where(self, i):
    """'file.jsonl:12' (a line, from 1) or 'file.parquet[12]' (from 0)."""
    return files.where(*self._places[i])


class Chain(collections.abc.Sequence):
  """Sources one after the other, with the attributes of `Rows`."""

  def __init__(self, name, parts, weights=(), streaming=False):
    self.name = name
    self.weights = tuple(weights)
    self.streaming = streaming
    self.sizes = tuple(len(part) for part in parts)
    self.dropped = sum(part.dropped for part in parts)
    self._parts = parts
    self._stops = list(itertools.accumulate(self.sizes))

  def __len__(self):
    return self._stops[-1]

  def __getitem__(self, i):
    part, n = self._find(i)
    return part[n]

  def where(self, i):
    """As `Rows.where`."""
    part, n = self._find(i)
    return part.where(n)

  def _find(self, i):
    number = range(len(self))[i]
    part = bisect.bisect_right(self._stops, number)
    return self._parts[part], number - self._stops[part] + self.sizes[part]


class Lazy(collections.abc.Sequence):
  """Rows of one source read one by one; `prepare` makes them ours."""

  streaming = True
  weights = ()
  dropped = 0  # counted where they are reached

  def __init__(self, name, opened, prepare):
    self.name = name
    self._opened = Chain(name, opened)
    self._prepare = prepare

  def __len__(self):
    return len(self._opened)

  def __getitem__(self, i):
    return self._prepare(self._opened[i], self.where(i))

  @property
  def sizes(self):
    return (len(self),)

  def where(self, i):
    """As `Rows.where`."""
    return self._opened.where(i)


def read_sources(path, columns='', map_fn=None, weights=(), streaming=False):
  """The rows of one source, or of several one after the other.

  Args:
    path: what `read` takes, several as a tuple or with ' + ' between.
    columns, map_fn: as in `read`; one for all or one each, as `path`.
    weights: share of each source in the documents of a run, in any unit; ()
      gives each the share of its size.
    streaming: as in `read`.
  """
  paths = _each(path)
  if not paths or '' in paths:
    raise InputError(f'data: {path!r}: names no source where one should be')
  columns = _for_all(columns, paths, 'columns')
  maps_ = _for_all(map_fn, paths, 'map')
  weights = tuple(weights)
  if weights and len(weights) != len(paths):
    raise InputError(f'data: {len(weights)} weights for {len(paths)} sources; give one each')
  for path, weight in zip(paths, weights):
    if not 0 < weight < math.inf:
      raise InputError(
        f'data: the weight of {path} is {weight:g}; it must be above 0 (leave a source out that is not wanted)'
      )
  parts = [read(p, c, m or None, streaming=streaming) for p, c, m in zip(paths, columns, maps_)]
  if len(parts) == 1:
    return parts[0]
  return Chain(' + '.join(paths), parts, weights, streaming)


def _each(value):
  """'a + b', or a tuple -> list."""
  if isinstance(value, (tuple, list)):
    return list(map(str, value))
  return [part.strip() for part in str(value).split(' + ')]


def _for_all(value, paths, what):
  if value is None or callable(value):
    return [value] * len(paths)
  if isinstance(value, str):
    value = _each(value)
  if len(value) == 1:
    return list(value) * len(paths)
  if value and len(value) != len(paths):
    raise InputError(f'data: {len(value)} {what} for {len(paths)} sources; give one for all or one each')
  return list(value) or [''] * len(paths)


def read(path, columns='', map_fn=None, fake_rows=None, streaming=False):
  """All rows of a source.

  Args:
    path: a file (.jsonl .json .txt, each also .gz; .parquet .array_record
      .arrow), a folder of them or one saved by `datasets` (':split' picks
      one), 'generated:NAME[:key=value,...]', or 'org/name[@revision][:file or
      split]' on the hub. What exists locally is local.
    columns: 'prompt=question,completion=answer' renames, target=source; other
      columns are kept.
    map_fn: row -> row or None (drop it), or its import path; sees the renamed
      columns.
    fake_rows: rows to use instead of reading the path, which only names them.
    streaming: read each row when it is asked for, from .jsonl, .parquet or
      .array_record, for data larger than memory.
  """
  renames = _parse_columns(columns)
  if map_fn is not None:
    map_fn = imports.load_callable(map_fn, 'map_fn')

  def prepare(row, where):
    if not isinstance(row, dict):
      raise InputError(f'{where}: the row is a {type(row).__name__}, must be an object')
    row = _rename(row, renames, where) if renames else row
    if map_fn is not None:
      row = _mapped(map_fn, row, where)
    return row if row is None else _recognise(row, where)

  if fake_rows is not None:
    found = [(f'{path}[', enumerate(fake_rows))]
  elif str(path).startswith('generated:'):
    _, name, *options = str(path).split(':', 2)
    made = generated.rows(name, ''.join(options))
    found = [(f'{path}[', enumerate(made))]
  elif streaming:
    rows = Lazy(str(path), file_formats.open_streaming(_find(str(path))), prepare)
    if not len(rows):
      raise InputError(f'{path}: holds no rows')
    return rows
  else:
    found = [file_formats.open_file(*file) for file in _find(str(path))]
  return _read_all(path, found, prepare)


def _read_all(path, found, prepare):
  rows, places, dropped = [], [], 0
  for prefix, numbered in found:
    for number, row in numbered:
      row = prepare(row, files.where(prefix, number))
      if row is None:
        dropped += 1
        continue
      rows.append(row)
      places.append((prefix, number))
  if not rows and dropped:
    raise InputError(f'{path}: map_fn dropped all {dropped} rows')
  if not rows:
    raise InputError(f'{path}: holds no rows')
  return Rows(str(path), rows, places, dropped)


def _find(path):
  """[(path, what to call it)] of the files of a source."""
  local = epath.Path(path).expanduser()
  if local.exists():
    return _find_local(local, path, '')
  folder, _, split = path.rpartition(':')
  if folder and epath.Path(folder).expanduser().is_dir():
    return _find_local(epath.Path(folder).expanduser(), folder, split)
  named = hub.parse(path)
  if named is None or (file_formats.find(path) and not named[2]):
    raise _missing(local, path)
  repo, revision, file = named
  whole = bool(file_formats.find(file))
  patterns = file_formats.PATTERNS
  found = epath.Path(hub.download(repo, 'dataset', revision, file if whole else '', patterns))
  if whole:
    return [(found, path)]
  return _find_local(found, path, file)


def _find_local(local, path, split):
  if not local.is_dir():
    return [(local, path)]
  if (local / 'dataset_dict.json').exists():
    names = files.load_json(local / 'dataset_dict.json').get('splits', [])
    split = _choose(split, names, path)
    local, split = local / split, ''
  if (local / 'state.json').exists():
    state = files.load_json(local / 'state.json')
    listed = [f['filename'] for f in state.get('_data_files', [])]
    found = [local / name for name in listed]
  else:
    found = file_formats.data_files(local)
    splits = {f: _split_of(f.relative_to(local).parts) for f in found}
    named = sorted({s for s in splits.values() if s})
    if split or len(named) > 1:
      split = _choose(split, named, path)
      found = [f for f in found if splits[f] == split]
  if not found:
    there = ', '.join(sorted(f.name for f in local.iterdir())[:8])
    raise InputError(f'{path}: no data in this folder ({file_formats.NAMES}); it has {there or "nothing"}')
  return [(f, str(f)) for f in found]


def _choose(split, names, path):
  if split in names:
    return split
  if not split and len(names) == 1:
    return names[0]
  listed = ', '.join(names) or 'none'
  if split:
    raise InputError(f'{path}: has no split {split!r}; it has {listed}')
  raise InputError(
    f'{path}: has the splits {listed}; name one, e.g. {path}:{names[0]}' if names else f'{path}: has no splits'
  )


def _split_of(parts):
  words = re.split(r'[^A-Za-z]+', '/'.join(parts).lower())
  return next((_SPLIT_WORDS[w] for w in words if w in _SPLIT_WORDS), '')


def _missing(local, path):
  folder = local.parent
  if not folder.is_dir():
    return InputError(f'{path}: no such file, nor is there a folder {folder}')
  names = [f.name for f in folder.iterdir()]
  near = difflib.get_close_matches(local.name, names, 1, 0.4)
  hint = f'did you mean {folder / near[0]}?' if near else (f'{folder} has {", ".join(sorted(names)[:8]) or "nothing"}')
  return InputError(f'{path}: no such file; {hint}')


def _parse_columns(columns):
  renames = {}
  for part in filter(None, (p.strip() for p in columns.split(','))):
    target, equals, source = (p.strip() for p in part.partition('='))
    if not (target and equals and source):
      raise InputError(f'columns: {part!r} must be target=source, e.g. prompt=question')
    if target in renames:
      raise InputError(f'columns: {target!r} is given twice')
    renames[target] = source
  return renames


def _rename(row, renames, where):
  for source in renames.values():
    if source not in row:
      near = difflib.get_close_matches(source, map(str, row), 1)
      raise InputError(
        f'{where}: no column {source!r}; it has'
        f' {", ".join(map(str, row)) or "none"}' + (f' (did you mean {near[0]}?)' if near else '')
      )
  kept = {k: v for k, v in row.items() if k not in renames.values()}
  return kept | {target: row[source] for target, source in renames.items()}


def _mapped(map_fn, row, where):
  try:
    made = map_fn(dict(row))
  except InputError as error:
    raise InputError(f'{where}: {error}') from error
  except (LookupError, TypeError, ValueError, AttributeError) as error:
    raise InputError(
      f'{where}: map_fn raised {type(error).__name__}: {error}; the row has {", ".join(map(str, row)) or "no columns"}'
    ) from error
  if made is not None and not isinstance(made, dict):
    raise InputError(f'{where}: map_fn returned a {type(made).__name__}, must return a row (dict) or None to drop it')
  return made


def _recognise(row, where):
  """Sharegpt and alpaca rows in TRL's columns, others as they are."""
  if 'conversations' in row and not {'messages', 'prompt'} & set(row):
    return maps.sharegpt(row, where)
  if {'instruction', 'output'} <= set(row) and not ({'messages', 'prompt', 'completion'} & set(row)):
    return maps.alpaca(row, where)
  return row
