"""Maps rows to TRL's columns: by `config.data.columns`, and by functions for `config.data.map`.

Each function takes a row (dict) and returns one, or None to drop it. A row that already has a `prompt` or a `text` is
returned as it is, so that a recipe also works with other data.
"""

import re
from collections.abc import Callable
from typing import Any

from jaxpost import imports
from jaxpost.data import messages
from jaxpost.errors import InputError, did_you_mean, type_of

Row = dict[str, Any]

_ROLES = {
  'system': 'system',
  **dict.fromkeys(('human', 'user'), 'user'),
  **dict.fromkeys(('gpt', 'assistant', 'chatgpt', 'model'), 'assistant'),
  **dict.fromkeys(('tool', 'observation', 'function_response'), 'tool'),
  'function_call': 'assistant',
}
_CALCULATOR = re.compile('<<[^<>]*>>')
_INSTRUCTION = (
  "Solve the problem step by step. End with the answer alone, as a number, on a line of its own: '#### answer'."
)
_BOXED = 'Solve the problem step by step. End with the answer alone in \\boxed{}.'
# Errors of a user's function that are reported with the row.
_ERRORS_OF_MAP = (
  ArithmeticError,
  AssertionError,
  AttributeError,
  LookupError,
  NameError,
  RuntimeError,
  TypeError,
  ValueError,
)


def rename(columns: str) -> Callable[[Row, str], Row]:
  """Returns a function of (row, place of the row) that renames columns by 'target=source,...' and keeps the others."""
  renames: dict[str, str] = {}  # target: source
  for part in filter(None, (p.strip() for p in columns.split(','))):
    target, equals, source = (p.strip() for p in part.partition('='))
    if not (target and equals and source):
      raise InputError(f'columns: {part!r} must be target=source, e.g. prompt=question')
    if target in renames:
      raise InputError(f'columns: {target!r} is given twice')
    renames[target] = source

  def renamed(row: Row, where: str) -> Row:
    for source in renames.values():
      if source not in row:
        near = did_you_mean(source, [str(column) for column in row])
        raise InputError(f'{where}: no column {source!r}; {near}it has {messages.columns_of(row)}')
    kept = {k: v for k, v in row.items() if k not in renames.values()}
    return kept | {target: row[source] for target, source in renames.items()}

  return renamed


def load(map_fn: Callable[[Row], Row | None] | str) -> Callable[[Row, str], Row | None]:
  """Returns a function of (row, place of the row) that calls `map_fn`, a function or its import path.

  Its errors are InputErrors that name the row.
  """
  function = imports.load_callable(map_fn, 'map_fn')

  def mapped(row: Row, where: str) -> Row | None:
    try:
      new_row = function(dict(row))
    except InputError as error:
      raise InputError(f'{where}: {error}') from error
    except _ERRORS_OF_MAP as error:
      message = ' '.join(str(error).split())
      raise InputError(
        f'{where}: map_fn raised {type(error).__name__}: {message:.200}; the row has {messages.columns_of(row)}'
      ) from error
    if new_row is not None and not isinstance(new_row, dict):
      raise InputError(f'{where}: map_fn returned {type_of(new_row)}, must return a row (dict) or None to drop it')
    return new_row

  return mapped


def gsm8k(row: Row) -> Row:
  """Maps GSM8K: question, answer -> prompt and completion as chats, answer.

  The completion lacks the calculator annotations, <<48/2=24>>. `answer` is kept for the reward.
  """
  if 'prompt' in row:
    return row
  completion = _CALCULATOR.sub('', row['answer'])
  question = f'{row["question"].strip()}\n\n{_INSTRUCTION}'
  return {
    'prompt': [{'role': 'user', 'content': question}],
    'completion': [{'role': 'assistant', 'content': completion}],
    'answer': row['answer'],
  }


def math(row: Row) -> Row | None:
  """Maps MATH: problem, answer (and solution) -> prompt (and completion) as chats, answer; drops rows without one."""
  if 'prompt' in row:
    return row
  if row['answer'] is None or not row['answer'].strip():
    return None
  question = f'{row["problem"].strip()}\n\n{_BOXED}'
  out = {'prompt': [{'role': 'user', 'content': question}]}
  if row.get('solution') not in (None, ''):
    out['completion'] = [{'role': 'assistant', 'content': messages.check_text(row['solution'], 'solution')}]
  return {**out, 'answer': row['answer']}


def as_chat(row: Row) -> Row:
  """Turns a prompt that is text into a chat of one user message."""
  if not isinstance(row.get('prompt'), str):
    return row
  return {**row, 'prompt': [{'role': 'user', 'content': row['prompt']}]}


def hh_rlhf(row: Row) -> Row | None:
  """Maps Anthropic's hh-rlhf: chosen and rejected as texts -> as chats; drops pairs with an empty answer.

  The messages that both share become the prompt when the pair is rendered.
  """
  if 'prompt' in row:
    return row
  sides = {n: _dialogue(row[n], n) for n in ('chosen', 'rejected')}
  if not all(turns[-1]['content'] for turns in sides.values()):
    return None
  return {**row, **sides}


