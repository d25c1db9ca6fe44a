"""One field of the config schema: its default, help text and range."""

from __future__ import annotations

import dataclasses
from typing import Any


def option(
  default: Any,
  help_: str,
  *,
  lo: float | None = None,
  hi: float | None = None,
  choices: tuple | None = None,
  each: type | None = None,
  auto: Any = None,
) -> Any:
  """Returns a dataclass field with a help text and the values it may take.

  Args:
    default: the value of a config that does not set the field.
    help_: one phrase or sentence for docs/config.md.
    lo: smallest value.
    hi: largest value.
    choices: all values that are allowed.
    each: type of the members of a tuple.
    auto: not None for a field whose default stands for the algorithm's value
      (`Algorithm.defaults`); `auto` is used where the algorithm has none.
  """
  given = {'default_factory': dict} if default == {} else {'default': default}
  return dataclasses.field(metadata=dict(help=help_, lo=lo, hi=hi, choices=choices, each=each, auto=auto), **given)
