"""Asks the process of a solution for values, and reads its answers as plain data.

An answer is JSON, which `runner.decode` turns into plain values. An object of another class stays in the solution's
process and is a `values.Handle` here; its attributes and the results of its calls are further requests.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from jaxpost.workers import checks, runner, values


class Solution:
  """Sends requests to the process of a solution.

  Attributes:
    ended: True after an answer that did not come, or was too long.

  Args:
    ask_line: sends a line to the process and returns its answer, None if there is none.
    deadline: the time.monotonic() after which requests raise `Ended`.
  """

  def __init__(self, ask_line: Callable[[str], str | None], deadline: float) -> None:
    self._ask_line = ask_line
    self._deadline = deadline
    self.ended = False

  def ask(self, verb: str, *parts) -> Any:
    """Sends one request, see runner.py, and returns the value in its answer.

    Raises:
      Ended: there is no valid answer in time.
      Raised: the solution raised.
      UnreadableTest: one of `parts` has no plain form.
    """
    if time.monotonic() > self._deadline:
      raise values.Ended
    try:
      line = json.dumps([runner.encode(part, _number) for part in (verb, *parts)])
    except ValueError:  # A value is nested deeper than the limit.
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
  """Returns the number of an object of the solution; UnreadableTest for others, such as functions of the test."""
  if isinstance(value, values.Handle):
    return value.number
  raise checks.UnreadableTest('it gives the solution a function; give it plain values')
