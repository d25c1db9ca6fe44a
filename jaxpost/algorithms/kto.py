"""Training on completions labeled desirable or undesirable: KTO and APO-zero.

Legend: M micro-batches, B rows, T tokens, N sequences of a row (padded).

Each document has a completion (odd sequence, trained) and, after the same prompt, the
completion of another prompt (even sequence, scored only). The mean log-ratio of the
latter is KTO's reference point z, one number per batch.
Ethayarajh et al. 2024 (arXiv:2402.01306), section 4.1.
"""

import jax
import jax.numpy as jnp

from jaxpost.algorithms import preference
from jaxpost.algorithms.base import Algorithm, expect, refuse
from jaxpost.data import preferences as data
from jaxpost.losses import preferences, reduce
from jaxpost.types import Objective

LOSSES = ('kto', 'apo_zero_unpaired')


def objective(config) -> Objective:
  """Returns the loss 1 - sigmoid(+-beta (log-ratio - z)), + for desirable completions."""
  p = config.preference
  weigh = dict(beta=p.beta, desirable_weight=p.desirable_weight, undesirable_weight=p.undesirable_weight)
  shifted = p.losses == ('kto',)

  def over_sequences(outputs, batch):
    ids, arrays = batch.sequence_ids, batch.arrays
    mask = batch.loss_weights != 0
    total = lambda x: reduce.sequence_sum(x * mask, ids)
    each = lambda x: reduce.sequence_max(x, ids)
    weights, logps = each(batch.loss_weights), total(outputs.logprobs)
    ratio = logps - total(arrays['ref_logprobs'])
    good = each(arrays['label']) > 0
    if shifted:
      z = jnp.max(arrays['kl'])  # the same everywhere
      loss = preferences.kto(ratio, good, z, **weigh)
    else:
      z = jnp.zeros(())
      loss = preferences.apo_zero_unpaired(ratio, good, **weigh)
    metrics = {
      'kl': z,
      'rewards/accuracies': (ratio > z) == good,
      'entropy': each(reduce.sequence_mean(outputs.entropy, mask, ids)),
    }
    metrics = {k: (weights * v).sum() for k, v in metrics.items()}
    shares = each(arrays['label_weights'])
    for name, of in (('chosen', good), ('rejected', ~good)):
      metrics[f'rewards/{name}'] = (shares * of * p.beta * ratio).sum()
      metrics[f'logps/{name}'] = (shares * of * logps).sum()
    metrics['rewards/margins'] = metrics['rewards/chosen'] - metrics['rewards/rejected']
    return (weights * loss).sum(), metrics

  return Objective(
    over_sequences, coupled=True, reads=('entropy',), arrays=('ref_logprobs', *(['kl'] if shifted else []))
  )


def prepare(batch, roles, config):
  """Adds the log-probs of the reference and z, repeated for every token."""
  read = batch.replace(loss_weights=(batch.sequence_ids > 0).astype(jnp.float32))
  arrays = {**preference.prepare(read, roles, config).arrays}
  if config.preference.losses == ('kto',):
    moved = roles.policy.score(read).logprobs - arrays['ref_logprobs']
    arrays['kl'] = jnp.full_like(batch.loss_weights, mismatch(moved, arrays['kl_mask'], batch.sequence_ids))
  return batch.replace(arrays=arrays)


def mismatch(log_ratios, kl_mask, sequence_ids):
  """Returns z = max(0, mean log-ratio of the sequences of kl_mask) [].

  Args:
    log_ratios, kl_mask, sequence_ids: [M, B, T].
  """
  number = jax.vmap(reduce.sequence_max)(kl_mask, sequence_ids).sum()
  total = (log_ratios * kl_mask).sum()
  return jnp.maximum(total / jnp.maximum(number, 1), 0)


def render(rows, tokenizer, config):
  """Returns a function of a row number: an Example with a completion and a mismatched one."""

  def answer(n):
    other = rows[data.mismatched(rows, n)]
    example = data.make_unpaired_example(
      tokenizer, rows[n], other, rows.where(n), share_prompt=config.preference.share_prompt
    )
    return preference.whole(example, rows.where(n))

  return answer


def check(config):
  """InputError for losses and fields that cannot work together."""
  p = config.preference
  refuse(
    len(p.losses) != 1, f'config.preference.losses: {len(p.losses)} of them; kto learns by one, {" or ".join(LOSSES)}'
  )
  preference.check_name(p.losses[0], LOSSES)
  refuse(
    bool(p.loss_weights),
    'config.preference.loss_weights: kto has one loss; weigh its labels with desirable_weight and undesirable_weight',
  )
  preference.check_fields(config)
  refuse(p.nll_coef > 0, 'config.preference.nll_coef: kto has no chosen answers; set it to 0')


def check_first_step(metrics, config):
  """AssertionError unless rewards and z are 0 and the loss is that of sigmoid(0) = 1/2."""
  p, exact = config.preference, config.model.dtype == 'float32'
  near = 1e-4 if exact else 0.5 * p.beta
  limits = {f'rewards/{name}': (0.0, near) for name in ('chosen', 'rejected')}
  limits['kl'] = 0.0, 1e-3 if exact else 0.5
  if p.desirable_weight == p.undesirable_weight:
    limits['loss'] = p.desirable_weight / 2, p.desirable_weight * near
  expect(metrics, limits, 'the policy is its own reference before it learns')


KTO = ALGORITHM = Algorithm(
  objective,
  {'preference': dict(losses=('kto',), nll_coef=0.0)},
  needs=preference.needs,
  prepare=prepare,
  precompute=preference.precompute,
  check=check,
  check_first_step=check_first_step,
  render=render,
  per='label',
)
