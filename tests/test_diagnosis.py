"""Metrics that say why a run of policy gradients goes wrong, against figures worked out by hand."""

import combinations
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost.algorithms import grpo
from jaxpost.losses import importance
from jaxpost.monitor import alerts
from jaxpost.rl import reward_metrics
from jaxpost.types import Experience, Outputs, Prompt, Rollout


def test_effective_sample_size_and_masks_by_sign():
  weights = np.array([[2.0, 0, 1, 9], [0, 1, 9, 9]])
  mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
  signs = np.array([[1.0, 1, 1, 0], [-1, -1, 0, 0]])
  found = importance.weight_metrics(weights, signs, mask)
  assert found == {
    'importance_weight/ess': pytest.approx(4**2 / (5 * 6)),
    'importance_weight/masked_positive': pytest.approx(1 / 3),
    'importance_weight/masked_negative': 0.5,
  }
  assert importance.weight_metrics(0 * weights, signs, mask)['importance_weight/ess'] == 0
  assert importance.weight_metrics(weights, signs, 0 * mask) == {}


def experience():
  """Two groups of two: one right and one wrong answer, then two wrong ones, of which one has no verdict."""
  lengths = np.array([4, 8, 2, 6])
  logprobs = -np.arange(1.0, 9)[None] * np.ones((4, 1))
  rollout = Rollout(
    prompts=tuple(Prompt(i, np.zeros(1, np.int32), '', {}) for i in range(2)),
    completions=np.zeros((4, 8), np.int32),
    lengths=lengths,
    logprobs=logprobs,
    behavior_logprobs=logprobs,
    finished=np.ones(4, bool),
  )
  verdicts = np.array([1.0, 0.5, 0, np.nan])
  return Experience(rollout, verdicts, (np.arange(8) < lengths[:, None]).astype(float), {}, verdicts=verdicts)


def test_pass_rates_and_lengths_of_right_and_wrong():
  assert reward_metrics.correctness_metrics(experience(), 1.0) == {
    'pass_rate/none': 0.5,
    'pass_rate/low': 0.5,
    'pass_rate/high': 0,
    'pass_rate/all': 0,
    'completions/right_length': 4,
    'completions/wrong_length': 5,
  }
  # A lower bar makes the second answer of the first group right, too.
  assert reward_metrics.correctness_metrics(experience(), 0.5)['pass_rate/all'] == 0.5


def test_entropy_by_position():
  found = reward_metrics.surprisal_metrics(experience())
  # First quarters: token 1 of four, tokens 1 and 2 of eight, token 1 of two, tokens 1 and 2 of six.
  assert found['entropy/quarter_1'] == pytest.approx(np.mean([1, 1, 2, 1, 1, 2]))
  assert found['entropy/quarter_4'] == pytest.approx(np.mean([4, 7, 8, 6]))


def metrics_of(loss, logprobs, sampler, advantages):
  config = combinations.config_of(('rl.loss', loss))
  arrays = dict(advantages=jnp.array(advantages), sampler_logprobs=jnp.array(sampler), old_logprobs=jnp.array(sampler))
  outputs = Outputs(logprobs=jnp.array(logprobs), entropy=jnp.zeros(len(logprobs)))
  return grpo.objective(config).fn(outputs, arrays)[1]


@pytest.mark.parametrize('loss, positive, negative', [('clip', [1, 0, 0], [0, 1, 0]), ('cispo', [0, 0, 0], [0, 0, 0])])
def test_clip_fractions_by_sign(loss, positive, negative):
  found = metrics_of(loss, [-1.0, -2.0, -1.0], [-2.0, -1.0, -1.1], [1.0, -1.0, 1.0])
  np.testing.assert_array_equal(found['clip_ratio/positive_mean'], positive)
  np.testing.assert_array_equal(found['clip_ratio/negative_mean'], negative)
  np.testing.assert_array_equal(found['clip_ratio/region_mean'], np.add(positive, negative))


def test_a_weight_that_is_bounded_counts_on_its_own_side():
  found = metrics_of('cispo', [-0.1, -0.1], [-3.0, -3.0], [1.0, -1.0])
  np.testing.assert_array_equal(found['clip_ratio/positive_mean'], [1, 0])
  np.testing.assert_array_equal(found['clip_ratio/negative_mean'], [0, 1])


def test_kl_to_the_sampler():
  """The mean over the sampler's draws of k1 and of k3 is KL(sampler, policy)."""
  sampler, policy = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.2, 0.6])
  found = metrics_of('clip', policy, sampler, [1.0, 1.0, 1.0])
  exact = (np.exp(sampler) * (sampler - policy)).sum()
  for name in ('k1', 'k3'):
    assert (np.exp(sampler) * np.asarray(found[f'sampler_kl/{name}'])).sum() == pytest.approx(exact, rel=1e-4)
  assert (np.asarray(found['sampler_kl/k3']) >= 0).all()


@pytest.mark.parametrize(
  'row, kind',
  [
    ({'importance_weight': 0.01}, 'removed'),
    ({'importance_weight': 1.0, 'off_policy_kept': 0.0}, 'removed'),
    ({'vespo/phi': 0.01}, 'removed'),
    ({'clip_ratio/region_mean': 0.95}, 'limited'),
    ({'wpo/weight': 0.04}, 'wpo'),
    ({'wpo/weight': 0.06}, None),
    ({'importance_weight': 0.5, 'clip_ratio/region_mean': 0.5}, None),
    ({}, None),
  ],
)
def test_a_warning_where_a_weight_or_a_clip_removes_everything(row, kind):
  found = alerts.Alerts()
  found.check('grpo', 1, row)
  assert [w['kind'] for w in found.warnings] == ([kind] if kind else [])
