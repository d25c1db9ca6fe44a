"""Encodes rows of preferences, labels and scores as Examples with numbered sequences.

Legend: T tokens of one document. `where` names a row in errors, e.g. 'train.jsonl:12'.

Two answers to one prompt are two branches of one document or, with `share_prompt=False`, two segments that each repeat
the prompt. A model computes the same for both forms. A completion has the tokens that `chat.make_example` gives it, up
to the last trained one.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.data import chat
from jaxpost.data import messages as messages_lib
from jaxpost.data import prompts as prompts_lib
from jaxpost.data.examples import Example
from jaxpost.data.messages import Message, Row
from jaxpost.errors import InputError, type_of

if TYPE_CHECKING:
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer

  Answer = str | list[Message]

TRAIN_ON = ('completion', 'last')
_PROMPT_END = '\n\nAssistant:'  # ends the prompt of a conversation that is one text (hh-rlhf)
_STEP_END = '\n'  # follows each step, as in TRL


@dataclasses.dataclass(frozen=True)
class _Side:
  """A prompt with one answer, which becomes one sequence of an Example."""

  tokens: np.ndarray  # [T] int32
  loss: np.ndarray  # [T] float32
  scored: np.ndarray  # [T] bool: the tokens of the sequence
  arrays: dict = dataclasses.field(default_factory=dict)  # name -> [T]


def make_pair_example(
  tokenizer: Tokenizer, row: Row, where: str, *, train_on: str = 'completion', share_prompt: bool = True
) -> Example:
  """Encodes a chosen and a rejected answer: sequences 1 and 2.

  arrays['margin'] has the row's `margin`, or `score_chosen` - `score_rejected`, or 0, on the tokens of both sequences.

  Args:
    tokenizer: renders and encodes.
    row: `prompt`, `chosen` and `rejected`, all text or all lists of messages. Without `prompt`, it is the messages that
      both share, or the shared text up to the last '\\n\\nAssistant:'.
    where: names the row in errors.
    train_on: 'completion': every assistant turn; 'last': only the last token, where a reward model's score is read.
    share_prompt: True for two branches of one document, False for two segments.
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


def make_unpaired_example(
  tokenizer: Tokenizer, row: Row, other_row: Row, where: str, *, share_prompt: bool = True
) -> Example:
  """Encodes a good or bad answer (sequence 1), and an answer to another prompt (sequence 2), for KTO.

  Sequence 2 is the completion of `other_row` after this row's prompt. It has no loss, and KTO estimates the KL on it
  (arXiv:2402.01306, section 4.1). arrays['label'] is +1 or -1 on the tokens of sequence 1, arrays['kl_mask'] is 1 on
  those of sequence 2.

  Args:
    row: `label` (true for good), and `prompt` and `completion`, or `messages` that end with an assistant turn.
    other_row: a row of this kind with another prompt, see `mismatched`; only its completion is used.
    tokenizer, where: see `make_pair_example`.
  """
  prompt, completion = _answer_of(row, where)
  label = _label(row, where)
  _, other = _answer_of(other_row, f'{where}: the row paired with it')
  if isinstance(other, str) != isinstance(prompt, str):
    raise InputError(
      f'{where}: is text where another row has messages, or the other way round; KTO pairs each prompt with the '
      'completion of another row, so make them all the same'
    )
  answer = _side(tokenizer, prompt, completion, row, where)
  kl = _side(tokenizer, prompt, other, row, where)
  answer = _with(answer, label=(2 * label - 1) * answer.scored, kl_mask=0 * answer.loss)
  kl = _with(kl, label=0 * kl.loss, kl_mask=1 * kl.scored)
  kl = dataclasses.replace(kl, loss=np.zeros_like(kl.loss))
  return _join([answer, kl], share_prompt)


