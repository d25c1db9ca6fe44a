"""Derives how often the loops of a compiled program run, from the HLO of their counters and bounds.

XLA annotates some loops with their trip count. For others it follows from the condition (`counter < bound`), the
counter's first value and its increment, if these are constants, possibly passed through tuples and fusions.
"""

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

  def trips(self, caller: str, loop: hlo.Op) -> int | None:
    """Returns how often a loop runs; None if it depends on data."""
    if annotated := re.search(r'known_trip_count\W+n\W+(\d+)', loop.text):
      return int(annotated[1])
    counted = self._counted(caller, loop)
    return self._iterations(hlo.op_name(loop)) if counted is None else counted

  def _counted(self, caller: str, loop: hlo.Op) -> int | None:
    """Returns how often a loop runs by its condition; None if that is no comparison of a counter with a constant."""
    condition = self._called(loop, 'condition')
    root = _root(condition)
    compared = self._called(root, 'calls') if root.kind == 'fusion' else condition
    comparisons = [o for o in compared.values() if o.kind == 'compare']
    if len(comparisons) != 1:
      return None
    counter, bound = (self._source(condition, root, name) for name in comparisons[0].inputs)
    if counter is None or counter.kind != 'get-tuple-element':
      return None
    index = int(counter.attribute('index'))
    first = self._field(caller, loop.inputs[0], index)
    step = self._step(loop, index, first)
    end = self._bound(caller, loop, bound)
    if first is None or step is None or end is None or step <= 0:
      return None
    if 'direction=LE' in comparisons[0].text:  # the bound is included
      end += 1
    return max(0, math.ceil((end - first) / step))

  def _called(self, op: hlo.Op, attribute: str) -> dict[str, hlo.Op]:
    return self._computations[op.computation(attribute)]

  def _source(self, condition: dict[str, hlo.Op], root: hlo.Op, name: str) -> hlo.Op | None:
    """Returns the operation of a loop's condition that gives one side of the comparison, which may be in a fusion."""
    source = condition.get(name)
    if root.kind == 'fusion':
      source = self._called(root, 'calls')[name]
      if source.kind == 'parameter':
        source = condition.get(root.inputs[int(source.inner)])
    while source and source.kind in ('bitcast', 'copy', 'convert'):
      source = condition.get(source.inputs[0])
    return source

  def _bound(self, caller: str, loop: hlo.Op, source: hlo.Op | None) -> int | None:
    """Returns the number that the counter is compared with; None if it depends on data."""
    if source and source.kind == 'constant':
      return hlo.constant(source)
    if source and source.kind == 'get-tuple-element':
      return self._field(caller, loop.inputs[0], int(source.attribute('index')))
    return None

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
    root = _root(self._called(loop, 'body'))
    if root.kind != 'tuple' or first is None:
      return None
    after = self._number(loop.computation('body'), root.inputs[index], {index: first})
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
    inner = self._called(op, 'calls')

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

    return value(_root(inner))


def _root(ops: dict[str, hlo.Op]) -> hlo.Op:
  """Returns the instruction whose result is that of its computation."""
  return next(op for op in ops.values() if op.root)


def _sum(kind: str, left: int | None, right: int | None) -> int | None:
  """Returns the result of an 'add' or 'subtract'; None where one of its operands is unknown."""
  if left is None or right is None:
    return None
  return left + right if kind == 'add' else left - right
