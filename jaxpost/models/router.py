"""Which experts a token goes to, and with what weights.

Legend: B rows, T tokens, D hidden size, E experts, k of them for a token.
"""

import jax
import jax.numpy as jnp
from flax import struct

from jaxpost.models.config import Experts, ModelConfig


@struct.dataclass
class Routing:
  """Where the tokens went, in one layer or, stacked in front, in all."""

  chosen: jax.Array  # [B, T, k] int32
  logits: jax.Array  # [B, T, E] float32


def route(p, x, cfg: ModelConfig, chosen=None):
  """(weights [B, T, k], `Routing`) of tokens [B, T, D].

  In float32 from unrounded weights: a token at the edge between two experts
  should go the same way in training and in sampling. A router by sigmoids has
  the logarithms of them for logits, so that probabilities are their shares.
  """
  logits = jnp.einsum('btd,de->bte', x.astype(jnp.float32), p['router'],
                      precision=jax.lax.Precision.HIGHEST)
  logits = logits + p.get('router_bias', 0)
  e = cfg.experts
  if e.sigmoid:
    scores = jax.nn.sigmoid(logits)
    logits, wanted = jax.nn.log_sigmoid(logits), _grouped(
        scores + p['router_choice'], e)
  else:
    scores, wanted = jax.nn.softmax(logits, axis=-1), logits
  if chosen is None:
    chosen = jax.lax.top_k(jax.lax.stop_gradient(wanted), e.top_k)[1]
  chosen = chosen.astype(jnp.int32)
  weights = jnp.take_along_axis(scores, chosen, axis=-1)
  if e.normalize:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + (
        1e-20 if e.sigmoid else 0))
  return weights * e.scale, Routing(chosen, logits)


def _grouped(wanted, e: Experts):
  """[B, T, E], -inf outside of the groups whose two best are the best."""
  if e.top_groups == e.groups:
    return wanted
  parts = wanted.reshape(*wanted.shape[:-1], e.groups, -1)
  best = jnp.sum(jax.lax.top_k(parts, 2)[0], axis=-1)
  picked = jax.lax.top_k(best, e.top_groups)[1]
  kept = jnp.any(picked[..., None] == jnp.arange(e.groups), axis=-2)
  return jnp.where(kept[..., None], parts, -jnp.inf).reshape(wanted.shape)
