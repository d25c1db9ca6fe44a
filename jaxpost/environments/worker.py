"""The main program of an environment's process, which the pool starts as `python -m jaxpost.environments.worker`.

It exchanges JSON objects with the pool, one per line, on stdin and stdout:

  in   {'path', 'environment', 'start_timeout_s', 'timeout_s', 'max_characters'}    once
  out  {'start': ''}, then {'bad': text} or
       {'ready': {'tools': {name: schema}, 'gives_reward': bool, 'gives_turn_rewards': bool}}
  in   {'verb': 'reset', 'row'}, {'verb': 'call', 'name', 'arguments'} or {'verb': 'reward'};
       {'verb': 'check', 'row'} asks whether `reset` takes the columns of a row
  out  {'value': text, number or None} or {'error': text}; to a call also 'reward', or 'spoiled' if that is no number

As in TRL, one instance of the class serves one episode after another. Texts are cut to `max_characters`.
"""

import faulthandler
import inspect
import json
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpost import imports
from jaxpost.environments import tool_schema
from jaxpost.errors import InputError
from jaxpost.rewards import worker
from jaxpost.workers import call, user_code

TURN_REWARD = 'turn_reward'  # attribute that a tool sets to the reward of its call


class Loaded(NamedTuple):
  """An instance of the environment, and {name: schema} of its tools."""

  environment: Any
  tools: dict[str, dict]


def main() -> None:
  """Answers one request per line of stdin, until it is closed."""
  started = worker.begin(lambda setup: load(setup['environment']))
  if not started:
    return
  setup, loaded = started.setup, started.loaded
  gives = {
    'gives_reward': hasattr(loaded.environment, 'get_reward'),
    'gives_turn_rewards': hasattr(loaded.environment, TURN_REWARD),
  }
  started.reply({'ready': {'tools': loaded.tools, **gives}})
  for line in started.requests:
    # Prints the stack shortly before the pool kills a call that hangs; a C thread does it, even if the GIL is held.
    faulthandler.dump_traceback_later(0.9 * setup['timeout_s'], file=2)
    answer = serve(loaded, json.loads(line), setup['max_characters'])
    faulthandler.cancel_dump_traceback_later()
    started.reply(answer)


def load(spec: str) -> Loaded:
  """Imports and instantiates './env.py:Class' or 'pkg.module:Class'; InputError if that or a tool's schema fails."""
  name = f'environment {spec}'
  try:
    environment = imports.load_callable(spec, 'environment')()
  except InputError:
    raise
  except BaseException as error:  # the user's module may raise anything
    raise InputError(f'{name}: making one {user_code.describe(error)}') from error
  return Loaded(environment, tool_schema.tool_schemas(environment, name))


def serve(loaded: Loaded, request: dict, max_characters: int) -> dict:
  """Returns the answer to one request: {'value': ...} or {'error': text}."""
  verb = request['verb']
  environment = loaded.environment
  if verb == 'call':
    return _serve_call(loaded, request, max_characters)
  if verb in ('check', 'reset') and (mismatch := _mismatch(environment.reset, request['row'])):
    return {'error': mismatch}
  if verb == 'check':
    return {'value': None}
  try:
    value = environment.get_reward() if verb == 'reward' else environment.reset(**request['row'])
    value = call.finished(value)
  except BaseException as error:  # the user's code may raise anything
    return {'error': f'{verb} {user_code.describe(error)}'}
  if verb == 'reset':
    return {'value': None if value is None else _clean(str(value), max_characters)}
  if value is None:
    return {'value': None}
  return _number(value, 'value', 'get_reward returned')


def _mismatch(reset: Callable, row: dict) -> str:
  """Returns why `reset` cannot be called with a row, and where it is defined; '' if it can."""
  try:
    inspect.signature(reset).bind(**row)
  except TypeError as error:
    code = getattr(inspect.unwrap(reset), '__code__', None)
    where = f' ({code.co_filename}:{code.co_firstlineno})' if code else ''
    return f'reset{where}: {error}; it gets {", ".join(row)}, so name these columns, or take **row'
  except ValueError:  # it has no signature to read
    pass
  return ''


def _serve_call(loaded: Loaded, request: dict, max_characters: int) -> dict:
  """Answers a tool call, with the reward that the tool has set for it."""
  environment, reward = loaded.environment, {}
  gives_reward = hasattr(environment, TURN_REWARD)
  if gives_reward:
    environment.turn_reward = 0.0
  result = tool_schema.call_tool(environment, request['name'], request['arguments'], loaded.tools)
  if gives_reward:
    reward = _number(environment.turn_reward, 'reward', f'{request["name"]} set {TURN_REWARD} to')
    if 'error' in reward:
      return {**reward, 'spoiled': True}
  if result.error is not None:
    return {'error': _clean(result.error, max_characters), **reward}
  return {'value': _clean(result.text, max_characters), **reward}


def _number(value: Any, name: str, label: str) -> dict:
  """Returns {name: a finite number}, or {'error': text}."""
  if hasattr(value, 'item'):  # a scalar of numpy or torch
    value = value.item()
  if not (isinstance(value, numbers.Real) and math.isfinite(value)):
    return {'error': f'{label} {value!r}, no finite number'[:300]}
  return {name: float(value)}


def _clean(text: str, max_characters: int) -> str:
  """Cuts a text, and replaces lone surrogates, which UTF-8 cannot encode."""
  text = text if len(text) <= max_characters else text[:max_characters] + ' [cut]'
  return text.encode(errors='replace').decode()


if __name__ == '__main__':
  main()
