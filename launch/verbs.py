"""The commands of `jaxpost`, and what each does."""

VERBS = {
  'train': 'start or resume a run: --config=FILE[:args] --workdir=DIR',
  'local': 'train with several processes on this machine, as hosts would',
  'submit': 'start a run on a TPU slice, Slurm, GKE, SkyPilot or Colab',
  'evaluate': 'score a checkpoint or a model folder on a data set',
  'sample': 'complete prompts with a checkpoint or a model folder',
  'reproduce': 'draw one sample of a run again and show what was learned from it',
  'serve': "serve a model with OpenAI's HTTP API, on this machine",
  'inspect': 'show what a config reads, trains on and builds; trains nothing',
  'report': 'write the report of a run that is in progress, was stopped or has failed',
  'view': 'show the episodes of a run: prompts, completions, rewards, tokens',
  'compare': 'compare runs: configs, rewards on shared prompts, the first sample that differs',
  'chat': 'talk with a checkpoint, a model folder or an adapter',
  'doctor': 'show what this machine has for a run, and what to fix',
  'convert': 'make a config of the settings of TRL, verl, Tunix or MaxText',
  'export': 'write a checkpoint as a Hugging Face folder',
  'plan': 'compile a run for a described machine: whether it fits, how long it takes, what it costs',
  'bench': 'time a fixed workload on this machine, or measure its accelerator',
}
WORDS = {'bench': 1, 'compare': 99, 'convert': 2, 'local': 99, 'submit': 99}  # arguments that are no flags


def usage():
  """The text of `jaxpost --help`."""
  width = max(map(len, VERBS))
  lines = [f'  {verb:{width}}  {what}' for verb, what in VERBS.items()]
  ends = ['', '`jaxpost COMMAND --help` lists its flags, `jaxpost --version` says what is installed.']
  return '\n'.join(['usage: jaxpost COMMAND [flags]', '', *lines, *ends])
