"""Generated data sets: `generated:NAME[:key=value,...]`.

The rows are a pure function of the options, so all processes and restarts have the same ones. The splits train and test
have no problem in common.
"""

import operator
import random
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from jaxpost.errors import InputError

_ARITHMETIC = {
  'split': 'train',  # train or test: about every tenth problem is test
  'max': 99,  # largest operand
  'digits': 0,  # operands below 10 ** digits instead of max
  'ops': '+',  # any of + - *
  'correct': 0.5,  # share of the demonstrations with the right answer
  'size': 4096,  # largest number of rows; there are fewer if there are fewer problems
  'seed': 0,
}
_NOISY = {**_ARITHMETIC, 'noise': 0.0}  # share of the labels that are flipped
_SOLVE = {'+': operator.add, '-': operator.sub, '*': operator.mul}
Row = dict[str, Any]


def rows(name: str, options: str = '') -> list[Row]:
  """Generates the rows of a data set; `options` is 'key=value,...', with keys of the tables of defaults above."""
  makers = {
    'arithmetic': (arithmetic, _ARITHMETIC),
    'arithmetic_pairs': (arithmetic_pairs, _NOISY),
    'arithmetic_labels': (arithmetic_labels, _NOISY),
    'arithmetic_scores': (arithmetic_scores, _NOISY),
    'arithmetic_steps': (arithmetic_steps, _NOISY),
  }
  if name not in makers:
    raise InputError(f'generated:{name}: there is no such data; there is {", ".join(makers)}')
  maker, defaults = makers[name]
  values = _options(name, options, defaults)
  largest = _check(name, values)
  # crc32, because hash() differs between processes.
  draw = random.Random(zlib.crc32(repr(sorted(values.items())).encode()))
  problems = _problems(largest, values['ops'], values['split'], values['size'], draw)
  generated = [maker(*problem, values, draw) for problem in problems]
  if not generated:
    raise InputError(f'generated:{name}: no {values["split"]} problems with operands up to {largest}')
  return generated


def arithmetic(a: int, op: str, b: int, options: Row, draw: random.Random) -> Row:
  """Generates a chat: prompt ('17+25='), completion ('42') and the right `answer` as text.

  A share of the completions, 1 - `correct`, has a mistake that a learner would make.
  """
  answer = shown = _SOLVE[op](a, b)
  if draw.random() >= options['correct']:
    shown = _slip(a, op, b, answer, draw)
  return {**_asked(a, op, b), 'completion': _said(shown), 'answer': str(answer)}


def arithmetic_pairs(a: int, op: str, b: int, options: Row, draw: random.Random) -> Row:
  """Generates a pair: prompt, chosen (the answer), rejected (a mistake), answer; swaps a share `noise` of the pairs."""
  answer = _SOLVE[op](a, b)
  sides = [_said(answer), _said(_slip(a, op, b, answer, draw))]
  if draw.random() < options['noise']:
    sides.reverse()
  return {**_asked(a, op, b), 'chosen': sides[0], 'rejected': sides[1], 'answer': str(answer)}


def arithmetic_labels(a: int, op: str, b: int, options: Row, draw: random.Random) -> Row:
  """Generates a row of `arithmetic` with a label, which is true if the completion is right."""
  row = arithmetic(a, op, b, options, draw)
  right = row['completion'][0]['content'] == row['answer']
  return {**row, 'label': right != (draw.random() < options['noise'])}


def arithmetic_scores(a: int, op: str, b: int, options: Row, draw: random.Random) -> Row:
  """Generates a row of `arithmetic` with a score: 1 if the completion is right, otherwise 0."""
  row = arithmetic_labels(a, op, b, options, draw)
  score = float(row.pop('label'))
  return {**row, 'score': score}


