"""Encodes rows of data as documents with a loss mask; `prompts.py` encodes them as prompts for a sampler.

Legend: T tokens of one document. `where` names a row in errors, e.g. 'train.jsonl:12'.

A chat is rendered to text once. The trained spans of the text come from the {% generation %} markers of the template,
or from rendering it again with one turn replaced. Prompt and completion are encoded separately, so that a prompt has
the same tokens as in sampling.
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
# Private-use characters that replace the content of a turn; the first pair that a text does not contain is used.
_SENTINELS = ('\ue000\ue001', '\ue002\ue003', '\uf000\uf001')
# Text that a template may put between its generation prompt and the content of a turn.
_OPENING = re.compile(r'\s*(<\w+>\s*)?(</\w+>\s*)?(<\|channel\|>(\w+<\|message\|>)?)?')
_THINK_BLOCK = re.compile(r'(<\w+>\s*)?(</\w+>\s*)?\Z')  # may end a generation prompt, opened or empty


class _TurnPrompt(NamedTuple):
  """The text after which a turn is generated."""

  text: str
  header: str  # the generation prompt, with which `text` ends


def make_example(tokenizer: Tokenizer, row: Row, where: str, *, train_on: str = 'assistant') -> Example:
  """Encodes one row as an Example.

  Args:
    row: with `messages`, or `prompt` and `completion` (both text, joined, or both lists of messages), or `text`.
    where: names the row in errors.
    train_on: 'assistant': every assistant turn with its end token, or the completion; 'completion': the last assistant
      turn only; 'all': every token. All tokens of `text` are always trained. A message may have a `weight` (a number
      >= 0, also called loss_weight), which scales the loss mask of its tokens; 0 leaves the turn out.
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
    raise InputError(
      f'{where}: prompt is {type_of(prompt)} and completion {type_of(completion)}; both text or both lists of messages'
    )
  if not isinstance(prompt, str):
    prompt = messages_lib.check_messages(prompt, f'{where}: prompt')
    completion = messages_lib.check_messages(completion, f'{where}: completion')
    if completion[: len(prompt)] == prompt:
      raise InputError(f'{where}: the answer begins with its prompt, which would be there twice; remove one of them')
    return _chat(tokenizer, prompt + completion, first=len(prompt), row=row, where=where, train_on=train_on)
  messages_lib.check_text(prompt, f'{where}: prompt')
  messages_lib.check_text(completion, f'{where}: completion')
  prompt_ids = [*tokenizer.bos_ids, *tokenizer.encode(prompt)]
  completion_ids = [*continuation(tokenizer, prompt, completion), tokenizer.eos_id]
  mask = [train_on == 'all'] * len(prompt_ids) + [True] * len(completion_ids)
  return _example(prompt_ids + completion_ids, mask)


def continuation(tokenizer: Tokenizer, prompt: str, text: str) -> list[int]:
  """Returns the token ids of `text` that follow the ids of `prompt`."""
  if not tokenizer.adds_space:
    return tokenizer.encode(text)
  # Encoded alone, the text would get a leading space, which it does not have after the prompt.
  prompt_ids = tokenizer.encode(prompt)
  joint_ids = tokenizer.encode(prompt + text)
  if joint_ids[: len(prompt_ids)] == prompt_ids:
    return joint_ids[len(prompt_ids) :]
  return tokenizer.encode(text)


def _chat(tokenizer: Tokenizer, messages: list[Message], first: int, row: Row, where: str, train_on: str) -> Example:
  """Encodes a chat; its assistant turns from message `first` on are trained."""
  turns = [n for n, m in enumerate(messages) if n >= first and m['role'] == 'assistant']
  if not turns and train_on != 'all':
    raise InputError(f'{where}: has no assistant turn, so nothing to train on')
  render = functools.partial(tokenizer.render_chat, row=row, where=where)
  text, marked = render(messages)
  if train_on == 'all':
    if any('weight' in m for m in messages):
      raise InputError(f"{where}: messages have a weight, which train_on='all' ignores; use 'assistant', or drop it")
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
  """Returns the spans of `turns` among `marked`, the spans that the template's markers give to all assistant turns."""
  assistant_turns = [n for n, m in enumerate(messages) if m['role'] == 'assistant']
  if len(marked) != len(assistant_turns):
    counts = f'{len(marked)} generations for {len(assistant_turns)} assistant turns'
    raise InputError(f'{where}: the chat template marks {counts}; repair its generation markers')
  return [marked[assistant_turns.index(n)] for n in turns]


def _span(
  tokenizer: Tokenizer, render: Callable, text: str, messages: list[Message], n: int, *, prompt: _TurnPrompt, where: str
) -> Span:
  """Finds the characters of `text` that the assistant generates as message n after `prompt`.

  The chat rendered with another message n differs from `text` only there. This also holds for templates that render a
  turn differently once other turns follow (Qwen3 drops its reasoning). For these, the rendering of the chat up to the
  turn would not be a prefix of `text`.
  """
  sentinel = next((s for s in _SENTINELS if s[0] not in text), None)
  if sentinel is None:
    raise InputError(f'{where}: has all private-use characters that mark turns; remove one pair of them')
  prompt_text, header = prompt
  replacement = {'role': 'assistant', 'content': sentinel}
  try:
    changed, _ = render(messages[:n] + [replacement] + messages[n + 1 :])
  except InputError:  # some templates refuse the answer of a tool without the call before it
    until, _ = render(messages[: n + 1])
    if not prompt_text or not text.startswith(prompt_text) or not text.startswith(until):
      raise
    return len(prompt_text), len(until.rstrip())
  if sentinel not in changed:
    raise InputError(f'{where}: the chat template leaves out message {n}; train on text, or set another template')
  start = common_length(text, changed)
  end = len(text) - common_length(text[start:][::-1], changed[start:][::-1])
  start = len(prompt_text) if header and text[:start].startswith(prompt_text) else _turn_start(header, text, start)[0]
  if end < start:
    problem = f'renders message {n} differently than its generation prompt'
    raise InputError(f'{where}: the chat template {problem}; add generation markers to the template')
  # Include the special token that ends the turn. It begins at `end`, or before if both renderings share a part of it.
  for special in tokenizer.special_texts:
    at = text.find(special, max(start, end - len(special) + 1), end + len(special))
    if at >= 0:
      return start, at + len(special)
  return start, end


