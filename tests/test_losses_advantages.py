"""Advantage estimators, GAE, adaptive KL and importance weights, against values of verl and TRL.

tests/golden/losses.json says where its values come from. test_losses.py names those that no test uses.
"""

import functools
import itertools

import numpy as np
import pytest
from golden_losses import CASES, INPUTS, close

from jaxpost import errors
from jaxpost.algorithms import rft, rl_fields
from jaxpost.losses import advantages, group_advantages, importance, token_advantages, turn_advantages, values

OLD, SAMPLER, MASK, TOOLS, VALUES = (INPUTS[k] for k in ('old', 'roll', 'mask', 'mask_mt', 'values'))
ALL_VALID = np.ones((2, 4), bool)


def on_last_token(scores, mask):
  """Places scores [S] on the last trained token of each sequence: [S, C]."""
  last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
  return scores[:, None] * (np.arange(mask.shape[1]) == last[:, None])


@pytest.mark.parametrize(
  'case, options',
  [
    ('verl/grpo_std/score', {}),
    ('verl/dr_grpo/score', dict(scale='none')),
    ('verl/dr_grpo/score2', dict(scale='none')),
    ('trlformula/grpo_adv_group/score2', dict(scale='group', eps=1e-4)),
    ('trlformula/grpo_adv_batch/score2', dict(scale='batch', eps=1e-4)),
    ('trlformula/grpo_adv_none/score2', dict(scale='none')),
  ],
)
def test_group_relative_matches_verl_and_trl(case, options):
  rewards = INPUTS[case.rpartition('/')[2]].reshape(2, 4)
  close(advantages.group_relative(rewards, ALL_VALID, **options).ravel(), CASES[case])


def test_leave_one_out_matches_verl():
  rewards = INPUTS['score'].reshape(2, 4)
  ours = group_advantages.leave_one_out(rewards, ALL_VALID)
  close(ours.ravel(), CASES['verl/rloo/score'])
  close(ours[0, 0], 1 - (0 + 0.5 + 0) / 3)


def test_group_of_one_keeps_its_reward_only_with_singleton_raw():
  rewards = INPUTS['score2'].reshape(8, 1)
  valid = np.ones((8, 1), bool)
  close(advantages.group_relative(rewards, valid, singleton='raw').ravel(), CASES['verl/grpo_singleton_groups'])
  assert not advantages.group_relative(rewards, valid).any()
  # A group with one valid sample of three, beside an ordinary group.
  rewards = np.array([[np.nan, 3.0, np.nan], [0.0, 2.0, np.nan]])
  valid = np.isfinite(rewards)
  for scale in ('group', 'none'):
    ours = advantages.group_relative(rewards, valid, scale=scale, singleton='raw')
    close(ours[0], [0, 3 / (1 + 1e-6 * (scale == 'group')), 0])
  close(group_advantages.leave_one_out(rewards, valid, singleton='raw'), [[0, 3, 0], [-2, 2, 0]])
  close(group_advantages.leave_one_out(rewards, valid), [[0, 0, 0], [-2, 2, 0]])


@pytest.mark.parametrize('scale', ['group', 'batch', 'none'])
def test_groups_without_a_comparison_and_masked_samples_get_zero(scale):
  """The groups have equal rewards, a single valid sample, no valid sample, and one masked sample."""
  nan = np.nan
  rewards = np.array([[0.1, 0.1, 0.1], [1, nan, nan], [nan] * 3, [0, nan, 1]])
  valid = np.isfinite(rewards)
  ours = advantages.group_relative(rewards, valid, scale=scale)
  assert not ours[:3].any() and ours[3, 1] == 0
  assert not group_advantages.leave_one_out(rewards, valid)[:3].any()
  if scale == 'group':
    close(ours[3], [-np.sqrt(0.5), 0, np.sqrt(0.5)])
  np.testing.assert_array_equal(advantages.uniform(rewards, valid), [True, True, False, False])


