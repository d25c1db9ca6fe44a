"""Preference losses (DPO family, KTO, WPO) and distillation divergences, against figures of TRL and by hand.

tests/golden/losses.json says where its figures come from; test_losses.py lists the files with its other cases.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_losses import CASES, INPUTS, close

from jaxpost.errors import InputError
from jaxpost.losses import divergences, preferences
from jaxpost.losses import pairs as pairs_lib
from jaxpost.losses.pairs import Pairs, PreferenceOptions

LENGTHS = INPUTS['pair_completion_mask'].sum(1)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def nll(x):
  return np.logaddexp(0, -x)  # -log sigmoid(x)


SMOOTH = PreferenceOptions(label_smoothing=0.1)


def summed_logprobs(logits):
  """Log-probabilities [4] of the golden completions; rows 0 and 1 are chosen, rows 2 and 3 rejected."""
  ids = INPUTS['pair_ids'].astype(int)[:, 1:, None]
  logprobs = jax.nn.log_softmax(logits)[:, :-1]
  logprobs = jnp.take_along_axis(logprobs, ids, axis=2)[..., 0]
  return jnp.sum(logprobs * INPUTS['pair_completion_mask'][:, 1:], axis=1)


def golden_pairs(logits):
  policy = summed_logprobs(logits)
  ref = summed_logprobs(INPUTS['pair_ref_logits'])
  return Pairs(
    policy[:2],
    policy[2:],
    ref[:2],
    ref[2:],
    LENGTHS[:2],
    rejected_length=LENGTHS[2:],
    valid=np.ones(2, bool),
    nll_scale=2 / LENGTHS[:2].sum(),
  )


def random_pairs(seed=0, n=6, scale=5.0):
  draw = np.random.default_rng(seed)
  logprobs = -np.abs(draw.normal(size=(4, n)) * scale) - 1
  lengths = draw.integers(2, 9, (2, n))
  return Pairs(*(x.astype(np.float32) for x in (*logprobs, *lengths)), np.ones(n, bool), 0.2)


@pytest.mark.parametrize(
  'case, names, weights, options',
  [
    ('dpo_hinge_beta0.1', ['hinge'], [1], {}),
    ('dpo_exo_pair_beta0.1_ls0.001', ['exo_pair'], [1], dict(label_smoothing=0.001)),
    ('dpo_robust_beta0.1_ls0.1', ['robust'], [1], dict(label_smoothing=0.1)),
    ('dpo_bco_pair_beta0.1', ['bco_pair'], [1], {}),
    ('dpo_sppo_hard_beta0.1', ['sppo_hard'], [1], {}),
    ('dpo_aot_beta0.1', ['aot'], [1], {}),
    ('dpo_aot_unpaired_beta0.1', ['aot_unpaired'], [1], {}),
    ('dpo_apo_down_beta0.1', ['apo_down'], [1], {}),
    ('dpo_discopop_beta0.1', ['discopop'], [1], {}),
    ('dpo_sigmoid_norm_beta0.1', ['sigmoid_norm'], [1], {}),
    *[
      (f'dpo_sigmoid_fdiv_{name}', ['sigmoid'], [1], dict(f_divergence=name))
      for name in ('forward_kl', 'js_divergence', 'alpha_divergence')
    ],
    ('dpo_mpo_[sigmoid,bco_pair,sft]_[.8,.2,1.]', ['sigmoid', 'bco_pair', 'sft'], [0.8, 0.2, 1.0], {}),
  ],
  ids=lambda x: x if isinstance(x, str) else '',
)
def test_pair_losses_match_golden_loss_gradient_and_metrics(case, names, weights, options):
  """Compares the loss, the norm of its gradient by the logits, and the metrics."""
  options = PreferenceOptions(**options)

  def loss(logits):
    pairs = golden_pairs(logits)
    return preferences.weighted(names, weights, pairs, options).mean(), pairs

  (value, pairs), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(INPUTS['pair_logits']))
  golden = CASES[f'trl/{case}']
  close(value, golden['loss'])
  close(jnp.sqrt(jnp.sum(gradient**2)), golden['grad_norm'])
  metrics = pairs_lib.pair_metrics(pairs, options)
  assert set(metrics) <= set(golden['metrics'])
  for name, x in metrics.items():
    close(x.mean(), golden['metrics'][name])


@pytest.mark.parametrize(
  'case, name, alpha',
  [
    ('cpo_simpo_alpha0.0_beta2.0_gamma0.5', 'simpo', 0.0),
    ('cpo_simpo_alpha0.25_beta2.0_gamma0.5', 'simpo', 0.25),
    ('cpo_sigmoid_alpha0.0_beta2.0_gamma0.5', 'cpo', 0.0),
    ('cpo_hinge_alpha0.0_beta2.0_gamma0.5', 'cpo_hinge', 0.0),
  ],
)
def test_reference_free_losses_match_trl(case, name, alpha):
  chosen, rejected = INPUTS['avg_chosen'], INPUTS['avg_rejected']
  n = 7.0 if name == 'simpo' else 1.0  # only simpo averages over tokens
  pairs = Pairs(
    n * chosen,
    n * rejected,
    chosen + 1,
    rejected - 1,
    np.full(4, n),
    rejected_length=np.full(4, n),
    valid=np.ones(4, bool),
  )
  options = PreferenceOptions(beta=2.0, gamma=0.5, simpo_alpha=alpha)
  close(preferences.LOSSES[name].fn(pairs, options), CASES[f'trl/{case}'])


def by_hand(name, pairs, options):
  """Returns the losses for which there are no golden figures, computed from the papers in numpy."""
  c, r, b = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected, options.beta
  mean_c, mean_r = pairs.chosen / pairs.chosen_length, pairs.rejected / pairs.rejected_length

  def odds(x):
    return np.log(np.exp(x) / (1 - np.exp(x)))

  return {
    'sigmoid': lambda: nll(b * (c - r)),
    'ipo': lambda: (c / pairs.chosen_length - r / pairs.rejected_length - 5) ** 2,
    'nca_pair': lambda: nll(b * c) + (nll(-b * c) + nll(-b * r)) / 2,
    'apo_zero': lambda: 1 - sigmoid(b * c) + sigmoid(b * r),
    'orpo': lambda: b * nll(odds(mean_c) - odds(mean_r)),
    'cpo': lambda: nll(b * (pairs.chosen - pairs.rejected)),
    'simpo': lambda: nll(b * (mean_c - mean_r) - 0.5),
  }[name]()


@pytest.mark.parametrize('name', ['sigmoid', 'ipo', 'nca_pair', 'apo_zero', 'orpo', 'cpo', 'simpo'])
def test_pair_losses_by_hand(name):
  pairs, options = random_pairs(), PreferenceOptions()
  close(preferences.LOSSES[name].fn(pairs, options), by_hand(name, pairs, options))


def test_preference_options_by_hand_and_bad_ones_are_refused():
  pairs = random_pairs()
  margin = (pairs.chosen - pairs.ref_chosen) - (pairs.rejected - pairs.ref_rejected)
  close(preferences.ipo(pairs, PreferenceOptions(ipo_average=False)), (margin - 5) ** 2)
  close(preferences.sigmoid(pairs, SMOOTH), 0.9 * nll(0.1 * margin) + 0.1 * nll(-0.1 * margin))
  alpha = PreferenceOptions(f_divergence='alpha_divergence', f_alpha=1.0)
  close(preferences.sigmoid(pairs, alpha), nll(0.1 * margin))
  for bad_options in (dict(beta=0.0), dict(label_smoothing=0.5), dict(f_divergence='js')):
    with pytest.raises(InputError):
      PreferenceOptions(**bad_options)
  with pytest.raises(InputError, match='label_smoothing is 0'):
    preferences.exo_pair(pairs, PreferenceOptions())
  with pytest.raises(InputError, match=r"\['apo_zero'\] do not support"):
    preferences.weighted(['ipo', 'apo_zero'], [1, 1], pairs, alpha)
  with pytest.raises(InputError, match='one weight for each'):
    preferences.weighted(['ipo'], [], pairs, PreferenceOptions())
  with pytest.raises(ValueError, match=r'\(6,\).*\(1,\)'):
    preferences.weighted(['ipo'], [1], pairs._replace(ref_chosen=np.zeros(1)), PreferenceOptions())


@pytest.mark.parametrize(
  'name, score',
  [
    ('forward_kl', lambda x: 1 - np.exp(-x)),
    ('js_divergence', lambda x: np.log(2) - nll(x)),
    ('alpha_divergence', lambda x: 2 - 2 * np.exp(-x / 2)),
  ],
)
def test_f_divergences_of_length_averaged_losses(name, score):
  """Lengths differ, so that a constant in the derivative of the divergence would show."""
  pairs = random_pairs(scale=1.0)
  c = score(pairs.chosen - pairs.ref_chosen) / pairs.chosen_length
  r = score(pairs.rejected - pairs.ref_rejected) / pairs.rejected_length
  options = PreferenceOptions(f_divergence=name)
  close(preferences.sigmoid_norm(pairs, options), nll(0.1 * (c - r)))
  close(preferences.ipo(pairs, options), (c - r - 5) ** 2)


def test_policy_equal_to_reference_has_known_losses_and_no_rewards():
  """As at step 0: the loss of DPO is ln 2, all rewards are 0, and no pair is ranked."""
  pairs = random_pairs()
  pairs = pairs._replace(ref_chosen=pairs.chosen, ref_rejected=pairs.rejected)
  for name, value in {
    'sigmoid': np.log(2),
    'sigmoid_norm': np.log(2),
    'aot': np.log(2),
    'hinge': 1,
    'apo_zero': 1,
    'bco_pair': 2 * np.log(2),
    'ipo': 25,
  }.items():
    loss = preferences.LOSSES[name].fn(pairs, PreferenceOptions())
    close(loss, np.full(6, value))
  for f in pairs_lib.F_DIVERGENCES:
    close(preferences.sigmoid(pairs, PreferenceOptions(f_divergence=f)), np.full(6, np.log(2)))
  for name, x in pairs_lib.pair_metrics(pairs, PreferenceOptions()).items():
    assert 'rewards/' not in name or not x.any()


@pytest.mark.parametrize('name', preferences.LOSSES)
def test_padded_pairs_have_no_loss_gradient_or_influence(name):
  """Arrays are [B, P], with places for pairs that are not valid and hold NaN, infinity or another number."""
  dense, draw = random_pairs(n=4), np.random.default_rng(1)
  places = np.array([1, 2, 4, 7])
  valid = np.zeros(8, bool)
  valid[places] = True

  def widen(x):
    wide = np.array(draw.choice([np.nan, np.inf, 3.0], 8), np.float32)
    wide[places] = x
    return wide.reshape(2, 4)

  pairs = Pairs(*(widen(x) for x in dense))._replace(valid=valid.reshape(2, 4), nll_scale=0.2)

  def loss(arrays, pairs):
    pairs = pairs._replace(chosen=arrays[0], rejected=arrays[1])
    losses = preferences.weighted([name], [2.0], pairs, SMOOTH)
    return losses.sum(), losses

  grad = jax.grad(loss, has_aux=True)
  gradient, losses = grad((pairs.chosen, pairs.rejected), pairs)
  alone, expected = grad((dense.chosen, dense.rejected), dense)
  assert losses.shape == (2, 4) and not losses.ravel()[~valid].any()
  close(losses.ravel()[valid], expected)
  for ours, theirs in zip(gradient, alone):
    assert not ours.ravel()[~valid].any()
    close(ours.ravel()[valid], theirs)
  metrics = pairs_lib.pair_metrics(pairs, SMOOTH)
  assert all(not x.ravel()[~valid].any() for x in metrics.values())


@pytest.mark.parametrize('name', preferences.LOSSES)
def test_losses_follow_a_permutation_of_pairs(name):
  """Each loss moves along with its pair; losses of optimal transport (aot) sort, so they stay in place."""
  pairs, order = random_pairs(), np.array([3, 0, 5, 1, 4, 2])
  permuted = pairs._replace(**{k: x[order] for k, x in pairs._asdict().items() if k != 'nll_scale'})
  ours = preferences.LOSSES[name].fn(permuted, SMOOTH)
  expected = preferences.LOSSES[name].fn(pairs, SMOOTH)
  close(ours, expected if name.startswith('aot') else expected[order])


@pytest.mark.parametrize(
  'name, f_divergence',
  [
    *((name, 'reverse_kl') for name in preferences.LOSSES),
    *((name, f) for name in preferences.readers('f_divergence') for f in pairs_lib.F_DIVERGENCES if f != 'reverse_kl'),
  ],
)
def test_extreme_pairs_stay_finite(name, f_divergence):
  """Log-ratios of +-1e4, and log-probabilities of 0 and -1e4."""
  extremes = np.array([0, -1e4, 0, -1e4, 0, 0, -1e4, -1e4], np.float32)
  pairs = Pairs(
    extremes,
    extremes[::-1],
    extremes[[1, 0, 2, 3, 4, 5, 6, 7]],
    0 * extremes,
    np.ones(8),
    rejected_length=np.ones(8),
    valid=np.ones(8, bool),
  )
  options = PreferenceOptions(label_smoothing=0.1, f_divergence=f_divergence, simpo_alpha=0.25)

  def loss(chosen, rejected):
    losses = preferences.LOSSES[name].fn(pairs._replace(chosen=chosen, rejected=rejected), options)
    return losses.sum(), losses

  gradient, losses = jax.grad(loss, argnums=(0, 1), has_aux=True)(pairs.chosen, pairs.rejected)
  assert np.isfinite(losses).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize('case, shifted', [('kto_beta0.1', True), ('kto_apo_zero_unpaired', False)])
def test_kto_matches_trl(case, shifted):
  """Rows 0 and 2 are desirable; z is the mean KL of the golden case, or 0."""
  golden = CASES[f'trl/{case}']
  log_ratio = summed_logprobs(INPUTS['pair_logits']) - summed_logprobs(INPUTS['pair_ref_logits'])
  label = np.array([True, False, True, False])
  kl_terms = np.subtract(golden['KL_policy'], golden['KL_ref'])
  z = max(0.0, kl_terms.mean()) if shifted else 0.0
  close(preferences.kto(log_ratio, label, z).mean(), golden['loss'])
  weighted = preferences.kto(log_ratio, label, z, desirable_weight=2.0, undesirable_weight=0.5)
  close(weighted, preferences.kto(log_ratio, label, z) * np.where(label, 2, 0.5))


def test_kto_has_no_gradient_through_z():
  label = np.array([True, False])
  gradient = jax.jacobian(lambda z: preferences.kto(np.ones(2), label, z))(0.5)
  assert not gradient.any()
  for size in (1e4, -1e4):
    x = jnp.full(2, size)
    assert np.isfinite(jax.grad(lambda x: preferences.kto(x, label, 0.0).sum())(x)).all()


# ------------------------------------------------------------- distillation

STUDENT, TEACHER = (jnp.asarray(INPUTS[k]) for k in ('student_logits', 'teacher_logits'))


@pytest.mark.parametrize('temperature', [1.0, 0.9])
@pytest.mark.parametrize('beta', [0.1, 0.5, 0.9, 1.0])
def test_generalized_jsd_matches_trl(beta, temperature):
  labelled = INPUTS['kd_labels'] != -100
  ours = divergences.generalized_jsd(STUDENT, TEACHER, beta, temperature)
  close(ours[labelled].mean(), CASES[f'trl/gkd_jsd/beta{beta}_T{temperature}'])


def test_jsd_with_beta_0_and_1_is_forward_and_reverse_kl():
  s, t = (np.asarray(jax.nn.log_softmax(x)) for x in (STUDENT, TEACHER))

  def kl(p, q):
    return (np.exp(p) * (p - q)).sum(-1)

  jsd = divergences.generalized_jsd
  close(jsd(STUDENT, TEACHER, 0.0), kl(t, s))
  close(jsd(STUDENT, TEACHER, 1.0), kl(s, t))
  close(jsd(STUDENT, TEACHER, 0.0, 2.0), jsd(STUDENT / 2, TEACHER / 2, 0.0))
  with pytest.raises(ValueError, match='beta 1.5'):
    divergences.generalized_jsd(STUDENT, TEACHER, 1.5)
  with pytest.raises(ValueError, match=r'\(2, 5, 11\), \(2, 1, 11\)'):
    jsd(STUDENT, TEACHER[:, :1], 0.0)


@pytest.mark.parametrize('hidden', [-1e30, -np.inf])
@pytest.mark.parametrize('beta', [0.0, 0.3, 1.0])
def test_padded_vocabulary_changes_no_divergence_or_gradient(beta, hidden):
  """The gradient of padded tokens is 0; so are all gradients of a student equal to its teacher."""

  def pad(x):
    return jnp.pad(x, ((0, 0), (0, 0), (0, 3)), constant_values=hidden)

  def loss(s, t):
    return divergences.generalized_jsd(s, t, beta).sum()

  value, gradient = jax.value_and_grad(loss)(pad(STUDENT), pad(TEACHER))
  expected, theirs = jax.value_and_grad(loss)(STUDENT, TEACHER)
  close(value, expected)
  close(gradient[..., :11], theirs)
  assert not gradient[..., 11:].any()
  value, gradient = jax.value_and_grad(loss)(pad(STUDENT), pad(STUDENT))
  close(value, 0)
  np.testing.assert_allclose(gradient, 0, atol=1e-6)


def top(k, temperature=1.0):
  logprobs, ids = jax.lax.top_k(jax.nn.log_softmax(TEACHER / temperature), k)
  return ids, logprobs


@pytest.mark.parametrize('beta', [0.0, 0.5, 1.0])
def test_topk_jsd_of_all_tokens_equals_the_full_divergence(beta):
  def full(s):
    return divergences.generalized_jsd(s, TEACHER, beta, 0.9).sum()

  def topk(s):
    return divergences.topk_jsd(s, *top(11, 0.9), beta, 0.9).sum()

  value, gradient = jax.value_and_grad(topk)(STUDENT)
  expected, theirs = jax.value_and_grad(full)(STUDENT)
  close(value, expected)
  close(gradient, theirs)


def test_topk_jsd_by_hand():
  student = np.log([0.5, 0.2, 0.2, 0.1])[None]
  ids, logprobs = np.array([[2, 0]]), np.log([[0.6, 0.2]])

  def kl(p, q):
    return np.sum(p * np.log(np.divide(p, q)))

  def run(beta):
    return divergences.topk_jsd(jnp.asarray(student), ids, jnp.asarray(logprobs), beta)[0]

  s, t = [0.2, 0.5, 0.3], [0.6, 0.2, 0.2]
  close(run(0.0), kl(t, s))
  close(run(1.0), kl(s, t))
  m = np.add(s, t) / 2
  close(run(0.5), (kl(t, m) + kl(s, m)) / 2)


def test_topk_tail_without_student_tokens_is_bounded():
  """A thousandth of the teacher's mass lies outside of the top k, which hold all tokens of the student."""
  ids, logprobs = top(11)

  def loss(s):
    return divergences.topk_jsd(s, ids, logprobs - 1e-3, 0.0).sum()

  value, gradient = jax.value_and_grad(loss)(STUDENT)
  full = divergences.generalized_jsd(STUDENT, TEACHER, 0.0).sum()
  assert full < value < full + 10 * 1e-3 * 100
  assert np.abs(gradient).max() < 1


