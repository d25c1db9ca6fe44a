"""Meshes of the phases: on the same devices, or on devices of their own.

A phase that has devices of its own takes the last ones; training has what is
left. Weights cross over a `Bridge`: a program lays them out on the training
devices as the other mesh wants them, then each shard is copied to the device
that wants it, inside of a process or from one process to another.
"""

import dataclasses
import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxpost import placement, processes
from jaxpost.errors import InputError
from jaxpost.sharding import Layout, make_layout, owners

_COPIES = 'copies'
# Axes of a sampling mesh over which weights are whole.
WHOLE = ('data', 'fsdp')


def make_layouts(mesh, row_length: int, devices=None) -> dict[str, Layout]:
  """{'train', 'rollout', 'score'}, of `config.mesh`."""
  every = list(jax.devices() if devices is None else devices)
  own = mesh.rollout_devices + mesh.score_devices
  if own >= len(every):
    raise InputError(
        f'config.mesh.rollout_devices, score_devices: {own} of {len(every)} '
        'device(s) leave none to train on')
  left = len(every) - own
  train = make_layout(
      mesh.train, 'train', devices=every[:left] if own else devices,
      arrange=placement.arrange)
  after = left + mesh.score_devices

  def other(text, phase, key, mine):
    return make_layout(text, phase, key, mine or None, arrange=(
        placement.arrange if mine else None), beside=None if mine else train)

  out = dict(
      train=train,
      rollout=other(mesh.rollout, 'rollout', 'config.mesh.rollout',
                    every[after:]),
      score=other(mesh.score or ('fsdp=-1' if mesh.score_devices else
                                 mesh.train), 'train', 'config.mesh.score',
                  every[left:after]))
  for phase in 'train', 'score':
    parts = out[phase].mesh.shape['context']
    if row_length % parts:
      raise InputError(
          f'config.train.row_length: {row_length} is no multiple of the '
          f'context={parts} that config.mesh.{phase} splits rows by; use one')
  return out


def lanes(layouts: dict[str, Layout]) -> dict:
  """Phase of a step -> name of the devices that it keeps busy."""
  same = lambda name: layouts[name].mesh.devices.flat[0] == (
      layouts['train'].mesh.devices.flat[0])
  train = 'devices' if same('rollout') and same('score') else 'train'
  rollout = train if same('rollout') else 'rollout'
  return {'update': train, 'score': train if same('score') else 'score',
          'sample': rollout, 'reshard': 'weights'}


@dataclasses.dataclass(frozen=True)
class Bridge:
  """From training devices to a sampling mesh of others.

  source: the training devices, as several copies of one part of the target.
  target: where arrays arrive.
  """

  source: Layout
  target: Layout

  def arriving(self, tree):
    """What `__call__` returns, described."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=self._sharding(x)), tree)

  def __call__(self, tree):
    """Arrays in `source`, as a program has left them, in `target`."""
    leaves, treedef = jax.tree.flatten(tree)
    parts = _parts(self.target.mesh, WHOLE)
    copies = _parts(self.source.mesh, (_COPIES,))
    arrived = [copy(leaves, copies[i % len(copies)], part)
               for i, part in enumerate(parts)]
    return treedef.unflatten(
        [_whole(x.shape, x.dtype, self._sharding(x), found)
         for x, *found in zip(leaves, *arrived)])

  def _sharding(self, x) -> NamedSharding:
    return NamedSharding(self.target.mesh, x.sharding.spec)


def make_bridge(train: Layout, target: Layout, key: str) -> Bridge | None:
  """None where both have the same devices.

  `key` names the config field of the target's mesh, in errors.
  """
  ours, theirs = (set(x.mesh.devices.flat) for x in (train, target))
  if ours == theirs:
    return None
  part = _parts(target.mesh, WHOLE)[0]
  copies, left = divmod(len(ours), part.size)
  if left:
    raise InputError(
        f'{key}: weights are split over {part.size} devices there, and '
        f'{len(ours)} training devices are no multiple of that; take a '
        'smaller tensor or expert axis')
  mesh = Mesh(
      train.mesh.devices.reshape(copies, *part.devices.shape),
      (_COPIES, *part.axis_names), axis_types=(AxisType.Auto,) * (
          1 + part.devices.ndim))
  return Bridge(Layout(mesh, target.phase), target)


def _parts(mesh: Mesh, axes) -> list[Mesh]:
  """Meshes of the same axes, `axes` of size 1, that make up the mesh."""
  names = mesh.axis_names
  inner = tuple(1 if n in axes else mesh.shape[n] for n in names)
  order = [i for i, n in enumerate(names) if n in axes] + [
      i for i, n in enumerate(names) if n not in axes]
  rows = mesh.devices.transpose(order).reshape(-1, math.prod(inner))
  kept = [i for i, n in enumerate(names) if n != _COPIES]
  return [Mesh(row.reshape([inner[i] for i in kept]),
               [names[i] for i in kept],
               axis_types=(AxisType.Auto,) * len(kept)) for row in rows]


def copy(arrays: list, source: Mesh, target: Mesh) -> list:
  """The shards on `source` of arrays, as arrays on `target`."""
  here = [_whole(x.shape, x.dtype, NamedSharding(source, x.sharding.spec), [x])
          for x in arrays]
  there = [NamedSharding(target, x.sharding.spec) for x in arrays]
  if processes.count() == 1:
    return jax.device_put(here, there)
  if owners(source.devices.flat) != owners(target.devices.flat):
    sent = jax.device_put(here, there)  # all of them together
    processes.gather(None)  # nobody leaves while others still ask for it
    return sent
  pair = dict(zip(source.devices.flat, target.devices.flat))
  if any(a.process_index != b.process_index for a, b in pair.items()):
    raise InputError(
        'config.mesh.rollout_devices: some processes would both train and '
        'sample, and with others; take the devices of whole processes')
  return [jax.make_array_from_single_device_arrays(
      x.shape, s, [jax.device_put(part.data, pair[part.device])
                   for part in x.addressable_shards], dtype=x.dtype)
          for x, s in zip(here, there)]


def _whole(shape, dtype, sharding: NamedSharding, arrays: list):
  """One array of the shards that `arrays` have on its devices."""
  local = sharding.mesh.local_devices
  shards = {s.device: s.data for x in arrays for s in x.addressable_shards
            if s.device in local}
  return jax.make_array_from_single_device_arrays(
      shape, sharding, [shards[d] for d in local],
      dtype=dtype)
