"""Exit codes of all commands: `run(main)` is absl's app.run with them.

0: done; 1: a bug of this library (traceback); 2: an error of the user (one line on
stderr); 3: no usable checkpoint; 4: the run diverged; 5: no room on the disk;
42: preempted and saved, run the same command again.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from types import ModuleType

from absl import app, flags

from jaxpost import errors
from jaxpost.distributed import watchdog
from jaxpost.storage import disk_errors

from . import config_flag

# Exceptions of reading a config file.
CONFIG_ERRORS = (
  flags.Error,
  ArithmeticError,
  AssertionError,
  AttributeError,
  ImportError,
  LookupError,
  MemoryError,
  NameError,
  OSError,
  RuntimeError,
  SyntaxError,
  TypeError,
  ValueError,
)


def run(main: Callable, argv: list[str] | None = None, words: int = 0):
  """Parses the flags, calls main(argv) and ends the process.

  Args:
    argv: the command line; None: sys.argv.
    words: largest number of arguments that are no flags.
  """
  watchdog.forget_reason()
  try:
    with disk_errors.explained():
      app.run(main, argv=argv, flags_parser=functools.partial(parse, words=words))
  except errors.KNOWN as error:
    sys.exit(watchdog.print_reason(str(error), error.exit_code, sys.stderr))


def parse(argv: list[str], words: int = 0) -> list[str]:
  """Parses flags as absl does; InputError if they, or the config file, are wrong."""
  try:
    rest = config_flag.parse(argv)
  except errors.InputError:
    raise
  except SystemExit as end:
    if where := _line_of_config(end, argv):  # it also ends --help
      raise errors.InputError(f'{where}the config file ends the process ({end!r}); return a config instead') from end
    raise
  except CONFIG_ERRORS as error:
    raise errors.InputError(_one_line(error, argv)) from error
  if len(rest) > 1 + words:
    raise errors.InputError(f'{rest[1 + words]!r} is no flag; flags are written --name=value')
  return rest


def worst(codes: list[int]) -> int:
  """Returns the exit code of the run: 2 to 5 first, 42 only if nothing else went wrong."""
  for code in 2, 3, 4, 5:
    if code in codes:
      return code
  if any(code not in (0, 42) for code in codes):
    return 1
  return 42 if 42 in codes else 0


def refuse(names: Iterable[str], when: str):
  """InputError if one of these flags was given, which have no effect `when`."""
  for name in names:
    if flags.FLAGS[name].present:
      raise errors.InputError(f'--{name} does nothing {when}; leave it out')


def flag_help(module: ModuleType) -> str:
  """Returns the docstring and the flags of a command."""
  return f'{(module.__doc__ or "").strip()}\n\n' + flags.FLAGS.module_help(module).strip()


def _one_line(error: Exception, argv: list[str]) -> str:
  """The message of an error, with its line in the config file."""
  text = str(error)
  if '\\n' in text:  # ml_collections gives the repr of its message
    text = text.strip('\'"').replace('\\n', '\n').replace("\\'", "'")
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if any(line.startswith('Traceback') for line in lines):
    # absl puts the traceback of a config file's ValueError in the message.
    lines = [lines[0].split(': Traceback')[0].rstrip(':'), lines[-1]]
  text = ': '.join(dict.fromkeys(lines)) or type(error).__name__
  if isinstance(error, flags.Error):
    return text
  return f'{_line_of_config(error, argv)}{type(error).__name__}: {text}'


def _line_of_config(error: BaseException, argv: list[str]) -> str:
  """Returns 'FILE:LINE: ' of the line in the config file that raised; '' if none did."""
  configs = {
    os.path.abspath(arg.partition('=')[2].partition(':')[0])
    for arg in argv
    if arg.startswith(('--config=', '-config='))
  }
  where = [
    f'{frame.filename}:{frame.lineno}: '
    for frame in traceback.extract_tb(error.__traceback__)
    if os.path.abspath(frame.filename) in configs
  ]
  return where[-1] if where else ''
