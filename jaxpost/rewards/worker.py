"""One reward process: python -m jaxpost.rewards.worker; the pool starts it.

JSON lines on stdin and stdout, one object each:

  in   {'path', 'rewards': [[name, spec], ...],
        'timeout_s', 'start_timeout_s'}                          once
  out  {'start': ''}, then {'ready': [{'file', 'needs'}, ...]} or
       {'bad': text}
  in   {'step', 'arguments': {'prompts', 'completions',
        'completion_ids', column...}}                            per group
  out  {'start': name}, then {'values': [...], 'logged': [[name, value], ...]}
       or {'error': text}, per function until the first error
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys

from jaxpost.errors import InputError
from jaxpost.rewards import options
from jaxpost.workers import call

_PR_SET_PDEATHSIG = 1
_PID = os.getpid()


def main():
  started = begin(lambda setup: [options.load(name, spec) for name, spec in setup['rewards']])
  if not started:
    return
  setup, requests, reply, rewards = started
  reply({'ready': [{'file': r.file, 'needs': r.needs} for r in rewards]})
  for line in requests:
    _grade(rewards, line, reply, setup['timeout_s'])


def begin(load):
  """(setup, lines to come, reply, load(setup)) of a process that was started.

  None where `load` finds the user's code at fault; the pool has been told.
  """
  _die_with_owner()
  requests, replies = _take_pipes()
  printed = sys.stdout

  def reply(message):
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
  return setup, requests, reply, loaded


def _die_with_owner():
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_pipes():
  """Our ends of the pipes; the user's code reads nothing, prints to stderr."""
  requests = os.fdopen(os.dup(0), 'rb')
  replies = os.fdopen(os.dup(1), 'wb')
  nothing = os.open(os.devnull, os.O_RDONLY)
  os.dup2(nothing, 0)
  os.dup2(2, 1)
  os.close(nothing)
  return requests, replies


def _end_copies():
  """Ends the child of a fork in the user's code, if it came back here."""
  if os.getpid() != _PID:
    os._exit(1)


def _grade(rewards, line, reply, timeout_s):
  for reward in rewards:
    reply({'start': reward.name})
    # Says where it hangs, from a C thread: even where the GIL is held.
    faulthandler.dump_traceback_later(0.9 * timeout_s, file=2)
    try:
      # Parsed for each, as a function may change its arguments in place.
      group, logged = json.loads(line), []
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
