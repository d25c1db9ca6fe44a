"""Connects the processes of a run through `jax.distributed`, with readable errors.

A process that does not connect in time is named on all the others; `peers.py` has the heartbeats of connected ones.
"""

import atexit
import contextlib
import functools
import importlib.util
import os
import re
import socket
import tempfile

import jax
from jax._src import distributed  # the service has no public name

from jaxpost import errors
from jaxpost.distributed import channel, peers

_TRANSFER_TIMEOUT_S = 3600  # weights wait for a process that still samples


def connect(
  address: str = '',
  count: int | None = None,
  index: int | None = None,
  *,
  cluster: str = '',
  init_s: float = 300.0,
  heartbeat_s: float = 100.0,
) -> None:
  """Connects to the other processes, before any device is used.

  Args:
    address: HOST:PORT of process 0; '' where JAX knows the cluster, and then
      it knows the rest, too.
    count: how many processes there are; index: which of them this is.
    cluster: JAX's detection method ('slurm', 'mpi4py', ...); '': any that fits.
    init_s: seconds that processes wait for each other at the start.
    heartbeat_s: a process without heartbeats for so long is gone, and all end.

  Raises:
    InputError: JAX does not know this cluster.
  """
  if 'proxy' in os.environ.get('JAX_PLATFORMS', ''):
    return _connect_pathways()
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  _open_for_transfers(address)
  where = address or os.environ.get('JAX_COORDINATOR_ADDRESS', '')
  try:
    with _names_absent(where, round(init_s)):
      jax.distributed.initialize(
        address or None,
        count,
        index,
        cluster_detection_method=cluster or None,
        initialization_timeout=round(init_s) + 2,
        # JAX's own timeout comes after ours, as it does not name the process.
        heartbeat_timeout_seconds=round(heartbeat_s) + 3,
      )
  except ValueError as e:  # something was neither given nor detected
    raise errors.InputError(
      f'--distributed: no cluster that JAX knows was found ({e}); give '
      '--coordinator=HOST:PORT, --num_processes and --process_id'
    ) from e
  state = distributed.global_state
  others = peers.Peers(state.client, state.process_id, state.num_processes, heartbeat_s, channel.failed_process)
  others.watch()
  channel.on_connected(others.who_is_gone)
  atexit.register(others.leave)  # registered last, so it runs first


def _open_for_transfers(address: str):
  """Lets `device_put` reach other processes on CPU, as it does on accelerators."""
  given = jax.config.values
  if given['jax_platforms'] != 'cpu' or (given['jax_cross_host_transfer_socket_address']):
    return
  there = (address or os.environ.get('JAX_COORDINATOR_ADDRESS', '')).rpartition(':')[0] or socket.gethostname()
  try:
    family, kind, *_, at = socket.getaddrinfo(there.strip('[]'), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
      probe.connect(at)  # sends nothing
      host = probe.getsockname()[0]
  except OSError as e:
    raise errors.InputError(
      f'--coordinator: {there}: {e.strerror}; give the HOST:PORT at which this host reaches process 0'
    ) from e
  with socket.socket(family) as free:
    free.bind((host, 0))
    port = free.getsockname()[1]
  host = f'[{host}]' if ':' in host else host
  jax.config.update('jax_cross_host_transfer_socket_address', f'{host}:{port}')
  jax.config.update('jax_cross_host_transport_addresses', f'{host}:0,{host}:0')
  jax.config.update('jax_cross_host_transfer_timeout_seconds', _TRANSFER_TIMEOUT_S)


def _connect_pathways():
  """Initializes Pathways, where a single process drives all hosts."""
  if importlib.util.find_spec('pathwaysutils') is None:
    raise errors.InputError('JAX_PLATFORMS=proxy asks for Pathways: pip install pathwaysutils')
  import pathwaysutils

  pathwaysutils.initialize()


@contextlib.contextmanager
def _names_absent(address: str, seconds: int):
  """Names the processes that do not connect, in place of JAX's page of text.

  JAX ends this process when it gives up. Its service prints the missing processes if it gives up before the clients do.
  Standard error is kept meanwhile, and shown unless it is understood.
  """
  service = distributed._jax
  make, stderr = service.get_distributed_runtime_service, os.dup(2)
  service.get_distributed_runtime_service = functools.partial(make, cluster_register_timeout=seconds)
  kept = tempfile.TemporaryFile()

  def restore() -> str:
    os.dup2(stderr, 2)
    kept.seek(0)
    return kept.read().decode(errors='replace')

  def explain():
    text = restore()
    found = re.search(r'timed out task names:\n((?:\d+\n)+)', text)
    hosts = os.environ.get('TPU_WORKER_HOSTNAMES', '').split(',')
    if found:
      absent = sorted(map(int, found[1].split()))
      names = [f'{i} on {hosts[i]}' if i < len(hosts) and hosts[i] else str(i) for i in absent]
      return (
        f'process {", ".join(names)} did not come to {address} within {seconds} s (--init_timeout_s); look at its log'
      )
    if 'newer incarnation' in text:
      return f'two processes came to {address} with one --process_id'
    if 'RegisterTask' in text:
      return (
        f'process 0 does not answer at {address} within {seconds} s '
        '(--init_timeout_s): is it started, can this host reach it?'
      )
    os.write(2, text.encode())
    return 'JAX gave up while it started (see above)'

  peers.on_abort(explain, stacks=False)
  os.dup2(kept.fileno(), 2)
  try:
    yield
  finally:
    os.write(2, restore().encode())
    service.get_distributed_runtime_service = make
