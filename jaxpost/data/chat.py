"""Encodes rows of data as documents with a loss mask; `prompts.py` encodes them as prompts for a sampler.

T tokens of one document. A chat is rendered to text once; the trained spans of that text come from the template's {%
generation %} markers, or from rendering it again with one turn replaced. Prompt and completion are encoded separately,
so that a prompt has the tokens here that a sampler is given.

`where` names a row in errors, e.g. 'train.jsonl:12'.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxpost.data import messages as messages_lib
from jaxpost.data.examples import Example
from jaxpost.errors import InputError, type_of

if TYPE_CHECKING:
  from jaxpost.data.messages import Message, Row
  from jaxpost.data.tokenizer import Tokenizer

Span = tuple[int, int]  # start and end, in characters

TRAIN_ON = ('assistant', 'completion', 'all')
# Private characters that stand for a turn in a rendering; the first pair the text does not have.
_SENTINELS = ('\ue000\ue001', '\ue002\ue003', '\uf000\uf001')
# Text that a template may put between its generation prompt and the content of a turn.
_OPENING = re.compile(r'\s*(<\w+>\s*)?(</\w+>\s*)?(<\|channel\|>(\w+<\|message\|>)?)?')
_THINK_BLOCK = re.compile(r'(<\w+>\s*)?(</\w+>\s*)?\Z')  # may end a generation prompt, opened or empty


class _TurnPrompt(NamedTuple):
  """What a turn is generated after."""

  text: str
  header: str  # the end of `text` that is the generation prompt


def make_example(tokenizer: Tokenizer, row: Row, where: str, *, train_on: str = 'assistant') -> Example:
  """Encodes one row as an Example.

  Args:
    row: with `messages`, or `prompt` and `completion` (both text, joined, or both lists of messages), or `text`.
    where: names the row in errors.
    train_on: 'assistant': every assistant turn with its end, or the completion; 'completion': the last assistant turn
      only; 'all': every token. Rows of `text` are always trained whole. A message may carry `weight` (a number >= 0,
      also called loss_weight), which scales the mask of its tokens; 0 leaves the turn out.
  """
  if train_on not in TRAIN_ON:
    raise InputError(f'train_on={train_on!r} is none of {", ".join(TRAIN_ON)}')
  if row.get('messages') is not None:
    messages = messages_lib.check_messages(row['messages'], f'{where}: messages')
    return _chat(tokenizer, messages, first=0, row=row, where=where, train_on=train_on)
  if row.get('prompt') is not None and row.get('completion') is not None:
    return _pair(tokenizer, row, where, train_on)
  if row.get('text') is not None and 'prompt' not in row:
    text = messages_lib.check_text(row['text'], f'{where}: text')
    ids = [*tokenizer.bos_ids, *tokenizer.encode(text), tokenizer.eos_id]
    return _example(ids, [True] * len(ids))
  empty = [c for c in ('messages', 'prompt', 'completion', 'text') if c in row and row[c] is None]
  if empty:
    raise InputError(f'{where}: {empty[0]}: is null')
  raise InputError(
    f'{where}: needs the columns messages, or prompt and completion, or text; it has {messages_lib.columns_of(row)}'
    ' (rename with config.data.columns, e.g. prompt=question,completion=answer)'
  )


def _pair(tokenizer: Tokenizer, row: Row, where: str, train_on: str) -> Example:
  prompt, completion = row['prompt'], row['completion']
  if isinstance(prompt, str) != isinstance(completion, str):
    kinds = f'prompt is {type_of(prompt)} and completion {type_of(completion)}'
    raise InputError(f'{where}: {kinds}; both text or both lists of messages')
  if not isinstance(prompt, str):
    prompt = messages_lib.check_messages(prompt, f'{where}: prompt')
    completion = messages_lib.check_messages(completion, f'{where}: completion')
    if completion[: len(prompt)] == prompt:
      raise InputError(f'{where}: the answer begins with its prompt, which would stand there twice; take one out')
    return _chat(tokenizer, prompt + completion, first=len(prompt), row=row, where=where, train_on=train_on)
  messages_lib.check_text(prompt, f'{where}: prompt')
  messages_lib.check_text(completion, f'{where}: completion')
  head = [*tokenizer.bos_ids, *tokenizer.encode(prompt)]
  tail = [*continuation(tokenizer, prompt, completion), tokenizer.eos_id]
  trained = train_on == 'all'
  return _example(head + tail, [trained] * len(head) + [True] * len(tail))


def continuation(tokenizer: Tokenizer, prompt: str, text: str) -> list[int]:
  """Returns the token ids of `text` where it follows the encoded `prompt`."""
  if not tokenizer.adds_space:
    return tokenizer.encode(text)
  # Encoded alone, the text would begin with a space that it does not have.
  head = tokenizer.encode(prompt)
  joint = tokenizer.encode(prompt + text)
  if joint[: len(head)] == head:
    return joint[len(head) :]
  return tokenizer.encode(text)


def _chat(tokenizer: Tokenizer, messages: list[Message], first: int, row: Row, where: str, train_on: str) -> Example:
  """Encodes a chat of which the assistant turns from message `first` on are trained."""
  turns = [n for n, m in enumerate(messages) if n >= first and m['role'] == 'assistant']
  if not turns and train_on != 'all':
    raise InputError(f'{where}: has no assistant turn, so nothing to train on')
  render = functools.partial(tokenizer.render_chat, row=row, where=where)
  text, marked = render(messages)
  if train_on == 'all':
    if any('weight' in m for m in messages):
      why = "messages with a weight, and train_on='all' trains every token alike"
      raise InputError(f"{where}: {why}; use 'assistant', or drop the weights")
    for n in turns:
      _check_shown(messages[n], text, f'{where}: message {n}')
    return _example(*_encode_spans(tokenizer, text, [(0, len(text))], [1], where))
  if train_on == 'completion':
    turns = turns[-1:]
  prompt = functools.cache(lambda n: _prompt(render, messages[:n]))
  if marked is not None:
    spans = _marked_spans(marked, messages, turns, where)
  else:
    spans = [_span(tokenizer, render, text, messages, n, prompt=prompt(n), where=where) for n in turns]
  weights = [messages[n].get('weight', 1) for n in turns]
  trained = [(n, span) for n, span, weight in zip(turns, spans, weights) if weight]
  unseen = [_check_turn(messages, n, text, span, header=prompt(n).header, where=where) for n, span in trained]
  example = _example(*_encode_spans(tokenizer, text, spans, weights, where))
  return dataclasses.replace(example, unseen=next(filter(None, unseen), ''))


def _marked_spans(marked: list[Span], messages: list[Message], turns: list[int], where: str) -> list[Span]:
  """Returns the spans of these turns among `marked`, the spans of all assistant turns by the template's markers."""
  assistant = [n for n, m in enumerate(messages) if m['role'] == 'assistant']
  if len(marked) != len(assistant):
    why = f'the chat template marks {len(marked)} generations for {len(assistant)} assistant turns'
    raise InputError(f'{where}: {why}; repair its generation markers')
  return [marked[assistant.index(n)] for n in turns]


