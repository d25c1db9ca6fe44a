"""Rejection-sampling fine-tuning: cross entropy on the best of n samples.

Legend: N sequences, C completion tokens.

RAFT (arXiv:2304.06767) keeps the best answer to each prompt, RFT (arXiv:2308.01825) all correct ones. This file keeps,
of the completions whose reward `config.rl.correct_by` is at least `config.rl.keep_reward`, the one with the highest sum
of rewards. Each step samples from the current policy, so a step is an iteration of expert iteration.
"""

import numpy as np

from jaxpost.algorithms import grpo, rl_checks, sft
from jaxpost.algorithms.base import Algorithm, Config, learning_rate
from jaxpost.errors import refuse, refuse_unread
from jaxpost.losses.reduce import same_shape
from jaxpost.types import Credit, Experience


def credit(experience: Experience, config: Config) -> Credit:
  """Returns the mask [N, C] of the completions that are kept; the loss reads nothing else."""
  rewards = experience.rewards
  mask, metrics = grpo.trained_tokens(experience, np.isfinite(rewards), config)
  correct = mask.any(axis=1) & (experience.verdicts >= config.rl.keep_reward)
  shape = (len(experience.rollout.prompts), -1)
  keep = best_of_n(rewards.reshape(shape), correct.reshape(shape)).reshape(-1)
  metrics |= {'rft/kept': int(keep.sum()), 'rft/dropped': int(len(experience.rollout.prompts) - keep.sum())}
  if keep.any():
    metrics['rft/kept_reward'] = float(rewards[keep].mean())
  return Credit({}, mask * keep[:, None], metrics, experience.memory)


def best_of_n(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """Returns [N, G] bool: True for the best valid sample of each group, the first of several equal ones.

  Rejection sampling (RAFT, arXiv:2304.06767). A group without a valid sample has no True.
  """
  same_shape('rewards, valid [N, G]', 2, rewards, valid)
  best = np.where(valid, rewards, -np.inf).argmax(axis=1)
  # argmax of a row of -inf is 0, so the mask has to be applied once more.
  return (np.arange(valid.shape[1]) == best[:, None]) & valid


def check(config: Config) -> None:
  """Raises InputError for fields that cross entropy on samples does not use."""
  rl = config.rl
  refuse(
    rl.advantage != 'best_of_n',
    f'config.rl.advantage: {rl.advantage!r}, but rft keeps the best of '
    'each group; leave it empty, or use the algorithm grpo',
  )
  read = ('advantage', 'aggregate', 'keep_reward', 'correct_by', 'mask_truncated')
  read += ('dynamic_sampling', 'curriculum', 'epochs', 'minibatches')
  refuse_unread(rl, read, 'the cross entropy of rft')
  rl_checks.check_dynamic_sampling(config)


RFT = ALGORITHM = Algorithm(
  sft.objective,
  {'rl': {'advantage': 'best_of_n'}, 'optim': {'lr': learning_rate(1e-6)}},
  sections=('nll', 'rl'),
  check=check,
  on_policy=True,
  credit=credit,
)
