"""Updates of weights in bfloat16, rounded stochastically."""

from typing import Any

import jax
import jax.numpy as jnp


def apply_updates(params: Any, updates: Any, step: int | jax.Array) -> Any:
  """Returns params + updates; in bfloat16 the sum is rounded up or down at random, so that its mean is exact.

  Rounding to nearest would drop every update below a 512th of a weight, which most updates are (Zamirai et al. 2020,
  arXiv:2010.06192). The draws depend only on the step and the leaf, not on the mesh.
  """
  key = jax.random.fold_in(jax.random.key(0), step)

  def updated(i, x, update):
    if x.dtype != jnp.bfloat16:
      return (x + update).astype(x.dtype)
    return round_stochastically(x.astype(jnp.float32) + update, jax.random.fold_in(key, i))

  leaves, tree = jax.tree.flatten(params)
  return tree.unflatten([updated(i, x, u) for i, (x, u) in enumerate(zip(leaves, tree.flatten_up_to(updates)))])


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
  """Returns float32 `x` rounded to one of its neighbors in bfloat16, with probabilities that make the mean x."""
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
  rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
  return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
