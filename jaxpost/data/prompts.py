"""Prompts for samplers: rows of data as token ids, and streams of them.

P tokens of a prompt. Prompt number i of a run is a pure function of the seed and i, so a position is one global index.
Prompts of rows that are read lazily are made when they are reached; others all at the start.

`where` names a row in errors, e.g. 'train.jsonl:12'.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from jaxpost import types
from jaxpost.data import loader
from jaxpost.data import messages as messages_lib
from jaxpost.errors import InputError

if TYPE_CHECKING:
  from collections.abc import Callable, Sequence

  from jaxpost.data.messages import Message, Row
  from jaxpost.data.row_views import Chain, Lazy
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer


def prompt_tokens(tokenizer: Tokenizer, row: Row, where: str, *, system_prompt: str = '') -> np.ndarray:
  """Returns the tokens [P] int32 that a sampler continues for this row."""
  prompt = prompt_of(row, where, system_prompt)
  return encode_prompt(tokenizer, prompt, row, where)


def prompt_of(row: Row, where: str, system_prompt: str = '') -> str | list[Message]:
  """Returns the row's prompt, text or checked messages, without its answer."""
  if row.get('prompt') is not None:
    prompt = row['prompt']
    if isinstance(prompt, str):
      if system_prompt:
        raise InputError(f'{where}: prompt: is plain text, and a system prompt goes only before messages')
      return messages_lib.check_text(prompt, f'{where}: prompt')
    messages = messages_lib.check_messages(prompt, f'{where}: prompt')
  elif row.get('messages') is not None:
    messages = messages_lib.check_messages(row['messages'], f'{where}: messages')
    if messages[-1]['role'] == 'assistant':
      messages = messages[:-1]
    if not messages:
      raise InputError(f'{where}: messages: nothing stands before the last assistant turn')
  else:
    raise InputError(
      f'{where}: needs the column prompt or messages; it has {messages_lib.columns_of(row)}'
      ' (rename with config.data.columns, e.g. prompt=question)'
    )
  if system_prompt:
    if messages[0]['role'] in ('system', 'developer'):
      raise InputError(f'{where}: has a system message of its own and system_prompt is set')
    messages = [{'role': 'system', 'content': system_prompt}, *messages]
  return messages


def encode_prompt(
  tokenizer: Tokenizer, prompt: str | list[Message], row: Row, where: str, max_characters: int | None = None
) -> np.ndarray:
  """Returns the tokens [P] int32 of a prompt that `prompt_of` returned.

  Args:
    row: may have `tools`, which the chat template shows, and `chat_template_kwargs`.
    max_characters: of a chat, with its tools; see `check_length`.
  """
  if isinstance(prompt, str):
    ids = [*tokenizer.bos_ids, *tokenizer.encode(prompt)]
    if not ids:
      raise InputError(f'{where}: prompt: is empty')
  else:
    text, _ = tokenizer.render_chat(prompt, generation_prompt=True, row=row, where=where)
    check_length(text, where, max_characters)
    ids = tokenizer.encode(text)
  return np.asarray(ids, np.int32)


def check_length(text: str, where: str, most: int | None) -> None:
  """Raises InputError for a text of more than `most` characters, before time is spent on its tokens."""
  if most is not None and len(text) > most:
    raise InputError(f'{where}: {len(text)} characters are more than {most}; shorten it')


class _Read(NamedTuple):
  """A row as a prompt."""

  tokens: np.ndarray  # [P] int32
  prompt: str | list[dict]
  columns: dict[str, Any]  # the row's other columns


class Chooser(Protocol):
  """Decides which rows are drawn: `rl.curriculum.Curriculum`."""

  def draws(self, row: int, index: int) -> bool: ...

  def count_drawn(self) -> None: ...

  def state(self) -> dict: ...

  def restore(self, state: dict) -> None: ...