def _span(
  tokenizer: Tokenizer, render: Callable, text: str, messages: list[Message], n: int, *, prompt: _TurnPrompt, where: str
) -> Span:
  """Finds the characters of `text` that the assistant generates as message n, for which it is given `prompt`.

  The chat rendered with another message in its place differs from `text` in that message only. That holds for templates
  too that render a turn otherwise once others follow it (Qwen3 drops its reasoning), where the rendering of the chat up
  to the turn is no prefix of the whole.
  """
  sentinel = next((s for s in _SENTINELS if s[0] not in text), None)
  if sentinel is None:
    raise InputError(f'{where}: holds all private characters used as marks')
  asked, header = prompt
  replaced = {'role': 'assistant', 'content': sentinel}
  try:
    changed, _ = render(messages[:n] + [replaced] + messages[n + 1 :])
  except InputError:  # some templates refuse the answer of a tool without the call before it
    until, _ = render(messages[: n + 1])
    if not asked or not text.startswith(asked) or not text.startswith(until):
      raise
    return len(asked), len(until.rstrip())
  if sentinel not in changed:
    why = f'the chat template leaves out message {n}, so its tokens cannot be told apart'
    raise InputError(f'{where}: {why}; train on text, or give another template')
  start = common_length(text, changed)
  end = len(text) - common_length(text[start:][::-1], changed[start:][::-1])
  start = len(asked) if header and text[:start].startswith(asked) else _turn_start(header, text, start)[0]
  if end < start:
    why = f'the chat template renders message {n} otherwise than its generation prompt'
    raise InputError(f'{where}: {why}; add generation markers to the template')
  for special in tokenizer.special_texts:  # one begins here, or the two texts share a part of it
    at = text.find(special, max(start, end - len(special) + 1), end + len(special))
    if at >= 0:
      return start, at + len(special)
  return start, end


def common_length(a: str, b: str) -> int:
  """Returns how many characters two texts begin with alike, which `os.path.commonprefix` compares in Python."""
  size = min(len(a), len(b))
  codes = [np.frombuffer(x[:size].encode('utf-32-le', 'surrogatepass'), np.uint32) for x in (a, b)]
  differ = np.flatnonzero(codes[0] != codes[1])
  return int(differ[0]) if len(differ) else size