@pytest.mark.parametrize('scale', ['group', 'batch'])
@pytest.mark.filterwarnings('error')
def test_groups_of_equal_rewards_do_not_divide_by_zero_without_eps(scale):
  """Groups without variance get 0, beside other groups and alone."""
  equal, mixed = np.ones((1, 4)), np.array([[0.0, 1, 0, 1]])
  rewards = np.concatenate([equal, mixed])
  ours = advantages.group_relative(rewards, ALL_VALID, scale=scale, eps=0.0)
  close(ours, advantages.group_relative(rewards, ALL_VALID, scale=scale))
  assert not ours[0].any() and not advantages.group_relative(equal, ALL_VALID[:1], scale=scale, eps=0.0).any()
  close(group_advantages.best_minus_second(rewards, ALL_VALID, eps=0.0), np.zeros((2, 4)))
  assert not group_advantages.gdpo({'a': (1.0, equal)}, ALL_VALID[:1], eps=0.0).any()
  turns = np.ones((8, 3), bool)
  for estimator in turn_advantages.mt_grpo, functools.partial(turn_advantages.gigpo, completions=np.ones((8, 3))):
    ours = estimator(rewards, ALL_VALID, np.zeros((8, 3)), turns, scale='group', eps=0.0)
    assert np.isfinite(ours).all() and not ours[:4].any() and ours[4:].any()


def test_leave_one_out_scale_divides_by_the_std_of_the_other_samples():
  """NeMo-RL's default uses mean and std of the other samples, and does not divide where these are equal."""
  ours = group_advantages.leave_one_out([[1, 0, 0, 0]], ALL_VALID[:1], scale='leave_one_out')
  close(ours, [[1, *[-1 / 3 / (np.sqrt(1 / 3) + 1e-6)] * 3]])
  rewards = INPUTS['score2'].reshape(2, 4)
  others = [[np.delete(row, i) for i in range(4)] for row in rewards]
  expected = [
    [(reward - x.mean()) / (x.std(ddof=1) + 1e-6) for reward, x in zip(group, others_of_group)]
    for group, others_of_group in zip(rewards, others)
  ]
  close(group_advantages.leave_one_out(rewards, ALL_VALID, scale='leave_one_out'), expected)
  with pytest.raises(ValueError, match="scale 'group'"):
    group_advantages.leave_one_out(rewards, ALL_VALID, scale='group')


def gdpo_of_the_paper(components, eps=1e-6):
  """Eqs. 4 to 6 of arXiv:2601.05242, written out.

  Args:
    components: [(weight, rewards [N, G])], all valid.
  """
  total = np.zeros(np.shape(components[0][1]))
  for weight, table in components:
    for n, group in enumerate(np.asarray(table, np.float64)):
      mean = sum(group) / len(group)
      std = np.sqrt(sum((group - mean) ** 2) / (len(group) - 1))
      total[n] += weight * (group - mean) / (std + eps)
  flat = total.ravel()
  mean = flat.sum() / flat.size
  return (total - mean) / (np.sqrt(((flat - mean) ** 2).sum() / (flat.size - 1)) + eps)


def test_gdpo_matches_the_paper_and_ignores_the_scale_of_a_reward():
  right, style = INPUTS['score'].reshape(2, 4), INPUTS['score2'].reshape(2, 4)
  ours = group_advantages.gdpo({'right': (1.0, right), 'style': (0.5, style)}, ALL_VALID)
  close(ours, gdpo_of_the_paper([(1.0, right), (0.5, style)]))
  # Sums of rewards of (0, 1) and (0, 2) have the same advantage in GRPO; GDPO tells the groups apart.
  first, second = np.array([[0, 1], [0, 1.0]]), np.array([[0, 0], [0, 1.0]])
  close(advantages.group_relative(first + second, ALL_VALID[:, :2])[:, 1], [np.sqrt(0.5)] * 2)
  ours = group_advantages.gdpo({'first': (1.0, first), 'second': (1.0, second)}, ALL_VALID[:, :2])
  close(ours[1], 2 * ours[0])
  # The scale of a reward has no effect.
  close(group_advantages.gdpo({'first': (1.0, 100 * first), 'second': (1.0, second)}, ALL_VALID[:, :2]), ours)


def test_gdpo_ignores_components_without_a_value_and_masked_samples():
  nan = np.nan
  valid = np.array([[True, True, False], [True, True, True], [True, True, True]])
  applies = np.array([[1, 0, 5], [0, 1, 1], [1, 1, 1.0]])
  of_one_group = np.array([[nan] * 3, [1, 0, 0], [nan] * 3])
  ours = group_advantages.gdpo({'a': (1.0, applies), 'b': (2.0, of_one_group)}, valid)
  expected = advantages.group_relative(applies, valid)
  expected[1] += 2 * advantages.group_relative(of_one_group[1:2], valid[1:2])[0]
  close(ours, expected / expected[valid].std(ddof=1))
  assert not ours[0, 2] and not ours[2].any()


