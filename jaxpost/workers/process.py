"""The parent's side of a worker process: starts it, exchanges JSON lines with it under a deadline, kills it.

Each `Worker` is used by one thread. No operation blocks forever: every read and every write has a deadline, and the
output that the user's code prints is drained at the same time, so that a full pipe cannot stall the worker.
"""

import contextlib
import json
import logging
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from jaxpost.errors import InputError
from jaxpost.workers import reaper, user_code

# Environment variables that a worker gets: those that programs need to run, and none that could hold a secret.
_PASSED = re.compile(
  r'PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TMP|TEMP|LANG|LANGUAGE|LC_[A-Z]+|PYTHON[A-Z]+|VIRTUAL_ENV|CONDA_PREFIX'
  r'|LD_LIBRARY_PATH|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|MALLOC_[A-Z_]+|XLA_FLAGS|JAX_COMPILATION_CACHE_DIR|NLTK_DATA'
  r'|XDG_(CACHE|CONFIG|DATA)_HOME|(HF|TRANSFORMERS)_(HOME|CACHE|OFFLINE|VERBOSITY)|HF_(HUB|DATASETS)_(CACHE|OFFLINE)'
  r'|TOKENIZERS_PARALLELISM|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|RANK|LOCAL_RANK|WORLD_SIZE'
)
_PROXY = re.compile(r'(http|https|no|all)_proxy', re.I)  # passed unless it holds a password
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.M)
_DUMP = 'most recent call first'  # faulthandler's header of a traceback
TAIL = 1 << 14  # bytes of printed output to keep
_MAX_LOGGED = 2000  # characters of printed output to log for each request
_SHOWN_LINES = 20  # lines of printed output to show for each batch
_SHOWN_COLUMNS = 400  # characters to show of a line
_SLICE = 0.2  # seconds between checks that the process is alive
_GRACE_S = 1.0  # seconds for an idle process to exit


class WorkerDied(Exception):
  """The worker process ended; the message says how."""


