"""A ledger whose compilations are shown by `working`."""

from __future__ import annotations

from typing import Any

from jaxpost.programs import compile as compile_lib
from jaxpost.tools import working


class ShownLedger(compile_lib.Ledger):
  """Every compilation of a command."""

  def begin(self, name: str) -> None:
    """Shows that the compilation of a program begins."""
    super().begin(name)
    working.compiling(name, len(self.begun))

  def add(self, name: str, args: tuple, seconds: float, compiled: Any, flops: Any, calls: int, read: int) -> None:
    """Adds the row of a program, and shows again what goes on after its compilation."""
    working.compiled()
    super().add(name, args, seconds, compiled, flops, calls=calls, read=read)
