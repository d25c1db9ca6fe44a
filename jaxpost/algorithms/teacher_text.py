"""Log-probs of a teacher with a tokenizer of its own, placed at the tokens of the student (`distill.align=text`).

Legend: T tokens of a document, S read tokens of all, k most probable tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.algorithms import distill_text
from jaxpost.algorithms.base import Config, Precompute
from jaxpost.data import text_alignment
from jaxpost.data import tokenizer as tokenizer_lib

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer


@dataclasses.dataclass
class TextsOfTeacher:
  """The documents of a stage as one of its teachers reads them.

  Attributes:
    placed: the stage, a `stage.place.PlacedStage`.
    teacher: name of its role.
    mine: as the student reads them; None for a row that a map drops.
    rows: of the data that they come from.
    tokenizer: of the teacher, as it is stored with its weights.
  """

  placed: Any
  teacher: str
  mine: Sequence[Example | None]
  rows: Rows
  tokenizer: Tokenizer

  @functools.cached_property
  def theirs(self) -> list[Example | None]:
    """The same rows in the chat template and the tokens of the teacher."""
    inputs = self.placed.inputs
    tokenizer = self.tokenizer
    if not tokenizer.chat_template and inputs.tokenizer.chat_template:
      tokenizer = tokenizer_lib.load(tokenizer.source, inputs.tokenizer.chat_template)
    tokenizer = tokenizer.with_template_kwargs(inputs.config.data.template_kwargs)
    self.texts = text_alignment.Bytes.of(inputs.tokenizer), text_alignment.Bytes.of(tokenizer)
    render = inputs.algorithm.render(self.rows, tokenizer, inputs.config)
    return [None if e is None else render(n) for n, e in enumerate(self.mine)]

  def read(self, spec: Precompute, run: Callable, read: Callable) -> dict[str, np.ndarray]:
    """Returns {name: [S, ...]} of the student's read tokens, by the arrays of `spec`.

    Args:
      run, read: of `stage.precompute`.
    """
    shape = self.placed.shape
    number = int(self.teacher.removeprefix('teacher_'))
    (k,) = spec.options  # `distill.top_k`
    outputs = {'ids': ((k,), np.int32), 'top': ((k,), np.float32), 'own': ((), np.float32)}
    found = read(self.theirs.__getitem__, len(self.theirs), outputs, run, shape.rows, row_length=shape.row_length)
    stops = np.cumsum([0 if e is None else int(e.read.sum()) for e in self.theirs])  # [N] ends in the arrays of `found`
    same = text_alignment.same_tokens(*self.texts, self._ends())  # teacher's id -> student's id of the same text, or -1
    parts = {name: [np.zeros((0, *tail), dtype)] for name, (tail, dtype) in spec.arrays.items()}
    for mine, theirs, stop in zip(self.mine, self.theirs, stops):
      if mine is None or theirs is None:
        continue
      known = theirs.read
      outputs_of = {name: _unread(x[stop - known.sum() : stop], known) for name, x in found.items()}
      arrays = self._of_document(mine, theirs, outputs_of, same, k)
      for name, x in zip(distill_text.names(number), arrays):
        parts[name].append(x[mine.read])
    return {name: np.concatenate(part) for name, part in parts.items()}

  def _ends(self) -> dict[int, int]:
    """Returns {token at which a turn of the teacher ends: the student's}."""
    ends = {}
    for mine, theirs in zip(self.mine, self.theirs):
      if mine is None or theirs is None:
        continue
      for pair in zip(text_alignment.runs(mine), text_alignment.runs(theirs)):
        own, other = (int(e.tokens[stop - 1]) for e, (_, stop) in zip((mine, theirs), pair))
        if own in self.texts[0].stop_ids and other in self.texts[1].stop_ids:
          ends[other] = own
    return ends

  def _of_document(
    self, mine: Example, theirs: Example, outputs: dict[str, np.ndarray], same: np.ndarray, k: int
  ) -> tuple[np.ndarray, ...]:
    """Returns (ids [T, k], log-probs [T, k], kind [T], log-prob of the span [T]) of the student's tokens."""
    size = len(mine.tokens)
    ids, logprobs = np.zeros((size, k), np.int32), np.zeros((size, k), np.float32)
    kind, span = np.zeros(size, np.int32), np.zeros(size, np.float32)
    mine_read, theirs_read = mine.trained, theirs.trained
    theirs_read[self.placed.shape.row_length :] = False  # cut
    for found in text_alignment.spans(mine, theirs, self.texts):
      own, other = (slice(*part) for part in found)
      if not (mine_read[own].all() and theirs_read[other].all()):
        continue
      first = own.start
      if found.is_pair:
        kind[first] = distill_text.PAIR
        shared = same[outputs['ids'][other.start]] + 1  # [k], 0: the student has no token of this text
        # The more probable of two tokens with the same text counts.
        _, keep = np.unique(shared, return_index=True)
        ids[first, keep] = shared[keep]
        logprobs[first] = outputs['top'][other.start]
      else:
        kind[own] = distill_text.FURTHER
        kind[first] = distill_text.FIRST
        # log p of the text, of several of the teacher's tokens
        span[first] = outputs['own'][other].sum(dtype=np.float64)
    return ids, logprobs, kind, span


def precompute(config: Config) -> dict[str, Precompute]:
  """Returns the specs of all teachers; `read` gives `TextsOfTeacher` the outputs of their program."""
  k = config.distill.top_k
  found = {}
  for i in range(len(config.distill.teachers)):
    ids, logprobs, kind, span = distill_text.names(i)
    arrays = {ids: ((k,), np.int32), logprobs: ((k,), np.float32), kind: ((), np.int32), span: ((), np.float32)}
    found[f'teacher_{i}'] = Precompute(
      arrays, lambda outputs: dict(zip(('ids', 'top', 'own'), outputs)), (k,), texts=TextsOfTeacher
    )
  return found


def _unread(values: np.ndarray, read: np.ndarray) -> np.ndarray:
  """Returns values of the read tokens as an array of all tokens of a document."""
  out = np.zeros((len(read), *values.shape[1:]), values.dtype)
  out[read] = values
  return out
