"""Times a standard workload on this machine: sft, sample or grpo, or a part of it.

  python -m launch.bench sft|sample|grpo|reshard|turns|prefill --shape=s --bf16
  srun python -m launch.bench sft --distributed --batch=64 >> runs.jsonl
  python -m launch.bench scaling --processes=1,2 or --records=runs.jsonl

Prints one line of JSON; jaxpost/tools/{bench,scaling}.py explain its keys.
"""

import dataclasses
import json
import os
import sys
import tempfile

from absl import flags

from jaxpost import errors
from jaxpost.hardware import host

from . import cluster_flags, exits, workload_flags

workload_flags.define()
_TUNE = flags.DEFINE_bool('tune', True, 'Tune the memory allocator of the host.')
_CORE = flags.DEFINE_integer('core', None, 'Use this CPU core only.')
_COUNTS = flags.DEFINE_list('processes', ['1', '2'], 'Numbers of processes to compare; with scaling.')
_WORKLOADS = flags.DEFINE_list('workloads', ['sft', 'grpo'], 'Workloads to time; with scaling.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Repetitions, of which the fastest counts; with scaling.')
_RECORDS = flags.DEFINE_string('records', '', 'File of printed lines to evaluate instead of timing; with scaling.')
_CLUSTER = cluster_flags.define()

WHAT = ('sft', 'sample', 'grpo', 'reshard', 'turns', 'prefill')


def scale():
  """Compares throughput over numbers of processes, and prints the table."""
  from jaxpost.tools import scaling

  if _RECORDS.value:
    rows = scaling.recorded(_RECORDS.value)
  else:
    rows = []
    for what in _WORKLOADS.value:
      plan = scaling.Plan(
        what=what,
        counts=tuple(map(int, _COUNTS.value)),
        batch=flags.FLAGS.batch,
        rounds=_ROUNDS.value,
        flags=tuple(f'--{name}={flags.FLAGS[name].value}' for name in workload_flags.PASSED_ON),
      )
      rows += scaling.measure(plan)
  print(scaling.table(rows), file=sys.stderr)
  print(json.dumps(rows))


def main(argv):
  """Times the workload that the first argument names."""
  if len(argv) != 2 or argv[1] not in (*WHAT, 'scaling'):
    raise errors.InputError(f'say what to time: python -m launch.bench {"|".join(WHAT)}|scaling [flags]')
  if argv[1] == 'scaling':
    return scale()
  if _CORE.value is not None:
    os.sched_setaffinity(0, {_CORE.value})
  if _TUNE.value:
    host.tune_host()
  host.use_compile_cache()
  from jaxpost.distributed import coordination
  from jaxpost.tools import bench

  _CLUSTER.connect()
  options = bench.Options(**{f.name: flags.FLAGS[f.name].value for f in dataclasses.fields(bench.Options)})
  with tempfile.TemporaryDirectory() as workdir:
    found = bench.run(argv[1], options, workdir) | {'tuned': _TUNE.value}
  if coordination.process_index() == 0:
    print(json.dumps(found))


if __name__ == '__main__':
  exits.run(main, words=1)
