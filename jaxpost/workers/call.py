"""Loads, checks and calls one reward function, in a worker process or in the training process.

The arguments of a call are {'prompts', 'completions', 'completion_ids', column: ...}, each a list with one entry per
completion. A function receives those that it names in its signature, or all of them if it takes **columns.
"""

import asyncio
import dataclasses
import functools
import inspect
import numbers
import reprlib
import threading
import types
from collections.abc import Awaitable, Callable
from typing import Any

from jaxpost.errors import InputError
from jaxpost.workers import user_code

_FLOAT32_MAX = 3.4028234663852886e38
_LOOPS = threading.local()  # its attribute `runner` is the event loop of a thread


class RewardError(Exception):
  """A call returned no valid rewards; the message says what happened and where."""


@dataclasses.dataclass(frozen=True)
class Reward:
  """A reward function and the arguments in its signature."""

  name: str  # in metrics and errors
  fn: Callable
  takes: tuple[str, ...]  # names of its parameters
  takes_columns: bool  # True if it has a **columns parameter
  needs: tuple[str, ...]  # names of the parameters without a default; 'a|b' is satisfied by either
  file: str  # the source file, for error messages


def load(name: str, fn: Callable) -> Reward:
  """Makes a `Reward` of a callable; InputError if its signature does not fit."""
  file = file_of(fn, name)
  try:
    signature = inspect.signature(fn)
  except (TypeError, ValueError) as error:
    raise InputError(f'reward {name} ({file}): has no signature to read') from error
  parameters = signature.parameters.values()
  bound = fn.keywords if isinstance(fn, functools.partial) else {}
  # Options that a partial has bound are not arguments of a call.
  named = [p for p in parameters if p.name not in bound and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
  takes_columns = any(p.kind == p.VAR_KEYWORD for p in parameters)
  positional = [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY and p.default is p.empty]
  if positional or not (takes_columns or any(p.name in user_code.STANDARD for p in named)):
    raise InputError(
      f'reward {name} ({file}): wrong signature {signature}; arguments'
      ' come by name: f(prompts, completions, completion_ids, **columns); one of verl is verl:./file.py:function'
    )
  needs = [p.name for p in named if p.default is p.empty]
  needs += getattr(fn, 'needs_columns', ())  # of a builtin whose columns depend on its options
  takes = tuple(p.name for p in named)
  return Reward(name=name, fn=fn, takes=takes, takes_columns=takes_columns, needs=tuple(needs), file=file)


def file_of(fn: Callable, name: object) -> str:
  """Returns the source file of a callable, or `name` where there is none."""
  fn = fn.func if isinstance(fn, functools.partial) else fn
  try:
    return inspect.getsourcefile(inspect.unwrap(fn)) or str(name)
  except TypeError:  # an object with __call__, or a C function
    return str(name)


def call(
  reward: Reward,
  group: dict[str, list],
  logged: list[tuple[str, float]],
  step: int | None = None,
  time_limit_s: float | None = None,
) -> list[float | None]:
  """Calls a reward function on one group of completions.

  Args:
    group: lists by name, as in the docstring of this module.
    logged: receives a (name, value) pair for each call of `log_metric`.
    step: passed on as TRL's `trainer_state.global_step`.
    time_limit_s: passed on to functions that name it.

  Returns:
    One number per completion, or None where the function gave no reward.

  Raises:
    RewardError: if the function raised, or did not return such a list.
  """
  missing = user_code.missing_of(reward.needs, (*user_code.GIVEN, *group))
  if missing:
    raise RewardError(user_code.missing_column(missing[0], group))
  size = len(group['completions'])
  arguments = group | {  # as TRL passes them
    'trainer_state': types.SimpleNamespace(global_step=step),
    'log_metric': lambda name, value: logged.append((str(name), float(value))),
    'log_extra': lambda name, values: None,
    'time_limit_s': time_limit_s,
  }
  # **columns must not receive bound options a second time, nor the time limit.
  bound = {'time_limit_s'}
  if isinstance(reward.fn, functools.partial):
    bound |= set(reward.fn.keywords)
  arguments = {k: v for k, v in arguments.items() if k in reward.takes or reward.takes_columns and k not in bound}
  try:
    values = finished(reward.fn(**arguments))
    if hasattr(values, 'tolist'):  # an array of numpy or torch
      values = values.tolist()
    if not isinstance(values, (list, tuple)):
      raise RewardError(f'returned {_shown(values)}, not a list of {size} numbers')
    if len(values) != size:
      raise RewardError(f'returned {len(values)} rewards for {size} completions')
    return [_number(i, value) for i, value in enumerate(values)]
  except RewardError as error:
    raise RewardError(f'{error} ({reward.file})') from None
  except BaseException as error:  # the user's code may raise anything
    raise RewardError(user_code.describe(error)) from error


def finished(value: Any) -> Any:
  """Returns the result of a function: `value`, or the result of awaiting it.

  All calls in a thread share an event loop, so that a client with open connections can be used again in the next call.
  """
  if not inspect.isawaitable(value):
    return value
  if not hasattr(_LOOPS, 'runner'):
    _LOOPS.runner = asyncio.Runner()
  return _LOOPS.runner.run(_wait(value))


async def _wait(awaitable: Awaitable) -> Any:
  return await awaitable


def _number(i: int, value: Any) -> float | None:
  if value is None:
    return None
  if hasattr(value, 'item'):  # a scalar of numpy or torch
    value = value.item()
  if not isinstance(value, numbers.Real):  # a bool is one: 0 or 1
    raise RewardError(f'returned {_shown(value)} at {i}, not a number')
  number = value if isinstance(value, int) else float(value)  # a large int has no float
  # Advantages are computed in float32. Written this way, the comparison also fails for NaN.
  if not abs(number) <= _FLOAT32_MAX:
    shown = value if isinstance(value, float) else 'a number beyond float32'
    raise RewardError(f'returned {shown} at {i}; None says that there is no reward')
  return float(number)


def _shown(value: Any) -> str:
  return f'{type(value).__name__} {reprlib.repr(value)}'[:100]
