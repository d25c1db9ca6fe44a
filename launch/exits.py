"""Runs all commands: `run(main)` is absl's app.run with exit codes, and one line for an error of the user.

0: done; 1: a bug of this library (traceback); 2: an error of the user (one line on
stderr); 3: no usable checkpoint; 4: the run diverged; 5: no room on the disk;
42: preempted and saved, run the same command again. Commands of several processes define --distributed,
--coordinator and their details by `define_cluster_flags`.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable

from absl import app, flags
from absl import logging as absl_logging

from jaxpost import errors
from jaxpost.distributed import watchdog
from jaxpost.stage import field_names
from jaxpost.storage import object_store

from . import config_flag

flags.disclaim_key_flags()  # the flags belong to the command that defines them

# Matches the text that absl and ml_collections write before an InputError of a config file.
_BEFORE_MESSAGE = re.compile(
  r'^flag --config=.*?: Error whilst parsing config file: jaxpost\.errors\.InputError: ', re.DOTALL
)

_OUTPUTS = ('out', 'record', 'traces')
_TOO_LARGE = 'Lower config.train.micro_batch_size or config.rollout.slots, or set config.model.remat=full.'


def run(main: Callable, argv: list[str] | None = None, words: int = 0):
  """Parses the flags, calls main(argv) and ends the process.

  Args:
    argv: the command line; None: sys.argv.
    words: largest number of arguments that are not flags.
  """
  open_standard_streams()
  absl_logging.get_absl_handler().setFormatter(_PlainLines())
  silence_orbax()
  watchdog.forget_reason()
  try:
    check_working_directory()
    with object_store.explained():
      app.run(main, argv=argv, flags_parser=functools.partial(parse, words=words))
  except BrokenPipeError:
    end_if_unread()
    raise
  except KeyboardInterrupt:  # Python ends by the signal, after it has called this hook
    sys.excepthook = lambda *error: print('interrupted', file=sys.stderr)
    raise
  except errors.KNOWN as error:
    sys.exit(watchdog.print_reason(str(error), error.exit_code, sys.stderr))
  except RuntimeError as error:  # jax.errors.JaxRuntimeError among them
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    message = f'{str(error).splitlines()[0]:.200} {_TOO_LARGE}'
    sys.exit(watchdog.print_reason(message, errors.InputError.exit_code, sys.stderr))


class _PlainLines(logging.Formatter):
  """Lets logged warnings look like those that commands print: `warning: text`."""

  def format(self, record: logging.LogRecord) -> str:
    return f'{record.levelname.lower()}: {super().format(record)}'


def silence_orbax() -> None:
  """Suppresses output of Orbax's threads and tasks after a failed save or on a full disk; the save itself raises."""
  sys.unraisablehook = _print_unraisable
  logging.getLogger('asyncio').addFilter(_is_news)  # added once, even if this is called again


def _print_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
  if str(unraisable.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(unraisable)


def _is_news(record: logging.LogRecord) -> bool:
  return not (record.exc_info and object_store.is_no_room(record.exc_info[1]))  # the save reports the full disk


def check_working_directory():
  """Raises InputError if the working directory has been deleted."""
  try:
    os.getcwd()
  except FileNotFoundError as error:
    raise errors.InputError('the working directory has been deleted; change to one that exists') from error


def open_standard_streams():
  """Opens /dev/null for each closed standard stream; otherwise another file would get its number, and the output."""
  for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode, encoding='utf-8'))  # with the lowest number that is free
      os.set_inheritable(getattr(sys, name).fileno(), True)  # for child processes as well


def end_if_unread():
  """Ends the process like SIGPIPE if its output has no reader any more, as in `| head`."""
  output = select.poll()
  output.register(sys.stdout.fileno(), 0)
  if any(event & select.POLLERR for _, event in output.poll(0)):
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports an error at its end
    sys.exit(128 + signal.SIGPIPE)


def _expand_home():
  """Expands ~ in the names of files and folders to write: a shell expands it only at the beginning of a word."""
  for name in _OUTPUTS:
    if name in flags.FLAGS and flags.FLAGS[name].value:
      flags.FLAGS[name].value = os.path.expanduser(flags.FLAGS[name].value)


def parse(argv: list[str], words: int = 0) -> list[str]:
  """Parses flags as absl does; InputError if they, or the config file, are wrong."""
  try:
    remaining = config_flag.parse(argv)
    _expand_home()
  except (*errors.KNOWN, BrokenPipeError, KeyboardInterrupt):
    raise
  except SystemExit as error:
    if line := _line_of_config(error, argv):
      raise errors.InputError(f'{line}the config file ends the process ({error!r}); return a config instead') from error
    end_if_unread()
    sys.exit(0)  # --help, for which absl exits with 1
  except BaseException as error:  # a config file may raise anything
    raise errors.InputError(_one_line(error, argv)) from error
  if len(remaining) > 1 + words:
    raise errors.InputError(f'{remaining[1 + words]!r} is no flag; flags are written --name=value')
  return remaining


