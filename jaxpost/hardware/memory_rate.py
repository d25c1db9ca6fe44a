"""Measures how fast a device reads and copies its memory, and how long a dispatch takes."""

import time

import jax
import jax.numpy as jnp

from jaxpost.hardware import probe


def _size(size: int) -> int:
  return size or (2**28 if jax.default_backend() == 'cpu' else 2**32)


def measure(size: int = 0, rounds: int = 8) -> float:
  """Returns bytes per second at which an array is summed, the best of `rounds`.

  Args:
    size: bytes of the array; 0 for 256 MiB on CPUs, 4 GiB on accelerators.
    rounds: number of measurements.
  """
  x = jax.random.uniform(jax.random.key(0), (_size(size) // 4,))

  @jax.jit
  def sums(x: jax.Array) -> jax.Array:
    total = jnp.zeros(())
    for _ in range(probe.repeats()):
      total = jnp.sum(x + total)  # depends on the sum before, so that XLA computes all of them
    return total

  return 4 * x.size * probe.rate(sums, x, rounds)


def copy(size: int = 0, rounds: int = 8) -> float:
  """Returns the sum of bytes read and bytes written per second while an array is copied; arguments as in `measure`."""
  x = jax.random.uniform(jax.random.key(0), (_size(size) // 4,))

  @jax.jit
  def copies(x: jax.Array) -> jax.Array:
    for _ in range(probe.repeats()):
      x = jax.lax.optimization_barrier(x + 1)  # so that XLA does not merge the additions
    return x

  return 2 * 4 * x.size * probe.rate(copies, x, rounds)


def dispatch(calls: int = 100) -> dict[str, float]:
  """Returns the seconds that a call of a tiny program takes: 'alone', and 'queued' after others."""
  program = jax.jit(lambda x: x + 1)
  x = jnp.zeros(8)
  alone = probe.repeats() / probe.rate(program, x, calls)
  start = time.perf_counter()
  for _ in range(calls):
    x = program(x)
  x.block_until_ready()
  return dict(alone=alone, queued=(time.perf_counter() - start) / calls)