def mismatched(rows: Rows, i: int) -> int:
  """Returns the number of a row with another prompt than row i, or of any other row if none is found nearby.

  It is a pure function of the rows and i.
  """
  size = len(rows)
  if size < 2:
    raise InputError(f'{rows.name}: KTO pairs each prompt with the completion of another row and there is only one row')
  prompt, _ = _answer_of(rows[i], rows.where(i))
  begin = zlib.crc32(b'%d' % i)
  partner = None
  # The search is bounded, as all rows of a data set may have the same prompt.
  for n in range(min(size - 1, 64)):
    j = (i + 1 + (begin + n) % (size - 1)) % size
    if rows[j] is None:  # dropped by the map of a lazily read source
      continue
    partner = j
    if _answer_of(rows[j], rows.where(j))[0] != prompt:
      break
  if partner is None:
    raise InputError(f'{rows.where(i)}: no other row is left to pair it with; map_fn dropped those near it')
  return partner


def make_steps_example(tokenizer: Tokenizer, row: Row, where: str) -> Example:
  """Encodes the steps of a solution with a label each, for a process reward model.

  A line break follows each step, as in TRL's stepwise supervision. Its last token has loss 1, and the step's label in
  arrays['label']. All tokens of the steps are sequence 1.

  Args:
    row: `prompt` (text or messages), `completions` (list of texts), and `labels` (bools, or numbers from 0 to 1).
    tokenizer, where: see `make_pair_example`.
  """
  _needs(row, ('prompt', 'completions', 'labels'), where)
  steps, labels = row['completions'], row['labels']
  for column, values in (('completions', steps), ('labels', labels)):
    if not isinstance(values, (list, tuple)) or not values:
      raise InputError(f'{where}: {column}: must be a list that is not empty')
  if len(steps) != len(labels):
    raise InputError(f'{where}: labels: {len(labels)} labels for {len(steps)} completions')
  prompt_ids = prompts_lib.prompt_tokens(tokenizer, row, where).tolist()
  text = row['prompt'] if isinstance(row['prompt'], str) else ''
  tokens = list(prompt_ids)
  label_at = {}  # position of each step's last token -> its label
  for n, (step, label) in enumerate(zip(steps, labels)):
    at = f'{where}: completions[{n}]'
    if not messages_lib.check_text(step, at).strip():
      raise InputError(f'{at}: is empty')
    for part in (step, _STEP_END):
      tokens += chat.continuation(tokenizer, text, part)
      text += part
    at = f'{where}: labels[{n}]'
    value = messages_lib.number(label, at, allow_bool=True)
    if not 0 <= value <= 1:  # the cross entropy would have no minimum
      raise InputError(f'{at}: {value:g} is not from 0 to 1 (wrong to right); change it in config.data.map')
    label_at[len(tokens) - 1] = value
  loss = np.zeros(len(tokens), np.float32)
  loss[list(label_at)] = 1
  token_labels = np.zeros(len(tokens), np.float32)
  token_labels[list(label_at)] = list(label_at.values())
  scored = np.arange(len(tokens)) >= len(prompt_ids)
  return _join([_Side(np.asarray(tokens, np.int32), loss, scored, {'label': token_labels})], False)


def make_scored_example(tokenizer: Tokenizer, row: Row, where: str) -> Example:
  """Encodes an answer (sequence 1) with its score in arrays['label'] of the last token, the only one with a loss.

  Args:
    row: `score`, and `prompt` and `completion`, or `messages`.
    tokenizer, where: see `make_pair_example`.
  """
  _needs(row, ('score',), where)
  score = messages_lib.number(row['score'], f'{where}: score', allow_bool=True)
  prompt, completion = _answer_of(row, where)
  side = _last_only(_side(tokenizer, prompt, completion, row, where))
  return _join([_with(side, label=score * side.loss)], False)


