"""Doubles of what is outside, for tests and benchmarks, ours and yours.

A tokenizer whose text can be computed by hand, and made-up data.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxpost.data.examples import Example
from jaxpost.types import Prompt


@dataclasses.dataclass(frozen=True)
class IntTokenizer:
  """'5 17 3' <-> [5, 17, 3]."""

  vocab_size: int
  stop_ids: tuple = (1,)
  bos_id: int = 0
  eos_id: int = 1
  pad_id: int = 2
  source: str = 'integers'
  bos_ids: tuple = (0,)  # that a text begins with
  adds_space: bool = False  # of its own at the start of a text

  def encode(self, text: str) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    special = (self.bos_id, self.eos_id, self.pad_id) if skip_special else ()
    return ' '.join(str(int(i)) for i in ids if i not in special)


def document_lengths(count: int, seed: int = 0, low: int = 32, high: int = 512) -> np.ndarray:
  """Lengths as an instruction set has them: log-normal, clipped."""
  rng = np.random.default_rng(seed)
  return np.clip(np.exp(rng.normal(4.9, 0.7, count)), low, high).astype(int)


def random_example(length: int, vocab_size: int, seed: int) -> Example:
  """A document of random tokens, all of them trained."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(3, vocab_size, length).astype(np.int32)
  return Example(tokens, np.ones(length, bool))


class RandomPrompts:
  """An endless stream of prompts of random tokens, like `PromptStream`."""

  def __init__(self, per_step: int, length: int, vocab_size: int):
    self.per_step = per_step
    self.length = length
    self.vocab = vocab_size
    self.index = 0

  @property
  def lengths(self) -> list[int]:
    return [self.length]

  def prompt(self, index: int) -> Prompt:
    rng = np.random.default_rng(index)
    tokens = rng.integers(3, self.vocab, self.length).astype(np.int32)
    return Prompt(index, tokens, ' '.join(map(str, tokens)), {})

  def __next__(self):
    start, self.index = self.index, self.index + self.per_step
    return tuple(self.prompt(i) for i in range(start, self.index)), {}

  def state(self) -> dict:
    return {'index': self.index}

  def restore(self, state: dict) -> None:
    self.index = state['index']