def test_best_minus_second_matches_verl():
  rewards = INPUTS['score2'].reshape(2, 4)
  close(group_advantages.best_minus_second(rewards, ALL_VALID).ravel(), CASES['verl/passk/score2'])


def test_gpg_scales_by_the_fraction_of_groups_with_a_gradient():
  """verl scales by the samples of reward 0 instead: its value is 8 / 6 of ours, as no group is uniform here."""
  rewards = INPUTS['score2'].reshape(2, 4)
  close(group_advantages.gpg(rewards, ALL_VALID).ravel() * 8 / 6, CASES['verl/gpg/score2'])
  rewards = np.array([[1.0, 1, 1, 1], [0, 0, 0, 4]])
  close(group_advantages.gpg(rewards, ALL_VALID), [[0] * 4, [-2, -2, -2, 6]])


def test_opo_weighs_the_baseline_by_length():
  rewards = np.array([[1.0, 0, np.nan, 2], [3, 3, 3, 3]])
  valid = np.isfinite(rewards)
  baseline = (10 * 1 + 30 * 0 + 20 * 2) / 60
  ours = group_advantages.opo(rewards, valid, [[10, 30, 99, 20], [1, 2, 3, 4]])
  close(ours, [[1 - baseline, -baseline, 0, 2 - baseline], [0] * 4])


def test_maxrl_divides_by_the_pass_rate():
  rewards = np.array([[1.0, 0, 0, 0], [0, 0, 0, 0]])
  close(group_advantages.maxrl(rewards, ALL_VALID), [[3, -1, -1, -1], [0] * 4])
  with pytest.raises(errors.InputError, match=r"'maxrl' is defined for rewards of 0 and 1, and a reward was 0\.5"):
    group_advantages.maxrl(rewards / 2, ALL_VALID)


@pytest.mark.parametrize('k', [1, 2, 3])
@pytest.mark.parametrize('right', range(6))
def test_pass_at_k_advantage_is_the_mean_over_subsets(k, right):
  """A subset of k samples passes if one of them does, and its advantage goes to all of its samples."""
  rewards = np.arange(5) < right
  subsets = list(itertools.combinations(range(5), k))
  passes = np.array([rewards[list(s)].any() for s in subsets], float)
  subset_advantages = (passes - passes.mean()) / (passes.std() or 1)
  expected = [np.mean([a for s, a in zip(subsets, subset_advantages) if i in s]) for i in range(5)]
  ours = group_advantages.pass_at_k(rewards[None].astype(float), np.ones((1, 5), bool), k)
  np.testing.assert_allclose(ours[0], expected, rtol=1e-5, atol=1e-6)


def test_every_comparing_estimator_gives_zero_to_groups_without_variance():
  arrays = {
    'rewards': np.ones((2, 4)),
    'valid': ALL_VALID,
    'lengths': np.arange(8).reshape(2, 4),
    'mask': np.ones((8, 3)),
  }
  arrays['components'] = {'one': (1.0, np.ones((2, 4))), 'two': (2.0, np.repeat([[0.1], [0.7]], 4, axis=1))}
  arrays |= {name: np.ones((8, 3)) for name in ('turn_rewards', 'sampled', 'completions')}
  options = {'k': 2}
  for name, estimator in advantages.ESTIMATORS.items():
    if estimator.compares:
      chosen = {k: v for k, v in options.items() if k in estimator.reads}
      assert not estimator.fn(*(arrays[x] for x in estimator.takes), **chosen).any(), name


def test_best_of_n_selects_the_first_best_valid_sample():
  nan = np.nan
  rewards = np.array([[1, 3, 3], [nan, -5, nan], [nan] * 3, [nan, 1, 2]])
  np.testing.assert_array_equal(
    rft.best_of_n(rewards, np.isfinite(rewards)), [[0, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]]
  )


def test_whiten_matches_verl():
  ours = token_advantages.whiten(VALUES, MASK)
  close(ours, CASES['verl/masked_whiten'] * MASK)


