"""How fast a device reads its memory."""

import jax
import jax.numpy as jnp

from jaxpost.hardware import probe


def measure(size: int = 0, rounds: int = 8) -> float:
  """Returns bytes per second at which an array is summed, the best of `rounds`.

  Args:
    size: bytes of the array; 0: 256 MiB on CPUs, 4 GiB on accelerators.
  """
  size = size or (2**28 if jax.default_backend() == 'cpu' else 2**32)
  x = jax.random.uniform(jax.random.key(0), (size // 4,))

  @jax.jit
  def sums(x: jax.Array) -> jax.Array:
    total = jnp.zeros(())
    for _ in range(probe.repeats()):
      total = jnp.sum(x + total)  # each needs the one before
    return total

  return size * probe.rate(sums, x, rounds)
