"""Rows of preferences, labels and scores -> Examples with numbered sequences.

T tokens of one document. Two answers to one prompt are two branches of one
document, or (`share_prompt=False`) two segments side by side, each with a
prompt of its own; what a model computes for them is the same. A completion
has the tokens that `chat.make_example` gives it, up to the last trained one.
"""

import dataclasses
import math
import os
import zlib

import numpy as np

from jaxpost.data import chat
from jaxpost.data.examples import Example
from jaxpost.errors import InputError

TRAIN_ON = ('completion', 'last')
_ASKED = '\n\nAssistant:'
_STEP_END = '\n'  # follows each step, as in TRL


@dataclasses.dataclass(frozen=True)
class _Side:
  """One prompt with one answer."""

  tokens: np.ndarray  # [T] int32
  loss: np.ndarray  # [T] float32
  scored: np.ndarray  # [T] bool: the tokens of the sequence
  arrays: dict = dataclasses.field(default_factory=dict)  # name -> [T]


def make_pair_example(tokenizer, row, where, *, train_on='completion', share_prompt=True):
  """A chosen and a rejected answer: sequences 1 and 2.

  Args:
    tokenizer: a `Tokenizer`.
    row: `prompt`, `chosen`, `rejected`, all text or all lists of messages;
      without `prompt`, the messages that both share, or the text up to the
      last shared '\\n\\nAssistant:'. `margin`, or `score_chosen` less
      `score_rejected`, goes to arrays['margin'] of their tokens, else 0.
    where: what to call the row in errors, e.g. 'train.jsonl:12'.
    train_on: 'completion': every turn of the assistant; 'last': the last
      token alone, where a reward model's score is read.
    share_prompt: branches, else segments.
  """
  if train_on not in TRAIN_ON:
    raise InputError(f'train_on={train_on!r} is none of {", ".join(TRAIN_ON)}')
  prompt, chosen, rejected = pair_of(row, where)
  margin = _margin(row, where)
  sides = []
  for name, answer in (('chosen', chosen), ('rejected', rejected)):
    side = _side(tokenizer, prompt, answer, row, f'{where}: {name}')
    if train_on == 'last':
      side = _last_only(side)
    sides.append(_with(side, margin=margin * side.scored))
  return _join(sides, share_prompt)


def make_unpaired_example(tokenizer, row, other_row, where, *, share_prompt=True):
  """A good or bad answer (sequence 1), and one to another prompt (2).

  Sequence 2 is the completion of `other_row` after this row's prompt. It has
  no loss: KTO estimates its KL there (arXiv:2402.01306, section 4.1).
  arrays['label'] is +1 or -1 on the tokens of sequence 1, arrays['kl_mask']
  is 1 on those of sequence 2.

  Args:
    row, other_row: `prompt`, `completion` and `label` (true is good), or
      `messages` that end with the assistant and `label`; `other_row` (see
      `mismatched`) gives its completion only.
    others: as in `make_pair_example`.
  """
  prompt, completion = _answer_of(row, where)
  label = _label(row, where)
  _, other = _answer_of(other_row, f'{where}: the row paired with it')
  if isinstance(other, str) != isinstance(prompt, str):
    raise InputError(
      f'{where}: is text where another row has messages, or the other way'
      ' round; KTO pairs each prompt with the completion of another row'
    )
  own = _side(tokenizer, prompt, completion, row, where)
  kl = _side(tokenizer, prompt, other, row, where)
  own = _with(own, label=(2 * label - 1) * own.scored, kl_mask=0 * own.loss)
  kl = _with(kl, label=0 * kl.loss, kl_mask=1 * kl.scored)
  kl = dataclasses.replace(kl, loss=np.zeros_like(kl.loss))
  return _join([own, kl], share_prompt)


def mismatched(rows, i):
  """The number of a row whose completion answers another prompt than row i's.

  A pure function of the rows and i. Of rows that all ask the same, any other.
  """
  size = len(rows)
  if size < 2:
    raise InputError(f'{rows.name}: KTO pairs each prompt with the completion of another row and there is only one row')
  asked, _ = _answer_of(rows[i], rows.where(i))
  begin = zlib.crc32(b'%d' % i)
  found = None
  for n in range(min(size - 1, 64)):
    j = (i + 1 + (begin + n) % (size - 1)) % size
    if rows[j] is None:  # dropped by the map of a lazily read source
      continue
    found = j
    if _answer_of(rows[j], rows.where(j))[0] != asked:
      break
  if found is None:
    raise InputError(f'{rows.where(i)}: no other row is left to pair it with; map_fn dropped those near it')
  return found