@pytest.mark.parametrize(
  'case, gamma',
  [('verl/reinforce_pp_g0.9/score', 0.9), ('verl/reinforce_pp_g0.9/score2', 0.9), ('verl/reinforce_pp_g1/score2', 1.0)],
)
def test_reinforce_plus_plus_matches_verl(case, gamma):
  rewards = on_last_token(INPUTS[case.rpartition('/')[2]], MASK)
  golden = np.array(CASES[case])
  if golden.ndim == 3:
    golden, returns = golden
    close(token_advantages.returns_to_go(rewards, MASK, gamma), returns * MASK)
  close(token_advantages.reinforce_plus_plus(rewards, MASK, gamma), golden * MASK)


def test_reinforce_plus_plus_baseline_matches_verl_and_ignores_samples_without_a_reward():
  rewards = INPUTS['score'].reshape(2, 4)
  close(
    token_advantages.reinforce_plus_plus_baseline(rewards, ALL_VALID, MASK), CASES['verl/reinforce_pp_baseline/score']
  )
  # A sample without a reward counts neither as 0 nor in the whitening.
  valid = ALL_VALID.copy()
  valid[0, 1] = False
  ours = token_advantages.reinforce_plus_plus_baseline(np.where(valid, rewards, np.nan), valid, MASK)
  assert not ours[1].any()
  kept = MASK * valid.reshape(-1, 1) > 0
  close(ours[kept].mean(), 0)
  close(ours[kept].std(ddof=1), 1)
  with pytest.raises(ValueError, match=r'\(8,\), \(4,\)'):
    token_advantages.reinforce_plus_plus_baseline(rewards, ALL_VALID, MASK[:4])


def test_remax_subtracts_the_reward_of_the_greedy_answer():
  rewards = np.array([[0.0, 9, 2, 9], [1, 0, 3, 0]])
  mask = np.array([[1, 0, 1, 0], [1, 1, 1, 0]])
  close(token_advantages.remax(rewards, mask, [0.5, 1.0]), [[1.5, 0, 1.5, 0], [3, 2, 2, 0]])


def test_tool_tokens_are_not_discounted():
  """Two trained tokens are one step apart, no matter how many other tokens are between them."""
  rewards, mask = [[0.0, 9, 9, 2, 9]], [[1, 0, 0, 1, 0]]
  close(token_advantages.returns_to_go(rewards, mask, 0.5), [[1, 0, 0, 2, 0]])
  close(values.gae(rewards, np.zeros((1, 5)), mask, 0.5, 1.0)[1], [[1, 0, 0, 2, 0]])


@pytest.mark.parametrize('case, mask', [('verl/gae_g0.99_l0.95', MASK), ('verl/gae_g0.99_l0.95_multiturn_mask', TOOLS)])
def test_gae_matches_verl(case, mask):
  """The advantages of verl are whitened; its returns are made of the advantages before that."""
  rewards = on_last_token(INPUTS['score2'], mask)
  values_of_trained = np.where(mask > 0, VALUES, np.nan)
  ours, returns = values.gae(rewards, values_of_trained, mask, 0.99, 0.95)
  expected_advantages, expected_returns = np.array(CASES[case]) * mask
  close(returns, expected_returns)
  close(token_advantages.whiten(ours, mask), expected_advantages)
  close(returns - ours, VALUES * mask)


def test_adaptive_kl_matches_verl():
  """The controller starts at 0.2 with target 0.1; the KL is below it, on it, and twice above it."""
  coef, ours = 0.2, []
  for kl in (0.01, 0.1, 0.3, 5.0):
    coef = advantages.adaptive_kl(coef, kl, 0.1, 10_000, 256)
    ours.append(coef)
  close(ours, CASES['verl/adaptive_kl'])


def test_adaptive_kl_stays_positive():
  """A step of more samples than the horizon changes the coefficient by a fifth at most, as a whole horizon does."""
  close([advantages.adaptive_kl(0.1, kl, 0.1, 100.0, steps=1024) for kl in (0.0, 0.1, 9.0)], [0.08, 0.1, 0.12])


def test_shapes_that_would_broadcast_are_refused():
  with pytest.raises(ValueError, match=r'\(8, 6\), \(8, 1\)'):
    token_advantages.whiten(VALUES[:, :1], MASK)
  with pytest.raises(ValueError, match=r'\(4, 2\), \(2, 4\)'):
    advantages.group_relative(np.zeros((4, 2)), ALL_VALID)
  with pytest.raises(ValueError, match="scale 'std'"):
    advantages.group_relative(np.zeros((2, 4)), ALL_VALID, scale='std')


# --------------------------------------------------------------- importance


