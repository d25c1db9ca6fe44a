"""Online DPO: the best and the worst of the policy's own answers are a pair.

Legend: N sequences, G samples a prompt, C completion tokens, B rows, T tokens.

Guo et al. 2024 (arXiv:2402.04792), with rewards instead of a judge. A group whose
rewards are all equal gives no pair; it is dropped and counted.
"""

import dataclasses
import math

import numpy as np

from jaxpost.algorithms import preference
from jaxpost.algorithms.base import refuse, refuse_unread
from jaxpost.data import packing
from jaxpost.data.examples import Example
from jaxpost.types import Batch, Credit, Experience


def objective(config):
  """Returns the objective of DPO, at the temperature of the sampler."""
  return dataclasses.replace(preference.objective(config), temperature=config.rollout.temperature)


def credit(experience: Experience, config) -> Credit:
  """Returns `choice` [N, C]: +1 for the best and -1 for the worst sample of each group."""
  groups = experience.groups
  valid = np.isfinite(experience.rewards)
  metrics = {}
  if config.rl.mask_truncated:
    cut = ~experience.rollout.finished
    metrics['masked_truncated'] = int((valid & cut).sum())
    valid &= ~cut
  valid &= experience.mask.any(axis=1)
  rewards, valid = (x.reshape(groups, -1) for x in (experience.rewards, valid))
  best = np.where(valid, rewards, -np.inf).argmax(axis=1)
  worst = np.where(valid, rewards, np.inf).argmin(axis=1)
  every = np.arange(groups)
  differs = valid.any(axis=1)
  differs &= rewards[every, best] > rewards[every, worst]
  choice = np.zeros(rewards.shape, np.float32)
  choice[every[differs], best[differs]] = 1
  choice[every[differs], worst[differs]] = -1
  gap = rewards[every, best] - rewards[every, worst]
  metrics |= {'pairs': int(differs.sum()), 'groups_without_pair': int((~differs).sum())}
  if differs.any():
    metrics['reward_gap'] = float(gap[differs].mean())
  choice = choice.reshape(-1, 1) * experience.mask
  return Credit({'choice': choice}, np.abs(choice), metrics)


def pack(experience: Experience, credit: Credit, members, config, rows: int, row_length: int) -> Batch:
  """Returns a Batch [rows, row_length] of pairs, with the sampled tokens."""
  rollout, sign = experience.rollout, credit.arrays['choice'].sum(axis=1)
  size = len(sign) // max(experience.groups, 1)
  sides = {}
  for n in members:
    if sign[n]:
      sides.setdefault(n // size, {})[sign[n] > 0] = n

  def answer(n):
    length = rollout.lengths[n]
    return rollout.completions[n, :length], credit.mask[n, :length]

  share = config.preference.share_prompt
  examples = [
    pair(rollout.prompts[g].tokens, answer(both[True]), answer(both[False]), share) for g, both in sorted(sides.items())
  ]
  packed = packing.pack([len(e.tokens) for e in examples], row_length)
  batch = packing.to_batch([[examples[i] for i in row] for row in packed], row_length, rows, per='pair')
  # Without any pair these fields would be None, and the update would recompile.
  zeros = np.zeros((rows, row_length), np.int32)
  given = lambda x: zeros if x is None else x
  return batch.replace(sequence_ids=given(batch.sequence_ids), branch_ids=given(batch.branch_ids))


def pair(prompt, chosen, rejected, share_prompt: bool) -> Example:
  """Returns one document with a prompt and two answers, each (tokens, mask)."""
  head = len(prompt) - 1 if share_prompt else 0
  shared, own = prompt[:head], prompt[head:]
  sides = [np.concatenate([own, tokens]) for tokens, _ in (chosen, rejected)]
  masks = [np.concatenate([0 * own, mask]) for _, mask in (chosen, rejected)]
  numbers = np.repeat(np.arange(3, dtype=np.int32), [head, *map(len, sides)])
  mask = np.concatenate([0 * shared, *masks]).astype(np.float32)
  return Example(
    np.concatenate([shared, *sides]).astype(np.int32),
    mask,
    positions=np.concatenate([np.arange(head), *(head + np.arange(len(s)) for s in sides)]).astype(np.int32),
    segment_ids=None if share_prompt else numbers,
    branch_ids=numbers if share_prompt else None,
    sequence_ids=np.where(mask > 0, numbers, 0).astype(np.int32),
  )


def two_rows(config) -> int:
  """Returns the tokens of two prompts with their completions."""
  return 2 * (config.rollout.max_prompt_length + config.rollout.max_new_tokens)


def pair_length(config) -> int:
  """Returns the tokens of the longest pair; the last token of a shared prompt is repeated."""
  saved = config.rollout.max_prompt_length - 1 if config.preference.share_prompt else 0
  return two_rows(config) - saved


def check(config):
  """InputError for combinations of fields that cannot work."""
  rl, size = config.rl, config.rollout.group_size
  preference.check(config)
  refuse(size < 2, 'config.rollout.group_size: 1 sample is no pair; use at least 2')
  length, longest = config.train.row_length, pair_length(config)
  rows = math.ceil(config.rollout.prompts * size / max(1, length // (two_rows(config) // 2)))
  refuse(
    length // longest * rows < config.rollout.prompts,
    f'config.train.row_length: {length} has no room for the pairs of a '
    f'step, of up to {longest} tokens each; leave it 0',
  )
  refuse(
    config.preference.precompute_ref,
    'config.preference.precompute_ref: samples are not known before they are drawn; set it to False',
  )
  refuse(rl.minibatches > 1, 'config.rl.minibatches: would tear pairs apart; use rl.epochs, or fewer rollout.prompts')
  refuse_unread(rl, rl_fields_read(rl), 'online_dpo (preference.beta holds the policy)')


def rl_fields_read(rl) -> set[str]:
  """Returns the fields of `config.rl` that count."""
  del rl
  return {'epochs', 'minibatches', 'dynamic_sampling', 'mask_truncated'}


ONLINE_DPO = ALGORITHM = preference.method(
  ('sigmoid',),
  objective=objective,
  check=check,
  defaults={
    'preference': dict(losses=('sigmoid',), nll_coef=0.0),
    'rl': dict(dynamic_sampling=0),
    'train': dict(row_length=two_rows),
  },
  on_policy=True,
  credit=credit,
  pack=pack,
)
