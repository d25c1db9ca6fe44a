"""Predicts the device memory that the programs of a run need, and measures its peak and the free memory of this host.

All bytes are those of one device, except for `free_on_host`.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

# Programs that run while the sampler's weights and cache are in memory.
SAMPLING = ('reshard', 'init_state', 'prefill', 'insert', 'extend', 'generate', 'verify', 'move')
START = ('init', 'copy', 'random')  # programs that run before all weights are in memory
# {controller of a control group, '' in version 2: (file of the limit, file of the usage, name in memory.stat of the
# file cache, which counts as used and is freed when needed)}
_GROUPS = {
  '': ('memory.max', 'memory.current', 'inactive_file'),
  'memory': ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'),
}


def size(tree: Any, device: jax.Device | None = None) -> int:
  """Returns the bytes per device of arrays or ShapeDtypeStructs; with `device`, only of those with a shard on it."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
    if device is None or device in x.sharding.device_set
  )


def can_offload(device: jax.Device) -> bool:
  """Returns whether the device can keep arrays in pinned memory of its host."""
  return 'pinned_host' in {m.kind for m in device.addressable_memories()}


def distinct(*trees: Any) -> dict[int, Any]:
  """Returns {id: array} of several trees, so that arrays that roles share count once."""
  return {id(x): x for x in jax.tree.leaves(trees)}


def predict(
  rows: list[dict], held: int, offloaded: int = 0, sampler: int = 0, overlap: bool = False, preserved: int = 0
) -> dict[str, int]:
  """Returns {program: most bytes in use while it runs}; 'peak' is the largest of them.

  Args:
    rows: rows of a `compile.Ledger` about programs on the same devices. Each gets 'in_use_bytes'.
    held: bytes of parameters, optimizer states and frozen models, which stay in memory.
    offloaded: bytes of `held` that are in host memory during sampling.
    sampler: bytes of the sampler's weights and cache that are not in `held`; 0 if it has other devices.
    preserved: bytes of the sampler's weights for the next rollout, which an evaluation with other weights preserves.
    overlap: whether the sampler also stays in memory while other programs run, see `rl/rollout_queue.py`.
  """
  prefix = max((r['output_bytes'] for r in rows if r['program'] == 'prefill'), default=0)
  # If the sampler has other devices, all of its weights are here before their transfer.
  moved = 0 if sampler else sum(r['output_bytes'] * r['calls_per_step'] for r in rows if r['program'] == 'reshard')
  out: dict[str, int] = {}
  for row in rows:
    name = row['program']
    in_use = row['temp_bytes']
    if name in START:
      in_use += row['argument_bytes'] + row['output_bytes'] - row['alias_bytes']
    elif name in SAMPLING:
      in_use += held - offloaded + sampler + preserved + prefix
      if name == 'reshard':
        in_use += moved
      elif name not in ('init_state', 'prefill'):  # whose outputs are counted in `sampler` and `prefix`
        in_use += row['output_bytes'] - row['alias_bytes']
    else:
      in_use += held + row['batch_bytes'] + row['output_bytes'] - row['alias_bytes']
      in_use += sampler if overlap else 0
    row['in_use_bytes'] = in_use
    if name not in START:
      out[name] = max(out.get(name, 0), in_use)
  return out | {'peak': max(out.values(), default=held)}


@dataclasses.dataclass(frozen=True)
class Memory:
  """Returns the predicted and the measured peak memory when called; `predicted` is that of `predict`."""

  predicted: dict[str, int]

  def __call__(self) -> dict[str, int]:
    return {'memory/predicted_bytes': self.predicted['peak'], **peak()}


def peak() -> dict[str, int]:
  """Returns {'memory/peak_bytes': peak so far} of the fullest device of this process.

  CPU devices have no statistics: for them it is the peak of the process, or {} if that is unknown.
  """
  stats = [d.memory_stats() for d in jax.local_devices()]
  if all(s and 'peak_bytes_in_use' in s for s in stats):
    return {'memory/peak_bytes': max(s['peak_bytes_in_use'] for s in stats)}
  process_peak = _of_proc('self/status', 'VmHWM')
  return {} if process_peak is None else {'memory/peak_bytes': process_peak}


def free_on_host(root: str = '/') -> float:
  """Returns the bytes that this process can still allocate, by the free memory of the host and limits of a container.

  It is inf if the system, whose /proc and /sys are below `root`, does not tell.
  """
  free = _of_proc('meminfo', 'MemAvailable', root)
  return min([math.inf if free is None else free, *_left_in_groups(pathlib.Path(root))])


def _left_in_groups(root: pathlib.Path) -> Iterator[float]:
  """Yields the bytes that this process's control groups, and their parents, have left of their limits."""
  for line in _lines(root / 'proc/self/cgroup'):
    _, controller, name = line.split(':', 2)  # 'N:memory:/docker/ID' of version 1, '0::/ID' of version 2
    if controller not in _GROUPS:
      continue
    top = root / 'sys/fs/cgroup' / controller
    limit_file, used_file, cache = _GROUPS[controller]
    # A container sees its own group at `top`; `name` may be the host's name of it, which does not exist here.
    group = top / name.lstrip('/')
    for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
      limit = ''.join(_lines(folder / limit_file))
      used = ''.join(_lines(folder / used_file))
      if limit.isdigit() and used.isdigit():  # not for the limit 'max', nor for the root group, which has no such files
        figures = dict(line.split() for line in _lines(folder / 'memory.stat'))
        yield max(0, int(limit) - int(used) + int(figures.get(cache, 0)))


def _of_proc(file: str, name: str, root: str = '/') -> int | None:
  """Returns a number of kB from a file in /proc, in bytes; None if there is no such file or number."""
  lines = _lines(pathlib.Path(root, 'proc', file))
  return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f'{name}:')), None)


def _lines(path: pathlib.Path) -> list[str]:
  try:
    return path.read_text('utf-8', 'replace').splitlines()
  except OSError:
    return []
