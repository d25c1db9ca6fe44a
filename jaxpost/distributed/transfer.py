"""Arrays between hosts, devices and meshes; `bridge.py` copies weights to a mesh of other devices."""

from typing import Any

import jax
import numpy as np

from jaxpost.distributed import coordination
from jaxpost.distributed.mesh import Layout


def relabelled(x: Any, sharding: jax.sharding.Sharding) -> Any:
  """The buffers of `x` under an equivalent sharding, of another mesh or spelling.

  A program whose kernels have partitioning rules of their own takes arrays of one mesh only.
  """
  if x.sharding == sharding:
    return x
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  return jax.make_array_from_single_device_arrays(
    x.shape, sharding, [shard.data for shard in x.addressable_shards], dtype=x.dtype
  )


def to_host(tree: Any, share: bool = True) -> Any:
  """Device arrays as numpy arrays, also where other processes hold some shards.

  With `share` every process calls this and gets the arrays, even without one of their devices; otherwise only the
  processes that have some of them.
  """
  leaves, treedef = jax.tree.flatten(tree)
  found = list(leaves)
  few: dict[int, list[int]] = {}  # {a process: places of leaves that it has and some others lack}
  for i, x in enumerate(leaves):
    if not isinstance(x, jax.Array):
      found[i] = np.asarray(x)
      continue
    mine = coordination.owners(x.sharding.device_set)
    if share and len(mine) < coordination.process_count():
      few.setdefault(mine[0], []).append(i)
    if coordination.process_index() in mine or not share:
      found[i] = _fetch(x)
  for owner, which in few.items():
    from jaxpost.distributed import channel  # for several processes

    sent = None
    if coordination.process_index() == owner:
      sent = b''.join(np.ascontiguousarray(found[i]).tobytes() for i in which)
    sent, at = memoryview(channel.broadcast_bytes(owner, sent)), 0
    for i in which:
      x = leaves[i]
      found[i] = np.frombuffer(sent, x.dtype, x.size, at).reshape(x.shape) if x.size else (np.zeros(x.shape, x.dtype))
      at += x.nbytes
  return treedef.unflatten(found)


def _fetch(x: jax.Array) -> np.ndarray:
  if x.is_fully_addressable:
    return np.asarray(x)
  if x.is_fully_replicated:
    return np.asarray(x.addressable_data(0))
  from jax.experimental import multihost_utils

  return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def move(layout: Layout, tree: Any, *axes: str | None) -> Any:
  """Device arrays in `layout`; those that are in it already stay as they are."""
  leaves = jax.tree.leaves(tree)
  if leaves and jax.process_count() > 1 and leaves[0].sharding.device_set != set(layout.mesh.devices.flat):
    return layout.put(to_host(tree), *axes)
  return jax.tree.map(lambda x: jax.device_put(x, layout.sharding(axes[: x.ndim], x.shape)), tree)
