"""The most probable tokens of a teacher, chunk by chunk, for distillation from a part of the vocabulary.

Legend: B rows, T tokens, D hidden size, V vocabulary.
"""

import jax
import jax.numpy as jnp

from jaxpost.losses import head as head_lib
from jaxpost.losses import head_chunk


def top_tokens(
  config: head_chunk.HeadConfig, hidden: jax.Array, head: jax.Array, mask: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
  """Finds the k most probable tokens after each position, most probable first.

  Args:
    hidden: [B, T, D].
    head: [V, D].
    mask: [B, T]; positions with 0 are skipped.

  Returns:
    (ids [B, T, k] int32, log_softmax(logits / temperature) [B, T, k] float32),
    0 where the mask is 0.
  """
  order = head_lib.nonzero_first(mask)
  rows, length = mask.shape
  chunk = head_chunk.chunk_length(rows, length, head.shape[0], config.compute.head_elements)
  order = jnp.pad(order, ((0, 0), (0, -length % chunk)))

  def body(i, found):
    index = jax.lax.dynamic_slice_in_dim(order, i * chunk, chunk, axis=1)
    logits = head_chunk.masked_logits(config, head_lib.reorder(hidden, index), head, config.temperature)
    top, ids = jax.lax.top_k(logits, k)
    top -= jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return tuple(
      jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), i * chunk, axis=1)
      for x, new in zip(found, (ids, top))
    )

  found = (jnp.zeros((*order.shape, k), jnp.int32), jnp.zeros((*order.shape, k), jnp.float32))
  longest = jnp.max(jnp.sum(mask != 0, axis=1))
  found = jax.lax.fori_loop(0, -(-longest // chunk), body, found)
  back = head_lib.inverse(order[:, :length])
  return tuple(jnp.where((mask != 0)[..., None], head_lib.reorder(x[:, :length], back), 0) for x in found)
