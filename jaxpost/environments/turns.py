"""Turns of a conversation with tools, in tokens: calls out, answers in.

What the model wrote is never encoded again. What a tool answers stands between
the markers of the chat template, found by rendering a conversation with it.
"""

import json
import re

from jaxpost.errors import InputError

_SAID = '\ue000\ue001'  # what the model says, in a rendering
_CALL = re.compile(r'<tool_call>\s*(.*?)\s*</tool_call>', re.S)
_FUNCTION = re.compile(r'<function=([^>]+)>(.*?)</function>', re.S)
_PARAMETER = re.compile(r'<parameter=([^>]+)>\n?(.*?)\n?</parameter>', re.S)
_MARKS = '<tool_call>', '[TOOL_CALLS]', '<|python_tag|>'


def parse(text: str) -> list[dict] | None:
  """[{'name', 'arguments'}, ...] that a turn calls; None if it is malformed.

  Knows Hermes and Qwen (<tool_call> with JSON or with <function=...>),
  Llama 3 (the turn is a JSON object) and Mistral ([TOOL_CALLS] and a list).
  """
  inside = _CALL.findall(text)
  plain = text.strip().removeprefix('<|python_tag|>').strip()
  if not inside and '[TOOL_CALLS]' in text:
    inside = [text.partition('[TOOL_CALLS]')[2]]
  if not inside and plain.startswith('{') and '"name"' in plain:
    inside = [plain]
  if not inside:
    return None if any(mark in text for mark in _MARKS) else []
  calls = []
  for part in inside:
    found = _FUNCTION.search(part)
    if found:
      calls.append(
        dict(name=found[1].strip(), arguments={k.strip(): _value(v) for k, v in _PARAMETER.findall(found[2])})
      )
      continue
    try:
      read = json.loads(part)
    except ValueError:
      return None
    for call in read if isinstance(read, list) else [read]:
      calls.append(_call(call))
  return None if None in calls else calls


def _call(call) -> dict | None:
  if not isinstance(call, dict) or not isinstance(call.get('name'), str):
    return None
  arguments = call.get('arguments', call.get('parameters', {}))
  if isinstance(arguments, str):
    arguments = _value(arguments)
  return dict(name=call['name'], arguments=arguments) if isinstance(arguments, dict) else None


def _value(text: str):
  try:
    return json.loads(text)
  except ValueError:
    return text


class Turns:
  """The tokens between two turns of the model, by a chat template.

  Attributes:
    end_id: the token that ends a turn of the model.
  """

  def __init__(self, tokenizer):
    self._tokenizer = tokenizer
    self._call = {}
    self.end_id = None
    try:
      rest = self._after([('tool', 'x')])
    except InputError:  # some templates want the call that is answered
      self._call = {
        'tool_calls': [{'type': 'function', 'id': 'call00000', 'function': {'name': 'tool', 'arguments': {}}}]
      }
      rest = self._after([('tool', 'x')])
    ends = {rest.find(self._text([i])): i for i in tokenizer.stop_ids}
    ends.pop(-1, None)
    if not ends:
      raise InputError(
        f'config.environment: the chat template of {tokenizer.source} ends no turn with a token at which sampling stops'
      )
    self.end_id = ends[min(ends)]

  def answers(self, results) -> list[int]:
    """Ids after a turn that ended with `end_id`: answers, the next header.

    Args:
      results: [(name of the tool, text), ...].
    """
    rest, end = self._after(results), self._text([self.end_id])
    text = rest[rest.index(end) + len(end) :]
    if not self._tokenizer.adds_space:
      return self._tokenizer.encode(text)
    head = self._tokenizer.encode(end)
    return self._tokenizer.encode(end + text)[len(head) :]

  def more(self, messages: list[dict], ended: bool) -> list[int]:
    """Ids after a turn of the model: messages, and the header of the next.

    Args:
      ended: whether the turn ended with `end_id`, or was cut.
    """
    rest, end = self._behind(messages), self._text([self.end_id])
    if not self._tokenizer.adds_space:
      return self._tokenizer.encode(rest[rest.index(end) + len(end) :] if ended else rest)
    head = self._tokenizer.encode(end)
    text = rest[rest.index(end) :] if ended else end + rest
    return self._tokenizer.encode(text)[len(head) :]

  def is_whole(self) -> bool:
    """Whether turn by turn gives what rendering a whole conversation does.

    Templates that render earlier turns otherwise than they were generated
    (without reasoning, say) do not; what is trained is what was sampled.
    """
    user = [{'role': 'user', 'content': 'a'}]
    said = lambda text: {'role': 'assistant', 'content': text, **self._call}
    end = self._text([self.end_id])
    ours = ''.join([self._render(user, True), 'b', end, self._text(self.answers([('tool', 'x')])), 'c', end])
    if self._call:
      return False  # a rendering spells the call, too
    return self._render([*user, said('b'), _result('tool', 'x'), said('c')], False).startswith(ours)

  def safe(self, text: str) -> str:
    """A tool's text in which no token of the template can be forged."""
    for special in self._tokenizer.special_texts:
      text = text.replace(special, f'{special[:1]} {special[1:]}')
    return ''.join(c for c in text if c not in _SAID)

  def _after(self, results) -> str:
    """What a rendering has behind the words of the model."""
    return self._behind([_result(name, self.safe(said)) for name, said in results])

  def _behind(self, messages) -> str:
    text = self._render(
      [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': _SAID, **self._call}, *messages], True
    )
    if _SAID not in text:
      raise InputError(
        f'config.environment: the chat template of {self._tokenizer.source} '
        'leaves out what the model says before a tool answers'
      )
    return text[text.index(_SAID) + len(_SAID) :]

  def _render(self, messages, prompt: bool) -> str:
    return self._tokenizer.render_chat(messages, generation_prompt=prompt, where='config.environment')[0]

  def _text(self, ids) -> str:
    return self._tokenizer.decode(ids, skip_special=False)


def _result(name: str, text: str) -> dict:
  return {'role': 'tool', 'name': name, 'tool_call_id': 'call00000', 'content': text}