class PromptStream:
  """An endless iterator of (tuple of Prompt, info), resumable at each step.

  Attributes:
    skipped: rows whose prompt is too long, or that a lazily read source dropped; of lazily read rows, so far.
  """

  def __init__(
    self,
    rows: Rows | Chain | Lazy,
    tokenizer: Tokenizer,
    *,
    per_step: int,
    max_prompt_length: int,
    seed: int,
    shuffle: bool = True,
    system_prompt: str = '',
    tools: list[dict] | Callable[[int], list[dict]] | None = None,
    sources: Sequence[dict] = (),
  ):
    """Sets the stream to its start.

    Args:
      rows: with `prompt` (text or messages), or `messages`, whose prompt ends before the last assistant turn. Other
        columns go to the reward functions.
      max_prompt_length: longer prompts are skipped and counted.
      seed: decides the order.
      shuffle: False keeps the prompts in file order.
      system_prompt: put before each chat as a system message.
      tools: JSON schemas that every prompt shows, or (number of the row) -> its own; with some, it is a chat.
      sources: `Prompt.source` of the prompts of each source of `rows`; (): {}.
    """
    if per_step < 1:
      raise InputError(f'per_step={per_step} must be at least 1')
    self._rows, self._tokenizer = rows, tokenizer
    self._longest = max_prompt_length
    self._system_prompt = system_prompt
    self._tools = tools
    self._sources = sources
    self.skipped = 0
    self._prompts: list[_Read] | None = None  # without streaming: those of all rows that fit, by number
    self._num_prompts, sizes = len(rows), rows.sizes
    if not rows.streaming:
      self._prompts, sizes = self._read_all()
      self._num_prompts = len(self._prompts)
    self._order = loader.order(self._num_prompts, seed, shuffle, sizes, rows.weights)
    self._stops = list(itertools.accumulate(sizes))
    self._per_step = per_step
    self._index = 0
    self.curriculum: Chooser | None = None  # asked before a row is drawn
    self._identity = {
      'num_prompts': self._num_prompts,
      'seed': seed,
      'shuffle': int(shuffle),
      **loader.identity_of_mixture(sizes, rows.weights),
    }

  def _read_all(self) -> tuple[list[_Read], tuple[int, ...]]:
    """Returns the prompts that fit, and how many there are of each source."""
    rows = self._rows
    found = []
    longest = 0
    sizes = [0] * len(rows.sizes)
    stops = list(itertools.accumulate(rows.sizes))
    for n in range(len(rows)):
      read = self._read(n)
      assert read is not None  # only lazily read rows are dropped
      longest = max(longest, len(read.tokens))
      if len(read.tokens) > self._longest:
        self.skipped += 1
        continue
      found.append(read)
      sizes[bisect.bisect_right(stops, n)] += 1
    if not found or rows.weights and not all(sizes):
      of = '' if not found else f' of source {sizes.index(0)}'
      raise InputError(
        f'{rows.name}: all {self.skipped} prompts{of} are longer than max_prompt_length={self._longest}; '
        f'the longest has {longest} tokens'
      )
    return found, tuple(sizes)

  def _read(self, n: int) -> _Read | None:
    """Encodes the prompt of a row; None if the row was dropped."""
    row, where = self._rows[n], self._rows.where(n)
    if row is None:
      return None
    prompt = prompt_of(row, where, self._system_prompt)
    shown = row
    if tools := self._tools(n) if callable(self._tools) else self._tools:
      if isinstance(prompt, str):
        raise InputError(
          f'{where}: prompt: is plain text, and an environment answers in chats; make it a list of messages'
        )
      shown = {**row, 'tools': tools}
    tokens = encode_prompt(self._tokenizer, prompt, shown, where)
    return _Read(tokens, prompt, {k: v for k, v in row.items() if k != 'prompt'})

  @property
  def lengths(self) -> list[int]:
    """Number of tokens of each prompt of an epoch, unordered.

    Rows that are read lazily are not known: powers of two up to the longest allowed.
    """
    if self._prompts is None:
      powers = range(self._longest.bit_length())
      return [*(1 << n for n in powers), self._longest]
    return [len(read.tokens) for read in self._prompts]

  def __len__(self) -> int:
    """Number of prompts of one epoch; of lazily read rows, including those to be skipped."""
    return self._num_prompts

  def __iter__(self) -> PromptStream:
    return self

  def __next__(self) -> tuple[tuple[types.Prompt, ...], dict[str, float]]:
    prompts: list[types.Prompt] = []
    barren = 0  # rows skipped since the last prompt
    while len(prompts) < self._per_step:
      index = self._index
      self._index += 1
      if self.curriculum and not self.curriculum.draws(self.row(index), index):
        continue
      prompt = self.prompt(index)
      if prompt is not None:
        prompts.append(prompt)
        if self.curriculum:
          self.curriculum.count_drawn()
        barren = 0
        continue
      self.skipped += 1
      barren += 1
      if barren >= self._num_prompts:
        fit = f'is kept and within max_prompt_length={self._longest} tokens'
        raise InputError(f'{self._rows.name}: none of the {self._num_prompts} prompts {fit}')
    epochs = self._index / self._num_prompts
    return tuple(prompts), {'epochs': epochs, 'skipped': self.skipped}

  def prompt(self, index: int) -> types.Prompt | None:
    """Returns the prompt of a global index; None if a lazily read row is skipped."""
    number = self.row(index)
    read = self._read(number) if self._prompts is None else self._prompts[number]
    if read is None or len(read.tokens) > self._longest:
      return None
    source = self._sources[bisect.bisect_right(self._stops, number)] if self._sources else {}
    return types.Prompt(index=index, source=source, **read._asdict())

  def row(self, index: int) -> int:
    """Returns the number of the row, among those that are kept, of a global index."""
    return int(self._order[index])

  def state(self) -> dict[str, Any]:
    """Returns the position, and all that it depends on."""
    state = {'index': self._index, 'skipped': self.skipped, **self._identity}
    return state | {'curriculum': self.curriculum.state()} if self.curriculum else state

  def restore(self, state: dict[str, Any]) -> None:
    """Continues after the step at which `state` was taken, with any `per_step`."""
    loader.check_position(state, self._identity)
    self._index = state['index']
    self.skipped = state.get('skipped', self.skipped)
    if self.curriculum and 'curriculum' in state:
      self.curriculum.restore(state['curriculum'])
