"""Routing replay: a sampler records the experts of its tokens, and scoring and training of that step use them again.

Sampler and trainer round differently, so that they may choose different experts for a token with almost equal router
scores. Its log-prob then jumps, and so do importance ratios ("rollout routing replay", Ma et al., arXiv:2510.11370).
The router still learns, through the weights of the recorded experts.

Legend: T tokens, k experts of a token, L layers, S slots.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.models.config import ModelConfig

if TYPE_CHECKING:
  from jaxpost.models.model import Model
  from jaxpost.models.routing import Routing


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
