"""Streams of tokenised prompts for samplers.

P tokens of a prompt. Prompt number i of a run is a pure function of the seed
and i, so a position is one global index. Prompts of rows that are read lazily
are made when they are reached; others all at the start.
"""

import bisect
import itertools

from jaxpost import types
from jaxpost.data import chat, loader
from jaxpost.errors import InputError


class PromptStream:
  """An endless iterator of (tuple of Prompt, info), resumable at each step.

  Attributes:
    skipped: rows left out because their prompt is over-long, or that a lazily
      read source dropped; of lazily read rows, those reached so far.
  """

  def __init__(self, rows, tokenizer, *, per_step, max_prompt_length, seed, shuffle=True, system_prompt='', tools=None):
    """See the class.

    Args:
      rows: `sources.Rows` with `prompt` (text or messages), or `messages`, of
        which the prompt is what stands before the last assistant turn. Other
        columns go to the reward functions.
      tokenizer: a `Tokenizer`.
      per_step: prompts of one step.
      max_prompt_length: longer prompts are skipped and counted.
      seed: decides the order.
      shuffle: else the prompts come in file order.
      system_prompt: put before each chat as a system message.
      tools: JSON schemas that every prompt shows; then all are chats.
    """
    if per_step < 1:
      raise InputError(f'per_step={per_step} must be at least 1')
    self._rows, self._tokenizer = rows, tokenizer
    self._longest = max_prompt_length
    self._system_prompt = system_prompt
    self._tools = tools
    self.skipped = 0
    # Without streaming, the prompts of all rows that fit, by number.
    self._prompts, sizes = None, rows.sizes
    if not rows.streaming:
      self._prompts, sizes = self._read_all()
    self._num_prompts = len(rows) if rows.streaming else len(self._prompts)
    self._order = loader.order(self._num_prompts, seed, shuffle, sizes, rows.weights)
    self._per_step = per_step
    self._index = 0
    self._meaning = {
      'num_prompts': self._num_prompts,
      'seed': seed,
      'shuffle': int(shuffle),
      **loader.meaning_of_mixture(sizes, rows.weights),
    }

  def _read_all(self):
    """[(tokens, prompt, columns)] that fit, and how many of each source."""
    rows, found, longest = self._rows, [], 0
    sizes = [0] * len(rows.sizes)
    stops = list(itertools.accumulate(rows.sizes))
    for n in range(len(rows)):
      tokens, prompt, columns = self._read(n)
      longest = max(longest, len(tokens))
      if len(tokens) > self._longest:
        self.skipped += 1
        continue
      found.append((tokens, prompt, columns))
      sizes[bisect.bisect_right(stops, n)] += 1
    if not found or rows.weights and not all(sizes):
      of = '' if not found else f' of source {sizes.index(0)}'
      raise InputError(
        f'{rows.name}: all {self.skipped} prompts{of} are longer than'
        f' max_prompt_length={self._longest}; the longest has {longest}'
        ' tokens'
      )
    return found, tuple(sizes)

  def _read(self, n):
    """(tokens, prompt, other columns) of a row, or None if it was dropped."""
    row, where = self._rows[n], self._rows.where(n)
    if row is None:
      return None
    prompt = chat.prompt_of(row, where, self._system_prompt)
    shown = row
    if self._tools:
      if isinstance(prompt, str):
        raise InputError(
          f'{where}: prompt: is plain text, and an environment answers in chats; make it a list of messages'
        )
      shown = {'tools': self._tools}
    tokens = chat.encode_prompt(self._tokenizer, prompt, shown, where)
    return tokens, prompt, {k: v for k, v in row.items() if k != 'prompt'}

  @property
  def lengths(self):
    """Tokens of each prompt of an epoch, unordered.

    Of lazily read rows, lengths of all orders up to the longest allowed.
    """
    if self._prompts is None:
      powers = range(self._longest.bit_length())
      return [*(1 << n for n in powers), self._longest]
    return [len(tokens) for tokens, _, _ in self._prompts]

  def __len__(self):
    """Prompts of one epoch; of lazily read rows, with those to be skipped."""
    return self._num_prompts

  def __iter__(self):
    return self

  def __next__(self):
    prompts, barren = [], 0
    while len(prompts) < self._per_step:
      prompt = self.prompt(self._index)
      self._index += 1
      if prompt is not None:
        prompts.append(prompt)
        barren = 0
        continue
      self.skipped += 1
      barren += 1
      if barren >= self._num_prompts:
        raise InputError(
          f'{self._rows.name}: none of the {self._num_prompts} prompts is kept'
          f' and within max_prompt_length={self._longest} tokens'
        )
    epochs = self._index / self._num_prompts
    return tuple(prompts), {'epochs': epochs, 'skipped': self.skipped}

  def prompt(self, index):
    """The Prompt of a global index; None if a lazily read row is skipped."""
    number = self._order[index]
    if self._prompts is not None:
      tokens, prompt, columns = self._prompts[number]
    else:
      found = self._read(number)
      if found is None or len(found[0]) > self._longest:
        return None
      tokens, prompt, columns = found
    return types.Prompt(index=index, tokens=tokens, prompt=prompt, columns=columns)

  def state(self):
    """Where the stream stands: ints only."""
    return {'index': self._index, **self._meaning}

  def restore(self, state):
    """Go on after the step that `state` was taken at, with any `per_step`."""
    for key, mine in self._meaning.items():
      if state.get(key) != mine:
        raise InputError(
          f'prompts: the saved position is of {key}={state.get(key)} and this'
          f' run has {key}={mine}; go back to that, or start a new run'
        )
    self._index = state['index']
