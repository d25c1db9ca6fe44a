"""Parses tool calls out of the model's turns, and tokenizes the text between two turns.

Generated text is never tokenized again. The markers around a tool's answer are those of the chat template, found by
rendering a conversation with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpost.data import chat
from jaxpost.errors import InputError

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer

_PLACEHOLDER = '\ue000\ue001'  # stands for the model's text in a rendering
_MARKS = '<tool_call>', '[TOOL_CALLS]', '<|python_tag|>'
_TOOL = {'type': 'function', 'function': {'name': 'tool', 'parameters': {'type': 'object', 'properties': {}}}}


def parse(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[dict] | None:
  """Returns the calls [{'name', 'arguments'}, ...] in the text of a turn; None if they are malformed.

  Reads the formats of Hermes and Qwen (<tool_call> with JSON or with <function=...>), Llama 3 (the turn is a JSON
  object) and Mistral ([TOOL_CALLS] and a list). Text before the last </think> is reasoning and holds no calls.
  With `tools`, their JSON schemas, an object without a mark is a call only if it names one of them.
  """
  text = text.rpartition('</think>')[2]
  parts = _marked(text) or _unmarked(text, tools)
  if not parts:
    return None if any(mark in text for mark in _MARKS) else []
  calls = []
  try:
    for part in parts:
      if function := next(_between(part, '<function=', '</function>'), None):
        calls.append(_tagged_call(function))
        continue
      value = json.loads(part)
      calls += [_call(call) for call in (value if isinstance(value, list) else [value])]
    # Templates print the calls and files store them, so lone surrogates, NaN and infinity raise ValueError here.
    json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
  except (ValueError, RecursionError):
    return None
  return calls


def before_calls(text: str) -> str:
  """Returns the text of a turn before its first call, reasoning included, without whitespace at its end."""
  turn = text.rpartition('</think>')[2]
  starts = [turn.index(mark) for mark in _MARKS if mark in turn] or [0]  # Without a mark all of it is the call.
  return text[: len(text) - len(turn) + min(starts)].rstrip()


def _marked(text: str) -> list[str]:
  """Returns the parts of a turn that are marked as calls."""
  parts = [part.strip() for part in _between(text, '<tool_call>', '</tool_call>')]
  if not parts and '[TOOL_CALLS]' in text:
    parts = [text.partition('[TOOL_CALLS]')[2]]
  if not parts and text.strip().startswith('<|python_tag|>'):
    parts = [text.partition('<|python_tag|>')[2]]
  return parts


def _unmarked(text: str, tools: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns [the turn] if it is a JSON object with the name of a tool and arguments, or looks like one, else []."""
  call = _json_or_text(text.strip())
  names = [(tool.get('function') or tool)['name'] for tool in tools]
  if isinstance(call, dict):
    has_both = 'name' in call and ('arguments' in call or 'parameters' in call)
    return [text] if has_both and (not names or call['name'] in names) else []
  return [text] if text.strip().startswith('{') and '"name"' in text else []


def _tagged_call(function: str) -> dict:
  """Returns the call of `NAME>` with <parameter=KEY> tags after it, of which each value is JSON or text."""
  name, _, body = function.partition('>')
  values = (parameter.partition('>') for parameter in _between(body, '<parameter=', '</parameter>'))
  arguments = {key.strip(): _json_or_text(value.removeprefix('\n').removesuffix('\n')) for key, _, value in values}
  return dict(name=name.strip(), arguments=arguments)


def _between(text: str, opening: str, closing: str) -> Iterator[str]:
  """Yields the text between each opening mark and the closing one after it.

  A regular expression takes quadratic time or more on marks that are never closed, as a model may write them.
  """
  start, end = text.find(opening), 0
  while start >= 0 and (end := text.find(closing, start)) >= 0:
    yield text[start + len(opening) : end]
    start = text.find(opening, end)


def _call(call: Any) -> dict:
  """Returns {'name', 'arguments'} of a parsed JSON value; ValueError if it is no call."""
  if not isinstance(call, dict) or not isinstance(call.get('name'), str):
    raise ValueError('no call')
  arguments = call.get('arguments', call.get('parameters', {}))
  if isinstance(arguments, str):
    arguments = _json_or_text(arguments)
  if not isinstance(arguments, dict):
    raise ValueError('arguments without names')
  return dict(name=call['name'], arguments=arguments)


