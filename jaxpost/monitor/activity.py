"""Shows on the console which work a run does.

On a terminal the last line of the screen says what is being done before and between the steps, and for how long.
Elsewhere a line says so whenever nothing has been printed for almost five seconds. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import rich.console

PERIOD_S = 4.5  # of silence, after which a line says what is being done: no more than five seconds pass without one


class Console(rich.console.Console):
  """A console whose reader may leave, as in `| head`: the run goes on, and metrics.jsonl has what is not printed."""

  def on_broken_pipe(self) -> None:
    with contextlib.suppress(SystemExit):  # by rich, after it has turned the output off
      super().on_broken_pipe()


class Activity(rich.console.RenderHook):
  """Shows what is being done: `with activity('reading data'): ...`.

  One activity is shown at a time; another inside it replaces its text until it ends.
  """

  def __init__(self, console: rich.console.Console, verbose: bool = False, period_s: float = PERIOD_S):
    """`verbose`: whether tables are wanted where a line would do."""
    self.console, self.verbose, self._period = console, verbose, period_s
    self._live = console.is_terminal and not console.is_dumb_terminal
    self._lock = threading.Lock()
    self._open: list[list] = []  # [text, start] of each activity, innermost last
    self._compiling: list[list] = []  # the same of each program that is being compiled
    self._printed = time.perf_counter()  # when anything was printed last, or this was made
    self._thread = threading.Thread()  # another for each outermost activity
    self._wake = threading.Event()

  @contextlib.contextmanager
  def __call__(self, text: str | Callable[[], str]) -> Iterator[None]:
    with self._lock:
      outermost = not self._open
      self._open.append([text, time.perf_counter()])
    if outermost:
      self._wake.clear()
      self.console.push_render_hook(self)
      self._thread = threading.Thread(target=self._show, daemon=True, name='activity')
      self._thread.start()
    try:
      yield
    finally:
      with self._lock:
        self._open.pop()
      if outermost:
        self._wake.set()
        self._thread.join()
        self.console.pop_render_hook()

  def note(self, text: str) -> None:
    """Replaces the text of the work that goes on, such as by how much of it is done."""
    with self._lock:
      if self._open:
        self._open[-1][0] = text

  @contextlib.contextmanager
  def compiling(self, name: str, number: int, planned: int) -> Iterator[None]:
    """Shows that program `number` (from 1) of `planned` (0: unknown) is compiled; for `Ledger.announce`."""
    this = [f'compiling {f"{number}/{planned}: " if planned else ""}{name}', time.perf_counter()]
    self._compiling.append(this)
    try:
      yield
    finally:
      self._compiling.remove(this)

  def following(self, doing: Callable[[], str]) -> contextlib.AbstractContextManager:
    """Prints what `doing` returns after each silence; on a terminal nothing, as a bar is shown there."""
    return contextlib.nullcontext() if self._live else self(doing)

  def process_renderables(self, renderables: list) -> list:
    """Notes that something is printed; the console calls it."""
    self._printed = time.perf_counter()
    return renderables

  def _show(self) -> None:
    """Renews the line each second on a terminal; elsewhere prints one after each silence."""
    if self._live:
      with self.console.status(self.text()) as status:
        while not self._wake.wait(1.0):
          status.update(self.text())
      return
    while not self._wake.wait(max(0.1, self._printed + self._period - time.perf_counter())):  # a text may be empty
      if time.perf_counter() - self._printed >= self._period and (text := self.text()):
        self.console.out(text, highlight=False)

  def text(self) -> str:
    """Returns what is being done, and for how long; '' where nothing is."""
    with self._lock:
      found = self._compiling or self._open
      if not found:
        return ''
      text, start = found[-1]
    if callable(text):
      return text()
    seconds = time.perf_counter() - start
    return f'{text} ({seconds:.0f} s)' if seconds >= 1 else text
