"""Flags that connect the processes of a run: --distributed, --coordinator and their details."""

from __future__ import annotations

from absl import flags

from jaxpost.errors import InputError

flags.disclaim_key_flags()  # the flags belong to the command that defines them


def define() -> None:
  """Defines the flags for the calling command."""
  flags.DEFINE_bool('distributed', False, 'Run as one of several processes in a cluster that JAX detects.')
  flags.DEFINE_string('coordinator', '', 'HOST:PORT of process 0, if JAX does not detect the cluster.')
  flags.DEFINE_integer('num_processes', None, 'How many processes; with --coordinator.', lower_bound=1)
  flags.DEFINE_integer('process_id', None, 'Rank of this process, from 0; with --coordinator.', lower_bound=0)
  flags.DEFINE_string(
    'cluster',
    '',
    'How JAX finds the other processes; "": by itself (TPU, GKE, Slurm, Open MPI); "mpi4py": any other MPI.',
  )
  flags.DEFINE_float(
    'init_timeout_s',
    300.0,
    'Seconds to wait for all processes at the start; then the run ends and names those that are missing.',
    lower_bound=1.0,
  )
  flags.DEFINE_float(
    'heartbeat_s',
    100.0,
    'Seconds without a heartbeat after which a process counts as lost; the others end and name it.',
    lower_bound=3.0,
  )


def connect() -> None:
  """Connects to the other processes if the flags say so; InputError for a flag without effect."""
  values = flags.FLAGS
  if not (values.distributed or values.coordinator or values.cluster):
    for name in 'num_processes', 'process_id':
      if values[name].value is not None:
        raise InputError(f'--{name} does nothing without --coordinator; give both, or leave out this flag')
    return
  from jaxpost.distributed import cluster

  cluster.connect(
    values.coordinator,
    values.num_processes,
    values.process_id,
    cluster=values.cluster,
    init_s=values.init_timeout_s,
    heartbeat_s=values.heartbeat_s,
  )
