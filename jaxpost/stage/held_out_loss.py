"""The loss on held-out documents during training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
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

  batches: host batches, whose token weights are normalized over all of them together.
  program: `programs.score.make_evaluate`.
  prepare: (placed batch, roles) -> batch, as in training.
  """

  batches: Iterable[Batch]
  program: Program
  prepare: Callable[[Batch, Roles], Batch]

  def __call__(self, roles: Roles) -> dict:
    """Returns {metric: mean over all documents}, whatever batches they are in."""
    policy = roles.policy
    totals: dict[str, float] = {}
    for batch in self.batches:
      placed = self.prepare(policy.place(batch), roles)
      sums = to_host(self.program(policy.state.params, placed, policy.state.step, policy.frozen))
      for name, value in sums.items():
        totals[name] = totals.get(name, 0.0) + float(value)
    # Losses of preference pairs and of labels are no negative log-likelihoods.
    if set(totals) >= {'loss', 'entropy'} and 'rewards/chosen' not in totals:
      nll = totals.get('nll', totals['loss'])  # 'nll' is the loss without added terms
      totals['perplexity'] = math.exp(min(nll, 50.0))  # exp(710) would overflow
    return totals


def make(placed: PlacedStage) -> HeldOut:
  """Makes the evaluation of a stage's held-out documents."""
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

  The last batch is filled with empty rows. Weights are normalized over all batches together, so that sums over batches
  are means; `per` as in training. Longer examples are cut to `row_length`, and left out if only their prompt remains.
  """
  documents = [example for example in examples if example is not None]
  cut = [c for document in documents if (c := document.cut(row_length)) is not None]
  if not any(e.trained.any() for e in cut):
    raise InputError(
      f'evaluation: none of the {len(documents)} documents has a trained token within {row_length} tokens'
    )
  rows = packing.pack_examples(cut, row_length)
  num_rows = math.ceil(len(rows) / batch_size) * batch_size
  whole = packing.to_batch([[cut[i] for i in row] for row in rows], row_length, num_rows, per=per)
  return [jax.tree.map(lambda x, n=n: x[n : n + batch_size], whole) for n in range(0, num_rows, batch_size)]
