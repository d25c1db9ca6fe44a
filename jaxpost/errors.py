"""Errors that users cause or have to act upon, each with its exit code.

Launchers turn these into one line on stderr and the exit code; anything else
is a bug of ours, keeps its traceback and exits with 1. Imports nothing, so
that reward workers can use it without JAX.
"""


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
