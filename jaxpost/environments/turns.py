"""Parses tool calls out of the model's turns, and tokenizes the text between two turns.

Generated text is never tokenized again. The markers around a tool's answer are those of the chat template, found by
rendering a conversation with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer

_PLACEHOLDER = '\ue000\ue001'  # stands for the model's text in a rendering
_MARKS = '<tool_call>', '[TOOL_CALLS]', '<|python_tag|>'
_TOOL = {'type': 'function', 'function': {'name': 'tool', 'parameters': {'type': 'object', 'properties': {}}}}


def parse(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[dict] | None:
  """Returns the calls [{'name', 'arguments'}, ...] in the text of a turn; None if they are malformed.

  Reads the formats of Hermes and Qwen (<tool_call> with JSON or with <function=...>), Llama 3 (the turn is a JSON
  object) and Mistral ([TOOL_CALLS] and a list). What is before the last </think> is reasoning and holds no calls.
  With `tools`, their JSON schemas, an object without a mark is a call only if it names one of them.
  """
  text = text.rpartition('</think>')[2]
  inside = _marked(text) or _unmarked(text, tools)
  if not inside:
    return None if any(mark in text for mark in _MARKS) else []
  calls = []
  try:
    for part in inside:
      if function := next(_between(part, '<function=', '</function>'), None):
        calls.append(_tagged_call(function))
        continue
      read = json.loads(part)
      calls += [_call(call) for call in (read if isinstance(read, list) else [read])]
    # Templates print the calls, and files keep them: no half of a surrogate pair, NaN or infinity.
    json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
  except (ValueError, RecursionError):
    return None
  return calls


def before_calls(text: str) -> str:
  """Returns what a turn with calls says before the first of them, reasoning included, without whitespace at its end."""
  turn = text.rpartition('</think>')[2]
  starts = [turn.index(mark) for mark in _MARKS if mark in turn] or [0]  # Without a mark all of it is the call.
  return text[: len(text) - len(turn) + min(starts)].rstrip()


def _marked(text: str) -> list[str]:
  """Returns the parts of a turn that are marked as calls."""
  inside = [part.strip() for part in _between(text, '<tool_call>', '</tool_call>')]
  if not inside and '[TOOL_CALLS]' in text:
    inside = [text.partition('[TOOL_CALLS]')[2]]
  if not inside and text.strip().startswith('<|python_tag|>'):
    inside = [text.partition('<|python_tag|>')[2]]
  return inside


def _unmarked(text: str, tools: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the turn if it is a JSON object with the name of a tool and arguments, or the attempt at one, else none."""
  call = _value(text.strip())
  names = [(tool.get('function') or tool)['name'] for tool in tools]
  if isinstance(call, dict):
    has_both = 'name' in call and ('arguments' in call or 'parameters' in call)
    return [text] if has_both and (not names or call['name'] in names) else []
  return [text] if text.strip().startswith('{') and '"name"' in text else []


def _tagged_call(function: str) -> dict:
  """Returns the call of `NAME>` with <parameter=KEY> tags after it, of which each value is JSON or text."""
  name, _, body = function.partition('>')
  values = (parameter.partition('>') for parameter in _between(body, '<parameter=', '</parameter>'))
  arguments = {key.strip(): _value(value.removeprefix('\n').removesuffix('\n')) for key, _, value in values}
  return dict(name=name.strip(), arguments=arguments)


def _between(text: str, opening: str, closing: str) -> Iterator[str]:
  """Yields what is between each opening mark and the closing one after it.

  A pattern takes quadratic time, or more, on marks that are never closed, as a model may write them.
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
    arguments = _value(arguments)
  if not isinstance(arguments, dict):
    raise ValueError('arguments without names')
  return dict(name=call['name'], arguments=arguments)


def _value(text: str) -> Any:
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
    # A template for tools of its own is used where there are tools; the text between turns does not depend on which.
    self._row = {'tools': [_TOOL]} if 'tool_use' in tokenizer.named_templates else {}
    self._call: dict[str, list] = {}
    try:
      rest = self._after([_result('tool', 'x')])
    except InputError:  # Some templates render an answer only after the call that it answers.
      self._call = {
        'tool_calls': [{'type': 'function', 'id': 'call00000', 'function': {'name': 'tool', 'arguments': {}}}]
      }
      rest = self._after([_result('tool', 'x')])
    ends = {rest.find(self._text([i])): i for i in tokenizer.stop_ids}
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
    rest = self._after(messages, row)
    end = self._text([self.end_id])
    if not self._tokenizer.adds_space:
      return self._tokenizer.encode(rest[rest.index(end) + len(end) :] if ended else rest)
    head = self._tokenizer.encode(end)
    text = rest[rest.index(end) :] if ended else end + rest
    return self._tokenizer.encode(text)[len(head) :]

  def matches_template(self) -> bool:
    """Returns True if tokenizing turn by turn gives the same text as rendering the whole conversation.

    False for templates that change earlier turns, for example by dropping the reasoning. Training then reads the tokens
    as they were sampled.
    """
    user = [{'role': 'user', 'content': 'a'}]

    def assistant(text: str) -> dict:
      return {'role': 'assistant', 'content': text, **self._call}

    end = self._text([self.end_id])
    ours = ''.join([self._render(user, True), 'b', end, self._text(self.answers([('tool', 'x')])), 'c', end])
    if self._call:
      return False  # The rendering also has the text of the call.
    conversation = [*user, assistant('b'), _result('tool', 'x'), assistant('c')]
    return self._render(conversation, False).startswith(ours)

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
