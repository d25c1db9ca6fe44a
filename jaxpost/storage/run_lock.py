"""One run in a folder at a time: WORKDIR/lock.json names the process that has it.

Works where flock does not (NFS, object stores): the holder rewrites the file every ten seconds. On
the machine of the holder, its pid and start time tell whether it lives; elsewhere a lock that does
not change while it is watched is left over. No clocks are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from jaxpost.errors import InputError
from jaxpost.storage import object_store

try:
  import fcntl
except ImportError:  # Windows
  fcntl = None  # type: ignore[assignment]

NAME = 'lock.json'
BEAT_S = 10.0  # between two beats of the holder
WATCH_S = 35.0  # without a beat, after which a lock of another machine is left over
_SIZE = 1024  # bytes of the file, which are rewritten in place: a renamed one may stay unseen on NFS for a minute
_SETTLE_S = {False: 0.3, True: 1.0}  # local, remote: when two take a lock over, the last one has written by then


class RunLock:
  """The lock of one run folder, for the process that writes there."""

  def __init__(self, folder: epath.PathLike, lost: Callable[[str], None]):
    """See the class.

    Args:
      folder: of the run, made by `acquire`; local, or on gs:// or s3://.
      lost: is called in a thread, with a sentence, if another process took the lock over.
    """
    self._folder = epath.Path(folder)
    self._path = self._folder / NAME
    self._lost = lost
    self._held = False
    self._released = threading.Event()
    self._beating = threading.Lock()
    self._thread: threading.Thread | None = None
    self._mine: dict[str, Any] = {
      'host': socket.gethostname(),
      'pid': os.getpid(),
      'machine': _machine(),
      'start': _start_time(os.getpid()),
      'since': time.strftime('%Y-%m-%d %H:%M:%S %Z'),
      'token': uuid.uuid4().hex,
      'beat': 0,
    }

  def acquire(self, note: Callable[[str], None] = print) -> None:
    """Takes the lock; a second call does nothing.

    Args:
      note: gets a line before a wait of half a minute.

    Raises:
      InputError: another process has it, or the folder cannot be written.
    """
    if self._held:
      return
    try:
      object_store.make_folder(self._folder)
      while not self._create():
        holder = self._read()
        if holder is None:
          continue
        self._refuse_living(holder, note)
        with self._alone() as alone:
          if alone and holder == self._read() and self._take_over():
            break
    except OSError as error:
      raise InputError(f'--workdir: {self._folder}: cannot be written ({error.strerror or error})') from error
    self._held = True
    self._thread = threading.Thread(target=self._beat, name='run lock', daemon=True)
    self._thread.start()

  def release(self) -> None:
    """Gives the lock back, from any thread; does nothing where it is not held."""
    with self._beating:
      if self._held and not self._released.is_set() and _fields(self._read()).get('token') == self._mine['token']:
        with contextlib.suppress(Exception):  # a lock that is left over is recognized
          self._path.unlink()
      self._released.set()
    if self._thread and self._thread is not threading.current_thread():
      self._thread.join()

  def _create(self) -> bool:
    """Makes the file; False where there is one."""
    if object_store.is_remote(self._path):
      return not self._path.exists() and self._take_over()
    try:
      handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
      return False
    with os.fdopen(handle, 'wb') as file:
      file.write(self._text())
    return True

  @contextlib.contextmanager
  def _alone(self) -> Iterator[bool]:
    """Yields True if no other process of this machine replaces the file; `_SETTLE_S` keeps other machines apart."""
    try:
      file = None if object_store.is_remote(self._path) else open(self._path, 'rb')
    except FileNotFoundError:
      yield False
      return
    with file or contextlib.nullcontext():
      try:
        if file and fcntl:
          fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        time.sleep(_SETTLE_S[False])
        yield False
        return
      except OSError:  # a file system without such locks
        pass
      yield True

  def _take_over(self) -> bool:
    """Replaces the file; False if another process did so, too, and was the last."""
    object_store.write(self._path, self._text())
    time.sleep(_SETTLE_S[object_store.is_remote(self._path)])
    return self._read() == self._text()

  def _refuse_living(self, holder: bytes, note: Callable[[str], None]) -> None:
    """InputError if the holder of the lock is alive; may watch it for `WATCH_S`."""
    about = _fields(holder)
    who = f'process {about.get("pid", "?")} on {about.get("host", "an unknown host")}'
    held = (
      f'{self._folder}: {who} has been using this folder since {about.get("since", "?")}; wait until it ends, end it, '
    )
    if about.get('start') and about.get('machine') == self._mine['machine']:
      if _start_time(about.get('pid')) == about['start']:
        raise InputError(f'{held}or choose another --workdir')
      return
    note(f'{self._folder}: was in use by {who}; watching for {WATCH_S:.0f} s whether it is alive')
    end = time.monotonic() + WATCH_S
    while time.monotonic() < end:
      time.sleep(min(0.5, WATCH_S / 10))
      now = self._read()
      if now != holder:
        if _fields(now).get('token') == about.get('token'):
          raise InputError(f'{held}or choose another --workdir (if it is certainly gone, remove {self._path})')
        return  # it was released, or taken over: look again

  def _beat(self) -> None:
    while not self._released.wait(BEAT_S):
      with self._beating:
        if self._released.is_set():
          return
        # The next beat tries again. A disk that is full or gone, or a store that answers no more (in errors of its own
        # kinds), stops the run where it writes its files.
        with contextlib.suppress(Exception):
          found = _fields(self._read())
          if found.get('token', self._mine['token']) != self._mine['token']:
            self._released.set()
            who = f'process {found.get("pid")} on {found.get("host")}'
            self._lost(f'{self._folder}: {who} has taken this folder over, as this process seemed to be gone')
            return
          self._mine['beat'] += 1
          self._rewrite()

  def _rewrite(self) -> None:
    if object_store.is_remote(self._path) or not self._path.exists():
      self._path.write_bytes(self._text())
      return
    with open(self._path, 'r+b') as file:
      file.write(self._text())

  def _read(self) -> bytes | None:
    try:
      return self._path.read_bytes()
    except FileNotFoundError:
      return None

  def _text(self) -> bytes:
    return json.dumps(self._mine).encode().ljust(_SIZE - 1) + b'\n'


def _fields(text: bytes | None) -> dict:
  """Returns the fields of a lock file; {} where there is none, or it is damaged or was just created."""
  try:
    found = json.loads(text or b'')
  except (ValueError, RecursionError):
    return {}
  return found if isinstance(found, dict) else {}


def _machine() -> str:
  """Identifies the processes that share pids and their start times; '' if unknown."""
  try:
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()
    return f'{boot} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


def _start_time(pid: int | None) -> str:
  """When a process of this machine began, in ticks since the boot; '' if there is none."""
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text('ascii', 'replace')
  except (OSError, ValueError):  # ValueError: a damaged lock has what is no path
    return ''
  state, *fields = text.rpartition(')')[2].split()
  return '' if state == 'Z' else fields[18]
