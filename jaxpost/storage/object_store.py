"""Folders on gs:// and s3://: what they need, and how files get there whole.

Object stores have neither append nor rename. What grows is kept on this host
and uploaded; what is written at once is there whole or not at all.
"""

import atexit
import functools
import os
import pathlib
import shutil
import socket
import tempfile
import zlib
from concurrent import futures

from etils import epath
from fsspec import caching

from jaxpost.errors import InputError

_EXTRAS = {'gs': 'gcs', 's3': 's3'}  # scheme -> extra of this library
_CHUNK = 1 << 22  # bytes read at a time
_READERS = 8  # files read at a time; crc32 releases the GIL


def is_remote(path) -> bool:
  return '://' in os.fspath(path)


def resolved(path) -> str:
  """The path from the root on; epath would take gs: for a folder."""
  return str(path if is_remote(path) else epath.Path(path).resolve())


@functools.cache
def check(path: str, key: str):
  """InputError where an object store cannot be asked; `key` named the path."""
  scheme, remote, _ = path.partition('://')
  if not remote:
    return
  if scheme not in _EXTRAS:
    raise InputError(f'{key}: {path}: of object stores, gs:// and s3:// are known; copy it to a local folder')
  try:
    epath.Path(path).exists()
  except ImportError as e:
    raise InputError(
      f"{key}: {path}: needs the extra [{_EXTRAS[scheme]}]: pip install 'jaxpost[{_EXTRAS[scheme]}]' ({e})"
    ) from e
  except OSError as e:
    raise InputError(f'{key}: {path}: cannot be reached: {e}') from e


def write(path, data: bytes):
  """A whole file: readers see what was there, or this."""
  path = epath.Path(path)
  if is_remote(path):
    path.write_bytes(data)
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.parent / (f'.{path.name}.{socket.gethostname()}.{os.getpid()}.tmp')
  draft.write_bytes(data)
  draft.replace(path)


def write_text(path, text: str) -> None:
  """Writes `text` as UTF-8, atomically: a reader sees the old file or the new.

  A lone surrogate becomes \\udXXX, which is its JSON spelling, too.
  """
  write(path, text.encode('utf-8', 'backslashreplace'))


def files(folder, parent='') -> list[str]:
  """Names of all files below a folder."""
  names = []
  for path in (epath.Path(folder) / parent).iterdir():
    name = f'{parent}/{path.name}' if parent else path.name
    names += files(folder, name) if path.is_dir() else [name]
  return sorted(names)


def checksums(folder, names) -> dict:
  """{name: [bytes, crc32]} of files below a folder."""

  def checksum(name):
    size = crc = 0
    with (epath.Path(folder) / name).open('rb') as file:
      while chunk := file.read(_CHUNK):
        size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]

  with futures.ThreadPoolExecutor(_READERS) as pool:
    return dict(zip(names, pool.map(checksum, names)))


def folder() -> pathlib.Path:
  """A folder on this host that goes when the process ends."""
  made = tempfile.mkdtemp(prefix='jaxpost-')
  atexit.register(shutil.rmtree, made, ignore_errors=True)
  return pathlib.Path(made)


def exactly(file):
  """A file opened for reading that reads what is asked for, and not ahead.

  fsspec reads 5 MB more at every place.
  """
  if ahead := getattr(file, 'cache', None):
    file.cache = caching.BaseCache(ahead.blocksize, ahead.fetcher, ahead.size)
  return file


def upload(source, target, last: str = ''):
  """All files below a local folder; the one called `last` goes last."""
  for name in sorted(files(source), key=lambda name: (name == last, name)):
    _copy(epath.Path(source) / name, epath.Path(target) / name)


def download(source, target):
  """All files below a folder of a store, into a local one."""
  for name in files(source):
    _copy(epath.Path(source) / name, epath.Path(target) / name)


def _copy(source, target):
  target.parent.mkdir(parents=True, exist_ok=True)
  with source.open('rb') as a, target.open('wb') as b:
    shutil.copyfileobj(a, b, _CHUNK)


@functools.cache
def here(path: str, names: tuple[str, ...]) -> pathlib.Path:
  """A local folder with those of these files that a remote one has."""
  made = folder()
  for name in names:
    if (epath.Path(path) / name).exists():
      _copy(epath.Path(path) / name, made / name)
  return made
