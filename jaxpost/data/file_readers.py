"""Reads whole delimited, parquet, Arrow and ArrayRecord files; `files.py` describes the interface of a reader."""

import csv
import functools
import importlib
import io
from types import ModuleType
from typing import Any

from etils import epath

from jaxpost.data import files
from jaxpost.errors import InputError

PARQUET = 'pyarrow', 'pyarrow.lib', 'pyarrow.parquet'
ARRAY_RECORD = 'array_record.python', 'array_record.python.array_record_module'
_MAX_CHARACTERS = 1 << 30  # of a value in a table; the default of `csv` is shorter than some documents
_EXTRA = "pip install -e '.[data]'"


def delimited(path: epath.Path, name: str, delimiter: str) -> files.NumberedRows:
  """Yields (number of its first line, {column: text}) of each row of a table, whose first line names the columns.

  Values in double quotes may contain line breaks, the delimiter, and double quotes, each written twice (RFC 4180).
  """
  csv.field_size_limit(max(csv.field_size_limit(), _MAX_CHARACTERS))
  reader = csv.reader(io.StringIO(files.whole_text(path, name), newline=''), delimiter=delimiter, strict=True)
  header: list[str] = []
  line = 1
  try:
    for values in reader:
      first, line = line, reader.line_num + 1
      if not values:  # a blank line
        continue
      if not header:
        header = [column.strip() for column in values]
        if not all(header):
          raise InputError(f'{name}:{first}: a column has no name; the first line names all columns')
        if repeated := [column for column in header if header.count(column) > 1]:
          raise InputError(f'{name}:{first}: names the column {repeated[0]!r} twice')
      elif len(values) != len(header):
        raise InputError(
          f'{name}:{first}: has {len(values)} values, and the first line names {len(header)} columns; put values that '
          f'contain {delimiter!r} in double quotes'
        )
      else:
        yield first, dict(zip(header, values))
  except csv.Error as error:
    raise InputError(f'{name}:{line}: bad quotes: {error}') from error


comma_separated = functools.partial(delimited, delimiter=',')
tab_separated = functools.partial(delimited, delimiter='\t')


def parquet(path: epath.Path, name: str) -> files.NumberedRows:
  """Yields the rows of a parquet file."""
  _, lib, module = import_reader(name, 'parquet', *PARQUET)
  try:
    with path.open('rb') as file:
      batches = module.ParquetFile(file).iter_batches(1024)
      yield from enumerate(row for batch in batches for row in rows_of(batch, name))
  except (lib.ArrowException, OSError) as error:
    raise damaged(name, 'parquet', error) from error


def arrow(path: epath.Path, name: str) -> files.NumberedRows:
  """Yields the rows of an Arrow stream, the format that `datasets` writes."""
  (pyarrow,) = import_reader(name, 'arrow', 'pyarrow')
  try:
    with path.open('rb') as file:
      yield from enumerate(row for batch in pyarrow.ipc.open_stream(file) for row in rows_of(batch, name))
  except (pyarrow.lib.ArrowException, OSError) as error:
    raise damaged(name, 'arrow', error) from error


def rows_of(table: Any, name: str) -> list[dict[str, Any]]:
  """Returns the rows of an Arrow table or batch of the file `name`.

  JSON is parsed: `datasets` 5 writes messages and tool schemas as JSON if the arguments of calls differ. Nulls in calls
  and schemas are left out: without JSON, all objects of a list have the same keys, and null for those they lack.
  """
  rows = table.to_pylist()
  for field in table.schema:
    has_json = 'arrow.json' in str(field.type)
    for row in rows:
      value = _parsed(row[field.name], field.type, name) if has_json else row[field.name]
      row[field.name] = [_without_null_keys(x) for x in value] if isinstance(value, list) else value
  return rows


def _parsed(value: Any, kind: Any, name: str) -> Any:
  """Returns a value of an Arrow type with all JSON in it parsed."""
  if isinstance(value, str) and getattr(kind, 'extension_name', '') == 'arrow.json':
    return files.parse(value, name)
  if isinstance(value, list) and hasattr(kind, 'value_field'):
    return [_parsed(x, kind.value_type, name) for x in value]
  if isinstance(value, dict):
    return {key: _parsed(x, kind.field(key).type, name) for key, x in value.items()}
  return value


def _without_null_keys(item: Any) -> Any:
  """Returns a tool, or a message with its calls, without nulls."""
  if isinstance(item, dict) and isinstance(item.get('tool_calls'), list):
    return item | {'tool_calls': _without_nulls(item['tool_calls'])}
  is_tool = isinstance(item, dict) and isinstance(item.get('function'), dict)
  return _without_nulls(item) if is_tool else item


def _without_nulls(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: _without_nulls(x) for k, x in value.items() if x is not None}
  return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def array_record(path: epath.Path, name: str) -> files.NumberedRows:
  """Yields the records of an ArrayRecord file, each of which is JSON."""
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
  """Imports modules of the library that reads files of a kind; InputError if it is not installed."""
  try:
    return [importlib.import_module(module) for module in modules]
  except ImportError as error:
    raise InputError(f'{name}: reading {kind} needs {modules[0].partition(".")[0]}: {_EXTRA}') from error


def damaged(name: str, kind: str, error: Exception) -> InputError:
  """Returns the error for a file that a library could not read."""
  first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
  return InputError(f'{name}: damaged or unreadable {kind} file: {first_line}')
