"""Ends a run in which a process hangs or dies, and says which one and where.

Each process tells JAX's coordination service every second what it does. Who
is not heard of any more is gone; who takes too long for a step is stuck. JAX
notices the dead by itself, but never the stuck, and names neither.

  begin('step 3 of sft', 60.0)   the main thread: this takes at most a minute
  rest()                         nothing is due
"""

import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import time

BEAT_S = 1.0  # between two words of a process
_ROOT = 'jaxpost/beat/'
_QUICK = 3  # beats without a word: gone, where something has failed already
_BACKSTOP_S = 4.5  # later Python is not asked any more: it may be what hangs
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (
  '<',
  sysconfig.get_path('stdlib') + os.sep,
  sysconfig.get_path('purelib') + os.sep,
  sysconfig.get_path('platlib') + os.sep,
)
# Where this library itself waits for other processes and for devices.
_WAITING = (
  f'{_HERE}distributed{os.sep}coordination.py',
  f'{_HERE}distributed{os.sep}transfer.py',
  f'{_HERE}distributed{os.sep}mesh.py',
)
_JAX = f'{os.sep}jax{os.sep}', f'{os.sep}jaxlib{os.sep}'


class _State:
  """Of this process; the main thread and the watching one share it."""

  doing, since, limit = 'the start', 0.0, 0.0
  client = failure = thread = None
  index, count, heartbeat = 0, 1, 0.0
  said, missed, beat = {}, {}, 0  # by process: its last word; beats without
  left = threading.Event()


def begin(doing: str, limit_s: float):
  """What this process does from now on, and how long it may take; 0: any."""
  _State.doing, _State.since, _State.limit = doing, time.monotonic(), limit_s
  faulthandler.cancel_dump_traceback_later()
  if limit_s:
    _start()
    faulthandler.dump_traceback_later(limit_s + _BACKSTOP_S, exit=True, file=sys.__stderr__)


def rest():
  """Nothing is due until the next `begin`."""
  _State.limit = 0.0
  faulthandler.cancel_dump_traceback_later()


def join(client, index: int, count: int, heartbeat_s: float, failure):
  """Watches the other processes, too.

  Args:
    client: of JAX's coordination service.
    failure: () -> the exception that another process ended with, or None.
  """
  _State.client, _State.failure = client, failure
  _State.index, _State.count, _State.heartbeat = index, count, heartbeat_s
  _State.missed = dict.fromkeys(range(count), 0)
  on_abort(lambda: gone(_QUICK) or _suspect())
  _start()


def leave():
  """The last word of a process that ends: nobody shall miss it."""
  import jax

  if _State.client is not None and not _State.left.is_set():
    _State.left.set()
    _State.thread.join(2 * BEAT_S)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has gone
      _say({'left': True})


def gone(beats: int) -> str:
  """Who was not heard of for some beats, in words; '' if all were."""
  for i, missed in sorted(_State.missed.items()):
    if i != _State.index and missed >= beats:
      said = _State.said.get(i)
      return f'{_name(i)} is gone: not heard of for {missed * BEAT_S:.0f} s' + (
        f'; it was in {said["doing"]}, at {said["at"]}' if said else ''
      )
  return ''


def who_is_gone() -> str:
  """As `gone`, for who has lost a connection: waits until the beats tell."""
  end = time.monotonic() + (_QUICK + 2) * BEAT_S
  while time.monotonic() < end:
    if text := gone(_QUICK):
      return text
    if _State.failure and _State.failure():
      return ''
    time.sleep(BEAT_S / 5)
  return ''


def place() -> tuple[str, bool]:
  """('FILE:LINE in FUNCTION' of the main thread, whether it waits for JAX).

  Where it waits for a thread that runs code of the user (a reward), there.
  """
  frames = sys._current_frames()
  inner, waits = _own(frames.pop(threading.main_thread().ident, None))
  if inner is None:
    return 'no line of Python', waits
  if not waits and inner.f_code.co_filename.startswith(_HERE):
    for frame in frames.values():
      other, _ = _own(frame)
      if other and not other.f_code.co_filename.startswith(_HERE):
        inner = other
  code = inner.f_code
  return f'{code.co_filename}:{inner.f_lineno} in {code.co_name}', waits


