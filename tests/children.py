"""Environments of child processes: so many CPU devices, compiled as the tests are."""

import os
import pathlib

CLONE = pathlib.Path(__file__).resolve().parents[1]
PATH = os.pathsep.join(map(str, (CLONE, CLONE / 'tests')))


def environment(devices: int = 1, **more: str) -> dict[str, str]:
  """Returns the variables of a child process with this many virtual CPU devices.

  Args:
    devices: what `jax.devices()` has there.
    more: further variables, which win.
  """
  flags = os.environ.get('XLA_FLAGS', '').split()
  kept = [flag for flag in flags if not flag.startswith('--xla_force_host_platform_device_count')]
  count = f'--xla_force_host_platform_device_count={devices}'
  return os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': PATH, 'XLA_FLAGS': ' '.join([*kept, count])} | more
