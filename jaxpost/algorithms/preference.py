"""Training on preference pairs: DPO and its family, ORPO, CPO and SimPO.

Legend: B rows, T tokens, P pairs of a row (padded).

One objective over pairs; the methods at the end differ in the losses of
`config.preference.losses` and in how much cross entropy they add.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxpost.algorithms.base import Algorithm, Config, Precompute, expect, learning_rate
from jaxpost.data import preferences as data
from jaxpost.distributed import transfer
from jaxpost.errors import did_you_mean, refuse
from jaxpost.losses import pairs as pairs_lib
from jaxpost.losses import preferences, reduce
from jaxpost.losses.pairs import Pairs, PreferenceOptions
from jaxpost.losses.preferences import LOSSES
from jaxpost.types import Batch, Objective, Outputs

if TYPE_CHECKING:
  import jax

  from jaxpost.data.examples import Example
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.roles import Roles


def objective(config: Config) -> Objective:
  """Returns the losses of `config.preference`, plus the NLL of chosen answers.

  The losses and their equations are in `losses.preferences`.
  """
  p = config.preference
  options = options_of(config)
  weights = weights_of(config)
  with_reference = reads_reference(config)

  def over_pairs(outputs, batch):
    pairs, pair_weights = pairs_of(outputs, batch, with_reference, p.ld_alpha)

    def total(x):
      return (pair_weights * x).sum()

    losses = preferences.weighted(p.losses, weights, pairs, options)
    metrics = {}
    if p.weighting == 'wpo':
      adjusted = outputs.logprobs - outputs.collision
      metrics['wpo/weight'] = pairs_lib.wpo_weights(adjusted, batch.loss_weights != 0, batch.sequence_ids)
      losses *= metrics['wpo/weight']
    loss = total(losses)
    rewarded = _means(pairs) if LOSSES[p.losses[0]].reward_is_mean else pairs
    metrics |= pairs_lib.pair_metrics(rewarded, options)
    metrics['entropy'] = _pair_entropy(outputs, batch)
    metrics = {name: total(x) for name, x in metrics.items()}
    if p.nll_coef:
      metrics['nll_loss'] = -(batch.arrays['nll_weights'] * outputs.logprobs).sum()
      loss += p.nll_coef * metrics['nll_loss']
    return loss, metrics

  arrays = ('nll_weights', 'ref_logprobs') if with_reference else ('nll_weights',)
  reads = ('entropy', 'collision') if p.weighting == 'wpo' else ('entropy',)
  return Objective(over_pairs, coupled=True, reads=reads, arrays=arrays)


def options_of(config: Config) -> PreferenceOptions:
  """Returns the options of the losses, from `config.preference`."""
  p = config.preference
  return pairs_lib.PreferenceOptions(
    beta=p.beta,
    label_smoothing=p.label_smoothing,
    ipo_average=p.ipo_average,
    gamma=p.gamma,
    simpo_alpha=p.simpo_alpha,
    discopop_tau=p.discopop_tau,
    f_divergence=p.f_divergence,
    f_alpha=p.f_alpha,
  )


def weights_of(config: Config) -> tuple[float, ...]:
  """Returns the weight of each loss; 1 unless `config.preference.loss_weights` is set."""
  return config.preference.loss_weights or (1.0,) * len(config.preference.losses)


def reads_reference(config: Config) -> bool:
  """Returns True if a loss reads the reference; KTO's losses, in a table of their own, all do."""
  return any(name not in LOSSES or LOSSES[name].needs_reference for name in config.preference.losses)


