"""Rejection-sampling fine-tuning: cross entropy on the best of n samples.

Legend: N sequences, C completion tokens.

RAFT (arXiv:2304.06767) keeps the best answer to each prompt, RFT
(arXiv:2308.01825) all correct ones; this file keeps the best one if its reward is at
least `config.rl.keep_reward`. Each step samples from the current policy, so a step is
an iteration of expert iteration.
"""

import numpy as np

from jaxpost.algorithms import grpo, sft
from jaxpost.algorithms.base import Algorithm, refuse, refuse_unread
from jaxpost.losses import advantages
from jaxpost.types import Credit, Experience


def credit(experience: Experience, config) -> Credit:
  """Returns the mask of the completions that are kept."""
  rl, rewards = config.rl, experience.rewards
  mask, metrics = grpo.trained_tokens(experience, np.isfinite(rewards), config)
  valid = mask.any(axis=1)
  shape = (experience.groups, -1)
  best = advantages.best_of_n(rewards.reshape(shape), valid.reshape(shape)).reshape(-1)
  keep = best & (np.where(valid, rewards, -np.inf) >= rl.keep_reward)
  metrics |= {'rft/kept': int(keep.sum()), 'rft/dropped': int(experience.groups - keep.sum())}
  if keep.any():
    metrics['rft/kept_reward'] = float(rewards[keep].mean())
  return Credit({}, mask * keep[:, None], metrics, experience.memory)


def check(config):
  """InputError for fields that cross entropy on samples does not use."""
  rl = config.rl
  refuse(
    rl.advantage != 'best_of_n',
    f'config.rl.advantage: {rl.advantage!r}, but rft keeps the best of '
    'each group; leave it empty, or use the algorithm grpo',
  )
  refuse_unread(rl, rl_fields_read(rl), 'the cross entropy of rft')
  refuse(
    rl.dynamic_sampling > 0 and config.rollout.group_size < 2,
    'config.rl.dynamic_sampling: one sample never differs; set it to 0 or config.rollout.group_size to at least 2',
  )


def rl_fields_read(rl) -> set[str]:
  """Returns the fields of `config.rl` that count."""
  del rl
  return {'advantage', 'aggregate', 'keep_reward', 'mask_truncated', 'dynamic_sampling', 'epochs', 'minibatches'}


RFT = ALGORITHM = Algorithm(
  sft.objective, {'rl': dict(advantage='best_of_n')}, check=check, on_policy=True, credit=credit
)
