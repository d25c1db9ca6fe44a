"""Surrogates, KL estimators and critic losses against golden figures of verl and TRL, and by hand.

tests/golden/losses.json says where its figures come from. Its other cases are in test_losses_advantages.py,
test_losses_preferences.py, test_head.py, test_sft.py, test_distill.py and test_rewards_format.py; docs/defaults.md
lists them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_losses import CASES, INPUTS, close

from jaxpost.losses import importance, policy_gradient, surrogates
from jaxpost.losses import values as values_lib
from jaxpost.losses.policy_gradient import SurrogateOptions

OLD, NEW, REF, GAINS, MASK = (INPUTS[k] for k in ('old', 'new', 'ref', 'adv_grpo_score2', 'mask'))


# The weight of each token under each way of averaging over a batch.
WEIGHTS = {
  'token-mean': MASK / MASK.sum(),
  'seq-mean-token-sum': MASK / len(MASK),
  'seq-mean-token-mean': MASK / MASK.sum(1, keepdims=True) / len(MASK),
  'seq-mean-token-sum-norm': MASK / MASK.size,
}


def run(name, weights, options, new=NEW, scale=1.0, gains=GAINS):
  """Returns (loss, gradient, per-token metrics, per-token loss) of the surrogate `name`."""
  surrogate = policy_gradient.LOSSES[name]

  def reduce_sequence(x):
    return surrogate.per_sequence(x, MASK, MASK.astype(int))

  def loss(x):
    if surrogate.per_sequence is None:
      per_token, metrics = surrogate.fn(x, OLD, gains, options)
    else:
      per_token, metrics = surrogate.fn(x, OLD, gains, options, reduce_sequence)
    return jnp.sum(per_token * scale * weights), (metrics, per_token)

  (value, (metrics, per_token)), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(new))
  return value, gradient, metrics, per_token


@pytest.mark.parametrize(
  'case, name, mean, options',
  [
    *[(f'verl/ppo_clip0.2_dual3/{mean}', 'clip', mean, dict(dual_clip=3.0)) for mean in WEIGHTS],
    ('verl/ppo_clip0.2_0.28/token-mean', 'clip', 'token-mean', dict(clip_high=0.28)),
    ('trl/grpo_loss_grpo_eps0.2', 'clip', 'seq-mean-token-mean', {}),
    ('trl/grpo_loss_bnpo_eps0.2', 'clip', 'token-mean', {}),
    ('trl/grpo_loss_dapo_eps0.2', 'clip', 'token-mean', {}),
    ('trl/grpo_loss_dr_grpo_eps0.2', 'clip', 'seq-mean-token-sum-norm', {}),
    ('trl/grpo_loss_dapo_0.2_0.28', 'clip', 'token-mean', dict(clip_high=0.28)),
    ('trl/grpo_loss_cispo_max1.05', 'cispo', 'token-mean', dict(clip_low=1.0, clip_high=0.05)),
    ('verl/sapo', 'sapo', 'seq-mean-token-mean', {}),
    ('trl/grpo_loss_sapo_eps0.2', 'sapo', 'seq-mean-token-mean', {}),
    ('verl/gspo', 'gspo', 'seq-mean-token-mean', dict(clip_low=0.03, clip_high=0.04)),
    ('trl/gspo_grpo_0.03_0.04', 'gspo', 'seq-mean-token-mean', dict(clip_low=0.03, clip_high=0.04)),
    ('verl/geo_mean', 'geo_mean', 'seq-mean-token-mean', {}),
    ('trl/luspo_seq', 'gspo', 'seq-mean-token-sum', {}),
    ('trl/grpo_loss_vespo_eps0.2', 'vespo', 'token-mean', {}),
    ('verl/dro_beta0.1', 'dro', 'token-mean', {}),
    ('verl/gpg', 'reinforce', 'token-mean', {}),
    ('verl/dppo_tv', 'dppo_tv', 'token-mean', {}),
    ('verl/dppo_kl', 'dppo_kl', 'token-mean', {}),
  ],
  ids=lambda x: x if isinstance(x, str) and '/' in x else '',
)
def test_surrogates_match_golden_loss_and_gradient(case, name, mean, options):
  value, gradient, metrics, _ = run(name, WEIGHTS[mean], SurrogateOptions(**options))
  golden = CASES[case]
  close(value, golden['loss'])
  close(gradient, golden['grad'])
  assert not np.asarray(gradient)[MASK == 0].any()
  averages = {k: np.sum(v * WEIGHTS['token-mean']) for k, v in metrics.items()}
  if name in ('gspo', 'vespo'):  # TRL averages these over sequences, verl over tokens
    averages = {k: np.mean(v[:, 0]) for k, v in metrics.items()}
    averages['vespo/phi_seq_mean'] = averages.pop('vespo/phi', 0)
  for key, theirs in golden['metrics'].items():
    if key in averages:
      close(averages[key], theirs)
  required_metrics = {
    'trl/grpo_loss_cispo_max1.05': {'cispo_clip_ratio'},
    'trl/grpo_loss_vespo_eps0.2': {'vespo/phi_seq_mean'},
    'trl/gspo_grpo_0.03_0.04': {'clip_ratio/low_mean', 'clip_ratio/high_mean'},
  }
  assert required_metrics.get(case, set()) <= averages.keys() & golden['metrics']


def test_cispo_is_bounded_on_both_sides():
  loss, _ = surrogates.cispo(NEW, OLD, GAINS, SurrogateOptions(clip_low=0.2, clip_high=0.28))
  ours = -np.clip(np.exp(NEW - OLD), 0.8, 1.28) * GAINS * NEW
  close(loss, ours)


@pytest.mark.parametrize('name', ['k1', 'k2', 'k3', 'abs'])
def test_kl_estimates_match_golden_values(name):
  theirs = {'k1': 'kl', 'k2': 'mse', 'k3': 'low_var_kl', 'abs': 'abs'}[name]
  weights = WEIGHTS['token-mean']
  value = np.sum(policy_gradient.KL[name](NEW, REF) * weights)
  if name == 'k3':
    close(value, CASES['verl/kl_loss_grad/low_var_kl']['loss'])
  else:
    close(value, CASES[f'verl/kl_penalty/{theirs}'])


@pytest.mark.parametrize('name, case', [('k1', 'kl'), ('k2', 'mse'), ('k3', 'low_var_kl'), ('k3+', 'k3+')])
def test_kl_gradients_match_golden_values(name, case):
  value, gradient = jax.value_and_grad(lambda x: jnp.sum(policy_gradient.KL[name](x, REF) * WEIGHTS['token-mean']))(
    jnp.asarray(NEW)
  )
  close(value, CASES[f'verl/kl_loss_grad/{case}']['loss'])
  close(gradient, CASES[f'verl/kl_loss_grad/{case}']['grad'])


def test_straight_through_k1_has_the_gradient_of_k2():
  fn = policy_gradient.KL['k1+']
  close(fn(NEW, REF), NEW - REF)
  close(jax.grad(lambda x: fn(x, REF).sum())(jnp.asarray(NEW)), NEW - REF)


def test_clip_loss_with_k3_penalty_matches_trl():
  """TRL's dapo loss with beta 0.04: surrogate plus KL, averaged over tokens."""

  def loss(new):
    values, _ = policy_gradient.clip(new, OLD, GAINS, SurrogateOptions(0.2, 0.2))
    values += 0.04 * policy_gradient.kl_k3(new, REF)
    return jnp.sum(values * WEIGHTS['token-mean'])

  golden = CASES['trl/grpo_dapo_beta0.04_k3']
  value, gradient = jax.value_and_grad(loss)(jnp.asarray(NEW))
  close(value, golden['loss'])
  close(gradient, golden['grad'])
  close(np.sum(policy_gradient.kl_k3(NEW, REF) * WEIGHTS['token-mean']), golden['metrics']['kl'])


