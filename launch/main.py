"""The `jaxpost` command: `jaxpost VERB [flags]` runs the module of that name.

In a clone `python -m launch.VERB [flags]` is the same; each such module has a
`main(argv)` and its own absl flags. Nothing but the chosen one is imported.
"""

import importlib
import sys

import jaxpost
from jaxpost.errors import did_you_mean

from .verbs import VERBS, WORDS, usage


def main(argv=None):
  """Entry point of the console script; ends the process with its exit code."""
  args = sys.argv[1:] if argv is None else list(argv)
  if not args or args[0] in ('-h', '--help', 'help'):
    show(usage())
    sys.exit(0 if args else 2)
  if args[0] == '--version':
    print(f'jaxpost {jaxpost.__version__}')
    sys.exit(0)
  verb, flag_words = args[0], args[1:]
  if verb not in VERBS:
    hint = did_you_mean(verb, VERBS).strip() or f'use {", ".join(VERBS)}'
    print(f'jaxpost: no command {verb!r}; {hint}', file=sys.stderr)
    sys.exit(2)
  # Relative to this file (launch.* in a clone, jaxpost.launch.* if installed), so that another `launch` on the path is
  # not imported.
  module = importlib.import_module(f'{__package__}.{verb}')
  exits = importlib.import_module(f'{__package__}.exits')
  if {'-h', '--help'} & set(flag_words):
    from absl import flags

    show(f'{(module.__doc__ or "").strip()}\n\n{flags.FLAGS.module_help(module).strip()}')
    sys.exit(0)
  # launch.plan prints the command line that it was given.
  sys.argv = [f'jaxpost {verb}', *flag_words]
  exits.run(module.main, sys.argv, words=WORDS.get(verb, 0))


def show(text):
  """Prints a text, or as much of it as `| head` reads."""
  try:
    print(text, flush=True)
  except BrokenPipeError:
    importlib.import_module(f'{__package__}.exits').end_if_unread()


if __name__ == '__main__':
  main()
