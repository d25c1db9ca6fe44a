"""Reads whole text files into numbered rows, with errors that name file, line and column.

The place of a row is (prefix, number): ('a.jsonl:', 12) is printed as 'a.jsonl:12', a line counted from 1, and
('a.parquet[', 12) as 'a.parquet[12]', counted from 0. Each reader takes a path and the name of the file for errors;
`source_files.FORMATS` has the reader of each suffix.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

from etils import epath

from jaxpost.errors import InputError

_SEPARATOR = '<|endoftext|>'
NumberedRows = Iterator[tuple[int, Any]]


def _lines(path: epath.Path, name: str) -> Iterator[tuple[int, bytes]]:
  """Yields (line number, bytes) of each line of a file, which may be gzipped."""
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
  """Returns the text of a file, which may be gzipped."""
  return decode(b''.join(line for _, line in _lines(path, name)), name, 1)


def decode(data: bytes, name: str, first_line: int) -> str:
  """Decodes UTF-8; `first_line` is the line number of the beginning of the data, for errors."""
  try:
    return data.decode('utf-8')
  except UnicodeDecodeError as error:
    before = data[: error.start]
    line = first_line + before.count(b'\n')
    column = error.start - before.rfind(b'\n')
    raise InputError(f'{name}:{line}:{column}: not UTF-8 (byte 0x{data[error.start]:02x})') from error


def _unique(pairs: list[tuple[str, Any]]) -> dict:
  """Returns a dict of the pairs; raises ValueError for repeated keys, of which `json` would keep only the last."""
  unique = dict(pairs)
  if len(unique) < len(pairs):
    keys = [k for k, _ in pairs]
    repeated = next(k for k in keys if keys.count(k) > 1)
    raise ValueError(f'the key {repeated!r} is in one object twice')
  return unique


def parse(text: str, name: str, line: int = 0) -> Any:
  """Parses JSON; errors name `line`, or the line within `text` if it is 0."""
  try:
    return json.loads(text, object_pairs_hook=_unique)
  except json.JSONDecodeError as error:
    may_be_lines = not line and error.msg == 'Extra data'
    hint = ' (if there is one object per line, name the file .jsonl)' if may_be_lines else ''
    raise InputError(f'{name}:{line or error.lineno}:{error.colno}: bad JSON: {error.msg}{hint}') from error
  except (ValueError, RecursionError) as error:
    at = f'{name}:{line}' if line else name
    raise InputError(f'{at}: bad JSON: {error}') from error


def jsonl(path: epath.Path, name: str) -> NumberedRows:
  """Yields a row for each line that is not blank."""
  for number, line in _lines(path, name):
    if line.strip():
      yield number, parse(decode(line, name, number), name, number)


def json_list(path: epath.Path, name: str) -> NumberedRows:
  """Yields the elements of a file that contains one JSON list."""
  text = whole_text(path, name)
  if not text.strip():
    raise InputError(f'{name}: is empty')
  rows = parse(text, name)
  if not isinstance(rows, list):
    raise InputError(f'{name}: holds one {type(rows).__name__}, must be a list of objects')
  yield from enumerate(rows)


def txt(path: epath.Path, name: str) -> NumberedRows:
  """Yields the documents between <|endoftext|> or, if there is none, the paragraphs between blank lines."""
  text = whole_text(path, name).replace('\r\n', '\n')
  separator = _SEPARATOR if _SEPARATOR in text else '\n\n'
  line = 1
  for part in text.split(separator):
    if part.strip():
      lead = len(part) - len(part.lstrip('\n'))
      yield line + lead, {'text': part.strip()}
    line += part.count('\n') + separator.count('\n')
