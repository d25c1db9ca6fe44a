"""Finds the files of a data source, in a folder with splits or on the hub, and opens each by its format.

An entry of `FORMATS` adds a format to everything that reads data: files, folders and hub data sets, streamed or not.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from etils import epath

from jaxpost.data import files
from jaxpost.errors import InputError
from jaxpost.storage import object_store

if TYPE_CHECKING:
  from jaxpost.data import lazy


class Format(NamedTuple):
  """How files with one suffix are read."""

  read: Callable[[epath.Path, str], files.NumberedRows]  # (path, name in errors) -> numbered rows
  mark: str  # ':' if rows are numbered by lines from 1, '[' if by entries from 0
  gzip: bool = False  # whether the suffix may be followed by .gz
  random_access: str = ''  # the class of `lazy.py` that reads single rows; '' if it cannot be streamed


def _reader(reader: str, path: epath.Path, name: str) -> files.NumberedRows:
  from jaxpost.data import file_readers

  return getattr(file_readers, reader)(path, name)


FORMATS = {
  '.jsonl': Format(files.jsonl, ':', gzip=True, random_access='Lines'),
  '.json': Format(files.json_list, '[', gzip=True),
  '.txt': Format(files.txt, ':', gzip=True),
  '.csv': Format(functools.partial(_reader, 'comma_separated'), ':', gzip=True),
  '.tsv': Format(functools.partial(_reader, 'tab_separated'), ':', gzip=True),
  '.parquet': Format(functools.partial(_reader, 'parquet'), '[', random_access='Parquet'),
  '.array_record': Format(functools.partial(_reader, 'array_record'), '[', random_access='ArrayRecord'),
  '.arrow': Format(functools.partial(_reader, 'arrow'), '['),
}
NAMES = ', '.join(FORMATS)
# Patterns of the files to download from a data set on the hub.
PATTERNS = tuple(f'*{suffix}{end}' for suffix, f in FORMATS.items() for end in ('', '.gz')[: 1 + f.gzip])
_METADATA = ('dataset_info.json', 'dataset_infos.json', 'dataset_dict.json', 'state.json')
_SPLIT_WORDS = {
  **dict.fromkeys(('train', 'training'), 'train'),
  **dict.fromkeys(('test', 'testing'), 'test'),
  **dict.fromkeys(('validation', 'valid', 'val', 'dev', 'eval'), 'validation'),
}


def find(name: str) -> Format | None:
  """Returns the format of a file by its name; None if it is unknown."""
  name = name.lower()
  uncompressed = name.removesuffix('.gz')
  format_ = next((FORMATS[suffix] for suffix in FORMATS if uncompressed.endswith(suffix)), None)
  if format_ is None or (uncompressed != name and not format_.gzip):
    return None
  return format_


def find_files(path: str) -> list[tuple[epath.Path, str]]:
  """Returns the files of a source, each with its name for errors."""
  local = epath.Path(path).expanduser()
  if local.exists():
    return _find_local(local, path, '')
  folder, _, split = path.rpartition(':')
  if folder and epath.Path(folder).expanduser().is_dir():
    return _find_local(epath.Path(folder).expanduser(), folder, split)
  from jaxpost.storage import hub

  on_hub = hub.parse(path)
  if on_hub is None or (find(path) and not on_hub[2]):
    raise _missing(local, path)
  repo, revision, file_or_split = on_hub
  is_file = bool(find(file_or_split))
  downloaded = epath.Path(hub.download(repo, 'dataset', revision, file_or_split if is_file else '', PATTERNS))
  if is_file:
    return [(downloaded, path)]
  return _find_local(downloaded, path, file_or_split)


def _find_local(local: epath.Path, path: str, split: str) -> list[tuple[epath.Path, str]]:
  if not local.is_dir():
    return [(local, path)]
  if (local / 'dataset_dict.json').exists():
    names = object_store.read_json(local / 'dataset_dict.json').get('splits', [])
    split = _choose(split, names, path)
    local, split = local / split, ''
  if (local / 'state.json').exists():
    state = object_store.read_json(local / 'state.json')
    if split:  # the folder is a single split, which may have a name
      _choose(split, [name for name in (state.get('_split'),) if name], path)
    data_files = [local / file['filename'] for file in state.get('_data_files', [])]
  else:
    data_files = _data_files(local)
    split_of = {}  # file -> the split that a word in its path names; '' if there is none
    for file in data_files:
      words = re.split(r'[^A-Za-z]+', '/'.join(file.relative_to(local).parts).lower())
      split_of[file] = next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), '')
    splits = sorted(set(split_of.values()) - {''})
    if split or len(splits) > 1:
      split = _choose(split, splits, path)
      data_files = [file for file in data_files if split_of[file] == split]
  if not data_files:
    names = ', '.join(sorted(f.name for f in local.iterdir())[:8])
    raise InputError(f'{path}: no data in this folder ({NAMES}); it has {names or "nothing"}')
  return [(file, str(file)) for file in data_files]


def _data_files(folder: epath.Path) -> list[epath.Path]:
  """Returns the data files below a folder, sorted, without metadata."""
  data_files = []
  for path in sorted(folder.iterdir()):
    if path.name.startswith('.'):
      continue
    if path.is_dir():
      data_files += _data_files(path)
    elif find(path.name) and path.name not in _METADATA:
      data_files.append(path)
  return data_files


def _choose(split: str, names: list[str], path: str) -> str:
  if split in names:
    return split
  if not split and len(names) == 1:
    return names[0]
  listed = ', '.join(names) or 'none'
  if split:
    raise InputError(f'{path}: has no split {split!r}; it has {listed}')
  if not names:
    raise InputError(f'{path}: has no splits')
  raise InputError(
    f'{path}: has the splits {listed}; name one, e.g. {path}:{"train" if "train" in names else names[0]}'
  )


def _missing(local: epath.Path, path: str) -> InputError:
  folder = local.parent
  if not folder.is_dir():
    return InputError(f'{path}: no such file, nor is there a folder {folder}')
  names = {file.name.partition('.')[0]: file.name for file in sorted(folder.iterdir())}  # by stems: suffixes are alike
  stem = local.name.partition('.')[0]
  near = difflib.get_close_matches(stem, names, 1)
  hint = f'; did you mean {folder / names[near[0]]}?' if near else f', and no similar name in {folder}'
  return InputError(f'{path}: no such file{hint}')


def open_file(path: epath.Path, name: str) -> tuple[str, files.NumberedRows]:
  """Returns (prefix of the places of rows, iterator of (number, row)) of one file; `name` is its name in errors."""
  format_ = find(path.name)
  if format_ is None:
    zipped = [suffix for suffix, f in FORMATS.items() if f.gzip]
    raise InputError(f'{name}: unknown format; data is {NAMES} ({", ".join(zipped)} also .gz) or a folder of them')
  return name + format_.mark, format_.read(path, name)


def open_streaming(paths: list[tuple[epath.Path, str]]) -> list[lazy.RandomAccess]:
  """Opens files, given as (path, name in errors), whose rows are read on access."""
  from jaxpost.data import lazy

  caches = lazy.Caches()
  opened = []
  for path, name in paths:
    format_ = find(path.name)
    if format_ is None or not format_.random_access or path.name.lower().endswith('.gz'):
      streamable = [suffix for suffix, f in FORMATS.items() if f.random_access]
      raise InputError(
        f'{name}: cannot be streamed; convert it to {", ".join(streamable)}, or turn config.data.streaming off'
      )
    opened.append(getattr(lazy, format_.random_access)(path, name, caches))
  return opened