@pytest.mark.parametrize('case, cap', [('verl/ppo_tis_cap2', 2.0), ('trl/grpo_dapo_tis_cap3', 3.0)])
def test_clip_loss_with_importance_correction_matches_golden(case, cap):
  weights = importance.correction(
    ('token_truncated',), OLD - INPUTS['roll'], MASK, importance.CorrectionOptions(importance_cap=cap)
  )
  value, gradient, *_ = run('clip', WEIGHTS['token-mean'], SurrogateOptions(), scale=weights)
  close(value, CASES[case]['loss'])
  close(gradient, CASES[case]['grad'])


@pytest.mark.parametrize('name, bound', [('dppo_tv', 0.15), ('dppo_kl', 0.05)])
def test_dppo_drops_tokens_that_moved_too_far_along_their_advantage(name, bound):
  """Probabilities that rose, fell, rose a little, and rose from a tiny value by a large ratio."""
  old = np.log([[0.3, 0.7, 0.3, 1e-4]])
  new = np.log([[0.7, 0.3, 0.35, 2e-3]])
  options = SurrogateOptions(clip_low=bound, clip_high=bound)

  def has_gradient(gain):
    def loss(x):
      return policy_gradient.LOSSES[name].fn(x, old, np.full((1, 4), gain), options)[0].sum()

    return (np.asarray(jax.grad(loss)(jnp.asarray(new)))[0] != 0).tolist()

  assert has_gradient(1.0) == [False, True, True, True]  # PPO's clip would leave out the last one, too
  assert has_gradient(-1.0) == [True, False, True, True]
  far = policy_gradient.LOSSES[name].fn(np.log([[0.9]]), np.log([[1e-3]]), -np.ones((1, 1)), options)[0]
  close(far, [[20 * np.log(0.9)]])  # the weight is at most 20


