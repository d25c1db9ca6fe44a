"""Rows of known data sets as rows of ours: functions for `config.data.map`.

Each takes a row (dict) and returns one. A row that has a `prompt` or a `text`
already is returned as it is, so that other data can take a recipe's place.
"""

import re

_CALCULATOR = re.compile('<<[^<>]*>>')
_INSTRUCTION = (
  'Solve the problem step by step. End with the answer alone, as a number,'
  " on a line of its own: '#### answer'."
)


def gsm8k(row):
  """GSM8K: question, answer -> prompt and completion as chats, answer.

  The completion lacks the notes for a calculator, <<48/2=24>>, which a model
  that has none must not learn. `answer` is for the reward and stays.
  """
  if 'prompt' in row:
    return row
  completion = _CALCULATOR.sub('', row['answer'])
  asked = f'{row["question"].strip()}\n\n{_INSTRUCTION}'
  return {
    'prompt': [{'role': 'user', 'content': asked}],
    'completion': [{'role': 'assistant', 'content': completion}],
    'answer': row['answer'],
  }


def text(row):
  """prompt and completion, or messages -> text: contents, joined as they are.

  For plain continuation of data that was written as a chat.
  """
  if 'text' in row:
    return row
  parts = (
    [row['messages']]
    if 'messages' in row
    else [row['prompt'], row['completion']])
  return {'text': ''.join(map(_joined, parts))}


def _joined(part):
  if isinstance(part, str):
    return part
  return ''.join(message['content'] for message in part)