@pytest.mark.parametrize('beta', [0.0, 0.5, 1.0])
def test_extreme_logits_stay_finite(beta):
  """The student is sure of another token, and padding (-1e30) is both outside and inside the top k."""
  student = STUDENT.at[..., 0].set(1e4).at[..., -1].set(-1e30)
  ids, logprobs = top(4)

  def topk(s):
    return divergences.topk_jsd(s, ids, logprobs, beta, 1.0)

  def full(s):
    return divergences.generalized_jsd(s, TEACHER.at[..., -1].set(-1e30), beta)

  for loss in (topk, full):
    losses, pull = jax.vjp(loss, student)
    (gradient,) = pull(jnp.ones_like(losses))
    assert np.isfinite(losses).all() and np.isfinite(gradient).all()


def test_wpo_weights_by_hand():
  """The product over both answers of exp(mean of log p - log sum p^2), at most 1 and without gradient."""
  ids = np.array([[1, 1, 0, 2, 2, 3, 4, 4]])
  mask = np.array([[1, 1, 0, 1, 0, 1, 1, 1]])
  adjusted = np.array([[-0.5, -1.5, 9.0, 0.4, 9.0, 0.7, 0.1, 0.3]], np.float32)
  weights = pairs_lib.wpo_weights(jnp.asarray(adjusted), mask, ids)[0, :2]
  close(weights, [np.exp(-1.0 + 0.4), 1.0])  # the second would be exp(0.7 + 0.2)
  gradient = jax.grad(lambda x: pairs_lib.wpo_weights(x, mask, ids).sum())(jnp.asarray(adjusted))
  assert not gradient.any()
