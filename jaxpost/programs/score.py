"""Programs that read: log-probs, values and hidden states of packed rows.

Legend: M micro-batches, B rows, T tokens, D hidden size.
"""

from __future__ import annotations

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

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model


def make_score(model: Model, layout: Layout, compute: Compute, ledger: Ledger, *, temperature: float = 1.0) -> Program:
  """score(params, batch [M, B, T]) -> Outputs [M, B, T] of weighted tokens.

  A model with a scalar head gives `values`, of all tokens.
  """
  plan = head_chunk.HeadConfig(
    None, model.config.vocab_size, temperature, compute, layout, learns=(), form=model.config.logit_form
  )

  def rows(params, batch):
    hidden = train.run_model(model, params, batch, layout, compute)
    return train.read_outputs(model, plan, params, hidden, batch)

  name = 'score' if model.head else 'values'
  return _reader(name, rows, model, layout, ledger)


def make_hidden(model: Model, layout: Layout, compute: Compute, ledger: Ledger) -> Program:
  """hidden(params, batch [M, B, T]) -> final hidden states [M, B, T, D]."""

  def rows(params, batch):
    hidden = train.run_model(model, params, batch, layout, compute)
    return hidden.astype(compute.dtype)

  return _reader('hidden', rows, model, layout, ledger)


def make_topk(
  model: Model, layout: Layout, compute: Compute, ledger: Ledger, *, k: int, vocab_size: int, temperature: float
) -> Program:
  """topk(params, batch [M, B, T]) -> (ids, log-probs), each [M, B, T, k].

  Of weighted tokens: what the model holds most probable in the place of each,
  among the first `vocab_size` ids.
  """
  plan = head_chunk.HeadConfig(
    None, min(vocab_size, model.config.vocab_size), temperature, compute, layout, form=model.config.logit_form
  )

  def rows(params, batch):
    hidden = train.run_model(model, params, batch, layout, compute)
    found = head_lib.top_tokens(plan, hidden, model.head(params), train.next_token(batch.loss_weights), k)
    return jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), found)

  return _reader('topk', rows, model, layout, ledger)


def _reader(name: str, rows: Callable, model: Model, layout: Layout, ledger: Ledger) -> Program:
  """A program over micro-batches; empty ones at the end are not run."""

  def read(params, batch):
    micro = lambda i: jax.tree.map(lambda x: x[i], batch)
    if batch.tokens.shape[0] == 1:
      return jax.tree.map(lambda x: x[None], rows(params, micro(0)))
    used = jnp.sum(jnp.any(batch.segment_ids > 0, axis=(1, 2)))
    zeros = jax.tree.map(
      lambda x: jnp.zeros((len(batch.tokens), *x.shape), x.dtype), jax.eval_shape(rows, params, micro(0))
    )
    return jax.lax.fori_loop(
      0, used, lambda i, acc: jax.tree.map(lambda a, x: a.at[i].set(x), acc, rows(params, micro(i))), zeros
    )

  def flops(params, batch):
    del params
    return batch.tokens.size * flops_per_token(model.config, batch.tokens.shape[-1] / 2)

  # Rows that the mesh of frozen models does not divide stay whole.
  place = lambda shapes: jax.tree.map(lambda x: layout.sharding((None, 'batch', None), x.shape), shapes)
  return Program(name, read, ledger, place, flops=flops)


def frozen_copy(model: Model, params, compute: Compute, shardings, ledger: Ledger) -> dict:
  """A copy that only scores, in the type that products round it to anyway."""

  def copy(params):
    return jax.tree.map(lambda x, p: narrow(x, p, compute), params, nest(model.table))

  return Program('copy', copy, ledger, shardings)(params)
