"""The most probable tokens at each position of a completion, on the device and in files (`rollout.top_logprobs`).

Legend: S slots, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.types import Rollout


def most_probable(
  logits: jax.Array, highest: jax.Array, total: jax.Array, requested: jax.Array, top: int
) -> tuple[jax.Array, jax.Array]:
  """Returns (ids, log-probs) [S, top] of the most probable tokens; zeros if all slots request none.

  Args:
    logits: [S, V]; highest: [S, 1], their maxima; total: [S], sum of exp(logits - highest).
    requested: [S], number of tokens that a slot requests.
  """

  def top_tokens():
    values, ids = jax.lax.top_k(logits, top)
    return ids, values - highest - jnp.log(total)[:, None]

  def no_tokens():
    return jnp.zeros((len(logits), top), jnp.int32), jnp.zeros((len(logits), top))

  return jax.lax.cond(jnp.any(requested > 0), top_tokens, no_tokens)


def pairs(rollout: Rollout, n: int) -> list[list[tuple[int, float]]]:
  """Returns [length, k] pairs (token id, log-prob) of completion n, rounded for files; [] if none were recorded."""
  if rollout.top_ids is None or rollout.top_logprobs is None:
    return []
  length = rollout.lengths[n]
  logprobs = rollout.top_logprobs[n, :length].astype(np.float64).round(6).tolist()
  return [list(zip(*position)) for position in zip(rollout.top_ids[n, :length].tolist(), logprobs)]
