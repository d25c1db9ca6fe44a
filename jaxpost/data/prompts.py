"""Encodes rows of data as prompts for samplers, and streams them.

Legend: P tokens of a prompt. `where` names a row in errors, e.g. 'train.jsonl:12'.

Prompt number i of a run is a pure function of the seed and i, so a position in the data is one global index. Prompts of
lazily read rows are encoded when they are reached, all others at the start.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost import types
from jaxpost.data import loader
from jaxpost.data import messages as messages_lib
from jaxpost.data.messages import Message, Row
from jaxpost.errors import InputError

if TYPE_CHECKING:
  from collections.abc import Callable, Sequence

  from jaxpost.data.row_views import Chain, Lazy
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer


def prompt_tokens(tokenizer: Tokenizer, row: Row, where: str) -> np.ndarray:
  """Returns the tokens [P] int32 that a sampler continues for this row."""
  return encode_prompt(tokenizer, prompt_of(row, where), row, where)


def prompt_of(row: Row, where: str, system_prompt: str = '') -> str | list[Message]:
  """Returns the row's prompt without its answer, as text or as checked messages."""
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
      raise InputError(f'{where}: messages: there is nothing before the last assistant turn')
  else:
    raise InputError(
      f'{where}: needs the column prompt or messages; it has {messages_lib.columns_of(row)}'
      ' (rename with config.data.columns, e.g. prompt=question)'
    )
  if system_prompt:
    if messages[0]['role'] in ('system', 'developer'):
      raise InputError(f'{where}: has its own system message, and system_prompt is set; remove one of them')
    messages = [{'role': 'system', 'content': system_prompt}, *messages]
  return messages


