"""Errors that users cause or have to act upon, each with its exit code.

Launchers turn these into one line on stderr and the exit code; anything else
is a bug of ours, keeps its traceback and exits with 1. Imports no package, so
that reward workers can use it without JAX.
"""

import os
from typing import TextIO

# The exit code of the reason that this process has printed; empty before.
_printed: list[int] = []


class InputError(ValueError):
  """Bad config, data, model folder or reward: what, where, and the fix."""

  exit_code = 2


class NoCheckpointError(RuntimeError):
  """A checkpoint was asked for and none is usable."""

  exit_code = 3


class Preempted(Exception):
  """The run got a signal to stop and has saved; the same command continues it."""

  exit_code = 42


class DivergedError(FloatingPointError):
  """The weights of a run are not finite any more; its checkpoints are from before."""

  exit_code = 4


class NoRoomError(OSError):
  """A disk is full, or a quota is used up."""

  exit_code = 5


class PeerError(RuntimeError):
  """Another process of this run has failed or is gone: which, and of what."""

  exit_code = 1


# Everything above: one line on stderr, and its exit code.
KNOWN = (InputError, NoCheckpointError, Preempted, DivergedError, NoRoomError, PeerError)


def print_reason(message: str, code: int, stream: TextIO | None = None) -> int | None:
  """Prints the one line that says why this process ends; returns None, or the exit code of an earlier line.

  While a process ends, the watchdog, a signal or an abort by JAX may find a reason of
  their own; only the first is the cause, so a later one is not printed.

  Args:
    stream: where the line goes; None: file descriptor 2, for threads and signal handlers.
  """
  if _printed:
    return _printed[0]
  if stream is None:
    os.write(2, f'jaxpost: {message}\n'.encode())
  else:
    print(f'jaxpost: {message}', file=stream, flush=True)
  _printed.append(code)
  return None


def forget_reason() -> None:
  """At the start of a command: a notebook or a test runs several in one process."""
  _printed.clear()
