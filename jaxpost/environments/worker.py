"""The process of one environment: python -m jaxpost.rewards.env_worker.

JSON lines on stdin and stdout, one object each:

  in   {'path', 'environment', 'start_timeout_s', 'timeout_s', 'most'}    once
  out  {'start': ''}, then {'ready': {'tools': {name: schema},
       'gives_reward': bool}} or {'bad': text}
  in   {'verb': 'reset', 'row'}, {'verb': 'call', 'name', 'arguments'} or
       {'verb': 'reward'}
  out  {'value': text, number or None} or {'error': text}

One instance serves one episode after the other, as TRL's do. `most` characters
of a text are sent at most.
"""

import faulthandler
import json
import math
import numbers

from jaxpost import imports
from jaxpost.environments import tool_schema
from jaxpost.errors import InputError
from jaxpost.rewards import worker
from jaxpost.workers import call


def main():
  started = worker.begin(lambda setup: load(setup['environment']))
  if not started:
    return
  setup, requests, reply, (environment, known) = started
  gives = hasattr(environment, 'get_reward')
  reply({'ready': {'tools': known, 'gives_reward': gives}})
  for line in requests:
    # Says where it hangs, from a C thread: even where the GIL is held.
    faulthandler.dump_traceback_later(0.9 * setup['timeout_s'], file=2)
    answer = serve(environment, known, json.loads(line), setup['most'])
    faulthandler.cancel_dump_traceback_later()
    reply(answer)


def load(spec: str) -> tuple:
  """(an environment, {name: schema} of its tools)."""
  what = f'environment {spec}'
  try:
    environment = imports.load_callable(spec, 'environment')()
  except InputError:
    raise
  except BaseException as error:  # the user's module may raise anything
    raise InputError(f'{what}: making one {call.describe(error)}') from error
  return environment, tool_schema.of(environment, what)


def serve(environment, known, request: dict, most: int) -> dict:
  verb = request['verb']
  if verb == 'call':
    text, error = tool_schema.run(environment, request['name'], request['arguments'], known)
    key, text = ('value', text) if error is None else ('error', error)
    return {key: _sound(text, most)}
  try:
    value = environment.get_reward() if verb == 'reward' else (environment.reset(**request['row']))
  except BaseException as error:  # likewise
    return {'error': f'{verb} {call.describe(error)}'}
  if verb == 'reset':
    return {'value': None if value is None else _sound(str(value), most)}
  if hasattr(value, 'item'):
    value = value.item()
  if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
    return {'error': f'get_reward returned {value!r}, no finite number'[:300]}
  return {'value': None if value is None else float(value)}


def _sound(text: str, most: int) -> str:
  """Cut to `most` characters, without halves of surrogate pairs."""
  text = text if len(text) <= most else text[:most] + ' [cut]'
  return text.encode(errors='replace').decode()


if __name__ == '__main__':
  main()
