"""Shows on the console what a run is doing.

On a terminal, the last line of the screen shows what is being done before and between steps, and for how long.
Elsewhere such a line is printed whenever nothing has been printed for almost five seconds. Imports no JAX.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import rich.console

PERIOD_S = 4.5  # without output after which a line is printed, so that there is one every five seconds


class Console(rich.console.Console):
  """A console whose reader may end, as in `| head`: the run continues, and metrics.jsonl has all values."""

  def on_broken_pipe(self) -> None:
    with contextlib.suppress(SystemExit):  # raised by rich after it has turned off the output
      super().on_broken_pipe()


class Activity(rich.console.RenderHook):
  """Shows what is being done: `with activity('reading data'): ...`.

  One activity is shown at a time: the innermost one.
  """

  def __init__(self, console: rich.console.Console, verbose: bool = False, period_s: float = PERIOD_S):
    """verbose: whether to print tables instead of single lines."""
    self.console, self.verbose, self._period = console, verbose, period_s
    self._live = console.is_terminal and not console.is_dumb_terminal
    self._lock = threading.Lock()
    self._open: list[list] = []  # [text, start] of each activity, innermost last
    self._compiling: list[list] = []  # the same for each program that is being compiled
    self._count = ''  # '3/10: ', the number of the newest of these, out of all
    self._printed = time.perf_counter()  # time of the last output, or of the start
    self._thread = threading.Thread()  # a new one for each outermost activity
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
    """Replaces the text of the current activity, for example to show its progress."""
    with self._lock:
      if self._open:
        self._open[-1][0] = text

  @contextlib.contextmanager
  def compiling(self, name: str, number: int, planned: int) -> Iterator[None]:
    """Shows that program `number` (from 1) of `planned` (0: unknown) is compiled; for `Ledger.announce`."""
    entry = [name, time.perf_counter()]
    self._count = f'{number}/{planned}: ' if planned else ''
    self._compiling.append(entry)
    try:
      yield
    finally:
      self._compiling.remove(entry)

  def following(self, doing: Callable[[], str]) -> contextlib.AbstractContextManager:
    """Prints what `doing` returns after each period without output; nothing on a terminal, which shows a bar."""
    return contextlib.nullcontext() if self._live else self(doing)

  def process_renderables(self, renderables: list) -> list:
    """Records the time of an output; called by the console."""
    self._printed = time.perf_counter()
    return renderables

  def _show(self) -> None:
    """Updates the line each second on a terminal; elsewhere prints one after each period without output."""
    if self._live:
      with self.console.status(self.text()) as status:
        while not self._wake.wait(1.0):
          status.update(self.text())
      return
    while not self._wake.wait(max(0.1, self._printed + self._period - time.perf_counter())):  # the text may be empty
      if time.perf_counter() - self._printed >= self._period and (text := self.text()):
        self.console.out(text, highlight=False)

  def text(self) -> str:
    """Returns what is being done, and for how long; '' if nothing is."""
    with self._lock:
      entries = self._compiling or self._open
      if not entries:
        return ''
      text, start = entries[-1]
    if callable(text):
      return text()
    if entries is self._compiling:  # of several at a time one is named, but all are counted
      text = f'compiling {self._count}{text}'
    seconds = time.perf_counter() - start
    return f'{text} ({seconds:.0f} s)' if seconds >= 1 else text
