"""Data made on the spot: `generated:NAME[:key=value,...]`.

A pure function of its options, so that every process and every restart sees
the same rows, and train and test never share a problem.
"""

import random
import zlib

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


def rows(name, options=''):
  """The rows of a generated data set.

  Args:
    name: 'arithmetic'.
    options: 'key=value,...', or a dict; see the table of defaults.
  """
  makers = {'arithmetic': (arithmetic, _ARITHMETIC)}
  if name not in makers:
    raise InputError(
      f'generated:{name}: there is no such data; there is {", ".join(makers)}')
  maker, defaults = makers[name]
  return maker(_options(name, options, defaults))


def arithmetic(options):
  """Chats such as '17+25=' -> '42', with wrong demonstrations among them.

  Row: {'prompt': [{'role': 'user', 'content': '17+25='}], 'completion':
  [{'role': 'assistant', 'content': '42'}], 'answer': '42'}. `answer` is
  always right; a wrong completion is a slip that a learner would make.
  """
  split, ops = options['split'], options['ops']
  if split not in ('train', 'test'):
    raise InputError(
      f'generated:arithmetic: split={split!r} is neither train nor test')
  if not ops or set(ops) - set('+-*'):
    raise InputError(f'generated:arithmetic: ops={ops!r}: only + - and *')
  if not 0 <= options['correct'] <= 1:
    raise InputError('generated:arithmetic: correct is a share, 0 to 1')
  top = 10 ** options['digits'] - 1 if options['digits'] else options['max']
  if top < 1 or options['size'] < 1:
    raise InputError('generated:arithmetic: max and size must be positive')
  # Bytes, not hash(): equal in every process.
  draw = random.Random(zlib.crc32(repr(sorted(options.items())).encode()))
  made = []
  for a, op, b in _problems(top, ops, split, options['size'], draw):
    answer = {'+': a + b, '-': a - b, '*': a * b}[op]
    shown = answer
    if draw.random() >= options['correct']:
      shown = _slip(a, op, b, answer, draw)
    made.append(
      {
        'prompt': [{'role': 'user', 'content': f'{a}{op}{b}='}],
        'completion': [{'role': 'assistant', 'content': str(shown)}],
        'answer': str(answer),
      })
  if not made:
    raise InputError(
      f'generated:arithmetic: no {split} problems with operands up to {top}')
  return made


def _problems(top, ops, split, size, draw):
  """Up to `size` distinct problems of a split, in a random order."""
  total = (top + 1) ** 2 * len(ops)
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


def _slip(a, op, b, answer, draw):
  """A wrong answer of the kind that people give."""
  near = [answer + d for d in (-10, -1, 1, 10)]
  if op == '+':
    near += [_carryless(a, b)] * 2
  if op == '*' and b:
    near += [answer + a, answer - a]
  if op == '-':
    near += [-answer, a + b]
  plausible = [n for n in near if n != answer and (n >= 0 or op == '-')]
  return draw.choice(plausible)


def _carryless(a, b):
  """The sum in which each carry was forgotten."""
  total, place = 0, 1
  while a or b:
    total += (a % 10 + b % 10) % 10 * place
    a, b, place = a // 10, b // 10, place * 10
  return total


def _options(name, options, defaults):
  """`defaults` with the given values in the type of each default."""
  if isinstance(options, str):
    parts = filter(None, options.split(','))
    pairs = [part.partition('=')[::2] for part in parts]
  else:
    pairs = list(options.items())
  found = dict(defaults)
  for key, value in pairs:
    if key not in defaults:
      raise InputError(
        f'generated:{name}: unknown option {key!r}; there are'
        f' {", ".join(defaults)}')
    try:
      found[key] = type(defaults[key])(value)
    except ValueError as error:
      raise InputError(
        f'generated:{name}: {key}={value!r} is no'
        f' {type(defaults[key]).__name__}'
      ) from error
  return found
