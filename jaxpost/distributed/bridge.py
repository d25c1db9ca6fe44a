"""Copies weights to a phase that has devices of its own.

A program lays them out on the training devices as the other mesh wants them, then each shard is copied to its device,
inside one process or from one process to another.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxpost.distributed import coordination
from jaxpost.distributed.mesh import Layout
from jaxpost.errors import InputError

_COPIES = 'copies'  # mesh axis of a bridge's source: equal copies of the target's shards
# Mesh axes of a sampling mesh over which weights are replicated.
WHOLE = ('data', 'fsdp')


@dataclasses.dataclass(frozen=True)
class Bridge:
  """Copies weights from the training devices to a sampling mesh of other devices.

  source: a layout of the training devices whose shards are those of the target, in one or more copies.
  target: the layout that arrays arrive in.
  """

  source: Layout
  target: Layout

  def arriving(self, tree: Any) -> Any:
    """Shapes, types and shardings of what `__call__` returns."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(x)), tree)

  def __call__(self, tree):
    """The arrays of `tree`, which are in the `source` layout, in the `target` layout."""
    leaves, treedef = jax.tree.flatten(tree)
    parts = _parts(self.target.mesh, WHOLE)
    copies = _parts(self.source.mesh, (_COPIES,))
    arrived = [copy(leaves, copies[i % len(copies)], part) for i, part in enumerate(parts)]
    return treedef.unflatten(
      [_whole(x.shape, x.dtype, self._sharding(x), found) for x, *found in zip(leaves, *arrived)]
    )

  def _sharding(self, x) -> NamedSharding:
    return NamedSharding(self.target.mesh, x.sharding.spec)


def make_bridge(train: Layout, target: Layout, key: str) -> Bridge | None:
  """The bridge from `train` to `target`; None where both have the same devices.

  Raises:
    InputError: the training devices are no multiple of a replica of the target;
      `key` names the config field of its mesh.
  """
  ours = set(train.mesh.devices.flat)
  if ours == set(target.mesh.devices.flat):
    return None
  part = _parts(target.mesh, WHOLE)[0]
  copies, left = divmod(len(ours), part.size)
  if left:
    raise InputError(
      f'{key}: weights are split over {part.size} devices there, and '
      f'{len(ours)} training devices are no multiple of that; take a '
      'smaller tensor or expert axis'
    )
  mesh = Mesh(
    train.mesh.devices.reshape(copies, *part.devices.shape),
    (_COPIES, *part.axis_names),
    axis_types=(AxisType.Auto,) * (1 + part.devices.ndim),
  )
  return Bridge(Layout(mesh, target.phase), target)


def _parts(mesh: Mesh, axes) -> list[Mesh]:
  """The replicas of a mesh: meshes with the same axis names in which `axes` have size 1."""
  names = mesh.axis_names
  inner = tuple(1 if n in axes else mesh.shape[n] for n in names)
  order = [i for i, n in enumerate(names) if n in axes] + [i for i, n in enumerate(names) if n not in axes]
  rows = mesh.devices.transpose(order).reshape(-1, math.prod(inner))  # [replicas, devices of one]
  kept = [i for i, n in enumerate(names) if n != _COPIES]
  return [
    Mesh(row.reshape([inner[i] for i in kept]), [names[i] for i in kept], axis_types=(AxisType.Auto,) * len(kept))
    for row in rows
  ]


def copy(arrays: list, source: Mesh, target: Mesh) -> list:
  """The shards on `source` of arrays, as arrays on `target`."""
  here = [_whole(x.shape, x.dtype, NamedSharding(source, x.sharding.spec), [x]) for x in arrays]
  there = [NamedSharding(target, x.sharding.spec) for x in arrays]
  if coordination.process_count() == 1:
    return jax.device_put(here, there)
  if coordination.owners(source.devices.flat) != coordination.owners(target.devices.flat):
    sent = jax.device_put(here, there)  # all of them together
    coordination.all_gather(None)  # a sender must stay until all receivers have read
    return sent
  pair = dict(zip(source.devices.flat, target.devices.flat))
  if any(a.process_index != b.process_index for a, b in pair.items()):
    raise InputError(
      'config.mesh.rollout_devices: some processes would both train and '
      'sample, and with others; take the devices of whole processes'
    )
  return [
    jax.make_array_from_single_device_arrays(
      x.shape, s, [jax.device_put(part.data, pair[part.device]) for part in x.addressable_shards], dtype=x.dtype
    )
    for x, s in zip(here, there)
  ]


def _whole(shape, dtype, sharding: NamedSharding, arrays: list):
  """One array made of the shards that `arrays` hold on the devices of `sharding`."""
  local = sharding.mesh.local_devices
  shards = {s.device: s.data for x in arrays for s in x.addressable_shards if s.device in local}  # no copy is made
  return jax.make_array_from_single_device_arrays(shape, sharding, [shards[d] for d in local], dtype=dtype)
