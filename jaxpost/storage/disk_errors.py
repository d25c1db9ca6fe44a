"""Errors of the operating system about files, in one line that says what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from jaxpost.errors import InputError, NoRoomError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_TEXTS = ('No space left on device', 'Disk quota exceeded')  # in what C++ libraries raise
# A path that cannot be what it is used for.
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_PATH = (*_NO_ACCESS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)


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
