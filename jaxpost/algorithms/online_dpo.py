"""Online DPO: the best and the worst of the policy's answers to a prompt are a pair.

Legend: N sequences, G samples per prompt, C completion tokens, B rows, T tokens.

Guo et al. 2024 (arXiv:2402.04792), with rewards instead of a judge. Best and worst are
by the sum of all rewards, because a preference compares whole answers. A group whose rewards are
all equal gives no pair; it is dropped and counted.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxpost.algorithms import grpo, preference
from jaxpost.algorithms.base import Config
from jaxpost.data import packing
from jaxpost.data.examples import Example
from jaxpost.errors import refuse, refuse_unread
from jaxpost.types import Batch, Credit, Experience, Objective

# Tokens of an answer and which of them are trained: [length] int32, [length] float32.
Answer = tuple[np.ndarray, np.ndarray]


def objective(config: Config) -> Objective:
  """Returns the objective of DPO, at the temperature of the sampler."""
  return dataclasses.replace(preference.objective(config), temperature=config.rollout.temperature)


def credit(experience: Experience, config: Config) -> Credit:
  """Returns `choice` [N, C]: +1 for the best and -1 for the worst sample of each group."""
  mask, metrics = grpo.trained_tokens(experience, np.isfinite(experience.rewards), config)
  groups = len(experience.rollout.prompts)
  rewards = experience.rewards.reshape(groups, -1)
  valid = mask.any(axis=1).reshape(groups, -1)
  best = np.where(valid, rewards, -np.inf).argmax(axis=1)
  worst = np.where(valid, rewards, np.inf).argmin(axis=1)
  group = np.arange(groups)
  best_reward = rewards[group, best]
  worst_reward = rewards[group, worst]
  differs = valid.any(axis=1) & (best_reward > worst_reward)

  choice = np.zeros(rewards.shape, np.float32)
  choice[group[differs], best[differs]] = 1
  choice[group[differs], worst[differs]] = -1
  metrics |= {'pairs': int(differs.sum()), 'groups_without_pair': int((~differs).sum())}
  if differs.any():
    metrics['reward_gap'] = float((best_reward - worst_reward)[differs].mean())
  choice = choice.reshape(-1, 1) * experience.mask
  return Credit({'choice': choice}, np.abs(choice), metrics)


def pack(
  experience: Experience, credit: Credit, members: Sequence[int], config: Config, num_rows: int, row_length: int
) -> Batch:
  """Returns a Batch [num_rows, row_length] of the pairs of sampled completions among `members`."""
  rollout = experience.rollout
  sign = credit.arrays['choice'].sum(axis=1)
  chosen = {}  # group -> index of the sequence
  rejected = {}
  for n in members:
    if sign[n] > 0:
      chosen[n // rollout.group_size] = n
    elif sign[n] < 0:
      rejected[n // rollout.group_size] = n

  def answer(n: int) -> Answer:
    length = rollout.lengths[n]
    return rollout.completions[n, :length], credit.mask[n, :length]

  share_prompt = config.preference.share_prompt
  examples = [
    pair(rollout.prompts[group].tokens, answer(chosen[group]), answer(rejected[group]), share_prompt)
    for group in sorted({*chosen, *rejected})  # a pair that lacks one side raises KeyError
  ]
  packed = packing.pack_examples(examples, row_length)
  batch = packing.to_batch([[examples[i] for i in row] for row in packed], row_length, num_rows, per='pair')
  if not examples:  # these fields would be None, and the update would recompile
    zeros = np.zeros((num_rows, row_length), np.int32)
    batch = batch.replace(sequence_ids=zeros, branch_ids=zeros if share_prompt else None)
  return batch


def pair(prompt: np.ndarray, chosen: Answer, rejected: Answer, share_prompt: bool) -> Example:
  """Returns an Example of a prompt and two answers: as branches of a document (see `types.Batch`), or two documents."""
  # The last token of a shared prompt is repeated in each branch: it predicts the first token of the answer.
  num_shared = len(prompt) - 1 if share_prompt else 0
  shared = prompt[:num_shared]
  repeated = prompt[num_shared:]
  branches = [np.concatenate([repeated, tokens]) for tokens, _ in (chosen, rejected)]
  masks = [np.concatenate([0 * repeated, mask]) for _, mask in (chosen, rejected)]
  numbers = np.repeat(np.arange(3, dtype=np.int32), [num_shared, *map(len, branches)])  # 0: shared, 1, 2: branches
  mask = np.concatenate([0 * shared, *masks]).astype(np.float32)
  positions = [np.arange(num_shared)]
  positions += [num_shared + np.arange(len(branch)) for branch in branches]
  return Example(
    np.concatenate([shared, *branches]).astype(np.int32),
    mask,
    positions=np.concatenate(positions).astype(np.int32),
    segment_ids=None if share_prompt else numbers,
    branch_ids=numbers if share_prompt else None,
    sequence_ids=np.where(mask > 0, numbers, 0).astype(np.int32),
  )


def two_rows(config: Config) -> int:
  """Returns the tokens of two prompts with their completions."""
  return 2 * (config.rollout.max_prompt_length + config.rollout.max_new_tokens)


def check(config: Config) -> None:
  """Raises InputError for combinations of fields that cannot work."""
  rl = config.rl
  rollout = config.rollout
  preference.check(config)
  refuse(rollout.group_size < 2, 'config.rollout.group_size: 1 sample is no pair; use at least 2')
  length = config.train.row_length
  longest = two_rows(config)
  if config.preference.share_prompt:  # whose last token is repeated
    longest -= rollout.max_prompt_length - 1
  # The number of rows of a step, which is enough for all its samples, packed one by one.
  samples_per_row = max(1, length // (two_rows(config) // 2))
  num_rows = math.ceil(rollout.prompts * rollout.group_size / samples_per_row)
  refuse(
    length // longest * num_rows < rollout.prompts,
    f'config.train.row_length: {length} has no room for the pairs of a '
    f'step, of up to {longest} tokens each; leave it 0',
  )
  refuse(
    config.preference.precompute_ref,
    'config.preference.precompute_ref: samples are not known before they are drawn; set it to False',
  )
  refuse(rl.minibatches > 1, 'config.rl.minibatches: would split pairs; use rl.epochs, or fewer rollout.prompts')
  read = ('epochs', 'minibatches', 'dynamic_sampling', 'mask_truncated', 'correct_by')
  refuse_unread(rl, read, 'online_dpo (preference.beta holds the policy)')


ONLINE_DPO = ALGORITHM = dataclasses.replace(
  preference.DPO,
  objective=objective,
  sections=('preference', 'rl'),
  check=check,
  defaults={
    'preference': {'losses': ('sigmoid',), 'nll_coef': 0.0},
    'rl': {'dynamic_sampling': 0},
    'train': {'row_length': two_rows},
    'optim': preference.DPO.defaults['optim'],
  },
  on_policy=True,
  credit=credit,
  pack=pack,
)
