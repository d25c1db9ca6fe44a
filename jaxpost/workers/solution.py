"""Asks the process of a solution for values, and reads its answers as plain data.

An answer is JSON, of which `runner.decode` makes plain values. An object of another kind stays in the solution's
process and is a `values.Handle` here, whose attributes and results are asked for in turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from jaxpost.workers import checks, runner, values


class Solution:
  """The process of a solution, seen from outside.

  Attributes:
    ended: True once an answer did not come, or was too long.

  Args:
    ask_line: sends a line to the process and returns its answer, None if there is none.
    deadline: of time.monotonic().
  """

  def __init__(self, ask_line: Callable[[str], str | None], deadline: float) -> None:
    self._ask_line = ask_line
    self._deadline = deadline
    self.ended = False

  def ask(self, what: str, *parts) -> Any:
    """Asks for one thing, see runner.py.

    Raises:
      Ended: no plain answer comes.
      Raised: the solution raised.
      UnreadableTest: one of `parts` has no plain form.
    """
    if time.monotonic() > self._deadline:
      raise values.Ended
    try:
      line = json.dumps([runner.encode(part, _number) for part in (what, *parts)])
    except ValueError:  # It is deeper than the limit.
      raise values.Ended from None
    answer = self._ask_line(line)
    if answer is None or len(answer) > runner.REPLY_BYTES:
      self.ended = True
      raise values.Ended
    try:
      data = json.loads(answer)
      if isinstance(data, dict) and list(data) == ['value']:
        return runner.decode(data['value'], values.Handle)
      names = [str(name)[:100] for name in data['raised'][:20]]
    except (ValueError, TypeError, LookupError, RecursionError):
      raise values.Ended from None
    raise values.Raised(names)


def _number(value: Any) -> int:
  """Returns the number of an object of the solution; UnreadableTest for what else has no plain form."""
  if isinstance(value, values.Handle):
    return value.number
  raise checks.UnreadableTest('it gives the solution a function; give it plain values')
