"""Judges a solution from outside: evaluates a test, asks the solution's process for values, and compares them here.

The evaluator walks the syntax tree that checks.py has read, and asks `solution.Solution` for values of the solution. It
executes neither the test nor anything that the solution sends.

Everything is bounded: the length and depth of an answer, the steps and the time of a test, the size of its values.
"""

import ast
import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxpost.workers import checks, runner, values
from jaxpost.workers.solution import Solution

_STEPS = 1_000_000  # nodes that one test evaluates
_MODULES = {'math': math, 'collections': collections}


@dataclasses.dataclass(frozen=True, eq=False)
class _Function:
  """A function that the test defines."""

  names: list[str]
  body: list[ast.stmt] | ast.expr
  scope: collections.ChainMap


@dataclasses.dataclass(frozen=True, eq=False)
class _Method:
  """A method of a plain value."""

  owner: Any
  name: str


class _Return(Exception):
  """Carries the value of a return statement, its only argument."""


def passed(test: checks.Test, ask: Callable[[str], str | None], deadline: float) -> bool:
  """Evaluates a test; True if it ends and every assertion holds.

  Args:
    ask: sends a line to the solution and returns its answer, None if there is none.
    deadline: the time.monotonic() at which the test fails.

  Raises:
    UnreadableTest: if the evaluation reaches an expression that cannot be judged.
    RewardError: if `ask` raises it, because the sandbox has ended.
  """
  evaluator = Evaluator(test, ask, deadline)
  try:
    evaluator.block(test.tree.body, collections.ChainMap())
  except (values.Ended, values.TooLarge, *values.ERRORS):
    return False
  return not evaluator.solution.ended  # a `finally` that returns hides the exception


