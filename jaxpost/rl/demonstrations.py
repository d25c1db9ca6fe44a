"""A sampler whose completions are the answers of a data set.

Legend: N sequences (one a prompt), C completion tokens, P prompt tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpost.data import chat
from jaxpost.types import Prompt, Rollout

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.data.tokenizer import Tokenizer

_STREAM = 7  # of random numbers, apart from others of the same seed and step


@dataclasses.dataclass
class DemonstrationSampler:
  """A sampler that in a share of the steps returns the answers of the data.

  Attributes:
    sampler: for the other steps.
    share: of the steps; which ones is a function of seed and step alone.
    max_tokens: of an answer; longer ones are cut.
  """

  sampler: Callable[..., Rollout]
  tokenizer: Tokenizer
  share: float
  seed: int
  max_tokens: int

  def from_data(self, step: int) -> bool:
    """Returns True for a step that takes the answers of the data."""
    draw = np.random.default_rng((self.seed, step, _STREAM)).random()
    return draw < self.share

  def __call__(
    self,
    prompts: Sequence[Prompt],
    group_size: int = 1,
    step: int = 0,
    on_dispatch: Callable[[int], None] | None = None,
    **sampling,
  ) -> Rollout:
    """Returns a rollout, see `rollout.sampler.Sampler`; the data have one completion a prompt."""
    if self.from_data(step):
      return rollout(prompts, self.tokenizer, self.max_tokens, step)
    return self.sampler(prompts, group_size, step, on_dispatch, **sampling)


def check(tokenizer, rows, most: int):
  """InputError for one of the first rows if it has no completion."""
  for i in range(0 if rows.streaming else min(len(rows), most)):
    render(tokenizer, rows[i], rows.where(i))


def render(tokenizer, row, where) -> Example:
  """A row as its last answer is trained; InputError if it has none."""
  return chat.make_example(tokenizer, row, where, train_on='completion')


def rollout(prompts: Sequence[Prompt], tokenizer, max_tokens: int, step: int = 0) -> Rollout:
  """The data's answers to the prompts, one each, cut to `max_tokens`.

  They have the tokens that training on the data gives them, up to the last
  trained one; their log-probs are 0.
  """
  size = len(prompts)
  completions = np.zeros((size, max_tokens), np.int32)
  lengths, finished = np.zeros(size, np.int32), np.ones(size, bool)
  for n, prompt in enumerate(prompts):
    example = render(tokenizer, _row(prompt), f'prompt {prompt.index}')
    trained = np.flatnonzero(example.loss_mask)
    answer = example.tokens[trained[0] : trained[-1] + 1]
    lengths[n] = min(len(answer), max_tokens)
    finished[n] = len(answer) <= max_tokens
    completions[n, : lengths[n]] = answer[:max_tokens]
  logprobs = np.zeros(completions.shape, np.float32)
  return Rollout(tuple(prompts), completions, lengths, logprobs, logprobs, finished, step, from_data=True)


def _row(prompt: Prompt) -> dict:
  """The row that the prompt was made of, with its system prompt."""
  messages = prompt.columns.get('messages')
  if messages is None:
    return {**prompt.columns, 'prompt': prompt.prompt}
  last = [m for m in messages if m['role'] == 'assistant'][-1]
  return {**prompt.columns, 'messages': [*prompt.prompt, last]}
