"""Checks the text, messages and tools of a row.

`where` names the row and column in errors, e.g. 'train.jsonl:12: messages'.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from jaxpost.errors import InputError, refuse, type_of

Row = Mapping[str, Any]
Message = dict[str, Any]  # {'role', 'content', ...}
ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
# Variables that a chat template gets by other means than template_kwargs.
_RESERVED = {'messages', 'tools', 'conversations', 'chat_template', 'add_generation_prompt', 'continue_final_message'}
REASONING = ('reasoning_content', 'thinking', 'reasoning')  # keys of messages; a template gets the first by all names
_TEXT_KEYS = ('name', 'tool_call_id', *REASONING)  # other keys of messages that templates print
_SURROGATE = re.compile('[\ud800-\udfff]')
_CALL = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
_TOOL = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
_MAX_NUMBER = 1e30
_SHOWN = 60  # characters of a value that an error shows; five times as many of the columns


def shown(value: Any, limit: int = _SHOWN) -> str:
  """Returns the first `limit` characters of a value's repr, for errors of one line."""
  try:
    text = repr(value)
  except (ValueError, RecursionError):  # an integer or a nesting that Python does not print
    text = f'{type_of(value)} that is too long to show'
  return text if len(text) <= limit else f'{text[:limit]}...'


def columns_of(row: Row) -> str:
  """Returns the names of the columns of a row, for errors of one line."""
  names = ', '.join(str(name) if str(name).isprintable() else repr(name) for name in row) or 'none'
  return names if len(names) <= 5 * _SHOWN else f'{names[: 5 * _SHOWN]}...'


def number(value: Any, where: str, allow_bool: bool = False) -> float:
  """Returns `value` as a float; InputError unless it is a number that is safe to sum in float32."""
  try:
    result = float(value) if isinstance(value, (int, float)) else math.nan
  except OverflowError:
    result = math.inf
  if not abs(result) <= _MAX_NUMBER or (isinstance(value, bool) and not allow_bool):
    raise InputError(f'{where}: {shown(value)} is no number, or too large')
  return result


def check_text(text: Any, where: str) -> str:
  """Returns `text`; InputError unless it is a string that can be encoded."""
  if text is None:
    raise InputError(f'{where}: is null')
  if not isinstance(text, str):
    raise InputError(f'{where}: is {type_of(text)}, must be a string')
  if _SURROGATE.search(text):
    raise InputError(f'{where}: has half a surrogate pair; not valid text')
  return text


