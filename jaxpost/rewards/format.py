"""Rewards for the form of a completion, and its text.

Every reward is `f(prompts, completions, completion_ids, **columns)`, of
which it names what it needs, and returns one number (or None: no verdict)
a completion.
"""

import re


def text_of(completion):
  """The text of a completion: a string, or messages [{'role', 'content'}].

  Of several messages (tool calls before the answer) it is the last one's; of
  content in parts, the text parts.
  """
  if isinstance(completion, str):
    return completion
  content = completion[-1]['content'] if completion else ''
  if content is None:
    return ''
  if isinstance(content, str):
    return content
  return ''.join(part.get('text', '') for part in content)


def think_format(completions, **columns):
  """1 for '<think>reasoning</think>answer', one <think> only, else 0."""
  del columns
  return [float(_thinks(text_of(c))) for c in completions]


def _thinks(text):
  head, rest = text[: len('<think>')], text[len('<think>') :]
  return head == '<think>' and '<think>' not in rest and '</think>' in rest


def regex_match(completions, pattern, **columns):
  """1 where the column `pattern` is found in the completion, else 0."""
  del columns
  return [
      float(re.search(p, text_of(c)) is not None)
      for c, p in zip(completions, pattern, strict=True)
  ]
