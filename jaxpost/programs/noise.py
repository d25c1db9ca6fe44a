"""Random numbers of an update, which do not depend on the mesh: dropout, noise on embeddings, stochastic rounding.

Legend: B rows, T tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
  from jaxpost.models.model import Model
  from jaxpost.types import Batch, Objective

_NOISE, _DROPOUT = 0, 1  # folded into keys, so that draws for different purposes are independent


def draws(model: Model, objective: Objective, batch: Batch, step: int | jax.Array) -> dict[str, jax.Array]:
  """Returns the random arguments of `Model.forward`: keys `dropout` [B, 2] uint32 and `noise` [B, T, D], if any."""
  options = {}
  if model.dropout:
    options['dropout'] = jax.random.key_data(row_keys(batch, step, _DROPOUT, objective.seed))
  if objective.neftune_alpha:
    options['noise'] = neftune(batch, step, model.config.hidden_size, objective.neftune_alpha, objective.seed)
  return options


def row_keys(batch: Batch, step: int | jax.Array, purpose: int, seed: int) -> jax.Array:
  """Returns a key per row, [B], from the step and a hash of the row's tokens, so that micro-batches do not matter."""
  factors = 2 * jnp.arange(batch.tokens.shape[1], dtype=jnp.uint32) + 1
  hashes = jnp.sum(batch.tokens.astype(jnp.uint32) * factors, axis=1)
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), step)
  return jax.vmap(lambda row_hash: jax.random.fold_in(key, row_hash))(hashes)


def neftune(batch: Batch, step: int | jax.Array, width: int, alpha: float, seed: int) -> jax.Array:
  """Returns uniform noise [B, T, D] within alpha / sqrt(document length * D) (NEFTune, arXiv:2310.05914)."""
  keys = row_keys(batch, step, _NOISE, seed)
  noise = jax.vmap(lambda key: jax.random.uniform(key, (batch.tokens.shape[1], width), minval=-1.0))(keys)
  same_document = batch.segment_ids[:, :, None] == batch.segment_ids[:, None]
  lengths = jnp.sum(same_document, axis=-1)
  return noise * (alpha / jnp.sqrt(lengths * width))[..., None] * (batch.segment_ids > 0)[..., None]


def add_rounded(params: Any, updates: Any, step: int | jax.Array) -> Any:
  """Returns params + updates; in bfloat16 the sum is rounded up or down at random, so that its mean is exact.

  Rounding to nearest would drop every update below a 512th of a weight, which most updates are (Zamirai et al. 2020,
  arXiv:2010.06192). The draws depend only on the step and the leaf, not on the mesh.
  """
  key = jax.random.fold_in(jax.random.key(0), step)

  def updated(i, x, update):
    if x.dtype != jnp.bfloat16:
      return (x + update).astype(x.dtype)
    return round_stochastically(x.astype(jnp.float32) + update, jax.random.fold_in(key, i))

  leaves, tree = jax.tree.flatten(params)
  return tree.unflatten([updated(i, x, u) for i, (x, u) in enumerate(zip(leaves, tree.flatten_up_to(updates)))])


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
  """Returns float32 `x` rounded to one of its neighbors in bfloat16, with probabilities that make the mean x."""
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
  rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
  return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
