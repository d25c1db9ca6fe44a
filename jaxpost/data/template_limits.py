"""Limits the steps and the memory of chat templates, which come with models from untrusted sources.

Jinja's sandbox protects files and Python's attributes, but does not stop a template that computes forever. Here every
loop and call of a template costs steps, and the size of every value that it makes is limited.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes, visitor

STEPS = 400_000  # limit for one chat; a template takes a few per message
SIZE = 1 << 24  # limit of the characters of a value
_MEMBER = 100  # characters that a member of a list or dict counts as
_MAX_INTEGER = 100_000  # limit of an integer argument of a function, such as a width or a count
_WIDE = re.compile(r'\d{5}|\*')  # a large or variable width in a format


class _Budget(threading.local):
  remaining = STEPS


_BUDGET = _Budget()


@functools.cache
def install(utils: types.ModuleType) -> None:
  """Makes `transformers.utils.chat_template_utils` compile chat templates with the limits."""
  compile_: Any = getattr(utils, '_compile_jinja_template', None)  # it has no public name
  if not hasattr(compile_, '__wrapped__'):
    logging.warning('this version of transformers compiles chat templates elsewhere: they run without limits')
    return

  @functools.lru_cache
  def compile_limited(text: str) -> jinja2.Template:
    # Take a new environment from an empty template: compiling `text` would already compute its constants.
    return limit(compile_.__wrapped__('').environment, text)

  utils._compile_jinja_template = compile_limited


def begin() -> None:
  """Resets the steps of this thread, for the next chat."""
  _BUDGET.remaining = STEPS


def limit(env: jinja2.sandbox.SandboxedEnvironment, source: str) -> jinja2.Template:
  """Compiles a template whose rendering raises jinja2.TemplateError beyond a limit; `env` must not be used again."""
  call, binop = env.call, env.call_binop
  hooks = {'limited_step': _spend, 'limited_value': _sized, 'limited_items': _items, 'limited_text': _text}
  hook_ids = {*map(id, hooks.values())}

  def limited_call(context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    if id(function) in hook_ids:
      return function(*args)  # without kwargs, the variables of the loop
    _spend(1)
    _check_integers((*args, *kwargs.values()), _MAX_INTEGER)
    method = getattr(function, '__wrapped__', function)  # the sandbox wraps str.format
    owner, name = getattr(method, '__self__', None), getattr(method, '__name__', '')
    if isinstance(owner, str):
      if name == 'join' and args:
        args = (list(args[0]), *args[1:])
      _check_text_method(name, owner, args)
    return _sized(call(context, function, *args, **kwargs))

  def limited_binop(context: Any, operator: str, left: Any, right: Any) -> Any:
    if operator == '+' and isinstance(left, str) and isinstance(right, dict):
      right = json.dumps(right, ensure_ascii=False)  # DeepSeek's templates expect arguments of calls as text
    if operator == '**' or operator == '*' and _product(left, right) > SIZE:
      _refuse(f'computes {operator} of large values')
    if operator == '%' and isinstance(left, str) and _WIDE.search(left):
      _refuse('formats with a large width')
    return _sized(binop(context, operator, left, right))

  vars(env).update(hooks, call=limited_call, call_binop=limited_binop, finalize=_sized)
  env.intercepted_binops = frozenset(('+', '*', '**', '%'))
  env.globals.pop('lipsum', None)
  env.filters = {name: _limited_filter(name, fn) for name, fn in env.filters.items()}
  return env.from_string(_Counted().visit(env.parse(source)))


class _Counted(visitor.NodeTransformer):
  """Adds a call of a hook to each loop, and around each list, dict, tuple and concatenation."""

  def visit_For(self, node: nodes.For) -> nodes.For:
    self.generic_visit(node)
    text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    node.body.insert(0, nodes.ExprStmt(_hook('limited_step', nodes.Const(1 + text // 1000))))
    node.iter = _hook('limited_items', node.iter)
    return node

  def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
    self.generic_visit(node)
    return _hook('limited_text', *node.nodes)

  def visit_Tuple(self, node: nodes.Literal) -> nodes.Node:
    self.generic_visit(node)
    return _hook('limited_value', node) if getattr(node, 'ctx', 'load') == 'load' else node  # others are targets

  visit_List = visit_Dict = visit_Tuple


def _hook(name: str, *args: nodes.Node) -> nodes.Call:
  return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _refuse(action: str) -> None:
  raise jinja2.TemplateError(f'{action}, which a chat template has no need of')


def _spend(steps: int) -> None:
  _BUDGET.remaining -= steps
  if _BUDGET.remaining < 0:
    _refuse(f'takes more than {STEPS:,} steps')


def _size(value: Any) -> int:
  """Returns the size of a value in characters, with all of its members."""
  total, unvisited = 0, [value]
  while unvisited:
    part = unvisited.pop()
    if isinstance(part, (str, bytes)):
      total += len(part)
    elif isinstance(part, int):
      total += part.bit_length() // 8
    elif isinstance(part, dict):
      total += _MEMBER * len(part)
      unvisited += [*part.keys(), *part.values()]
    elif isinstance(part, (list, tuple, set)):
      total += _MEMBER * len(part)
      unvisited += part
    if total > SIZE:
      _refuse(f'makes a value of more than {SIZE:,} characters')
  return total


def _sized(value: Any) -> Any:
  if not isinstance(value, str) or len(value) >= 1000:  # short texts, which most values are, cost no steps
    _spend(_size(value) // 1000)
  return value


def _items(value: Any) -> Any:
  if hasattr(value, '__len__'):
    _spend(len(value) // 10)
  return value


def _text(*parts: Any) -> str:
  _sized(parts)
  return ''.join(map(str, parts))


def _product(left: Any, right: Any) -> int:
  """Returns the size of left * right."""
  if isinstance(left, int) and isinstance(right, int):
    return left.bit_length() + right.bit_length()
  count = left if isinstance(left, int) else right
  return _size(right if isinstance(left, int) else left) * count if isinstance(count, int) else 0


def _check_integers(values: tuple, largest: int) -> None:
  if any(isinstance(value, int) and abs(value) > largest for value in values):
    _refuse(f'gives a function a number above {largest:,}')


def _check_text_method(name: str, owner: str, args: tuple) -> None:
  """Refuses a call of a string method (or of the filter of that name) whose result would be large."""
  size = 0
  if name in ('format', 'format_map') and _WIDE.search(owner) or name in ('expandtabs', 'translate'):
    _refuse(f'calls {name}')
  if name == 'replace' and len(args) > 1:
    size = len(owner) + owner.count(str(args[0])) * len(str(args[1]))
  elif name == 'join' and args:
    size = _size(args[0]) + len(owner) * len(args[0])
  if size > SIZE:
    _refuse(f'makes a text of more than {SIZE:,} characters')


def _limited_filter(name: str, function: Callable) -> Callable:
  @functools.wraps(function)
  def limited(*args: Any, **kwargs: Any) -> Any:
    _spend(1)
    _check_integers((*args, *kwargs.values()), 100 if name in ('indent', 'tojson') else _MAX_INTEGER)
    texts = [x for x in (*args, *kwargs.values()) if isinstance(x, str)]
    if name in ('replace', 'format') and texts:
      _check_text_method(name, texts[0], tuple(texts[1:]))
    if name == 'indent' and len(texts) > 1 and texts[0].count('\n') * len(texts[1]) > SIZE:
      _refuse('indents by a large text')
    if name == 'join' and texts:  # the last text is the separator
      for value in args:
        if isinstance(value, (list, tuple)):
          _check_text_method(name, texts[-1], (value,))
    return _sized(function(*args, **kwargs))

  return limited
