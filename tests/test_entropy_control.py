"""Clip-Cov, KL-Cov, top-entropy tokens, the adaptive entropy bonus and VAPO, against their papers' formulas.

Each expectation is worked out here in float64 numpy, by loops over tokens:
  covariance  (log pi_i - mean_j log pi_j) (A_i - mean_j A_j)         arXiv:2505.22617
  Clip-Cov    r N tokens drawn with low < cov < high lose their loss  the same
  KL-Cov      the k N tokens of the largest cov get + b |log pi/old|  the same
  top entropy only the 20 % of tokens with the largest H count        arXiv:2506.01939
  adaptive    c += d where H < target, else c -= d; c [H <= target]   arXiv:2505.22312
  VAPO        lambda = 1 - 1 / (a length) for the policy, 1 for the critic; + 0.1 NLL of right answers
                                                                       arXiv:2504.05118, section 4
"""

import combinations
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxpost
from jaxpost.algorithms import grpo, ppo, token_terms
from jaxpost.errors import InputError
from jaxpost.losses import entropy_control, values
from jaxpost.rl import batching
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Outputs

RANDOM = np.random.RandomState(0)
LOGP = np.log(RANDOM.uniform(0.05, 0.95, (5, 7)))
GAINS = RANDOM.standard_normal((5, 7)) * 4
MASK = RANDOM.uniform(size=(5, 7)) < 0.7


def by_loop():
  """{(sequence, token): covariance} of the trained tokens."""
  tokens = [(s, c) for s in range(5) for c in range(7) if MASK[s, c]]
  mean_logp = sum(LOGP[t] for t in tokens) / len(tokens)
  mean_gain = sum(GAINS[t] for t in tokens) / len(tokens)
  return {t: (LOGP[t] - mean_logp) * (GAINS[t] - mean_gain) for t in tokens}


def chosen(mask):
  """{(sequence, token)} of the entries that are not 0."""
  return {(int(s), int(c)) for s, c in zip(*np.nonzero(mask))}


def test_covariance_equals_loop_over_tokens():
  cov = entropy_control.covariance(LOGP, GAINS, MASK)
  for token, expected in by_loop().items():
    assert cov[token] == pytest.approx(expected, rel=1e-12)
  assert (cov[~MASK] == 0).all()


def test_kl_cov_takes_the_largest():
  cov = entropy_control.covariance(LOGP, GAINS, MASK)
  order = sorted(by_loop().items(), key=lambda item: -item[1])
  for fraction, count in ((0.2, int(0.2 * len(order))), (1e-9, 1), (1.0, len(order))):
    assert chosen(entropy_control.largest(cov, MASK, fraction=fraction)) == {t for t, _ in order[:count]}


def test_clip_cov_draws_within_the_bounds():
  cov = entropy_control.covariance(LOGP, GAINS, MASK)
  inside = {t for t, value in by_loop().items() if 0.3 < value < 3}
  assert len(inside) > 4
  seen = set()
  for seed in range(40):
    random = np.random.default_rng(seed)
    drawn = chosen(entropy_control.clip_cov(cov, MASK, fraction=0.1, low=0.3, high=3, random=random))
    assert len(drawn) == int(0.1 * MASK.sum()) and drawn <= inside
    seen |= drawn
  assert seen == inside
  assert not entropy_control.clip_cov(cov, MASK, fraction=0.1, low=90, high=99, random=np.random.default_rng(0)).any()


def test_top_entropy_takes_fraction_of_largest_entropies():
  entropy = RANDOM.uniform(size=(5, 7))
  tokens = sorted(chosen(MASK), key=lambda t: -entropy[t])
  top = entropy_control.largest(entropy, MASK, fraction=0.2)
  assert chosen(top) == set(tokens[: int(0.2 * len(tokens))])


def test_adaptive_entropy_coefficient_rises_below_target():
  coef, used = 0.0, []
  for entropy in (0.1, 0.1, 0.2, 0.3, 0.3, 0.1):
    weight, coef = entropy_control.adaptive_coef(coef, entropy, target=0.2, step=0.005)
    used.append(weight)
  assert used == pytest.approx([0, 0.005, 0.01, 0, 0, 0]) and coef == pytest.approx(0.005)


