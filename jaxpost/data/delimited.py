"""Reads .csv and .tsv tables: the first line names the columns, and all values are text.

Values in double quotes may contain line breaks, the delimiter, and double quotes, each written twice (RFC 4180).
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from jaxpost.data import files
from jaxpost.errors import InputError

if TYPE_CHECKING:
  from etils import epath

_MAX_CHARACTERS = 1 << 30  # of a value; the default of `csv` is shorter than some documents


def read(path: epath.Path, name: str, delimiter: str) -> files.NumberedRows:
  """Yields (number of its first line, {column: text}) of each row; InputError if a row has another number of values."""
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
