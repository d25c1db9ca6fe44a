"""The softmax over the tokens that a sampler could draw: "keep sampling mask" (DeepSeek-V3.2, arXiv:2512.02556).

Legend: B rows, C tokens of a chunk, V vocabulary, k tokens that could be drawn.
"""

import jax
import jax.numpy as jnp

from jaxpost.types import MASKED_LOGIT


def restrict(logits: jax.Array, allowed: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns `logits` [B, C, V] with those of tokens that could not be drawn at their position masked.

  Args:
    allowed: [B, C, k] int32, 1 + the ids that could be drawn, padded with 0; a row of zeros allows all.
    labels: [B, C], which are always allowed.
  """
  rows, columns = jnp.indices(labels.shape)
  # Index 0 is that of padding, and is cut off.
  is_allowed = jnp.zeros((*labels.shape, logits.shape[-1] + 1), bool)
  is_allowed = is_allowed.at[rows[..., None], columns[..., None], allowed].set(True)[..., 1:]
  is_allowed |= jnp.arange(logits.shape[-1]) == labels[..., None]
  unrestricted = ~jnp.any(allowed > 0, axis=-1, keepdims=True)
  return jnp.where(is_allowed | unrestricted, logits, MASKED_LOGIT)
