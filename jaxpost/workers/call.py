"""Load, check, call one reward function; the same in a worker and outside.

Arguments are {'prompts', 'completions', 'completion_ids', column: ...}, each
a list of n; a function gets those that it names, or all with **columns.
"""

import asyncio
import dataclasses
import functools
import inspect
import numbers
import os
import reprlib
import sysconfig
import types

from jaxpost.errors import InputError

STANDARD = ('prompts', 'completions', 'completion_ids')
# Not of the data, either; `time_limit_s` goes only to who names it.
GIVEN = (*STANDARD, 'trainer_state', 'log_metric', 'log_extra', 'time_limit_s')
_FLOAT32_MAX = 3.4028234663852886e38
_NOT_OWN = (
  '<frozen',
  sysconfig.get_path('stdlib') + os.sep,
  sysconfig.get_path('purelib') + os.sep,
  __file__,
  os.path.join(os.path.dirname(os.path.dirname(__file__)), 'rewards', 'worker.py'),
)


class RewardError(Exception):
  """A call gave no rewards; the text says what happened and where."""


@dataclasses.dataclass(frozen=True)
class Reward:
  name: str
  fn: object  # the callable
  takes: tuple  # names of its arguments
  rest: bool  # it takes all others, too
  needs: tuple  # names without a default; 'a|b' is any of them
  file: str


def load(name, fn):
  """A callable as a Reward, or an InputError that says why it is none."""
  what, file = f'reward {name}', file_of(fn, name)
  try:
    signature = inspect.signature(fn)
  except (TypeError, ValueError) as error:
    raise InputError(f'{what} ({file}): has no signature to read') from error
  parameters = signature.parameters.values()
  bound = fn.keywords if isinstance(fn, functools.partial) else {}
  named = [p for p in parameters if p.name not in bound and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
  rest = any(p.kind == p.VAR_KEYWORD for p in parameters)
  only = [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY and p.default is p.empty]
  if only or not (rest or any(p.name in STANDARD for p in named)):
    raise InputError(
      f'{what} ({file}): wrong signature {signature}; arguments'
      ' come by name: f(prompts, completions, completion_ids, **columns)'
    )
  needs = tuple(p.name for p in named if p.default is p.empty)
  if hasattr(fn, 'needs_columns'):  # told by an object's options
    needs += tuple(fn.needs_columns)
  return Reward(name, fn, tuple(p.name for p in named), rest, needs, file)


def file_of(fn, name):
  fn = fn.func if isinstance(fn, functools.partial) else fn
  try:
    return inspect.getsourcefile(inspect.unwrap(fn)) or str(name)
  except TypeError:  # an object with __call__, or not of Python
    return str(name)


def call(reward, arguments, logged, step=None, time_limit_s=None):
  """The rewards of one group, list of float or None; RewardError if none.

  `logged` is a list that gets what the function logs, as (name, value).
  """
  missing = missing_of(reward.needs, (*GIVEN, *arguments))
  if missing:
    raise RewardError(missing_column(missing[0], arguments))
  size = len(arguments['completions'])
  arguments = arguments | {  # as TRL passes them
    'trainer_state': types.SimpleNamespace(global_step=step),
    'log_metric': lambda name, value: logged.append((str(name), float(value))),
    'log_extra': lambda name, values: None,
    'time_limit_s': time_limit_s,
  }
  bound = (*reward.fn.keywords, 'time_limit_s') if isinstance(reward.fn, functools.partial) else ('time_limit_s',)
  arguments = {k: v for k, v in arguments.items() if k in reward.takes or reward.rest and k not in bound}
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


def missing_of(needs, given):
  return [need for need in needs if not set(need.split('|')) & set(given)]


def missing_column(name, arguments):
  columns = ', '.join(k for k in arguments if k not in GIVEN) or 'none'
  name = ' or '.join(map(repr, name.split('|')))
  return f'needs the column {name}, the data has: {columns}'


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
    raise RewardError(f'returned {_shown(values)}, not a list of {size} numbers')
  if len(values) != size:
    raise RewardError(f'returned {len(values)} rewards for {size} completions')
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
    raise RewardError(f'returned {float_text(value)} at {i}; None says that there is no reward')
  return float(value)


def float_text(value):
  return str(value) if isinstance(value, float) else 'a number beyond float32'


def _shown(value):
  return f'{type(value).__name__} {reprlib.repr(value)}'[:100]