def make_steps_example(tokenizer, row, where):
  """Steps of a solution, each judged: the labels of a process reward model.

  A line break follows each step, as in TRL's stepwise supervision; its last
  token has loss 1 and the step's label in arrays['label']. All tokens of the
  steps are sequence 1.

  Args:
    row: `prompt` (text or messages), `completions` (list of text) and
      `labels` (list of bool or number).
    others: as in `make_pair_example`.
  """
  _needs(row, ('prompt', 'completions', 'labels'), where)
  steps, labels = row['completions'], row['labels']
  for column, found in (('completions', steps), ('labels', labels)):
    if not isinstance(found, (list, tuple)) or not found:
      raise InputError(f'{where}: {column}: must be a list that is not empty')
  if len(steps) != len(labels):
    raise InputError(f'{where}: labels: {len(labels)} labels for {len(steps)} completions')
  head = chat.prompt_tokens(tokenizer, row, where).tolist()
  text = row['prompt'] if isinstance(row['prompt'], str) else ''
  tokens, marks = list(head), {}
  for n, (step, label) in enumerate(zip(steps, labels)):
    at = f'{where}: completions[{n}]'
    if not chat.check_text(step, at).strip():
      raise InputError(f'{at}: is empty')
    for part in (step, _STEP_END):
      tokens += chat.continuation(tokenizer, text, part)
      text += part
    marks[len(tokens) - 1] = number(label, f'{where}: labels[{n}]', True)
  loss, given = (np.zeros(len(tokens), np.float32) for _ in range(2))
  loss[list(marks)] = 1
  given[list(marks)] = list(marks.values())
  scored = np.arange(len(tokens)) >= len(head)
  tokens = np.asarray(tokens, np.int32)
  return _join([_Side(tokens, loss, scored, {'label': given})], False)


def make_scored_example(tokenizer, row, where):
  """An answer with a number, read at its last token: sequence 1.

  Args:
    row: `prompt` and `completion`, or `messages`, and `score`, which goes to
      arrays['label'] of the last token.
    others: as in `make_pair_example`.
  """
  _needs(row, ('score',), where)
  score = number(row['score'], f'{where}: score', True)
  prompt, completion = _answer_of(row, where)
  side = _last_only(_side(tokenizer, prompt, completion, row, where))
  return _join([_with(side, label=score * side.loss)], False)


def pair_of(row, where):
  """(prompt, chosen, rejected) of a row: all text, or all checked messages."""
  _needs(row, ('chosen', 'rejected'), where)
  sides = []
  for name in ('chosen', 'rejected'):
    check = chat.check_text if isinstance(row[name], str) else (chat.check_messages)
    sides.append(check(row[name], f'{where}: {name}'))
  if isinstance(sides[0], str) != isinstance(sides[1], str):
    raise InputError(f'{where}: of chosen and rejected one is text and one a list of messages; both the same')
  if sides[0] == sides[1]:
    raise InputError(f'{where}: rejected: equals chosen, so there is nothing to prefer')
  if 'prompt' in row:
    _needs(row, ('prompt',), where)
    prompt = _prompt(row['prompt'], sides[0], 'chosen', where)
  else:
    prompt, *sides = _shared(*sides, where)
  for name, side in zip(('chosen', 'rejected'), sides):
    _not_empty(side, f'{where}: {name}')
  return prompt, *sides


def number(value, where, truth=False):
  """`value` as a float, if it is a finite number (or, with `truth`, a bool)."""
  fine = isinstance(value, (int, float)) and math.isfinite(value)
  if not fine or isinstance(value, bool) and not truth:
    raise InputError(f'{where}: {value!r} is no number')
  return float(value)


def _shared(chosen, rejected, where):
  """The prompt that two whole conversations share, and what is left of them."""
  if isinstance(chosen, str):
    same = os.path.commonprefix([chosen, rejected])
    cut = same.rfind(_ASKED) + len(_ASKED)
    if cut < len(_ASKED):
      raise InputError(
        f'{where}: needs the column prompt: chosen and rejected are texts'
        f' that share no {_ASKED!r} (rename with columns=, e.g.'
        ' prompt=question)'
      )
    return same[:cut], chosen[cut:], rejected[cut:]
  size = min(len(chosen), len(rejected))
  cut = next((n for n in range(size) if chosen[n] != rejected[n]), size)
  if not cut:
    raise InputError(f'{where}: needs the column prompt: chosen and rejected do not begin with the same message')
  if cut == size:
    short = 'chosen' if len(chosen) == cut else 'rejected'
    raise InputError(f'{where}: {short}: is only the begin of the other conversation')
  return chosen[:cut], chosen[cut:], rejected[cut:]


