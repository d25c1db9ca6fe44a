"""Measures matmul speed, and caches results of measurements."""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
import platform
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.distributed import coordination
from jaxpost.storage import object_store, seals

if TYPE_CHECKING:
  import rich.console
  from etils import epath

_GAIN = 1.1  # bfloat16 is chosen over the more exact float32 if it is this much faster


def matmul_rate(dtype: jax.typing.DTypeLike, size: int = 0, rounds: int = 8) -> float:
  """Returns FLOP/s of a square matrix product with float32 accumulation, the best of `rounds`.

  Args:
    size: rows of the matrices; 0 for 2,048 on CPUs, 8,192 on accelerators.
    rounds: number of measurements.
  """
  size = size or (2048 if jax.default_backend() == 'cpu' else 8192)
  x = (jax.random.normal(jax.random.key(0), (size, size)) / size**0.5).astype(dtype)

  @jax.jit
  def products(x: jax.Array) -> jax.Array:
    y = x
    for _ in range(repeats()):
      y = jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(dtype)
    return y

  return 2 * size**3 * rate(products, x, rounds)


def repeats() -> int:
  """Returns how often a program repeats its work, so that the dispatch time does not matter on accelerators."""
  return 1 if jax.default_backend() == 'cpu' else 8


def rate(program: Callable[[jax.Array], jax.Array], x: jax.Array, rounds: int) -> float:
  """Returns how often per second a program does its work, in the fastest of `rounds` dispatches."""
  program(x).block_until_ready()  # compiles
  best = math.inf
  for _ in range(rounds):
    start = time.perf_counter()
    program(x).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return repeats() / best


def matmul_type(cache: str | os.PathLike[str] | None = None) -> tuple[str, str]:
  """Returns the fastest safe dtype of matmuls on this machine, and the reason.

  CPUs differ, and are measured once per machine, which takes half a second. float16 is measured for information, and
  chosen only on GPUs without bfloat16.

  Args:
    cache: file of earlier measurements; None for ~/.cache/jaxpost/cpu.json.
  """
  device = jax.devices()[0]
  if device.platform != 'cpu':
    from jaxpost.hardware import chips

    return 'float16' if chips.before_ampere(device) else 'bfloat16', f'of {device.device_kind}'
  path = pathlib.Path(cache or cache_file('cpu.json'))
  # XLA's flags change which kernels it uses.
  key = ' '.join([_cpu(), str(os.cpu_count()), jax.__version__, os.environ.get('XLA_FLAGS', '')]).rstrip()
  rates = read_cache(path).get(key)
  if rates is None:
    rates = {name: round(matmul_rate(name, 512, 5) / 1e9, 1) for name in ('float32', 'bfloat16', 'float16')}
    add_to_cache(path, {key: rates})
  faster = rates['bfloat16'] > _GAIN * rates['float32']
  why = 'GFLOP/s: ' + ', '.join(f'{name} {rate:g}' for name, rate in rates.items())
  return 'bfloat16' if faster else 'float32', why


def cache_file(name: str) -> pathlib.Path:
  """Returns the path of a cache file in ~/.cache/jaxpost."""
  return pathlib.Path.home() / '.cache' / 'jaxpost' / name


def read_cache(path: pathlib.Path) -> dict:
  """Returns the entries of a cache file; {} if it is missing or damaged."""
  try:
    entries = json.loads(path.read_text())
  except (OSError, ValueError):
    return {}
  return entries if isinstance(entries, dict) else {}


def add_to_cache(path: pathlib.Path, entries: dict) -> None:
  """Adds entries to a cache file; does nothing if it cannot be written, which only costs time in the next run."""
  try:
    object_store.write(path, json.dumps(read_cache(path) | entries).encode())
  except OSError as e:
    logging.info('%s: not written (%s): the next run measures or checks again', path, e)


def _cpu() -> str:
  """Returns the model of the processor."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text('utf-8').splitlines()
  except OSError:
    lines = []
  names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
  return names[0] if names else f'{platform.machine()} {platform.processor()}'


def measured_dtype(saved: epath.Path, stages: list[str], console: rich.console.Console) -> str:
  """Returns the dtype of `stages` in `saved`, the config.json of a run; if there is none, the fastest on process 0."""
  dtype = coordination.broadcast(_saved_dtype(saved, stages))
  if not dtype:
    jax.devices()  # on all processes, as they wait for each other
    dtype_and_reason = list(matmul_type()) if coordination.process_index() == 0 else None
    dtype, reason = coordination.broadcast(dtype_and_reason)
    console.out(f'config.model.dtype: auto is {dtype} here ({reason})', highlight=False)
  return dtype


def _saved_dtype(path: epath.Path, stages: list[str]) -> str | None:
  """Returns the dtype in the config of the run that is resumed, on process 0; None if there is none."""
  if coordination.process_index() or not path.exists():
    return None
  saved = seals.read_json(path)
  blocks = [saved.get(name) or {} for name in stages if name] + [saved]
  return next(filter(None, ((block.get('model') or {}).get('dtype') for block in blocks)), None)
