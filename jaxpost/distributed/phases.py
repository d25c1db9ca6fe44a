"""Meshes of the phases (train, rollout, score) as a config writes them, and the order of devices in them.

Phases share all devices, or a phase has devices of its own: the last ones. Training has what is left.
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
  """The layout of each phase: {'train', 'rollout', 'score'}.

  Args:
    mesh: `config.mesh`.
    row_length: tokens of a training row, which a context axis has to divide.
    devices: all of them; None takes `jax.devices()`.

  Raises:
    InputError: a mesh does not fit its devices.
  """
  every = list(jax.devices() if devices is None else devices)
  separate = mesh.rollout_devices + mesh.score_devices
  if separate >= len(every):
    raise InputError(
      f'config.mesh.rollout_devices, score_devices: {separate} of {len(every)} device(s) leave none to train on'
    )
  left = len(every) - separate
  after = left + mesh.score_devices
  train = make_layout(mesh.train, 'train', devices=every[:left])
  rollout = make_layout(mesh.rollout, 'rollout', devices=every[after:], beside=None if mesh.rollout_devices else train)
  text, beside = mesh.score or mesh.train, train
  if mesh.score_devices:
    text, beside = mesh.score or 'fsdp=-1', None
  score = make_layout(text, 'train', 'config.mesh.score', devices=every[left:after], beside=beside)
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
    devices: those of the mesh; None takes `jax.devices()`.
    beside: a layout whose devices are taken instead, in their order, as a jitted reshard needs.
  """
  given = beside.mesh.devices if beside else np.array(jax.devices() if devices is None else devices)
  sizes = parse_mesh(text, given.size, key or f'config.mesh.{phase}')
  shape = tuple(sizes.values())
  placed = given.reshape(shape) if beside else order_devices(list(given), shape)
  return Layout(Mesh(placed, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), phase)


def lanes(layouts: dict[str, Layout]) -> dict[str, str]:
  """{phase of a step: lane of the timeline}: phases on the same devices share a lane."""

  def same(name):
    return layouts[name].mesh.devices.flat[0] == layouts['train'].mesh.devices.flat[0]

  train = 'devices' if same('rollout') and same('score') else 'train'
  rollout = train if same('rollout') else 'rollout'
  return {'update': train, 'score': train if same('score') else 'score', 'sample': rollout, 'reshard': 'weights'}


def order_devices(devices: Sequence, shape: tuple[int, ...]) -> np.ndarray:
  """The devices as an array of `shape`, ordered for their network: neighbors on inner axes.

  Where there are several TPU slices, the outermost axis that their number
  divides crosses the slow network between them; the others stay inside a slice.

  Raises:
    InputError: no axis is a multiple of the number of slices, or devices are
      missing inside a slice.
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
      f'by slice, have no order in a mesh (do they fill equal blocks?): {" ".join(str(e).split())[:100]}'
    ) from e


def parse_mesh(text: str, num_devices: int, key: str) -> dict[str, int]:
  """'fsdp=-1,tensor=2' -> {'data': 1, 'fsdp': num_devices // 2, 'tensor': 2}.

  One size may be -1: whatever is left. `key` names the config field in errors.
  """
  sizes = mesh_sizes(text, key)
  free = [name for name, size in sizes.items() if size == -1]
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if num_devices % fixed or (not free and fixed != num_devices):
    raise InputError(
      f'{key}: {text!r} does not fit {num_devices} device(s); sizes must '
      f'multiply to {num_devices}, and one of them may be -1'
    )
  if free:
    sizes[free[0]] = num_devices // fixed
  return sizes


def mesh_sizes(text: str, key: str) -> dict[str, int]:
  """The size of every axis as written: what can be read without a device."""
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
  wrong = [n for n in sizes.values() if n < 1 and n != -1]
  if wrong or list(sizes.values()).count(-1) > 1:
    raise InputError(f'{key}: {text!r}: sizes are 1 or more, and one of them may be -1')
  return dict.fromkeys(AXES, 1) | sizes  # in the order of AXES, which is that of the mesh
