"""The order of devices in a mesh, for the network that joins them."""

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
  slices = len({d.slice_index for d in devices if hasattr(d, 'slice_index')})
  if slices < 2:
    return mesh_utils.create_device_mesh(
        shape, devices, allow_split_physical_axes=True)
  outer = next((i for i, n in enumerate(shape) if n % slices == 0), None)
  if outer is None:
    raise InputError(
        f'config.mesh: no axis of {dict(zip(AXES, shape))} is a multiple of '
        f'the {slices} slices; data or fsdp should be')
  across = tuple(slices if i == outer else 1 for i in range(len(shape)))
  inside = tuple(n // m for n, m in zip(shape, across))
  return mesh_utils.create_hybrid_device_mesh(
      inside, across, devices, allow_split_physical_axes=True)
