"""Parses the tests of a row, and refuses those that cannot be judged outside of the process of the solution.

A test is Python source. It is never executed: `read` parses it and refuses constructs that dialog.py cannot evaluate,
with their names, so that a row whose tests cannot be judged is known before any program runs. Names that a test neither
defines nor imports, and that are no builtins, are the solution's.
"""

import ast
import builtins
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

from jaxpost.workers import runner

MATH = (
  'acos asin atan atan2 ceil comb copysign cos degrees dist e exp fabs factorial floor fmod fsum gcd hypot inf'
  ' isclose isfinite isinf isnan isqrt lcm log log10 log2 nan perm pi pow radians sin sqrt tan tau trunc'
).split()
# Functions that take plain values outside of the solution; dialog.py evaluates them.
FUNCTIONS = (
  'abs all any bool chr dict divmod enumerate filter float frozenset int isinstance len list map max min next ord pow'
  ' range repr reversed round set sorted str sum tuple type zip print'
).split()
KINDS = ('int', 'float', 'str', 'list', 'tuple', 'dict', 'set', 'frozenset', 'bool', 'bytes', 'complex')
# Methods of plain values that dialog.py calls, on each type that has them in Python. A test that names another
# attribute of such values is refused: whether it can be judged must not depend on what the solution returns.
METHODS = frozenset(
  'add append as_integer_ratio bit_count bit_length capitalize casefold center clear conjugate copy count decode'
  ' difference difference_update discard encode endswith extend find get hex index insert intersection'
  ' intersection_update is_integer isalnum isalpha isascii isdecimal isdigit isdisjoint isidentifier islower isnumeric'
  ' isprintable isspace issubset issuperset istitle isupper items join keys ljust lower lstrip partition pop popitem'
  ' remove removeprefix removesuffix replace reverse rfind rindex rjust rpartition rsplit rstrip setdefault sort split'
  ' splitlines startswith strip swapcase symmetric_difference symmetric_difference_update title union update upper'
  ' values zfill __len__ __repr__ __str__'.split()
)
FIELDS = ('real', 'imag', 'numerator', 'denominator', 'start', 'stop', 'step', '__doc__')
PLAIN = (str, list, tuple, dict, set, frozenset, int, float, complex, bytes, range)  # a bool is an int
_REFUSED = {name for kind in PLAIN for name in dir(kind)} - METHODS - {*FIELDS, '__class__'}
# Statements and expressions that dialog.py evaluates; it has a method for each, named as the node is.
_EVALUATED = frozenset(
  'AnnAssign Assert Assign AugAssign Expr For FunctionDef If Import ImportFrom Pass Return Try With'
  ' Attribute BinOp BoolOp Call Compare Constant Dict DictComp FormattedValue GeneratorExp IfExp JoinedStr Lambda'
  ' List ListComp Name Set SetComp Slice Starred Subscript Tuple UnaryOp'.split()
)
_INSTEAD = {
  ast.ClassDef: 'write plain `assert` statements instead of a class of tests',
  ast.While: 'write a `for` loop over a range',
  ast.Lambda: 'only a key of sorted, min and max may be one; give the solution plain values',
  ast.Global: 'pass the value as an argument',
  ast.AsyncFunctionDef: 'write a plain function',
  ast.Await: 'have the solution offer a plain function',
}
_PLAIN = 'compare plain values that the solution returns: assert f(1, 2) == 3'


class UnreadableTest(Exception):
  """A test that cannot be judged from outside; the message names what it uses and what to write instead."""


@dataclasses.dataclass(frozen=True)
class Test:
  """A test that dialog.py can evaluate.

  Attributes:
    tree: the statements.
    own: name of a builtin that here is the solution's function, as in `assert sum(10, 15) == 6`, or ''.
    exact: False if a tuple equals a list, because the expected result was JSON.
  """

  tree: ast.Module
  own: str = ''
  exact: bool = True


@functools.lru_cache(maxsize=1024)
def read(source: str) -> Test:
  """Parses one test; UnreadableTest with the line and what to write instead if it cannot be judged."""
  try:
    tree = ast.parse(source)
    compile(source, 'test.py', 'exec')  # refuses more than the parser does, such as a return in no function
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise UnreadableTest(f'it is no Python: {error}') from None
  _append_calls_of_tests(tree)
  skipped = _not_evaluated(tree)
  for node in ast.walk(tree):
    if node not in skipped:
      _check(node)
  return Test(tree, _own(tree, skipped))


def example(entry_point: str, arguments: list, expected: object) -> Test:
  """Returns the test that `entry_point`, an expression such as 'add' or 'Solution().add', returns `expected`."""
  try:
    function = ast.parse(entry_point, mode='eval').body
  except (SyntaxError, ValueError) as error:
    raise UnreadableTest(f'entry_point={entry_point!r} is no name of a function') from error
  _check_value(arguments, 'inputs')
  _check_value(expected, 'outputs')
  call = ast.Call(function, [ast.Constant(value) for value in arguments], [])
  compared = ast.Compare(call, [ast.Eq()], [ast.Constant(expected)])
  own = entry_point if entry_point in FUNCTIONS else ''
  return Test(ast.Module([ast.Assert(compared, None)], []), own, exact=False)