def encode_prompt(
  tokenizer: Tokenizer, prompt: str | list[Message], row: Row, where: str, max_characters: int | None = None
) -> np.ndarray:
  """Returns the tokens [P] int32 of a prompt that `prompt_of` returned.

  Args:
    row: may have `tools`, which the chat template lists, and `chat_template_kwargs`.
    max_characters: limit of a rendered chat with its tools, see `check_length`.
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


def check_length(text: str, where: str, limit: int | None) -> None:
  """Raises InputError for a text of more than `limit` characters, which would take long to tokenize."""
  if limit is not None and len(text) > limit:
    raise InputError(f'{where}: {len(text)} characters are more than {limit}; shorten it')


class PromptStream:
  """An endless iterator of (tuple of Prompt, info), resumable at each step.

  Attributes:
    skipped: number of rows whose prompt is too long or that a map has dropped; of lazily read rows, those so far.
    curriculum: an `rl.curriculum.Curriculum`, which decides which rows are drawn; None: all are.
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
      shuffle: False keeps the prompts in file order.
      system_prompt: added to each chat as its first message.
      tools: JSON schemas of tools that every prompt lists, or row number -> those of the row. Prompts with tools have
        to be chats.
      sources: `Prompt.source` of the prompts of each source of `rows`; () for {}.
    """
    self._rows, self._tokenizer = rows, tokenizer
    self._max_length = max_prompt_length
    self._system_prompt = system_prompt
    self._tools = tools
    self._sources = sources
    self.skipped = 0
    self._prompts: list[types.Prompt] | None = None  # all that fit, by number; None while streaming
    self._num_prompts, sizes = len(rows), rows.sizes
    if not rows.streaming:
      self._prompts, sizes = self._read_all()
      self._num_prompts = len(self._prompts)
    self._order = loader.order(self._num_prompts, seed, shuffle, sizes, rows.weights)
    self._stops = list(itertools.accumulate(sizes))
    self._per_step = per_step
    self._index = 0
    self.curriculum: Any = None
    self._identity = {
      'num_prompts': self._num_prompts,
      'seed': seed,
      'shuffle': int(shuffle),
      **loader.identity_of_mixture(sizes, rows.weights),
    }

  def _read_all(self) -> tuple[list[types.Prompt], tuple[int, ...]]:
    """Returns the prompts that fit, and how many there are of each source."""
    rows = self._rows
    prompts = []
    longest = 0
    sizes = [0] * len(rows.sizes)
    stops = list(itertools.accumulate(rows.sizes))
    for n in range(len(rows)):
      prompt = self._read(n)
      assert prompt is not None  # only lazily read rows are dropped
      longest = max(longest, len(prompt.tokens))
      if len(prompt.tokens) > self._max_length:
        self.skipped += 1
        continue
      prompts.append(prompt)
      sizes[bisect.bisect_right(stops, n)] += 1
    if not prompts or rows.weights and not all(sizes):
      of_source = '' if not prompts else f' of source {sizes.index(0)}'
      raise InputError(
        f'{rows.name}: all {self.skipped} prompts{of_source} are longer than max_prompt_length={self._max_length}; '
        f'the longest has {longest} tokens'
      )
    return prompts, tuple(sizes)

  def _read(self, n: int) -> types.Prompt | None:
    """Encodes the prompt of a row, as yet without its index and source; None if a map has dropped the row."""
    row, where = self._rows[n], self._rows.where(n)
    if row is None:
      return None
    prompt = prompt_of(row, where, self._system_prompt)
    row_with_tools = row
    if tools := self._tools(n) if callable(self._tools) else self._tools:
      if isinstance(prompt, str):
        raise InputError(
          f'{where}: prompt: is plain text, and an environment answers in chats; make it a list of messages'
        )
      row_with_tools = {**row, 'tools': tools}
    tokens = encode_prompt(self._tokenizer, prompt, row_with_tools, where)
    return types.Prompt(-1, tokens, prompt, {k: v for k, v in row.items() if k != 'prompt'})

  @property
  def lengths(self) -> list[int]:
    """Number of tokens of each prompt of an epoch, in no particular order.

    For lazily read rows, which are not known: the powers of two up to the longest allowed, and that.
    """
    if self._prompts is None:
      powers = range(self._max_length.bit_length())
      return [*(1 << n for n in powers), self._max_length]
    return [len(prompt.tokens) for prompt in self._prompts]

  def __len__(self) -> int:
    """Number of prompts of one epoch; for lazily read rows it includes those that will be skipped."""
    return self._num_prompts

  def __iter__(self) -> PromptStream:
    return self

  def __next__(self) -> tuple[tuple[types.Prompt, ...], dict[str, float]]:
    prompts: list[types.Prompt] = []
    skipped_in_a_row = 0
    while len(prompts) < self._per_step:
      index = self._index
      self._index += 1
      if self.curriculum and not self.curriculum.draws(self.row(index), index):
        continue
      prompt = self.prompt(index)
      if prompt is not None:
        prompts.append(prompt)
        if self.curriculum:
          self.curriculum.drawn += 1
        skipped_in_a_row = 0
        continue
      self.skipped += 1
      skipped_in_a_row += 1
      if skipped_in_a_row >= self._num_prompts:
        raise InputError(
          f'{self._rows.name}: none of the {self._num_prompts} prompts is kept and within '
          f'max_prompt_length={self._max_length} tokens'
        )
    epochs = self._index / self._num_prompts
    return tuple(prompts), {'epochs': epochs, 'skipped': self.skipped}

  def prompt(self, index: int) -> types.Prompt | None:
    """Returns the prompt at a global index; None if it is a lazily read row that is skipped."""
    number = self.row(index)
    encoded = self._read(number) if self._prompts is None else self._prompts[number]
    if encoded is None or len(encoded.tokens) > self._max_length:
      return None
    source = self._sources[bisect.bisect_right(self._stops, number)] if self._sources else {}
    return encoded.replace(index=index, source=source)

  def row(self, index: int) -> int:
    """Returns the number of the row at a global index, counted among the rows that are kept."""
    return int(self._order[index])

  def state(self) -> dict[str, Any]:
    """Returns the position, and all that it depends on."""
    state = {'index': self._index, 'skipped': self.skipped, **self._identity}
    return state | {'curriculum': self.curriculum.state()} if self.curriculum else state

  def restore(self, state: dict[str, Any]) -> None:
    """Continues at a position that `state` has returned, with any `per_step`."""
    loader.check_position(state, self._identity)
    self._index = state['index']
    self.skipped = state.get('skipped', self.skipped)
    if self.curriculum and 'curriculum' in state:
      self.curriculum.restore(state['curriculum'])