def common_length(a: str, b: str) -> int:
  """Returns the length of the common prefix of two texts, faster than `os.path.commonprefix`."""
  size = min(len(a), len(b))
  codes = [np.frombuffer(x[:size].encode('utf-32-le', 'surrogatepass'), np.uint32) for x in (a, b)]
  differences = np.flatnonzero(codes[0] != codes[1])
  return int(differences[0]) if len(differences) else size


def _turn_start(header: str, text: str, start: int) -> tuple[int, str]:
  """Moves the start of a turn from its content back to the end of `header`, its generation prompt.

  Templates may put an opened or empty <think> block, or a channel, between the two. The part of the block that `header`
  has belongs to the prompt.

  Returns:
    The new start, and the part of `header` that comes before it; (start, '') if `header` is not found.
  """
  without_block = _THINK_BLOCK.sub('', header) or header
  at = text.rfind(without_block, 0, start) if without_block else -1
  if at < 0 or not _OPENING.fullmatch(text[at + len(without_block) : start]):
    return start, ''
  shown = header if text.startswith(header, at) else without_block
  return at + len(shown), shown


def _prompt(render: Callable, messages: list[Message]) -> _TurnPrompt:
  """Returns the prompt of the turn that follows `messages`."""
  if not messages:
    return _TurnPrompt('', '')
  short, _ = render(messages)
  long, _ = render(messages, generation_prompt=True)
  return _TurnPrompt(long, long[len(short) :] if long.startswith(short) else '')


def _check_turn(messages: list[Message], n: int, text: str, span: Span, *, header: str, where: str) -> str:
  """Returns a warning if `text` has another header before trained message n than sampling (`header`); '' if not.

  Raises:
    InputError: the template leaves out the reasoning or a call of the message, or has a switch for its header.
  """
  reasoning = _check_shown(messages[n], text[slice(*span)], f'{where}: message {n}')
  trained_after = _turn_start(header, text, span[0])[1]
  if trained_after in ('', header):
    return ''
  problem = f'is trained after {trained_after!r}, which sampling never sees, as its prompts end in {header!r}'
  problem = f'{where}: message {n}: {problem}'
  if reasoning or n == len(messages) - 1:
    switch = f'set config.data.template_kwargs.enable_thinking={bool(reasoning)}'
    raise InputError(f'{problem}; {switch}, or the column chat_template_kwargs of the row')
  # Only a warning: some templates drop the empty <think> block of turns that others follow.
  return problem


def _check_shown(message: Message, rendered: str, where: str) -> str:
  """Returns the reasoning of a trained turn; InputError if the template leaves out the reasoning or a tool call."""
  for call in message.get('tool_calls', ()):
    name = (call.get('function') or call)['name']
    if name not in rendered:
      problem = f'the chat template leaves out its call of {messages_lib.shown(name)}'
      raise InputError(f'{where}: {problem}; set config.data.chat_template to a template that shows tool calls')
  reasoning = next((message[key] for key in messages_lib.REASONING if message.get(key)), '')
  content = message['content']
  if not reasoning and '</think>' in content:
    reasoning = content.split('</think>')[0].split('<think>')[-1]
  if isinstance(reasoning, str) and reasoning.strip() not in rendered:
    raise InputError(
      f'{where}: the chat template drops its reasoning, as templates do once later turns follow; set '
      "train_on='completion' (last turn only) or make it the last turn of a row of its own"
    )
  return str(reasoning).strip()


def _encode_spans(
  tokenizer: Tokenizer, text: str, spans: Sequence[Span], weights: Sequence[float], where: str
) -> tuple[list[int], Sequence[float] | np.ndarray]:
  """Returns the token ids of `text`, and for each the weight of the span that it is in, or 0."""
  cuts = sorted({0, len(text), *itertools.chain.from_iterable(spans)})
  starts = {start for start, _ in spans}

  def weight(a: int, b: int) -> float:
    return next((w for (start, end), w in zip(spans, weights) if start <= a and b <= end), 0)

  if not tokenizer.adds_space:
    parts = list(zip(cuts, cuts[1:]))
    encoded = tokenizer.encode_all([text[a:b] for a, b in parts])
    counts = np.fromiter(map(len, encoded), int)
    return list(itertools.chain.from_iterable(encoded)), np.repeat([weight(a, b) for a, b in parts], counts)
  # The tokenizer would add a space to each part, so the text is encoded as a whole.
  ids, offsets = tokenizer.offsets(text)
  mask = [weight(a, b) if b > a else 0 for a, b in offsets]
  for n, (a, b) in enumerate(offsets):
    if any(a < start < b for start in starts):
      problem = f'the tokenizer joins {text[a:b]!r} across the start of an assistant turn (token {n})'
      raise InputError(f'{where}: {problem}; use a chat template that suits it')
  return ids, mask


def _example(ids: Sequence[int], weights: Sequence[float] | np.ndarray) -> Example:
  mask = np.asarray(weights, np.float32)
  is_binary = np.isin(mask, (0, 1)).all()
  return Example(np.asarray(ids, np.int32), mask.astype(bool) if is_binary else mask)
