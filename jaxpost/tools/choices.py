"""Grades multiple choice by log-probs: the model chooses the answer with the most probable tokens.

Legend: N questions.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpost.data.examples import Example
from jaxpost.data.messages import check_text, shown
from jaxpost.errors import InputError, refuse
from jaxpost.tools import scoring

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.tools.inference import Weights


class Question(NamedTuple):
  """A question: its prompt, the texts to be scored after it, and the index of the right one."""

  prompt: str
  answers: tuple[str, ...]
  right: int
  subject: str = ''


def question(row: Mapping[str, Any], where: str, letters: bool) -> Question:
  """Reads a row {'question', 'choices', 'answer': number from 0, letter or text, 'subject'}.

  Args:
    where: names the row in errors.
    letters: score the letters of choices that the prompt lists; otherwise score the texts of the choices.

  Raises:
    InputError: a column is missing, choices is not a list of two or more texts, or the answer is not among them.
  """
  if missing := [column for column in ('question', 'choices', 'answer') if row.get(column) is None]:
    raise InputError(f'{where}: want question, choices and answer; has no {missing[0]}')
  prompt = str(row['question']).strip()
  choices = row['choices']
  answer = row['answer']
  if not isinstance(choices, (list, tuple)) or len(choices) < 2:
    raise InputError(f'{where}: choices: {shown(choices)}: want a list of two or more texts')
  for i, choice in enumerate(choices):
    refuse(not check_text(choice, f'{where}: choices[{i}]'), f'{where}: choices[{i}]: is empty')
  letter_names = tuple(string.ascii_uppercase[: len(choices)])
  right = _place(answer, choices, letter_names)
  if right is None or len(choices) > len(letter_names):
    raise InputError(f'{where}: answer {answer!r} is none of {len(choices)} choices, by number from 0, letter or text')
  subject = str(row.get('subject') or '')
  if letters:
    lines = '\n'.join(f'{name}. {choice}' for name, choice in zip(letter_names, choices))
    return Question(f'{prompt}\n{lines}\nAnswer:', letter_names, right, subject)
  return Question(prompt, tuple(choices), right, subject)


def _place(answer: Any, choices: Sequence[str], names: Sequence[str]) -> int | None:
  """Returns the index of an answer given as text, letter (one of `names`) or index; None if it is no choice."""
  if answer in choices:  # a choice that looks like a letter is meant as text
    return choices.index(answer)
  if isinstance(answer, str):
    letter = answer.strip().upper()
    return names.index(letter) if letter in names else None
  is_number = isinstance(answer, int) and not isinstance(answer, bool)
  return answer if is_number and 0 <= answer < len(choices) else None


def measure(weights: Weights, questions: Sequence[Question]) -> dict[str, Any]:
  """Returns accuracies by the sum of log-probs, and by that sum per byte of the answer."""
  tokenizer = weights.inputs.tokenizer
  examples = [example for question in questions for example in _examples(question, tokenizer)]
  sums = (text_score.logprobs.sum(dtype=np.float64) for text_score in scoring.Scorer(weights)(examples, '--suite'))
  by_sum = []  # for each question, 1.0 if the most probable answer is right
  by_bytes = []
  subjects: dict[str, list[float]] = {}
  for question in questions:
    answer_sums = np.array([next(sums) for _ in question.answers])
    sizes = np.array([len(answer.encode()) for answer in question.answers])
    by_sum.append(float(np.argmax(answer_sums) == question.right))
    by_bytes.append(float(np.argmax(answer_sums / np.maximum(sizes, 1)) == question.right))
    subjects.setdefault(question.subject, []).append(by_sum[-1])
  out = {'accuracy': float(np.mean(by_sum)), 'accuracy_by_bytes': float(np.mean(by_bytes)), 'count': len(questions)}
  return out | {f'accuracy/{name}': float(np.mean(values)) for name, values in sorted(subjects.items()) if name}


def _examples(q: Question, tokenizer: Tokenizer) -> Iterator[Example]:
  """Yields tokens of the prompt and each answer, encoded separately, with a mask of the answer's tokens."""
  if tokenizer.chat_template:
    text, _ = tokenizer.render_chat([{'role': 'user', 'content': q.prompt}], generation_prompt=True)
    head, space = tokenizer.encode(text), ''
  else:
    head, space = [*tokenizer.bos_ids, *tokenizer.encode(q.prompt)], ' '
  for answer in q.answers:
    tail = tokenizer.encode(space + answer)
    mask = np.arange(len(head) + len(tail)) >= len(head)
    yield Example(np.array(head + tail, np.int32), mask)