def pair_of(row: Row, where: str) -> tuple[Answer, Answer, Answer]:
  """Returns (prompt, chosen, rejected) of a row: all text, or all checked messages."""
  _needs(row, ('chosen', 'rejected'), where)
  chosen = _checked(row['chosen'], f'{where}: chosen')
  rejected = _checked(row['rejected'], f'{where}: rejected')
  if isinstance(chosen, str) != isinstance(rejected, str):
    raise InputError(
      f'{where}: of chosen and rejected, one is text and one is a list of messages; make both text or both messages'
    )
  if chosen == rejected:
    raise InputError(f'{where}: rejected: equals chosen, so there is nothing to prefer')
  if 'prompt' in row:
    _needs(row, ('prompt',), where)
    prompt = _prompt(row['prompt'], chosen, 'chosen', where)
  else:
    prompt, chosen, rejected = _shared(chosen, rejected, where)
  _not_empty(chosen, f'{where}: chosen')
  _not_empty(rejected, f'{where}: rejected')
  return prompt, chosen, rejected


def _shared(chosen: Answer, rejected: Answer, where: str) -> tuple[Answer, Answer, Answer]:
  """Splits two whole conversations into (shared prompt, chosen, rejected)."""
  if isinstance(chosen, str) and isinstance(rejected, str):
    cut = chosen.rfind(_PROMPT_END, 0, chat.common_length(chosen, rejected)) + len(_PROMPT_END)
    if cut < len(_PROMPT_END):
      raise InputError(
        f'{where}: needs the column prompt: chosen and rejected are texts that share no {_PROMPT_END!r}'
        ' (rename with config.data.columns, e.g. prompt=question)'
      )
    return chosen[:cut], chosen[cut:], rejected[cut:]
  size = min(len(chosen), len(rejected))
  cut = next((n for n in range(size) if chosen[n] != rejected[n]), size)
  if not cut:
    raise InputError(f'{where}: needs the column prompt: chosen and rejected do not begin with the same message')
  if cut == size:
    short = 'chosen' if len(chosen) == cut else 'rejected'
    raise InputError(f'{where}: {short}: is only the start of the other conversation')
  return chosen[:cut], chosen[cut:], rejected[cut:]


def _answer_of(row: Row, where: str) -> tuple[Answer, Answer]:
  """Returns (prompt, completion) of a row with one answer."""
  if row.get('messages') is not None:
    messages = messages_lib.check_messages(row['messages'], f'{where}: messages')
    turns = [n for n, m in enumerate(messages) if m['role'] == 'assistant']
    if not turns or not turns[-1]:
      raise InputError(f'{where}: messages: needs a prompt and then a turn of the assistant')
    prompt: Answer = messages[: turns[-1]]
    completion: Answer = messages[turns[-1] :]
  else:
    _needs(row, ('prompt', 'completion'), where)
    completion = _checked(row['completion'], f'{where}: completion')
    prompt = _prompt(row['prompt'], completion, 'completion', where)
  _not_empty(completion, f'{where}: completion')
  return prompt, completion


def _prompt(prompt: Any, answer: Answer, name: str, where: str) -> Answer:
  if isinstance(prompt, str) != isinstance(answer, str):
    has_prompt = not isinstance(answer, str) and prompt == answer[0]['content']
    hint = f'; {name} has the prompt, so rename it: config.data.columns=asked=prompt' if has_prompt else ''
    raise InputError(
      f'{where}: prompt is {type_of(prompt)} and {name} {type_of(answer)}; both text or both lists of messages{hint}'
    )
  return _checked(prompt, f'{where}: prompt')


def _checked(answer: Any, where: str) -> Answer:
  """Returns a text, or the messages of a chat; InputError for anything else."""
  check = messages_lib.check_text if isinstance(answer, str) else messages_lib.check_messages
  return check(answer, where)


def _not_empty(answer: Answer, where: str) -> None:
  if not isinstance(answer, str):
    answer = ''.join(m['content'] + str(m.get('tool_calls', '')) for m in answer if m['role'] == 'assistant')
  if not answer.strip():
    raise InputError(f'{where}: is empty')


