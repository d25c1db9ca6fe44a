"""Starts or resumes a run.

  python -m launch.train --config=configs/quickstart.py --workdir=runs/first

Change any field with --config.a.b=value. The same command resumes. The last
line printed is the object in WORKDIR/summary.json. On several hosts run the
same command on each with --distributed; `launch.local` does it on this one.
"""

import json
import logging

from absl import flags

from jaxpost.hardware import host

from . import config_flag

_CONFIG = config_flag.define_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run: new, or one to resume.')
_DISTRIBUTED = flags.DEFINE_bool('distributed', False, 'One of several processes, in a cluster jax knows.')
_COORDINATOR = flags.DEFINE_string('coordinator', '', 'HOST:PORT of process 0, where jax does not know it.')
_PROCESSES = flags.DEFINE_integer('num_processes', None, 'With --coordinator.', lower_bound=1)
_PROCESS = flags.DEFINE_integer('process_id', None, 'With --coordinator: 0, 1, ...', lower_bound=0)
_CLUSTER = flags.DEFINE_string(
  'cluster',
  '',
  'How jax finds the others: "" looks by itself (TPU, GKE, Slurm, Open MPI); "mpi4py" asks any other MPI.',
)
_INIT = flags.DEFINE_float(
  'init_timeout_s', 300.0, 'For all processes to come; then all end and the absent are named.', lower_bound=1.0
)
_HEARTBEAT = flags.DEFINE_float(
  'heartbeat_s', 100.0, 'A process not heard of for so long is gone: the others end and name it.', lower_bound=3.0
)
flags.mark_flags_as_required(['config', 'workdir'])


def main(argv):
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  host.tune_host()
  host.use_compile_cache()
  import jaxpost
  from jaxpost import stages
  from jaxpost.distributed import coordination

  if _DISTRIBUTED.value or _COORDINATOR.value or _CLUSTER.value:
    from jaxpost.distributed import cluster

    cluster.connect(
      _COORDINATOR.value,
      _PROCESSES.value,
      _PROCESS.value,
      cluster=_CLUSTER.value,
      init_s=_INIT.value,
      heartbeat_s=_HEARTBEAT.value,
    )
  summary = stages.run(_CONFIG.value, _WORKDIR.value, choose_mesh=jaxpost.choose_mesh)
  if coordination.process_index() == 0:
    print(json.dumps(summary))


if __name__ == '__main__':
  from . import exits

  exits.run(main)
