"""Draws a sample of a run again, bit for bit, and says what was learnt of it.

  python -m launch.reproduce --run=runs/quickstart --step=40 --row=3
  python -m launch.reproduce --run=DIR --step=1 --row=0 --stage=grpo --json

Starts from the newest checkpoint before the step, or from the start of the
stage, and makes the steps between again; the run's folder stays as it is. Row
K is line K, from 0, of samples/STAGE/STEP.jsonl. Ends with 1 if the sample is
not the one that the run has kept, as on another machine or mesh.
"""

import json
import logging
import sys

import rich.console
import rich.table
from absl import flags

from jaxpost.hardware import host

_RUN = flags.DEFINE_string('run', None, 'Folder of a run.')
_STEP = flags.DEFINE_integer('step', None, 'From 1.')
_ROW = flags.DEFINE_integer('row', 0, 'Sample of that step, from 0.')
_STAGE = flags.DEFINE_string('stage', '', 'Default: the last.')
_JSON = flags.DEFINE_bool('json', False, 'One JSON object.')
flags.mark_flags_as_required(['run', 'step'])
_SAID = {
  None: 'the run has kept no sample of this step to compare with',
  True: 'identical to what the run has kept',
  False: 'NOT what the run has kept',
}


def show(found, console):
  """Prompt and tokens as a table, then the figures."""
  console.print(found['prompt'], style='dim', markup=False)
  table = rich.table.Table('token', 'text', 'log-prob', 'advantage')
  for i, text, logprob, advantage, trained in zip(
    *(found[k] for k in ('ids', 'texts', 'logprobs', 'advantages', 'trained'))
  ):
    table.add_row(str(i), repr(text), f'{logprob:.6f}', f'{advantage:.4f}' if trained else '-')
  console.print(table)
  for key in (
    'reward',
    'components',
    'error',
    'advantage',
    'loss',
    'loss_of_update',
    'loss_share',
    'finished',
    'version',
  ):
    console.print(f'{key}: {found[key]}', markup=False, highlight=False)


def main(argv):
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  host.tune_host()
  host.use_compile_cache()
  import jaxpost
  from jaxpost.tools import reproduce

  found = reproduce.reproduce(_RUN.value, _STEP.value, _ROW.value, _STAGE.value, jaxpost.choose_mesh)
  if _JSON.value:
    print(json.dumps(found, default=str))
  else:
    show(found, rich.console.Console(soft_wrap=True))
  print(_SAID[found['identical']], file=sys.stderr)
  if found['identical'] is False:
    sys.exit(1)


if __name__ == '__main__':
  from . import exits

  exits.run(main)
