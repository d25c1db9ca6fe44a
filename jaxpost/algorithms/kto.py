"""Training on completions labeled desirable or undesirable: KTO and APO-zero.

Legend: M micro-batches, B rows, T tokens, N sequences of a row (padded).

Each document has a completion (odd sequence, trained) and, after the same prompt, the completion of another prompt
(even sequence, scored only). The mean log-ratio of these mismatched completions is KTO's reference point z, one number
per batch. Ethayarajh et al. 2024 (arXiv:2402.01306), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.algorithms import preference
from jaxpost.algorithms.base import Algorithm, Config, expect, learning_rate
from jaxpost.data import preferences as data
from jaxpost.errors import refuse
from jaxpost.losses import pairs, preferences, reduce
from jaxpost.types import Batch, Objective

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.roles import Roles

LOSSES = ('kto', 'apo_zero_unpaired')


def objective(config: Config) -> Objective:
  """Returns the loss 1 - sigmoid(+-beta (log-ratio - z)), + for desirable completions (eq. 8)."""
  p = config.preference
  options = {'beta': p.beta, 'desirable_weight': p.desirable_weight, 'undesirable_weight': p.undesirable_weight}
  reads_z = _reads_mismatched(config)

  def over_sequences(outputs, batch):
    ids = batch.sequence_ids
    arrays = batch.arrays
    mask = batch.loss_weights != 0

    def per_sequence(x):  # [B, T] -> [B, N], of an array that is the same at all trained tokens of a sequence
      return pairs.sequence_max(x, ids)

    weights = per_sequence(batch.loss_weights)  # [B, N], 0 for the sequences that are scored only
    logps = reduce.sequence_sum(outputs.logprobs * mask, ids)
    ratio = logps - reduce.sequence_sum(arrays['ref_logprobs'] * mask, ids)
    desirable = per_sequence(arrays['label']) > 0
    z = jnp.max(arrays['kl']) if reads_z else jnp.zeros(())  # all tokens have the same value
    loss = preferences.kto(ratio, desirable, z, **options)
    metrics = {
      'kl': z,
      'rewards/accuracies': (ratio > z) == desirable,
      'entropy': per_sequence(reduce.sequence_mean(outputs.entropy, mask, ids)),
    }
    metrics = {name: (weights * x).sum() for name, x in metrics.items()}
    # The next metrics are means over the completions of one label, whose weights sum to 1.
    label_weights = per_sequence(arrays['label_weights'])
    for name, is_label in (('chosen', desirable), ('rejected', ~desirable)):
      metrics[f'rewards/{name}'] = (label_weights * is_label * p.beta * ratio).sum()
      metrics[f'logps/{name}'] = (label_weights * is_label * logps).sum()
    metrics['rewards/margins'] = metrics['rewards/chosen'] - metrics['rewards/rejected']
    return (weights * loss).sum(), metrics

  arrays = ('ref_logprobs', 'kl') if reads_z else ('ref_logprobs',)
  return Objective(over_sequences, coupled=True, reads=('entropy',), arrays=arrays)


def _reads_mismatched(config: Config) -> bool:
  """Returns True if the loss reads z; in 'apo_zero_unpaired' z is 0."""
  return config.preference.losses == ('kto',)


def prepare(batch: Batch, roles: Roles, config: Config) -> Batch:
  """Adds the log-probs of the reference and z, repeated for every token."""
  # The mismatched completions, whose loss weights are 0, are scored, too.
  ids = jnp.asarray(batch.sequence_ids)  # `render` numbers the sequences of every example
  scored = batch.replace(loss_weights=(ids > 0).astype(jnp.float32))
  arrays = {**preference.prepare(scored, roles, config).arrays}
  if _reads_mismatched(config):
    log_ratios = roles.policy.score(scored).logprobs - arrays['ref_logprobs']
    z = mismatch(log_ratios, arrays['kl_mask'], ids)
    arrays['kl'] = 0 * batch.loss_weights + z  # `full_like` needs a device of this process
  return batch.replace(arrays=arrays)


def mismatch(log_ratios: jax.Array, kl_mask: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Returns z [] = max(0, the mean over mismatched completions of their log-ratios).

  Args:
    log_ratios, kl_mask, sequence_ids: [M, B, T]; the mask is 1 on the tokens of mismatched completions.
  """
  count = jax.vmap(pairs.sequence_max)(kl_mask, sequence_ids).sum()
  total = (log_ratios * kl_mask).sum()
  return jnp.maximum(total / jnp.maximum(count, 1), 0)


def render(rows: Rows, tokenizer: Tokenizer, config: Config) -> Callable[[int], Example]:
  """Returns a function of a row number: an Example with a completion and a mismatched one."""

  def answer(n):
    other = rows[data.mismatched(rows, n)]
    return data.make_unpaired_example(
      tokenizer, rows[n], other, rows.where(n), share_prompt=config.preference.share_prompt
    )

  return answer


def check(config: Config) -> None:
  """Raises InputError for losses and fields that cannot work together."""
  p = config.preference
  refuse(
    len(p.losses) != 1, f'config.preference.losses: {len(p.losses)} of them; kto has one loss, {" or ".join(LOSSES)}'
  )
  preference.check_name(p.losses[0], LOSSES)
  refuse(
    bool(p.loss_weights),
    'config.preference.loss_weights: kto has one loss; weigh its labels with desirable_weight and undesirable_weight',
  )
  preference.check_fields(config)
  refuse(p.nll_coef > 0, 'config.preference.nll_coef: kto has no chosen answers; set it to 0')


def check_first_step(metrics: dict, config: Config) -> None:
  """Raises AssertionError unless rewards and z are 0 and the loss is that of sigmoid(0) = 1/2."""
  p = config.preference
  exact = config.model.dtype == 'float32'
  # Rewards are sums over a completion, and the two programs may round bfloat16 at different places.
  tolerance = 1e-4 if exact else 0.5 * p.beta
  limits = {
    'rewards/chosen': (0.0, tolerance),
    'rewards/rejected': (0.0, tolerance),
    'kl': (0.0, 1e-3 if exact else 0.5),
  }
  if p.desirable_weight == p.undesirable_weight:
    limits['loss'] = (p.desirable_weight / 2, p.desirable_weight * tolerance)
  expect(metrics, limits, 'the policy is its own reference before it learns')


KTO = ALGORITHM = Algorithm(
  objective,
  {'preference': {'losses': ('kto',), 'nll_coef': 0.0}, 'optim': {'lr': learning_rate(1e-6)}},
  sections=('preference',),
  needs=preference.needs,
  prepare=prepare,
  precompute=preference.precompute,
  check=check,
  check_first_step=check_first_step,
  render=render,
  per='label',
)
