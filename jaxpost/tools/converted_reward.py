"""Maps verl's reward function and its penalty of long answers, which are several settings, to `config.reward`."""

from __future__ import annotations

from typing import Any

from jaxpost.tools.converted_value import Setting, integer, named, spelled

_FUNCTION = 'custom_reward_function'
_BUFFERS = 'overlong_buffer', 'overlong_buffer_cfg'  # names of the penalty in releases of verl


def joined(settings: list[Setting], given: dict[str, Any]) -> list[Setting]:
  """Returns the settings; those of which `reward` is made have its value, as verl:FILE:NAME,overlong?max=N&buffer=N."""
  path = named(given, f'{_FUNCTION}.path')
  if not isinstance(path, str) or not path or '$' in path:
    return settings  # verl's own functions go by the data set
  specs = [f'verl:{path}:{named(given, f"{_FUNCTION}.name") or "compute_score"}']
  parts = [f'{_FUNCTION}.path', f'{_FUNCTION}.name']
  for buffer in _BUFFERS:
    if penalty := _penalty(buffer, given):
      specs.append(penalty)
      parts += [f'{buffer}.{part}' for part in ('enable', 'len', 'penalty_factor')]
  reward = ','.join(specs)

  def is_part(setting: Setting) -> bool:
    return any(f'.{setting.name}'.endswith(f'.{part}') for part in parts)

  return [Setting(s.name, reward, ('reward',)) if is_part(s) else s for s in settings]


def _penalty(buffer: str, given: dict[str, Any]) -> str:
  """Returns the penalty of long answers as a reward; '' if it is off, or if one of its numbers is missing."""
  length = integer(given, f'{buffer}.len')
  limit = integer(given, 'max_resp_len', integer(given, 'max_response_length'))
  factor = named(given, f'{buffer}.penalty_factor')
  factor = 1.0 if factor is None else factor
  if spelled(named(given, f'{buffer}.enable')) != 'true' or not 0 < length <= limit:
    return ''
  if not isinstance(factor, (int, float)) or factor < 0:
    return ''
  return f'overlong?max={limit}&buffer={length}' + ('' if factor == 1 else f'&factor={factor:g}')