def _own(frame):
  """The innermost frame that is of no library, and whether JAX is in it."""
  waits = False
  while frame and _of_library(frame.f_code.co_filename):
    waits |= any(part in frame.f_code.co_filename for part in _JAX)
    frame = frame.f_back
  return frame, waits or bool(frame) and frame.f_code.co_filename in _WAITING


def _of_library(file: str) -> bool:
  return file.startswith(_LIBRARIES) and not file.startswith(_HERE)


# ------------------------------------------------------------ the other thread


def _start():
  if _State.thread is None:
    _State.thread = threading.Thread(target=_watch, daemon=True)
    _State.thread.start()


def _watch():
  failed = 0
  while not _State.left.wait(BEAT_S):
    if _State.limit and time.monotonic() - _State.since > _State.limit:
      _end(_late())
    if _State.client is None:
      continue
    _exchange()
    if text := gone(max(_QUICK, round(_State.heartbeat / BEAT_S))):
      _end(text)
    # Who waits for a device does not hear that another process has failed.
    failure = _State.limit and _State.failure()
    failed = failed + 1 if failure else 0
    if failed >= 2 * _QUICK:
      _end(str(failure), vars(type(failure)).get('exit_code', 1))


def _exchange():
  """Says what this process does, hears what the others do."""
  import jax

  at, waits = place()
  _State.beat += 1
  try:
    _say(dict(beat=_State.beat, host=socket.gethostname(), pid=os.getpid(), doing=_State.doing, at=at, waits=waits))
    found = {int(key.removeprefix(_ROOT)): json.loads(text) for key, text in _State.client.key_value_dir_get(_ROOT)}
  except jax.errors.JaxRuntimeError:  # the service is part of process 0
    found = {i: said for i, said in _State.said.items() if i}
  for i in _State.missed:
    said = found.get(i)
    new = said and (said.get('left') or said != _State.said.get(i))
    # Beats of our own, not seconds: who slept himself missed nobody.
    _State.missed[i] = 0 if new else _State.missed[i] + 1
    if said:
      _State.said[i] = _State.said.get(i, {}) | said


def _say(word: dict):
  _State.client.key_value_set(f'{_ROOT}{_State.index}', json.dumps(word), allow_overwrite=True)


def _name(i: int) -> str:
  said = _State.said.get(i, {})
  return f'process {i}' + (f' on {said["host"]} (pid {said["pid"]})' if 'host' in said else '')


def _late() -> str:
  """Why this process is late: it is stuck, or waits for who is."""
  at, waits = place()
  doing = _State.doing
  limit = f'for more than {_State.limit:g} s (config.log.watchdog_s)'
  if _State.client is not None:
    # The others find the same: with process 0 the service would go, too.
    _exchange()
    time.sleep((1.5 if waits else 0.5) * BEAT_S)
  if not waits:
    return f'{_me()} is stuck in {doing}, at {at}, {limit}'
  stuck = [
    f'{_name(i)}, which is stuck in {said["doing"]}, at {said["at"]}'
    for i, said in _State.said.items()
    if i != _State.index and not said.get('waits', True)
  ]
  return f'{_me()} waits in {doing} for ' + ('; '.join(stuck) or f'its devices, at {at},') + f' {limit}'


def _me() -> str:
  return f'process {_State.index} on {socket.gethostname()} (pid {os.getpid()})'


def _suspect() -> str:
  """When JAX ends this process: it was told of a death, or lost process 0."""
  at, waits = place()
  if not waits:
    return f'{_me()} is stuck in {_State.doing}, at {at}; another one gave up'
  return (
    f'{_me()} ends in {_State.doing}: {_name(0) if _State.index else "another process"} is gone (JAX says so above)'
  )


def _end(text: str, code: int = 1, stacks: bool = True):
  """The line, the stacks, and the end: nobody could take an exception here."""
  os.write(2, f'jaxpost: {text}\n'.encode())
  if stacks:
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
  os._exit(code)


@functools.cache
def _libc():
  return ctypes.CDLL(None)


def on_abort(explain, stacks: bool = True):
  """JAX ends a process by abort() when it hears of a death; says why first.

  Its own callback cannot be used: it takes no Python function (std::bad_cast).
  A deadlock here (who aborts waits for Python) ends with `begin`'s limit.
  """

  def last_words(number):
    del number
    _end(explain(), stacks=stacks)

  handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(last_words)
  on_abort.keep = handler  # as long as the process lives
  _libc().signal(signal.SIGABRT, handler)