def test_off_policy_sequence_mask_matches_trl():
  """The mask compares the sampler with the policy being trained."""
  kept_mask = policy_gradient.off_policy_kept(
    NEW, OLD, GAINS, 0.02, lambda x: np.sum(x * MASK, 1, keepdims=True) / MASK.sum(1, keepdims=True) + 0 * x
  )
  assert 0 < np.sum(kept_mask * MASK) < MASK.sum()
  value, gradient, *_ = run('clip', WEIGHTS['token-mean'], SurrogateOptions(), scale=kept_mask)
  close(value, CASES['trl/grpo_dapo_opsm0.02']['loss'])
  close(gradient, CASES['trl/grpo_dapo_opsm0.02']['grad'])


def test_dual_clip_matches_verl_and_drops_the_gradient():
  new = INPUTS['new_bigratio']
  loss, golden = CASES['verl/ppo_dual3_triggered']
  value, gradient, metrics, _ = run('clip', WEIGHTS['token-mean'], SurrogateOptions(dual_clip=3.0), new=new)
  close(value, loss)
  dual_clipped = metrics['clip_ratio/dual_mean']
  close(np.sum(dual_clipped * WEIGHTS['token-mean']), golden['actor/pg_clipfrac_lower'])
  assert not np.asarray(gradient)[dual_clipped == 1].any()
  assert 'clip_ratio/dual_mean' not in run('clip', MASK, SurrogateOptions())[2]
  with pytest.raises(ValueError, match='dual_clip 0.5'):
    run('clip', MASK, SurrogateOptions(dual_clip=0.5))


def test_clip_is_reported_where_it_removes_the_gradient():
  new = jnp.log(jnp.array([[0.5, 0.5, 1.5, 1.5]]))
  gains = jnp.array([[1.0, -1.0, 1.0, -1.0]])

  def clip(x):
    return policy_gradient.clip(x, jnp.zeros((1, 4)), gains, SurrogateOptions(0.2, 0.2))

  _, metrics = clip(new)
  np.testing.assert_array_equal(metrics['clip_ratio/low_mean'], [[0, 1, 0, 0]])
  np.testing.assert_array_equal(metrics['clip_ratio/high_mean'], [[0, 0, 1, 0]])
  gradient = jax.grad(lambda x: clip(x)[0].sum())(new)
  np.testing.assert_array_equal(gradient[0] != 0, [1, 0, 0, 1])


@pytest.mark.parametrize('name', policy_gradient.LOSSES)
def test_ratio_1_gives_the_plain_policy_gradient(name):
  """At the first step: ratio exactly 1, nothing clipped, gradient -A, KL 0."""
  _, gradient, metrics, per_token = run(name, MASK, SurrogateOptions(dual_clip=3.0), new=OLD)
  np.testing.assert_array_equal(metrics.pop('ratio'), np.ones_like(OLD))
  close(metrics.pop('vespo/phi', 1), 1)
  for clipped in metrics.values():
    assert not clipped.any()
  close(gradient, -GAINS * MASK)
  value = {
    'cispo': OLD,
    'reinforce': OLD,
    'vespo': OLD,
    'dro': OLD,
    'dppo_tv': OLD,
    'dppo_kl': OLD,
    'sapo': np.where(GAINS > 0, 2, 2 / 1.05),
  }.get(name, 1)
  close(per_token, -GAINS * value)
  for estimator in policy_gradient.KL.values():
    assert not np.any(estimator(OLD, OLD))


