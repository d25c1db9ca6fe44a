"""The program that finds the most probable tokens of a teacher.

Legend: M micro-batches, B rows, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.losses import top_tokens
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
    found = top_tokens.top_tokens(plan, hidden, model.head(params), train.next_token(batch.loss_weights), k)
    found = jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), found)
    if own:
      return *found, train.read_outputs(model, plan, params, hidden, batch).logprobs
    return *found, jnp.full_like(batch.tokens, plan.vocab_size)

  return score.reader('topk', rows, model, layout, ledger)
