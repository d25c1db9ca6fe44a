"""Allows one run in a folder at a time: WORKDIR/lock.json names the process that holds the folder.

It works where flock does not (NFS, object stores): the holder rewrites the file every ten seconds. On the machine of
the holder, its pid and start time show whether it is alive. From another machine, a lock is stale if it does not change
while it is watched. No clocks are compared.
"""

import contextlib
import fcntl
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

NAME = 'lock.json'
BEAT_S = 10.0  # seconds between two heartbeats of the holder
WATCH_S = 35.0  # seconds without a heartbeat after which a lock of another machine is stale
_SIZE = 1024  # bytes of the file, which is rewritten in place: NFS may show a renamed file only after a minute
_SETTLE_S = {False: 0.3, True: 1.0}  # is remote -> seconds until a take-over is settled


class RunLock:
  """The lock of one run folder, for the process that writes there.

  Args:
    folder: the run's folder, which `acquire` makes; local, or on gs:// or s3://.
    lost: called in a thread, with an error message, if another process has taken the lock over.
  """

  def __init__(self, folder: epath.PathLike, lost: Callable[[str], None]):
    self._folder = epath.Path(folder)
    self._path = self._folder / NAME
    self._lost = lost
    self._released = threading.Event()
    self._beating = threading.Lock()
    self._thread: threading.Thread | None = None  # of the heartbeats, once the lock is held
    self._record: dict[str, Any] = {
      'host': socket.gethostname(),
      'pid': os.getpid(),
      'machine': _machine(),
      'start': _start_time(os.getpid()),
      'since': time.strftime('%Y-%m-%d %H:%M:%S %Z'),
      'token': uuid.uuid4().hex,
      'beat': 0,
    }

  def acquire(self, note: Callable[[str], None] = print) -> None:
    """Takes the lock; InputError if another process holds it, or the folder cannot be written.

    `note` receives a line before a wait of half a minute. A second call does nothing.
    """
    if self._thread:
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
    self._thread = threading.Thread(target=self._beat, name='run lock', daemon=True)
    self._thread.start()

  def release(self) -> None:
    """Releases the lock, from any thread; does nothing if it is not held."""
    with self._beating:
      if self._thread and not self._released.is_set() and _fields(self._read()).get('token') == self._record['token']:
        with contextlib.suppress(Exception):  # the next run would recognize a stale lock
          self._path.unlink()
      self._released.set()
    if self._thread and self._thread is not threading.current_thread():
      self._thread.join()

  def _create(self) -> bool:
    """Creates the file; returns False if there is one."""
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
    """Yields True if no other process of this machine may replace the file; `_take_over` handles other machines."""
    try:
      file = None if object_store.is_remote(self._path) else open(self._path, 'rb')
    except FileNotFoundError:
      yield False
      return
    with file or contextlib.nullcontext():
      try:
        if file:
          fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        time.sleep(_SETTLE_S[False])
        yield False
        return
      except OSError:  # a file system without such locks
        pass
      yield True

  def _take_over(self) -> bool:
    """Replaces the file; returns False if another process has replaced it afterwards."""
    object_store.write(self._path, self._text())
    time.sleep(_SETTLE_S[object_store.is_remote(self._path)])
    return self._read() == self._text()

  def _refuse_living(self, holder: bytes, note: Callable[[str], None]) -> None:
    """Raises InputError if the holder of the lock is alive; may watch the lock for `WATCH_S`."""
    fields = _fields(holder)
    process = f'process {fields.get("pid", "?")} on {fields.get("host", "an unknown host")}'
    in_use = f'{self._folder}: {process} has been using this folder since {fields.get("since", "?")}'
    remedy = 'wait until it ends, end it, or choose another --workdir'
    if fields.get('start') and fields.get('machine') == self._record['machine']:
      if _start_time(fields.get('pid')) == fields['start']:
        raise InputError(f'{in_use}; {remedy}')
      return
    note(f'{self._folder}: was in use by {process}; watching for {WATCH_S:.0f} s whether it is alive')
    end = time.monotonic() + WATCH_S
    while time.monotonic() < end:
      time.sleep(min(0.5, WATCH_S / 10))
      current = self._read()
      if current != holder:
        if _fields(current).get('token') == fields.get('token'):
          raise InputError(f'{in_use}; {remedy} (if it is certainly gone, remove {self._path})')
        return  # the lock was released or taken over: `acquire` tries again

  def _beat(self) -> None:
    while not self._released.wait(BEAT_S):
      with self._beating:
        if self._released.is_set():
          return
        # On an error the next heartbeat tries again. If a disk is full or a store does not respond, the run will stop
        # where it writes its files.
        with contextlib.suppress(Exception):
          holder = _fields(self._read())
          if holder.get('token', self._record['token']) != self._record['token']:
            self._released.set()
            process = f'process {holder.get("pid")} on {holder.get("host")}'
            self._lost(f'{self._folder}: {process} has taken this folder over, as this process seemed to be gone')
            return
          self._record['beat'] += 1
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
    return json.dumps(self._record).encode().ljust(_SIZE - 1) + b'\n'


def _fields(text: bytes | None) -> dict:
  """Returns the fields of a lock file; {} if it is missing, damaged or still empty."""
  try:
    fields = json.loads(text or b'')
  except (ValueError, RecursionError):
    return {}
  return fields if isinstance(fields, dict) else {}


def _machine() -> str:
  """Returns an id of the boot and the pid namespace, in which a pid and its start time are unique; '' if unknown."""
  try:
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()
    return f'{boot} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


def _start_time(pid: int | None) -> str:
  """Returns when a process of this machine began, in ticks since the boot; '' if it does not exist or is a zombie."""
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text('ascii', 'replace')
  except (OSError, ValueError):  # ValueError: the pid of a damaged lock makes no valid path
    return ''
  state, *fields = text.rpartition(')')[2].split()
  return '' if state == 'Z' else fields[18]