def config_of(algorithm='grpo', **over):
  over = tiny.merged(dict(algorithm=algorithm, reward='x', rollout=dict(group_size=combinations.SIZE)), over)
  method = algorithms.load_algorithm(algorithm)
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), method.defaults)
  method.check(config)
  return config


def test_tokens_of_clip_cov_have_no_advantage_but_stay_in_the_mask():
  rollouts = combinations.experience()
  plain = grpo.credit(rollouts, config_of())
  clipped = grpo.credit(rollouts, config_of(rl=dict(clip_cov=0.1, cov_low=0.0, cov_high=9.0)))
  zeroed = (plain.arrays['advantages'] != 0) & (clipped.arrays['advantages'] == 0)
  count = max(int(0.1 * plain.mask.sum()), 1)
  assert clipped.metrics['entropy_cov/clipped'] * plain.mask.sum() == pytest.approx(count)
  assert count / 2 < zeroed.sum() <= count  # the advantage of some is 0 without clipping
  np.testing.assert_array_equal(clipped.mask, plain.mask)
  np.testing.assert_array_equal(clipped.arrays['advantages'][~zeroed], plain.arrays['advantages'][~zeroed])


def test_loss_adds_kl_cov_nll_and_entropy_terms():
  """|log pi / old| on the tokens of KL-Cov, the NLL of right answers, and an entropy bonus of its own weight."""
  rl = dict(minibatches=2, kl_cov=0.3, kl_cov_coef=2.0, correct_nll_coef=0.1, entropy_target=9.0, entropy_coef=0.02)
  config, rollouts = config_of(rl=rl), combinations.experience()
  credit = grpo.credit(rollouts, config)
  arrays = {name: jnp.asarray(x) for name, x in credit.arrays.items()}
  logp = jnp.asarray(rollouts.arrays['old_logprobs'] + 0.05)
  outputs = Outputs(logprobs=logp, entropy=jnp.full(logp.shape, 0.7))
  base_arrays = {name: x for name, x in arrays.items() if name not in token_terms.arrays(config.rl)}
  loss = grpo.objective(config).fn(outputs, arrays)[0]
  base = grpo.objective(config_of(rl=dict(minibatches=2))).fn(outputs, base_arrays)[0]
  right = rollouts.verdicts[:, None] * credit.mask
  nll = 0.1 * right * credit.mask.sum() / right.sum()
  in_kl_cov = np.asarray(arrays['kl_cov'])
  assert in_kl_cov.sum() == int(0.3 * credit.mask.sum())
  expected = 2.0 * 0.05 * in_kl_cov - nll * np.asarray(logp) - 0.02 * 0.7
  trained = credit.mask > 0
  np.testing.assert_allclose(np.asarray(loss - base)[trained], expected[trained], rtol=1e-4, atol=1e-6)
  assert credit.memory['entropy_coef'] == pytest.approx(0.025)  # raised by entropy_step, as entropy is below its target


def test_nll_of_right_answers_is_a_mean_for_every_aggregate():
  """A mean over sequences if the loss is one over sequences, and over tokens otherwise."""
  rollouts = combinations.experience()
  for aggregate in ('token', 'sequence', 'constant'):
    config = config_of(rl=dict(correct_nll_coef=0.1, aggregate=aggregate))
    credit = grpo.credit(rollouts, config)
    weights = batching.token_weights(credit.mask, aggregate, config.rollout.max_new_tokens)
    right = (rollouts.verdicts[:, None] > 0) * credit.mask
    mean_weights = batching.token_weights(right, 'sequence' if aggregate == 'sequence' else 'token', combinations.C)
    np.testing.assert_allclose(weights * credit.arrays['nll_weights'], 0.1 * mean_weights, rtol=1e-5)


