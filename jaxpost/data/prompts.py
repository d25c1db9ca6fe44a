"""Streams of tokenised prompts for samplers.

P tokens of a prompt. Prompt number i of a run is a pure function of the seed
and i, so a position is one global index.
"""

from jaxpost import types
from jaxpost.data import chat
from jaxpost.data import loader
from jaxpost.errors import InputError


class PromptStream:
  """An endless iterator of (tuple of Prompt, info), resumable at each step.

  Attributes:
    skipped: rows left out because their prompt is over-long.
  """

  def __init__(
      self, rows, tokenizer, *, per_step, max_prompt_length, seed, shuffle=True,
      system_prompt='', enable_thinking=False):
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
      enable_thinking: for chat templates that know it.
    """
    if per_step < 1:
      raise InputError(f'per_step={per_step} must be at least 1')
    self._prompts = []
    self.skipped = 0
    longest = 0
    for n in range(len(rows)):
      row, where = rows[n], rows.where(n)
      prompt = chat.prompt_of(row, where, system_prompt)
      tokens = chat.encode_prompt(
        tokenizer, prompt, row, where, enable_thinking)
      longest = max(longest, len(tokens))
      if len(tokens) > max_prompt_length:
        self.skipped += 1
        continue
      columns = {k: v for k, v in row.items() if k != 'prompt'}
      self._prompts.append((tokens, prompt, columns))
    if not self._prompts:
      raise InputError(
        f'{rows.name}: all {self.skipped} prompts are longer than'
        f' max_prompt_length={max_prompt_length}; the longest has {longest}'
        ' tokens')
    self._order = loader.order(len(self._prompts), seed, shuffle)
    self._per_step = per_step
    self._index = 0
    self._meaning = {
      'num_prompts': len(self._prompts),
      'seed': seed,
      'shuffle': int(shuffle),
    }

  @property
  def lengths(self):
    """Tokens of each prompt of an epoch, unordered."""
    return [len(tokens) for tokens, _, _ in self._prompts]

  def __len__(self):
    """Prompts of one epoch."""
    return len(self._prompts)

  def __iter__(self):
    return self

  def __next__(self):
    prompts = tuple(self.prompt(self._index + n) for n in range(self._per_step))
    self._index += self._per_step
    epochs = self._index / len(self._prompts)
    return prompts, {'epochs': epochs, 'skipped': self.skipped}

  def prompt(self, index):
    """The Prompt of a global index."""
    tokens, prompt, columns = self._prompts[self._order[index]]
    return types.Prompt(
      index=index, tokens=tokens, prompt=prompt, columns=columns)

  def state(self):
    """Where the stream stands: ints only."""
    return {'index': self._index, **self._meaning}

  def restore(self, state):
    """Go on after the step that `state` was taken at, with any `per_step`."""
    for key, mine in self._meaning.items():
      if state.get(key) != mine:
        raise InputError(
          f'prompts: the saved position is of {key}={state.get(key)} and this'
          f' run has {key}={mine}; go back to that, or start a new run')
    self._index = state['index']
