"""Says in one line what is wrong with a command line or a config file."""

from __future__ import annotations

import difflib
import os
import re
import traceback

from absl import flags

from . import config_flag

# Matches the text that absl and ml_collections write before an InputError of a config file.
_BEFORE_MESSAGE = re.compile(
  r'^flag --config=.*?: Error whilst parsing config file: jaxpost\.errors\.InputError: ', re.DOTALL
)


def one_line(error: Exception, argv: list[str]) -> str:
  """Returns what is wrong with the flags or the config file, with its line there."""
  text = str(error)
  if '\\n' in text:  # ml_collections gives the repr of its message
    text = text.strip('\'"').replace('\\n', '\n').replace("\\'", "'")
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if any(line.startswith('Traceback') for line in lines):
    # absl puts the traceback of a config file's ValueError in the message.
    lines = [lines[0].split(': Traceback')[0].rstrip(':'), lines[-1]]
  text = ': '.join(dict.fromkeys(lines)) or type(error).__name__
  if isinstance(error, flags.UnrecognizedFlagError):
    return _unknown_flag(error)
  if isinstance(error, flags.Error):
    missing = re.findall(r'flag --(\w+)=None: Flag --\1 must have a value', text)
    return _missing_flags(missing, argv) if missing else _BEFORE_MESSAGE.sub('', text)
  return f'{line_of_config(error, argv)}{type(error).__name__}: {text}'


def _missing_flags(names: list[str], argv: list[str]) -> str:
  """The line for required flags that were not given."""
  named = ' and '.join(f'--{name}' for name in names)
  files = [word for word in argv[1:] if not word.startswith('-') and word.endswith(('.py', '.yaml', '.yml'))]
  if 'config' in names and files:
    return f'{files[0]!r} is no flag; write --config={files[0]}'
  what = '; '.join(f'--{name} is the {_first_lower(flags.FLAGS[name].help)}' for name in names)
  return f'needs {named}: {what}'


def _first_lower(text: str) -> str:
  return (text[:1].lower() + text[1:]).rstrip('.')


def _unknown_flag(error: flags.UnrecognizedFlagError) -> str:
  """The line for a flag that does not exist, with the nearest one; --confg.a.b is --config.a.b."""
  head, dot, rest = error.flagname.partition('.')
  near = difflib.get_close_matches(head, flags.FLAGS, 1)
  hint = f'; did you mean --{near[0]}{dot}{rest}?' if near else '; --help lists the flags'
  return f'--{error.flagname}: there is no such flag{hint}'


def line_of_config(error: BaseException, argv: list[str]) -> str:
  """Returns 'FILE:LINE: ' of the line in the config file that raised; '' if none did."""
  configs = {
    os.path.abspath(arg.partition('=')[2].partition(':')[0])
    for arg in config_flag.joined(argv)
    if arg.startswith(('--config=', '-config='))
  }
  where = [
    f'{frame.filename}:{frame.lineno}: '
    for frame in traceback.extract_tb(error.__traceback__)
    if os.path.abspath(frame.filename) in configs
  ]
  return where[-1] if where else ''
