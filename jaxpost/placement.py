"""The order of devices in a mesh, for the network that joins them."""

import collections
from collections.abc import Sequence

import numpy as np
from jax.experimental import mesh_utils

from jaxpost.errors import InputError
from jaxpost.sharding import AXES


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
        f'config.mesh: no axis of {dict(zip(AXES, shape))} is a multiple of '
        f'the {slices} slices; data or fsdp should be')
  across = tuple(slices if i == outer else 1 for i in range(len(shape)))
  inside = tuple(n // m for n, m in zip(shape, across))
  try:
    if slices == 1:
      return mesh_utils.create_device_mesh(
          shape, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(
        inside, across, devices, allow_split_physical_axes=True)
  except (AssertionError, ValueError) as e:  # chips are missing there
    raise InputError(
        f'config.mesh: {len(devices)} devices of a phase, {[*held.values()]} '
        'by slice, have no order in a mesh (do they fill equal blocks?): '
        f'{" ".join(str(e).split())[:100]}') from e