def worst(codes: list[int]) -> int:
  """Returns the exit code of the run: 2 to 5 first, 42 only if nothing else went wrong."""
  for code in 2, 3, 4, 5:
    if code in codes:
      return code
  if any(code not in (0, 42) for code in codes):
    return 1
  return 42 if 42 in codes else 0


def refuse(names: Iterable[str], when: str):
  """Raises InputError if one of these flags was given, which have no effect `when`."""
  for name in names:
    if flags.FLAGS[name].present:
      raise errors.InputError(f'--{name} does nothing {when}; leave it out')


def _one_line(error: BaseException, argv: list[str]) -> str:
  """Returns the problem with the flags, or with the config file and its line, as one line."""
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
  return f'{_line_of_config(error, argv)}{type(error).__name__}: {text}'


def _missing_flags(names: list[str], argv: list[str]) -> str:
  """Returns the message about missing required flags."""
  flags_text = ' and '.join(f'--{name}' for name in names)
  suffixes = ('.py', *config_flag.YAML_SUFFIXES)
  for name, is_value in (('config', lambda value: value.endswith(suffixes)), ('run', os.path.isdir)):
    for word in argv[1:] if name in names else ():
      value = word.removeprefix(f'{name}=')
      if not word.startswith('-') and is_value(value):
        return f'{word!r} is no flag; write --{name}={value}'
  meanings = '; '.join(f'--{name} is the {_first_lower(flags.FLAGS[name].help)}' for name in names)
  return f'needs {flags_text}: {meanings}'


def _first_lower(text: str) -> str:
  return (text[:1].lower() + text[1:]).rstrip('.')


def _unknown_flag(error: flags.UnrecognizedFlagError) -> str:
  """Returns the message about an unknown flag; --config.a.b for --confg.a.b, and the field for a name of TRL."""
  head, dot, field = error.flagname.partition('.')
  if head in ('config', 'workdir') and {'processes', 'nodes'} & set(flags.FLAGS):  # launch.local, launch.submit
    return f'--{error.flagname}: is a flag of launch.train; write all of these after --, as in -- --config=FILE'
  nearest = [f'--{name}{dot}{field}' for name in difflib.get_close_matches(head, flags.FLAGS, 1)]
  if 'config' in flags.FLAGS:  # a name of TRL, verl or transformers, such as --learning_rate
    fields = [f for f in field_names.SYNONYMS.get(error.flagname, ()) if f[:2] != '--' or f[2:] in flags.FLAGS]
    nearest = [name if name.startswith('--') else f'--config.{name}' for name in fields] or nearest
  hint = f'; did you mean {" or ".join(nearest)}?' if nearest else '; --help lists the flags'
  return f'--{error.flagname}: there is no such flag{hint}'


def _line_of_config(error: BaseException, argv: list[str]) -> str:
  """Returns 'FILE:LINE: ' of the line in the config file that raised; '' if none did."""
  configs = {
    os.path.abspath(arg.partition('=')[2].partition(':')[0])
    for arg in config_flag.joined(argv)
    if arg.startswith(('--config=', '-config='))
  }
  lines = [
    f'{frame.filename}:{frame.lineno}: '
    for frame in traceback.extract_tb(error.__traceback__)
    if os.path.abspath(frame.filename) in configs
  ]
  return lines[-1] if lines else ''


def define_cluster_flags() -> None:
  """Defines the flags that connect the processes of a run, for the calling command."""
  flags.DEFINE_bool('distributed', False, 'Run as one of several processes in a cluster that JAX detects.')
  flags.DEFINE_string('coordinator', '', 'HOST:PORT of process 0, if JAX does not detect the cluster.')
  flags.DEFINE_integer('num_processes', None, 'How many processes; with --coordinator.', lower_bound=1)
  flags.DEFINE_integer('process_id', None, 'Rank of this process, from 0; with --coordinator.', lower_bound=0)
  flags.DEFINE_string(
    'cluster',
    '',
    'How JAX finds the other processes; "": by itself (TPU, GKE, Slurm, Open MPI); "mpi4py": any other MPI.',
  )
  flags.DEFINE_float(
    'init_timeout_s',
    300.0,
    'Seconds to wait for all processes at the start; then the run ends and names those that are missing.',
    lower_bound=1.0,
  )
  flags.DEFINE_float(
    'heartbeat_s',
    100.0,
    'Seconds without a heartbeat after which a process counts as lost; the others end and name it.',
    lower_bound=3.0,
  )


def connect() -> None:
  """Connects to the other processes if the flags say so; errors.InputError for a flag without effect."""
  values = flags.FLAGS
  if not (values.distributed or values.coordinator or values.cluster):
    refuse(('num_processes', 'process_id'), 'without --coordinator')
    return
  from jaxpost.distributed import cluster

  cluster.connect(
    values.coordinator,
    values.num_processes,
    values.process_id,
    cluster=values.cluster,
    init_s=values.init_timeout_s,
    heartbeat_s=values.heartbeat_s,
  )
