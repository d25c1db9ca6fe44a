"""Checks of the text, the messages and the tools that a row may hold.

`where` names the row and column in errors, e.g. 'train.jsonl:12: messages'.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from jaxpost.errors import InputError

Row = Mapping[str, Any]
Message = dict[str, Any]  # {'role', 'content', ...}
ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
# Names of template_kwargs that every template gets by other means.
_RESERVED = {'messages', 'tools', 'conversations', 'chat_template', 'add_generation_prompt', 'continue_final_message'}
_SURROGATE = re.compile('[\ud800-\udfff]')


def check_text(text: Any, where: str) -> str:
  """Returns `text`; InputError unless it is a string that can be encoded."""
  if text is None:
    raise InputError(f'{where}: is null')
  if not isinstance(text, str):
    raise InputError(f'{where}: is a {type(text).__name__}, must be a string')
  if _SURROGATE.search(text):
    raise InputError(f'{where}: has half a surrogate pair; not valid text')
  return text


def check_messages(messages: Any, where: str) -> list[Message]:
  """Returns normalized messages; InputError where they are no chat.

  Contents become text (null contents of tool calls become ''), null fields are left out
  and `loss_weight` is called `weight`.
  """
  if not isinstance(messages, (list, tuple)):
    raise InputError(f'{where}: is a {type(messages).__name__}, must be a list of messages')
  if not messages:
    raise InputError(f'{where}: is an empty list')
  checked = []
  for n, message in enumerate(messages):
    at = f'{where}[{n}]'
    if not isinstance(message, dict):
      raise InputError(f'{at}: is a {type(message).__name__}, must be an object with role and content')
    role = message.get('role')
    if role not in ROLES:
      raise InputError(f'{at}.role: {role!r} is none of {", ".join(ROLES)}')
    content = message.get('content')
    if content is None and message.get('tool_calls'):
      content = ''
    if isinstance(content, list):
      content = _join_parts(content, f'{at}.content')
    # Columnar files fill the keys that a message lacks with nulls.
    kept = {k: v for k, v in message.items() if v is not None}
    kept['content'] = check_text(content, f'{at}.content')
    if 'loss_weight' in kept:
      kept['weight'] = kept.pop('loss_weight')
    _check_weight(kept, f'{at}.weight')
    checked.append(kept)
  return checked


def _check_weight(message: Message, where: str) -> None:
  weight = message.get('weight', 0)
  number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
  if not number or not math.isfinite(weight) or weight < 0:
    raise InputError(f'{where}: {weight!r} is no number >= 0')
  if weight and message['role'] != 'assistant':
    raise InputError(f'{where}: {weight:g} on a turn of the {message["role"]}; only turns of the assistant are trained')


def _join_parts(parts: list, where: str) -> str:
  texts = []
  for n, part in enumerate(parts):
    key = 'value' if isinstance(part, dict) and 'value' in part else 'text'
    if not isinstance(part, dict) or part.get('type') != 'text' or key not in part:
      kind = part.get('type') if isinstance(part, dict) else part
      raise InputError(
        f'{where}[{n}]: {kind!r}: only text is supported, as a string or as parts {{"type": "text", "text": ...}}'
      )
    texts.append(check_text(part[key], f'{where}[{n}].{key}'))
  return ''.join(texts)


def tools_of(row: Row, where: str) -> list[dict] | None:
  """Returns the JSON schemas of the row's tools, given as a list or as JSON."""
  tools = row.get('tools')
  if isinstance(tools, str):
    if not tools.strip():
      return None
    try:
      tools = json.loads(tools)
    except ValueError as error:
      raise InputError(f'{where}: tools: bad JSON: {error}') from error
  if not tools:
    return None
  if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
    raise InputError(f'{where}: tools: must be a list of JSON schemas')
  return tools


def template_kwargs_of(row: Row, where: str) -> dict[str, Any]:
  """Returns the row's `chat_template_kwargs`, values for variables of the chat template, without nulls."""
  given = row.get('chat_template_kwargs')
  if given is None:
    return {}
  if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
    raise InputError(f'{where}: chat_template_kwargs: {given!r} is no mapping of names to values')
  if reserved := _RESERVED & given.keys():
    raise InputError(f'{where}: chat_template_kwargs: {min(reserved)} is given to every template and cannot be set')
  return {name: value for name, value in given.items() if value is not None}