def _needs(row: Row, columns: Sequence[str], where: str) -> None:
  if missing := [column for column in columns if column not in row]:
    raise InputError(
      f'{where}: needs the {"columns" if missing[1:] else "column"} {" and ".join(missing)}; it has '
      f'{messages_lib.columns_of(row)} (rename with config.data.columns, {"=...,".join(missing)}=...)'
    )
  for column in columns:
    if row[column] is None:
      raise InputError(f'{where}: {column}: is null')


def _label(row: Row, where: str) -> bool:
  _needs(row, ('label',), where)
  if row['label'] not in (True, False):
    raise InputError(f'{where}: label: {messages_lib.shown(row["label"])} is neither true (good) nor false')
  return bool(row['label'])


def _margin(row: Row, where: str) -> float:
  if row.get('margin') is not None:
    return messages_lib.number(row['margin'], f'{where}: margin')
  names = [name for name in ('score_chosen', 'score_rejected') if row.get(name) is not None]
  scores = [messages_lib.number(row[name], f'{where}: {name}') for name in names]
  return scores[0] - scores[1] if len(scores) == 2 else 0.0


def _side(tokenizer: Tokenizer, prompt: Answer, answer: Answer, row: Row, where: str) -> _Side:
  """Encodes `answer` after `prompt` with `chat.make_example`."""
  template_inputs = {name: row.get(name) for name in ('tools', 'chat_template_kwargs')}
  example = chat.make_example(tokenizer, {'prompt': prompt, 'completion': answer, **template_inputs}, where)
  if example.loss_mask[:1].any():
    raise InputError(f'{where}: has no prompt before it; the prompt is empty')
  if not example.trained.any():
    raise InputError(f'{where}: has no token to train on, as its weights are 0')
  if not np.isin(example.loss_mask, (0, 1)).all():
    raise InputError(
      f'{where}: a message has a weight other than 0 and 1; answers are judged whole, so leave the turn out (0) or '
      'remove the weight'
    )
  # Leave out tokens that a template writes after the answer.
  stop = np.flatnonzero(example.trained)[-1] + 1
  return _Side(example.tokens[:stop], example.loss_mask[:stop].astype(np.float32), example.trained[:stop])


def _last_only(side: _Side) -> _Side:
  """Returns the side with the loss on its last token alone."""
  loss = np.zeros_like(side.loss)
  loss[-1] = 1
  return dataclasses.replace(side, loss=loss)


def _with(side: _Side, **arrays) -> _Side:
  """Returns the side with these arrays [T]."""
  return dataclasses.replace(side, arrays={name: np.asarray(array, np.float32) for name, array in arrays.items()})


def _join(sides: list[_Side], share_prompt: bool) -> Example:
  """Makes one Example of all sides, whose sequences are numbered from 1."""
  branches = share_prompt and len(sides) > 1
  common = _common(sides) if branches else 0
  # The last shared token is repeated at the head of each branch.
  start = max(common - 1, 0)

  def joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([arrays[0][:start], *(a[start:] for a in arrays)])

  sizes = [len(side.tokens) - start for side in sides]
  numbers = np.repeat(np.arange(len(sides) + 1, dtype=np.int32), [start, *sizes])
  scored = joined([side.scored for side in sides])
  branch_ids = numbers if common else np.zeros_like(numbers)
  return Example(
    tokens=joined([side.tokens for side in sides]),
    loss_mask=joined([side.loss for side in sides]),
    positions=joined([np.arange(len(side.tokens), dtype=np.int32) for side in sides]),
    segment_ids=None if common else numbers,
    branch_ids=branch_ids if branches else None,
    sequence_ids=np.where(scored, numbers, 0).astype(np.int32),
    arrays={name: joined([side.arrays[name] for side in sides]) for name in sides[0].arrays},
  )


def _common(sides: list[_Side]) -> int:
  """Returns the number of tokens that all sides begin with, before the first that is scored."""
  size = min(int(np.argmax(side.scored)) for side in sides)
  same = np.ones(size, bool)
  for side in sides[1:]:
    same &= side.tokens[:size] == sides[0].tokens[:size]
  return size if same.all() else int(np.argmin(same))
