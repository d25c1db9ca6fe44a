"""Operations on plain values of a test, outside of the solution's process: comparison, operators, functions.

Values are compared as Python compares them, with one exception: a bool equals a bool only, also inside lists and dicts.
An int equals a float of the same value. An object that stayed in the solution's process, a `Handle`, is not compared.
All values that a test computes are bounded: a solution that returns 10 ** 9 must not make its judge run out of memory.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxpost.workers import checks, runner

if TYPE_CHECKING:
  from jaxpost.workers.dialog import Evaluator

# Limits of the values that a test makes
_ITEMS = 1 << 20  # items of a container, characters of a text
_TEXT = 1 << 24  # characters of a text that is joined or formatted
_POWER_BITS = 3 << 12  # bits of the three integers of pow together
_DIGITS = 4300  # digits of a rounded integer
_FLOAT = 400  # characters of the longest float, written with %f
_WIDTHS = re.compile(r'[%)][-+ #0]*(?:\*|(\d*))(?:\.(\d*))?')  # width and precision of %-8.3f and %(name)8d
_BINARY = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
  ast.BitAnd: operator.and_,
  ast.BitOr: operator.or_,
  ast.BitXor: operator.xor,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
  ast.USub: operator.neg,
  ast.UAdd: operator.pos,
  ast.Invert: operator.invert,
}
_ORDER = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
_KINDS = {name: getattr(builtins, name) for name in checks.KINDS}
# Functions of one iterable, the first argument, which is made a list first.
_OF_ITEMS = ('enumerate', 'list', 'reversed', 'set', 'frozenset', 'tuple', 'sum', 'sorted', 'min', 'max', 'all', 'any')
_TRUE, _FALSE = object(), object()  # stand for True and False in comparisons, as True == 1 in Python


class TooLarge(Exception):
  """A test made a value beyond the limits; the test has failed."""


class Ended(Exception):
  """The solution's process has ended, hangs, or sent no valid answer; the test has failed, and cannot catch this."""


class Raised(Exception):
  """The solution raised; `names` are those of the class and its bases."""

  def __init__(self, names: list[str]) -> None:
    super().__init__(names)
    self.names = names