@pytest.mark.parametrize('size', [1e4, -1e4])
@pytest.mark.parametrize('name', policy_gradient.LOSSES)
def test_extreme_ratios_stay_finite(name, size):
  for gains in (GAINS, -GAINS):
    value, gradient, metrics, per_token = run(name, MASK, SurrogateOptions(), new=OLD + size, gains=gains)
    for x in (value, gradient, per_token, *metrics.values()):
      assert np.isfinite(x).all()


@pytest.mark.parametrize('size', [1e4, -1e4])
@pytest.mark.parametrize('name', policy_gradient.KL)
def test_extreme_kl_stays_finite(name, size):
  value, gradient = jax.value_and_grad(lambda x: policy_gradient.KL[name](x, REF).sum())(jnp.asarray(REF + size))
  assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize('name', policy_gradient.LOSSES)
def test_arrays_that_would_broadcast_are_refused(name):
  with pytest.raises(ValueError, match=r'\(8, 6\).*\(8, 1\)'):
    run(name, MASK, SurrogateOptions(), gains=GAINS[:, :1])


# ------------------------------------------------------------------- values


def test_clipped_value_loss():
  """By hand: clipped up, clipped down, inside the range, and clipped where that does not raise the loss."""
  values = jnp.array([[2.0, -2.0, 0.1, 2.0]])
  returns = np.array([[0.0, 0.0, 1.0, 3.0]])
  loss, clipped = values_lib.clipped_value_loss(values, np.zeros((1, 4)), returns, 0.5)
  close(loss, [[2.0, 2.0, 0.405, 3.125]])
  np.testing.assert_array_equal(clipped, [[0, 0, 0, 1]])
  gradient = jax.grad(lambda v: values_lib.clipped_value_loss(v, np.zeros((1, 4)), returns, 0.5)[0].sum())(values)
  close(gradient, [[2.0, -2.0, -0.9, 0.0]])
  loss, clipped = values_lib.clipped_value_loss(values, np.zeros((1, 4)), returns)
  close(loss, [[2.0, 2.0, 0.405, 0.5]])
  assert not clipped.any()


def test_explained_variance():
  returns = np.array([[1.0, 2.0, 4.0, np.nan]])
  mask = np.array([[1, 1, 1, 0]])

  def explained(v):
    return values_lib.explained_variance(v, returns, mask)

  assert explained(returns) == 1
  close(explained(np.full((1, 4), 7.0)), 0)
  close(explained(np.array([[1.0, 2.0, 3.0, 0.0]])), 1 - (2 / 9) / (14 / 9))
  assert np.isnan(values_lib.explained_variance(returns, np.ones((1, 4)), np.ones((1, 4))))


def test_bradley_terry_loss_matches_golden():
  chosen, rejected = jnp.asarray(INPUTS['rm_chosen']), INPUTS['rm_rejected']
  golden = CASES['trlformula/rm_bt_center0.01']

  def loss(**kw):
    return values_lib.bradley_terry(chosen, rejected, **kw)

  close(loss().mean(), golden['bt'])
  close(loss(center_coef=0.01).mean(), golden['bt_center'])
  margin = np.array([1.0, 0.0, 0.5, 0.0], np.float32)
  close(loss(margin=margin), np.logaddexp(0, rejected + margin - chosen))
  with pytest.raises(ValueError, match='margin'):
    loss(margin=margin[:, None])


def test_process_reward_and_squared_error_losses():
  logits, labels = np.array([[2.0, -1.0, 1e4]]), np.array([[1.0, 0.25, 0.0]])
  p = 1 / (1 + np.exp(-logits[:, :2]))
  y = labels[:, :2]
  loss = values_lib.process_reward_loss(logits, labels)
  close(loss[:, :2], -y * np.log(p) - (1 - y) * np.log(1 - p))
  close(loss[:, 2], 1e4)
  close(values_lib.squared_error(logits, labels), (logits - labels) ** 2)
