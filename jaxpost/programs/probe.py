"""What this machine can do, measured: the yardstick of benchmarks."""

import time

import jax
import jax.numpy as jnp


def matmul_rate(dtype, size: int = 2048, rounds: int = 8) -> float:
  """FLOP/s of a square product with float32 accumulation, best of `rounds`."""
  x = jnp.ones((size, size), dtype)
  product = jax.jit(lambda a, b: jnp.matmul(
      a, b, preferred_element_type=jnp.float32))
  product(x, x).block_until_ready()
  best = 0.0
  for _ in range(rounds):
    start = time.perf_counter()
    product(x, x).block_until_ready()
    best = max(best, 2 * size**3 / (time.perf_counter() - start))
  return best
