"""GDPO in a run: each reward reaches the estimator by itself, with its weight, or the config is refused."""

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


def by_place(completions, **columns):
  """0, 1, 2, 3: differs in every group."""
  del columns
  return [float(i) for i in range(len(completions))]


def large(completions, **columns):
  """Rewards of another scale and in another order."""
  del columns
  return [100.0 * ((3 * i + 1) % 4) for i in range(len(completions))]


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano')


def test_weights_apply_after_each_reward_is_normalized(model):
  weights = (1.0, -0.25)
  config = tiny.grpo_config(model, reward=(by_place, large), reward_weights=weights, rl=dict(advantage='gdpo'))
  _, stream = jaxpost.policy_and_stream(config)
  try:
    batch = next(stream).updates[0].batch
  finally:
    stream.close()
  trained = np.asarray(batch.loss_weights) > 0
  found = np.unique(np.asarray(batch.arrays['advantages'])[trained].round(4))
  size = config['rollout']['group_size']
  groups = config['rollout']['prompts']
  parts = [np.array(fn([''] * size)) for fn in (by_place, large)]
  total = sum(w * (x - x.mean()) / x.std(ddof=1) for w, x in zip(weights, parts))
  expected = total / np.tile(total, groups).std(ddof=1)
  np.testing.assert_allclose(found, np.unique(expected.round(4)), atol=2e-4)


def test_a_reward_model_is_a_reward_by_itself():
  zeros = np.zeros((2, 3), np.float32)
  rollout_ = Rollout(
    (Prompt(0, np.zeros(1, np.int32), '', {}),),
    zeros.astype(np.int32),
    np.array([1, 3]),
    zeros,
    zeros,
    zeros[:, 0] == 0,
  )

  class Round:  # what `result` reads of a round
    rollout = rollout_
    greedy = None
    from_earlier_step = False
    rewards = np.array([[1.0, 0.0]])
    results = [Graded([1.0, 0.0], {'right': [1.0, 0.0], 'style': [None, None]}, None)]

  grader = grading.Grader(None, None, model_weight=0.5)
  found = grading.PendingRollout(grader, [Round]).result(np.array([[5.0, 0, 0], [1, 2, 7]])).components
  assert {name: weight for name, (weight, _) in found.items()} == {'right': 1.0, 'style': 1.0, 'reward_model': 0.5}
  np.testing.assert_array_equal(found['reward_model'][1], [5, 7])
  np.testing.assert_array_equal(found['style'][1], [np.nan] * 2)


@pytest.mark.parametrize(
  'over',
  [dict(rl=dict(kl_in='reward', kl_coef=0.1)), dict(train_on_rollouts='runs/before', reward='')],
  ids=['a KL in the reward', 'recorded sums'],
)
def test_sums_are_refused(over):
  over = tiny.merged(dict(algorithm='grpo', reward='x', rl=dict(advantage='gdpo')), over)
  algorithm = algorithms.load_algorithm('grpo')
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), algorithm.defaults)
  with pytest.raises(InputError, match="'gdpo' needs each reward by itself"):
    algorithm.check(config)
