"""Memory of a run: what its programs will need, what was in use, and what this host has left.

All bytes are of one device, except those of `free_on_host`.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxpost.types import Batch

# Programs that run while the sampler's weights and cache are there.
SAMPLING = ('reshard', 'init_state', 'prefill', 'insert', 'extend', 'generate', 'verify', 'move')
START = ('init', 'copy', 'random')  # when not everything is there yet
# Controller of a control group, '' in version 2: its files of the limit and of what is used, and the figure of its
# cache of files in memory.stat, which is freed when needed.
_GROUPS = {
  '': ('memory.max', 'memory.current', 'inactive_file'),
  'memory': ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'),
}


def size(tree: Any, device: jax.Device | None = None) -> int:
  """Returns the bytes on a device of arrays or ShapeDtypeStructs; with `device`, only of those that it holds."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
    if device is None or device in x.sharding.device_set
  )


def can_offload(device: jax.Device) -> bool:
  """Returns True if the device can keep arrays in pinned memory of its host."""
  return 'pinned_host' in {m.kind for m in device.addressable_memories()}


def distinct(*trees: Any) -> dict[int, Any]:
  """Returns the arrays of several trees by identity: roles share what they do not train, which counts once."""
  return {id(x): x for x in jax.tree.leaves(trees)}


def batches(args: Iterable[Any]) -> int:
  """Returns the bytes of the batches among the arguments of a program."""
  return sum(size(x) for x in args if isinstance(x, Batch))


def predict(
  rows: list[dict], held: int, offloaded: int = 0, sampler: int = 0, overlap: bool = False, preserved: int = 0
) -> dict[str, int]:
  """Returns {program: most bytes in use while it runs}; 'peak' is the largest of them.

  Args:
    rows: of a `compile.Ledger`, of programs on the same devices. Each gets 'in_use_bytes'.
    held: parameters, optimizer states and frozen models, which stay.
    offloaded: bytes of `held` that are in host memory while sampling.
    sampler: its weights and cache, except what is in `held`; 0: it has other devices.
    preserved: the sampler's weights for the next rollout, which stay while an evaluation samples from others.
    overlap: the sampler is there while the others run, too; see `rl/rollout_queue.py`.
  """
  prefix = max((r['output_bytes'] for r in rows if r['program'] == 'prefill'), default=0)
  # All weights wait here for their transfer if the sampler has other devices.
  moved = 0 if sampler else sum(r['output_bytes'] * r['calls_per_step'] for r in rows if r['program'] == 'reshard')
  out: dict[str, int] = {}
  for row in rows:
    name = row['program']
    more = row['temp_bytes']
    if name in START:
      more += row['argument_bytes'] + row['output_bytes'] - row['alias_bytes']
    elif name in SAMPLING:
      more += held - offloaded + sampler + preserved + prefix
      # The outputs of the others are counted in `sampler` and `prefix`.
      if name == 'reshard':
        more += moved
      elif name not in ('init_state', 'prefill'):
        more += row['output_bytes'] - row['alias_bytes']
    else:
      more += held + row['batch_bytes'] + row['output_bytes'] - row['alias_bytes']
      more += sampler if overlap else 0
    row['in_use_bytes'] = more
    if name not in START:
      out[name] = max(out.get(name, 0), more)
  return out | {'peak': max(out.values(), default=held)}


@dataclasses.dataclass(frozen=True)
class Memory:
  """Predicted memory, beside the measured peak."""

  predicted: dict[str, int]

  def __call__(self) -> dict[str, int]:
    return {'memory/predicted_bytes': self.predicted['peak'], **peak()}


def peak() -> dict[str, int]:
  """Returns {'memory/peak_bytes': most so far}, of the fullest device of this process.

  CPU devices have no statistics; there it is the peak of the process.
  """
  stats = [d.memory_stats() for d in jax.local_devices()]
  if all(s and 'peak_bytes_in_use' in s for s in stats):
    return {'memory/peak_bytes': max(s['peak_bytes_in_use'] for s in stats)}
  most = _of_proc('self/status', 'VmHWM')
  return {} if most is None else {'memory/peak_bytes': most}


def free_on_host(root: str = '/') -> float:
  """Returns the bytes that this process can still get: what the host has free, or what a limit of its container leaves.

  inf where the system, whose /proc and /sys are below `root`, does not tell.
  """
  free = _of_proc('meminfo', 'MemAvailable', root)
  return min([math.inf if free is None else free, *_left_in_groups(pathlib.Path(root))])


def _left_in_groups(root: pathlib.Path) -> Iterator[float]:
  """Yields what the control groups of this process, and those around them, leave of their limits, in bytes."""
  for line in _lines(root / 'proc/self/cgroup'):
    _, controller, name = line.split(':', 2)  # 'N:memory:/docker/ID' of version 1, '0::/ID' of version 2
    if controller not in _GROUPS:
      continue
    top = root / 'sys/fs/cgroup' / controller
    limit_file, used_file, cache = _GROUPS[controller]
    # A container sees its own group at `top`, often under a name that only the host knows.
    group = top / name.lstrip('/')
    for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
      limit = ''.join(_lines(folder / limit_file))
      used = ''.join(_lines(folder / used_file))
      if limit.isdigit() and used.isdigit():  # not 'max', and not the group of all, which has no such files
        figures = dict(line.split() for line in _lines(folder / 'memory.stat'))
        yield max(0, int(limit) - int(used) + int(figures.get(cache, 0)))


def _of_proc(file: str, name: str, root: str = '/') -> int | None:
  """Returns a figure of a file in /proc in bytes; None where there is no such file or figure."""
  lines = _lines(pathlib.Path(root, 'proc', file))
  return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f'{name}:')), None)


def _lines(path: pathlib.Path) -> list[str]:
  try:
    return path.read_text('utf-8', 'replace').splitlines()
  except OSError:
    return []
