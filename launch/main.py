"""The `jaxpost` command: `jaxpost VERB [flags]` runs the module of that name.

In a clone `python -m launch.VERB [flags]` is the same; each such module has a
`main(argv)` and its own absl flags. Nothing but the chosen one is imported.
"""

import difflib
import importlib
import sys

import jaxpost

VERBS = {
  'train': 'start or resume a run: --config=FILE[:args] --workdir=DIR',
  'local': 'train with several processes on this machine, as hosts would',
  'submit': 'start a run on a TPU slice, Slurm, GKE, SkyPilot or Colab',
  'evaluate': 'score a checkpoint or a model folder on a data set',
  'sample': 'complete prompts with a checkpoint or a model folder',
  'reproduce': 'draw one sample of a run again and show what was learned from it',
  'serve': "answer as OpenAI's API does, on loopback",
  'inspect': 'show what a config reads, trains on and builds; trains nothing',
  'view': 'show the episodes of a run: prompts, completions, rewards, tokens',
  'compare': 'compare runs: configs, rewards on shared prompts, the first sample that differs',
  'chat': 'talk with a checkpoint, a model folder or an adapter',
  'doctor': 'say what this machine has for a run, and what to mend',
  'convert': 'make a config of the settings of TRL, verl, Tunix or MaxText',
  'export': 'write a checkpoint as a Hugging Face folder',
  'plan': 'compile a run for a described machine: fits, seconds, cost',
  'bench': 'time the standard workload on this machine',
}
WORDS = {'bench': 1, 'compare': 99, 'convert': 2, 'local': 99, 'submit': 99}  # arguments that are no flags


def main(argv=None):
  """Entry point of the console script; ends the process with its exit code."""
  args = sys.argv[1:] if argv is None else list(argv)
  if not args or args[0] in ('-h', '--help', 'help'):
    show(usage())
    sys.exit(0 if args else 2)
  if args[0] == '--version':
    print(f'jaxpost {jaxpost.__version__}')
    sys.exit(0)
  verb, rest = args[0], args[1:]
  if verb not in VERBS:
    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f'did you mean {near[0]!r}?' if near else f'use {", ".join(VERBS)}'
    print(f'jaxpost: no command {verb!r}; {hint}', file=sys.stderr)
    sys.exit(2)
  # A stray `launch` elsewhere on the path must not win, so the name is taken
  # from where this file is: launch.* in a clone, jaxpost.launch.* installed.
  module = importlib.import_module(f'{__package__}.{verb}')
  exits = importlib.import_module(f'{__package__}.exits')
  if {'-h', '--help'} & set(rest):
    from absl import flags

    show(f'{(module.__doc__ or "").strip()}\n\n{flags.FLAGS.module_help(module).strip()}')
    sys.exit(0)
  # launch.plan prints the command line that it was given.
  sys.argv = [f'jaxpost {verb}', *rest]
  exits.run(module.main, sys.argv, words=WORDS.get(verb, 0))


def show(text):
  """Prints a text, as a whole or as far as `| head` reads it."""
  try:
    print(text, flush=True)
  except BrokenPipeError:
    importlib.import_module(f'{__package__}.exits').end_if_unread()


def usage():
  """The text of `jaxpost --help`."""
  width = max(map(len, VERBS))
  lines = [f'  {verb:{width}}  {what}' for verb, what in VERBS.items()]
  ends = ['', '`jaxpost COMMAND --help` lists its flags, `jaxpost --version` says what is installed.']
  return '\n'.join(['usage: jaxpost COMMAND [flags]', '', *lines, *ends])


if __name__ == '__main__':
  main()
