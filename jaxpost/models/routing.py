"""The router of a mixture of experts: top-k choice, load balance and its metrics, and routing replay.

Routing replay: a sampler records the experts of its tokens, and scoring and training of that step use them again.
Sampler and trainer round differently, so that they may choose different experts for a token with almost equal router
scores. Its log-prob then jumps, and so do importance ratios ("rollout routing replay", Ma et al., arXiv:2510.11370).
The router still learns, through the weights of the recorded experts.

Legend: B rows, T tokens, D hidden size, E experts, k of them for a token, L layers, S slots.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct

from jaxpost.models.config import Experts, ModelConfig

if TYPE_CHECKING:
  from jaxpost.models.model import Model


@struct.dataclass
class Routing:
  """Experts of the tokens, in one layer or, with a leading axis L, in all."""

  chosen: jax.Array  # [B, T, k] int32
  logits: jax.Array  # [B, T, E] float32


def route(p: dict, x: jax.Array, e: Experts, chosen: jax.Array | None = None) -> tuple[jax.Array, Routing]:
  """Chooses k experts for each token, and their weights.

  The router computes in float32 with unrounded weights, so that a token with two
  almost equal experts gets the same one in training and in sampling. A sigmoid router
  reports log-sigmoids as its logits, so that their softmax normalizes the sigmoids.

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
  ranking = logits
  if e.choice_bias or e.groups > 1:
    # The bias counts in the choice only, not in the weights (DeepSeek-V3).
    ranking = _mask_groups(scores + p.get('router_choice', 0), e)
  if chosen is None:
    chosen = jax.lax.top_k(jax.lax.stop_gradient(ranking), e.top_k)[1]
  chosen = chosen.astype(jnp.int32)
  weights = jnp.take_along_axis(scores, chosen, axis=-1)
  if e.normalize:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + (e.epsilon if e.sigmoid else 0))
  if 'router_scale' in p:  # [E], a factor for each expert
    weights = weights * p['router_scale'][chosen]
  return weights * e.scale, Routing(chosen, logits)


def _mask_groups(ranking: jax.Array, e: Experts) -> jax.Array:
  """Sets [B, T, E] to -inf except in `top_groups` groups: those with the largest sum of their best two experts."""
  if e.top_groups == e.groups:
    return ranking
  groups = ranking.reshape(*ranking.shape[:-1], e.groups, -1)
  group_scores = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)
  best_groups = jax.lax.top_k(group_scores, e.top_groups)[1]
  kept = jnp.any(best_groups[..., None] == jnp.arange(e.groups), axis=-2)
  return jnp.where(kept[..., None], groups, -jnp.inf).reshape(ranking.shape)


def totals(routing: Routing, real: jax.Array) -> dict[str, jax.Array]:
  """Sums routing statistics over the real tokens [B, T]; micro-batches add up.

  Returns:
    {'tokens': [], 'load', 'probs': [L, E], 'squares', 'entropy': [L]}: the number of tokens; the tokens of each expert;
      the sums of router probabilities, of squared log-normalizers and of router entropies (nats).
  """
  real = real.astype(jnp.float32)
  logp = jax.nn.log_softmax(routing.logits, axis=-1)
  experts = jnp.arange(logp.shape[-1])
  # [L, B, T, E]: 1 for the experts of a token, 0 for others.
  counts = jnp.sum(routing.chosen[..., None] == experts, axis=-2, dtype=jnp.float32)

  def token_sum(y):  # [L, B, T, ...] -> [L, ...]
    return jnp.einsum('lbt...,bt->l...', y, real, precision=jax.lax.Precision.HIGHEST)

  return {
    'tokens': jnp.sum(real),
    'load': token_sum(counts),
    'probs': token_sum(jnp.exp(logp)),
    'squares': token_sum(jax.nn.logsumexp(routing.logits, axis=-1) ** 2),
    'entropy': token_sum(-jnp.sum(jnp.exp(logp) * logp, axis=-1)),
  }


def balance_loss(sums: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the (load balancing, z) losses of a micro-batch, the means over layers of

    E sum_e f_e P_e   (Fedus et al., arXiv:2101.03961, eq. 4 to 6), and
    mean of (log sum_e exp logit_e)^2   (Zoph et al., arXiv:2202.08906, eq. 5),

  where P_e is the mean probability of an expert and f_e the share of tokens that chose it: k for all experts together,
  so that perfect balance gives k, as in `transformers` (which takes the mean over layers before the product).

  Losses of micro-batches add up to the loss of the batch: P_e, which has the
  gradient, and the z loss are divided by `tokens`, the number of real tokens of the
  whole batch. Only f_e, which has no gradient, is that of the micro-batch alone.
  """
  share = sums['load'] / jnp.maximum(sums['tokens'], 1)
  experts = share.shape[-1]
  balance = experts * jnp.mean(jnp.sum(share * sums['probs'], axis=-1)) / tokens
  z = jnp.mean(sums['squares']) / tokens
  return balance, z


def metrics(sums: dict) -> dict[str, jax.Array]:
  """Returns the metrics of a batch. A load is relative to the mean over experts, and 1 if there are no tokens."""
  mean_load = jnp.mean(sums['load'], axis=-1, keepdims=True)
  load = jnp.where(mean_load > 0, sums['load'] / mean_load, 1.0)
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


# ------------------------------------------------------------- routing replay


def record(routing: Routing, cfg: ModelConfig) -> tuple[jax.Array, ...]:
  """Returns the `Cache.experts` of a prefill, L x [S, 1, T, k]; () if the model does not record them."""
  if not cfg.experts.record:
    return ()
  return tuple(y[:, None].astype(jnp.uint16) for y in routing.chosen)


def recording(model: Model) -> Model:
  """Returns the model for a sampler whose caches record the experts of its tokens."""
  cfg = model.config
  assert isinstance(cfg, ModelConfig) and cfg.experts, 'only experts are recorded'
  cfg = dataclasses.replace(cfg, experts=dataclasses.replace(cfg.experts, record=True))
  prefill, decode = (functools.partial(fn, cfg=cfg) for fn in (model.prefill, model.decode))
  return dataclasses.replace(model, config=cfg, prefill=prefill, decode=decode)


def no_record(cfg: ModelConfig, rows: int, steps: int) -> tuple[jax.Array, ...]:
  """Returns an empty record, L x zeros [S, 1, T, k]."""
  return (jnp.zeros((rows, 1, steps, cfg.experts.top_k), jnp.uint16),) * cfg.sparse_layers


def recorded(experts: tuple) -> tuple[jax.Array, ...]:
  """Stacks a record L x [S, 1, T, k] to ([T, S, L, k],)."""
  return (jnp.stack([x[:, 0].swapaxes(0, 1) for x in experts], axis=2),)
