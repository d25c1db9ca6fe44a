"""JSON schemas of an environment's tools, and calls of them.

The tools are the public methods. Their schemas equal those of `transformers.utils.get_json_schema`, made from type
hints and a docstring in Google style; that library is too slow to import in the process of an environment.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxpost.errors import InputError
from jaxpost.workers import call

_NOT_TOOLS = ('reset', 'get_reward', 'close')
_NAMES = {
  int: 'integer',
  float: 'number',
  str: 'string',
  bool: 'boolean',
  list: 'array',
  dict: 'object',
  type(None): 'null',
}
_SECTION = re.compile(r'^\s*(Args|Returns|Raises|Examples?|Yields|Notes?):\s*$', re.M)
_ARGUMENT = re.compile(r'^(\s*)(\w+)(?:\s*\([^)]*\))?\s*:\s*(.*)$')


class CallResult(NamedTuple):
  """The result of a tool call, as TRL passes it to the model: a text, or an error text."""

  text: str | None = None
  error: str | None = None


def tool_schemas(environment: Any, label: str) -> dict[str, dict]:
  """Returns {name: schema} of the public methods.

  label: name of the environment in error messages.

  Raises:
    InputError: if there is no `reset` or no tool, or a method lacks a type or a description.
  """
  names = [
    n
    for n in dir(type(environment))
    if not n.startswith('_') and n not in _NOT_TOOLS and callable(inspect.getattr_static(type(environment), n))
  ]
  if not hasattr(environment, 'reset'):
    raise InputError(f'{label}: has no method reset(self, **row)')
  if not names:
    raise InputError(f'{label}: has no public method that could be a tool')
  return {n: method_schema(getattr(environment, n), f'{label}: {n}') for n in names}


def method_schema(method: Callable, label: str) -> dict:
  """Returns {'type': 'function', 'function': {...}} of a method; InputError if it lacks a type or a description."""
  text = inspect.getdoc(method)
  if not text:
    raise InputError(f'{label}: has no docstring, which tells the model what the tool does')
  description, arguments, returns = _sections(text)
  hints = typing.get_type_hints(method)
  properties = {}
  required = []
  for p in inspect.signature(method).parameters.values():
    if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
      raise InputError(f'{label}: takes *{p.name}; name each argument')
    if p.name not in hints or p.name not in arguments:
      missing = 'type' if p.name not in hints else 'line under Args:'
      raise InputError(f'{label}: argument {p.name} has no {missing}')
    properties[p.name] = {**_type(hints[p.name]), 'description': arguments[p.name]}
    if p.default is p.empty:
      required.append(p.name)
  parameters = {'type': 'object', 'properties': properties}
  if required:
    parameters['required'] = required
  function = dict(name=method.__name__, description=description, parameters=parameters)
  if returns and 'return' in hints:
    function['return'] = {**_type(hints['return']), 'description': returns}
  return {'type': 'function', 'function': function}


def call_tool(environment: Any, name: str, arguments: dict, known: Iterable[str]) -> CallResult:
  """Calls one of the tools, whose names are `known`; a value that is not a string becomes JSON.

  Never raises: an exception of the tool is the error of the result.
  """
  if name not in known:
    return CallResult(error=f'Unknown tool {name}; there are {", ".join(known)}')
  try:
    value = call.finished(getattr(environment, name)(**arguments))
  except BaseException as error:  # the user's code may raise anything
    return CallResult(error=str(error) or type(error).__name__)
  if isinstance(value, str):
    return CallResult(value)
  try:
    return CallResult(json.dumps(value))
  except (TypeError, ValueError):
    return CallResult(str(value))


def _sections(text: str) -> tuple[str, dict[str, str], str]:
  """Returns the description in a docstring, the lines under Args by argument, and the text under Returns."""
  parts = _SECTION.split(text)
  blocks = dict(zip(parts[1::2], parts[2::2]))
  arguments = {}
  name = indent = None
  for line in blocks.get('Args', '').splitlines():
    match = _ARGUMENT.match(line)
    if match and (indent is None or len(match[1]) <= indent):
      indent = len(match[1])
      name = match[2]
      arguments[name] = match[3].strip()
    elif name and line.strip():
      arguments[name] = f'{arguments[name]} {line.strip()}'.strip()
  returns = ' '.join(blocks.get('Returns', '').split())
  return ' '.join(parts[0].split()), arguments, returns


def _type(hint: Any) -> dict:
  """Returns the JSON schema of a type hint, {} if it is unknown."""
  if hint in _NAMES:
    return {'type': _NAMES[hint]}
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Literal:
    value_types = {type(a) for a in args}
    return {**(_type(value_types.pop()) if len(value_types) == 1 else {}), 'enum': list(args)}
  if origin in (typing.Union, types.UnionType):
    return _union(args)
  if origin in (list, tuple):
    return {'type': 'array', **({'items': _type(args[0])} if args else {})}
  if origin is dict:
    return {'type': 'object', **({'additionalProperties': _type(args[1])} if len(args) > 1 else {})}
  return {}


def _union(args: tuple) -> dict:
  """Returns the JSON schema of a union type; None makes it nullable."""
  schemas = [_type(a) for a in args if a is not type(None)]
  if len(schemas) == 1:
    out = dict(schemas[0])
  elif all(set(s) == {'type'} for s in schemas):
    out = {'type': [s['type'] for s in schemas]}
  else:
    out = {'anyOf': schemas}
  if type(None) in args:
    out['nullable'] = True
  return out
