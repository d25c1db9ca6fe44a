"""Reward models: a decoder with a scalar head that scores the text up to a token.

Legend: B rows, T tokens a row, P pairs of a row.

Trained on pairs (Bradley-Terry) or on scores, the head is read at the last token of a completion; trained on labeled
steps (a process reward model), at the last token of each step. Only those tokens have a weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.algorithms.base import Algorithm, Config, expect, learning_rate
from jaxpost.data import preferences
from jaxpost.losses import pairs, reduce, values
from jaxpost.types import Objective

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer


def objective(config: Config) -> Objective:
  """Returns the loss of `config.reward_model.loss`; its equation is in `losses.values`."""
  kind = config.reward_model.loss
  if kind == 'bradley_terry':
    return _bradley_terry(config.reward_model.center_coef)
  return _per_token(_regression if kind == 'regression' else _process)


def _bradley_terry(center_coef: float) -> Objective:
  """-log sigmoid(score of chosen - score of rejected - margin), the mean over pairs."""

  def over_pairs(outputs, batch):
    weights = batch.loss_weights

    def at_end(x):
      # Only the last token of a sequence has a weight, so the sum is the value there.
      return pairs.split_pairs(reduce.sequence_sum(jnp.where(weights > 0, x, 0), batch.sequence_ids))

    chosen, rejected = at_end(outputs.values)
    margin, _ = at_end(batch.arrays['margin'])  # a column of the data
    pair_weights, _ = at_end(weights)  # [B, P], 0 where there is no pair

    def total(x):
      return jnp.sum(pair_weights * x)

    loss = jax.vmap(functools.partial(values.bradley_terry, center_coef=center_coef))(chosen, rejected, margin)
    return total(loss), {
      'rewards/chosen': total(chosen),
      'rewards/rejected': total(rejected),
      'rewards/margins': total(chosen - rejected),
      'rewards/accuracies': total(chosen > rejected),
      'margin': total(jnp.abs(margin)),
    }

  return Objective(over_pairs, coupled=True)


def _per_token(loss_and_metrics: Callable[[jax.Array, jax.Array], tuple[jax.Array, dict]]) -> Objective:
  """The weighted sums over tokens of the loss and metrics, a function of scores and labels, both [B, T]."""

  def over_tokens(outputs, batch):
    # The score of a token with weight 0 may be infinite, and inf * 0 is NaN.
    scores = jnp.where(batch.loss_weights > 0, outputs.values, 0)
    loss, metrics = loss_and_metrics(scores, batch.arrays['label'])

    def total(x):
      return jnp.sum(batch.loss_weights * x)

    return total(loss), {name: total(x) for name, x in metrics.items()}

  return Objective(over_tokens, coupled=True)


def _regression(scores, labels):
  """Squared error of the score."""
  metrics = {'rewards/mean': scores, 'labels/mean': labels, 'rewards/error': jnp.abs(scores - labels)}
  return values.squared_error(scores, labels), metrics


def _process(scores, labels):
  """Cross entropy of each step: right or wrong ("Let's verify step by step", arXiv:2305.20050)."""
  metrics = {
    'rewards/mean': jax.nn.sigmoid(scores),
    'labels/mean': labels,
    'rewards/accuracies': (scores > 0) == (labels > 0.5),
  }
  return values.process_reward_loss(scores, labels), metrics


def mean_per(config: Config) -> str:
  """Returns the unit that the loss is a mean of."""
  units = {'bradley_terry': 'pair', 'regression': 'sequence', 'process': 'token'}
  return units[config.reward_model.loss]


def render(rows: Rows, tokenizer: Tokenizer, config: Config) -> Callable[[int], Example | None]:
  """Returns a function of a row number: its Example, from the columns that the loss needs."""
  kind = config.reward_model.loss

  def make(row, where):
    if kind == 'regression':
      return preferences.make_scored_example(tokenizer, row, where)
    if kind == 'process':
      return preferences.make_steps_example(tokenizer, row, where)
    share_prompt = config.preference.share_prompt
    return preferences.make_pair_example(tokenizer, row, where, train_on='last', share_prompt=share_prompt)

  def example(n):
    row = rows[n]  # None: dropped by the map of a source that is streamed
    return row and make(row, rows.where(n))

  return example


def check_first_step(metrics: dict, config: Config) -> None:
  """Raises AssertionError unless a head of zeros gives the loss log 2 per pair without a margin."""
  if config.reward_model.loss != 'bradley_terry':
    return
  names = ('rewards/chosen', 'rewards/rejected', 'margin')
  if not any(metrics[name] for name in names):
    expect(metrics, {'loss': (math.log(2), 1e-5)}, 'all scores are 0 before the head has been trained')


REWARD_MODEL = ALGORITHM = Algorithm(
  objective,
  {'optim': {'lr': learning_rate(1e-5)}},
  sections=('preference', 'reward_model'),
  render=render,
  check_first_step=check_first_step,
  per=mean_per,
  scalar_head=True,
)