def _json_or_text(text: str) -> Any:
  """Parses JSON; other text is returned as it is."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return text


class Turns:
  """Tokenizes the text between two turns of the model, by the chat template.

  Attributes:
    end_id: the token that ends a turn of the model.

  Args:
    tokenizer: its chat template must end a turn with a stop token and render answers of tools; InputError otherwise.
  """

  def __init__(self, tokenizer: Tokenizer) -> None:
    self._tokenizer = tokenizer
    # A separate template for tools is used if there are tools; the text between turns does not depend on which ones.
    self._row = {'tools': [_TOOL]} if 'tool_use' in tokenizer.named_templates else {}
    self._call: dict[str, list] = {}
    try:
      following = self._after([_result('tool', 'x')])
    except InputError:  # Some templates render an answer only after the call that it answers.
      self._call = {
        'tool_calls': [{'type': 'function', 'id': 'call00000', 'function': {'name': 'tool', 'arguments': {}}}]
      }
      following = self._after([_result('tool', 'x')])
    ends = {following.find(self._text([i])): i for i in tokenizer.stop_ids}  # position -> stop token that is there
    ends.pop(-1, None)
    if not ends:
      raise InputError(
        f'config.environment: the chat template of {tokenizer.source} ends no turn with a token at which sampling stops'
      )
    self.end_id = ends[min(ends)]

  def answers(self, results: Sequence[tuple[str, str]], row: Mapping[str, Any] | None = None) -> list[int]:
    """Returns the token ids between a turn that ended with `end_id` and the next turn.

    Args:
      results: (name of the tool, its answer) of each call.
      row: may have `chat_template_kwargs`.
    """
    messages = [_result(name, self.break_special_tokens(text)) for name, text in results]
    return self.continuation(messages, True, row)

  def continuation(self, messages: list[dict], ended: bool, row: Mapping[str, Any] | None = None) -> list[int]:
    """Returns the token ids between a turn and the next one, with arbitrary messages in between.

    Args:
      ended: True if the turn ended with `end_id`, False if it was cut.
      row: may have `chat_template_kwargs`.
    """
    following = self._after(messages, row)
    end = self._text([self.end_id])
    text = following[following.index(end) + len(end) :] if ended else following
    return chat.continuation(self._tokenizer, end, text)

  def matches_template(self) -> bool:
    """Returns True if tokenizing turn by turn gives the same text as rendering the whole conversation.

    False for templates that change earlier turns, for example by dropping the reasoning. Training then reads the tokens
    as they were sampled.
    """
    if self._call:
      return False  # A rendering of the whole conversation also has the text of the call.
    user = {'role': 'user', 'content': 'a'}
    first, second = ({'role': 'assistant', 'content': text} for text in 'bc')
    end = self._text([self.end_id])
    by_turn = ''.join([self._render([user], True), 'b', end, self._text(self.answers([('tool', 'x')])), 'c', end])
    return self._render([user, first, _result('tool', 'x'), second], False).startswith(by_turn)

  def break_special_tokens(self, text: str) -> str:
    """Inserts a space into text that looks like a special token, so that a tool cannot forge one."""
    for special in self._tokenizer.special_texts:
      text = text.replace(special, f'{special[:1]} {special[1:]}')
    return ''.join(c for c in text if c not in _PLACEHOLDER)

  def _after(self, messages: list[dict], row: Mapping[str, Any] | None = None) -> str:
    """Renders a conversation with these messages after a turn of the model; returns the text after that turn."""
    turn = {'role': 'assistant', 'content': _PLACEHOLDER, **self._call}
    text = self._render([{'role': 'user', 'content': 'a'}, turn, *messages], True, row)
    if _PLACEHOLDER not in text:
      raise InputError(
        f'config.environment: the chat template of {self._tokenizer.source} '
        'drops the text of the model in a turn that a tool answers'
      )
    return text[text.index(_PLACEHOLDER) + len(_PLACEHOLDER) :]

  def _render(self, messages: list[dict], prompt: bool, row: Mapping[str, Any] | None = None) -> str:
    row = {**self._row, **(row or {})}
    return self._tokenizer.render_chat(messages, generation_prompt=prompt, row=row, where='config.environment')[0]

  def _text(self, ids: Sequence[int]) -> str:
    return self._tokenizer.decode(ids, skip_special=False)


def _result(name: str, text: str) -> dict:
  return {'role': 'tool', 'name': name, 'tool_call_id': 'call00000', 'content': text}
