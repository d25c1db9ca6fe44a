"""Errors that users cause or have to act upon, each with its exit code.

Launchers turn these into one line on stderr and the exit code; anything else is a bug of ours, keeps its traceback and
exits with 1. Imports no package, so that reward workers can use it without JAX.
"""

import dataclasses
import difflib
from collections.abc import Collection
from typing import Any


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


KNOWN = (InputError, NoCheckpointError, Preempted, DivergedError, NoRoomError, PeerError)  # all of the above


def type_of(value: Any) -> str:
  """Returns 'a dict' or 'an int', the type of a value as errors name it."""
  name = type(value).__name__
  return f'{"an" if name[0] in "aeioAEIO" else "a"} {name}'


def did_you_mean(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
  """Returns 'did you mean NEAREST? ', or '' where no known name is near; one with swapped letters is nearest."""
  near = [k for k in known if sorted(k) == sorted(name)] or difflib.get_close_matches(name, known, 1, cutoff)
  return f'did you mean {near[0]!r}? ' if near else ''


def refuse(wrong: bool, text: str) -> None:
  """Raises InputError(text) if `wrong`."""
  if wrong:
    raise InputError(text)


def refuse_unread(block: Any, read: Collection[str], by: str, section: str = 'rl') -> None:
  """Raises InputError for a field of config.SECTION that is set and not in `read`: `by` would ignore it."""
  for field in dataclasses.fields(block):
    if field.name not in read and vars(block)[field.name] not in (field.default, field.metadata['auto']):
      raise InputError(f'config.{section}.{field.name}: {by} would ignore it; leave it {field.default!r}')
