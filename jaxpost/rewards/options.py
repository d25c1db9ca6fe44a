"""Makes a reward function from a spec with options, in the worker process.

  name?key=value&key=value

Values are converted to the types in the signature of the named object; %2C is a comma, %26 an ampersand, %25 a percent
sign. The object is

  a class or a factory (a function without a parameter `prompts`, `completions` or `completion_ids`, such as TRL's
  get_*), which is called once with the options and returns the reward function; or
  a reward function, to which the options are bound as keyword arguments.
"""

import dataclasses
import functools
import inspect
import math
import types
import typing
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from jaxpost.errors import InputError, did_you_mean, type_of
from jaxpost.imports import load_callable
from jaxpost.rewards import verl
from jaxpost.workers import call, user_code

_VERL = 'verl:'


def load(name: str, spec: str) -> call.Reward:
  """Imports and instantiates the reward of a resolved spec (see `builtin.locate`).

  Raises:
    InputError: if the module, the function or an option is wrong.
  """
  label = f'reward {name}'  # at the start of error messages
  base, mark, query = spec.partition('?')
  options = _parse(query, label)
  is_verl = base.startswith(_VERL) and base.count(':') > 1
  try:
    target = load_callable(base.removeprefix(_VERL) if is_verl else base, label)
    arguments = dict(_typed(target, options, label))
    is_factory = isinstance(target, type) or (mark and not _is_reward(target, is_verl))
    if is_factory:
      fn = target(**arguments)
    else:
      fn = functools.partial(target, **arguments) if arguments else target
    if is_verl:
      fn = verl.adapt(fn)
  except InputError as error:
    text = str(error)
    raise InputError(text if text.startswith(label) else f'{label}: {text}') from error
  except BaseException as error:  # the user's module may raise anything
    raise InputError(f'{label}: importing {base} {user_code.describe(error)}') from error
  if not callable(fn):
    raise InputError(f'{label}: {base} made {type_of(fn)}, not a reward function')
  reward = call.load(name, fn)
  return dataclasses.replace(reward, file=call.file_of(target, base))


def _parse(query: str, label: str) -> dict[str, str]:
  """Parses 'key=value&key=value'."""
  options = {}
  for item in query.split('&') if query else ():
    key, equals, value = item.partition('=')
    if not key or not equals:
      raise InputError(f'{label}: option {item!r} must be key=value; several are joined with &')
    if key in options:
      raise InputError(f'{label}: option {key} is given twice')
    options[key] = urllib.parse.unquote(value)
  return options


def _parameters(target: Callable) -> dict[str, inspect.Parameter]:
  """Returns the parameters that can be passed by name."""
  try:
    parameters = inspect.signature(target).parameters.values()
  except (TypeError, ValueError):  # a C function; `call.load` reports it
    return {}
  return {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _is_reward(target: Callable, is_verl: bool) -> bool:
  """True for a reward function, False for a factory that returns one."""
  if is_verl or any(n in _parameters(target) for n in user_code.STANDARD):
    return True
  return any(p.kind == p.VAR_KEYWORD for p in inspect.signature(target).parameters.values())


def _typed(target: Callable, options: dict[str, str], label: str) -> Iterator[tuple[str, Any]]:
  """Yields (key, converted value) of each option; InputError for an unknown or missing one."""
  parameters = {n: p for n, p in _parameters(target).items() if n not in user_code.GIVEN}
  for key, text in options.items():
    if key not in parameters:
      hint = did_you_mean(key, parameters)
      raise InputError(f'{label}: unknown option {key!r}; {hint}there are: {", ".join(parameters) or "none"}')
    yield key, _value(key, text, parameters[key], label)
  if isinstance(target, type):
    for key, parameter in parameters.items():
      if parameter.default is parameter.empty and key not in options:
        raise InputError(f'{label}: needs the option {key!r}; write NAME?{key}=VALUE')


def _value(key: str, text: str, parameter: inspect.Parameter, label: str) -> int | float | bool | str:
  type_ = _type(parameter)
  try:
    if type_ is bool:
      return {'true': True, '1': True, 'false': False, '0': False}[text.lower()]
    value = type_(text)
    if type_ is float and not math.isfinite(value):
      raise ValueError
    return value
  except (KeyError, ValueError):
    raise InputError(f'{label}: option {key}={text!r} is no {type_.__name__}') from None


def _type(parameter: inspect.Parameter) -> type:
  """Returns int, float, bool or str, by the annotation, else by the default."""
  by_name = {'int': int, 'float': float, 'bool': bool, 'str': str}
  annotation = parameter.annotation
  if isinstance(annotation, str):  # The module has `from __future__ import annotations`.
    annotation = by_name.get(annotation.split('|')[0].strip(), annotation)
  if isinstance(annotation, types.UnionType) or typing.get_origin(annotation):
    annotation = next((a for a in typing.get_args(annotation) if a in by_name.values()), annotation)
  if annotation in by_name.values():
    return annotation
  default = type(parameter.default)
  return default if default in by_name.values() else str
