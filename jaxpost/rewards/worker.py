"""The main program of a reward worker, which the pool starts as `python -m jaxpost.rewards.worker`.

It exchanges JSON objects with the pool, one per line, on stdin and stdout:

  in   {'path', 'rewards': [[name, spec], ...],
        'timeout_s', 'start_timeout_s'}                          once
  out  {'start': ''}, then {'ready': [{'file', 'needs'}, ...]} or
       {'bad': text}
  in   {'step', 'graded_by': [name, ...] or null for all,
        'arguments': {'prompts', 'completions',
        'completion_ids', column...}}                            per group
  out  {'start': name}, then {'values': [...], 'logged': [[name, value], ...]}
       or {'error': text}; for each function in order, until the first error
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

from jaxpost.errors import InputError
from jaxpost.rewards import options
from jaxpost.workers import call

_PR_SET_PDEATHSIG = 1
_PID = os.getpid()


class Started(NamedTuple):
  """A worker process after its handshake with the pool.

  Attributes:
    setup: the first line that the pool sent.
    requests: the following lines.
    reply: sends a JSON object to the pool.
    loaded: the result of loading the user's code.
  """

  setup: dict
  requests: BinaryIO
  reply: Callable[[dict], None]
  loaded: Any


def main() -> None:
  """Grades one group per line of stdin, until it is closed."""
  started = begin(lambda setup: [options.load(name, spec) for name, spec in setup['rewards']])
  if not started:
    return
  rewards = started.loaded
  started.reply({'ready': [{'file': r.file, 'needs': r.needs} for r in rewards]})
  for line in started.requests:
    _grade(rewards, line, started.reply, started.setup['timeout_s'])


def begin(load: Callable[[dict], Any]) -> Started | None:
  """Reads the setup and loads the user's code with `load(setup)`.

  Returns None if `load` raised InputError, which has then been reported to the pool.
  """
  _die_with_owner()
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, _leave_to_owner)
  requests, replies = _take_pipes()
  printed = sys.stdout

  def reply(message: dict) -> None:
    if not printed.closed:
      printed.flush()
    replies.write(json.dumps(message).encode() + b'\n')
    replies.flush()

  setup = json.loads(requests.readline())
  sys.path[:] = setup['path']
  faulthandler.enable(file=2)
  reply({'start': ''})
  faulthandler.dump_traceback_later(0.9 * setup['start_timeout_s'], file=2)
  try:
    loaded = load(setup)
  except InputError as error:
    reply({'bad': str(error)})
    return None
  _end_copies()
  faulthandler.cancel_dump_traceback_later()
  return Started(setup, requests, reply, loaded)


def _die_with_owner() -> None:
  """Has the kernel kill this process when the thread that started it ends (Linux only)."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave_to_owner(number: int, frame: object) -> None:
  """Ignores a signal in the worker, whose owner saves and then ends it; in processes that it forks the signal acts.

  A scheduler signals all processes of a job, and a group that is being graded must not fail because of it.
  """
  del frame
  if os.getpid() != _PID:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
  """Moves the pipes to other descriptors: the user's code reads an empty stdin, and its stdout goes to stderr."""
  requests = os.fdopen(os.dup(0), 'rb')
  replies = os.fdopen(os.dup(1), 'wb')
  devnull = os.open(os.devnull, os.O_RDONLY)
  os.dup2(devnull, 0)
  os.dup2(2, 1)
  os.close(devnull)
  return requests, replies


def _end_copies() -> None:
  """Exits if this is a child that the user's code has forked and that returned from it."""
  if os.getpid() != _PID:
    os._exit(1)


def _grade(rewards: list[call.Reward], line: bytes, reply: Callable[[dict], None], timeout_s: float) -> None:
  """Calls each function on one group and replies; stops after the first error."""
  names = json.loads(line)['graded_by']
  for reward in rewards:
    if names is not None and reward.name not in names:
      continue
    if len(rewards) > 1:
      with contextlib.suppress(OSError):  # The user's code has closed its stderr.
        os.write(2, f'\0{reward.name}\n'.encode())  # tells the pool which function prints the lines after it
    reply({'start': reward.name})
    # Prints the stack shortly before the pool kills a function that hangs; a C thread does it, even if the GIL is held.
    faulthandler.dump_traceback_later(0.9 * timeout_s, file=2)
    try:
      # Parsed anew for each function, because a function may modify its arguments in place.
      group = json.loads(line)
      logged: list[tuple[str, float]] = []
      values = call.call(reward, group['arguments'], logged, group['step'], timeout_s)
    except call.RewardError as error:
      reply({'error': str(error)})
      return
    finally:
      _end_copies()
      faulthandler.cancel_dump_traceback_later()
    reply({'values': values, 'logged': logged})


if __name__ == '__main__':
  main()
