"""The loss on held-out documents during training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax

from jaxpost.data import packing
from jaxpost.distributed.transfer import to_host
from jaxpost.errors import InputError
from jaxpost.programs import score

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.programs.compile import Program
  from jaxpost.roles import Roles
  from jaxpost.stage.place import PlacedStage
  from jaxpost.types import Batch


@dataclasses.dataclass
class HeldOut:
  """The objective and its metrics on held-out documents.

  batches: host batches, weights normalized over all of them.
  program: `programs.score.make_evaluate`.
  prepare: (placed batch, roles) -> batch, as in training.
  """

  batches: list[Batch]
  program: Program
  prepare: Callable[[Batch, Roles], Batch]

  def __call__(self, roles: Roles) -> dict:
    """Means over all the documents, however they fall into batches."""
    policy = roles.policy
    totals: dict[str, float] = {}
    for batch in self.batches:
      placed = self.prepare(policy.place(batch), roles)
      found = to_host(self.program(policy.state.params, placed, policy.state.step, policy.frozen))
      for name, value in found.items():
        totals[name] = totals.get(name, 0.0) + float(value)
    # Losses of pairs and labels are no negative log-likelihood.
    if set(totals) >= {'loss', 'entropy'} and 'rewards/chosen' not in totals:
      nll = totals.get('nll', totals['loss'])  # without what is added to the loss
      totals['perplexity'] = math.exp(min(nll, 50.0))  # a float overflows from exp(710) on
    return totals


def make(placed: PlacedStage) -> HeldOut:
  """Makes the evaluation of the documents that a stage holds out."""
  config, algorithm, held_out = placed.config, placed.algorithm, placed.data.held_out
  assert held_out is not None and held_out.documents is not None, 'see `assemble.make_evaluator`'
  documents = held_out.documents
  examples = [documents[n] for n in range(len(documents))]
  return HeldOut(
    batches=eval_batches(examples, placed.shape.rows, placed.shape.row_length, per=algorithm.mean_per(config)),
    program=score.make_evaluate(placed.model, placed.objectives['policy'], placed.train, placed.compute, placed.ledger),
    prepare=lambda batch, roles: algorithm.prepare(batch, roles, config),
  )


def eval_batches(
  examples: Sequence[Example | None], batch_size: int, row_length: int, per: str = 'token'
) -> list[Batch]:
  """Packs each example once, into a list of Batches [batch_size, row_length].

  The last batch is filled with empty rows. Weights are divided by a figure of all batches together, so that sums over
  batches are means; `per` as in training. Examples above `row_length` are cut to it, and count nothing where only their
  prompt is left.
  """
  given = [e for e in examples if e is not None]
  cut = [c for e in given if (c := e.cut(row_length)) is not None]
  if not any(e.trained.any() for e in cut):
    raise InputError(f'evaluation: none of the {len(given)} documents has a trained token within {row_length} tokens')
  rows = packing.pack_examples(cut, row_length)
  num_rows = math.ceil(len(rows) / batch_size) * batch_size
  whole = packing.to_batch([[cut[i] for i in row] for row in rows], row_length, num_rows, per=per)
  return [jax.tree.map(lambda x, n=n: x[n : n + batch_size], whole) for n in range(0, num_rows, batch_size)]