# Errors that the same test would raise in Python: the test fails, unless it catches them.
ERRORS = (
  Raised,
  ArithmeticError,
  AssertionError,
  AttributeError,
  LookupError,
  MemoryError,
  RecursionError,
  StopIteration,
  TypeError,
  ValueError,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Handle:
  """Stands for an object in the solution's process."""

  number: int
  kind: str


@dataclasses.dataclass(frozen=True)
class Builtin:
  """A function that is evaluated here: a builtin by its name, or one of the standard library."""

  name: str
  function: Callable | None = None


def same(a: Any, b: Any, exact: bool = True) -> bool:
  """Returns whether two plain values are equal; a bool equals a bool only. With exact=False a tuple equals a list."""
  return _marked(a, exact) == _marked(b, exact)


def _marked(value: Any, exact: bool = True) -> Any:
  """Returns a copy in which bools are objects that equal nothing else; TypeError for a `Handle`."""
  if isinstance(value, bool):
    return _TRUE if value else _FALSE
  if isinstance(value, (list, tuple, set, frozenset)):
    kind = list if type(value) is tuple and not exact else type(value)
    return kind(_marked(item, exact) for item in value)
  if isinstance(value, dict):
    return {_marked(key): _marked(item, exact) for key, item in value.items()}
  return plain(value)


def plain(value: Any) -> Any:
  """Returns a plain value; TypeError for an object of the solution, whose methods could return anything."""
  if isinstance(value, Handle):
    raise TypeError(f'an object of class {value.kind} is no plain value')
  return value


def compare(kind: ast.cmpop, a: Any, b: Any, exact: bool) -> bool:
  """Returns the result of one comparison of plain values."""
  plain(a), plain(b)
  if isinstance(kind, (ast.NotEq, ast.NotIn, ast.IsNot)):
    positive = {ast.NotEq: ast.Eq, ast.NotIn: ast.In, ast.IsNot: ast.Is}[type(kind)]
    return not compare(positive(), a, b, exact)
  if isinstance(kind, ast.Eq):
    return same(a, b, exact)
  if isinstance(kind, ast.Is):
    return a is b or isinstance(a, Builtin) and a == b
  if isinstance(kind, ast.In):
    if isinstance(b, range):  # Python would compare a value that is not an int with each item.
      return type(a) in (int, float) and a == a // 1 and int(a) in b
    marked = _marked(a, exact)
    return a in b if isinstance(b, (str, bytes)) else any(marked == _marked(item, exact) for item in b)
  return _ORDER[type(kind)](a, b)


def binary(kind: ast.operator, a: Any, b: Any) -> Any:
  """Returns the result of an arithmetic operator; TooLarge before it would make a large value."""
  if isinstance(kind, ast.Mod) and isinstance(a, (str, bytes)):
    _limit(_formatted_length(a, b), _TEXT)
  if isinstance(kind, (ast.Mult, ast.Pow)) and isinstance(a, int) and isinstance(b, int):
    bits = a.bit_length() + b.bit_length() if isinstance(kind, ast.Mult) else a.bit_length() * abs(b)
    _limit(bits, runner.BITS)
  elif isinstance(kind, ast.Mult):
    for items, times in ((a, b), (b, a)):
      if hasattr(items, '__len__') and isinstance(times, int):
        _limit(len(items) * times, _ITEMS)
  elif isinstance(kind, ast.Add) and hasattr(a, '__len__') and hasattr(b, '__len__'):
    _limit(len(a) + len(b), _ITEMS)
  return _BINARY[type(kind)](a, b)


def _formatted_length(text: str | bytes, values: Any) -> int:
  """Returns a length that `text % values` does not exceed."""
  parts = values if isinstance(values, tuple) else (values,)
  for part in parts:
    plain(part)
  template = text if isinstance(text, str) else text.decode('latin-1')
  longest = len(ascii(values)) + _FLOAT  # of one formatted value
  if '*' in template:  # A value is a width.
    longest += max((abs(part) for part in parts if isinstance(part, int)), default=0)
  widths = (int(digits) for pair in _WIDTHS.findall(template) for digits in pair if digits)
  return len(template) + template.count('%') * longest + sum(widths)


def _limit(size: int, limit: int) -> None:
  if size > limit:
    raise TooLarge


def member(module: Any, name: str) -> Any:
  """Returns a function or constant of math, or collections.Counter."""
  if module is collections and name == 'Counter':
    return Builtin('Counter')
  if module is not math or name not in checks.MATH:
    raise checks.UnreadableTest(f'it uses {module.__name__}.{name}; tests know math: {", ".join(checks.MATH)}')
  value = getattr(math, name)
  return Builtin(name, value) if callable(value) else value


def call_builtin(builtin: Builtin, arguments: list, named: dict, outer: Evaluator) -> Any:
  """Calls a function on plain values; an object of the solution becomes a list first, if an iterable is needed."""
  name = builtin.name
  first = arguments[0] if arguments else None
  if builtin.function:
    if name in ('factorial', 'comb', 'perm'):
      _limit(max((abs(v) for v in arguments), default=0), 5000)
    return builtin.function(*arguments, **named)
  if name in ('map', 'filter', 'zip', 'dict', 'Counter'):
    return _call_lazy(name, arguments, named, outer)
  if isinstance(first, Handle) and name in runner.APPLY:
    return outer.ask('apply', name, first)
  several_values = name in ('min', 'max') and len(arguments) > 1
  if arguments and name in _OF_ITEMS and not several_values:
    arguments = [outer.items(first), *arguments[1:]]
  if name in ('all', 'any'):
    arguments = [[plain(item) for item in items] for items in arguments]
  if name in _BOUNDED:
    return _BOUNDED[name](*arguments, **named)
  named = {k: _callable(v, outer) if k == 'key' else v for k, v in named.items()}
  result = getattr(builtins, name)(*map(plain, arguments), **named)
  return list(result) if name in ('enumerate', 'reversed') else result


def _is_instance(value: Any, classes: Any) -> bool:
  """isinstance for plain values; an object of the solution is an instance of none of the plain classes."""
  classes = classes if isinstance(classes, tuple) else (classes,)
  return not isinstance(value, Handle) and isinstance(value, tuple(_KINDS[kind.name] for kind in classes))


def _pow(base: Any, exp: Any, mod: Any = None) -> Any:
  if mod is None:
    return binary(ast.Pow(), base, exp)
  _limit(sum(value.bit_length() for value in (base, exp, mod)), _POWER_BITS)
  return pow(base, exp, mod)


def _round(number: Any, ndigits: Any = None) -> Any:
  _limit(abs(ndigits or 0), _DIGITS)
  return round(plain(number), ndigits)


def _bytes(source: Any = b'', *encoding: Any, **named: Any) -> bytes:
  if isinstance(source, int):
    _limit(source, _ITEMS)
  return bytes(plain(source), *encoding, **named)


def _sum(items: list, start: Any = 0) -> Any:
  """sum, also of lists or tuples, for which Python copies the whole sum at each step."""
  if type(start) not in (list, tuple):
    return sum(items, start)
  if any(type(item) is not type(start) for item in items):
    raise TypeError(f'not all are a {type(start).__name__}')
  _limit(sum(map(len, items)), _ITEMS)
  return type(start)(part for item in (start, *items) for part in item)


# {name: implementation} of builtins whose arguments or result must be checked.
_BOUNDED: dict[str, Callable] = {
  'print': lambda *values, **options: None,  # the output of a test does not count
  'isinstance': _is_instance,
  'type': lambda value: Builtin(type(plain(value)).__name__),
  'sum': _sum,
  'set': functools.partial(runner.distinct, set),
  'frozenset': functools.partial(runner.distinct, frozenset),
  'pow': _pow,
  'round': _round,
  'bytes': _bytes,
}


def _call_lazy(name: str, arguments: list, named: dict, outer: Evaluator) -> Any:
  """map, filter, zip, dict and Counter; the items that Python yields lazily are returned as a list."""
  if name == 'map':
    columns = [outer.items(value) for value in arguments[1:]]
    return [outer.apply(arguments[0], list(row), {}) for row in zip(*columns)]
  if name == 'filter':
    keep, values = arguments[0], outer.items(arguments[1])
    return [v for v in values if plain(v if keep is None else outer.apply(keep, [v], {}))]
  if name == 'zip':
    return list(zip(*(outer.items(value) for value in arguments)))
  if name == 'Counter':
    values = outer.items(*arguments)
    runner.distinct(set, values)
    return dict(collections.Counter(values))
  pairs = arguments[0].items() if arguments and isinstance(arguments[0], dict) else outer.items(*arguments or ([],))
  return {**runner.distinct(dict, pairs), **named}


def _callable(function: Any, outer: Evaluator) -> Callable:
  """Returns a Python function that calls a function of a test, for `key`."""
  return lambda value: outer.apply(function, [value], {})


def call_method(owner: Any, name: str, arguments: list, named: dict, outer: Evaluator) -> Any:
  """Calls a method of a plain value; checks.METHODS lists them."""
  if isinstance(owner, range):  # Python would compare a value that is not an int with each item.
    owner = outer.items(owner)
  arguments = [outer.items(v) if isinstance(v, Handle) and name in ('join', 'extend') else plain(v) for v in arguments]
  _limit_method(owner, name, arguments)
  if isinstance(owner, (set, frozenset)) and name not in ('add', 'discard', 'remove'):
    arguments = [runner.distinct(set, list(value)) for value in arguments]
  elif isinstance(owner, dict) and name == 'update':
    arguments = [_call_lazy('dict', arguments, {}, outer)]
  if name == 'sort' and 'key' in named:
    named = {**named, 'key': _callable(named['key'], outer)}
  result = getattr(owner, name)(*arguments, **named)
  return list(result) if isinstance(owner, dict) and name in ('keys', 'values', 'items') else result


def _limit_method(owner: Any, name: str, arguments: list) -> None:
  """Raises TooLarge before a method would make a large value."""
  if name == 'replace':
    _limit(len(owner) + owner.count(arguments[0]) * len(arguments[1]), _ITEMS)
  elif name == 'join':
    _limit(len(owner) * len(arguments[0]) + sum(map(len, arguments[0])), _TEXT)
  elif name in ('center', 'ljust', 'rjust', 'zfill'):
    _limit(arguments[0], _ITEMS)
  elif name == 'extend':
    _limit(len(owner) + len(arguments[0]), _ITEMS)
