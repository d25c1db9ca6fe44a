"""Errors of the operating system about files, in one line that says what to do."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
from collections.abc import Iterator

from jaxpost.errors import InputError, NoRoomError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_TEXTS = ('No space left on device', 'Disk quota exceeded')  # in what C++ libraries raise
# A path that cannot be what it is used for.
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_PATH = (*_NO_ACCESS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)


def silence_orbax() -> None:
  """Leaves out what Orbax's threads print after a failed save, and its tasks on a full disk; the save raises that."""
  sys.unraisablehook = _print_unraisable
  logging.getLogger('asyncio').addFilter(_is_news)  # once, however often this is called


def _print_unraisable(found: sys.UnraisableHookArgs) -> None:
  if str(found.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(found)


def _is_news(record: logging.LogRecord) -> bool:
  return not (record.exc_info and _no_room(record.exc_info[1]))  # the save says that the disk is full


def _no_room(error: BaseException | None) -> bool:
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
    if _no_room(error):
      raise NoRoomError(
        f'{where}: no room on the disk, or in the quota; what was saved before is good: make room and run the '
        'same command again'
      ) from error
    if isinstance(error, (IsADirectoryError, NotADirectoryError)) and not named:  # as etils raises them
      raise InputError(f'{error}; name another path') from error
    if getattr(error, 'errno', None) in _PATH and named:
      raise InputError(f'{where}: {error.strerror}; name another path, or change its permissions') from error
    raise
