"""Load, check, call one reward function; the same in a worker and outside.

Arguments are {'prompts', 'completions', 'completion_ids', column: ...}, each
a list of n; a function gets those that it names, or all with **columns.
"""

import asyncio
import dataclasses
import inspect
import numbers
import os
import reprlib
import sysconfig

from jaxpost.errors import InputError
from jaxpost.imports import load_callable

STANDARD = ('prompts', 'completions', 'completion_ids')
_FLOAT32_MAX = 3.4028234663852886e38
_NOT_OWN = (
    '<frozen',
    sysconfig.get_path('stdlib') + os.sep,
    sysconfig.get_path('purelib') + os.sep,
    __file__,
    os.path.join(os.path.dirname(__file__), 'worker.py'),
)


class RewardError(Exception):
  """A call gave no rewards; the text says what happened and where."""


@dataclasses.dataclass(frozen=True)
class Reward:
  name: str
  fn: object  # the callable
  takes: tuple | None  # names of its arguments, None for all
  needs: tuple  # names without a default
  file: str


def load(name, spec):
  """The function of a spec as a Reward, or an InputError that says why not."""
  what = f'reward {name}'
  try:
    fn = load_callable(spec, what)
  except InputError:
    raise
  except BaseException as error:  # the user's module may raise anything
    raise InputError(
        f'{what}: importing {spec} {describe(error)}'
    ) from error
  file = _file(fn, spec)
  try:
    parameters = inspect.signature(fn).parameters.values()
  except (TypeError, ValueError) as error:
    raise InputError(f'{what} ({file}): has no signature to read') from error
  named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD,
                                               p.KEYWORD_ONLY)]
  takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
  only = [p.name for p in parameters
          if p.kind == p.POSITIONAL_ONLY and p.default is p.empty]
  if only or not (takes_all or any(p.name in STANDARD for p in named)):
    raise InputError(
        f'{what} ({file}): wrong signature {inspect.signature(fn)}; arguments'
        ' come by name: f(prompts, completions, completion_ids, **columns)'
    )
  return Reward(
      name,
      fn,
      None if takes_all else tuple(p.name for p in named),
      tuple(p.name for p in named if p.default is p.empty),
      file,
  )


def _file(fn, spec):
  try:
    return inspect.getsourcefile(inspect.unwrap(fn)) or str(spec)
  except TypeError:  # an object with __call__, or not of Python
    return str(spec)


def call(reward, arguments):
  """The rewards of one group, list of float or None; RewardError if none."""
  missing = [name for name in reward.needs if name not in arguments]
  if missing:
    raise RewardError(missing_column(missing[0], arguments))
  size = len(arguments['completions'])
  if reward.takes is not None:
    arguments = {k: v for k, v in arguments.items() if k in reward.takes}
  try:
    values = reward.fn(**arguments)
    if inspect.isawaitable(values):
      values = asyncio.run(_wait(values))
    if hasattr(values, 'tolist'):  # an array of numpy or torch
      values = values.tolist()
    return _checked(values, size)
  except RewardError as error:
    raise RewardError(f'{error} ({reward.file})') from None
  except BaseException as error:  # the user's code may raise anything
    raise RewardError(describe(error)) from error


def missing_column(name, arguments):
  columns = ', '.join(k for k in arguments if k not in STANDARD) or 'none'
  return f'needs the column {name!r}, the data has: {columns}'


def describe(error):
  """'raised ValueError: text at file:line', the line being the user's."""
  trace, frames = error.__traceback__, []
  while trace:
    frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
    trace = trace.tb_next
  file, line = (own_frames(frames) or frames)[-1]
  text = ' '.join(str(error).split())[:300]
  text = text.encode(errors='replace').decode()  # lone surrogates
  colon = ': ' if text else ''
  return f'raised {type(error).__name__}{colon}{text} at {file}:{line}'


def own_frames(frames):
  """Those of (file, line) that are neither a library's nor ours."""
  return [f for f in frames if not f[0].startswith(_NOT_OWN)]


async def _wait(awaitable):
  return await awaitable


def _checked(values, size):
  if not isinstance(values, (list, tuple)):
    raise RewardError(
        f'returned {_shown(values)}, not a list of {size} numbers'
    )
  if len(values) != size:
    raise RewardError(
        f'returned {len(values)} rewards for {size} completions'
    )
  return [_number(i, value) for i, value in enumerate(values)]


def _number(i, value):
  if value is None:
    return None
  if hasattr(value, 'item'):  # a scalar of numpy or torch
    value = value.item()
  if not isinstance(value, numbers.Real):  # a bool is one: 0 or 1
    raise RewardError(f'returned {_shown(value)} at {i}, not a number')
  # Later arithmetic is in float32; comparing so is False for nan, too.
  if not abs(value) <= _FLOAT32_MAX:
    raise RewardError(
        f'returned {float_text(value)} at {i}; None says that there is no'
        ' reward'
    )
  return float(value)


def float_text(value):
  return str(value) if isinstance(value, float) else 'a number beyond float32'


def _shown(value):
  return f'{type(value).__name__} {reprlib.repr(value)}'[:100]