def _turn_start(header: str, text: str, start: int) -> tuple[int, str]:
  """Moves the start of a turn from its content to the end of `header`, its generation prompt.

  Between the two is at most an opened or empty <think> block, which templates put before a content, or a channel; the
  block belongs to the prompt as far as `header` has it. Also returns the part of `header` that the turn follows, '' for
  none.
  """
  bare = _THINK_BLOCK.sub('', header) or header
  at = text.rfind(bare, 0, start) if bare else -1
  if at < 0 or not _OPENING.fullmatch(text[at + len(bare) : start]):
    return start, ''
  found = header if text.startswith(header, at) else bare
  return at + len(found), found


def _prompt(render: Callable, messages: list[Message]) -> _TurnPrompt:
  """Returns the prompt of the turn that follows `messages`."""
  if not messages:
    return _TurnPrompt('', '')
  short, _ = render(messages)
  long, _ = render(messages, generation_prompt=True)
  return _TurnPrompt(long, long[len(short) :] if long.startswith(short) else '')


def _check_turn(messages: list[Message], n: int, text: str, span: Span, *, header: str, where: str) -> str:
  """Returns what `text` has before trained message n that `header`, its generation prompt, has not; '' for nothing.

  InputError if the template leaves out its reasoning or a call, or if a switch of the template mends the difference.
  """
  reasoning = _check_shown(messages[n], text[slice(*span)], f'{where}: message {n}')
  found = _turn_start(header, text, span[0])[1]
  if found in ('', header):
    return ''
  why = f'{where}: message {n}: is trained after {found!r}, which sampling never sees, as its prompts end in {header!r}'
  if reasoning or n == len(messages) - 1:
    switch = f'set config.data.template_kwargs.enable_thinking={bool(reasoning)}'
    raise InputError(f'{why}; {switch}, or the column chat_template_kwargs of the row')
  # Told once by the caller and not refused: some templates drop the empty <think> block of turns that others follow.
  return why


def _check_shown(message: Message, rendered: str, where: str) -> str:
  """Returns the reasoning of a trained turn; InputError if the template leaves out that, or a call of a tool."""
  for call in message.get('tool_calls', ()):
    name = (call.get('function') or call)['name']
    if name not in rendered:
      why = f'the chat template leaves out its call of {messages_lib.shown(name)}'
      raise InputError(f'{where}: {why}; set config.data.chat_template to a template that shows calls of tools')
  reasoning = next((message[key] for key in messages_lib.REASONING if message.get(key)), '')
  content = message['content']
  if not reasoning and '</think>' in content:
    reasoning = content.split('</think>')[0].split('<think>')[-1]
  if isinstance(reasoning, str) and reasoning.strip() not in rendered:
    why = 'the chat template drops its reasoning, as templates do once later turns follow'
    raise InputError(
      f"{where}: {why}; set train_on='completion' (last turn only) or make it the last turn of a row of its own"
    )
  return str(reasoning).strip()


def _encode_spans(
  tokenizer: Tokenizer, text: str, spans: Sequence[Span], weights: Sequence[float], where: str
) -> tuple[list[int], Sequence[float] | np.ndarray]:
  """Returns the token ids of `text`, and for each the weight of its span, or 0."""
  cuts = sorted({0, len(text), *(c for span in spans for c in span)})
  starts = {start for start, _ in spans}

  def weight(a: int, b: int) -> float:
    found = (w for (s, e), w in zip(spans, weights) if s <= a and b <= e)
    return next(found, 0)

  if not tokenizer.adds_space:
    parts = list(zip(cuts, cuts[1:]))
    encoded = tokenizer.encode_all([text[a:b] for a, b in parts])
    counts = np.fromiter(map(len, encoded), int)
    return list(itertools.chain.from_iterable(encoded)), np.repeat([weight(a, b) for a, b in parts], counts)
  # This tokenizer would add a space at each cut, so all is encoded at once.
  ids, offsets = tokenizer.offsets(text)
  mask = [weight(a, b) if b > a else 0 for a, b in offsets]
  for n, (a, b) in enumerate(offsets):
    if any(a < s < b for s in starts):
      why = f'the tokenizer joins {text[a:b]!r} across the start of an assistant turn (token {n})'
      raise InputError(f'{where}: {why}; its template does not suit it')
  return ids, mask


def _example(ids: Sequence[int], weights: Sequence[float] | np.ndarray) -> Example:
  mask = np.asarray(weights, np.float32)
  whole = np.isin(mask, (0, 1)).all()
  return Example(np.asarray(ids, np.int32), mask.astype(bool) if whole else mask)
