"""The program inside the sandbox that holds a solution, and the format in which values enter and leave it.

jail.py runs the text of this file in a new interpreter; descriptor 3 is a socket to the jail. The first line is the
solution; each line after it is a request, which is answered by one line:

  ['name', text]                     a name of the solution's module
  ['attribute', value, text]         an attribute of a value
  ['item', value, key]               a subscription
  ['slice', value, *numbers]         a subscription by a slice: its start, stop and step
  ['call', value, args, kwargs]      a call
  ['change', value, args, kwargs]    a call; the answer is the arguments after it
  ['apply', text, value]             a function of APPLY

  {'value': encoded} or {'raised': [names of the exception's class and its bases]}

Nothing here is trusted: the solution shares this interpreter and can send any answer. That does not let it pass a test:
an answer is only a value, the expected value and the test never enter this process, and the other side
(workers/dialog.py) reads an answer as plain data. Imports the standard library only.
"""

import collections.abc
import json
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

DEPTH = 100  # limit of the levels of nested values
BITS = 1 << 16  # limit of the bits of an integer
REPLY_BYTES = 1 << 21  # limit of the bytes of one answer
_TAGS = {'l': list, 't': tuple, 's': set, 'f': frozenset}
APPLY: dict[str, Callable[[Any], Any]] = {f.__name__: f for f in (len, str, repr, list, next, int, float, abs)}


def encode(value: Any, keep: Callable[[Any], int], depth: int = 0) -> Any:
  """Returns a value in a form that JSON can represent; ValueError if it is nested deeper than `DEPTH`.

  A value of a subclass loses its class. Containers become lists that start with a tag. An object of any other class is
  kept in its process, and its number stands for it.

  Args:
    keep: returns the number of an object that has no plain form.
    depth: number of values that contain this one.
  """
  if depth > DEPTH:
    raise ValueError(f'nested deeper than {DEPTH}')
  if value is None or isinstance(value, bool):
    return value
  if isinstance(value, int) and int.bit_length(value) > 10_000:  # Python reads no decimal of more than 4,300 digits.
    return ['i', hex(int.__index__(value))]
  for kind, plain in ((str, str.__str__), (int, int.__index__), (float, float.__float__)):
    if isinstance(value, kind):
      return plain(value)
  if type(value).__module__ == 'numpy' and hasattr(value, 'tolist'):
    return encode(value.tolist(), keep, depth + 1)
  for tag, kind in _TAGS.items():
    if isinstance(value, kind):
      return [tag, *(encode(v, keep, depth + 1) for v in kind.__iter__(value))]
  if isinstance(value, dict):
    pairs = dict.items(value)
    return ['d', *([encode(k, keep, depth + 1), encode(v, keep, depth + 1)] for k, v in pairs)]
  if isinstance(value, bytes):
    return ['b', bytes.hex(value)]
  if isinstance(value, complex):
    return ['c', value.real, value.imag]
  return ['o', keep(value), type(value).__name__[:100]]


def decode(data: Any, kept: Callable[[int, str], Any], depth: int = 0) -> Any:
  """Returns the value that `encode` has encoded; ValueError for any other data.

  Args:
    data: parsed JSON.
    kept: (number, name of the class) of an object that was kept -> the object, or what stands for it.
    depth: number of values that contain this one.
  """
  if depth > DEPTH:
    raise ValueError(f'nested deeper than {DEPTH}')
  match data:
    case None | bool() | str() | int() | float():
      return data
    case [('l' | 't' | 's' | 'f') as tag, *parts]:
      items = [decode(part, kept, depth + 1) for part in parts]
      return distinct(_TAGS[tag], items) if tag in 'sf' else _TAGS[tag](items)
    case ['d', *pairs]:
      items = [(decode(key, kept, depth + 1), decode(value, kept, depth + 1)) for key, value in pairs]
      return distinct(dict, items)
    case ['i', str(digits)] if len(digits) <= BITS // 4 + 3:
      return int(digits, 16)
    case ['b', str(digits)]:
      return bytes.fromhex(digits)
    case ['c', int() | float() as real, int() | float() as imaginary]:
      return complex(real, imaginary)
    case ['o', int(number), str(kind)] if not isinstance(number, bool):
      return kept(number, kind)
  raise ValueError('not a value')


def distinct(kind: type, items: Collection = ()) -> Any:
  """Returns a set, frozenset or dict; ValueError if so many hashes are equal that making it takes quadratic time."""
  keys = [key for key, _ in items] if kind is dict else items
  counts = collections.Counter(map(hash, keys))
  if len(keys) > 1000 and max(counts.values()) > 100 and len(set(map(repr, keys))) > len(counts) + 100:
    raise ValueError('too many equal hashes')
  return kind(items)


def main() -> None:
  """Executes the solution on the first line of descriptor 3, then answers until that is closed."""
  lines = open(3, 'rb', closefd=False)
  replies = open(3, 'wb', closefd=False)
  module = sys.modules['solution'] = types.ModuleType('solution')
  exec(compile(json.loads(lines.readline()), 'solution.py', 'exec'), module.__dict__)
  objects = []

  def keep(value: Any) -> int:
    objects.append(value)
    return len(objects) - 1

  for line in lines:
    try:
      request = [decode(part, lambda number, _: objects[number]) for part in json.loads(line)]
      answer = {'value': encode(_answer(module, *request), keep)}
    except BaseException as error:
      answer = {'raised': [kind.__name__ for kind in type(error).__mro__]}
    replies.write(json.dumps(answer).encode() + b'\n')
    replies.flush()


def _answer(module: types.ModuleType, verb: str, *parts) -> Any:
  """Returns the result of one request."""
  if verb == 'name':
    if parts[0] not in module.__dict__:
      raise NameError(parts[0])
    return module.__dict__[parts[0]]
  if verb == 'attribute':
    return getattr(*parts)
  if verb == 'item':
    return parts[0][parts[1]]
  if verb == 'slice':
    return parts[0][slice(*parts[1:])]
  if verb == 'apply':
    return APPLY[parts[0]](parts[1])
  function, arguments, named = parts
  result = function(*arguments, **named)
  return (arguments, named) if verb == 'change' else result


if __name__ == '__main__':
  main()
