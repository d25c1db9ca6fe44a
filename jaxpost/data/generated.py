"""Generated data sets: `generated:NAME[:key=value,...]`.

The rows are a pure function of the options, so that all processes and restarts have
the same ones, and train and test never share a problem.
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
  'correct': 0.5,  # share of the demonstrations that are right
  'size': 4096,  # rows at most; fewer where there are fewer problems
  'seed': 0,
}
_NOISY = {**_ARITHMETIC, 'noise': 0.0}  # share of the labels that are flipped
_SOLVE = {'+': operator.add, '-': operator.sub, '*': operator.mul}
_SHARES = ('correct', 'noise')
Row = dict[str, Any]


def rows(name: str, options: str = '') -> list[Row]:
  """Generates the rows of a data set.

  Args:
    name: 'arithmetic', or with _pairs, _labels, _scores or _steps after it.
    options: 'key=value,...'; see the tables of defaults.
  """
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
  chosen = _options(name, options, defaults)
  largest = _check(name, chosen)
  # Bytes, not hash(): equal in every process.
  draw = random.Random(zlib.crc32(repr(sorted(chosen.items())).encode()))
  problems = _problems(largest, chosen['ops'], chosen['split'], chosen['size'], draw)
  made = [maker(*problem, chosen, draw) for problem in problems]
  if not made:
    raise InputError(f'generated:{name}: no {chosen["split"]} problems with operands up to {largest}')
  return made


def arithmetic(a: int, op: str, b: int, options: Row, draw: random.Random) -> Row:
  """Generates a chat such as '17+25=' -> '42', a share of them with a wrong completion.

  Row: {'prompt': [{'role': 'user', 'content': '17+25='}], 'completion':
  [{'role': 'assistant', 'content': '42'}], 'answer': '42'}. `answer` is
  always right; a wrong completion is a mistake that a learner would make.
  """
  answer = shown = _SOLVE[op](a, b)
  if draw.random() >= options['correct']:
    shown = _slip(a, op, b, answer, draw)
  return {**_asked(a, op, b), 'completion': _said(shown), 'answer': str(answer)}


def arithmetic_pairs(a: int, op: str, b: int, options: Row, draw: random.Random) -> Row:
  """Generates a preference: prompt, chosen (the answer), rejected (a mistake), answer.

  `noise` is the share of pairs in which chosen and rejected are swapped.
  """
  answer = _SOLVE[op](a, b)
  sides = [_said(answer), _said(_slip(a, op, b, answer, draw))]
  if draw.random() < options['noise']:
    sides.reverse()
  return {**_asked(a, op, b), 'chosen': sides[0], 'rejected': sides[1], 'answer': str(answer)}


def arithmetic_labels(a: int, op: str, b: int, options: Row, draw: random.Random) -> Row:
  """Generates a row of `arithmetic` with a label: true where the completion is right."""
  row = arithmetic(a, op, b, options, draw)
  right = row['completion'][0]['content'] == row['answer']
  return {**row, 'label': right != (draw.random() < options['noise'])}


def arithmetic_scores(a: int, op: str, b: int, options: Row, draw: random.Random) -> Row:
  """Generates a row of `arithmetic` with a score: 1 where the completion is right, else 0."""
  row = arithmetic_labels(a, op, b, options, draw)
  score = float(row.pop('label'))
  return {**row, 'score': score}


def arithmetic_steps(a: int, op: str, b: int, options: Row, draw: random.Random) -> Row:
  """Generates a solution in steps, '17+20=37', '37+5=42', '42', with a label for each.

  Row: prompt, completions (the steps), labels, answer. The second operand is
  taken digit by digit. A share of the solutions, 1 - `correct`, has a slip in
  one step; the label of it and of all after it is false.
  """
  parts = _places(b)
  slip = len(parts)
  if draw.random() >= options['correct']:
    slip = draw.randrange(len(parts))
  steps, labels, total = [], [], a
  for n, part in enumerate(parts):
    left = a if op == '*' else total
    shown = _SOLVE[op](left, part)
    if n == slip:
      shown = _slip(left, op, part, shown, draw)
    new = [f'{left}{op}{part}={shown}']
    if op == '*' and n:
      new.append(f'{total}+{shown}={total + shown}')
      shown += total
    steps += new
    labels += [n < slip] * len(new)
    total = shown
  steps.append(str(total))
  labels.append(slip == len(parts))
  noisy = [label != (draw.random() < options['noise']) for label in labels]
  return {**_asked(a, op, b), 'completions': steps, 'labels': noisy, 'answer': str(_SOLVE[op](a, b))}


def _check(name: str, options: Row) -> int:
  """Returns the largest operand; InputError for impossible options."""
  split, ops = options['split'], options['ops']
  if split not in ('train', 'test'):
    raise InputError(f'generated:{name}: split={split!r} is neither train nor test')
  if not ops or set(ops) - set('+-*'):
    raise InputError(f'generated:{name}: ops={ops!r}: only + - and *')
  for share in _SHARES:
    if not 0 <= options.get(share, 0) <= 1:
      raise InputError(f'generated:{name}: {share} is a share, 0 to 1')
  top = 10 ** options['digits'] - 1 if options['digits'] else options['max']
  if top < 1 or options['size'] < 1:
    raise InputError(f'generated:{name}: max and size must be positive')
  return top


def _asked(a: int, op: str, b: int) -> Row:
  return {'prompt': [{'role': 'user', 'content': f'{a}{op}{b}='}]}


def _said(number: int) -> list[dict[str, str]]:
  return [{'role': 'assistant', 'content': str(number)}]


def _places(number: int) -> list[int]:
  """Splits a number by its digits: 25 -> [20, 5]; 0 -> [0]."""
  digits = str(number)
  parts = [int(d) * 10 ** (len(digits) - n) for n, d in enumerate(digits, 1)]
  return [p for p in parts if p] or [0]


def _problems(top: int, ops: str, split: str, size: int, draw: random.Random) -> Iterator[tuple[int, str, int]]:
  """Yields up to `size` distinct problems (a, op, b) of a split, in a random order."""
  total = (top + 1) ** 2 * len(ops)
  numbers: Iterable[int]
  if total <= max(20 * size, 1 << 16):
    numbers = draw.sample(range(total), total)
  else:
    # Too many to list; a repeat is passed over below.
    numbers = (draw.randrange(total) for _ in range(40 * size))
  seen = set()
  for number in numbers:
    rest, which = divmod(number, len(ops))
    a, b = divmod(rest, top + 1)
    problem = a, ops[which], b
    # The split is a property of the problem, whatever the options; 3+5 and
    # 5+3 are one problem.
    pair = (a, b) if ops[which] == '-' else (min(a, b), max(a, b))
    test = zlib.crc32(f'{ops[which]}{pair}'.encode()) % 10 == 0
    if test == (split == 'test') and problem not in seen:
      seen.add(problem)
      yield problem
      if len(seen) == size:
        return


def _slip(a: int, op: str, b: int, answer: int, draw: random.Random) -> int:
  """Draws a wrong answer of the kind that people give."""
  near = [answer + d for d in (-10, -1, 1, 10)]
  if op == '+':
    near += [_carryless(a, b)] * 2
  if op == '*' and b:
    near += [answer + a, answer - a]
  if op == '-':
    near += [-answer, a + b]
  plausible = [n for n in near if n != answer and (n >= 0 or op == '-')]
  return draw.choice(plausible)


def _carryless(a: int, b: int) -> int:
  """Returns the sum in which each carry was forgotten."""
  total, place = 0, 1
  while a or b:
    total += (a % 10 + b % 10) % 10 * place
    a, b, place = a // 10, b // 10, place * 10
  return total


def _options(name: str, options: str, defaults: Row) -> Row:
  """Returns `defaults` with the given values, in the type of each default."""
  found = dict(defaults)
  for part in filter(None, options.split(',')):
    key, _, value = part.partition('=')
    if key not in defaults:
      raise InputError(f'generated:{name}: unknown option {key!r}; there are {", ".join(defaults)}')
    try:
      found[key] = type(defaults[key])(value)
    except ValueError as error:
      raise InputError(f'generated:{name}: {key}={value!r} is no {type(defaults[key]).__name__}') from error
  return found
