"""The most probable tokens beside each drawn one: on the device, and as rows of files (`rollout.top_logprobs`).

Legend: S slots, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.types import Rollout


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


def pairs(rollout: Rollout, n: int) -> list[list[tuple[int, float]]]:
  """Returns [length, k] pairs of token id and log-prob of completion n, for files that people read; [] without them."""
  if rollout.top_ids is None or rollout.top_logprobs is None:
    return []
  length = rollout.lengths[n]
  logprobs = rollout.top_logprobs[n, :length].astype(np.float64).round(6).tolist()
  return [list(zip(*at)) for at in zip(rollout.top_ids[n, :length].tolist(), logprobs)]
