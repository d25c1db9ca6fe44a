"""Times the standard workload on this machine: sft, sample or grpo.

  python -m launch.bench sft|sample|grpo --shape=s --bf16
  srun python -m launch.bench sft --distributed --batch=64 >> runs.jsonl

Prints one line of JSON; jaxpost/tools/bench.py explains its keys. The folder benchmarks/
of a clone compares such lines over numbers of processes, and times parts of the sampler.
"""

import json
import os
import tempfile

from absl import flags

from jaxpost import errors
from jaxpost.hardware import host

from . import cluster_flags, exits, workload_flags

workload_flags.define()
_CORE = flags.DEFINE_integer('core', None, 'Use this CPU core only.')
_CLUSTER = cluster_flags.define()

WORKLOADS = ('sft', 'sample', 'grpo')


def main(argv):
  """Times the workload that the first argument names."""
  if len(argv) != 2 or argv[1] not in WORKLOADS:
    raise errors.InputError(f'name a workload: python -m launch.bench {"|".join(WORKLOADS)} [flags]')
  if _CORE.value is not None:
    os.sched_setaffinity(0, {_CORE.value})
  tune = flags.FLAGS.tune
  if tune:
    host.tune_host()
  host.use_compile_cache()
  from jaxpost.distributed import coordination
  from jaxpost.tools import bench

  _CLUSTER.connect()
  with tempfile.TemporaryDirectory() as workdir:
    found = bench.run(argv[1], workload_flags.options(), workdir) | {'tuned': tune}
  if coordination.process_index() == 0:
    print(json.dumps(found))


if __name__ == '__main__':
  exits.run(main, words=1)
