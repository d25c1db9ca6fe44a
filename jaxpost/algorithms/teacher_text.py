"""Log-probs of a teacher with another tokenizer, aligned with the tokens of the student (`distill.align=text`).

`TextsOfTeacher` reads stored documents before the first step, and `TextTeacher` the samples of each step. Both compare
the spans of `data.text_alignment`.

Legend: T tokens of a document, S read tokens of all documents, k most probable tokens, N sequences, C completion tokens
of the student, C' of the teacher. A token is read if a loss or a metric needs its log-prob (`Example.read`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.algorithms import distill_text, teachers
from jaxpost.algorithms.base import Config, Precompute
from jaxpost.data import chat, prompts, text_alignment
from jaxpost.data.examples import Example
from jaxpost.roles import Frozen
from jaxpost.types import Prompt, Rollout

if TYPE_CHECKING:
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
    tokenizer = text_alignment.reader(self.tokenizer, inputs.tokenizer, inputs.config.data.template_kwargs)
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
    outputs = read(self.theirs, fields, run, shape.rows, row_length=shape.row_length)
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


@dataclasses.dataclass
class TextTeacher(Frozen):
  """A teacher of opd that reads the samples of the student in its own tokens.

  Attributes:
    tokenizer: the teacher's, and student_tokenizer: the student's.
    room: the most tokens of a prompt with its completion.
  """

  tokenizer: Tokenizer
  student_tokenizer: Tokenizer
  room: int

  @functools.cached_property
  def texts(self) -> tuple[text_alignment.Bytes, text_alignment.Bytes]:
    """The texts of the tokens of student and teacher."""
    return text_alignment.Bytes.of(self.student_tokenizer), text_alignment.Bytes.of(self.tokenizer)

  @functools.cached_property
  def turn_end(self) -> int:
    """The token with which the teacher's chat template ends a turn of the assistant."""
    chat_text, _ = self.tokenizer.render_chat([dict(role=role, content='a') for role in ('user', 'assistant')])
    ids = reversed(self.tokenizer.encode(chat_text))
    return next((i for i in ids if i in self.tokenizer.stop_ids), self.tokenizer.eos_id)

  def prompt(self, prompt: Prompt) -> Prompt:
    """Returns a prompt in the teacher's tokens, cut to the room that there is."""
    where = f'config.distill.teachers: prompt {prompt.index}'
    tokens = prompts.encode_prompt(self.tokenizer, prompt.prompt, prompt.columns, where)
    return prompt.replace(tokens=tokens[: self.room])

  def reading(self, rollout: Rollout) -> Rollout:
    """Returns a rollout in the teacher's tokens; completions are cut where there is no room beside the prompt."""
    size = rollout.group_size
    own_prompts = tuple(map(self.prompt, rollout.prompts))
    tokens = []  # of each completion
    for n, (ids, length) in enumerate(zip(rollout.completions.tolist(), rollout.lengths.tolist())):
      prompt = own_prompts[n // size]
      tokens.append(self._completion(prompt, ids[:length])[: self.room - len(prompt.tokens)])
    lengths = np.array([len(ids) for ids in tokens], np.int32)
    completions = np.zeros((len(tokens), int(np.max(lengths, initial=1))), np.int32)
    for row, ids in zip(completions, tokens):
      row[: len(ids)] = ids
    logprobs = np.zeros(completions.shape, np.float32)  # the teacher has not sampled them
    return Rollout(own_prompts, completions, lengths, logprobs, logprobs, finished=rollout.finished)

  def _completion(self, prompt: Prompt, ids: list[int]) -> list[int]:
    """Returns the teacher's tokens of a completion: those of its text and, if it has one, of its end.

    Nothing is read from the first special token of either model on, which the other one would not see: if text followed
    that is more likely without it, the special token would be rewarded.
    """
    read, stops = self.texts[0].readable(ids)
    # `Tokenizer.decode` may hide a token that is text to the model, such as <think>, and a space at the beginning.
    text = b''.join(self.texts[0].pieces(read)).decode(errors='replace')
    prompt_text = self.tokenizer.decode(prompt.tokens, skip_special=False) if self.tokenizer.adds_space else ''
    end = self.tokenizer.eos_id if isinstance(prompt.prompt, str) else self.turn_end
    tokens = chat.continuation(self.tokenizer, prompt_text, text)
    own_read, _ = self.texts[1].readable(tokens)
    return own_read + [end] if stops and len(own_read) == len(tokens) else own_read

  def align(
    self, rollout: Rollout, reading: Rollout, logprobs: np.ndarray, old_logprobs: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (log-probs of the teacher at the student's tokens [N, C], 1 where there is one and 0 elsewhere [N, C]).

    The log-ratio of teacher and student is that of the text of a span, and its tokens share it equally: over a span,
    the differences to `old_logprobs` sum to log T(text) - log pi(text). A token in no span has the student's log-prob,
    so that its difference is 0.

    Args:
      reading: what `self.reading` returned for the rollout, and logprobs: [N, C'] of its tokens.
      old_logprobs: [N, C] of the student.
    """
    out, aligned = np.array(old_logprobs, np.float64), np.zeros(old_logprobs.shape, np.float32)
    for n, (ids, length, their_length) in enumerate(zip(rollout.completions, rollout.lengths, reading.lengths)):
      read, stops = self.texts[0].readable(ids[:length].tolist())
      mine = Example(ids[: len(read) + stops], np.ones(len(read) + stops, bool))
      theirs = Example(reading.completions[n, :their_length], np.ones(their_length, bool))
      spans = np.array([*text_alignment.spans(mine, theirs, self.texts)]).reshape(-1, 2, 2)  # side, start or stop
      if not len(spans):
        continue
      sizes = spans[:, 0, 1] - spans[:, 0, 0]
      ratios = _sums(logprobs[n], spans[:, 1]) - _sums(out[n], spans[:, 0])
      tokens = slice(spans[0, 0, 0], spans[-1, 0, 1])
      out[n, tokens] += np.repeat(ratios / sizes, sizes)
      aligned[n, tokens] = 1
    return out.astype(np.float32), aligned


def make_text_teacher(role: Frozen, placed: Any, tokenizer: Tokenizer, limit: int) -> TextTeacher:
  """Makes a teacher of opd from its role; InputError if its chat template refuses one of the first prompts.

  Args:
    placed: the stage, a `stage.place.PlacedStage`.
    tokenizer: the teacher's, as it is stored with its weights.
    limit: the most prompts that are checked.
  """
  config, own = placed.config, placed.inputs.tokenizer
  tokenizer = text_alignment.reader(tokenizer, own, config.data.template_kwargs)
  room = config.rollout.max_prompt_length + config.rollout.max_new_tokens
  teacher = TextTeacher(**vars(role), tokenizer=tokenizer, student_tokenizer=own, room=room)
  if not (config.data.streaming or config.train_on_rollouts):
    for prompt in map(placed.data.stream.prompt, range(min(len(placed.data.stream), limit))):
      teacher.prompt(teachers.teacher_prompt(prompt, config, own) if config.rl.privileged else prompt)
  return teacher


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


def _sums(values: np.ndarray, ranges: np.ndarray) -> np.ndarray:
  """Returns the sums of values in half-open ranges [n, 2], each of which begins where the one before ends."""
  return np.add.reduceat(values[: ranges[-1, 1]].astype(np.float64), ranges[:, 0])
