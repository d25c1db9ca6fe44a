"""Meshes of the phases: on the same devices, or on devices of their own.

A phase that has devices of its own takes the last ones; training has what is
left. Weights cross over a `Bridge`: a program lays them out on the training
devices as the other mesh wants them, then each shard is copied to the device
that wants it, inside of a process or from one process to another.

The order of devices in a mesh, for the network that joins them.
"""

import collections
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from jaxpost.distributed import phases
from jaxpost.distributed.mesh import AXES, Layout, make_layout
from jaxpost.errors import InputError


def make_layouts(mesh, row_length: int, devices=None) -> dict[str, Layout]:
  """{'train', 'rollout', 'score'}, of `config.mesh`."""
  every = list(jax.devices() if devices is None else devices)
  own = mesh.rollout_devices + mesh.score_devices
  if own >= len(every):
    raise InputError(
      f'config.mesh.rollout_devices, score_devices: {own} of {len(every)} device(s) leave none to train on'
    )
  left = len(every) - own
  train = make_layout(mesh.train, 'train', devices=every[:left] if own else devices, arrange=phases.arrange)
  after = left + mesh.score_devices

  def other(text, phase, key, mine):
    return make_layout(
      text, phase, key, mine or None, arrange=(phases.arrange if mine else None), beside=None if mine else train
    )

  out = dict(
    train=train,
    rollout=other(mesh.rollout, 'rollout', 'config.mesh.rollout', every[after:]),
    score=other(
      mesh.score or ('fsdp=-1' if mesh.score_devices else mesh.train), 'train', 'config.mesh.score', every[left:after]
    ),
  )
  for phase in 'train', 'score':
    parts = out[phase].mesh.shape['context']
    if row_length % parts:
      raise InputError(
        f'config.train.row_length: {row_length} is no multiple of the '
        f'context={parts} that config.mesh.{phase} splits rows by; use one'
      )
  return out


def lanes(layouts: dict[str, Layout]) -> dict:
  """Phase of a step -> name of the devices that it keeps busy."""
  same = lambda name: layouts[name].mesh.devices.flat[0] == (layouts['train'].mesh.devices.flat[0])
  train = 'devices' if same('rollout') and same('score') else 'train'
  rollout = train if same('rollout') else 'rollout'
  return {'update': train, 'score': train if same('score') else 'score', 'sample': rollout, 'reshard': 'weights'}


def arrange(devices: Sequence, shape: tuple[int, ...]) -> np.ndarray:
  """Devices in the order that suits their network: near ones on inner axes.

  The outermost axis that the number of slices divides crosses their slow
  network, the others stay inside of one.
  """
  if devices[0].platform != 'tpu':  # hosts follow each other
    return np.array(devices).reshape(shape)
  held = collections.Counter(getattr(d, 'slice_index', 0) for d in devices)
  slices = len(held)
  outer = next((i for i, n in enumerate(shape) if n % slices == 0), None)
  if outer is None:
    raise InputError(
      f'config.mesh: no axis of {dict(zip(AXES, shape))} is a multiple of the {slices} slices; data or fsdp should be'
    )
  across = tuple(slices if i == outer else 1 for i in range(len(shape)))
  inside = tuple(n // m for n, m in zip(shape, across))
  try:
    if slices == 1:
      return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
  except (AssertionError, ValueError) as e:  # chips are missing there
    raise InputError(
      f'config.mesh: {len(devices)} devices of a phase, {[*held.values()]} '
      'by slice, have no order in a mesh (do they fill equal blocks?): '
      f'{" ".join(str(e).split())[:100]}'
    ) from e
