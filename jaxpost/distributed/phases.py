"""Makes the meshes of the phases (train, rollout, score) from a config, and orders the devices in them.

Phases share all devices, or rollout and score have their own devices, the last ones, and training has the others.
"""

import collections
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxpost.distributed.mesh import AXES, Layout
from jaxpost.errors import InputError


def make_layouts(mesh: Any, row_length: int, devices: Sequence[jax.Device] | None = None) -> dict[str, Layout]:
  """Returns {phase: layout} for the phases 'train', 'rollout' and 'score'.

  Args:
    mesh: `config.mesh`.
    row_length: tokens of a training row, a multiple of the context axis.
    devices: all devices; None for `jax.devices()`.

  Raises:
    InputError: a mesh does not fit its devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  separate = mesh.rollout_devices + mesh.score_devices
  if separate >= len(devices):
    raise InputError(
      f'config.mesh.rollout_devices, score_devices: {separate} of {len(devices)} device(s) leave none to train on'
    )
  # The order is: devices of training, of score, of rollout.
  score_start = len(devices) - separate
  rollout_start = score_start + mesh.score_devices
  train = make_layout(mesh.train, 'train', devices=devices[:score_start])
  beside = None if mesh.rollout_devices else train
  rollout = make_layout(mesh.rollout, 'rollout', devices=devices[rollout_start:], beside=beside)
  text, beside = mesh.score or mesh.train, train
  if mesh.score_devices:
    text, beside = mesh.score or 'fsdp=-1', None
  score = make_layout(text, 'train', 'config.mesh.score', devices=devices[score_start:rollout_start], beside=beside)
  for phase, layout in (('train', train), ('score', score)):
    parts = layout.mesh.shape['context']
    if row_length % parts:
      raise InputError(
        f'config.train.row_length: {row_length} is no multiple of the '
        f'context={parts} that config.mesh.{phase} splits rows by; use one'
      )
  return {'train': train, 'rollout': rollout, 'score': score}


def make_layout(
  text: str, phase: str, key: str = '', devices: Sequence | None = None, beside: Layout | None = None
) -> Layout:
  """Returns the layout that a mesh of the config describes.

  Args:
    text: sizes of the mesh axes, as in 'fsdp=-1,tensor=2'.
    phase: 'train' or 'rollout', which chooses the rules.
    key: the config field, for errors.
    devices: the devices of the mesh; None for `jax.devices()`.
    beside: a layout whose devices are used instead, in the same order, as a jitted reshard needs.
  """
  available = beside.mesh.devices if beside else np.array(jax.devices() if devices is None else devices)
  sizes = parse_mesh(text, available.size, key or f'config.mesh.{phase}')
  shape = tuple(sizes.values())
  ordered = available.reshape(shape) if beside else order_devices(list(available), shape)
  return Layout(Mesh(ordered, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), phase)


def lanes(layouts: dict[str, Layout]) -> dict[str, str]:
  """Returns {phase of a step: lane of the timeline}; phases on the same devices share a lane."""

  def on_train_devices(phase: str) -> bool:
    return layouts[phase].mesh.devices.flat[0] == layouts['train'].mesh.devices.flat[0]

  train = 'devices' if on_train_devices('rollout') and on_train_devices('score') else 'train'
  score = train if on_train_devices('score') else 'score'
  rollout = train if on_train_devices('rollout') else 'rollout'
  return {'update': train, 'score': score, 'sample': rollout, 'reshard': 'weights'}


def order_devices(devices: Sequence, shape: tuple[int, ...]) -> np.ndarray:
  """Returns the devices as an array of `shape`, ordered for their network: neighbors are on inner axes.

  With several TPU slices, the outermost axis that is a multiple of their number crosses the slow network between them;
  the other axes stay inside a slice.

  Raises:
    InputError: no axis is a multiple of the number of slices, or devices are missing inside a slice.
  """
  if devices[0].platform != 'tpu':  # JAX lists the devices host by host
    return np.array(devices).reshape(shape)
  devices_per_slice = collections.Counter(getattr(d, 'slice_index', 0) for d in devices)
  slices = len(devices_per_slice)
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
  except (AssertionError, ValueError) as e:  # chips of a block are missing
    raise InputError(
      f'config.mesh: {len(devices)} devices of a phase, {[*devices_per_slice.values()]} by slice, have no order in a '
      f'mesh (do they fill equal blocks?): {" ".join(str(e).split())[:100]}'
    ) from e


def parse_mesh(text: str, num_devices: int, key: str) -> dict[str, int]:
  """Returns the size of each mesh axis; in 'fsdp=-1,tensor=2', fsdp gets all other devices, num_devices // 2.

  `key` names the config field in errors.
  """
  sizes = mesh_sizes(text, key)
  free = [name for name, size in sizes.items() if size == -1]
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if num_devices % fixed or (not free and fixed != num_devices):
    raise InputError(
      f'{key}: {text!r} does not fit {num_devices} device(s); sizes must multiply to {num_devices}, '
      "and one of them may be -1: 'fsdp=-1' fits any number of devices"
    )
  if free:
    sizes[free[0]] = num_devices // fixed
  return sizes


def mesh_sizes(text: str, key: str) -> dict[str, int]:
  """Returns the size of each mesh axis as written, which may be -1, without using a device."""
  sizes: dict[str, int] = {}
  for item in filter(None, text.replace(' ', '').split(',')):
    name, _, size = item.partition('=')
    if name not in AXES or not re.fullmatch('-?[0-9]{1,9}', size):
      raise InputError(
        f'{key}: cannot read {item!r:.100} in {text!r:.100}; write for example "fsdp=-1,tensor=2" with the axes '
        f'{", ".join(AXES)}'
      )
    if name in sizes:
      raise InputError(f'{key}: {text!r} names the axis {name} twice')
    sizes[name] = int(size)
  if any(n < 1 and n != -1 for n in sizes.values()) or list(sizes.values()).count(-1) > 1:
    raise InputError(f'{key}: {text!r}: sizes are 1 or more, and one of them may be -1')
  return dict.fromkeys(AXES, 1) | sizes  # in the order of AXES, which is that of the mesh
