"""A table that is both embedding and head, on a mesh whose devices have different tokens.

Legend: B rows, T tokens, V vocabulary, D hidden size, n devices with different tokens.
"""

import math

import jax
import jax.numpy as jnp

from jaxpost.distributed.mesh import Layout, TiedWeight


def tie(table: jax.Array, tokens: jax.Array, dtype: str, layout: Layout) -> jax.Array | TiedWeight:
  """Returns the table [V, D] for both uses, whose gradients are added before they are summed over devices, once.

  tokens: [B, T]. Where all devices have the same ones, the table is returned as it is.
  """
  over = layout.of_tokens(tokens.shape)[1]
  if not over or len(tokens) % layout.batch_shards:
    return table
  n = math.prod(layout.mesh.shape[a] for a in over)
  kind = table.dtype

  @jax.custom_vjp
  def make(table):
    # Rounded while sharded, then gathered: half the bytes.
    small = layout(table.astype(dtype), 'vocab', 'embed')
    return TiedWeight(layout(small, 'vocab', None), jnp.zeros((n, *table.shape), jnp.float32))

  make.defvjp(
    lambda table: (make(table), None), lambda _, g: (layout.reduced(g.sums, ('vocab', 'embed'), over).astype(kind),)
  )
  return make(table)
