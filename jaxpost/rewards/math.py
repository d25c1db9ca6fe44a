"""Rewards for answers that are a text or a number, in the column `answer`.

1.0 right, 0.0 wrong, None where the row's own answer cannot be read, which
says nothing about the completion. Numbers are compared exactly: 0.5 = 1/2 =
\\frac{1}{2} = .50; $, % and thousands commas do not count.
"""

import dataclasses
import fractions
import logging
import re

from jaxpost.errors import InputError
from jaxpost.rewards.format import text_of

# A minus after a letter, digit or bracket is an operator: 10-5 ends in 5.
_SIGN = r'(?:(?<![\w)\]}])[-+])?'
_INT = r'(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)'
_NUMBER = re.compile(
  rf'(?P<sign>{_SIGN})(?:\$(?P<minus>-?))?(?:'
  rf'(?:(?P<whole>{_INT})\ )?(?P<top>{_INT})/(?P<bottom>\d*[1-9]\d*)(?!\d)'
  rf'|(?P<decimal>{_INT}(?:\.\d+)?|(?<!\d)\.\d+)'
  r'(?P<exponent>[eE][-+]?\d{1,3}(?![\d.]))?)'
)
_LATEX = (
  (re.compile(r'(?<=\d)\s*(?=\\[dt]?frac)'), ' '),  # 3\frac{1}{2} is 3.5
  (re.compile(r'\\[dt]?frac\s*\{(-?[\d,]+)\}\s*\{([\d,]+)\}'), r'\1/\2 '),
  (re.compile(r'(?<=\d)(?:\{,\}|\\!,|,\\!|\\,)(?=\d)'), ','),
  (re.compile(r'\\([$%])'), r'\1'),
  (re.compile('[\u2212\u2013]'), '-'),
)
_MARKED = re.compile(r'####\s*(?=[-+$.]*\d)')
_LONG = 200  # digits; what is longer is compared as text, not computed


def exact_match(completions, answer, **columns):
  """1 where the completion is the answer, whitespace at its ends aside."""
  del columns
  return [
    None if a is None else float(text_of(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)
  ]


def numeric_match(completions, answer, **columns):
  """1 where the last number of the completion is the answer's last number."""
  del columns
  return [_same(last_number(text_of(c)), last_number(str(a))) for c, a in zip(completions, answer, strict=True)]


def gsm8k(completions, answer, **columns):
  """1 where `final_number` of the completion is that of the answer.

  The answer is GSM8K's own text, ending in '#### 42', or the bare number.
  """
  del columns
  return [_same(final_number(text_of(c)), final_number(str(a))) for c, a in zip(completions, answer, strict=True)]


class MathVerify:
  """1 where math-verify finds the completion equal to the answer, else 0.

  The completion's answer has to be LaTeX, in a box if there is one; None where
  the row's answer cannot be parsed. The settings are TRL's accuracy_reward's.
  Never times out by itself, as its signals stop no C code: the pool kills.
  """

  def __init__(self):
    try:
      import math_verify
    except ModuleNotFoundError as error:
      raise InputError(f"imports {error.name!r}, which is not installed; pip install 'jaxpost[math]'") from error
    for name in ('parser', 'grader'):  # they warn of the missing timeout
      logging.getLogger(f'math_verify.{name}').setLevel(logging.ERROR)
    latex = math_verify.LatexExtractionConfig()
    self._library = math_verify
    self._latex = math_verify.LatexExtractionConfig(
      normalization_config=dataclasses.replace(latex.normalization_config, units=True),
      boxed_match_priority=0,
      try_extract_without_anchor=False,
    )

  def __call__(self, completions, answer, **columns):
    return [self._reward(text_of(c), a) for c, a in zip(completions, answer, strict=True)]

  def _reward(self, text, answer):
    gold = [] if answer is None else self._library.parse(str(answer), parsing_timeout=None)
    if not gold:
      return None
    found = self._library.parse(
      text, extraction_config=[self._latex], extraction_mode='first_match', parsing_timeout=None
    )
    return float(self._library.verify(gold, found, timeout_seconds=None))


def final_number(text):
  r"""The number after the last '####' or in the last \boxed{}, or the last."""
  marked = (None, *_MARKED.finditer(text))[-1]
  boxed = text.rfind('\\boxed{')
  if marked and marked.start() > boxed:
    line = text[marked.end() :].partition('\n')[0]
    return next(_numbers(line), None)
  if boxed >= 0:
    return last_number(_braced(text, boxed + len('\\boxed{')))
  return last_number(text)


def answer_of(text):
  """What a text answers, for a vote: the boxed text, its number, or all."""
  boxed = text.rfind('\\boxed{')
  if boxed >= 0 and boxed > text.rfind('####'):
    return ''.join(_braced(text, boxed + len('\\boxed{')).split())
  number = final_number(text)
  return text.strip() if number is None else str(number)


def last_number(text):
  """The last number of a text as a Fraction, or None."""
  return (None, *_numbers(text))[-1]


def _numbers(text):
  for pattern, replacement in _LATEX:
    text = pattern.sub(replacement, text)
  for match in _NUMBER.finditer(text):
    yield _value(match)


def _value(match):
  """A Fraction; the text itself where computing would cost too much."""
  if len(match[0]) > _LONG:
    return match[0]
  if match['top']:
    value = fractions.Fraction(int(match['top'].replace(',', '')), int(match['bottom']))
    value += int((match['whole'] or '0').replace(',', ''))
  else:
    digits = match['decimal'].replace(',', '')
    value = fractions.Fraction(digits + (match['exponent'] or ''))
  negative = match['sign'] == '-' or match['minus'] == '-'
  return -value if negative else value


def _same(number, target):
  return None if target is None else float(number == target)


def _braced(text, start):
  """What stands between the brace opened before `start` and its partner."""
  depth = 1
  for i in range(start, len(text)):
    depth += {'{': 1, '}': -1}.get(text[i], 0)
    if not depth:
      return text[start:i]
  return text[start:]  # cut off by the length limit
