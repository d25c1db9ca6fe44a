"""Times the standard workload: sft, sample or grpo; or a part of it.

  python -m launch.bench sft|sample|grpo|reshard|turns|prefill --shape=s --bf16
  srun python -m launch.bench sft --distributed --batch=64 >> runs.jsonl
  python -m launch.bench scaling --processes=1,2 or --records=runs.jsonl

Prints one JSON line; jaxpost/{bench,scaling}.py say what is counted.
"""

import dataclasses
import json
import os
import sys
import tempfile

from absl import flags

from jaxpost import errors
from jaxpost.hardware import host

flags.DEFINE_enum('shape', 'xs', ['tiny', 'xs', 's'], 'Size of the model.')
_BATCH = flags.DEFINE_integer('batch', 16, 'Rows, sequences, completions.')
flags.DEFINE_integer('steps', 5, 'Timed steps.')
flags.DEFINE_integer('prompt', 60, 'Its tokens.')
flags.DEFINE_integer('new', 128, 'Tokens of a completion.')
flags.DEFINE_integer('samples', 0, 'Completions; 0: as many as --batch.')
flags.DEFINE_bool('ragged', False, 'Geometric lengths.')
flags.DEFINE_integer('mean', 64, 'Their mean.')
flags.DEFINE_bool('bf16', False, 'Operands; weights are float32.')
flags.DEFINE_float('top_p', 1.0, 'Nucleus of sampling.')
flags.DEFINE_string('mesh', 'fsdp=-1', 'As config.mesh.train.')
_TUNE = flags.DEFINE_bool('tune', True, 'Tune the allocator of the host.')
_CORE = flags.DEFINE_integer('core', None, 'Use this core only.')
_COUNTS = flags.DEFINE_list('processes', ['1', '2'], 'For scaling: how many.')
_WHAT = flags.DEFINE_list('workloads', ['sft', 'grpo'], 'For scaling.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'For scaling; the best counts.')
_RECORDS = flags.DEFINE_string('records', '', 'For scaling: printed lines.')
flags.DEFINE_bool('distributed', False, 'As in launch.train; so are these:')
flags.DEFINE_string('coordinator', '', '')
flags.DEFINE_integer('num_processes', None, '')
flags.DEFINE_integer('process_id', None, '')

WHAT = ('sft', 'sample', 'grpo', 'reshard', 'turns', 'prefill')
PASSED = 'shape steps prompt new ragged mean bf16 top_p mesh tune'.split()


def scale():
  from jaxpost.tools import scaling

  rest = (
    tuple(map(int, _COUNTS.value)),
    _BATCH.value,
    _ROUNDS.value,
    tuple(f'--{n}={flags.FLAGS[n].value}' for n in PASSED),
  )
  rows = (
    scaling.recorded(_RECORDS.value)
    if _RECORDS.value
    else sum((scaling.measure(scaling.Plan(what, *rest)) for what in _WHAT.value), [])
  )
  print(scaling.table(rows), file=sys.stderr)
  print(json.dumps(rows))


def main(argv):
  if len(argv) != 2 or argv[1] not in (*WHAT, 'scaling'):
    raise errors.InputError(f'say what to time: python -m launch.bench {"|".join(WHAT)}|scaling [flags]')
  if argv[1] == 'scaling':
    return scale()
  if _CORE.value is not None:
    os.sched_setaffinity(0, {_CORE.value})
  if _TUNE.value:
    host.tune_host()
  host.use_compile_cache()
  from jaxpost.distributed import cluster, coordination
  from jaxpost.tools import bench

  if (given := flags.FLAGS).distributed or given.coordinator:
    cluster.connect(given.coordinator, given.num_processes, given.process_id)
  options = bench.Options(**{f.name: given[f.name].value for f in dataclasses.fields(bench.Options)})
  with tempfile.TemporaryDirectory() as workdir:
    found = bench.run(argv[1], options, workdir) | {'tuned': _TUNE.value}
  if coordination.process_index() == 0:
    print(json.dumps(found))


if __name__ == '__main__':
  from . import exits

  exits.run(main, words=1)
