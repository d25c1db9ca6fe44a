"""Meshes of the phases (train, rollout, score), and the order of devices in them.

Phases share all devices, or a phase has devices of its own: the last ones. Training has what is left.
"""

import collections
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from jaxpost.distributed.mesh import AXES, Layout, make_layout
from jaxpost.errors import InputError


def make_layouts(mesh, row_length: int, devices=None) -> dict[str, Layout]:
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
  train = make_layout(mesh.train, 'train', devices=every[:left] if separate else devices, arrange=order_devices)
  after = left + mesh.score_devices

  def other(text, phase, key, separate_devices):
    if separate_devices:
      return make_layout(text, phase, key, separate_devices, arrange=order_devices)
    return make_layout(text, phase, key, beside=train)

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
