"""Readers of parquet, Arrow and ArrayRecord files, whole; `files.py` says what a reader is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from jaxpost.data import files
from jaxpost.errors import InputError

if TYPE_CHECKING:
  from types import ModuleType

  from etils import epath

PARQUET = 'pyarrow', 'pyarrow.lib', 'pyarrow.parquet'
ARRAY_RECORD = 'array_record.python', 'array_record.python.array_record_module'
_EXTRA = "pip install -e '.[data]'"


def parquet(path: epath.Path, name: str) -> files.NumberedRows:
  """Yields the rows of a parquet file."""
  _, lib, module = import_reader(name, 'parquet', *PARQUET)
  try:
    with path.open('rb') as file:
      yield from _batches(module.ParquetFile(file).iter_batches(1024), name)
  except (lib.ArrowException, OSError) as error:
    raise damaged(name, 'parquet', error) from error


def arrow(path: epath.Path, name: str) -> files.NumberedRows:
  """Yields the rows of an Arrow stream, which is what `datasets` writes."""
  (pyarrow,) = import_reader(name, 'arrow', 'pyarrow')
  try:
    with path.open('rb') as file:
      yield from _batches(pyarrow.ipc.open_stream(file), name)
  except (pyarrow.lib.ArrowException, OSError) as error:
    raise damaged(name, 'arrow', error) from error


def _batches(batches: Iterable[Any], name: str) -> files.NumberedRows:
  number = 0
  for batch in batches:
    for row in rows_of(batch, name):
      yield number, row
      number += 1


def rows_of(table: Any, name: str) -> list[dict[str, Any]]:
  """Returns the rows of an Arrow table or batch of the file `name`.

  JSON is parsed where the schema says that a value is JSON: `datasets` 5 writes messages and schemas of tools so if the
  arguments of calls differ. The nulls in calls and schemas of tools are left out: all objects of a list have the same
  keys in a columnar file, so that a call has the arguments of the others, as nulls.
  """
  parsers = {field.name: parser for field in table.schema if (parser := _json_parser(field, name))}
  rows = table.to_pylist()
  for row in rows:
    for column, value in row.items():
      if column in parsers:
        value = parsers[column](value)
      row[column] = [_own_keys(x) for x in value] if isinstance(value, list) else value
  return rows


def _json_parser(field: Any, name: str) -> Callable[[Any], Any] | None:
  """Returns a function that parses all JSON in a value of an Arrow field, None for a field that has none.

  A pyarrow that does not know the type for JSON reads text, with the name of the type in the metadata of the field.
  """
  kind = field.type
  named = getattr(kind, 'extension_name', '') or (field.metadata or {}).get(b'ARROW:extension:name', b'').decode()
  if named == 'arrow.json':
    return lambda text: None if text is None else files.parse(text, name)
  parts = [kind.field(n) for n in range(kind.num_fields)]
  parsers = {part.name: parser for part in parts if (parser := _json_parser(part, name))}
  if not parsers or hasattr(kind, 'key_field'):  # maps are pairs in Python, and no column that is read is one
    return None
  if hasattr(kind, 'value_field'):
    (parser,) = parsers.values()
    return lambda items: items and [parser(item) for item in items]
  return lambda item: item and item | {key: parser(item.get(key)) for key, parser in parsers.items()}


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


def array_record(path: epath.Path, name: str) -> files.NumberedRows:
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
    yield number, files.parse(files.decode(record, at, 1), at)


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
