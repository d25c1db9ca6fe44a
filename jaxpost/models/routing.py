"""Which experts a token goes to, and with what weights.

Legend: B rows, T tokens, D hidden size, E experts, k of them for a token.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct

from jaxpost.errors import InputError

if TYPE_CHECKING:
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
  logits = jnp.einsum('btd,de->bte', x.astype(jnp.float32), p['router'], precision=jax.lax.Precision.HIGHEST)
  logits = logits + p.get('router_bias', 0)
  e = cfg.experts
  if e.sigmoid:
    scores = jax.nn.sigmoid(logits)
    logits, wanted = jax.nn.log_sigmoid(logits), _grouped(scores + p['router_choice'], e)
  else:
    scores, wanted = jax.nn.softmax(logits, axis=-1), logits
  if chosen is None:
    chosen = jax.lax.top_k(jax.lax.stop_gradient(wanted), e.top_k)[1]
  chosen = chosen.astype(jnp.int32)
  weights = jnp.take_along_axis(scores, chosen, axis=-1)
  if e.normalize:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + (1e-20 if e.sigmoid else 0))
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


def record(routing: Routing | None, cfg: ModelConfig) -> tuple:
  """`Cache.experts` of a prefill."""
  if not cfg.experts or not cfg.experts.record:
    return ()
  return tuple(y[:, None].astype(jnp.uint16) for y in routing.chosen)


def recording(model):
  """The model for a sampler whose caches keep what its tokens chose."""
  cfg = dataclasses.replace(model.config, experts=dataclasses.replace(model.config.experts, record=True))
  bind = lambda fn: functools.partial(fn.func, **fn.keywords | {'cfg': cfg})
  return dataclasses.replace(model, config=cfg, prefill=bind(model.prefill), decode=bind(model.decode))


def no_record(cfg: ModelConfig, rows: int, steps: int) -> tuple:
  """L x [S, 1, T, k] of zeros, where a sampler keeps what tokens choose."""
  if not cfg.experts or not cfg.experts.record:
    return ()
  return (jnp.zeros((rows, 1, steps, cfg.experts.top_k), jnp.uint16),) * cfg.sparse_layers


def recorded(experts: tuple) -> tuple:
  """L x [S, 1, T, k] -> ([T, S, L, k],), or () of nothing."""
  return (jnp.stack([x[:, 0].swapaxes(0, 1) for x in experts], axis=2),) if experts else ()


def totals(routing: Routing, real) -> dict:
  """Sums over the real tokens [B, T], which add up over micro-batches.

  Returns:
    {'tokens': [], 'load', 'probs': [L, E], 'squares', 'entropy': [L]}: how
    many chose an expert, their probabilities of it, the squares of their
    log-normalisers, and how uncertain the router was of them, in nats.
  """
  real = real.astype(jnp.float32)
  logp = jax.nn.log_softmax(routing.logits, axis=-1)
  experts = jnp.arange(logp.shape[-1])
  counts = jnp.sum(  # [L, B, T, E], 1 where one of the k is that expert
    routing.chosen[..., None] == experts, axis=-2, dtype=jnp.float32
  )
  over = lambda y: jnp.einsum('lbt...,bt->l...', y, real, precision=jax.lax.Precision.HIGHEST)
  return {
    'tokens': jnp.sum(real),
    'load': over(counts),
    'probs': over(jnp.exp(logp)),
    'squares': over(jax.nn.logsumexp(routing.logits, axis=-1) ** 2),
    'entropy': over(-jnp.sum(jnp.exp(logp) * logp, axis=-1)),
  }


def balance_loss(sums: dict, tokens):
  """(load balancing, z): losses of a micro-batch, the means over layers of

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
  return (experts * jnp.mean(jnp.sum(share * sums['probs'], axis=-1)) / tokens, jnp.mean(sums['squares']) / tokens)


def loss_weights(section, cfg: ModelConfig) -> tuple[float, float]:
  """Those of `balance_loss`, of `config.router`."""
  out = section.balance_coef, section.z_coef
  if not cfg.experts and (any(out) or section.routing_replay):
    raise InputError(
      'config.router: balance_coef, z_coef and routing_replay are of mixtures of experts; this model has none'
    )
  return out


def metrics(sums: dict) -> dict:
  """Of a whole batch; the load is 1 of an expert with its equal share."""
  load = sums['load'] / jnp.mean(sums['load'], axis=-1, keepdims=True)
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
