"""Multiple choice by log-prob: the answer whose tokens the model finds most probable after the question.

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
  """A question: its prompt, the texts to be scored after it, and the number of the right one."""

  prompt: str
  answers: tuple[str, ...]
  right: int
  subject: str = ''


def question(row: Mapping[str, Any], where: str, letters: bool) -> Question:
  """Reads a row {'question', 'choices', 'answer': number from 0, letter or text, 'subject'}.

  Args:
    where: names the row in errors.
    letters: the choices are shown with letters, and the letter is the answer; else their texts are.

  Raises:
    InputError: a column is not there, the choices are no list of two or more texts, or the answer is none of them.
  """
  if lacking := [column for column in ('question', 'choices', 'answer') if row.get(column) is None]:
    raise InputError(f'{where}: want question, choices and answer; has no {lacking[0]}')
  asked = str(row['question']).strip()
  choices = row['choices']
  answer = row['answer']
  if not isinstance(choices, (list, tuple)) or len(choices) < 2:
    raise InputError(f'{where}: choices: {shown(choices)}: want a list of two or more texts')
  for n, choice in enumerate(choices):
    refuse(not check_text(choice, f'{where}: choices[{n}]'), f'{where}: choices[{n}]: is empty')
  names = tuple(string.ascii_uppercase[: len(choices)])
  right = _place(answer, choices, names)
  if right is None or len(choices) > len(names):
    raise InputError(f'{where}: answer {answer!r} is none of {len(choices)} choices, by number from 0, letter or text')
  subject = str(row.get('subject') or '')
  if letters:
    lines = '\n'.join(f'{name}. {choice}' for name, choice in zip(names, choices))
    return Question(f'{asked}\n{lines}\nAnswer:', names, right, subject)
  return Question(asked, tuple(choices), right, subject)


def _place(answer: Any, choices: Sequence[str], names: Sequence[str]) -> int | None:
  """Returns the place of an answer that is a text, a letter of `names` or a number; None if it is no choice."""
  if answer in choices:  # a text that looks like a letter is a text
    return choices.index(answer)
  if isinstance(answer, str):
    letter = answer.strip().upper()
    return names.index(letter) if letter in names else None
  is_number = isinstance(answer, int) and not isinstance(answer, bool)
  return answer if is_number and 0 <= answer < len(choices) else None


def measure(weights: Weights, questions: Sequence[Question]) -> dict[str, Any]:
  """Returns accuracies: by the sum of log-probs, and divided by the bytes of the answers."""
  tokenizer = weights.inputs.tokenizer
  examples = [example for q in questions for example in _examples(q, tokenizer)]
  sums = (s.logprobs.sum(dtype=np.float64) for s in scoring.Scorer(weights)(examples, '--suite'))
  plain = []  # of each question, 1.0 where the most probable answer is right
  normed = []
  subjects: dict[str, list[float]] = {}
  for q in questions:
    found = np.array([next(sums) for _ in q.answers])
    sizes = np.array([len(answer.encode()) for answer in q.answers])
    plain.append(float(np.argmax(found) == q.right))
    normed.append(float(np.argmax(found / np.maximum(sizes, 1)) == q.right))
    subjects.setdefault(q.subject, []).append(plain[-1])
  out = {'accuracy': float(np.mean(plain)), 'accuracy_by_bytes': float(np.mean(normed)), 'count': len(questions)}
  return out | {f'accuracy/{name}': float(np.mean(right)) for name, right in sorted(subjects.items()) if name}


def _examples(q: Question, tokenizer: Tokenizer) -> Iterator[Example]:
  """Yields prompt and answer as tokens, those of the answer marked; they are encoded apart."""
  if tokenizer.chat_template:
    text, _ = tokenizer.render_chat([{'role': 'user', 'content': q.prompt}], generation_prompt=True)
    head, space = tokenizer.encode(text), ''
  else:
    head, space = [*tokenizer.bos_ids, *tokenizer.encode(q.prompt)], ' '
  for answer in q.answers:
    tail = tokenizer.encode(space + answer)
    mask = np.arange(len(head) + len(tail)) >= len(head)
    yield Example(np.array(head + tail, np.int32), mask)
