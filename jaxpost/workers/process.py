"""A reward worker as its owner sees it: start, ask with a deadline, kill.

One thread uses one `Worker`. Nothing here waits for ever: every read and
every write runs against a deadline, and what the user's code prints is read
meanwhile, so that a full pipe stops nobody.
"""

import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import threading
import time

from jaxpost.errors import InputError
from jaxpost.workers import call, reaper

_SECRET = re.compile(
  r'TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|CREDENTIAL'
  r'|(API|ACCESS|PRIVATE)_?KEY',
  re.I,
)
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.M)
_DUMP = 'most recent call first'
_TAIL = 1 << 14  # bytes of what was printed that are kept
_SLICE = 0.2  # seconds between looks whether it still lives


class WorkerDied(Exception):
  """The process ended; the text says how."""


class Keeper:
  """The process that kills the workers if this one is killed."""

  def __init__(self):
    self._process = subprocess.Popen(
      [sys.executable, '-I', '-S', reaper.__file__], stdin=subprocess.PIPE, start_new_session=True
    )

  def tell(self, sign, pid):
    os.write(self._process.stdin.fileno(), f'{sign}{pid}\n'.encode())

  def close(self):
    self._process.stdin.close()
    self._process.wait()


class Worker:
  """One process with its pipes; started again by `start` after `kill`."""

  def __init__(self, setup, variables, guard, module='jaxpost.rewards.worker', what=''):
    """what: its name in errors; '' is that of the rewards in `setup`."""
    self._module = module
    self._what = what or 'reward ' + ', '.join(name for name, _ in setup['rewards'])
    self._setup = setup
    self._variables = variables
    self._guard = guard
    self._cwd = os.getcwd()
    self._lock = threading.Lock()  # between `start` and another's `close`
    self._closed = False
    self._process = None

  def start(self):
    """Starts the process if none runs; returns what it says it can call."""
    if self._process is not None:
      if self._process.poll() is None:
        return self._functions
      self.kill()
    with self._lock:
      if self._closed:
        raise RuntimeError('the reward pool is closed')
      self._process = subprocess.Popen(
        # -P: a math.py in the working directory is not the library's.
        [sys.executable, '-P', '-m', self._module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd=self._cwd,
        env=self._variables,
        start_new_session=True,
      )
      self._guard.tell('+', self._process.pid)
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
    self.printed = 0  # bytes
    self._functions = self._greet()
    return self._functions

  def _greet(self):
    """Has it import the functions; InputError if it cannot."""
    timeout_s = self._setup['start_timeout_s']
    try:
      self.send(json.dumps(self._setup))
      self.receive(timeout_s)  # {'start': ''}
      reply = self.receive(timeout_s)
    except TimeoutError:
      where = self.kill()
      raise InputError(f'{self._what}: importing took longer than {timeout_s:g} s{where}') from None
    except WorkerDied as error:
      text = ' '.join(self.printed_text().split())[-300:]
      raise InputError(f'{self._what}: the worker {error} while importing: {text}') from None
    if 'bad' in reply:
      self.kill()
      raise InputError(reply['bad'])
    return reply['ready']

  def send(self, line):
    """Queues a line; `receive` writes it."""
    self._outgoing = memoryview(line.encode() + b'\n')
    self._poll.register(self._stdin, select.POLLOUT)

  def receive(self, timeout_s):
    """The next reply; TimeoutError or WorkerDied if there is none."""
    deadline = time.monotonic() + timeout_s
    while b'\n' not in self._incoming:
      left = deadline - time.monotonic()
      if left <= 0:
        raise TimeoutError
      if not self._pump(min(left, _SLICE)):
        raise WorkerDied(self._end())
    line, _, self._incoming = self._incoming.partition(b'\n')
    try:
      return json.loads(line)
    except ValueError:
      self.kill()
      raise WorkerDied('wrote into the pipe of the pool') from None

  def _pump(self, seconds):
    """Moves what can be moved; False once the process has ended."""
    events = self._poll.poll(1000 * seconds)
    if not events:  # a child of it may keep its pipes open
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
        self._tail = (self._tail + data)[-_TAIL:]
    return True

  def _write(self):
    try:
      sent = os.write(self._stdin, self._outgoing[: 1 << 16])
    except BrokenPipeError:  # it ended; reading tells
      sent = len(self._outgoing)
    self._outgoing = self._outgoing[sent:]
    if not self._outgoing:
      self._poll.unregister(self._stdin)

  def _end(self):
    """'died of SIGSEGV at file:line' or 'exited with code 0'."""
    try:
      code = self._process.wait(timeout=1)
    except subprocess.TimeoutExpired:  # it only closed its pipe
      code = None
    where = self.kill()
    if code is None:
      return 'closed the pipe of the pool'
    if code < 0:
      names = {s.value: s.name for s in signal.Signals}
      return f'died of {names.get(-code, f"signal {-code}")}{where}'
    return f'exited with code {code}'

  def kill(self):
    """Ends the process with its children; ' at file:line' if known."""
    process, self._process = self._process, None
    if process is None:
      return ''
    reaper.kill_group(process.pid)
    process.wait()
    self._guard.tell('-', process.pid)
    self._drain()
    for pipe in (process.stdin, process.stdout, process.stderr):
      pipe.close()
    return self._where()

  def _drain(self):
    """Reads its last words; a child out of reach may go on for ever."""
    poll = select.poll()
    poll.register(self._stderr, select.POLLIN)
    for _ in range(64):
      data = os.read(self._stderr, 1 << 16) if poll.poll(0) else b''
      if not data:
        return
      self._tail = (self._tail + data)[-_TAIL:]

  def _where(self):
    """The user's line in the last dump of faulthandler, innermost first."""
    for dump in reversed(self.printed_text().split(_DUMP)[1:]):
      own = call.own_frames(_FRAME.findall(dump))
      if own:
        return f' at {own[0][0]}:{own[0][1]}'
    return ''

  def printed_text(self):
    return self._tail.decode(errors='replace')

  def take_printed(self):
    """What was printed since the last call: (its end, number of bytes)."""
    taken = self.printed_text(), self.printed
    self._tail, self.printed = b'', 0
    return taken

  def finish(self, grace_s=1.0):
    """Lets an idle process leave by itself, then ends what is left."""
    if self._process is None:
      return
    self._process.stdin.close()
    try:
      self._process.wait(grace_s)
    except subprocess.TimeoutExpired:
      pass  # threads of the user's; killed next
    self.kill()

  def interrupt(self):
    """Kills it for good, from any thread: its own sees it die."""
    with self._lock:
      self._closed = True
      if self._process is not None:
        reaper.kill_group(self._process.pid)


def environment(keep_env, needed=()):
  """The workers' variables, and the names of those left out as secrets.

  `needed` names variables that stay in; InputError if one is not set.
  """
  for name in needed:
    if name not in os.environ:
      raise InputError(f'reward: no environment variable {name} is set')
  dropped = [] if keep_env else sorted(k for k in os.environ if _SECRET.search(k) and k not in needed)
  kept = {k: v for k, v in os.environ.items() if k not in dropped}
  root = str(pathlib.Path(__file__).resolve().parents[2])
  paths = (root, os.environ.get('PYTHONPATH', ''))
  kept['PYTHONPATH'] = os.pathsep.join(p for p in paths if p)
  kept['JAX_PLATFORMS'] = 'cpu'
  return kept, dropped


def search_path():
  """What the user's imports see here, and the working directory."""
  here = os.getcwd()
  path = [str(entry) or here for entry in sys.path]
  return path if here in path else path + [here]
