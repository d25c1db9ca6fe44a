"""An answer of OpenAI's API as server-sent events, while its tokens are drawn.

The texts of all events of an answer, joined, are the text of the same answer sent whole. Text that may still change is
held back: half a character, and the possible beginning of a stop string.
"""

import json
from collections.abc import Callable, Sequence

import numpy as np

from jaxpost.environments import openai_format


class TextStream:
  """The text of a completion whose tokens arrive in parts.

  Args:
    stops: stop strings; the text ends before the first of them.
    before: token ids before those that are added.
  """

  def __init__(
    self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), before: Sequence[int] = ()
  ) -> None:
    self._decode = decode
    self._stops = stops
    self._text = ''  # the text so far, without bytes at its end that may begin a character
    self._sent = 0  # number of characters of `_text` that were returned
    self._whole = ''  # the text up to the last token that ended with a whole character
    self._before = [*before]  # last tokens of `_whole`: some tokenizers drop a space at the start of decoded text
    self._open: list[int] = []  # tokens after `_whole`

  def add(self, tokens: np.ndarray) -> str:
    """Adds tokens; returns the text that has become certain with them."""
    self._open += tokens.tolist()
    before = self._decode(self._before)
    text = self._decode(self._before + self._open)[len(before) :]
    characters = text.rstrip('\ufffd')  # which may stand for the first bytes of a character
    self._text = self._whole + characters
    if text and characters == text:
      self._whole, self._before, self._open = self._text, self._open, []
    certain = self._text[self._sent : self._certain()]
    self._sent += len(certain)
    return certain

  def rest(self, text: str) -> str:
    """Returns the part of the whole text that `add` has not returned."""
    return text[self._sent :]

  def _certain(self) -> int:
    """Returns how many characters precede anything that is, or may become, a stop string."""
    ends = [len(self._text)]
    for stop in self._stops:
      start = self._text.find(stop, self._sent)  # none begins in the text that was returned
      if start < 0:
        start = len(self._text) - max(n for n in range(len(stop)) if self._text.endswith(stop[:n]))
      ends.append(start)
    return max(self._sent, min(ends))


class EventStream:
  """The events of one answer, of one choice or several."""

  def __init__(self, is_chat: bool, model: str, texts: Sequence[TextStream] = ()) -> None:
    self._is_chat = is_chat
    self.texts = texts  # of each choice; (): all is sent at the end
    self._begun: set[int] = set()  # indices of choices that have had an event
    self._head = openai_format.head('chat.completion.chunk' if is_chat else 'text_completion', model)

  def part(self, index: int, tokens: np.ndarray) -> str:
    """Returns an event with the text of further tokens of a choice; '' if none has become certain."""
    text = self.texts[index].add(tokens)
    if not text:
      return ''
    content = {'delta': self._delta(index, {'content': text})} if self._is_chat else {'text': text}
    return self._event(choices=[dict(index=index, **content, logprobs=None, finish_reason=None)])

  def end(self, response: dict, with_usage: bool) -> str:
    """Returns the last events of an answer (`openai_format.response`), `with_usage` one with the number of tokens."""
    shared = {name: value for name, value in response.items() if name == 'prompt_token_ids'}
    events = [self._event(choices=[self._last(c)], **shared) for c in response['choices']]
    if with_usage:
      events.append(self._event(choices=[], usage=response['usage']))
    return ''.join([*events, 'data: [DONE]\n\n'])

  def _last(self, choice: dict) -> dict:
    """Returns the last event of a choice: the rest of its text, and all its other fields."""
    choice = dict(choice)
    index = choice['index']
    if not self._is_chat:
      return choice | {'text': self._rest(index, choice['text'])}
    message = dict(choice.pop('message'))  # a copy: a session keeps the message as it is
    del message['role']
    if message['content'] is not None:
      message['content'] = self._rest(index, message['content'])
    if calls := message.get('tool_calls'):
      message['tool_calls'] = [dict(call, index=i) for i, call in enumerate(calls)]  # by which clients join parts
    return choice | {'delta': self._delta(index, message)}

  def _rest(self, index: int, text: str) -> str:
    return self.texts[index].rest(text) if self.texts else text

  def _delta(self, index: int, content: dict) -> dict:
    """Returns the `delta` of a choice of a chat; the first one has the role, too."""
    role = {} if index in self._begun else {'role': 'assistant'}
    self._begun.add(index)
    return role | content

  def _event(self, **fields) -> str:
    return f'data: {json.dumps(self._head | fields)}\n\n'