def _check_value(value: object, column: str) -> None:
  """Refuses a value that no solution can get or return, with which every solution would fail."""
  constants: list[str] = []
  try:
    text = json.dumps(runner.encode(value, lambda _: 0))
    json.loads(text, parse_constant=constants.append)
  except ValueError as error:
    raise UnreadableTest(f'{column} has a value that is {error}') from None
  if len(text) > runner.REPLY_BYTES and column == 'outputs':
    raise UnreadableTest(
      f'{column} has a value of {len(text)} bytes, more than an answer may have, {runner.REPLY_BYTES}'
    )
  if 'NaN' in constants and column == 'outputs':
    raise UnreadableTest(f'{column} has NaN, which equals nothing; write a test with math.isnan')


def _append_calls_of_tests(tree: ast.Module) -> None:
  """Appends a call of each function `test_*` that the module defines and does not call, as pytest does."""
  called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
  for node in list(tree.body):
    if isinstance(node, ast.FunctionDef) and node.name.startswith('test') and node.name not in called:
      call = ast.Call(ast.Name(node.name, ast.Load()), [], [])
      tree.body.append(ast.copy_location(ast.Expr(call), node))
  ast.fix_missing_locations(tree)


def _not_evaluated(tree: ast.Module) -> set[ast.AST]:
  """Returns the nodes that are never evaluated: messages of assertions and annotations."""
  roots = []
  for node in ast.walk(tree):
    roots += [getattr(node, name, None) for name in ('msg', 'annotation', 'returns')]
  return {node for root in roots if isinstance(root, ast.AST) for node in ast.walk(root)}


def _check(node: ast.AST) -> None:
  """Raises UnreadableTest if dialog.py cannot evaluate this node."""
  if isinstance(node, (ast.stmt, ast.expr)) and type(node).__name__ not in _EVALUATED:
    _refuse(node, f'uses `{_text(node)}`')
  if type(node) in _CHECKS:
    _CHECKS[type(node)](node)


def _check_operator(node: ast.operator) -> None:
  raise UnreadableTest(f'uses the operator {type(node).__name__}, which cannot be judged from outside; {_PLAIN}')


def _check_attribute(node: ast.Attribute) -> None:
  if node.attr in _REFUSED:
    _refuse(node, f'uses `{_text(node)}`', 'write an operator, or the value')


def _check_formatted(node: ast.FormattedValue) -> None:
  if node.format_spec or node.conversion != -1:
    _refuse(node, 'formats a value', 'write the text')


def _check_subscript(node: ast.Subscript) -> None:
  """Refuses several slices, as of an array: an array is a list of lists here."""
  if isinstance(node.slice, ast.Tuple) and any(isinstance(part, ast.Slice) for part in node.slice.elts):
    _refuse(node, f'uses `{_text(node)}`')


def _check_function(node: ast.FunctionDef) -> None:
  if node.decorator_list or node.args.vararg or node.args.kwarg:
    _refuse(node, f'has a function with decorators, *args or **kwargs, {node.name}')
  _check_defaults(node)


def _check_defaults(node: ast.FunctionDef | ast.Lambda) -> None:
  if node.args.defaults or node.args.kwonlyargs:
    _refuse(node, 'has a function with defaults')


def _check_targets(node: ast.Assign | ast.AugAssign | ast.For | ast.comprehension) -> None:
  """Refuses to assign to anything but names, and tuples and lists of them."""
  for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
    for part in ast.walk(target):
      if not isinstance(part, (ast.Name, ast.Tuple, ast.List, ast.expr_context)):
        _refuse(target, f'assigns to `{_text(target)}`')


def _check_handler(node: ast.ExceptHandler) -> None:
  if node.name:
    _refuse(node, f'names an exception, `as {node.name}`')


def _check_compare(node: ast.Compare) -> None:
  """Refuses to compare an object of the solution's class, `Point(1, 2)`, as its `__eq__` may return anything."""
  if not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
    return
  for side in (node.left, *node.comparators):
    name = side.func.id if isinstance(side, ast.Call) and isinstance(side.func, ast.Name) else ''
    if name[:1].isupper() and name != 'Counter':
      _refuse(node, f"compares objects of the solution's class {name}", 'compare their plain attributes')


def _check_call(node: ast.Call) -> None:
  name = node.func.id if isinstance(node.func, ast.Name) else ''
  if name == 'isinstance':
    classes = _names(node.args[-1]) if node.args else set()
    if len(node.args) != 2 or not classes or classes - set(KINDS):
      _refuse(node, f'uses `{_text(node)}`', f'isinstance knows {", ".join(KINDS)}')
  arguments = (*node.args, *(keyword.value for keyword in node.keywords))
  if any(isinstance(argument, ast.Lambda) for argument in arguments) and name not in FUNCTIONS:
    _refuse(node, f'gives the solution a function, `{_text(node)}`', 'give it plain values')