def _answer_of(row, where):
  """(prompt, completion) of a row with one answer."""
  if row.get('messages') is not None:
    messages = chat.check_messages(row['messages'], f'{where}: messages')
    turns = [n for n, m in enumerate(messages) if m['role'] == 'assistant']
    if not turns or not turns[-1]:
      raise InputError(f'{where}: messages: needs a prompt and then a turn of the assistant')
    prompt, completion = messages[: turns[-1]], messages[turns[-1] :]
  else:
    _needs(row, ('prompt', 'completion'), where)
    completion = row['completion']
    if isinstance(completion, str):
      chat.check_text(completion, f'{where}: completion')
    else:
      completion = chat.check_messages(completion, f'{where}: completion')
    prompt = _prompt(row['prompt'], completion, 'completion', where)
  _not_empty(completion, f'{where}: completion')
  return prompt, completion


def _prompt(prompt, answer, name, where):
  if isinstance(prompt, str) != isinstance(answer, str):
    raise InputError(
      f'{where}: prompt is a {type(prompt).__name__} and {name} a'
      f' {type(answer).__name__}; both text or both lists of messages'
    )
  check = chat.check_text if isinstance(prompt, str) else chat.check_messages
  return check(prompt, f'{where}: prompt')


def _not_empty(answer, where):
  text = (
    answer
    if isinstance(answer, str)
    else ''.join(m['content'] + str(m.get('tool_calls', '')) for m in answer if m['role'] == 'assistant')
  )
  if not text.strip():
    raise InputError(f'{where}: is empty')


def _needs(row, columns, where):
  for column in columns:
    if column not in row:
      raise InputError(
        f'{where}: needs the column {column}; it has'
        f' {", ".join(map(str, row)) or "none"} (rename with columns=, e.g.'
        f' {column}=...)'
      )
    if row[column] is None:
      raise InputError(f'{where}: {column}: is null')


def _label(row, where):
  _needs(row, ('label',), where)
  if row['label'] not in (True, False):
    raise InputError(f'{where}: label: {row["label"]!r} is neither true (good) nor false')
  return bool(row['label'])


def _margin(row, where):
  if row.get('margin') is not None:
    return number(row['margin'], f'{where}: margin')
  scores = [row.get('score_chosen'), row.get('score_rejected')]
  if None in scores:
    return 0.0
  better, worse = (number(score, f'{where}: score_{name}') for score, name in zip(scores, ('chosen', 'rejected')))
  return better - worse


def _side(tokenizer, prompt, answer, row, where):
  """`answer` after `prompt`, as `chat.make_example` renders them."""
  made = chat.make_example(tokenizer, {'prompt': prompt, 'completion': answer, 'tools': row.get('tools')}, where)
  if made.loss_mask[:1].any():
    raise InputError(f'{where}: nothing stands before it; the prompt is empty')
  if not made.trained.any():
    raise InputError(f'{where}: the weights leave nothing of it to train on')
  # What a template writes after the answer is of no use to anyone.
  stop = np.flatnonzero(made.trained)[-1] + 1
  return _Side(made.tokens[:stop], made.loss_mask[:stop].astype(np.float32), made.trained[:stop])


def _last_only(side):
  loss = np.zeros_like(side.loss)
  loss[-1] = 1
  return dataclasses.replace(side, loss=loss)


def _with(side, **arrays):
  made = {k: np.asarray(v, np.float32) for k, v in arrays.items()}
  return dataclasses.replace(side, arrays=made)


def _join(sides, share_prompt):
  """One Example of all sides, numbered from 1."""
  branches = share_prompt and len(sides) > 1
  common = _common(sides) if branches else 0
  # The last shared token is repeated at the head of each branch.
  start = max(common - 1, 0)

  def laid(arrays):
    return np.concatenate([arrays[0][:start], *(a[start:] for a in arrays)])

  sizes = [len(side.tokens) - start for side in sides]
  numbers = np.repeat(np.arange(len(sides) + 1, dtype=np.int32), [start, *sizes])
  scored = laid([side.scored for side in sides])
  return Example(
    tokens=laid([side.tokens for side in sides]),
    loss_mask=laid([side.loss for side in sides]),
    positions=laid([np.arange(len(side.tokens), dtype=np.int32) for side in sides]),
    segment_ids=None if common else numbers,
    branch_ids=numbers * bool(common) if branches else None,
    sequence_ids=np.where(scored, numbers, 0).astype(np.int32),
    arrays={name: laid([side.arrays[name] for side in sides]) for name in sides[0].arrays},
  )


def _common(sides):
  """Tokens that all sides begin with, before the first that is scored."""
  size = min(int(side.scored.argmax()) for side in sides)
  same = np.ones(size, bool)
  for side in sides[1:]:
    same &= side.tokens[:size] == sides[0].tokens[:size]
  return size if same.all() else int(same.argmin())