class Evaluator:
  """Evaluates one test; a method for each kind of node, named as the node is."""

  def __init__(self, test: checks.Test, ask: Callable[[str], str | None], deadline: float) -> None:
    self._solution_builtin = test.own
    self._exact = test.exact
    self.solution = Solution(ask, deadline)
    self.ask = self.solution.ask
    self._deadline = deadline
    self._steps = 0

  # --------------------------------------------------------------- statements

  def block(self, body: list[ast.stmt], scope: collections.ChainMap) -> None:
    """Evaluates statements in a scope."""
    for node in body:
      getattr(self, f'_{type(node).__name__}')(node, scope)

  def _Assert(self, node, scope) -> None:
    if not values.plain(self._value(node.test, scope)):
      raise AssertionError

  def _Expr(self, node, scope) -> None:
    """A call whose result is not used may change its arguments in place, so the changed ones are sent back."""
    call = node.value
    if not isinstance(call, ast.Call):
      self._value(call, scope)
      return
    function = self._value(call.func, scope)
    arguments, named = self._arguments(call, scope)
    if not isinstance(function, values.Handle):
      self.apply(function, arguments, named)
      return
    changed, _ = self.ask('change', function, arguments, named)
    for old, new in zip(arguments, changed):
      if type(old) is type(new) is list:
        old[:] = new
      elif type(old) is type(new) in (dict, set):
        old.clear()
        old.update(new)

  def _Assign(self, node, scope) -> None:
    value = self._value(node.value, scope)
    for target in node.targets:
      self._bind(target, value, scope)

  def _AnnAssign(self, node, scope) -> None:
    if node.value:
      self._bind(node.target, self._value(node.value, scope), scope)

  def _AugAssign(self, node, scope) -> None:
    value = values.binary(node.op, self._Name(node.target, scope), self._value(node.value, scope))
    self._bind(node.target, value, scope)

  def _bind(self, target, value, scope) -> None:
    if isinstance(target, ast.Name):
      scope[target.id] = value
      return
    parts = self.items(value)
    if len(parts) != len(target.elts):
      raise ValueError('the number of values differs')
    for part, item in zip(target.elts, parts):
      self._bind(part, item, scope)

  def _For(self, node, scope) -> None:
    for item in self.items(self._value(node.iter, scope)):
      self._bind(node.target, item, scope)
      self.block(node.body, scope)
    self.block(node.orelse, scope)

  def _If(self, node, scope) -> None:
    self.block(node.body if values.plain(self._value(node.test, scope)) else node.orelse, scope)

  def _FunctionDef(self, node, scope) -> None:
    scope[node.name] = self._Lambda(node, scope)

  def _Return(self, node, scope) -> None:
    raise _Return(self._value(node.value, scope) if node.value else None)

  def _Pass(self, node, scope) -> None:
    """Does nothing."""

  def _Import(self, node, scope) -> None:
    for alias in node.names:
      scope[alias.name] = _MODULES.get(alias.name)

  def _ImportFrom(self, node, scope) -> None:
    for alias in node.names:
      if node.module in _MODULES:
        scope[alias.name] = values.member(_MODULES[node.module], alias.name)

  def _Try(self, node, scope) -> None:
    try:
      self.block(node.body, scope)
    except values.ERRORS as error:
      for handler in node.handlers:
        if handler.type is None or _classes(handler.type) & _names_of(error):
          self.block(handler.body, scope)
          break
      else:
        raise
    else:
      self.block(node.orelse, scope)
    finally:
      self.block(node.finalbody, scope)

  def _With(self, node, scope) -> None:
    """`with pytest.raises(NAME):`, the only `with` that checks.py accepts."""
    try:
      self.block(node.body, scope)
    except values.ERRORS as error:
      if _classes(node.items[0].context_expr.args[0]) & _names_of(error):
        return
      raise
    raise AssertionError('nothing was raised')

  # -------------------------------------------------------------- expressions

  def _value(self, node: ast.expr, scope: collections.ChainMap) -> Any:
    """Returns the value of an expression; `Ended` beyond the test's steps or time."""
    self._steps += 1
    if self._steps > _STEPS or time.monotonic() > self._deadline:
      raise values.Ended
    return getattr(self, f'_{type(node).__name__}')(node, scope)

  def items(self, value: Any) -> list:
    """Returns the items that iteration over a value yields, as a list."""
    items = self.ask('apply', 'list', value) if isinstance(value, values.Handle) else value
    if isinstance(items, range) and len(items) > _STEPS:
      raise values.TooLarge
    if isinstance(items, values.Handle):  # The process of the solution sent an object instead of a list.
      raise values.Ended
    return list(items)

  def _Constant(self, node, scope) -> Any:
    return node.value

  def _Name(self, node, scope) -> Any:
    if node.id in scope:
      return scope[node.id]
    if node.id == '__name__':
      return '__main__'
    if node.id != self._solution_builtin and node.id in (*checks.FUNCTIONS, *checks.KINDS):
      return values.Builtin(node.id)
    return self.ask('name', node.id)

  def _Attribute(self, node, scope) -> Any:
    owner = self._value(node.value, scope)
    if owner is math or owner is collections:
      return values.member(owner, node.attr)
    if isinstance(owner, values.Handle):
      return self.ask('attribute', owner, node.attr)
    if isinstance(owner, checks.PLAIN) and hasattr(owner, node.attr):
      if node.attr in checks.METHODS:
        return _Method(owner, node.attr)
      if node.attr in checks.FIELDS:
        return getattr(owner, node.attr)
    if node.attr == '__class__':
      return values.call_builtin(values.Builtin('type'), [owner], {}, self)
    if node.attr == '__name__' and isinstance(owner, values.Builtin):
      return owner.name
    if isinstance(owner, values.Builtin):
      raise checks.UnreadableTest(f'line {node.lineno} uses {owner.name}.{node.attr}')
    raise AttributeError(node.attr)

  def _Call(self, node, scope) -> Any:
    function = self._value(node.func, scope)
    arguments, named = self._arguments(node, scope)
    return self.apply(function, arguments, named)

  def _arguments(self, node, scope) -> tuple[list, dict]:
    named: dict[str, Any] = {}
    for keyword in node.keywords:
      value = self._value(keyword.value, scope)
      named.update(value if keyword.arg is None else {keyword.arg: value})
    return self._elements(node.args, scope), named

  def _elements(self, nodes: list[ast.expr], scope) -> list:
    out = []
    for node in nodes:
      starred = isinstance(node, ast.Starred)
      value = self._value(node.value if starred else node, scope)
      out += self.items(value) if starred else [value]
    return out

  def apply(self, function: Any, arguments: list, named: dict) -> Any:
    """Calls a function of the solution, of the test, or of the table of builtins."""
    if isinstance(function, values.Handle):
      return self.ask('call', function, arguments, named)
    if isinstance(function, _Function):
      return self._call_function(function, arguments, named)
    if isinstance(function, _Method):
      return values.call_method(function.owner, function.name, arguments, named, self)
    if isinstance(function, values.Builtin):
      return values.call_builtin(function, arguments, named, self)
    raise TypeError('not callable')

  def _call_function(self, function: _Function, arguments: list, named: dict) -> Any:
    scope = function.scope.new_child({**dict(zip(function.names, arguments)), **named})
    if len(arguments) > len(function.names) or set(function.names) - set(scope.maps[0]):
      raise TypeError('wrong number of arguments')
    if isinstance(function.body, ast.expr):
      return self._value(function.body, scope)
    try:
      self.block(function.body, scope)
    except _Return as result:
      return result.args[0]
    return None

  def _Lambda(self, node, scope) -> _Function:
    """Returns the function of a lambda or of a `def`."""
    return _Function([argument.arg for argument in (*node.args.posonlyargs, *node.args.args)], node.body, scope)

  def _Compare(self, node, scope) -> bool:
    left = self._value(node.left, scope)
    for kind, part in zip(node.ops, node.comparators):
      right = self._value(part, scope)
      if isinstance(right, values.Handle) and isinstance(kind, (ast.In, ast.NotIn)):
        right = self.items(right)
      if not values.compare(kind, left, right, self._exact):
        return False
      left = right
    return True

  def _BoolOp(self, node, scope) -> Any:
    stops = isinstance(node.op, ast.Or)
    for part in node.values:
      value = values.plain(self._value(part, scope))
      if bool(value) == stops:
        break
    return value

  def _BinOp(self, node, scope) -> Any:
    return values.binary(node.op, self._value(node.left, scope), self._value(node.right, scope))

  def _UnaryOp(self, node, scope) -> Any:
    value = values.plain(self._value(node.operand, scope))
    return not value if isinstance(node.op, ast.Not) else values.UNARY[type(node.op)](value)

  def _IfExp(self, node, scope) -> Any:
    return self._value(node.body if values.plain(self._value(node.test, scope)) else node.orelse, scope)

  def _Subscript(self, node, scope) -> Any:
    owner, key = self._value(node.value, scope), self._value(node.slice, scope)
    if not isinstance(owner, values.Handle):
      return owner[key]
    if isinstance(key, slice):
      return self.ask('slice', owner, key.start, key.stop, key.step)
    return self.ask('item', owner, key)

  def _Slice(self, node, scope) -> slice:
    return slice(*(part and self._value(part, scope) for part in (node.lower, node.upper, node.step)))

  def _List(self, node, scope) -> list:
    return self._elements(node.elts, scope)

  def _Tuple(self, node, scope) -> tuple:
    return tuple(self._elements(node.elts, scope))

  def _Set(self, node, scope) -> set:
    return runner.distinct(set, self._elements(node.elts, scope))

  def _Dict(self, node, scope) -> dict:
    out: dict[Any, Any] = {}
    for key, part in zip(node.keys, node.values):
      value = self._value(part, scope)
      out.update(value if key is None else {self._value(key, scope): value})
    return out

  def _JoinedStr(self, node, scope) -> str:
    return ''.join(str(self._value(part, scope)) for part in node.values)

  def _FormattedValue(self, node, scope) -> str:
    return str(values.plain(self._value(node.value, scope)))

  def _ListComp(self, node, scope) -> list:
    return list(self._rows(node.generators, scope, node.elt))

  _GeneratorExp = _ListComp

  def _SetComp(self, node, scope) -> set:
    return runner.distinct(set, self._ListComp(node, scope))

  def _DictComp(self, node, scope) -> dict:
    pairs = self._rows(node.generators, scope, ast.Tuple([node.key, node.value], ast.Load()))
    return runner.distinct(dict, list(pairs))

  def _rows(self, generators: list[ast.comprehension], scope, element: ast.expr) -> Iterator[Any]:
    """Yields the elements of a comprehension."""
    if not generators:
      yield self._value(element, scope)
      return
    outer, *inner = generators
    for item in self.items(self._value(outer.iter, scope)):
      inner_scope = scope.new_child()
      self._bind(outer.target, item, inner_scope)
      if all(values.plain(self._value(test, inner_scope)) for test in outer.ifs):
        yield from self._rows(inner, inner_scope, element)


def _classes(node: ast.expr) -> set[str]:
  """Returns the names of the exceptions that a handler catches."""
  attributes = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
  return attributes | {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _names_of(error: Exception) -> set[str]:
  """Returns the names of the class of an error and its bases, whether the solution or the test has raised it."""
  return set(error.names) if isinstance(error, values.Raised) else {kind.__name__ for kind in type(error).__mro__}
