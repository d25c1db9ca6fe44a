"""Copies files between object stores (gs://, s3://) and this host."""

import atexit
import functools
import pathlib
import shutil
import tempfile
from typing import Any

from etils import epath
from fsspec import caching

from jaxpost.storage import object_store

_CHUNK = 1 << 22  # bytes copied at a time


def folder() -> pathlib.Path:
  """Makes a folder on this host that is removed when the process ends."""
  path = tempfile.mkdtemp(prefix='jaxpost-')
  atexit.register(shutil.rmtree, path, ignore_errors=True)
  return pathlib.Path(path)


def exactly(file: Any) -> Any:
  """Returns an open file with its read-ahead turned off: fsspec reads 5 MB more at every seek."""
  if cache := getattr(file, 'cache', None):
    file.cache = caching.BaseCache(cache.blocksize, cache.fetcher, cache.size)
  return file


def upload(source: epath.PathLike, target: epath.PathLike, last: str = '') -> None:
  """Copies all files below a local folder to an object store; the file named `last` is copied last."""
  for name in sorted(object_store.files(source), key=lambda name: (name == last, name)):
    _copy(epath.Path(source) / name, epath.Path(target) / name)


def download(source: epath.PathLike, target: epath.PathLike, leave_out: str = '') -> None:
  """Copies files from a folder of an object store to a local one, without those whose names begin with `leave_out`."""
  for name in object_store.files(source):
    if not (leave_out and name.startswith(leave_out)):
      _copy(epath.Path(source) / name, epath.Path(target) / name)


def _copy(source: epath.Path, target: epath.Path | pathlib.Path) -> None:
  target.parent.mkdir(parents=True, exist_ok=True)
  with source.open('rb') as a, target.open('wb') as b:
    shutil.copyfileobj(a, b, _CHUNK)


@functools.cache
def here(path: str, names: tuple[str, ...]) -> pathlib.Path:
  """Returns a local folder with copies of those of the named files that the remote folder has."""
  local = folder()
  for name in names:
    if (epath.Path(path) / name).exists():
      _copy(epath.Path(path) / name, local / name)
  return local