def pairs_of(outputs: Outputs, batch: Batch, with_reference: bool, ld_alpha: float = 1.0) -> tuple[Pairs, jax.Array]:
  """Returns (`Pairs` [B, P], the weight of each pair [B, P]: 1 / number of pairs in the global batch)."""
  ids = batch.sequence_ids
  weights = batch.loss_weights
  mask = weights != 0
  logprob_weights = mask if ld_alpha == 1 else pairs_lib.desensitized(mask, ids, ld_alpha)

  def sums(x, token_weights):
    return pairs_lib.split_pairs(reduce.sequence_sum(x * token_weights, ids))

  def weights_of_answers(x):  # the maximum, as all trained tokens of an answer have the weight of the pair
    return pairs_lib.split_pairs(pairs_lib.sequence_max(x, ids))

  chosen, rejected = sums(outputs.logprobs, logprob_weights)
  ref_chosen, ref_rejected = sums(batch.arrays['ref_logprobs'] if with_reference else 0 * weights, logprob_weights)
  chosen_length, rejected_length = sums(jnp.ones_like(weights), mask)
  pair_weights, rejected_weights = weights_of_answers(weights)
  # A pair that lost all trained tokens of one side, to truncation or a limit, does not count.
  valid = (pair_weights > 0) & (rejected_weights > 0)
  nll_weights, _ = weights_of_answers(batch.arrays['nll_weights'])
  pairs = pairs_lib.Pairs(
    chosen=chosen,
    rejected=rejected,
    ref_chosen=ref_chosen,
    ref_rejected=ref_rejected,
    chosen_length=chosen_length,
    rejected_length=rejected_length,
    valid=valid,
    nll_scale=nll_weights / jnp.where(valid, pair_weights, 1),
  )
  return pairs, pair_weights


def _pair_entropy(outputs: Outputs, batch: Batch) -> jax.Array:
  """The mean over both answers [B, P] of the mean entropy of their tokens."""
  ids = batch.sequence_ids
  means = reduce.sequence_mean(outputs.entropy, batch.loss_weights != 0, ids)
  chosen, rejected = pairs_lib.split_pairs(pairs_lib.sequence_max(means, ids))
  return (chosen + rejected) / 2


def _means(pairs: Pairs) -> Pairs:
  """The pairs with log-probs averaged over tokens; those of the reference are left as they are."""
  return pairs._replace(
    chosen=pairs.chosen / jnp.maximum(pairs.chosen_length, 1),
    rejected=pairs.rejected / jnp.maximum(pairs.rejected_length, 1),
  )


def needs(config: Config) -> tuple[str, ...]:
  """Returns the frozen roles: the reference model, where a loss reads it."""
  return ('reference',) if reads_reference(config) else ()


def prepare(batch: Batch, roles: Roles, config: Config) -> Batch:
  """Adds the log-probs of the reference model."""
  del config
  if roles.reference is None:
    return batch
  logprobs = transfer.move(roles.policy.layout, roles.reference(batch).logprobs, None, 'batch')
  return batch.replace(arrays={**batch.arrays, 'ref_logprobs': logprobs})


def precompute(config: Config) -> dict[str, Precompute]:
  """Returns the spec of cached reference log-probs, with which training needs no reference model; {} if off."""
  if not config.preference.precompute_ref:
    return {}

  def read(outputs):
    return {'ref_logprobs': outputs.logprobs}

  return {'reference': Precompute({'ref_logprobs': ((), np.float32)}, read)}


def render(rows: Rows, tokenizer: Tokenizer, config: Config) -> Callable[[int], Example]:
  """Returns a function of a row number: an Example with chosen as sequence 1, rejected as 2."""

  def pair(n):
    return data.make_pair_example(tokenizer, rows[n], rows.where(n), share_prompt=config.preference.share_prompt)

  return pair


def check(config: Config) -> None:
  """Raises InputError for losses and fields that cannot work together."""
  p = config.preference
  for name in p.losses:
    check_name(name, LOSSES)
  check_fields(config)
  refuse(
    'sft' in p.losses and p.nll_coef > 0,
    "config.preference.nll_coef: the loss 'sft' is that NLL already; set one of the two",
  )
  refuse(
    'exo_pair' in p.losses and not p.label_smoothing,
    "config.preference.label_smoothing: is 0, and 'exo_pair' needs a number above it, such as 0.001",
  )
  reverse_kl_only = preferences.without_f_divergence(p.losses)
  refuse(
    p.f_divergence != 'reverse_kl' and bool(reverse_kl_only),
    f'config.preference.f_divergence: {", ".join(reverse_kl_only)} support reverse_kl only; leave it, or drop them',
  )
  refuse(
    p.ld_alpha != 1 and bool({*p.losses} - {*preferences.readers('ld_alpha')}),
    f'config.preference.ld_alpha: weighs the sums of {", ".join(preferences.readers("ld_alpha"))} only; '
    'leave it 1, or drop the other losses',
  )
  refuse(-1 < p.ld_alpha < 0, f'config.preference.ld_alpha: {p.ld_alpha} must be from 0 to 1')
  refuse(
    p.f_alpha != 0.5 and p.f_divergence != 'alpha_divergence',
    f'config.preference.f_alpha: f_divergence={p.f_divergence!r} would ignore it; leave it 0.5, '
    "or set f_divergence='alpha_divergence'",
  )
  refuse(
    p.precompute_ref and not reads_reference(config),
    f'config.preference.precompute_ref: nothing reads a reference in {", ".join(p.losses)}; set it to False',
  )


