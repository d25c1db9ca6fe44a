"""Tests of rejection-sampling fine-tuning (RFT): which samples are kept, their weights, and learning.

Legend: N sequences, C completion tokens.
"""

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.algorithms import rft
from jaxpost.errors import InputError
from jaxpost.monitor import metrics
from jaxpost.rl import batching
from jaxpost.stage import config as config_lib
from jaxpost.types import Experience, Prompt, Rollout

NAN = float('nan')


def stage_config(**over):
  config = config_lib.parse(tiny.merged(dict(algorithm='rft', reward='x'), over))['rft']
  config = config_lib.resolve(config, rft.RFT.defaults)
  rft.check(config)
  return config


def graded(rewards, lengths):
  """Returns an Experience from rewards and lengths [groups, G] of completions of at most 5 tokens."""
  rewards, lengths = np.array(rewards, float), np.array(lengths)
  groups, count = len(rewards), rewards.size
  rollout = Rollout(
    prompts=tuple(Prompt(i, np.arange(3, dtype=np.int32), '', {}) for i in range(groups)),
    completions=np.zeros((count, 5), np.int32),
    lengths=lengths.ravel(),
    logprobs=-np.ones((count, 5), np.float32),
    behavior_logprobs=-np.ones((count, 5), np.float32),
    finished=lengths.ravel() < 5,
  )
  rewards = rewards.ravel()
  return Experience(
    rollout, rewards, batching.completion_mask(rollout), {}, memory={'kept': 'as it was'}, verdicts=rewards
  )


REWARDS = [[0, 2, 1], [1, 1, 0.5], [0.9, 0, NAN], [NAN, NAN, NAN]]
LENGTHS = [[3, 5, 4], [2, 4, 1], [1, 1, 1], [2, 2, 2]]


def kept_rows(credit):
  return np.flatnonzero(credit.mask.any(axis=1)).tolist()


def test_the_best_of_each_group_is_kept():
  """Of equal samples the first is kept, and none that is below the bar or was not graded."""
  experience = graded(REWARDS, LENGTHS)
  credit = rft.credit(experience, stage_config())
  assert kept_rows(credit) == [1, 3]
  np.testing.assert_array_equal(credit.mask[[1, 3]], experience.mask[[1, 3]])
  assert credit.metrics == {'rft/kept': 2, 'rft/dropped': 2, 'rft/kept_reward': 1.5}
  assert credit.arrays == {} and credit.memory == experience.memory
  credit_of_lower_bar = rft.credit(experience, stage_config(rl=dict(keep_reward=0.9)))
  assert kept_rows(credit_of_lower_bar) == [1, 3, 6]
  credit_of_no_sample = rft.credit(experience, stage_config(rl=dict(keep_reward=3.0)))
  assert kept_rows(credit_of_no_sample) == [] and credit_of_no_sample.metrics == {'rft/kept': 0, 'rft/dropped': 4}


def test_truncated_best_sample_is_replaced_by_the_next():
  experience = graded(REWARDS, LENGTHS)
  credit = rft.credit(experience, stage_config(rl=dict(mask_truncated=True)))
  assert kept_rows(credit) == [2, 3]
  assert credit.metrics['masked_truncated'] == 1


@pytest.mark.parametrize(
  'aggregate, expected', [('token', [1 / 7, 1 / 7]), ('sequence', [1 / 10, 1 / 4]), ('constant', [1 / 10, 1 / 10])]
)
def test_token_weights_of_kept_samples(aggregate, expected):
  """Only the two kept samples, of 5 and of 2 tokens, have weights."""
  config = stage_config(rl=dict(aggregate=aggregate))
  mask = rft.credit(graded(REWARDS, LENGTHS), config).mask
  weights = batching.token_weights(mask, config.rl.aggregate, 5)
  np.testing.assert_allclose(weights[[1, 3], 0], expected, rtol=1e-6)
  assert weights[~mask.any(axis=1)].sum() == 0


@pytest.mark.parametrize(
  'over, key',
  [
    (dict(advantage='group'), 'advantage'),
    (dict(loss='cispo'), 'loss'),
    (dict(kl_coef=0.1), 'kl_coef'),
    (dict(entropy_coef=0.1), 'entropy_coef'),
    (dict(importance=('icepop',)), 'importance'),
    (dict(clip_high=0.3), 'clip_high'),
  ],
)
def test_fields_that_rft_cannot_use_are_refused(over, key):
  with pytest.raises(InputError, match=f'config.rl.{key}: '):
    stage_config(rl=over)


def test_step_that_keeps_no_sample_changes_nothing(tmp_path):
  """Its row has no loss, which would be a mean over no token, and each step counts the dropped groups."""
  model = tiny.folder(tmp_path / 'model')

  def config(bar):
    return tiny.grpo_config(model, algorithm='rft', rl=dict(keep_reward=bar), train=dict(steps=2))

  jaxpost.run(config(2.0), tmp_path / 'none')
  for row in metrics.read_rows(tmp_path / 'none/metrics.jsonl'):
    assert row['empty_updates'] == 1 and row['rft/kept'] == 0 and not {'loss', 'grad_norm'} & row.keys()
    assert row['rft/dropped'] == 4
  jaxpost.run(config(0.0), tmp_path / 'all')
  row, _ = metrics.read_rows(tmp_path / 'all/metrics.jsonl')
  assert row['rft/kept'] == 4 and row['loss'] > 1 and row['grad_norm'] > 0
  assert row['rft/kept_reward'] > row['reward']


def test_rft_learns_small_sums(tmp_path):
  """After a short SFT, pass@1 was 0.21 before and 0.50 after the run."""
  jaxpost.run(tiny.sums_config(tmp_path, algorithm='rft', train=dict(steps=40), optim=dict(lr=3e-3)), tmp_path / 'run')
  before, after = [
    r['pass@1']
    for r in metrics.read_rows(tmp_path / 'run/metrics.jsonl')
    if (r['stage'], r['split']) == ('online', 'eval')
  ]
  assert before < 0.35 and after > before + 0.15, (before, after)
