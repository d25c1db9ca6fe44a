"""Derives how often the loops of a compiled program run, from the HLO of their counters and bounds.

XLA annotates some loops with their trip count. For others it follows from the condition (`counter < bound`), the
counter's first value and its increment, if these are constants, possibly passed through tuples and fusions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from jaxpost.planning import hlo


class Loops:
  """The loops of a parsed program."""

  def __init__(
    self,
    computations: dict[str, dict[str, hlo.Op]],
    callers: dict[str, tuple[str, hlo.Op]],
    iterations: Callable[[str], int | None],
  ):
    """Takes the result of `hlo.parse`.

    Args:
      computations: {name: {name: instruction}}.
      callers: {computation: (computation, instruction) that runs it}.
      iterations: `op_name` of a loop whose end depends on data -> its largest number of iterations, or None.
    """
    self._computations = computations
    self._callers = callers
    self._iterations = iterations

  def trips(self, caller: str, op: hlo.Op) -> int | None:
    """Returns how often a loop runs; None if it depends on data."""
    annotated = re.search(r'known_trip_count\W+n\W+(\d+)', op.text)
    if annotated:
      return int(annotated[1])
    ops = self._computations[op.attribute('condition').lstrip('%')]
    comparisons = [o for o in ops.values() if o.kind == 'compare']
    root = next(o for o in ops.values() if o.root)
    if root.kind == 'fusion':
      inner = self._computations[root.attribute('calls').lstrip('%')]
      comparisons = [o for o in inner.values() if o.kind == 'compare']
    if len(comparisons) == 1:
      index = self._counter(ops, root, comparisons[0])
      if index is not None:
        first = self._initial(caller, op, index)
        step = self._step(op, index, first)
        bound = self._bound(caller, op, ops, root, comparisons[0])
        if first is not None and bound is not None and step is not None and step > 0:
          if 'direction=LE' in comparisons[0].text:  # the bound is included
            bound += 1
          return max(0, math.ceil((bound - first) / step))
    return self._iterations(hlo.op_name(op))

  def _sources(self, ops: dict[str, hlo.Op], root: hlo.Op, comparison: hlo.Op) -> list[hlo.Op | None]:
    """Returns the operations on both sides of a comparison inside the condition of a loop."""
    out: list[hlo.Op | None] = []
    for name in comparison.inputs:
      source: hlo.Op | None
      if root.kind == 'fusion':
        inner = self._computations[root.attribute('calls').lstrip('%')]
        source = inner[name]
        if source.kind == 'parameter':
          source = ops.get(root.inputs[int(source.inner)])
      else:
        source = ops.get(name)
      while source and source.kind in ('bitcast', 'copy', 'convert'):
        source = ops.get(source.inputs[0])
      out.append(source)
    return out

  def _counter(self, ops: dict[str, hlo.Op], root: hlo.Op, comparison: hlo.Op) -> int | None:
    """Returns the index of the counter in the loop's tuple; None if the left side is not a field of it."""
    left = self._sources(ops, root, comparison)[0]
    if left is None or left.kind != 'get-tuple-element':
      return None
    return int(left.attribute('index'))

  def _bound(self, caller: str, loop: hlo.Op, ops: dict[str, hlo.Op], root: hlo.Op, comparison: hlo.Op) -> int | None:
    """Returns the number that the counter is compared with; None if it depends on data."""
    right = self._sources(ops, root, comparison)[1]
    if right is None:
      return None
    if right.kind == 'constant':
      return hlo.constant(right)
    if right.kind == 'get-tuple-element':
      return self._initial(caller, loop, int(right.attribute('index')))
    return None

  def _initial(self, caller: str, loop: hlo.Op, index: int) -> int | None:
    """Returns the value of a field of the loop's tuple before the first iteration."""
    return self._field(caller, loop.inputs[0], index)

  def _field(self, name: str, value: str, index: int) -> int | None:
    """Returns the constant at `index` of a tuple; None if it is not constant."""
    ops = self._computations[name]
    op = ops.get(value)
    while op and op.kind in ('copy', 'opt-barrier'):
      op = ops.get(op.inputs[0])
    if op is None:
      return None
    if op.kind == 'tuple':
      return self._number(name, op.inputs[index], {})
    if op.kind == 'parameter' and name in self._callers:
      outer, call = self._callers[name]
      if call.kind == 'while':
        return self._field(outer, call.inputs[0], index)
    return None

  def _step(self, loop: hlo.Op, index: int, first: int | None) -> int | None:
    """Returns how much an iteration adds to the counter."""
    body = loop.attribute('body').lstrip('%')
    ops = self._computations[body]
    root = next(o for o in ops.values() if o.root)
    if root.kind != 'tuple' or first is None:
      return None
    after = self._number(body, root.inputs[index], {index: first})
    return None if after is None else after - first

  def _number(self, name: str, value: str, state: dict[int, int]) -> int | None:
    """Evaluates a scalar that depends on constants and `state`, the fields of the loop's tuple; None for others."""
    ops = self._computations[name]
    op = ops.get(value)
    if op is None:
      return None

    def operand(i: int) -> int | None:
      return self._number(name, op.inputs[i], state)

    if op.kind == 'constant':
      return hlo.constant(op)
    if op.kind in ('copy', 'bitcast', 'convert', 'reshape', 'copy-done', 'copy-start'):
      return operand(0)
    if op.kind == 'get-tuple-element':
      index = int(op.attribute('index'))
      source = ops.get(op.inputs[0])
      if source and source.kind == 'parameter':
        if index in state:
          return state[index]
        return self._field(name, source.name, index)
      return self._field(name, op.inputs[0], index)
    if op.kind in ('add', 'subtract'):
      return _sum(op.kind, operand(0), operand(1))
    if op.kind == 'fusion':
      return self._fused_number(name, op, state)
    return None

  def _fused_number(self, name: str, op: hlo.Op, state: dict[int, int]) -> int | None:
    """Evaluates a fusion of sums, as `_number` does."""
    inner = self._computations[op.attribute('calls').lstrip('%')]

    def value(o: hlo.Op) -> int | None:
      if o.kind == 'parameter':
        return self._number(name, op.inputs[int(o.inner)], state)
      if o.kind == 'constant':
        return hlo.constant(o)
      if o.kind in ('copy', 'bitcast'):
        return value(inner[o.inputs[0]])
      if o.kind in ('add', 'subtract'):
        left, right = (value(inner[name]) for name in o.inputs)
        return _sum(o.kind, left, right)
      return None

    return value(next(o for o in inner.values() if o.root))


def _sum(kind: str, left: int | None, right: int | None) -> int | None:
  """Returns the result of an 'add' or 'subtract'; None where one of its operands is unknown."""
  if left is None or right is None:
    return None
  return left + right if kind == 'add' else left - right
