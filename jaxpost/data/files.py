"""Files -> numbered rows, with errors that name file, line and column.

A row's place is (prefix, number): ('a.jsonl:', 12) reads 'a.jsonl:12', a line
counted from 1; ('a.parquet[', 12) reads 'a.parquet[12]', counted from 0.
"""

import gzip
import json
import zlib

from jaxpost.errors import InputError

KINDS = ('.jsonl', '.json', '.txt', '.parquet', '.array_record', '.arrow')
_NOT_DATA = ('dataset_info.json', 'dataset_infos.json', 'dataset_dict.json', 'state.json')
_SEPARATOR = '<|endoftext|>'
_EXTRA = "pip install 'jaxpost[data]'"


def where(prefix, number):
  return f'{prefix}{number}' + (']' if prefix.endswith('[') else '')


def kind(name):
  """The format of a file by its name, '' if it is none of ours."""
  name = str(name).lower()
  plain = name.removesuffix('.gz')
  found = next((k for k in KINDS if plain.endswith(k)), '')
  if plain != name and found not in ('.jsonl', '.json', '.txt'):
    return ''
  return found


def find(folder):
  """The data files below a folder, sorted, without metadata."""
  found = []
  for path in sorted(folder.iterdir()):
    if path.name.startswith('.'):
      continue
    if path.is_dir():
      found += find(path)
    elif kind(path.name) and path.name not in _NOT_DATA:
      found.append(path)
  return found


def open_file(path, name):
  """(prefix of where, iterator of (number, row)) of one file.

  Args:
    path: an `epath.Path`.
    name: what to call it in errors.
  """
  readers = {
    '.jsonl': (':', _jsonl),
    '.txt': (':', _txt),
    '.json': ('[', _json),
    '.parquet': ('[', _parquet),
    '.array_record': ('[', _array_record),
    '.arrow': ('[', _arrow),
  }
  if kind(path.name) not in readers:
    raise InputError(
      f'{name}: unknown format; data is {", ".join(KINDS)} (the first three also .gz) or a folder of them'
    )
  mark, reader = readers[kind(path.name)]
  return name + mark, reader(path, name)


def load_json(path):
  """The object in a small JSON file."""
  found = parse(decode(_bytes(path, str(path)), str(path), 1), str(path))
  if not isinstance(found, dict):
    raise InputError(f'{path}: not a JSON object')
  return found


def _lines(path, name):
  """(line number, bytes) of a file that may be gzipped."""
  try:
    with path.open('rb') as raw:
      zipped = path.name.lower().endswith('.gz')
      file = gzip.GzipFile(fileobj=raw) if zipped else raw
      for number, line in enumerate(file, 1):
        if number == 1:
          line = line.removeprefix(b'\xef\xbb\xbf')
        yield number, line
  except (EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise InputError(f'{name}: damaged gzip file: {error}') from error
  except OSError as error:
    raise InputError(f'{name}: unreadable: {error.strerror or error}') from error


def _bytes(path, name):
  return b''.join(line for _, line in _lines(path, name))


def decode(data, name, first_line):
  """Bytes as text; errors count lines from `first_line`."""
  try:
    return data.decode('utf-8')
  except UnicodeDecodeError as error:
    before = data[: error.start]
    line = first_line + before.count(b'\n')
    column = error.start - before.rfind(b'\n')
    raise InputError(f'{name}:{line}:{column}: not UTF-8 (byte 0x{data[error.start]:02x})') from error


def _unique(pairs):
  """A dict; two equal keys would silently lose a value."""
  found = dict(pairs)
  if len(found) < len(pairs):
    keys = [k for k, _ in pairs]
    twice = next(k for k in keys if keys.count(k) > 1)
    raise ValueError(f'the key {twice!r} stands twice in one object')
  return found


def parse(text, name, line=0):
  """JSON, with errors at `line`, or at the line in `text` if it is 0."""
  try:
    return json.loads(text, object_pairs_hook=_unique)
  except json.JSONDecodeError as error:
    hint = ''
    if not line and error.msg == 'Extra data':
      hint = ' (one object a line? name the file .jsonl)'
    raise InputError(f'{name}:{line or error.lineno}:{error.colno}: bad JSON: {error.msg}{hint}') from error
  except (ValueError, RecursionError) as error:
    at = f'{name}:{line}' if line else name
    raise InputError(f'{at}: bad JSON: {error}') from error


def _jsonl(path, name):
  for number, line in _lines(path, name):
    if line.strip():
      yield number, parse(decode(line, name, number), name, number)


def _json(path, name):
  data = _bytes(path, name)
  if not data.strip():
    raise InputError(f'{name}: is empty')
  rows = parse(decode(data, name, 1), name)
  if not isinstance(rows, list):
    raise InputError(f'{name}: holds one {type(rows).__name__}, must be a list of objects')
  yield from enumerate(rows)


def _txt(path, name):
  """Documents between <|endoftext|>, else paragraphs between blank lines."""
  text = decode(_bytes(path, name), name, 1).replace('\r\n', '\n')
  separator = _SEPARATOR if _SEPARATOR in text else '\n\n'
  line = 1
  for part in text.split(separator):
    if part.strip():
      lead = len(part) - len(part.lstrip('\n'))
      yield line + lead, {'text': part.strip()}
    line += part.count('\n') + separator.count('\n')


def _parquet(path, name):
  lib, parquet = import_parquet(name)
  try:
    with path.open('rb') as file:
      yield from _batches(parquet.ParquetFile(file).iter_batches(1024))
  except (lib.ArrowException, OSError) as error:
    raise damaged(name, 'parquet', error) from error


def _arrow(path, name):
  """Arrow files as `datasets` writes them (streams)."""
  try:
    import pyarrow
  except ImportError as error:
    raise InputError(f'{name}: reading arrow needs pyarrow: {_EXTRA}') from error
  try:
    with path.open('rb') as file:
      yield from _batches(pyarrow.ipc.open_stream(file))
  except (pyarrow.lib.ArrowException, OSError) as error:
    raise damaged(name, 'arrow', error) from error


def _batches(batches):
  number = 0
  for batch in batches:
    for row in batch.to_pylist():
      yield number, row
      number += 1


def _array_record(path, name):
  module = import_array_record(name)
  try:
    reader = module.ArrayRecordReader(str(path))
    records = reader.read_all() if reader.num_records() else []
    reader.close()
  except (RuntimeError, ValueError, OSError, IndexError) as error:
    raise damaged(name, 'ArrayRecord', error) from error
  for number, record in enumerate(records):
    at = f'{name}[{number}]'
    yield number, parse(decode(record, at, 1), at)


def import_parquet(name):
  """pyarrow's modules lib and parquet, to read the file `name`."""
  try:
    from pyarrow import lib, parquet
  except ImportError as error:
    raise InputError(f'{name}: reading parquet needs pyarrow: {_EXTRA}') from error
  return lib, parquet


def import_array_record(name):
  """The module of array_record, to read the file `name`."""
  try:
    from array_record.python import array_record_module
  except ImportError as error:
    raise InputError(f'{name}: reading ArrayRecord needs array_record: {_EXTRA}') from error
  return array_record_module


def damaged(name, what, error):
  """The error of a file that a library could not read."""
  first = (str(error).strip() or type(error).__name__).splitlines()[0]
  return InputError(f'{name}: damaged or unreadable {what} file: {first}')
