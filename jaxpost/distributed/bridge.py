"""Copies weights from the training devices to a phase that has its own devices.

A program first reshards them on the training devices to the layout of the other mesh. Then each shard is copied to its
device, inside one process or from one process to another.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxpost.distributed import coordination
from jaxpost.distributed.mesh import Layout
from jaxpost.errors import InputError

_COPIES = 'copies'  # mesh axis of a bridge's source, over which it has equal copies of the target's shards
WHOLE = ('data', 'fsdp')  # mesh axes of a sampling mesh over which weights are replicated


@dataclasses.dataclass(frozen=True)
class Bridge:
  """Copies weights from the training devices to a sampling mesh of other devices."""

  source: Layout  # on the training devices, with the shards of the target in one or more copies
  target: Layout  # on the other devices

  def arriving(self, tree: Any) -> Any:
    """Returns shapes, dtypes and shardings of the arrays that `__call__` returns."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(x)), tree)

  def __call__(self, tree):
    """Returns the arrays of `tree`, which are in the `source` layout, in the `target` layout."""
    leaves, treedef = jax.tree.flatten(tree)
    replicas = _replicas(self.target.mesh, WHOLE)
    copies = _replicas(self.source.mesh, (_COPIES,))
    copied = [copy(leaves, copies[i % len(copies)], replica) for i, replica in enumerate(replicas)]
    return treedef.unflatten(
      [_whole(x.shape, x.dtype, self._sharding(x), arrays) for x, *arrays in zip(leaves, *copied)]
    )

  def _sharding(self, x) -> NamedSharding:
    return NamedSharding(self.target.mesh, x.sharding.spec)


def make_bridge(train: Layout, target: Layout) -> Bridge | None:
  """Returns the bridge from `train` to `target`; None if both have the same devices.

  Raises:
    InputError: the number of training devices is not a multiple of those of a replica of the target.
  """
  train_devices = set(train.mesh.devices.flat)
  if train_devices == set(target.mesh.devices.flat):
    return None
  replica = _replicas(target.mesh, WHOLE)[0]
  copies, remainder = divmod(len(train_devices), replica.size)
  if remainder:
    raise InputError(
      f'config.mesh.rollout: weights are split over {replica.size} devices there, and {len(train_devices)} training '
      'devices are no multiple of that; take a smaller tensor or expert axis'
    )
  mesh = Mesh(
    train.mesh.devices.reshape(copies, *replica.devices.shape),
    (_COPIES, *replica.axis_names),
    axis_types=(AxisType.Auto,) * (1 + replica.devices.ndim),
  )
  return Bridge(Layout(mesh, target.phase), target)


def _replicas(mesh: Mesh, axes: tuple[str, ...]) -> list[Mesh]:
  """Splits a mesh over `axes`: each part has the same axis names, and size 1 along `axes`, without the axis copies."""
  names = mesh.axis_names
  inner = tuple(1 if n in axes else mesh.shape[n] for n in names)
  order = [i for i, n in enumerate(names) if n in axes] + [i for i, n in enumerate(names) if n not in axes]
  rows = mesh.devices.transpose(order).reshape(-1, math.prod(inner))  # [replicas, devices of a replica]
  kept = [i for i, n in enumerate(names) if n != _COPIES]
  shape, kept_names = [inner[i] for i in kept], [names[i] for i in kept]
  return [Mesh(row.reshape(shape), kept_names, axis_types=(AxisType.Auto,) * len(kept)) for row in rows]


def copy(arrays: list, source: Mesh, target: Mesh) -> list:
  """Returns the shards of arrays on `source` as arrays on `target`, a mesh of the same shape."""
  on_source = [_whole(x.shape, x.dtype, NamedSharding(source, x.sharding.spec), [x]) for x in arrays]
  shardings = [NamedSharding(target, x.sharding.spec) for x in arrays]
  if coordination.process_count() == 1:
    return jax.device_put(on_source, shardings)
  if coordination.owners(source.devices.flat) != coordination.owners(target.devices.flat):
    sent = jax.device_put(on_source, shardings)  # in one call for all arrays
    coordination.all_gather(None)  # a sender must stay until all receivers have read
    return sent
  target_of = dict(zip(source.devices.flat, target.devices.flat))
  if any(a.process_index != b.process_index for a, b in target_of.items()):
    raise InputError(
      'config.mesh.rollout_devices: some processes would train, and sample with devices of other processes; take all '
      'devices of a process'
    )
  out = []
  for x, sharding in zip(on_source, shardings):
    shards = [jax.device_put(shard.data, target_of[shard.device]) for shard in x.addressable_shards]
    out.append(jax.make_array_from_single_device_arrays(x.shape, sharding, shards, dtype=x.dtype))
  return out


def _whole(shape, dtype, sharding: NamedSharding, arrays: list):
  """Returns one array made of the shards of `arrays` on the devices of `sharding`, without a copy."""
  local = sharding.mesh.local_devices
  shards = {s.device: s.data for x in arrays for s in x.addressable_shards if s.device in local}
  return jax.make_array_from_single_device_arrays(shape, sharding, [shards[d] for d in local], dtype=dtype)