def weights(*names, ratio=None, mask=None, **options):
  ratio = np.exp(OLD - SAMPLER) if ratio is None else np.array(ratio)
  return importance.correction(
    names, np.log(ratio), MASK if mask is None else np.array(mask), importance.CorrectionOptions(**options)
  )


def test_token_truncated_weights_match_verl():
  close(weights('token_truncated', importance_cap=1.05), CASES['verl/rollout_is/token_1.05'])


def test_correction_weights_match_hand_calculation():
  ratio = [[0.4, 1.0, 6.0, 9.0], [1.01, 1.0, 1.0, 9.0]]
  mask = [[1, 1, 1, 0], [1, 1, 1, 0]]

  def run(*names, **options):
    return weights(*names, ratio=ratio, mask=mask, **options)

  kept = [[0, 1, 0, 0], [1, 1, 1, 0]]
  close(run('token_mask'), kept)
  close(run('icepop'), np.multiply(kept, ratio))
  close(run('icepop', token_low=0.0), np.multiply([[1, 1, 0, 0], [1, 1, 1, 0]], ratio))
  close(run('sequence_truncated'), [[2, 2, 2, 0], [1.01] * 3 + [0]])
  close(run('sequence_mask'), [[0] * 4, [1, 1, 1, 0]])
  # (0.4 * 6)^(1/3) = 1.34: the mean is geometric.
  close(run('sequence_mask', sequence_high=1.35)[0], [1, 1, 1, 0])
  close(run('sequence_mask', sequence_high=1.33)[0], [0] * 4)
  close(run('sequence_mask', 'token_truncated'), [[0] * 4, [1.01, 1, 1, 0]])


def test_rejection_matches_hand_calculation():
  """The sequences have the ratios 1 and 2, and 0.5 and 1.1; k2 and k3 are computed by their formulas."""
  ratio, mask = np.array([[1.0, 2, 9], [0.5, 1.1, 9]]), np.array([[1, 1, 0], [1, 1, 0]])
  k2 = np.log(ratio) ** 2 / 2
  k3 = ratio - 1 - np.log(ratio)

  def run(name, **options):
    return weights(name, ratio=ratio, mask=mask, **options)

  for bound in (0.02, 0.1, 0.13, 0.2, 0.35):
    for name, value in (('k2', k2), ('k3', k3)):
      close(run(f'token_{name}', reject_above=bound), (value <= bound) * mask)
      mean = value[:, :2].mean(axis=1, keepdims=True)
      close(run(f'sequence_{name}', reject_above=bound), (mean <= bound) * mask)
  close(run('product_mask', product_low=0.6, product_high=2.1), [[1, 1, 0], [0] * 3])
  close(run('product_mask', product_low=0.5, product_high=1.9), [[0] * 3, [1, 1, 0]])


@pytest.mark.parametrize('name', importance.METHODS)
def test_correction_weights_are_bounded_and_masked(name):
  """The ratios are extreme, and NaN or infinite where the mask is 0."""
  log_ratio = np.array([[1e4, -1e4, np.nan], [np.nan] * 3, [0, 0, np.inf]])
  ours = importance.correction((name,), log_ratio, [[1, 1, 0], [0, 0, 0], [1, 1, 0]], importance.CorrectionOptions())
  assert np.isfinite(ours).all() and ours.max() <= 2
  assert not ours[1].any() and not ours[:, 2].any()
  np.testing.assert_array_equal(ours[2], [1, 1, 0])


def test_off_policy_metrics_match_verl():
  ours = importance.off_policy_metrics(OLD, SAMPLER, MASK)
  close(
    [ours[f'rollout_corr/{k}'] for k in CASES['verl/offpolicy_metrics']], list(CASES['verl/offpolicy_metrics'].values())
  )

  # A sequence without trained tokens counts nowhere, rather than as a sequence of perplexity 1.
  def widen(x, fill):
    return np.concatenate([x, np.full((1, 6), fill)])

  wider = importance.off_policy_metrics(widen(OLD, np.nan), widen(SAMPLER, np.nan), widen(MASK, 0))
  assert wider == ours
  assert importance.off_policy_metrics(OLD, OLD, 0 * MASK) == {}


def test_every_correction_option_is_known_to_rl_fields():
  """`rl_fields` refuses them where no correction is on; it lists them, so as not to import `importance` for that."""
  assert set(importance.CorrectionOptions.__dataclass_fields__) <= set(rl_fields._OPTIONS)