def arithmetic_steps(a: int, op: str, b: int, options: Row, draw: random.Random) -> Row:
  """Generates a solution in steps such as '17+20=37', '37+5=42', '42': prompt, completions (the steps), labels, answer.

  The steps take the second operand digit by digit. A share of the solutions, 1 - `correct`, has a mistake in one step;
  the labels of this step and of all later ones are false.
  """
  digits = str(b)
  parts = [int(d) * 10 ** (len(digits) - n) for n, d in enumerate(digits, 1) if d != '0'] or [0]
  mistake_at = len(parts)
  if draw.random() >= options['correct']:
    mistake_at = draw.randrange(len(parts))
  steps, labels, total = [], [], a
  for n, part in enumerate(parts):
    left = a if op == '*' else total
    result = _SOLVE[op](left, part)
    if n == mistake_at:
      result = _slip(left, op, part, result, draw)
    new = [f'{left}{op}{part}={result}']
    if op == '*' and n:
      new.append(f'{total}+{result}={total + result}')
      result += total
    steps += new
    labels += [n < mistake_at] * len(new)
    total = result
  steps.append(str(total))
  labels.append(mistake_at == len(parts))
  noisy = [label != (draw.random() < options['noise']) for label in labels]
  return {**_asked(a, op, b), 'completions': steps, 'labels': noisy, 'answer': str(_SOLVE[op](a, b))}


def _check(name: str, options: Row) -> int:
  """Returns the largest operand; raises InputError for impossible options."""
  split, ops = options['split'], options['ops']
  if split not in ('train', 'test'):
    raise InputError(f'generated:{name}: split={split!r} is neither train nor test')
  if not ops or set(ops) - set('+-*'):
    raise InputError(f'generated:{name}: ops={ops!r}: only + - and *')
  for share in ('correct', 'noise'):
    if not 0 <= options.get(share, 0) <= 1:
      raise InputError(f'generated:{name}: {share} is a share, from 0 to 1')
  largest = 10 ** options['digits'] - 1 if options['digits'] else options['max']
  if largest < 1 or options['size'] < 1:
    raise InputError(f'generated:{name}: max and size must be positive')
  return largest


def _asked(a: int, op: str, b: int) -> Row:
  return {'prompt': [{'role': 'user', 'content': f'{a}{op}{b}='}]}


def _said(number: int) -> list[dict[str, str]]:
  return [{'role': 'assistant', 'content': str(number)}]


def _problems(largest: int, ops: str, split: str, size: int, draw: random.Random) -> Iterator[tuple[int, str, int]]:
  """Yields up to `size` distinct problems (a, op, b) of a split, in a random order."""
  total = (largest + 1) ** 2 * len(ops)
  numbers: Iterable[int]
  if total <= max(20 * size, 1 << 16):
    numbers = draw.sample(range(total), total)
  else:
    # Too many to list; repeated numbers are skipped below.
    numbers = (draw.randrange(total) for _ in range(40 * size))
  yielded = set()
  for number in numbers:
    operands, op_index = divmod(number, len(ops))
    a, b = divmod(operands, largest + 1)
    op = ops[op_index]
    problem = a, op, b
    # The split depends on the problem alone, not on the options; 3+5 and 5+3 are the same problem.
    pair = (a, b) if op == '-' else (min(a, b), max(a, b))
    is_test = zlib.crc32(f'{op}{pair}'.encode()) % 10 == 0
    if is_test == (split == 'test') and problem not in yielded:
      yielded.add(problem)
      yield problem
      if len(yielded) == size:
        return


def _slip(a: int, op: str, b: int, answer: int, draw: random.Random) -> int:
  """Draws a wrong answer of the kind that people give."""
  candidates = [answer + d for d in (-10, -1, 1, 10)]
  if op == '+':
    candidates += [_carryless(a, b)] * 2
  if op == '*' and b:
    candidates += [answer + a, answer - a]
  if op == '-':
    candidates += [-answer, a + b]
  return draw.choice([n for n in candidates if n != answer and (n >= 0 or op == '-')])


def _carryless(a: int, b: int) -> int:
  """Returns the sum of two numbers without any carry: 17 + 25 is 32."""
  total, place = 0, 1
  while a or b:
    total += (a % 10 + b % 10) % 10 * place
    a, b, place = a // 10, b // 10, place * 10
  return total


def _options(name: str, options: str, defaults: Row) -> Row:
  """Returns `defaults` updated with 'key=value,...', each value in the type of its default."""
  values = dict(defaults)
  for part in filter(None, options.split(',')):
    key, _, value = part.partition('=')
    if key not in defaults:
      raise InputError(f'generated:{name}: unknown option {key!r}; there are {", ".join(defaults)}')
    try:
      values[key] = type(defaults[key])(value)
    except ValueError as error:
      raise InputError(f'generated:{name}: {key}={value!r} is no {type(defaults[key]).__name__}') from error
  return values
