"""Rewards that compare a completion with the text or number in the column `answer`.

1.0 for a right completion, 0.0 for a wrong one, None if the row's own answer cannot be read. Numbers are compared
exactly, as fractions: 0.5 = 1/2 = \\frac{1}{2} = .50. Dollar signs, percent signs and thousands separators are ignored.
"""

import dataclasses
import fractions
import logging
import re
from collections.abc import Callable, Iterator

from jaxpost.errors import InputError
from jaxpost.rewards import bounded
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
# A box holds one value: a number, fraction, power or product of these, maybe with a unit.
_PLAIN = rf'(?:{_INT}(?:\.\d+)?|\.\d+)'
_SIDE = rf'(?:\{{\s*([-+]?{_PLAIN})\s*\}}|(\d))'
_FACTOR = re.compile(
  rf'(?:(?P<whole>\d+)\s*)?\\[dt]?frac\s*{_SIDE}\s*{_SIDE}'
  rf'|(?:(?P<left>\d+)\s+)?(?P<top>{_PLAIN})\s*/\s*(?P<bottom>{_PLAIN})'
  rf'|(?P<base>{_PLAIN})(?:[eE](?P<tens>[-+]?\d{{1,3}})|\s*\^\s*\{{?\s*(?P<power>-?\d{{1,3}})\s*\}}?)?'
)
_WORDS = r'\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*'
_BESIDE = (  # removed or normalized around the value of a box
  (re.compile('[\u2212\u2013]'), '-'),
  (re.compile(r'\^\s*\{?\s*\\circ\s*\}?|\\(?:left|right|displaystyle|q?quad|[,;:!])|\\ |\\?[$%]|~'), ' '),
  (re.compile(_WORDS + r'\{([^{}A-Za-z]*\d[^{}A-Za-z]*)\}'), r' \1 '),  # a number in bold
  (re.compile(_WORDS + r'\{[^{}]*\}(?:\s*\^\s*(?:\{\s*-?\w+\s*\}|\w))?'), ' '),  # a unit and its power
  (re.compile(r'.*(?:=|:\s)', re.DOTALL), ''),  # x = 18
  (re.compile(r'(?<=[\d}])(?:\s*[A-Za-z]{2,}|\s+[A-Zghlms])[A-Za-z /^\d]*\s*$'), ''),  # 18 cm
)
_TIMES = re.compile(r'\\times|\\cdot|[*\u00d7]')
_MARKED = re.compile(r'####\s*(?=[-+$.]*\d)')
# An answer with delimiters around its LaTeX. A dollar sign before a price is no delimiter.
_DELIMITED = re.compile(r'(?<!\\)\$.*(?<!\\)\$|\\boxed\b|(?<!\\)\\[(\[]', re.DOTALL)
# Answers that math-verify reads best without a box: a number such as 10 000; a text with marks (#### 18, **18**), or
# with a word before anything that only LaTeX and formulas have (18 dollars, The answer is 42).
_NUMBER_ALONE = re.compile(r'[-+]?[$\u20ac\u00a3\u00a5]?\s?(?:\d{1,3}(?:[ ,]\d{3})+|\d+)?(?:\.\d+)?\s*[%\u00b0]?')
_PROSE = re.compile(r'.*(?:####|\*\*)|[^\\{}^_=*/<>]*(?<!\S)(?!and\b)[A-Za-z]{3,}(?=[\s.,:;!?]|$)', re.DOTALL)
_FOR_BOX = (
  (re.compile(r'(?<=[\d)}\]])[.,]$'), ''),  # the end of a sentence
  (re.compile(r'(?<=\d)\\,(?=\d{3}(?!\d))'), ''),  # 10\,000
  (re.compile(r'^([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d{1,3})$'), r'\1 \\times 10^{\2}'),
  (re.compile(r'(?<![A-Za-z\\])pi(?![A-Za-z])'), r'\\pi'),
)
_LONG = 200  # characters; a longer number is compared as text, because arithmetic on it would be slow
_MAX_BITS = 8192  # size of a power or product in a box; Python refuses to print an integer of more than 4,300 digits

