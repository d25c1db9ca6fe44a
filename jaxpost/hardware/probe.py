"""Measured speed of this machine, which benchmarks are compared with."""

import json
import logging
import os
import pathlib
import platform
import time

import jax
import jax.numpy as jnp

from jaxpost.storage import object_store

_GAIN = 1.1  # by which bfloat16 must be faster than float32, which is exact


def matmul_rate(dtype, size: int = 2048, rounds: int = 8) -> float:
  """FLOP/s of a square product with float32 accumulation, best of `rounds`."""
  x = jnp.ones((size, size), dtype)
  product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
  product(x, x).block_until_ready()
  best = 0.0
  for _ in range(rounds):
    start = time.perf_counter()
    product(x, x).block_until_ready()
    best = max(best, 2 * size**3 / (time.perf_counter() - start))
  return best


def memory_rate(size: int = 2**28, rounds: int = 8) -> float:
  """Bytes a second at which an array of `size` bytes is summed, the best."""
  x = jnp.ones(size // 4, jnp.float32)
  total = jax.jit(jnp.sum)
  total(x).block_until_ready()
  best = 0.0
  for _ in range(rounds):
    start = time.perf_counter()
    total(x).block_until_ready()
    best = max(best, size / (time.perf_counter() - start))
  return best


def matmul_type(cache=None) -> tuple[str, str]:
  """(type of products that is fastest here and safe, a line that says why).

  CPUs differ, and are measured: half a second, once a machine. float16 is
  measured, too, but taken only of GPUs that lack bfloat16.

  Args:
    cache: file of what was measured; by default in ~/.cache/jaxpost.
  """
  device = jax.devices()[0]
  if device.platform != 'cpu':
    old = device.platform == 'gpu' and float(device.compute_capability) < 8
    return 'float16' if old else 'bfloat16', f'of {device.device_kind}'
  path = pathlib.Path(cache or pathlib.Path.home() / '.cache/jaxpost/cpu.json')
  key = ' '.join([_cpu(), str(os.cpu_count()), jax.__version__])
  known = _read(path)
  if key not in known:
    known[key] = {name: round(matmul_rate(name, 512, 5) / 1e9, 1) for name in ('float32', 'bfloat16', 'float16')}
    try:
      object_store.write(path, json.dumps(known).encode())
    except OSError as e:
      logging.info('%s: not kept (%s): it is measured again next time', path, e)
  rates = known[key]
  faster = rates['bfloat16'] > _GAIN * rates['float32']
  return 'bfloat16' if faster else 'float32', 'GFLOP/s: ' + ', '.join(
    f'{name} {rate:g}' for name, rate in rates.items()
  )


def _read(path) -> dict:
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError):  # not there, or cut: it is measured again
    return {}


def _cpu() -> str:
  """The model of the processor."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text('utf-8').splitlines()
  except OSError:
    lines = []
  names = [li.partition(':')[2].strip() for li in lines if li.startswith('model name')]
  return names[0] if names else f'{platform.machine()} {platform.processor()}'