def _check_import(node: ast.Import | ast.ImportFrom) -> None:
  """Refuses imports of anything but some functions of math, Counter, pytest.raises and names for types."""
  if isinstance(node, ast.Import):
    for alias in node.names:
      if alias.name not in ('math', 'pytest', 'typing', 'collections') or alias.asname:
        _refuse(node, f'imports {alias.name}', 'a test may import math, collections.Counter and pytest.raises')
    return
  known = {'math': MATH, 'collections': ['Counter'], 'pytest': ['raises'], '__future__': ['annotations']}
  for alias in node.names:
    if alias.asname or node.module not in ('typing', 'solution') and alias.name not in known.get(node.module, ()):
      use = f'imports {alias.name} of {node.module}'
      _refuse(node, use, 'a test may import functions of math, collections.Counter and pytest.raises')


def _check_with(node: ast.With) -> None:
  call = node.items[0].context_expr
  name = _text(call.func) if isinstance(call, ast.Call) else ''
  if len(node.items) > 1 or name not in ('pytest.raises', 'raises') or len(call.args) != 1 or call.keywords:
    _refuse(node, f'uses `with {_text(node.items[0])}`', 'the only one is `with pytest.raises(NAME):`')
  if node.items[0].optional_vars:
    _refuse(node, 'reads the exception that was raised', 'name its class only: `with pytest.raises(NAME):`')


def _own(tree: ast.Module, skipped: set[ast.AST]) -> str:
  """Returns the name of a builtin that is the solution's function, or ''; refuses tests that do not need a solution."""
  nodes = [node for node in ast.walk(tree) if node not in skipped]
  asserts = any(isinstance(n, (ast.Assert, ast.With)) for n in nodes)
  bound = {name for node in nodes for name in _bound_names(node)}
  loaded = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - bound
  called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)} - bound
  functions = called & set(FUNCTIONS)
  free = loaded - set(FUNCTIONS) - set(KINDS) - {'__name__'}
  unknown = sorted(free & set(dir(builtins)))
  if not asserts:
    raise UnreadableTest('it asserts nothing: any program passes it')
  if unknown and len(free) > len(unknown):  # Without other free names it is the solution's function.
    raise UnreadableTest(f'it uses the builtin {unknown[0]}, which cannot be judged from outside; {_PLAIN}')
  if free:
    return ''
  if len(functions) == 1:
    return functions.pop()
  defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
  hint = f'append `{defined[0]}(NAME)` or name the function in a column entry_point' if defined else _PLAIN
  raise UnreadableTest(f'it calls no function of the solution; {hint}')


def _bound_names(node: ast.AST) -> Iterable[str]:
  """Returns the names that a node defines or imports, or uses for exceptions: they are not the solution's."""
  if isinstance(node, ast.Name):
    return [node.id] if isinstance(node.ctx, ast.Store) else []
  if isinstance(node, ast.arg):
    return [node.arg]
  if isinstance(node, ast.FunctionDef):
    return [node.name]
  if isinstance(node, (ast.Import, ast.ImportFrom)):
    # `from solution import f` imports a name of the solution.
    return [] if getattr(node, 'module', None) == 'solution' else [alias.name for alias in node.names]
  if isinstance(node, ast.ExceptHandler) and node.type:
    return _names(node.type)
  if isinstance(node, ast.With):
    return _names(node.items[0].context_expr)
  return []


def _names(node: ast.AST) -> set[str]:
  """Returns the plain names below a node."""
  return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _text(node: ast.AST) -> str:
  text = ast.unparse(node).split('\n')[0]
  return text if len(text) <= 80 else text[:77] + '...'


def _refuse(node: ast.AST, use: str, instead: str = '') -> None:
  instead = instead or _INSTEAD.get(type(node), _PLAIN)
  raise UnreadableTest(f'line {getattr(node, "lineno", 1)} {use}, which cannot be judged from outside; {instead}')


# Further checks of nodes, by their type.
_CHECKS: dict[type[ast.AST], Callable[[Any], None]] = {
  ast.LShift: _check_operator,
  ast.RShift: _check_operator,
  ast.MatMult: _check_operator,
  ast.Attribute: _check_attribute,
  ast.FormattedValue: _check_formatted,
  ast.Subscript: _check_subscript,
  ast.Import: _check_import,
  ast.ImportFrom: _check_import,
  ast.FunctionDef: _check_function,
  ast.Lambda: _check_defaults,
  ast.Assign: _check_targets,
  ast.AugAssign: _check_targets,
  ast.For: _check_targets,
  ast.comprehension: _check_targets,
  ast.With: _check_with,
  ast.ExceptHandler: _check_handler,
  ast.Compare: _check_compare,
  ast.Call: _check_call,
}
