"""Log-probs of a teacher with another tokenizer, aligned with the tokens of the student (`distill.align=text`).

Legend: T tokens of a document, S read tokens of all documents, k most probable tokens. A token is read if a loss or a
metric needs its log-prob (`Example.read`).
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
    teacher: name of its role, teacher_N.
    student_examples: the documents in the student's tokens; None for a row that a map drops.
    rows: the rows of the data that they come from.
    tokenizer: the teacher's, as it is stored with its weights.
  """

  placed: Any
  teacher: str
  student_examples: Sequence[Example | None]
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
    return [None if e is None else render(n) for n, e in enumerate(self.student_examples)]

  def read(self, spec: Precompute, run: Callable, read: Callable) -> dict[str, np.ndarray]:
    """Returns {name: [S, ...]} for the student's read tokens, with the names of `spec.arrays`.

    Args:
      run: runs the teacher's program, and read: collects its outputs, see `stage.precompute`.
    """
    shape = self.placed.shape
    number = int(self.teacher.removeprefix('teacher_'))
    (k,) = spec.options  # `distill.top_k`
    fields = {'ids': ((k,), np.int32), 'top': ((k,), np.float32), 'own': ((), np.float32)}
    outputs = read(self.theirs.__getitem__, len(self.theirs), fields, run, shape.rows, row_length=shape.row_length)
    stops = np.cumsum([0 if e is None else int(e.read.sum()) for e in self.theirs])  # document -> its end in `outputs`
    same = text_alignment.same_tokens(*self.texts, self._ends())  # teacher's id -> student's id of the same text, or -1
    parts = {name: [np.zeros((0, *tail), dtype)] for name, (tail, dtype) in spec.arrays.items()}
    for student, teacher, stop in zip(self.student_examples, self.theirs, stops):
      if student is None or teacher is None:
        continue
      is_read = teacher.read
      document_outputs = {name: _unread(x[stop - is_read.sum() : stop], is_read) for name, x in outputs.items()}
      arrays = self._of_document(student, teacher, document_outputs, same, k)
      for name, x in zip(distill_text.names(number), arrays):
        parts[name].append(x[student.read])
    return {name: np.concatenate(part) for name, part in parts.items()}

  def _ends(self) -> dict[int, int]:
    """Returns {stop token of the teacher: the stop token of the student that ends the same turn}."""
    ends = {}
    for student, teacher in zip(self.student_examples, self.theirs):
      if student is None or teacher is None:
        continue
      for (_, student_stop), (_, teacher_stop) in zip(text_alignment.runs(student), text_alignment.runs(teacher)):
        student_end, teacher_end = int(student.tokens[student_stop - 1]), int(teacher.tokens[teacher_stop - 1])
        if student_end in self.texts[0].stop_ids and teacher_end in self.texts[1].stop_ids:
          ends[teacher_end] = student_end
    return ends

  def _of_document(
    self, student: Example, teacher: Example, outputs: dict[str, np.ndarray], same: np.ndarray, k: int
  ) -> tuple[np.ndarray, ...]:
    """Returns (ids [T, k], log-probs [T, k], kind [T], log-prob of the span [T]) of the student's tokens."""
    size = len(student.tokens)
    ids, logprobs = np.zeros((size, k), np.int32), np.zeros((size, k), np.float32)
    kind, span_logprobs = np.zeros(size, np.int32), np.zeros(size, np.float32)
    student_trained, teacher_trained = student.trained, teacher.trained
    teacher_trained[self.placed.shape.row_length :] = False  # cut off: the teacher has read one row of a document
    for span in text_alignment.spans(student, teacher, self.texts):
      student_span, teacher_span = (slice(*part) for part in span)
      if not (student_trained[student_span].all() and teacher_trained[teacher_span].all()):
        continue
      first = student_span.start
      if span.is_pair:
        kind[first] = distill_text.PAIR
        shared = same[outputs['ids'][teacher_span.start]] + 1  # [k], 0: the student has no token of this text
        # `np.unique` keeps the first, so the more probable, of two tokens with the same text.
        _, keep = np.unique(shared, return_index=True)
        ids[first, keep] = shared[keep]
        logprobs[first] = outputs['top'][teacher_span.start]
      else:
        kind[student_span] = distill_text.FURTHER
        kind[first] = distill_text.FIRST
        # log p of the text is the sum over the teacher's tokens.
        span_logprobs[first] = outputs['own'][teacher_span].sum(dtype=np.float64)
    return ids, logprobs, kind, span_logprobs


def precompute(config: Config) -> dict[str, Precompute]:
  """Returns the specs of all teachers; `read` gives `TextsOfTeacher` the outputs of their program."""
  k = config.distill.top_k
  specs = {}
  for i in range(len(config.distill.teachers)):
    ids, logprobs, kind, span = distill_text.names(i)
    arrays = {ids: ((k,), np.int32), logprobs: ((k,), np.float32), kind: ((), np.int32), span: ((), np.float32)}
    specs[f'teacher_{i}'] = Precompute(
      arrays, lambda outputs: dict(zip(('ids', 'top', 'own'), outputs)), (k,), texts=TextsOfTeacher
    )
  return specs


def _unread(values: np.ndarray, read: np.ndarray) -> np.ndarray:
  """Returns values of the read tokens as an array of all tokens of a document, 0 at the others."""
  out = np.zeros((len(read), *values.shape[1:]), values.dtype)
  out[read] = values
  return out
