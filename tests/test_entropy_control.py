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
  tokens = [(s, c) for s in range(5) for c in range(7) if MASK[s, c]]
  mean_logp = sum(LOGP[t] for t in tokens) / len(tokens)
  mean_gain = sum(GAINS[t] for t in tokens) / len(tokens)
  return {t: (LOGP[t] - mean_logp) * (GAINS[t] - mean_gain) for t in tokens}


def chosen(mask):
  return {(int(s), int(c)) for s, c in zip(*np.nonzero(mask))}


def test_covariance():
  found, wanted = entropy_control.covariance(LOGP, GAINS, MASK), by_loop()
  for token, value in wanted.items():
    assert found[token] == pytest.approx(value, rel=1e-12)
  assert (found[~MASK] == 0).all()


def test_kl_cov_takes_the_largest():
  cov = entropy_control.covariance(LOGP, GAINS, MASK)
  order = sorted(by_loop().items(), key=lambda item: -item[1])
  for fraction, count in ((0.2, int(0.2 * len(order))), (1e-9, 1), (1.0, len(order))):
    assert chosen(entropy_control.kl_cov(cov, MASK, fraction=fraction)) == {t for t, _ in order[:count]}


def test_clip_cov_draws_within_the_bounds():
  cov = entropy_control.covariance(LOGP, GAINS, MASK)
  inside = {t for t, value in by_loop().items() if 0.3 < value < 3}
  assert len(inside) > 4
  seen = set()
  for seed in range(40):
    random = np.random.default_rng(seed)
    found = chosen(entropy_control.clip_cov(cov, MASK, fraction=0.1, low=0.3, high=3, random=random))
    assert len(found) == int(0.1 * MASK.sum()) and found <= inside
    seen |= found
  assert seen == inside
  assert not entropy_control.clip_cov(cov, MASK, fraction=0.1, low=90, high=99, random=np.random.default_rng(0)).any()


def test_top_entropy():
  entropy = RANDOM.uniform(size=(5, 7))
  tokens = sorted(chosen(MASK), key=lambda t: -entropy[t])
  found = entropy_control.top_entropy(entropy, MASK, fraction=0.2)
  assert chosen(found) == set(tokens[: int(0.2 * len(tokens))])


def test_the_adaptive_coefficient():
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


def test_tokens_that_are_clipped_have_no_advantage_and_still_count():
  given = combinations.experience()
  plain = grpo.credit(given, config_of())
  found = grpo.credit(given, config_of(rl=dict(clip_cov=0.1, cov_low=0.0, cov_high=9.0)))
  gone = (plain.arrays['advantages'] != 0) & (found.arrays['advantages'] == 0)
  count = max(int(0.1 * plain.mask.sum()), 1)
  assert found.metrics['entropy_cov/clipped'] * plain.mask.sum() == pytest.approx(count)
  assert count / 2 < gone.sum() <= count  # some have no advantage to lose
  np.testing.assert_array_equal(found.mask, plain.mask)
  np.testing.assert_array_equal(found.arrays['advantages'][~gone], plain.arrays['advantages'][~gone])


def test_the_terms_of_the_loss():
  """|log pi / old| on the tokens of KL-Cov, the NLL of right answers, and an entropy bonus of its own weight."""
  rl = dict(minibatches=2, kl_cov=0.3, kl_cov_coef=2.0, correct_nll_coef=0.1, entropy_target=9.0, entropy_coef=0.02)
  config, given = config_of(rl=rl), combinations.experience()
  made = grpo.credit(given, config)
  arrays = {name: jnp.asarray(x) for name, x in made.arrays.items()}
  logp = jnp.asarray(given.arrays['old_logprobs'] + 0.05)
  outputs = Outputs(logprobs=logp, entropy=jnp.full(logp.shape, 0.7))
  plain = {name: x for name, x in arrays.items() if name not in token_terms.arrays(config.rl)}
  found = grpo.objective(config).fn(outputs, arrays)[0]
  base = grpo.objective(config_of(rl=dict(minibatches=2))).fn(outputs, plain)[0]
  right = given.verdicts[:, None] * made.mask
  nll = 0.1 * right * made.mask.sum() / right.sum()
  held = np.asarray(arrays['kl_cov'])
  assert held.sum() == int(0.3 * made.mask.sum())
  wanted = 2.0 * 0.05 * held - nll * np.asarray(logp) - 0.02 * 0.7
  trained = made.mask > 0
  np.testing.assert_allclose(np.asarray(found - base)[trained], wanted[trained], rtol=1e-4, atol=1e-6)
  assert made.memory['entropy_coef'] == pytest.approx(0.025)  # below its target: raised by entropy_step


