"""Samples one completion of a run again, bit for bit, and shows what the update learned from it.

  python -m launch.reproduce --run=runs/quickstart --step=40 --row=3
  python -m launch.reproduce --run=DIR --step=1 --row=0 --stage=grpo --json

Starts from the newest checkpoint before the step, or from the start of the stage,
and repeats the steps in between; the folder of the run does not change. Row K is
line K, from 0, of samples/STAGE/STEP.jsonl. Exits with 1 if the sample differs from
the one that the run has kept, as it may on another machine or mesh.
"""

import json
import logging
import sys

import rich.console
import rich.table
from absl import flags

from jaxpost.hardware import host

from . import model_flags

_RUN = flags.DEFINE_string('run', None, 'Folder of a run.')
_STEP = flags.DEFINE_integer('step', None, 'Step of the sample, from 1.', lower_bound=1)
_ROW = flags.DEFINE_integer('row', 0, 'Number of the sample in that step, from 0.', lower_bound=0)
_STAGE = flags.DEFINE_string('stage', '', 'Stage of the run; default: the last one.')
_JSON = flags.DEFINE_bool('json', False, 'Print one JSON object instead of a table.')
flags.mark_flags_as_required(['run', 'step'])
_COMPARISON = {
  None: 'the run has kept no sample of this step to compare with',
  True: 'identical to the sample that the run has kept',
  False: 'NOT the sample that the run has kept',
}


def show(sample: dict, console: rich.console.Console):
  """Prints the prompt, a table of the tokens, and the figures."""
  from jaxpost.tools import reproduce

  console.print(sample['prompt'], style='dim', markup=False)
  table = rich.table.Table('token', 'text', 'log-prob', 'advantage')
  columns = (sample[key] for key in ('ids', 'texts', 'logprobs', 'advantages', 'trained'))
  for token, text, logprob, advantage, trained in zip(*columns):
    table.add_row(str(token), repr(text), f'{logprob:.6f}', f'{advantage:.4f}' if trained else '-')
  console.print(table)
  for title, value in reproduce.figures(sample).items():
    console.print(f'{title}: {value}', markup=False, highlight=False)


def main(argv):
  """Samples again, shows the sample, and compares it with the kept one."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  host.tune_host()
  with model_flags.starting():
    host.use_compile_cache()
    import jaxpost
    from jaxpost.tools import reproduce

  sample = reproduce.reproduce(_RUN.value, _STEP.value, _ROW.value, _STAGE.value, jaxpost.choose_mesh)
  if _JSON.value:
    print(json.dumps(sample, default=str))
  else:
    show(sample, rich.console.Console(soft_wrap=True))
  print(_COMPARISON[sample['identical']], file=sys.stderr)
  if sample['identical'] is False:
    sys.exit(1)


if __name__ == '__main__':
  from . import exits

  exits.run(main)
