"""Flags that connect the processes of a run: --distributed, --coordinator and their details."""

from __future__ import annotations

from typing import NamedTuple

from absl import flags

from jaxpost.errors import InputError

flags.disclaim_key_flags()  # the flags belong to the command that defines them


class ClusterFlags(NamedTuple):
  """The flags of a command that runs as one of several processes."""

  distributed: flags.FlagHolder
  coordinator: flags.FlagHolder
  num_processes: flags.FlagHolder
  process_id: flags.FlagHolder
  cluster: flags.FlagHolder
  init_timeout_s: flags.FlagHolder
  heartbeat_s: flags.FlagHolder

  def connect(self):
    """Joins the other processes if the flags ask for it."""
    if not (self.distributed.value or self.coordinator.value or self.cluster.value):
      for flag in self.num_processes, self.process_id:
        if flag.value is not None:
          raise InputError(f'--{flag.name} does nothing without --coordinator; give it, too, or leave both out')
      return
    from jaxpost.distributed import cluster

    cluster.connect(
      self.coordinator.value,
      self.num_processes.value,
      self.process_id.value,
      cluster=self.cluster.value,
      init_s=self.init_timeout_s.value,
      heartbeat_s=self.heartbeat_s.value,
    )


def define() -> ClusterFlags:
  """Defines the flags for the calling command."""
  return ClusterFlags(
    distributed=flags.DEFINE_bool(
      'distributed', False, 'Run as one of several processes in a cluster that JAX detects.'
    ),
    coordinator=flags.DEFINE_string('coordinator', '', 'HOST:PORT of process 0, if JAX does not detect the cluster.'),
    num_processes=flags.DEFINE_integer('num_processes', None, 'How many processes; with --coordinator.', lower_bound=1),
    process_id=flags.DEFINE_integer(
      'process_id', None, 'Rank of this process, from 0; with --coordinator.', lower_bound=0
    ),
    cluster=flags.DEFINE_string(
      'cluster',
      '',
      'How JAX finds the other processes; "": by itself (TPU, GKE, Slurm, Open MPI); "mpi4py": any other MPI.',
    ),
    init_timeout_s=flags.DEFINE_float(
      'init_timeout_s',
      300.0,
      'Seconds to wait for all processes at the start; then the run ends and names those that are missing.',
      lower_bound=1.0,
    ),
    heartbeat_s=flags.DEFINE_float(
      'heartbeat_s',
      100.0,
      'Seconds without a heartbeat after which a process counts as lost; the others end and name it.',
      lower_bound=3.0,
    ),
  )
