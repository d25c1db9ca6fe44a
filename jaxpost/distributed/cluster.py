"""Connects the processes of a run through `jax.distributed`, with readable errors.

If a process does not connect in time, all others name it. `peers.py` has the heartbeats of connected processes.
"""

import atexit
import contextlib
import functools
import os
import re
import socket
import tempfile

import jax
from jax._src import distributed  # the service has no public name

from jaxpost import errors
from jaxpost.distributed import channel, peers

_TRANSFER_TIMEOUT_S = 3600  # a transfer of weights may wait for a process that is still sampling


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
    address: HOST:PORT of process 0; '' if JAX detects the cluster, with `count` and `index`.
    cluster: JAX's detection method ('slurm', 'mpi4py', ...); '' for any that fits.
    init_s: seconds that processes wait for each other at the start.
    heartbeat_s: seconds without a heartbeat after which a process is gone, and all processes end.

  Raises:
    InputError: JAX does not know this cluster.
  """
  if 'proxy' in os.environ.get('JAX_PLATFORMS', ''):  # Pathways, where a single process drives all hosts
    try:
      import pathwaysutils
    except ImportError as e:
      raise errors.InputError('JAX_PLATFORMS=proxy asks for Pathways: pip install pathwaysutils') from e
    pathwaysutils.initialize()
    return
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  _open_for_transfers(address)
  coordinator = address or os.environ.get('JAX_COORDINATOR_ADDRESS', '')
  try:
    with _names_absent(coordinator, round(init_s)):
      jax.distributed.initialize(
        address or None,
        count,
        index,
        cluster_detection_method=cluster or None,
        initialization_timeout=round(init_s) + 2,
        # Later than the timeout of `Peers`, as JAX does not name the process.
        heartbeat_timeout_seconds=round(heartbeat_s) + 3,
      )
  except ValueError as e:  # an argument was neither given nor detected
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
  options = jax.config.values
  if options['jax_platforms'] != 'cpu' or options['jax_cross_host_transfer_socket_address']:
    return
  coordinator = (address or os.environ.get('JAX_COORDINATOR_ADDRESS', '')).rpartition(':')[0] or socket.gethostname()
  try:
    family, kind, *_, sockaddr = socket.getaddrinfo(coordinator.strip('[]'), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
      probe.connect(sockaddr)  # sends nothing, and selects the address by which this host reaches process 0
      host = probe.getsockname()[0]
  except OSError as e:
    raise errors.InputError(
      f'--coordinator: {coordinator}: {e.strerror}; give the HOST:PORT at which this host reaches process 0'
    ) from e
  with socket.socket(family) as free:
    free.bind((host, 0))
    port = free.getsockname()[1]
  host = f'[{host}]' if ':' in host else host
  jax.config.update('jax_cross_host_transfer_socket_address', f'{host}:{port}')
  jax.config.update('jax_cross_host_transport_addresses', f'{host}:0,{host}:0')
  jax.config.update('jax_cross_host_transfer_timeout_seconds', _TRANSFER_TIMEOUT_S)


@contextlib.contextmanager
def _names_absent(address: str, seconds: int):
  """Names the processes that do not connect, instead of JAX's page of text.

  JAX ends this process when it gives up. Its service prints the missing processes if it gives up before the clients do.
  Standard error is captured meanwhile, and printed if it has no known message.
  """
  service = distributed._jax
  make, stderr = service.get_distributed_runtime_service, os.dup(2)
  service.get_distributed_runtime_service = functools.partial(make, cluster_register_timeout=seconds)
  captured = tempfile.TemporaryFile()

  def restore() -> str:
    os.dup2(stderr, 2)
    captured.seek(0)
    return captured.read().decode(errors='replace')

  def explain():
    text = restore()
    timed_out = re.search(r'timed out task names:\n((?:\d+\n)+)', text)
    hosts = os.environ.get('TPU_WORKER_HOSTNAMES', '').split(',')
    if timed_out:
      absent = sorted(map(int, timed_out[1].split()))
      names = [f'{i} on {hosts[i]}' if i < len(hosts) and hosts[i] else str(i) for i in absent]
      return (
        f'process {", ".join(names)} did not come to {address} within {seconds} s (--init_timeout_s); look at its log'
      )
    if 'newer incarnation' in text:
      return f'two processes came to {address} with one --process_id'
    if 'RegisterTask' in text:
      limit = f'{seconds} s (--init_timeout_s)'
      return f'process 0 does not answer at {address} within {limit}: is it started, can this host reach it?'
    os.write(2, text.encode())
    return 'JAX gave up while it started (see above)'

  peers.on_abort(explain, stacks=False)
  os.dup2(captured.fileno(), 2)
  try:
    yield
  finally:
    os.write(2, restore().encode())
    service.get_distributed_runtime_service = make
