"""Files and folders, local ones and those on gs:// and s3://, and errors of the system about them in one line.

Object stores have neither append nor rename: files that grow are kept on this host and
uploaded; a file written at once appears as a whole or not at all.
"""

import contextlib
import errno
import functools
import json
import math
import os
import pathlib
import socket
import zlib
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import Any

from etils import epath

from jaxpost.errors import InputError, NoRoomError

_EXTRAS = {'gs': 'gcs', 's3': 's3'}  # scheme -> extra of this library
_PIECE = 1 << 18  # bytes that a checksum takes at a time: loading and exporting keep little of a file on the host
_READERS = 8  # files read at a time; crc32 releases the GIL
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_TEXTS = ('No space left on device', 'Disk quota exceeded')  # in what C++ libraries raise
# A path that cannot be what it is used for.
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_PATH = (*_NO_ACCESS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)


def is_remote(path: epath.PathLike) -> bool:
  """True for URLs such as gs://bucket/name."""
  return '://' in os.fspath(path)


def resolved(path: epath.PathLike) -> str:
  """Returns the absolute path, or the URL."""
  # epath would take 'gs:' for a folder.
  return str(path if is_remote(path) else epath.Path(path).resolve())


@functools.cache
def check(path: str, key: str) -> None:
  """Raises InputError if `path` is on an object store that cannot be reached.

  Args:
    key: field of the config that named the path, for the error.
  """
  scheme, remote, _ = path.partition('://')
  if not remote:
    return
  if scheme not in _EXTRAS:
    raise InputError(f'{key}: {path}: of object stores, gs:// and s3:// are known; copy it to a local folder')
  try:
    epath.Path(path).exists()
  except ImportError as e:
    raise InputError(
      f"{key}: {path}: needs the extra [{_EXTRAS[scheme]}]: pip install -e '.[{_EXTRAS[scheme]}]' ({e})"
    ) from e
  except OSError as e:
    raise InputError(f'{key}: {path}: cannot be reached: {e}') from e


def write(path: epath.PathLike, data: bytes) -> None:
  """Writes a whole file, atomically: a reader sees the old file or the new, also after a loss of power."""
  path = epath.Path(path)
  if is_remote(path):
    path.write_bytes(data)
    return
  make_folder(path.parent)
  draft = path.parent / (f'.{path.name}.{socket.gethostname()}.{os.getpid()}.tmp')
  draft.write_bytes(data)
  sync(draft)
  try:
    draft.replace(path)
  except OSError:  # such as a folder of this name
    draft.unlink()
    raise
  sync(path.parent)


def make_folder(path: epath.PathLike) -> None:
  """Makes a folder and those above it, which outlive a loss of power."""
  path = epath.Path(path)
  missing = [] if is_remote(path) else [p for p in (path, *path.parents) if not p.exists()]
  path.mkdir(parents=True, exist_ok=True)
  for folder in missing:
    sync(folder.parent)


def sync(path: epath.PathLike) -> None:
  """Waits until a local file, or the list of files of a folder, is on the disk (fsync)."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  except OSError as error:
    if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such operation
      raise
  finally:
    os.close(handle)


def sync_all(folder: epath.PathLike) -> None:
  """Waits until a local folder and all that is in it are on the disk."""
  for parent, _, names in os.walk(folder, topdown=False):
    for name in names:
      sync(os.path.join(parent, name))
    sync(parent)


def write_text(path: epath.PathLike, text: str) -> None:
  """Writes `text` as UTF-8, atomically: a reader sees the old file or the new.

  A lone surrogate becomes \\udXXX, which is its JSON spelling, too.
  """
  write(path, text.encode('utf-8', 'backslashreplace'))


def add_line(path: epath.PathLike, line: str) -> None:
  """Adds a line to a text file, atomically; makes a file that is not there."""
  path = epath.Path(path)
  old = path.read_text() if path.exists() else ''
  write_text(path, f'{old}{line}\n')


def files(folder: epath.PathLike, parent: str = '') -> list[str]:
  """Returns the names of all files below a folder, sorted; none where there is no folder."""
  names: list[str] = []
  folder = epath.Path(folder)  # `parent` is a folder below it, in the names that are returned
  for path in (folder / parent).iterdir() if folder.exists() else ():
    name = f'{parent}/{path.name}' if parent else path.name
    names += files(folder, name) if path.is_dir() else [name]
  return sorted(names)


def checksums(folder: epath.PathLike, names: Iterable[str]) -> dict[str, list[int]]:
  """Returns {name: [bytes, crc32]} of files below a folder, read in parallel."""
  with futures.ThreadPoolExecutor(_READERS) as pool:
    return dict(zip(names, pool.map(lambda name: checksum(epath.Path(folder) / name), names)))


def checksum(path: epath.PathLike, most: float = math.inf) -> list[int]:
  """Returns [bytes, crc32] of a file, or of its first `most` bytes."""
  size = crc = 0
  with epath.Path(path).open('rb') as file:
    while chunk := file.read(int(min(_PIECE, most - size))):
      size += len(chunk)
      crc = zlib.crc32(chunk, crc)
  return [size, crc]


def read_json(path: epath.Path | pathlib.Path) -> dict[str, Any]:
  """Reads a JSON file that holds one object."""
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except json.JSONDecodeError as e:
    raise InputError(f'{path}:{e.lineno}:{e.colno}: bad JSON: {e.msg}; copy or download it again') from e
  except (ValueError, OSError) as e:  # no UTF-8, or an integer of more digits than Python reads
    raise InputError(f'{path}: unreadable ({e}); copy or download it again') from e
  except RecursionError as e:
    raise InputError(f'{path}: bad JSON: nested too deeply; copy or download it again') from e
  if not isinstance(value, dict):
    raise InputError(f'{path}: not a JSON object; copy or download it again')
  return value


def write_json(path: epath.Path | pathlib.Path, value: Any) -> None:
  """Writes indented JSON."""
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')


def is_no_room(error: BaseException | None) -> bool:
  """Returns whether an error says that a disk, or a quota, is full."""
  return getattr(error, 'errno', None) in _NO_ROOM or any(text in str(error) for text in _NO_ROOM_TEXTS)


@contextlib.contextmanager
def explained(where: str = 'a file') -> Iterator[None]:
  """Raises NoRoomError where a disk is full, and InputError where a path cannot be read or written.

  where: begins the message if an error does not name its file.
  """
  try:
    yield
  except (NoRoomError, InputError):
    raise
  except (OSError, RuntimeError, ValueError) as error:
    notes, named = ' '.join(getattr(error, '__notes__', ())), getattr(error, 'filename', None)
    where = named or notes or where
    if is_no_room(error):
      raise NoRoomError(
        f'{where}: no room on the disk, or in the quota; what was saved before is good: make room and run the '
        'same command again'
      ) from error
    if isinstance(error, (IsADirectoryError, NotADirectoryError)) and not named:  # as etils raises them
      raise InputError(f'{error}; name another path') from error
    if getattr(error, 'errno', None) in _PATH and named:
      raise InputError(f'{where}: {error.strerror}; name another path, or change its permissions') from error
    raise