def parse_json(text: str, where: str) -> Any:
  """Returns the value of a JSON text; InputError if it is not JSON."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise InputError(f'{where}: bad JSON: {error}') from error


def check_messages(messages: Any, where: str) -> list[Message]:
  """Returns normalized messages; InputError if they are not a valid chat.

  Contents become text (null contents of messages with tool calls become ''), JSON arguments of calls become objects,
  null fields are left out, `loss_weight` becomes `weight`, and a `function_call` a list of `tool_calls`.
  """
  refuse(not isinstance(messages, (list, tuple)), f'{where}: is {type_of(messages)}, must be a list of messages')
  refuse(not messages, f'{where}: is an empty list')
  checked = []
  for n, message in enumerate(messages):
    at = f'{where}[{n}]'
    if not isinstance(message, dict):
      raise InputError(f'{at}: is {type_of(message)}, must be an object with role and content')
    role = message.get('role')
    if role not in ROLES:
      raise InputError(f'{at}.role: {shown(role)} is none of {", ".join(ROLES)}')
    content = message.get('content')
    # Columnar files have nulls for the keys that a message lacks.
    kept = {k: v for k, v in message.items() if v is not None}
    if 'function_call' in kept:  # the older form of OpenAI, which templates do not read
      kept.setdefault('tool_calls', [kept.pop('function_call')])
    if content is None and kept.get('tool_calls'):
      content = ''
    if isinstance(content, list):
      content = _join_parts(content, f'{at}.content')
    kept['content'] = check_text(content, f'{at}.content')
    if 'loss_weight' in kept:
      kept['weight'] = kept.pop('loss_weight')
    weight = kept.get('weight', 0)
    if number(weight, f'{at}.weight') < 0:
      raise InputError(f'{at}.weight: {weight!r} is not a number >= 0')
    if weight and role != 'assistant':
      raise InputError(f'{at}.weight: {weight:g} on a turn of the {role}; only turns of the assistant are trained')
    for key in _TEXT_KEYS:
      if key in kept:
        check_text(kept[key], f'{at}.{key}')
    if 'tool_calls' in kept:
      kept['tool_calls'] = _check_calls(kept['tool_calls'], f'{at}.tool_calls')
    checked.append(kept)
  return checked


def _check_calls(calls: Any, where: str) -> list[dict]:
  """Returns normalized tool calls; InputError unless each has a name and arguments, or a function with these."""
  if not isinstance(calls, (list, tuple)):
    raise InputError(f'{where}: is {type_of(calls)}, must be a list of {_CALL}')
  checked = []
  for n, call in enumerate(calls):
    at = f'{where}[{n}]'
    if not isinstance(call, dict):
      raise InputError(f'{at}: is {type_of(call)}, must be {_CALL}')
    call = dict(call)
    function = call.get('function')
    if function is None:
      function = call
    elif not isinstance(function, dict):
      raise InputError(f'{at}.function: is {type_of(function)}; a call is {_CALL}')
    else:
      at += '.function'
      function = call['function'] = dict(function)
    if not check_text(function.get('name'), f'{at}.name'):
      raise InputError(f'{at}.name: is empty; a call is {_CALL}')
    if isinstance(function.get('arguments'), str):  # '' if the call has none, in some data
      function['arguments'] = parse_json(function['arguments'].strip() or '{}', f'{at}.arguments')
    if not isinstance(function.get('arguments', {}), (dict, type(None))):
      raise InputError(f'{at}.arguments: is {type_of(function["arguments"])}, must be an object, or one as JSON')
    if call.get('id') is not None:
      check_text(call['id'], f'{where}[{n}].id')
    checked.append(call)
  return checked


def _join_parts(parts: list, where: str) -> str:
  texts = []
  if not parts:
    raise InputError(f'{where}: is an empty list; write text, or parts {{"type": "text", "text": ...}}')
  for n, part in enumerate(parts):
    key = 'value' if isinstance(part, dict) and 'value' in part else 'text'
    if not isinstance(part, dict) or part.get('type') != 'text' or key not in part:
      kind = part.get('type') if isinstance(part, dict) else part
      raise InputError(
        f'{where}[{n}]: {shown(kind)}: only text is supported, as a string or as parts {{"type": "text", "text": ...}}'
      )
    texts.append(check_text(part[key], f'{where}[{n}].{key}'))
  return ''.join(texts)


def tools_of(row: Row, where: str) -> list[dict] | None:
  """Returns the JSON schemas of the row's tools, given as a list or as JSON."""
  tools = row.get('tools')
  if isinstance(tools, str):
    tools = parse_json(tools.strip() or 'null', f'{where}: tools')
  if tools is None:
    return None
  if not isinstance(tools, (list, tuple)) or not all(isinstance(t, dict) for t in tools):
    raise InputError(f'{where}: tools: must be a list of JSON schemas, not {shown(tools)}')
  for n, tool in enumerate(tools):
    function = tool.get('function') or tool
    if not isinstance(function, dict) or not function.get('name'):
      raise InputError(f'{where}: tools[{n}]: has no name; a tool is {_TOOL}')
    check_text(function['name'], f'{where}: tools[{n}].name')
  return list(tools) or None


def template_kwargs_of(row: Row, where: str) -> dict[str, Any]:
  """Returns the row's `chat_template_kwargs`, values for variables of the chat template, without nulls."""
  kwargs = row.get('chat_template_kwargs')
  if kwargs is None:
    return {}
  if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
    raise InputError(f'{where}: chat_template_kwargs: {shown(kwargs)} is no mapping of names to values')
  if reserved := _RESERVED & kwargs.keys():
    raise InputError(f'{where}: chat_template_kwargs: {min(reserved)} is given to every template and cannot be set')
  return {name: value for name, value in kwargs.items() if value is not None}