def check_name(name: str, known: Collection[str]) -> None:
  """Raises InputError unless `known` has a loss of this name."""
  hint = did_you_mean(name, known)
  if name in _UNPAIRED:
    hint = "of single answers: set config.algorithm='kto'. "
  refuse(name not in known, f'config.preference.losses: there is no {name!r}; {hint}known: {", ".join(known)}')


_UNPAIRED = ('kto', 'apo_zero_unpaired')  # losses of single completions
# {field: losses that read it} of the fields that are not options of the losses in `losses.preferences`.
_READERS = dict.fromkeys(('desirable_weight', 'undesirable_weight'), _UNPAIRED) | {'weighting': tuple(LOSSES)}


def check_fields(config: Config) -> None:
  """Raises InputError for fields that no loss of `config.preference` reads."""
  p = config.preference
  refuse(
    bool(p.loss_weights) and len(p.loss_weights) != len(p.losses),
    f'config.preference.loss_weights: {len(p.loss_weights)} weights for {len(p.losses)} losses '
    f'({", ".join(p.losses)}); give one each, or ()',
  )
  refuse(
    p.label_smoothing >= 0.5,
    f'config.preference.label_smoothing: {p.label_smoothing} would flip the preferences; give less than 0.5',
  )
  for field in dataclasses.fields(p):
    # Fields such as `beta`, which are not of particular losses, have no readers here and are never refused.
    readers = _READERS.get(field.name) or preferences.readers(field.name)
    ignored = bool(readers) and not set(readers) & set(p.losses)
    refuse(
      ignored and vars(p)[field.name] not in (field.default, field.metadata['auto']),
      f'config.preference.{field.name}: {", ".join(p.losses)} would ignore '
      f'it; it is read by {", ".join(readers)}; leave it {field.default!r}',
    )


def check_first_step(metrics: dict, config: Config) -> None:
  """Raises AssertionError unless the rewards are 0 and the loss of DPO is ln 2."""
  p = config.preference
  exact = config.model.dtype == 'float32'
  has_pairs = metrics.get('logps/chosen')
  if not reads_reference(config) or not has_pairs:
    return
  # Rewards are sums over an answer, and the two programs may round bfloat16 at different places.
  tolerance = 1e-4 if exact else 0.5 * p.beta
  limits = {f'rewards/{name}': (0.0, tolerance) for name in ('chosen', 'rejected', 'margins')}
  is_dpo = p.losses == ('sigmoid',) and not p.nll_coef and (p.f_divergence, p.weighting) == ('reverse_kl', 'none')
  if is_dpo:
    scale = weights_of(config)[0]
    limits['loss'] = (scale * math.log(2), scale * (1e-4 if exact else 0.25 * p.beta))
  expect(metrics, limits, 'the policy is its own reference before it learns')


def method(losses: tuple[str, ...], **choices: Any) -> Algorithm:
  """Returns an algorithm of this family with its default losses and options of `config.preference`."""
  return Algorithm(
    objective,
    {'preference': {'losses': losses, **choices}, 'optim': {'lr': learning_rate(1e-6)}},
    sections=('preference',),
    needs=needs,
    prepare=prepare,
    precompute=precompute,
    check=check,
    check_first_step=check_first_step,
    render=render,
    per='pair',
  )


DPO = ALGORITHM = method(('sigmoid',))  # arXiv:2305.18290
ORPO = method(('orpo',), nll_coef=1.0)  # 2403.07691
CPO = method(('cpo',), nll_coef=1.0)  # 2401.08417
LD_DPO = method(('sigmoid',), ld_alpha=0.5)  # 2409.06411
WPO = method(('sigmoid',), weighting='wpo')  # 2406.11827
SIMPO = method(('simpo',), beta=2.0, gamma=1.0)  # 2405.14734, section 4.2