def ultrafeedback(row: Row) -> Row:
  """Maps UltraFeedback (binarized): prompt, chosen, rejected -> chats.

  In the data, chosen and rejected are whole conversations, or texts, and prompt is the text of their first turn.
  `score_chosen` and `score_rejected` are kept for a margin.
  """
  prompt = as_chat(row)['prompt']
  sides = {}
  for name in 'chosen', 'rejected':
    side = row[name]
    if isinstance(side, str):
      side = [{'role': 'assistant', 'content': side}]
    elif messages.check_messages(side, name)[0]['role'] != 'assistant':
      if [m['content'] for m in side[: len(prompt)]] != [m['content'] for m in prompt]:
        raise ValueError(f'{name} does not begin with the prompt')
      side = side[len(prompt) :]
    sides[name] = side
  return {**row, 'prompt': prompt, **sides}


def _dialogue(text: str, name: str) -> list[dict[str, str]]:
  """Splits '\\n\\nHuman: a\\n\\nAssistant: b' into messages; consecutive turns of one role become one message."""
  _, *parts = re.split(r'(?:\A|\n\n)(Human|Assistant):', text)
  if not parts or parts[0] != 'Human':
    raise ValueError(f"{name} does not begin with '\\n\\nHuman:'")
  turns: list[dict[str, str]] = []
  for speaker, content in zip(parts[::2], parts[1::2]):
    role = 'user' if speaker == 'Human' else 'assistant'
    if turns and turns[-1]['role'] == role:
      turns[-1]['content'] += f'\n\n{content.strip()}'
    else:
      turns.append({'role': role, 'content': content.strip()})
  if turns[-1]['role'] != 'assistant':
    raise ValueError(f'{name} does not end with a turn of the assistant')
  return turns


def text(row: Row) -> Row:
  """Maps prompt and completion, or messages, to `text`: their contents, joined without separators."""
  if 'text' in row:
    return row
  parts = [row['messages']] if 'messages' in row else [row['prompt'], row['completion']]
  texts = [part if isinstance(part, str) else ''.join(message['content'] for message in part) for part in parts]
  return {'text': ''.join(texts)}


def sharegpt(row: Row, where: str = 'the row') -> Row:
  """Maps conversations (from, value) to messages or, if chosen and rejected are one turn each, to chats of a pair.

  `sources` applies it without being asked. Pairs of this form are LLaMA-Factory's.
  """
  if 'conversations' not in row:
    return row
  if not isinstance(row['conversations'], list):
    raise InputError(f'{where}: conversations: must be a list of turns')
  turns = [_turn(turn, f'{where}: conversations[{n}]') for n, turn in enumerate(row['conversations'])]
  if row.get('system') not in (None, ''):
    system = messages.check_text(row['system'], f'{where}: system')
    turns = [{'role': 'system', 'content': system}, *turns]
  kept = {k: v for k, v in row.items() if k not in ('conversations', 'system')}
  if isinstance(row.get('chosen'), dict):
    for side in ('chosen', 'rejected'):
      kept[side] = [_turn(row.get(side), f'{where}: {side}')]
    return {**kept, 'prompt': turns}
  return {**kept, 'messages': turns}


def _turn(turn: Any, where: str) -> dict[str, Any]:
  if not isinstance(turn, dict) or not {'from', 'value'} <= set(turn):
    raise InputError(f'{where}: must be an object with from and value')
  role = turn['from']
  if not isinstance(role, str) or role not in _ROLES:
    raise InputError(f'{where}.from: {messages.shown(role)} is none of {", ".join(_ROLES)}')
  message = {'role': _ROLES[role], 'content': messages.check_text(turn['value'], f'{where}.value')}
  if role != 'function_call':
    return message
  call = messages.parse_json(turn['value'], f'{where}.value')
  calls = call if isinstance(call, list) else [call]
  if not all(isinstance(c, dict) and 'name' in c for c in calls):
    raise InputError(f'{where}.value: a function call needs a name')
  return {'role': 'assistant', 'content': '', 'tool_calls': [{'type': 'function', 'function': c} for c in calls]}


def alpaca(row: Row, where: str = 'the row') -> Row:
  """Maps instruction, input, output (and system, and history: earlier turns) to prompt and completion as chats.

  `sources` applies it without being asked.
  """
  if 'prompt' in row:
    return row
  for column in ('instruction', 'input', 'output', 'system'):
    if not isinstance(row.get(column, ''), (str, type(None))):
      raise InputError(f'{where}: {column}: is {type_of(row[column])}, must be a string')
  if not row['instruction'] or row['output'] is None:
    empty = 'output' if row['instruction'] else 'instruction'
    raise InputError(f'{where}: {empty}: is empty')
  history = row.get('history') or []
  if not isinstance(history, list) or not all(isinstance(p, list) and [*map(type, p)] == [str, str] for p in history):
    raise InputError(f'{where}: history: must be a list of pairs of texts, [question, answer]')
  question = row['instruction']
  if row.get('input'):
    question += '\n\n' + row['input']
  prompt = [{'role': 'system', 'content': row['system']}] if row.get('system') else []
  for earlier_question, answer in history:
    prompt += [{'role': 'user', 'content': earlier_question}, {'role': 'assistant', 'content': answer}]
  prompt.append({'role': 'user', 'content': question})
  used = ('instruction', 'input', 'output', 'system', 'history')
  return {
    **{k: v for k, v in row.items() if k not in used},
    'prompt': prompt,
    'completion': [{'role': 'assistant', 'content': row['output']}],
  }
