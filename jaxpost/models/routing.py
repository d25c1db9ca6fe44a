"""The router of a mixture of experts: top-k choice, load balance and its metrics.

Legend: B rows, T tokens, D hidden size, E experts, k of them for a token, L layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct

if TYPE_CHECKING:
  from jaxpost.models.config import Experts


@struct.dataclass
class Routing:
  """Experts of the tokens, in one layer or, with a leading axis L, in all."""

  chosen: jax.Array  # [B, T, k] int32
  logits: jax.Array  # [B, T, E] float32


def route(p: dict, x: jax.Array, e: Experts, chosen: jax.Array | None = None) -> tuple[jax.Array, Routing]:
  """Chooses k experts for each token, and their weights.

  In float32 from unrounded weights: a token at the edge between two experts
  should take the same one in training and in sampling. A sigmoid router reports
  log-sigmoids as its logits, so that their softmax normalizes the sigmoids.

  Args:
    x: [B, T, D].
    chosen: [B, T, k], experts to use instead of the router's choice.

  Returns:
    (weights [B, T, k], `Routing`).
  """
  logits = jnp.einsum('btd,de->bte', x.astype(jnp.float32), p['router'], precision=jax.lax.Precision.HIGHEST)
  logits = logits + p.get('router_bias', 0)
  if e.sigmoid:
    scores = jax.nn.sigmoid(logits)
    logits = jax.nn.log_sigmoid(logits)
  else:
    scores = jax.nn.softmax(logits, axis=-1)
  preference = logits
  if e.choice_bias or e.groups > 1:
    # The bias counts in the choice only, not in the weights (DeepSeek-V3).
    preference = _mask_groups(scores + p.get('router_choice', 0), e)
  if chosen is None:
    chosen = jax.lax.top_k(jax.lax.stop_gradient(preference), e.top_k)[1]
  chosen = chosen.astype(jnp.int32)
  weights = jnp.take_along_axis(scores, chosen, axis=-1)
  if e.normalize:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + (e.epsilon if e.sigmoid else 0))
  if 'router_scale' in p:  # a factor of each expert
    weights = weights * p['router_scale'][chosen]
  return weights * e.scale, Routing(chosen, logits)


def _mask_groups(wanted: jax.Array, e: Experts) -> jax.Array:
  """Masks [B, T, E] outside of the `top_groups` groups with the best two experts."""
  if e.top_groups == e.groups:
    return wanted
  parts = wanted.reshape(*wanted.shape[:-1], e.groups, -1)
  best = jnp.sum(jax.lax.top_k(parts, 2)[0], axis=-1)
  picked = jax.lax.top_k(best, e.top_groups)[1]
  kept = jnp.any(picked[..., None] == jnp.arange(e.groups), axis=-2)
  return jnp.where(kept[..., None], parts, -jnp.inf).reshape(wanted.shape)


def totals(routing: Routing, real: jax.Array) -> dict[str, jax.Array]:
  """Sums routing statistics over the real tokens [B, T]; micro-batches add up.

  Returns:
    {'tokens': [], 'load', 'probs': [L, E], 'squares', 'entropy': [L]}: the number
    of tokens; the tokens of each expert; the sums of router probabilities, of
    squared log-normalizers and of router entropies (nats).
  """
  real = real.astype(jnp.float32)
  logp = jax.nn.log_softmax(routing.logits, axis=-1)
  experts = jnp.arange(logp.shape[-1])
  counts = jnp.sum(  # [L, B, T, E], 1 where one of the k is that expert
    routing.chosen[..., None] == experts, axis=-2, dtype=jnp.float32
  )

  def over(y):
    return jnp.einsum('lbt...,bt->l...', y, real, precision=jax.lax.Precision.HIGHEST)

  return {
    'tokens': jnp.sum(real),
    'load': over(counts),
    'probs': over(jnp.exp(logp)),
    'squares': over(jax.nn.logsumexp(routing.logits, axis=-1) ** 2),
    'entropy': over(-jnp.sum(jnp.exp(logp) * logp, axis=-1)),
  }


def balance_loss(sums: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the (load balancing, z) losses of a micro-batch, the means over layers of

    E sum_e f_e P_e   (Fedus et al., arXiv:2101.03961, eq. 4 to 6), and
    mean of (log sum_e exp logit_e)^2   (Zoph et al., arXiv:2202.08906, eq. 5),

  where P_e is the mean probability of an expert and f_e the share of tokens
  that chose it: k for all experts together, so that perfect balance gives k,
  as in `transformers` (which takes the mean over layers before the product).

  Losses of micro-batches add up to that of the batch: P_e, which has the
  gradient, and the z loss are sums over `tokens`, the real tokens of the whole
  batch. Only f_e, which has none, is of the micro-batch by itself.
  """
  share = sums['load'] / jnp.maximum(sums['tokens'], 1)
  experts = share.shape[-1]
  balance = experts * jnp.mean(jnp.sum(share * sums['probs'], axis=-1)) / tokens
  z = jnp.mean(sums['squares']) / tokens
  return balance, z


def metrics(sums: dict) -> dict[str, jax.Array]:
  """Returns the metrics of a batch; an expert with an equal share of tokens, or of none, has load 1."""
  share = jnp.mean(sums['load'], axis=-1, keepdims=True)
  load = jnp.where(share > 0, sums['load'] / share, 1.0)
  tokens = jnp.maximum(sums['tokens'], 1)
  balance, z = balance_loss(sums, tokens)
  return {
    'router/balance_loss': balance,
    'router/z_loss': z,
    'router/max_load': jnp.max(load),
    'router/min_load': jnp.min(load),
    'router/dead_experts': jnp.sum(1.0 * (load == 0)),
    'router/entropy': jnp.mean(sums['entropy']) / tokens,
  }
