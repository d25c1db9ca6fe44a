"""Tests of GDPO in a run: it normalizes each reward by itself, then weights them; sums of rewards are refused."""

import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.errors import InputError
from jaxpost.rewards.groups import Graded
from jaxpost.rl import grading
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Prompt, Rollout


def position_reward(completions, **columns):
  """Returns the rewards 0, 1, 2, 3, which differ in every group."""
  del columns
  return [float(i) for i in range(len(completions))]


def large_reward(completions, **columns):
  """Returns rewards of another scale and in another order."""
  del columns
  return [100.0 * ((3 * i + 1) % 4) for i in range(len(completions))]


def test_weights_apply_after_each_reward_is_normalized(nano):
  weights = (1.0, -0.25)
  config = tiny.grpo_config(
    nano, reward=(position_reward, large_reward), reward_weights=weights, rl=dict(advantage='gdpo')
  )
  _, stream = jaxpost.policy_and_stream(config)
  try:
    batch = next(stream).updates[0].batch
  finally:
    stream.close()
  trained = np.asarray(batch.loss_weights) > 0
  actual = np.unique(np.asarray(batch.arrays['advantages'])[trained].round(4))
  group_size = config['rollout']['group_size']
  groups = config['rollout']['prompts']
  rewards = [np.array(fn([''] * group_size)) for fn in (position_reward, large_reward)]
  total = sum(w * (x - x.mean()) / x.std(ddof=1) for w, x in zip(weights, rewards))
  expected = total / np.tile(total, groups).std(ddof=1)
  np.testing.assert_allclose(actual, np.unique(expected.round(4)), atol=2e-4)


def test_reward_model_is_a_component_of_its_own():
  zeros = np.zeros((2, 3), np.float32)
  rollout_ = Rollout(
    (Prompt(0, np.zeros(1, np.int32), '', {}),),
    zeros.astype(np.int32),
    np.array([1, 3]),
    zeros,
    zeros,
    zeros[:, 0] == 0,
  )

  class Round:  # has what `result` reads
    rollout = rollout_
    greedy = None
    from_earlier_step = False
    rewards = np.array([[1.0, 0.0]])
    results = [Graded([1.0, 0.0], {'right': [1.0, 0.0], 'style': [None, None]}, None)]

  grader = grading.Grader(None, None, model_weight=0.5)
  components = grading.PendingRollout(grader, [Round]).result(np.array([[5.0, 0, 0], [1, 2, 7]])).components
  assert {name: weight for name, (weight, _) in components.items()} == {'right': 1.0, 'style': 1.0, 'reward_model': 0.5}
  np.testing.assert_array_equal(components['reward_model'][1], [5, 7])
  np.testing.assert_array_equal(components['style'][1], [np.nan] * 2)


@pytest.mark.parametrize(
  'over',
  [dict(rl=dict(kl_in='reward', kl_coef=0.1)), dict(train_on_rollouts='runs/before', reward='')],
  ids=['a KL in the reward', 'recorded sums'],
)
def test_sums_of_rewards_are_refused(over):
  over = tiny.merged(dict(algorithm='grpo', reward='x', rl=dict(advantage='gdpo')), over)
  algorithm = algorithms.load_algorithm('grpo')
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), algorithm.defaults)
  with pytest.raises(InputError, match="'gdpo' needs each reward by itself"):
    algorithm.check(config)