Number = fractions.Fraction | str  # a str is a number of more than _LONG characters


def exact_match(completions: list, answer: list, **columns) -> list[float | None]:
  """Returns 1 if the completion equals the answer, ignoring whitespace at both ends, else 0."""
  del columns
  return [
    None if a is None else float(text_of(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)
  ]


def numeric_match(completions: list, answer: list, **columns) -> list[float | None]:
  """Returns 1 if the last number of the completion equals the last number of the answer, else 0."""
  del columns
  return [_same(last_number(text_of(c)), last_number(str(a))) for c, a in zip(completions, answer, strict=True)]


def gsm8k(completions: list, answer: list, **columns) -> list[float | None]:
  """Returns 1 if `final_number` of the completion equals that of the answer, else 0.

  The answer is either GSM8K's full text, which ends in '#### 42', or the bare number.
  """
  del columns
  return [_same(final_number(text_of(c)), final_number(str(a))) for c, a in zip(completions, answer, strict=True)]


class MathVerify:
  """1 if the math-verify library finds the completion equal to the answer, else 0.

  The completion's answer must be LaTeX; a box takes precedence. The row's answer may lack delimiters, as in MATH; see
  `delimited`. None if it cannot be parsed. The settings are those of TRL's accuracy_reward. math-verify's own timeouts
  are off, because their signals cannot interrupt C code: a completion such as 9^{9^{9}} is read in a process that can
  be killed, gets 0 and counts in `math_verify_late`. If the row's answer takes so long, the rewards are None.
  """

  def __init__(self) -> None:
    try:
      import math_verify
    except ModuleNotFoundError as error:
      raise InputError(f"imports {error.name!r}, which is not installed; pip install -e '.[math]'") from error
    for name in ('parser', 'grader'):  # They warn on each call that there is no timeout.
      logging.getLogger(f'math_verify.{name}').setLevel(logging.ERROR)
    latex = math_verify.LatexExtractionConfig()
    self._library = math_verify
    self._latex = math_verify.LatexExtractionConfig(
      normalization_config=dataclasses.replace(latex.normalization_config, units=True),
      boxed_match_priority=0,
      try_extract_without_anchor=False,
    )
    self._reward('$1$', '$1$')  # loads the parser, so that no later call waits for it
    self._bounded = bounded.Bounded(self._reward)

  def __call__(
    self,
    completions: list,
    answer: list,
    time_limit_s: float | None = None,
    log_metric: Callable | None = None,
    **columns,
  ) -> list[float | None]:
    """Returns one reward per completion."""
    end = bounded.end_of(time_limit_s)
    rewards: list = []
    late = 0
    slow_answers: dict[str, bool] = {}  # answer of a late completion -> whether the answer alone is late, too
    for i, (completion, gold) in enumerate(zip(completions, answer, strict=True)):
      calls = len(completions) - i + 1  # that of an answer alone may be needed, too
      reward = bounded.LATE
      if not slow_answers.get(str(gold)):
        reward = self._bounded.ask((text_of(completion), gold), bounded.share(end, calls))
      if reward is bounded.LATE:
        late += 1
        if str(gold) not in slow_answers:
          alone = self._bounded.ask(('$\\boxed{1}$', gold), bounded.share(end, calls))
          slow_answers[str(gold)] = alone is bounded.LATE
        reward = None if slow_answers[str(gold)] else 0.0
      rewards.append(reward)
    if log_metric:
      log_metric('math_verify_late', late / len(completions))
    return rewards

  def _reward(self, text: str, answer) -> float | None:
    bare = '' if answer is None else str(answer).strip()
    marked = delimited(bare)
    gold = self._library.parse(marked, parsing_timeout=None)
    if not gold or (marked != bare and isinstance(gold[0], str)):  # It returns a string if it cannot parse the text.
      return None
    gold.append(bare)  # equals a box with the same text that cannot be parsed, such as 18 dollars
    parsed = self._library.parse(
      text, extraction_config=[self._latex], extraction_mode='first_match', parsing_timeout=None
    )
    return float(self._library.verify(gold, parsed, timeout_seconds=None))


def delimited(answer: str) -> str:
  r"""Returns the answer of a row such that math-verify finds its LaTeX: in a box if it has no delimiters.

  Without them, the library reads 3\sqrt{13} as 3, and \pi not at all. Numbers and sentences remain as they are, because
  it finds their numbers; so a sentence without a number has no verdict. A single word of three letters or more is text.
  """
  if _DELIMITED.search(answer) or _NUMBER_ALONE.fullmatch(answer):
    return answer
  if answer.isalpha() and len(answer) > 2:
    return f'\\boxed{{\\text{{{answer}}}}}'
  if _PROSE.match(answer):
    return answer
  for pattern, replacement in _FOR_BOX:
    answer = pattern.sub(replacement, answer)
  return f'\\boxed{{{answer}}}'


def final_number(text: str) -> Number | None:
  r"""Returns the number after the last '####' or in the last \boxed{}, whichever comes later, else the last number."""
  marked = (None, *_MARKED.finditer(text))[-1]
  boxed = text.rfind('\\boxed{')
  if marked and marked.start() > boxed:
    line = text[marked.end() :].partition('\n')[0]
    return next(_numbers(line), None)
  if boxed >= 0:
    return boxed_number(_braced(text, boxed + len('\\boxed{')))
  return last_number(text)


def boxed_number(text: str) -> Number | None:
  r"""Returns the number that a box stands for, or None for any other value, such as 2\pi, (3, 4) or x^2.

  It reads what math-verify reads as a number: \frac34, 3\frac{1}{2}, 10^5, 3 \times 10^4, and units beside them.
  """
  if len(text) > _LONG:
    return last_number(text)
  for pattern, replacement in (*_LATEX[2:3], *_BESIDE):
    text = pattern.sub(replacement, text)
  text = text.strip().rstrip('.')
  value = fractions.Fraction(-1 if text.startswith('-') else 1)
  for factor in _TIMES.split(text.lstrip('+-')):
    match = _FACTOR.fullmatch(factor.strip())
    if not match or (number := _factor(match)) is None:
      return None
    value *= number
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
      return None
  return value


def _factor(match: re.Match) -> fractions.Fraction | None:
  def number(text: str | None) -> fractions.Fraction:
    return fractions.Fraction((text or '0').replace(',', ''))

  if match['base']:
    base, power = number(match['base']), int(match['power'] or 1)
    if base == 0 and power < 0:
      return None
    return base**power * fractions.Fraction(10) ** int(match['tens'] or 0)
  # Each side of \frac is in one of two groups, with or without braces; those of a / b have names.
  sides = [text for text in match.groups()[1:5] if text] or [match['top'], match['bottom']]
  top, bottom = map(number, sides)
  if not bottom:
    return None
  return number(match['whole'] or match['left']) + top / bottom


def answer_of(text: str) -> str:
  """Returns the answer in a text, for majority voting: the boxed text, else `final_number`, else the whole text."""
  boxed = text.rfind('\\boxed{')
  if boxed >= 0 and boxed > text.rfind('####'):
    inside = _braced(text, boxed + len('\\boxed{'))
    number = boxed_number(inside)
    return ''.join(inside.split()) if number is None else str(number)
  number = final_number(text)
  return text.strip() if number is None else str(number)


def last_number(text: str) -> Number | None:
  """Returns the last number in a text, or None."""
  return (None, *_numbers(text))[-1]


def _numbers(text: str) -> Iterator[Number]:
  for pattern, replacement in _LATEX:
    text = pattern.sub(replacement, text)
  for match in _NUMBER.finditer(text):
    yield _value(match)


def _value(match: re.Match) -> Number:
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


def _same(number: Number | None, target: Number | None) -> float | None:
  return None if target is None else float(number == target)


def _braced(text: str, start: int) -> str:
  """Returns the text from `start` to the brace that closes the one before `start`."""
  depth = 1
  for i in range(start, len(text)):
    depth += {'{': 1, '}': -1}.get(text[i], 0)
    if not depth:
      return text[start:i]
  return text[start:]  # The completion was cut before the closing brace.