class Reaper:
  """A helper process that kills the workers if this process is killed."""

  def __init__(self) -> None:
    self._process = subprocess.Popen(
      [sys.executable, '-I', '-S', reaper.__file__], stdin=subprocess.PIPE, start_new_session=True
    )

  def add(self, pid: int) -> None:
    """Registers a process group that has started."""
    self._send(f'+{pid}\n')

  def discard(self, pid: int) -> None:
    """Removes a process group that has ended."""
    self._send(f'-{pid}\n')

  def _send(self, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # it was killed, and is needed only if this process is killed, too
      os.write(self._process.stdin.fileno(), line.encode())

  def close(self) -> None:
    """Ends the helper process, which kills the groups that are still registered."""
    self._process.stdin.close()
    self._process.wait()


class Worker:
  """A worker process and its pipes. After `kill`, `start` starts a new process.

  Args:
    module: the module that the process runs, with `python -m`.
    setup: the first JSON line that it receives, with the folders to import from; has 'start_timeout_s'.
    variables: its environment variables.
    reaper_process: kills the worker if this process is killed.
    label: the name of the worker in error messages.
  """

  def __init__(self, module: str, setup: dict, variables: dict[str, str], reaper_process: Reaper, label: str) -> None:
    self._module = module
    self._label = label
    self._cwd = os.getcwd()
    folders = [str(entry) or self._cwd for entry in sys.path]
    self._setup = {'path': list(dict.fromkeys([*folders, self._cwd])), **setup}
    self._variables = variables
    self._reaper = reaper_process
    self._lock = threading.Lock()  # `interrupt` may come from another thread during `start`
    self._closed = False
    self._process = None

  def start(self, retry: bool = True) -> Any:
    """Starts the process unless it is running; returns the 'ready' value of its first reply.

    Raises:
      InputError: if the user's code cannot be imported; with `retry`, if its process ends twice meanwhile.
    """
    if self._process is not None:
      if self._process.poll() is None:
        return self._ready
      self.kill()
    with self._lock:
      if self._closed:
        raise RuntimeError('the reward pool is closed')
      self._process = subprocess.Popen(
        # -P: a math.py in the working directory must not shadow the standard library's.
        [sys.executable, '-P', '-m', self._module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd=self._cwd,
        env=self._variables,
        start_new_session=True,
      )
      self._reaper.add(self._process.pid)
    self._stdin = self._process.stdin.fileno()
    self._stdout = self._process.stdout.fileno()
    self._stderr = self._process.stderr.fileno()
    os.set_blocking(self._stdin, False)
    self._poll = select.poll()
    self._poll.register(self._stdout, select.POLLIN)
    self._poll.register(self._stderr, select.POLLIN)
    self._outgoing = memoryview(b'')
    self._incoming = b''
    self._tail = b''
    self.printed = 0  # bytes since `take_printed`
    try:
      self._ready = self._handshake()
    except WorkerDied as error:
      if retry and not self._closed:  # it may have been killed from outside, for its memory
        return self.start(retry=False)
      text = ' '.join(self.printed_text().split())[-300:]
      raise InputError(f'{self._label}: the worker {error} while importing: {text}') from None
    return self._ready

  def _handshake(self) -> Any:
    """Sends `setup` and waits until the user's code is imported; InputError if that fails."""
    timeout_s = self._setup['start_timeout_s']
    try:
      self.send(json.dumps(self._setup))
      self.receive(timeout_s)  # {'start': ''}
      reply = self.receive(timeout_s)
    except TimeoutError:
      where = self.kill()
      raise InputError(f'{self._label}: importing took longer than {timeout_s:g} s{where}') from None
    if 'bad' in reply:
      self.kill()
      raise InputError(reply['bad'])
    return reply['ready']

  def send(self, line: str) -> None:
    """Queues a line; the next `receive` writes it."""
    self._outgoing = memoryview(line.encode() + b'\n')
    self._poll.register(self._stdin, select.POLLOUT)

  def receive(self, timeout_s: float) -> Any:
    """Returns the next reply.

    Raises:
      TimeoutError: if there is none within `timeout_s` seconds.
      WorkerDied: if the process ended, or wrote something that is not JSON.
    """
    deadline = time.monotonic() + timeout_s
    while b'\n' not in self._incoming:
      remaining = deadline - time.monotonic()
      if remaining <= 0:
        raise TimeoutError
      if not self._pump(min(remaining, _SLICE)):
        raise WorkerDied(self._end())
    line, _, self._incoming = self._incoming.partition(b'\n')
    try:
      return json.loads(line)
    except ValueError:
      self.kill()
      raise WorkerDied('wrote into the pipe of the pool') from None

  def _pump(self, seconds: float) -> bool:
    """Reads and writes whatever the pipes allow within `seconds`; False once the process has ended."""
    events = self._poll.poll(1000 * seconds)
    if not events:  # A child of the process may keep its pipes open after it has ended.
      return self._process.poll() is None
    for pipe, _ in events:
      if pipe == self._stdin:
        self._write()
        continue
      data = os.read(pipe, 1 << 16)
      if not data:
        self._poll.unregister(pipe)
        if pipe == self._stdout:
          return False
      elif pipe == self._stdout:
        self._incoming += data
      else:
        self.printed += len(data)
        self._tail = (self._tail + data)[-TAIL:]
    return True

  def _write(self) -> None:
    try:
      sent = os.write(self._stdin, self._outgoing[: 1 << 16])
    except BrokenPipeError:  # The process has ended; `receive` reports it.
      sent = len(self._outgoing)
    self._outgoing = self._outgoing[sent:]
    if not self._outgoing:
      self._poll.unregister(self._stdin)

  def _end(self) -> str:
    """Cleans up after a process that ended; returns 'died of SIGSEGV at file:line' or 'exited with code 0'."""
    try:
      code = self._process.wait(timeout=1)
    except subprocess.TimeoutExpired:  # The process is alive and has closed its pipe.
      code = None
    where = self.kill()
    if code is None:
      return 'closed the pipe of the pool'
    if code < 0:
      names = {s.value: s.name for s in signal.Signals}
      return f'died of {names.get(-code, f"signal {-code}")}{where}'
    return f'exited with code {code}'

  def kill(self) -> str:
    """Kills the process and its children; returns ' at file:line' of the user's code, or '' if unknown."""
    process, self._process = self._process, None
    if process is None:
      return ''
    reaper.kill_group(process.pid)
    process.wait()
    self._reaper.discard(process.pid)
    self._drain()
    for pipe in (process.stdin, process.stdout, process.stderr):
      pipe.close()
    return self._where()

  def _drain(self) -> None:
    """Reads the remaining text of stderr, up to a limit: a child that escaped the kill may write forever."""
    poll = select.poll()
    poll.register(self._stderr, select.POLLIN)
    for _ in range(64):
      data = os.read(self._stderr, 1 << 16) if poll.poll(0) else b''
      if not data:
        return
      self.printed += len(data)
      self._tail = (self._tail + data)[-TAIL:]

  def _where(self) -> str:
    """Returns ' at file:line' from faulthandler's last traceback; its frames are innermost first."""
    for dump in reversed(self.printed_text().split(_DUMP)[1:]):
      if frames := user_code.user_frames(_FRAME.findall(dump)):
        file, line = frames[0]
        return f' at {file}:{line}'
    return ''

  def printed_text(self) -> str:
    """Returns the end of what the process has printed since `take_printed`."""
    return self._tail.decode(errors='replace')

  def take_printed(self, what: str) -> tuple[str, int]:
    """Returns (end of the text, number of bytes) printed since the last call; logs it as that of `what`."""
    printed = self.printed_text(), self.printed
    self._tail, self.printed = b'', 0
    if printed[1]:
      logging.info('%s printed %d bytes: %s', what, printed[1], printed[0][-_MAX_LOGGED:])
    return printed

  def finish(self) -> None:
    """Closes the stdin of an idle process, waits a second for it to exit, then kills its group."""
    if self._process is None:
      return
    self._process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # The user's code may have left threads running.
      self._process.wait(_GRACE_S)
    self.kill()

  def interrupt(self) -> None:
    """Kills the process for good, from any thread; the thread that uses the worker gets WorkerDied."""
    with self._lock:
      self._closed = True
      if self._process is not None:
        reaper.kill_group(self._process.pid)


class Printed:
  """Shows on stderr the output of functions in one worker process, the first that prints: up to 20 lines a batch."""

  def __init__(self, names: Collection[str]) -> None:
    self._names = names  # names of the functions
    self._worker = None
    self._remaining = _SHOWN_LINES  # lines that may still be shown; -1: some were not shown

  def next_batch(self) -> None:
    """Allows 20 lines again."""
    self._remaining = _SHOWN_LINES

  def show(self, worker: Worker, printed: str, cut: int) -> None:
    """Shows the output of the functions for a group, each line after the name of its function.

    Args:
      worker: the process that has printed it; only the output of the first one that prints is shown.
      printed: parts that begin with a zero byte and the name of the function that is called.
      cut: if positive, the number of missing bytes before `printed`.
    """
    if self._worker not in (None, worker):
      return
    self._worker = worker
    name = next(iter(self._names)) if len(self._names) == 1 else 'rewards'
    lines = [(name, f'({cut} bytes before this are not shown)')] if cut > 0 else []
    for i, part in enumerate(printed.split('\0')):
      first, _, rest = part.partition('\n')
      if i and first in self._names:
        name, part = first, rest
      lines += [(name, line) for line in part.splitlines() if line.strip()]
    for name, line in lines[: max(self._remaining, 0)]:
      line = ''.join(c if c.isprintable() else ' ' for c in line[:_SHOWN_COLUMNS])  # no codes for the terminal
      sys.stderr.write(f'{name}: {line}\n')  # a whole line, which a progress bar prints above itself
    if len(lines) > self._remaining >= 0:
      sys.stderr.write(f'rewards: printed more than {_SHOWN_LINES} lines in this step; the others are not shown\n')
    self._remaining = max(self._remaining - len(lines), -1)


def worker_variables(needed: Sequence[str] = ()) -> tuple[dict[str, str], list[str]]:
  """Returns the environment variables of a worker, and the names of those that it does not get.

  Args:
    needed: variables that are passed on besides those of `_PASSED`; InputError if one is not set.
  """
  for name in needed:
    if name not in os.environ:
      raise InputError(f'reward: no environment variable {name} is set')
  variables = {
    k: v for k, v in os.environ.items() if k in needed or _PASSED.fullmatch(k) or _PROXY.fullmatch(k) and '@' not in v
  }
  dropped = sorted(os.environ.keys() - variables.keys())
  root = str(pathlib.Path(__file__).resolve().parents[2])
  paths = (root, os.environ.get('PYTHONPATH', ''))
  variables['PYTHONPATH'] = os.pathsep.join(p for p in paths if p)
  variables['JAX_PLATFORMS'] = 'cpu'
  return variables, dropped
