"""Examines this machine for a run (versions, devices, memory, kernels, disk), and says how to fix each problem."""

import dataclasses
import glob
import importlib.util
import pathlib
import resource
import shutil
import socket
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxpost.distributed import coordination
from jaxpost.errors import InputError
from jaxpost.hardware import chips, host, memory
from jaxpost.monitor import start
from jaxpost.storage import object_store

_OPTIONAL = {
  'pyarrow': ('data', 'parquet and arrow files'),
  'array_record': ('data', 'array_record files'),
  'math_verify': ('math', 'the reward math_verify'),
  'jsonschema': ('rewards', 'the reward json_schema'),
  'wandb': ('wandb', 'config.log.trackers=wandb'),
  'trackio': ('trackio', 'config.log.trackers=trackio'),
  'mlflow': ('mlflow', 'config.log.trackers=mlflow'),
}
_GIB = 2**30
_REDUCED = 2**24  # bytes per device
_FEW_FILES = 1024  # a run with many workers has more files open


@dataclasses.dataclass(frozen=True)
class Finding:
  """One line: the subject, what was found, and what to do ('' if nothing is wrong)."""

  what: str
  found: str
  fix: str = ''


def examine(workdir: str) -> list[Finding]:
  """Returns the findings on this machine and between hosts; runs small programs on the devices.

  If several processes are connected, all must call this.

  Args:
    workdir: where runs are to be written; it need not exist yet.
  """
  return [*_software(), *_devices(), *_kernels(), *_host(workdir), *_network()]


def _software() -> list[Finding]:
  packages = ', '.join(f'{name} {version}' for name, version in start.versions().items())
  python = f'{sys.version_info.major}.{sys.version_info.minor}'
  out = [Finding('Python', python), Finding('versions', packages), Finding('commit', start.commit() or 'no clone')]
  missing = [
    f"{use} (pip install -e '.[{extra}]')"
    for name, (extra, use) in _OPTIONAL.items()
    if importlib.util.find_spec(name) is None
  ]
  return [*out, Finding('not installed', '; '.join(missing) or 'nothing that is optional')]


