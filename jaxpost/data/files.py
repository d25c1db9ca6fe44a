"""Readers of whole files: numbered rows, with errors that name file, line and column.

A row's place is (prefix, number): ('a.jsonl:', 12) reads 'a.jsonl:12', a line counted from 1; ('a.parquet[', 12) reads
'a.parquet[12]', counted from 0. Each reader takes a path and the name of the file in errors; `file_formats.FORMATS` has
the reader of each suffix.
"""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError

if TYPE_CHECKING:
  from types import ModuleType

  from etils import epath

_SEPARATOR = '<|endoftext|>'
PARQUET = 'pyarrow', 'pyarrow.lib', 'pyarrow.parquet'
ARRAY_RECORD = 'array_record.python', 'array_record.python.array_record_module'
_EXTRA = "pip install 'jaxpost[data]'"
NumberedRows = Iterator[tuple[int, Any]]


def _lines(path: epath.Path, name: str) -> Iterator[tuple[int, bytes]]:
  """Yields (line number, bytes) of a file that may be gzipped."""
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


def whole_text(path: epath.Path, name: str) -> str:
  """Returns the text of a file that may be gzipped."""
  return decode(b''.join(line for _, line in _lines(path, name)), name, 1)


def decode(data: bytes, name: str, first_line: int) -> str:
  """Decodes UTF-8; errors count lines from `first_line`."""
  try:
    return data.decode('utf-8')
  except UnicodeDecodeError as error:
    before = data[: error.start]
    line = first_line + before.count(b'\n')
    column = error.start - before.rfind(b'\n')
    raise InputError(f'{name}:{line}:{column}: not UTF-8 (byte 0x{data[error.start]:02x})') from error


def _unique(pairs: list[tuple[str, Any]]) -> dict:
  """Returns a dict; ValueError for equal keys, which would silently lose a value."""
  found = dict(pairs)
  if len(found) < len(pairs):
    keys = [k for k, _ in pairs]
    twice = next(k for k in keys if keys.count(k) > 1)
    raise ValueError(f'the key {twice!r} stands twice in one object')
  return found


def parse(text: str, name: str, line: int = 0) -> Any:
  """Parses JSON; errors name `line`, or the line within `text` if it is 0."""
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


def jsonl(path: epath.Path, name: str) -> NumberedRows:
  """Yields one row for each line that is not blank."""
  for number, line in _lines(path, name):
    if line.strip():
      yield number, parse(decode(line, name, number), name, number)


def json_list(path: epath.Path, name: str) -> NumberedRows:
  """Yields the elements of a file that is one JSON list."""
  text = whole_text(path, name)
  if not text.strip():
    raise InputError(f'{name}: is empty')
  rows = parse(text, name)
  if not isinstance(rows, list):
    raise InputError(f'{name}: holds one {type(rows).__name__}, must be a list of objects')
  yield from enumerate(rows)


def txt(path: epath.Path, name: str) -> NumberedRows:
  """Yields the documents between <|endoftext|>, else the paragraphs between blank lines."""
  text = whole_text(path, name).replace('\r\n', '\n')
  separator = _SEPARATOR if _SEPARATOR in text else '\n\n'
  line = 1
  for part in text.split(separator):
    if part.strip():
      lead = len(part) - len(part.lstrip('\n'))
      yield line + lead, {'text': part.strip()}
    line += part.count('\n') + separator.count('\n')


def parquet(path: epath.Path, name: str) -> NumberedRows:
  """Yields the rows of a parquet file."""
  _, lib, module = import_reader(name, 'parquet', *PARQUET)
  try:
    with path.open('rb') as file:
      yield from _batches(module.ParquetFile(file).iter_batches(1024))
  except (lib.ArrowException, OSError) as error:
    raise damaged(name, 'parquet', error) from error


def arrow(path: epath.Path, name: str) -> NumberedRows:
  """Yields the rows of an Arrow stream, which is what `datasets` writes."""
  (pyarrow,) = import_reader(name, 'arrow', 'pyarrow')
  try:
    with path.open('rb') as file:
      yield from _batches(pyarrow.ipc.open_stream(file))
  except (pyarrow.lib.ArrowException, OSError) as error:
    raise damaged(name, 'arrow', error) from error


def _batches(batches: Iterable[Any]) -> NumberedRows:
  number = 0
  for batch in batches:
    for row in batch.to_pylist():
      yield number, without_filled_in(row)
      number += 1


def without_filled_in(row: dict[str, Any]) -> dict[str, Any]:
  """Returns a row of a columnar file without the nulls in calls and schemas of tools.

  All objects of a list have the same keys there: a call has the arguments of the others, as nulls.
  """
  return {k: [_own_keys(x) for x in value] if isinstance(value, list) else value for k, value in row.items()}


def _own_keys(item: Any) -> Any:
  """Returns a message with its calls, or a tool, without nulls."""
  if isinstance(item, dict) and isinstance(item.get('tool_calls'), list):
    return item | {'tool_calls': _without_nulls(item['tool_calls'])}
  is_tool = isinstance(item, dict) and isinstance(item.get('function'), dict)
  return _without_nulls(item) if is_tool else item


def _without_nulls(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: _without_nulls(x) for k, x in value.items() if x is not None}
  return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def array_record(path: epath.Path, name: str) -> NumberedRows:
  """Yields the records of an ArrayRecord file, each JSON."""
  _, module = import_reader(name, 'ArrayRecord', *ARRAY_RECORD)
  try:
    reader = module.ArrayRecordReader(str(path))
    records = reader.read_all() if reader.num_records() else []
    reader.close()
  except (RuntimeError, ValueError, OSError, IndexError) as error:
    raise damaged(name, 'ArrayRecord', error) from error
  for number, record in enumerate(records):
    at = f'{name}[{number}]'
    yield number, parse(decode(record, at, 1), at)


def import_reader(name: str, kind: str, *modules: str) -> list[ModuleType]:
  """Returns modules of the library that reads files of a kind, for the file `name`."""
  try:
    return [importlib.import_module(module) for module in modules]
  except ImportError as error:
    raise InputError(f'{name}: reading {kind} needs {modules[0].partition(".")[0]}: {_EXTRA}') from error


def damaged(name: str, what: str, error: Exception) -> InputError:
  """Returns the error of a file that a library could not read."""
  first = (str(error).strip() or type(error).__name__).splitlines()[0]
  return InputError(f'{name}: damaged or unreadable {what} file: {first}')