def test_the_nll_of_right_answers_is_a_mean_whatever_the_loss_divides_by():
  """Over sequences where the loss is one over sequences, and over tokens otherwise."""
  given = combinations.experience()
  for aggregate in ('token', 'sequence', 'constant'):
    config = config_of(rl=dict(correct_nll_coef=0.1, aggregate=aggregate))
    made = grpo.credit(given, config)
    weights = batching.token_weights(made.mask, aggregate, config.rollout.max_new_tokens)
    right = (given.verdicts[:, None] > 0) * made.mask
    ones = batching.token_weights(right, 'sequence' if aggregate == 'sequence' else 'token', combinations.C)
    np.testing.assert_allclose(weights * made.arrays['nll_weights'], 0.1 * ones, rtol=1e-5)


def test_the_lambda_of_vapo():
  mask = np.array([[1] * 8, [1] * 2 + [0] * 6])
  rewards = np.where(np.arange(8) == np.array([[7], [1]]), [[1.0], [2.0]], 0)
  old = RANDOM.standard_normal((2, 8)) * mask
  lam = values.length_adaptive_lam(mask, 0.5)
  assert lam == pytest.approx([1 - 1 / 4, 0])
  gains, _ = values.gae(rewards, old, mask, 1.0, lam)
  for s, length in ((0, 8), (1, 2)):
    for t in range(length):
      deltas = [rewards[s, k] + (old[s, k + 1] if k + 1 < length else 0) - old[s, k] for k in range(t, length)]
      assert gains[s, t] == pytest.approx(sum(lam[s] ** k * d for k, d in enumerate(deltas)), rel=1e-5, abs=1e-6)


def test_the_critic_of_vapo_learns_whole_returns():
  given = combinations.experience()
  given.arrays['values'] = RANDOM.standard_normal(given.mask.shape)
  found = ppo.credit(given, config_of('vapo')).arrays['returns']
  lengths = (given.mask > 0).sum(axis=1)
  metrics = ppo.credit(given, config_of('vapo', rl=dict(length_alpha=1.0))).metrics
  assert metrics['gae_lambda/mean'] == pytest.approx(np.mean(np.maximum(1 - 1 / np.maximum(lengths, 1), 0)))
  trained = given.mask > 0
  np.testing.assert_allclose(found[trained], (given.rewards[:, None] * given.mask)[trained], atol=1e-6)
  assert not np.allclose(ppo.credit(given, config_of('ppo')).arrays['returns'][trained], found[trained])


def test_the_mean_lambda_is_that_of_trained_sequences():
  given, config = combinations.experience(), config_of('vapo', rl=dict(length_alpha=1.0))
  given.arrays['values'] = RANDOM.standard_normal(given.mask.shape)
  given.mask[0] = 0
  lengths = (given.mask[1:] > 0).sum(axis=1)
  assert ppo.credit(given, config).metrics['gae_lambda/mean'] == pytest.approx(np.mean(1 - 1 / lengths))
  given.mask[:] = 0
  assert 'gae_lambda/mean' not in ppo.credit(given, config).metrics


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
def test_what_would_do_nothing_is_refused(rl, name):
  with pytest.raises(InputError, match=f'config.rl.{name}: '):
    config_of(rl=rl)


@pytest.mark.long
def test_runs(tmp_path):
  """All terms at once, through sampler, scores, packing, updates and a checkpoint that goes on."""
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