def _devices() -> list[Finding]:
  devices = jax.local_devices()
  kind, platform = devices[0].device_kind, devices[0].platform
  fix = ''
  if platform == 'cpu' and glob.glob('/dev/nvidia[0-9]*'):
    fix = "there is an NVIDIA GPU that JAX does not use; pip install -e '.[cuda]', and unset JAX_PLATFORMS"
  elif platform == 'cpu' and (glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*')):
    fix = "there may be a TPU that JAX does not use; pip install -e '.[tpu]', and unset JAX_PLATFORMS"
  out = [Finding('devices', f'{len(devices)} x {kind} ({platform})', fix)]
  stats = devices[0].memory_stats() or {}
  if 'bytes_limit' in stats:
    used = f'{stats["bytes_in_use"] / _GIB:.1f} of {stats["bytes_limit"] / _GIB:.1f} GiB in use'
    out.append(Finding('device memory', used))
  chip = chips.of_kind(kind)
  if platform != 'cpu' and not chip:
    out.append(Finding('peak', 'unknown', f'{kind} is not in hardware/chips.py, so there is no MFU and no plan for it'))
  return out


def _kernels() -> list[Finding]:
  """Compares the platform's kernels for attention and experts with XLA on small shapes."""
  from jaxpost.hardware import kernel_check, layer_check
  from jaxpost.matmul import compute_for
  from jaxpost.models import presets

  triton = not chips.before_ampere(jax.devices()[0])
  compute = compute_for(jax.default_backend(), 'bfloat16', 'none', triton=triton)
  if not compute.uses_kernel:
    return [Finding('attention', f"{compute.attention}: XLA's own, nothing to check")]
  model = presets.PRESETS['tiny']
  verified = kernel_check.verify(compute, [kernel_check.KernelUse(model, 256)], [model])
  fix = 'the kernel was wrong for a shape here; runs use XLA there, which is slower'
  out = [Finding('attention', compute.attention, fix if verified != compute else '')]
  if compute.grouped_kernel:
    experts = layer_check.verify(compute, [presets.PRESETS['tiny_moe']])
    out.append(Finding('experts', layer_check.EXPERTS, fix if experts != compute else ''))
  return out


def _host(workdir: str) -> list[Finding]:
  free = memory.free_on_host()
  fix = 'below 2 GiB; end other programs' if free < 2 * _GIB else ''
  out = [Finding('host memory', f'{free / _GIB:.1f} GiB free', fix)]
  out += [_disk_of_runs(workdir), _disk('disk of compiled programs', host.use_compile_cache())]
  open_files, limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: no limit
  fix = ''
  if 0 < open_files < _FEW_FILES:
    fix = f'raise it: ulimit -n {min(limit, 65536) if limit > 0 else 65536}'
  return [*out, Finding('open files', str(open_files), fix)]


def _disk_of_runs(workdir: str) -> Finding:
  """Examines the disk of a folder for runs, which is checked as in training."""
  try:
    folder = object_store.check_workdir(workdir)
  except InputError as error:
    return Finding('disk of runs', workdir or 'no folder', str(error))
  if object_store.is_remote(folder):
    return Finding('disk of runs', f'{workdir}, an object store that answers')
  return _disk('disk of runs', folder)


def _disk(what: str, path: epath.PathLike) -> Finding:
  folder = pathlib.Path(path).expanduser().absolute()
  existing = next(p for p in (folder, *folder.parents) if p.exists())
  free = shutil.disk_usage(existing).free
  fix = ''
  if free < 5 * _GIB:
    fix = f'below 5 GiB; a checkpoint needs 12 bytes a parameter, choose another folder than {existing}'
  return Finding(what, f'{free / _GIB:.1f} GiB free in {existing}', fix)


def _network() -> list[Finding]:
  """Examines whether the hosts are equal, and the speed of messages and reductions between them."""
  if coordination.process_count() == 1:
    return [Finding('hosts', 'one; give --distributed or --coordinator on each to examine several')]
  this_host = {'host': socket.gethostname(), 'devices': len(jax.local_devices()), 'versions': start.versions()}
  hosts = coordination.all_gather(this_host)
  names = ', '.join(f'{i}: {host["host"]} ({host["devices"]} devices)' for i, host in enumerate(hosts))
  out = [Finding('hosts', names, _unlike(hosts))]
  start_time = time.perf_counter()
  coordination.all_gather(0)
  out.append(Finding('message to all hosts and back', f'{1e3 * (time.perf_counter() - start_time):.1f} ms'))
  seconds = _reduce_seconds()
  speed = f'{seconds * 1e3:.1f} ms, {_REDUCED / seconds / 1e9:.2f} GB/s a device'
  return [*out, Finding(f'all-reduce of {_REDUCED >> 20} MiB a device', speed)]


def _unlike(hosts: list[dict]) -> str:
  """Returns what to do about hosts that differ in what must be equal; '' if none does."""
  for i, other in enumerate(hosts):
    for key in 'versions', 'devices':
      if other[key] != hosts[0][key]:
        return f'{key} of process {i} are {other[key]}, and of process 0 {hosts[0][key]}; make them equal'
  return ''


def _reduce_seconds() -> float:
  """Returns the seconds of a compiled sum over all devices of all hosts."""
  mesh = jax.make_mesh((jax.device_count(),), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  shape = (jax.device_count(), _REDUCED // 4)
  sharding = jax.NamedSharding(mesh, jax.P('data'))
  values = jax.make_array_from_callback(shape, sharding, lambda index: np.ones((1, shape[1]), np.float32))
  jax.block_until_ready(jnp.sum(values, axis=0))
  start_time = time.perf_counter()
  jax.block_until_ready(jnp.sum(values, axis=0))
  return time.perf_counter() - start_time
