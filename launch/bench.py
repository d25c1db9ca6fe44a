"""Times the standard workload on this machine (sft, sample or grpo), or measures its accelerator.

  python -m launch.bench sft|sample|grpo --shape=s --bf16
  srun python -m launch.bench sft --distributed --batch=64 >> runs.jsonl
  python -m launch.bench accelerator --budget=40m --out=FILE

The first two print one line of JSON; jaxpost/tools/bench.py explains its keys. The folder benchmarks/ of a clone
compares such lines over numbers of processes, and times parts of the sampler. The third measures one accelerator
(docs/accelerators.md): rates, kernels, training and decoding, with a line of JSON in FILE for each row when it ends;
--rows chooses some of them. The exit code is 1 if a row failed.
"""

import json
import os
import re
import tempfile

from absl import flags

from jaxpost import errors
from jaxpost.hardware import host

from . import exits, workload_flags

_WORKLOAD = workload_flags.define()
_CORE = flags.DEFINE_integer('core', None, 'Use this CPU core only.', lower_bound=0)
_OUT = flags.DEFINE_string('out', '', 'accelerator: file of the rows.')
_BUDGET = flags.DEFINE_string('budget', '40m', 'accelerator: time for all rows, as in 90s or 40m.')
_TRACES = flags.DEFINE_string('traces', '', 'accelerator: folder for the profile of each row that has one.')
_ROWS = flags.DEFINE_string('rows', '', 'accelerator: rows to measure, with commas; a name means all below it.')
_TINY = flags.DEFINE_bool('tiny', False, 'accelerator: sizes for a CPU, which show that the rows run.')
exits.define_cluster_flags()

WORKLOADS = ('sft', 'sample', 'grpo', 'accelerator')


def main(argv):
  """Times the workload that the first argument names."""
  if len(argv) != 2 or argv[1] not in WORKLOADS:
    raise errors.InputError(f'name a workload: python -m launch.bench {"|".join(WORKLOADS)} [flags]')
  if _CORE.value is not None:
    os.sched_setaffinity(0, {_CORE.value})
  if argv[1] == 'accelerator':
    _accelerator()
    return
  exits.refuse(('out', 'budget', 'rows', 'tiny', 'traces'), f'with {argv[1]}')
  tune = flags.FLAGS.tune
  if tune:
    host.tune_host()
  host.use_compile_cache()
  from jaxpost.distributed import coordination
  from jaxpost.tools import bench

  exits.connect()
  with tempfile.TemporaryDirectory() as workdir:
    record = bench.run(argv[1], workload_flags.options(), workdir) | {'tuned': tune}
  if coordination.process_index() == 0:
    print(json.dumps(record))


def _accelerator():
  exits.refuse(_WORKLOAD, 'with accelerator, whose rows have their own sizes')
  from jaxpost.tools.accelerator import rows, supervisor

  if not _OUT.value:
    raise errors.InputError('name the file of the rows: --out=FILE')
  if not (budget := re.fullmatch(r'(\d+)([sm])', _BUDGET.value)):
    raise errors.InputError(f'--budget={_BUDGET.value}: write seconds or minutes, as in 90s or 40m')
  try:
    chosen = rows.chosen(_ROWS.value)
  except ValueError as e:
    raise errors.InputError(f'--rows: {e}') from e
  seconds = int(budget[1]) * {'s': 1, 'm': 60}[budget[2]]
  failed = supervisor.run(_OUT.value, seconds, _ROWS.value, _TINY.value, _TRACES.value)
  if failed:
    raise SystemExit(f'{failed} of {len(chosen)} rows failed; {_OUT.value} has the error of each')  # exit code 1


if __name__ == '__main__':
  exits.run(main, words=1)
