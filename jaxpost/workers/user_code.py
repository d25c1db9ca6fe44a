"""Error texts about reward functions: reserved arguments, missing columns, the line of the user in a traceback.

`call.py` uses them in a worker process; `process.py` and the pools use them in the process that owns the workers.
"""

import os
import sysconfig
import traceback
from collections.abc import Iterable
from typing import Any

STANDARD = ('prompts', 'completions', 'completion_ids')
# Names that no data column may have. `time_limit_s` is passed only to functions that name it.
GIVEN = (*STANDARD, 'trainer_state', 'log_metric', 'log_extra', 'time_limit_s')
# Files whose frames are skipped when an error message names the user's line.
_NOT_USER_CODE = (
  '<frozen',
  sysconfig.get_path('stdlib') + os.sep,
  sysconfig.get_path('purelib') + os.sep,
  os.path.join(os.path.dirname(__file__), 'call.py'),
  os.path.join(os.path.dirname(os.path.dirname(__file__)), 'rewards', 'worker.py'),
)


def missing_of(needs: Iterable[str], names: Iterable[str]) -> list[str]:
  """Returns the needs that none of the names satisfies; 'a|b' is satisfied by either."""
  return [need for need in needs if not set(need.split('|')) & set(names)]


def missing_column(name: str, arguments: Iterable[str], lacks: str = 'this row') -> str:
  """Returns the error text for a column that a row lacks; `lacks` is 'the data' if all rows lack it."""
  columns = ', '.join(k for k in arguments if k not in GIVEN) or 'none'
  return f'needs the column {" or ".join(map(repr, name.split("|")))}, {lacks} has: {columns}'


def describe(error: BaseException) -> str:
  """Returns 'raised ValueError: text at file:line', with the innermost line of the user's code."""
  frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
  file, line = (user_frames(frames) or frames)[-1]
  text = ' '.join(str(error).split())[:300]
  text = text.encode(errors='replace').decode()  # lone surrogates
  colon = ': ' if text else ''
  return f'raised {type(error).__name__}{colon}{text} at {file}:{line}'


def user_frames(frames: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
  """Returns the (file, line) pairs that lie in the user's code, not in a library or in this one."""
  return [f for f in frames if not f[0].startswith(_NOT_USER_CODE)]
