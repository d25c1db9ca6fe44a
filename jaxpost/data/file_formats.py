"""The table of file formats: one entry here adds a format to everything that reads data.

That is `sources.read` of files, folders and hub data sets, whole or streaming.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from jaxpost.data import files
from jaxpost.errors import InputError

if TYPE_CHECKING:
  from etils import epath

  from jaxpost.data import lazy


class Format(NamedTuple):
  """How files with one suffix are read."""

  read: Callable[[epath.Path, str], files.NumberedRows]  # (path, name in errors) -> numbered rows
  mark: str  # ':' if rows are numbered by lines from 1, '[' if by entries from 0
  gzip: bool = False  # may have .gz behind its suffix
  random_access: str = ''  # the class of `lazy.py` that reads single rows, for streaming


def _delimited(delimiter: str, path: epath.Path, name: str) -> files.NumberedRows:
  from jaxpost.data import delimited

  return delimited.read(path, name, delimiter)


def _binary(reader: str, path: epath.Path, name: str) -> files.NumberedRows:
  from jaxpost.data import binary_files

  return getattr(binary_files, reader)(path, name)


FORMATS = {
  '.jsonl': Format(files.jsonl, ':', gzip=True, random_access='Lines'),
  '.json': Format(files.json_list, '[', gzip=True),
  '.txt': Format(files.txt, ':', gzip=True),
  '.csv': Format(functools.partial(_delimited, ','), ':', gzip=True),
  '.tsv': Format(functools.partial(_delimited, '\t'), ':', gzip=True),
  '.parquet': Format(functools.partial(_binary, 'parquet'), '[', random_access='Parquet'),
  '.array_record': Format(functools.partial(_binary, 'array_record'), '[', random_access='ArrayRecord'),
  '.arrow': Format(functools.partial(_binary, 'arrow'), '['),
}
NAMES = ', '.join(FORMATS)
# Files to download of a data set on the hub.
PATTERNS = tuple(f'*{suffix}{end}' for suffix, f in FORMATS.items() for end in ('', '.gz')[: 1 + f.gzip])
_METADATA = ('dataset_info.json', 'dataset_infos.json', 'dataset_dict.json', 'state.json')


def find(name: str) -> Format | None:
  """Returns the format of a file by its name, None if there is none."""
  name = name.lower()
  plain = name.removesuffix('.gz')
  found = next((FORMATS[suffix] for suffix in FORMATS if plain.endswith(suffix)), None)
  if found is None or (plain != name and not found.gzip):
    return None
  return found


def data_files(folder: epath.Path) -> list[epath.Path]:
  """Returns the data files below a folder, sorted, without metadata."""
  found = []
  for path in sorted(folder.iterdir()):
    if path.name.startswith('.'):
      continue
    if path.is_dir():
      found += data_files(path)
    elif find(path.name) and path.name not in _METADATA:
      found.append(path)
  return found


def open_file(path: epath.Path, name: str) -> tuple[str, files.NumberedRows]:
  """Returns (prefix of the places of rows, iterator of (number, row)) of one file.

  Args:
    name: what to call it in errors.
  """
  found = find(path.name)
  if found is None:
    zipped = [suffix for suffix, f in FORMATS.items() if f.gzip]
    raise InputError(f'{name}: unknown format; data is {NAMES} ({", ".join(zipped)} also .gz) or a folder of them')
  return name + found.mark, found.read(path, name)


def open_streaming(paths: list[tuple[epath.Path, str]]) -> list[lazy.RandomAccess]:
  """Opens files, given as (path, name in errors), whose rows are read when they are asked for."""
  from jaxpost.data import lazy

  caches = lazy.Caches()
  opened = []
  for path, name in paths:
    found = find(path.name)
    if found is None or not found.random_access or path.name.lower().endswith('.gz'):
      able = [suffix for suffix, f in FORMATS.items() if f.random_access]
      raise InputError(
        f'{name}: cannot be read with streaming, only {", ".join(able)}; make it one of them, or turn streaming off'
      )
    opened.append(getattr(lazy, found.random_access)(path, name, caches))
  return opened
