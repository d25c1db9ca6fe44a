"""Forward-only programs: log-probs, values, most probable tokens, hidden states and the loss of packed rows.

Legend: M micro-batches, B rows, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.losses import head as head_lib
from jaxpost.losses import head_chunk
from jaxpost.models.parameters import narrow, nest
from jaxpost.models.transformer import flops_per_token
from jaxpost.programs import train
from jaxpost.programs.compile import Ledger, Program
from jaxpost.types import Batch, Objective

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model


def make_score(model: Model, layout: Layout, compute: Compute, ledger: Ledger, *, temperature: float = 1.0) -> Program:
  """Makes the program score(params, batch [M, B, T]) -> Outputs [M, B, T] of weighted tokens.

  A model with a scalar head returns `values`, of all tokens, and only these if it has no language-model head.
  """
  head = train.head_config(model, Objective(None, reads=('entropy',), temperature=temperature), layout, compute)

  def read(params, batch):
    hidden = train.run_model(model, params, batch, layout, compute)
    return train.read_outputs(model, head, params, hidden, batch)

  return reader('score' if model.head else 'values', read, model, layout, ledger)


def make_hidden(model: Model, layout: Layout, compute: Compute, ledger: Ledger) -> Program:
  """Makes the program hidden(params, batch [M, B, T]) -> final hidden states [M, B, T, D]."""

  def read(params, batch):
    hidden = train.run_model(model, params, batch, layout, compute)
    return hidden.astype(compute.dtype)

  return reader('hidden', read, model, layout, ledger)


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

  return reader('topk', read, model, layout, ledger)


def make_evaluate(model: Model, objective: Objective, layout: Layout, compute: Compute, ledger: Ledger) -> Program:
  """Makes the program evaluate(params, batch [M, B, T], step, frozen) -> {metric: []}.

  It sums the objective and its metrics without an update: without noise, dropout, router losses and the loss of
  multi-token prediction.
  """
  loss_fn = train.make_loss(
    dataclasses.replace(model, dropout=0.0),
    dataclasses.replace(objective, neftune_alpha=0.0, mtp_weight=0.0, router=(0.0, 0.0)),
    layout,
    compute,
  )

  def evaluate(params, batch: Batch, step, frozen: dict):
    # Empty micro-batches, which are few here, are not skipped, so that XLA knows the number of iterations.
    micro_loss = functools.partial(loss_fn, params, step=step, frozen=frozen)
    loss, metrics = train.fold_micro_batches(micro_loss, batch, count=len(batch.tokens))
    metrics.pop(train.ROUTER, None)
    return metrics | {'loss': loss}

  return Program('evaluate', evaluate, ledger, layout.sharding())


def reader(name: str, fn: Callable, model: Model, layout: Layout, ledger: Ledger) -> Program:
  """Makes a program that stacks fn(params, micro-batch) over a batch [M, B, T]; empty ones at the end are skipped."""

  def read(params, batch):
    return train.fold_micro_batches(functools.partial(fn, params), batch, stack=True)

  def flops(_params, batch):
    return batch.tokens.size * flops_per_token(model.config, batch.tokens.shape[-1] / 2)

  # Rows are not split if their number is not a multiple of the batch shards, as may be on a mesh of frozen models.
  def place(shapes):
    return jax.tree.map(lambda x: layout.sharding((None, 'batch', None), x.shape), shapes)

  return Program(name, read, ledger, place, flops=flops)


def frozen_copy(model: Model, params: dict, compute: Compute, shardings: dict, ledger: Ledger) -> dict:
  """Returns a copy of the parameters for scoring, in the type to which matrix products round them."""

  def copy(params):
    return jax.tree.map(lambda x, p: narrow(x, p, compute), params, nest(model.table))

  return Program('copy', copy, ledger, shardings)(params)


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
