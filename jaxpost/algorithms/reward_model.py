"""Reward models: a decoder with a scalar head that scores the text up to a token.

Legend: B rows, T tokens a row, P pairs of a row.

From pairs (Bradley-Terry) and from scores the head is read at the last token
of a completion, from judged steps (a process reward model) at the last token
of each step. Those tokens, and no others, have a weight.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpost.algorithms.base import Algorithm, expect
from jaxpost.data import preferences
from jaxpost.losses import reduce, values
from jaxpost.types import Objective

_PER = {'bradley_terry': 'pair', 'regression': 'sequence', 'process': 'token'}


def objective(config) -> Objective:
  """Returns the loss of `config.reward_model.loss`."""
  if config.reward_model.loss == 'bradley_terry':
    return _bradley_terry(config.reward_model.center_coef)
  return {'regression': _REGRESSION, 'process': _PROCESS}[config.reward_model.loss]


def _bradley_terry(center_coef: float) -> Objective:
  """-log sigmoid(score of chosen - score of rejected - margin), per pair."""

  def pairs(outputs, batch):
    weights, ids = batch.loss_weights, batch.sequence_ids
    # One token of a sequence has a weight: the sum picks what stands there.
    at_end = lambda x: reduce.split_pairs(reduce.sequence_sum(jnp.where(weights > 0, x, 0), ids))
    chosen, rejected = at_end(outputs.values)
    margin, _ = at_end(batch.arrays['margin'])
    weight, _ = at_end(weights)  # [B, P], 0 where there is no pair
    loss = jax.vmap(lambda *row: values.bradley_terry(*row, center_coef))(chosen, rejected, margin)
    total = lambda x: jnp.sum(weight * x)
    return total(loss), {
      'rewards/chosen': total(chosen),
      'rewards/rejected': total(rejected),
      'rewards/margins': total(chosen - rejected),
      'rewards/accuracies': total(chosen > rejected),
      'margin': total(jnp.abs(margin)),
    }  # what the data asks for

  return Objective(pairs, coupled=True)


def _per_token(loss: Callable, metrics: Callable) -> Objective:
  """The weighted sum of loss(scores, labels) over tokens."""

  def tokens(outputs, batch):
    # Elsewhere labels mean nothing, and inf times 0 would be NaN.
    read = batch.loss_weights > 0
    scores = jnp.where(read, outputs.values, 0)
    labels = batch.arrays['label']
    total = lambda x: jnp.sum(batch.loss_weights * x)
    return total(loss(scores, labels)), {name: total(x) for name, x in metrics(scores, labels).items()}

  return Objective(tokens, coupled=True)


_REGRESSION = _per_token(
  values.squared_error,
  lambda scores, labels: {'rewards/mean': scores, 'labels/mean': labels, 'rewards/error': jnp.abs(scores - labels)},
)
_PROCESS = _per_token(
  values.process_reward_loss,
  lambda scores, labels: {
    'rewards/mean': jax.nn.sigmoid(scores),
    'labels/mean': labels,
    'rewards/accuracies': (scores > 0) == (labels > 0.5),
  },
)


def render(rows, tokenizer, config) -> Callable:
  """Returns a function of a row number: its Example, from the columns that the loss needs."""
  kind = config.reward_model.loss
  if kind == 'bradley_terry':
    make = functools.partial(
      preferences.make_pair_example, train_on='last', share_prompt=config.preference.share_prompt
    )
  else:
    make = {'regression': preferences.make_scored_example, 'process': preferences.make_steps_example}[kind]

  def one(n):
    row = rows[n]  # None: dropped by the map of a source that is streamed
    return row and make(tokenizer, row, rows.where(n))

  return one


def check_first_step(metrics, config):
  """AssertionError unless a head of zeros gives the loss log 2 per pair without a margin."""
  names = 'rewards/chosen', 'rewards/rejected', 'margin'
  if config.reward_model.loss == 'bradley_terry' and not any(metrics[name] for name in names):
    expect(metrics, {'loss': (math.log(2), 1e-5)}, 'all scores are 0 before the head has been trained')


REWARD_MODEL = ALGORITHM = Algorithm(
  objective,
  render=render,
  check_first_step=check_first_step,
  per=lambda config: _PER[config.reward_model.loss],
  scalar_head=True,
)
