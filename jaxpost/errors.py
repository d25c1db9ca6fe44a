"""The errors a user can cause or must hear of, and the exit code of each.

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
  """The run was told to stop, has saved, and continues by the same command."""

  exit_code = 42


class PeerError(RuntimeError):
  """Another process of this run has failed or is gone: which, and of what."""

  exit_code = 1
