"""The gradient of a table that is both embedding and head, on a mesh whose devices have different tokens.

Legend: B rows, T tokens, V vocabulary, D hidden size, n devices with different tokens.
"""

import math

import jax
import jax.numpy as jnp

from jaxpost.distributed.mesh import Layout, TiedWeight


def tie(table: jax.Array, tokens: jax.Array, dtype: str, layout: Layout) -> jax.Array | TiedWeight:
  """Returns the table [V, D] for both uses; their gradients are added on each device, then summed over devices once.

  tokens: [B, T]. If all devices have the same ones, the table is returned unchanged.
  """
  token_axes = layout.of_tokens(tokens.shape)[1]
  if not token_axes or len(tokens) % layout.batch_shards:
    return table
  n = math.prod(layout.mesh.shape[axis] for axis in token_axes)
  param_dtype = table.dtype

  @jax.custom_vjp
  def make(table):
    # Rounded while sharded, then gathered: half the bytes.
    rounded = layout(table.astype(dtype), 'vocab', 'embed')
    return TiedWeight(layout(rounded, 'vocab', None), jnp.zeros((n, *table.shape), jnp.float32))

  def backward(_, g):
    return (layout.reduced(g.sums, ('vocab', 'embed'), token_axes).astype(param_dtype),)

  make.defvjp(lambda table: (make(table), None), backward)
  return make(table)