def test_length_adaptive_lambda_and_its_advantages_equal_formulas():
  mask = np.array([[1] * 8, [1] * 2 + [0] * 6])
  rewards = np.where(np.arange(8) == np.array([[7], [1]]), [[1.0], [2.0]], 0)
  old_values = RANDOM.standard_normal((2, 8)) * mask
  lam = values.length_adaptive_lam(mask, 0.5)
  assert lam == pytest.approx([1 - 1 / 4, 0])
  gains, _ = values.gae(rewards, old_values, mask, 1.0, lam)
  for s, length in ((0, 8), (1, 2)):
    for t in range(length):
      deltas = [
        rewards[s, k] + (old_values[s, k + 1] if k + 1 < length else 0) - old_values[s, k] for k in range(t, length)
      ]
      assert gains[s, t] == pytest.approx(sum(lam[s] ** k * d for k, d in enumerate(deltas)), rel=1e-5, abs=1e-6)


def test_critic_of_vapo_learns_monte_carlo_returns():
  rollouts = combinations.experience()
  rollouts.arrays['values'] = RANDOM.standard_normal(rollouts.mask.shape)
  returns = ppo.credit(rollouts, config_of('vapo')).arrays['returns']
  lengths = (rollouts.mask > 0).sum(axis=1)
  metrics = ppo.credit(rollouts, config_of('vapo', rl=dict(length_alpha=1.0))).metrics
  assert metrics['gae_lambda/mean'] == pytest.approx(np.mean(np.maximum(1 - 1 / np.maximum(lengths, 1), 0)))
  trained = rollouts.mask > 0
  np.testing.assert_allclose(returns[trained], (rollouts.rewards[:, None] * rollouts.mask)[trained], atol=1e-6)
  assert not np.allclose(ppo.credit(rollouts, config_of('ppo')).arrays['returns'][trained], returns[trained])


def test_mean_lambda_leaves_out_untrained_sequences():
  rollouts, config = combinations.experience(), config_of('vapo', rl=dict(length_alpha=1.0))
  rollouts.arrays['values'] = RANDOM.standard_normal(rollouts.mask.shape)
  rollouts.mask[0] = 0
  lengths = (rollouts.mask[1:] > 0).sum(axis=1)
  assert ppo.credit(rollouts, config).metrics['gae_lambda/mean'] == pytest.approx(np.mean(1 - 1 / lengths))
  rollouts.mask[:] = 0
  assert 'gae_lambda/mean' not in ppo.credit(rollouts, config).metrics


@pytest.mark.parametrize(
  'rl, name',
  [
    (dict(kl_cov=0.1), 'kl_cov'),
    (dict(clip_cov=0.1, cov_low=5.0, cov_high=1.0), 'cov_low'),
    (dict(cov_high=3.0), 'cov_high'),
    (dict(entropy_step=0.1), 'entropy_step'),
    (dict(keep_reward=0.5), 'keep_reward'),
    (dict(length_alpha=0.05), 'length_alpha'),
    (dict(correct_nll_coef=-0.5), 'correct_nll_coef'),
  ],
)
def test_setting_without_effect_or_out_of_range_is_refused(rl, name):
  with pytest.raises(InputError, match=f'config.rl.{name}: '):
    config_of(rl=rl)


@pytest.mark.long
def test_run_with_all_entropy_terms_saves_its_coefficient(tmp_path):
  """All terms at once, through sampler, scores, packing and updates; the state of the stream has the coefficient."""
  rl = dict(minibatches=2, top_entropy=0.5, clip_cov=0.1, cov_low=0.0, kl_cov=0.1, entropy_target=99.0)
  config = tiny.grpo_config(
    tiny.folder(tmp_path / 'nano'), reward='regex_match?pattern=[aeiou]', rl=rl | dict(correct_nll_coef=0.1)
  )
  _, stream = jaxpost.policy_and_stream(config)
  try:
    first, second = next(stream), next(stream)
    state = stream.state()
  finally:
    stream.close()
  assert first.info['entropy_coef'] == 0 and second.info['entropy_coef'] == pytest.approx(0.005)
  assert state['memory']['entropy_coef'] == pytest.approx(0.01)
  trained = first.credit.mask > 0
  assert 0.4 < (first.credit.arrays['advantages'][trained] == 0).mean()
