"""Reports beside each drawn token the most probable tokens, or all that could be drawn.

Legend: S slots, V vocabulary, k tokens.
"""

import jax
import jax.numpy as jnp


def most_probable(
  logits: jax.Array, highest: jax.Array, total: jax.Array, wanted: jax.Array, top: int
) -> tuple[jax.Array, jax.Array]:
  """Returns (ids, log-probs) [S, top] of the most probable tokens; zeros if no slot of `wanted` [S] is above 0.

  Args:
    logits: [S, V]; highest: [S, 1], of each slot; total: [S], sum of exp(logits - highest).
  """

  def top_tokens():
    values, ids = jax.lax.top_k(logits, top)
    return ids, values - highest - jnp.log(total)[:, None]

  def no_tokens():
    return jnp.zeros((len(logits), top), jnp.int32), jnp.zeros((len(logits), top))

  return jax.lax.cond(jnp.any(wanted > 0), top_tokens, no_tokens)


def of_top_k(weights: jax.Array, top_k: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
  """Returns (weights [S, V] without what does not fit, 1 + the ids of the rest [S, most] int32, padded with 0).

  Top-k keeps all of equal weights, which may be more than `most`. Slots of `top_k` [S] = 0 keep all tokens,
  and report none.
  """
  values, ids = jax.lax.top_k(weights, most)
  rows = jnp.arange(len(weights))[:, None]
  limited = (top_k > 0)[:, None]
  kept = jnp.where(limited, jnp.zeros_like(weights).at[rows, ids].set(values), weights)
  return kept, jnp.where(limited & (values > 0), ids + 1, 0).astype(jnp.int32)
