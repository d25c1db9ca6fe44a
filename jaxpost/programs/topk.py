"""The program that finds the most probable tokens of a teacher, for distillation from a part of the vocabulary.

Legend: M micro-batches, B rows, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.losses import head as head_lib
from jaxpost.losses import head_chunk
from jaxpost.programs import score, train
from jaxpost.types import Objective

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model
  from jaxpost.programs.compile import Ledger, Program


def make_topk(
  model: Model,
  layout: Layout,
  compute: Compute,
  ledger: Ledger,
  *,
  k: int,
  vocab_size: int,
  temperature: float,
  own: bool = False,
) -> Program:
  """Makes the program topk(params, batch [M, B, T]) -> (ids, log-probs, last).

  ids and log-probs [M, B, T, k] are those of the k most probable tokens in the place of each weighted token, among
  the first `vocab_size` ids. last [M, B, T] is the number of these ids that the model has; with `own`, the log-prob
  of the token itself.
  """
  plan = train.head_config(model, Objective(None, temperature=temperature), layout, compute)
  plan = plan._replace(vocab_size=min(vocab_size, plan.vocab_size))

  def rows(params, batch):
    hidden = train.run_model(model, params, batch, layout, compute)
    found = top_tokens(plan, hidden, model.head(params), train.next_token(batch.loss_weights), k)
    found = jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), found)
    if own:
      return *found, train.read_outputs(model, plan, params, hidden, batch).logprobs
    return *found, jnp.full_like(batch.tokens, plan.vocab_size)

  return score.reader('topk', rows, model, layout, ledger)


def top_tokens(
  config: head_chunk.HeadConfig, hidden: jax.Array, head: jax.Array, mask: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
  """Finds the k most probable tokens after each position, most probable first, chunk by chunk.

  Args:
    hidden: [B, T, D].
    head: [V, D].
    mask: [B, T]; positions with 0 are skipped.

  Returns:
    (ids [B, T, k] int32, log_softmax(logits / temperature) [B, T, k] float32),
    0 where the mask is 0.
  """
  order = head_lib.nonzero_first(mask)
  rows, length = mask.shape
  chunk = head_chunk.chunk_length(rows, length, head.shape[0], config.compute.head_elements)
  order = jnp.pad(order, ((0, 0), (0, -length % chunk)))

  def body(i, found):
    index = jax.lax.dynamic_slice_in_dim(order, i * chunk, chunk, axis=1)
    logits = head_chunk.masked_logits(config, head_lib.reorder(hidden, index), head, config.temperature)
    top, ids = jax.lax.top_k(logits, k)
    top -= jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return tuple(
      jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), i * chunk, axis=1)
      for x, new in zip(found, (ids, top))
    )

  found = (jnp.zeros((*order.shape, k), jnp.int32), jnp.zeros((*order.shape, k), jnp.float32))
  longest = jnp.max(jnp.sum(mask != 0, axis=1))
  found = jax.lax.fori_loop(0, -(-longest // chunk), body, found)
  back = head_lib.inverse(order[:, :length])
  ids, logprobs = (jnp.where((mask != 0)[..., None], head_lib.reorder(x[:, :length], back), 0) for x in found)
  return ids, logprobs
