"""How every command ends: `run(main)` is app.run with the exit codes.

0 done, 2 the user's to fix (one line on stderr), 3 no usable checkpoint, 42
preempted and saved (run the same command again), 1 a bug of ours (traceback).
"""

import functools
import os
import sys
import traceback

from absl import app, flags

from jaxpost import errors

from . import config_flag

# What a config file, or an override of one, raises while it is read.
CONFIG_ERRORS = (
  flags.Error,
  AttributeError,
  ImportError,
  LookupError,
  NameError,
  OSError,
  SyntaxError,
  TypeError,
  ValueError,
)


def run(main, argv=None, words=0):
  """Parses the flags, calls main(argv) and ends the process.

  `words`: how many arguments that are no flags the command takes.
  """
  try:
    app.run(main, argv=argv, flags_parser=functools.partial(parse, words=words))
  except (errors.InputError, errors.NoCheckpointError, errors.Preempted, errors.PeerError) as error:
    print(f'jaxpost: {error}', file=sys.stderr)
    sys.exit(error.exit_code)


def parse(argv, words=0):
  """absl's flag parsing; what is wrong with them becomes an InputError."""
  try:
    rest = config_flag.parse(argv)
  except errors.InputError:
    raise
  except CONFIG_ERRORS as error:
    raise errors.InputError(_one_line(error, argv)) from error
  if len(rest) > 1 + words:
    raise errors.InputError(f'{rest[1 + words]!r} is no flag; flags are written --name=value')
  return rest


def refuse(names, when):
  """InputError where one of these flags was given; it would do nothing."""
  for name in names:
    if flags.FLAGS[name].present:
      raise errors.InputError(f'--{name} does nothing {when}; leave it out')


def flag_help(module):
  """The docstring and the flags of a command's module."""
  return f'{(module.__doc__ or "").strip()}\n\n' + flags.FLAGS.module_help(module).strip()


def _one_line(error, argv):
  """The message, and where in the config file it arose."""
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
  return f'{where[-1] if where else ""}{type(error).__name__}: {text}'
