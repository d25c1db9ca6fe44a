"""Reads, writes and checks files and folders, local or on gs:// and s3://, and turns system errors into one line.

Object stores have neither append nor rename: files that grow are kept on this host and uploaded; a file that is
written in one call appears as a whole or not at all.
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
from collections.abc import Collection, Iterator
from concurrent import futures
from typing import Any

from etils import epath

from jaxpost.errors import InputError, NoRoomError

_EXTRAS = {'gs': 'gcs', 's3': 's3'}  # scheme -> extra of this library
_PIECE = 1 << 18  # bytes that a checksum reads at a time, so that little of a file is in host memory
_READERS = 8  # files read at a time; crc32 releases the GIL
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_TEXTS = ('No space left on device', 'Disk quota exceeded')  # parts of errors that C++ libraries raise
# Errors about a path that cannot be used as a file or a folder.
_PATH_ERRORS = (
  *(errno.EACCES, errno.EPERM, errno.EROFS),
  *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)


def is_remote(path: epath.PathLike) -> bool:
  """True for URLs such as gs://bucket/name."""
  return '://' in os.fspath(path)


def resolved(path: epath.PathLike) -> str:
  """Returns the absolute path, or the URL."""
  # `epath.Path.resolve` treats the 'gs:' of a URL as a folder.
  return str(path if is_remote(path) else epath.Path(path).resolve())


@functools.cache
def check(path: str, key: str) -> None:
  """Raises InputError, which names the config field or flag `key`, if `path` is on an object store out of reach."""
  scheme, remote, _ = path.partition('://')
  if not remote:
    return
  if scheme not in _EXTRAS:
    raise InputError(f'{key}: {path}: only the object stores gs:// and s3:// are supported; copy it to a local folder')
  try:
    epath.Path(path).exists()
  except ImportError as e:
    raise InputError(
      f"{key}: {path}: needs the extra [{_EXTRAS[scheme]}]: pip install -e '.[{_EXTRAS[scheme]}]' ({e})"
    ) from e
  except OSError as e:
    raise InputError(f'{key}: {path}: cannot be reached: {e}') from e


def check_workdir(text: epath.PathLike) -> epath.Path:
  """Returns the folder of a run; raises InputError if it is a file, cannot be written or has broken links."""
  if not str(text):
    raise InputError('--workdir: is empty; name a folder for the run')
  check(str(text), '--workdir')
  workdir = epath.Path(text).expanduser()
  if is_remote(workdir):
    return workdir
  existing = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
  if not existing.is_dir():
    raise InputError(f'--workdir: {existing} is a file, and a run needs a folder; name another')
  with explained(), contextlib.suppress(FileNotFoundError):
    os.stat(workdir)
  for path in (workdir / 'checkpoints', *workdir.glob('checkpoints/*')):
    if os.path.islink(path) and not path.exists():
      raise InputError(f'{path}: is a link that leads nowhere; remove it, or name another --workdir')
  if not os.access(existing, os.W_OK):
    raise InputError(f'--workdir: {existing} cannot be written; name another, or change its permissions')
  return workdir


def write(path: epath.PathLike, data: bytes) -> None:
  """Writes a whole file, atomically: a reader sees the old file or the new one, even after a power loss."""
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
  except OSError:  # for example, if there is a folder of this name
    draft.unlink()
    raise
  sync(path.parent)


def make_folder(path: epath.PathLike) -> None:
  """Makes a folder and its parents so that they survive a power loss."""
  path = epath.Path(path)
  missing = [] if is_remote(path) else [p for p in (path, *path.parents) if not p.exists()]
  path.mkdir(parents=True, exist_ok=True)
  for folder in missing:
    sync(folder.parent)


def sync(path: epath.PathLike) -> None:
  """Waits until a local file, or the list of a folder's files, is on the disk (fsync)."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  except OSError as error:
    if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system has no fsync
      raise
  finally:
    os.close(handle)


def sync_all(folder: epath.PathLike) -> None:
  """Waits until a local folder and everything in it are on the disk."""
  for parent, _, names in os.walk(folder, topdown=False):
    for name in names:
      sync(os.path.join(parent, name))
    sync(parent)


def write_text(path: epath.PathLike, text: str) -> None:
  """Writes `text` as UTF-8, as `write` does; a lone surrogate becomes \\udXXX, as in JSON."""
  write(path, text.encode('utf-8', 'backslashreplace'))


def add_line(path: epath.PathLike, line: str) -> None:
  """Adds a line to a text file, atomically; creates the file if it is missing."""
  path = epath.Path(path)
  old = path.read_text() if path.exists() else ''
  write_text(path, f'{old}{line}\n')


def files(folder: epath.PathLike) -> list[str]:
  """Returns the names of all files below a folder, sorted, relative to it; [] if there is no folder."""
  names: list[str] = []
  folder = epath.Path(folder)
  for path in folder.iterdir() if folder.exists() else ():
    names += [f'{path.name}/{name}' for name in files(path)] if path.is_dir() else [path.name]
  return sorted(names)


def checksums(folder: epath.PathLike, names: Collection[str]) -> dict[str, list[int]]:
  """Returns {name: [bytes, crc32]} of files below a folder, read in parallel."""
  with futures.ThreadPoolExecutor(_READERS) as pool:
    return dict(zip(names, pool.map(lambda name: checksum(epath.Path(folder) / name), names)))


def checksum(path: epath.PathLike, limit: float = math.inf) -> list[int]:
  """Returns [bytes, crc32] of a file, or of its first `limit` bytes."""
  size = crc = 0
  with epath.Path(path).open('rb') as file:
    while chunk := file.read(int(min(_PIECE, limit - size))):
      size += len(chunk)
      crc = zlib.crc32(chunk, crc)
  return [size, crc]


def read_json(path: epath.Path | pathlib.Path) -> dict[str, Any]:
  """Reads a JSON file that holds one object; raises InputError if it does not."""
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except json.JSONDecodeError as e:
    raise InputError(f'{path}:{e.lineno}:{e.colno}: bad JSON: {e.msg}; copy or download it again') from e
  except (ValueError, OSError) as e:  # ValueError: invalid UTF-8, or an integer with too many digits for Python
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
  """Turns errors about a full disk into NoRoomError, and errors about access to a path into InputError.

  where: begins the message if an error does not name its file.
  """
  try:
    yield
  except (NoRoomError, InputError):
    raise
  except (OSError, RuntimeError, ValueError) as error:
    notes, filename = ' '.join(getattr(error, '__notes__', ())), getattr(error, 'filename', None)
    where = filename or notes or where
    if is_no_room(error):
      raise NoRoomError(
        f'{where}: no room on the disk, or in the quota; what was saved before is good: make room and run the '
        'same command again'
      ) from error
    if isinstance(error, (IsADirectoryError, NotADirectoryError)) and not filename:  # etils raises these
      raise InputError(f'{error}; name another path') from error
    if getattr(error, 'errno', None) in _PATH_ERRORS and filename:
      raise InputError(f'{where}: {error.strerror}; name another path, or change its permissions') from error
    raise
