"""The public methods of an environment as tools: their JSON schemas, and calls.

The schema is what `transformers.utils.get_json_schema` makes of a method with
type hints and a docstring in Google's style; here without that library, for
the process of an environment.
"""

import inspect
import json
import re
import types
import typing

from jaxpost.errors import InputError

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


def of(environment, what: str) -> dict:
  """{name: schema} of its tools; InputError for a method that cannot be one."""
  names = [
    n
    for n in dir(type(environment))
    if not n.startswith('_') and n not in _NOT_TOOLS and callable(inspect.getattr_static(type(environment), n))
  ]
  if not callable(vars(type(environment)).get('reset')) and not hasattr(environment, 'reset'):
    raise InputError(f'{what}: has no method reset(self, **row)')
  if not names:
    raise InputError(f'{what}: has no public method that could be a tool')
  return {n: schema(getattr(environment, n), f'{what}: {n}') for n in names}


def schema(method, what: str) -> dict:
  """{'type': 'function', 'function': {...}} of a method."""
  text = inspect.getdoc(method)
  if not text:
    raise InputError(f'{what}: has no docstring, which tells the model what the tool does')
  head, arguments, returns = _sections(text)
  hints, properties, required = typing.get_type_hints(method), {}, []
  for p in inspect.signature(method).parameters.values():
    if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
      raise InputError(f'{what}: takes *{p.name}; name each argument')
    if p.name not in hints or p.name not in arguments:
      lacks = 'type' if p.name not in hints else 'line under Args:'
      raise InputError(f'{what}: argument {p.name} has no {lacks}')
    properties[p.name] = {**_type(hints[p.name]), 'description': arguments[p.name]}
    if p.default is p.empty:
      required.append(p.name)
  parameters = {'type': 'object', 'properties': properties}
  if required:
    parameters['required'] = required
  function = dict(name=method.__name__, description=head, parameters=parameters)
  if returns and 'return' in hints:
    function['return'] = {**_type(hints['return']), 'description': returns}
  return {'type': 'function', 'function': function}


def run(environment, name: str, arguments, known) -> tuple:
  """(text, error text or None) of a call, as TRL gives them to the model."""
  if name not in known:
    return None, f'Unknown tool {name}; there are {", ".join(known)}'
  try:
    value = getattr(environment, name)(**arguments)
  except BaseException as error:  # the user's code may raise anything
    return None, str(error) or type(error).__name__
  if isinstance(value, str):
    return value, None
  try:
    return json.dumps(value), None
  except (TypeError, ValueError):
    return str(value), None


def _sections(text: str) -> tuple:
  """(description, {argument: description}, what is returned)."""
  parts = _SECTION.split(text)
  blocks = dict(zip(parts[1::2], parts[2::2]))
  arguments, name, indent = {}, None, None
  for line in blocks.get('Args', '').splitlines():
    found = _ARGUMENT.match(line)
    if found and (indent is None or len(found[1]) <= indent):
      indent, name = len(found[1]), found[2]
      arguments[name] = found[3].strip()
    elif name and line.strip():
      arguments[name] = f'{arguments[name]} {line.strip()}'.strip()
  returns = ' '.join(blocks.get('Returns', '').split())
  return ' '.join(parts[0].split()), arguments, returns


def _type(hint) -> dict:
  """The JSON schema of a type hint."""
  if hint in _NAMES:
    return {'type': _NAMES[hint]}
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Literal:
    kinds = {type(a) for a in args}
    return {**(_type(kinds.pop()) if len(kinds) == 1 else {}), 'enum': list(args)}
  if origin in (typing.Union, types.UnionType):
    real = [_type(a) for a in args if a is not type(None)]
    out = (
      real[0]
      if len(real) == 1
      else ({'type': [r['type'] for r in real]} if all(set(r) == {'type'} for r in real) else {'anyOf': real})
    )
    return {**out, **({'nullable': True} if type(None) in args else {})}
  if origin in (list, tuple):
    return {'type': 'array', **({'items': _type(args[0])} if args else {})}
  if origin is dict:
    return {'type': 'object', **({'additionalProperties': _type(args[1])} if len(args) > 1 else {})}
  return {}
