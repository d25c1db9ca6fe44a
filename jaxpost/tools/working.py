"""Says on stderr what a command does while it prints nothing else; its results alone are on stdout.

Imports no JAX, as it is shown before JAX is imported.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from jaxpost.monitor import activity

_open: list[tuple[str | Callable[[], str], float]] = []  # what is being done, and since when; the innermost last
_compiling: list[tuple[str | Callable[[], str], float]] = []  # the compilation in progress, if there is one

_ended = [0.0, float('-inf')]  # when the work before printed last, and when it ended
_PAUSE_S = 1.0  # at most, between work that a reader waits for as one


@contextlib.contextmanager
def working(text: str | Callable[[], str], bar: bool = False) -> Iterator[None]:
  """Shows `text`, or what is being compiled, until the end: a line after each silence, one that changes on a terminal.

  Another inside it replaces its text until it ends. Only one thread of a process may use it at a time. Nothing may be
  printed on stdout meanwhile, as the line of a terminal would take it up.

  Args:
    text: what is being done, or a function that says it.
    bar: a bar of progress is shown meanwhile, which has `line` where it is on a terminal.
  """
  outermost = not _open
  _open.append((text, time.perf_counter()))
  try:
    shown = activity.Activity(activity.Console(stderr=True))
    if time.perf_counter() - _ended[1] < _PAUSE_S:
      shown.printed = _ended[0]  # or short work in a row would be silent for longer than five seconds
    show = shown.following if bar else shown
    with show(line) if outermost else contextlib.nullcontext():
      yield
    if outermost:
      _ended[:] = shown.printed, time.perf_counter()
  finally:
    _open.pop()
    _compiling.clear()


def line() -> str:
  """Returns what is being done and for how long; '' outside of `working`."""
  for text, start in (*_compiling, *_open[::-1]):
    seconds = time.perf_counter() - start
    said = text() if callable(text) else text
    return f'{said} ({seconds:.0f} s)' if seconds >= 1 else said
  return ''


def compiling(name: str, number: int) -> None:
  """Notes that the compilation of a program begins, the `number`th of its ledger."""
  _compiling[:] = [(f'compiling program {number}: {name}', time.perf_counter())]


def compiled() -> None:
  """Notes that the compilation has ended."""
  _compiling.clear()
