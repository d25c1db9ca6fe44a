"""Draws of an update that depend on the step and on a row's tokens alone: dropout, and noise on embeddings.

Legend: B rows, T tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
  from jaxpost.models.model import Model
  from jaxpost.types import Batch, Objective

# The second word of a key, so that draws for different purposes are independent.
_NOISE = 0
_DROPOUT = 1


def draws(model: Model, objective: Objective, batch: Batch, step: int | jax.Array) -> dict[str, jax.Array]:
  """Returns those arguments of `Model.forward` that are drawn: `dropout` [B, 2] uint32, `noise` [B, T, D]."""
  found = {}
  if model.dropout:
    found['dropout'] = jax.random.key_data(row_keys(batch, step, _DROPOUT, objective.seed))
  if objective.neftune_alpha:
    found['noise'] = neftune(batch, step, model.config.hidden_size, objective.neftune_alpha, objective.seed)
  return found


def row_keys(batch: Batch, step: int | jax.Array, purpose: int, seed: int) -> jax.Array:
  """Returns a key per row, [B], of the step and the row's tokens alone: micro-batches do not change draws."""
  factors = 2 * jnp.arange(batch.tokens.shape[1], dtype=jnp.uint32) + 1
  text = jnp.sum(batch.tokens.astype(jnp.uint32) * factors, axis=1)
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), step)
  return jax.vmap(lambda t: jax.random.fold_in(key, t))(text)


def neftune(batch: Batch, step: int | jax.Array, width: int, alpha: float, seed: int) -> jax.Array:
  """Returns uniform noise [B, T, D] of size alpha / sqrt(document length * D).

  Jain et al. 2023 (arXiv:2310.05914), algorithm 1.
  """
  draw = jax.vmap(lambda key: jax.random.uniform(key, (batch.tokens.shape[1], width), minval=-1.0))(
    row_keys(batch, step, _NOISE, seed)
  )
  same_document = batch.segment_ids[:, :, None] == batch.segment_ids[:, None]
  lengths = jnp.sum(same_document, axis=-1)
  return draw * (alpha / jnp.sqrt(lengths * width))[..., None] * (batch.segment_ids > 0)[..., None]
