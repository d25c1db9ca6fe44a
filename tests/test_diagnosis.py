"""Diagnostic metrics of RL runs: effective sample size, clip fractions, pass rates, entropy by position."""

import combinations
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost.algorithms import grpo
from jaxpost.losses import importance
from jaxpost.monitor import alerts
from jaxpost.rl import reward_metrics
from jaxpost.types import Experience, Outputs, Prompt, Rollout


def test_effective_sample_size_and_masked_fractions_by_sign_of_the_advantage():
  weights = np.array([[2.0, 0, 1, 9], [0, 1, 9, 9]])
  mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
  signs = np.array([[1.0, 1, 1, 0], [-1, -1, 0, 0]])
  measured = importance.weight_metrics(weights, signs, mask)
  assert measured == {
    'importance_weight/ess': pytest.approx(4**2 / (5 * 6)),
    'importance_weight/masked_positive': pytest.approx(1 / 3),
    'importance_weight/masked_negative': 0.5,
  }
  assert importance.weight_metrics(0 * weights, signs, mask)['importance_weight/ess'] == 0
  assert importance.weight_metrics(weights, signs, 0 * mask) == {}


def experience():
  """Two groups of two: one right and one wrong answer; one wrong answer and one without a verdict."""
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


def test_pass_rates_and_lengths_of_right_and_wrong_completions():
  assert reward_metrics.correctness_metrics(experience(), 1.0) == {
    'pass_rate/none': 0.5,
    'pass_rate/low': 0.5,
    'pass_rate/high': 0,
    'pass_rate/all': 0,
    'completions/right_length': 4,
    'completions/wrong_length': 5,
  }
  # A lower threshold makes the second answer of the first group right, too.
  assert reward_metrics.correctness_metrics(experience(), 0.5)['pass_rate/all'] == 0.5


def test_entropy_by_quarter_of_the_completion():
  measured = reward_metrics.surprisal_metrics(experience())
  # First quarters are token 1 of four, tokens 1 and 2 of eight, token 1 of two, and tokens 1 and 2 of six.
  assert measured['entropy/quarter_1'] == pytest.approx(np.mean([1, 1, 2, 1, 1, 2]))
  assert measured['entropy/quarter_4'] == pytest.approx(np.mean([4, 7, 8, 6]))


def metrics_of(loss, logprobs, sampler, advantages):
  config = combinations.config_of(('rl.loss', loss))
  arrays = dict(advantages=jnp.array(advantages), sampler_logprobs=jnp.array(sampler), old_logprobs=jnp.array(sampler))
  outputs = Outputs(logprobs=jnp.array(logprobs), entropy=jnp.zeros(len(logprobs)))
  return grpo.objective(config).fn(outputs, arrays)[1]


@pytest.mark.parametrize('loss, positive, negative', [('clip', [1, 0, 0], [0, 1, 0]), ('cispo', [0, 0, 0], [0, 0, 0])])
def test_clip_fractions_by_sign_of_the_advantage(loss, positive, negative):
  measured = metrics_of(loss, [-1.0, -2.0, -1.0], [-2.0, -1.0, -1.1], [1.0, -1.0, 1.0])
  np.testing.assert_array_equal(measured['clip_ratio/positive_mean'], positive)
  np.testing.assert_array_equal(measured['clip_ratio/negative_mean'], negative)
  np.testing.assert_array_equal(measured['clip_ratio/region_mean'], np.add(positive, negative))


def test_bounded_cispo_weights_count_by_sign_of_the_advantage():
  measured = metrics_of('cispo', [-0.1, -0.1], [-3.0, -3.0], [1.0, -1.0])
  np.testing.assert_array_equal(measured['clip_ratio/positive_mean'], [1, 0])
  np.testing.assert_array_equal(measured['clip_ratio/negative_mean'], [0, 1])


def test_mean_of_sampler_kl_is_the_exact_kl():
  """The means of k1 and of k3 over draws of the sampler are both KL(sampler, policy)."""
  sampler, policy = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.2, 0.6])
  measured = metrics_of('clip', policy, sampler, [1.0, 1.0, 1.0])
  exact = (np.exp(sampler) * (sampler - policy)).sum()
  for name in ('k1', 'k3'):
    assert (np.exp(sampler) * np.asarray(measured[f'sampler_kl/{name}'])).sum() == pytest.approx(exact, rel=1e-4)
  assert (np.asarray(measured['sampler_kl/k3']) >= 0).all()


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
def test_warning_where_weights_or_clips_remove_most_of_the_gradient(row, kind):
  watcher = alerts.Alerts()
  watcher.check('grpo', 1, row)
  assert [w['kind'] for w in watcher.warnings] == ([kind] if kind else [])
