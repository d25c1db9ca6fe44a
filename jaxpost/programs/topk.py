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

  ids and log-probs [M, B, T, k] are the teacher's k most probable tokens at the place of each token with a weight,
  among the first `vocab_size` ids. last [M, B, T] is the number of these ids that the teacher has or, with `own`, its
  log-prob of the token of the batch.
  """
  config = train.head_config(model, Objective(None, temperature=temperature), layout, compute)
  config = config._replace(vocab_size=min(vocab_size, config.vocab_size))

  def read(params, batch):
    hidden = train.run_model(model, params, batch, layout, compute)
    top = top_tokens(config, hidden, model.head(params), train.next_token(batch.loss_weights), k)
    ids, logprobs = (jnp.roll(x, 1, axis=1) for x in top)  # to the place of the token that they predict
    if own:
      return ids, logprobs, train.read_outputs(model, config, params, hidden, batch).logprobs
    return ids, logprobs, jnp.full_like(batch.tokens, config.vocab_size)

  return score.reader('topk', read, model, layout, ledger)


def top_tokens(
  config: head_chunk.HeadConfig, hidden: jax.Array, head: jax.Array, mask: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
  """Finds the k most probable tokens after each position, most probable first, chunk by chunk.

  Args:
    hidden: [B, T, D].
    head: [V, D].
    mask: [B, T]; positions with 0 are skipped.

  Returns:
    (ids [B, T, k] int32, log_softmax(logits / temperature) [B, T, k] float32), 0 where the mask is 0.
  """
  order = head_lib.nonzero_first(mask)
  rows, length = mask.shape
  chunk = head_chunk.chunk_length(rows, length, head.shape[0], config.compute.head_elements)
  order = jnp.pad(order, ((0, 0), (0, -length % chunk)))

  def body(i, outputs):
    index = jax.lax.dynamic_slice_in_dim(order, i * chunk, chunk, axis=1)
    logits = head_chunk.masked_logits(config, head_lib.reorder(hidden, index), head, config.temperature)
    top, ids = jax.lax.top_k(logits, k)
    top -= jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return tuple(
      jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), i * chunk, axis=1)
      for x, new in zip(outputs, (ids, top))
    )

  outputs = (jnp.zeros((*order.shape, k), jnp.int32), jnp.zeros((*order.shape, k), jnp.float32))
  longest = jnp.max(jnp.sum(mask != 0, axis=1))
  outputs = jax.lax.fori_loop(0, -(-longest // chunk), body, outputs)
  inverse = head_lib.inverse(order[:, :length])
  ids, logprobs = (jnp.where((mask != 0)[..., None], head_lib.reorder(x[:, :length], inverse), 0) for x in outputs)
  return ids, logprobs
