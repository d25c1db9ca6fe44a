"""Moves arrays between hosts, devices and meshes; `bridge.py` copies weights to a mesh of other devices."""

from typing import Any

import jax
import numpy as np

from jaxpost.distributed import coordination
from jaxpost.distributed.mesh import Layout


def relabelled(x: Any, sharding: jax.sharding.Sharding) -> Any:
  """Returns `x` with an equivalent sharding, of another mesh or written differently, without copying its buffers.

  Programs whose kernels have custom partitioning rules take arrays of one mesh only.
  """
  if x.sharding == sharding:
    return x
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  return jax.make_array_from_single_device_arrays(
    x.shape, sharding, [shard.data for shard in x.addressable_shards], dtype=x.dtype
  )


def to_host(tree: Any, share: bool = True) -> Any:
  """Returns device arrays as numpy arrays, even if other processes have some of their shards.

  With `share`, all processes call this and get the arrays, even processes without a device of an array. Without it,
  only processes that have devices of the arrays call it.
  """
  leaves, treedef = jax.tree.flatten(tree)
  arrays = list(leaves)
  to_broadcast: dict[int, list[int]] = {}  # {sender: indices of leaves that it has and some other process lacks}
  for i, x in enumerate(leaves):
    if not isinstance(x, jax.Array):
      arrays[i] = np.asarray(x)
      continue
    owners = coordination.owners(x.sharding.device_set)
    if share and len(owners) < coordination.process_count():
      to_broadcast.setdefault(owners[0], []).append(i)
    if coordination.process_index() in owners or not share:
      arrays[i] = _fetch(x)
  for sender, indices in to_broadcast.items():
    from jaxpost.distributed import channel  # not imported in runs of one process

    data = None
    if coordination.process_index() == sender:
      data = b''.join(arrays[i].tobytes() for i in indices)
    data, offset = memoryview(channel.broadcast_bytes(sender, data)), 0
    for i in indices:
      x = leaves[i]
      flat = np.frombuffer(data, x.dtype, x.size, offset) if x.size else np.zeros(0, x.dtype)
      arrays[i] = flat.reshape(x.shape)
      offset += x.nbytes
  return treedef.unflatten(arrays)


def _fetch(x: jax.Array) -> np.ndarray:
  if x.is_fully_addressable:
    return np.asarray(x)
  if x.is_fully_replicated:
    return np.asarray(x.addressable_data(0))
  from jax.experimental import multihost_utils

  return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def move(layout: Layout, tree: Any, *axes: str | None) -> Any:
  """Returns device arrays in `layout`; arrays that are already in it are not copied."""
  leaves = jax.tree.leaves(tree)
  if leaves and jax.process_count() > 1 and leaves[0].sharding.device_set != set(layout.mesh.devices.flat):
    return layout.put(to_host(tree), *axes)
  return jax.tree.map(lambda x: jax.device_put(x, layout.sharding(axes[: x.ndim], x.shape)), tree)
