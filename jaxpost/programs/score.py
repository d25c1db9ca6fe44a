"""Forward-only programs: log-probs, values, hidden states and the loss of packed rows.

Legend: M micro-batches, B rows, T tokens, D hidden size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

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
