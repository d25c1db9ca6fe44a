"""Encodes rows of data as documents with a loss mask; `prompts.py` encodes them as prompts for a sampler.

Legend: T tokens of one document. `where` names a row in errors, e.g. 'train.jsonl:12'.

A chat is rendered to text once. Its trained spans are those that the {% generation %} markers of the template enclose,
or are found by rendering it again with one turn replaced. Prompt and completion are encoded separately, so that a
prompt has the same tokens as in sampling.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.data import messages as messages_lib
from jaxpost.data.examples import Example
from jaxpost.data.messages import Message, Row
from jaxpost.errors import InputError, type_of

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer

Span = tuple[int, int]  # start and end, in characters

TRAIN_ON = ('assistant', 'completion', 'all')
# Private-use characters that replace the content of a turn; the first pair that a text does not contain is used.
_SENTINELS = ('\ue000\ue001', '\ue002\ue003', '\uf000\uf001')
# Text that a template may put between its generation prompt and the content of a turn.
_OPENING = re.compile(r'\s*(<\w+>\s*)?(</\w+>\s*)?(<\|channel\|>(\w+<\|message\|>)?)?')
_THINK_BLOCK = re.compile(r'(<\w+>\s*)?(</\w+>\s*)?\Z')  # may end a generation prompt, opened or empty


def make_example(tokenizer: Tokenizer, row: Row, where: str, *, train_on: str = 'assistant') -> Example:
  """Encodes one row as an Example.

  Args:
    row: with `messages`, or `prompt` and `completion` (both text, joined, or both lists of messages), or `text`.
    train_on: 'assistant': every assistant turn with its end token, or the completion; 'completion': the last assistant
      turn only; 'all': every token. All tokens of `text` are always trained. A message may have a `weight` (a number
      >= 0, also called loss_weight), which scales the loss mask of its tokens; 0 leaves the turn out.
  """
  if train_on not in TRAIN_ON:
    raise InputError(f'train_on={train_on!r} is none of {", ".join(TRAIN_ON)}')
  if row.get('messages') is not None:
    messages = messages_lib.check_messages(row['messages'], f'{where}: messages')
    return _encode_chat(tokenizer, messages, first=0, row=row, where=where, train_on=train_on)
  if row.get('prompt') is not None and row.get('completion') is not None:
    return _pair(tokenizer, row, where, train_on)
  if row.get('text') is not None and 'prompt' not in row:
    text = messages_lib.check_text(row['text'], f'{where}: text')
    ids = [*tokenizer.bos_ids, *tokenizer.encode(text), tokenizer.eos_id]
    return _example(ids, [True] * len(ids))
  if empty := [c for c in ('messages', 'prompt', 'completion', 'text') if c in row and row[c] is None]:
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
    return _encode_chat(tokenizer, prompt + completion, first=len(prompt), row=row, where=where, train_on=train_on)
  messages_lib.check_text(prompt, f'{where}: prompt')
  messages_lib.check_text(completion, f'{where}: completion')
  prompt_ids = [*tokenizer.bos_ids, *tokenizer.encode(prompt)]
  completion_ids = [*continuation(tokenizer, prompt, completion), tokenizer.eos_id]
  mask = [train_on == 'all'] * len(prompt_ids) + [True] * len(completion_ids)
  return _example(prompt_ids + completion_ids, mask)


def continuation(tokenizer: Tokenizer, prompt: str, text: str) -> list[int]:
  """Returns the token ids of `text` that follow the ids of `prompt`."""
  if tokenizer.adds_space:  # Encoded alone, the text would get a space before it, which it does not have here.
    prompt_ids, joint_ids = tokenizer.encode_all([prompt, prompt + text])
    if joint_ids[: len(prompt_ids)] == prompt_ids:
      return joint_ids[len(prompt_ids) :]
  return tokenizer.encode(text)


def _encode_chat(
  tokenizer: Tokenizer, messages: list[Message], first: int, row: Row, where: str, train_on: str
) -> Example:
  """Encodes a chat; its assistant turns from message `first` on are trained."""
  assistant = [n for n, m in enumerate(messages) if m['role'] == 'assistant']
  trained = [n for n in assistant if n >= first]
  if train_on == 'completion':
    trained = trained[-1:]
  if not trained and train_on != 'all':
    raise InputError(f'{where}: has no assistant turn, so nothing to train on')
  render = functools.partial(tokenizer.render_chat, row=row, where=where)
  text, marked = render(messages)
  turns = [_Turn(messages[:n], messages[n], messages[n + 1 :], text, render, where=where) for n in trained]
  if train_on == 'all':
    if any('weight' in m for m in messages):
      raise InputError(f"{where}: messages have a weight, which train_on='all' ignores; use 'assistant', or drop it")
    for turn in turns:
      turn.check_shown(text)
    return _encode_text(tokenizer, text, [((0, len(text)), 1)], where)
  if marked is None:
    spans = [turn.find(tokenizer.special_texts) for turn in turns]
  elif len(marked) == len(assistant):
    spans = [marked[assistant.index(n)] for n in trained]
  else:
    counts = f'{len(marked)} generations for {len(assistant)} assistant turns'
    raise InputError(f'{where}: the chat template marks {counts}; repair its generation markers')
  weights = [turn.message.get('weight', 1) for turn in turns]
  warnings = [turn.check(span) for turn, span, weight in zip(turns, spans, weights) if weight]
  example = _encode_text(tokenizer, text, list(zip(spans, weights)), where)
  return dataclasses.replace(example, unseen=next(filter(None, warnings), ''))


@dataclasses.dataclass(frozen=True)
class _Turn:
  """A turn of the assistant, between the other messages of its chat.

  Attributes:
    text: the whole chat as it is rendered.
    render: renders other messages as `text` was rendered; see `Tokenizer.render_chat`.
  """

  before: list[Message]
  message: Message
  after: list[Message]
  text: str
  render: Callable[..., tuple[str, list[Span] | None]]
  where: str

  @functools.cached_property
  def prompt(self) -> str:
    """The text after which the turn is sampled; '' if no message is before it."""
    return self.render(self.before, generation_prompt=True)[0] if self.before else ''

  @functools.cached_property
  def header(self) -> str:
    """The generation prompt, with which `prompt` ends; '' if the template has none."""
    without_header = self.render(self.before)[0] if self.before else ''
    return self.prompt[len(without_header) :] if self.prompt.startswith(without_header) else ''

  def find(self, special_texts: Sequence[str]) -> Span:
    """Returns the span of `text` that the assistant generates, up to the special token that ends the turn.

    The chat rendered with another content of the turn differs from `text` only there. This also holds for templates
    that render a turn differently once other turns follow (Qwen3 drops its reasoning). For these, the rendering of the
    chat up to the turn would not be a prefix of `text`.
    """
    header, prompt, text = self.header, self.prompt, self.text
    sentinel = next((s for s in _SENTINELS if s[0] not in text), None)
    if sentinel is None:
      raise InputError(f'{self.where}: has all private-use characters that mark turns; remove one pair of them')
    try:
      changed, _ = self.render([*self.before, {'role': 'assistant', 'content': sentinel}, *self.after])
    except InputError:  # some templates refuse the answer of a tool without the call before it
      until, _ = self.render([*self.before, self.message])
      if not prompt or not text.startswith(prompt) or not text.startswith(until):
        raise
      return len(prompt), len(until.rstrip())
    template, n = f'{self.where}: the chat template', len(self.before)
    if sentinel not in changed:
      raise InputError(f'{template} leaves out message {n}; train on text, or set another template')
    # From `content` to `end` the two renderings differ.
    content = common_length(text, changed)
    end = len(text) - common_length(text[content:][::-1], changed[content:][::-1])
    after_prompt = header and text.startswith(prompt, 0, content)
    start = len(prompt) if after_prompt else _find_header(header, text, content)[1]
    if end < start:
      problem = f'renders message {n} differently than its generation prompt'
      raise InputError(f'{template} {problem}; add generation markers to the template')
    for special in special_texts:  # begins at `end`, or before if both renderings share a part of it
      at = text.find(special, max(start, end - len(special) + 1), end + len(special))
      if at >= 0:
        return start, at + len(special)
    return start, end

  def check(self, span: Span) -> str:
    """Returns a warning if `text` has another header before this trained turn than sampling; '' if not.

    Raises:
      InputError: the template leaves out the reasoning or a call of the message, or has a switch for its header.
    """
    header, reasons = self.header, bool(_reasoning(self.message))
    trained_after = self.text[slice(*_find_header(header, self.text, span[0]))]
    self.check_shown(self.text[slice(*span)])
    if trained_after in ('', header):
      return ''
    problem = f'is trained after {trained_after!r}, which sampling never sees, as its prompts end in {header!r}'
    problem = f'{self.where}: message {len(self.before)}: {problem}'
    if reasons or not self.after:
      switch = f'set config.data.template_kwargs.enable_thinking={reasons}'
      raise InputError(f'{problem}; {switch}, or the column chat_template_kwargs of the row')
    # Only a warning: some templates drop the empty <think> block of turns that others follow.
    return problem

  def check_shown(self, rendered: str) -> None:
    """Raises InputError if `rendered` lacks the reasoning of this trained turn or a tool call."""
    where = f'{self.where}: message {len(self.before)}: the chat template'
    for call in self.message.get('tool_calls', ()):
      name = (call.get('function') or call)['name']
      if name not in rendered:
        problem = f'leaves out its call of {messages_lib.shown(name)}'
        raise InputError(f'{where} {problem}; set config.data.chat_template to a template that shows tool calls')
    if _reasoning(self.message) not in rendered:
      raise InputError(
        f'{where} drops its reasoning, as templates do once later turns follow; set '
        "train_on='completion' (last turn only) or make it the last turn of a row of its own"
      )


def _reasoning(message: Message) -> str:
  """Returns the reasoning of a turn, from a field of its own or a <think> block of the content; '' if it has none."""
  reasoning = next(filter(None, map(message.get, messages_lib.REASONING)), '')
  before, closed, _ = message['content'].partition('</think>')
  if closed and not reasoning:
    reasoning = before.rpartition('<think>')[2]
  return reasoning.strip()


def _find_header(header: str, text: str, content: int) -> Span:
  """Returns the span in `text` of a turn's header, its generation prompt; (content, content) if it is not found.

  Templates may put an opened or empty <think> block, or a channel, between the header and the content of the turn,
  which begins at `content`. A block that `header` itself ends in may be missing from `text`.
  """
  without_block = _THINK_BLOCK.sub('', header) or header
  at = text.rfind(without_block, 0, content) if without_block else -1
  if at < 0 or not _OPENING.fullmatch(text[at + len(without_block) : content]):
    return content, content
  shown = header if text.startswith(header, at) else without_block
  return at, at + len(shown)


def common_length(a: str, b: str) -> int:
  """Returns the length of the common prefix of two texts, faster than `os.path.commonprefix`."""
  size = min(len(a), len(b))
  codes = [np.frombuffer(x[:size].encode('utf-32-le', 'surrogatepass'), np.uint32) for x in (a, b)]
  differences = np.flatnonzero(codes[0] != codes[1])
  return int(differences[0]) if len(differences) else size


def _encode_text(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[Span, float]], where: str) -> Example:
  """Encodes a text; the weight of a token is that of the span it is in, or 0. No token crosses the start of a span."""

  def weight(a: int, b: int) -> float:
    return next((weight for (start, end), weight in spans if start <= a < b <= end), 0)

  if not tokenizer.adds_space:
    cuts = sorted({0, len(text), *itertools.chain.from_iterable(span for span, _ in spans)})
    parts = list(zip(cuts, cuts[1:]))
    encoded = tokenizer.encode_all([text[a:b] for a, b in parts])
    weights = np.repeat([*itertools.starmap(weight, parts)], [*map(len, encoded)])
    return _example([*itertools.chain.from_iterable(encoded)], weights)
  # The tokenizer would add a space to each part, so the text is encoded as a whole.
  ids, offsets = tokenizer.offsets(text)
  for n, (a, b) in enumerate(offsets):
    if any(a < start < b for (start, _), _ in spans):
      problem = f'{where}: the tokenizer joins {text[a:b]!r} across the start of an assistant turn (token {n})'
      raise InputError(f'{problem}; use a template that ends its generation prompt in a newline or special token')
  return _example(ids, [*itertools.starmap(weight, offsets)])


def _example(ids: Sequence[int], weights: Sequence[float] | np.ndarray) -> Example:
  mask = np.asarray(weights, np.float32)
  is_binary = np.isin(mask, (0, 1)).all()
  return Example(np.asarray(ids, np.int32), mask.astype(bool) if is_binary else mask)
