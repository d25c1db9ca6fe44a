"""Preference objectives (DPO, KTO, ORPO, CPO, SimPO): values of TRL, invariance to layout, refused configs.

Legend: M micro-batches, B rows, T tokens.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from golden_losses import CASES, INPUTS, close

from jaxpost.algorithms import kto, online_dpo, preference
from jaxpost.data import generated, packing, sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.programs import score, train
from jaxpost.programs.compile import Ledger
from jaxpost.roles import Frozen, Policy, Roles
from jaxpost.stage import algorithms
from jaxpost.stage import config as config_lib
from jaxpost.types import Batch, Outputs, TrainState

METHODS = ('dpo', 'ld_dpo', 'wpo', 'orpo', 'cpo', 'simpo', 'kto')


def settings(algorithm, **fields):
  """Returns (Algorithm, Config) of a method, with `fields` as its `config.preference`, after its checks."""
  (config,) = config_lib.parse(
    tiny.merged(config_lib.defaults(), dict(algorithm=algorithm, preference=fields, model=dict(dtype='float32')))
  ).values()
  method = algorithms.load_algorithm(algorithm)
  config = config_lib.resolve(config, method.defaults)
  method.check(config)
  return method, config


# ----------------------------------------------------------- values of TRL


def side_by_side(x):
  """[4, 7, ...] of INPUTS -> [2, 14, ...]: each row has the chosen answer, then the rejected one."""
  return jnp.concatenate([x[:2], x[2:]], axis=1)


def golden_outputs(logits):
  """[4, 7, V] logits -> [4, 7] log-probs of each token given those before it."""
  ids = INPUTS['pair_ids'].astype(int)[:, 1:, None]
  logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], ids, axis=2)[..., 0]
  return jnp.pad(logprobs, ((0, 0), (1, 0)))


def golden_batch():
  mask = side_by_side(INPUTS['pair_completion_mask'])
  number = np.repeat([1, 2], 7)
  chosen = mask * (number == 1)
  ref = side_by_side(golden_outputs(INPUTS['pair_ref_logits']))
  return Batch(
    None,
    None,
    None,
    mask / 2,
    sequence_ids=(mask * number).astype(int),
    arrays={'ref_logprobs': ref, 'nll_weights': chosen / chosen.sum()},
  )


@pytest.mark.parametrize(
  'case, fields',
  [
    ('dpo_hinge_beta0.1', dict(losses=('hinge',))),
    ('dpo_exo_pair_beta0.1_ls0.001', dict(losses=('exo_pair',), label_smoothing=0.001)),
    ('dpo_robust_beta0.1_ls0.1', dict(losses=('robust',), label_smoothing=0.1)),
    *[
      (f'dpo_{name}_beta0.1', dict(losses=(name,)))
      for name in ('bco_pair', 'sppo_hard', 'aot', 'aot_unpaired', 'apo_down', 'discopop', 'sigmoid_norm')
    ],
    *[
      (f'dpo_sigmoid_fdiv_{name}', dict(f_divergence=name))
      for name in ('forward_kl', 'js_divergence', 'alpha_divergence')
    ],
    ('dpo_sigmoid_ld_alpha0.5', dict(ld_alpha=0.5)),
    ('dpo_sigmoid_wpo', dict(weighting='wpo')),
    (
      'dpo_mpo_[sigmoid,bco_pair,sft]_[.8,.2,1.]',
      dict(losses=('sigmoid', 'bco_pair', 'sft'), loss_weights=(0.8, 0.2, 1.0)),
    ),
    (
      'dpo_mpo_[sigmoid,bco_pair,sft]_[.8,.2,1.]',
      dict(losses=('sigmoid', 'bco_pair'), loss_weights=(0.8, 0.2), nll_coef=1.0),
    ),
  ],
)
def test_dpo_losses_match_trl(case, fields):
  algorithm, config = settings('dpo', **fields)
  batch, golden = golden_batch(), CASES[f'trl/{case}']

  def loss(logits):
    logprobs = side_by_side(golden_outputs(logits))
    squares = jnp.pad(jax.nn.logsumexp(2 * jax.nn.log_softmax(logits), axis=-1)[:, :-1], ((0, 0), (1, 0)))
    outputs = Outputs(logprobs, jnp.ones_like(logprobs), collision=side_by_side(squares))
    return algorithm.objective(config).fn(outputs, batch)

  (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(INPUTS['pair_logits']))
  close(value, golden['loss'])
  close(jnp.sqrt(jnp.sum(gradient**2)), golden['grad_norm'])
  for name, expected in golden['metrics'].items():
    close(metrics[name], expected)
  close(metrics['entropy'], 1.0)


@pytest.mark.parametrize('case', ['kto_beta0.1', 'kto_apo_zero_unpaired'])
def test_kto_losses_match_trl(case):
  golden = CASES[f'trl/{case}']
  algorithm, config = settings(
    'kto', losses=(case.removesuffix('_beta0.1').removeprefix('kto_') if 'apo' in case else 'kto',)
  )
  # Rows 0 and 2 are desirable. In column 8, a second sequence holds the log-probs of the mismatched pairs.
  mask = np.pad(INPUTS['pair_completion_mask'], ((0, 0), (0, 2)))
  ids = mask.astype(int)
  ids[:, 8] = 2
  label = np.array([[1], [-1], [1], [-1]]) * mask
  logprobs = np.pad(golden_outputs(INPUTS['pair_logits']), ((0, 0), (0, 2)))
  ref = np.pad(golden_outputs(INPUTS['pair_ref_logits']), ((0, 0), (0, 2)))
  logprobs[:, 8], ref[:, 8] = golden['KL_policy'], golden['KL_ref']
  z = kto.mismatch((logprobs - ref)[None], (ids == 2)[None] * 1.0, ids[None])
  close(z, max(0, np.subtract(golden['KL_policy'], golden['KL_ref']).mean()))
  batch = Batch(
    None,
    None,
    None,
    mask / 4,
    sequence_ids=ids,
    arrays={'ref_logprobs': ref, 'label': label, 'label_weights': mask / 2, 'kl': np.full_like(mask, z)},
  )
  loss, metrics = algorithm.objective(config).fn(Outputs(jnp.asarray(logprobs), jnp.ones_like(mask)), batch)
  close(loss, golden['loss'])
  for name, expected in golden['metrics'].items():
    close(metrics[name], expected)


# ------------------------------------------------- invariance to the layout


@pytest.fixture(scope='module')
def models():
  """(model, parameters of the policy, parameters of the reference)."""
  model = model_lib.build(tiny.config(vocab_size=259, num_layers=1))
  return model, tiny.params(model), tiny.params(model, seed=1)


@functools.cache
def examples(algorithm, share_prompt=True, number=6):
  method, config = settings(algorithm, share_prompt=share_prompt)
  kind = 'labels' if algorithm == 'kto' else 'pairs'
  rows = sources.read(f'generated:arithmetic_{kind}:size={number},seed=3')
  render = method.render(rows, tokenizer_lib.load('bytes'), config)
  return [render(n) for n in range(number)]


def packed(algorithm, share_prompt=True, row_length=80, rows=6, order=1):
  """Returns the Batch of the examples of a method, packed in rows."""
  documents = examples(algorithm, share_prompt)[::order]
  row_indices = packing.pack([len(e.tokens) for e in documents], row_length)
  method, _ = settings(algorithm)
  return packing.to_batch([[documents[i] for i in row] for row in row_indices], row_length, rows, per=method.per)


def computed(models, algorithm, batch, micro_batches=1, layout=None, **fields):
  """Returns (loss, metrics, gradients) of a batch as an update computes them."""
  model, params, ref_params = models
  if algorithm == 'kto' and ref_params is not params:
    params, ref_params = ref_params, params  # exchanged, the KL term z is above 0
  method, config = settings(algorithm, **fields)
  layout, ledger = layout or tiny.one_device(), Ledger()
  params, ref_params = (jax.device_put(x, model.shardings(layout)) for x in (params, ref_params))
  read = score.make_score(model, layout, tiny.EXACT, ledger)
  state = TrainState(jnp.zeros((), int), params, None)
  policy = Policy(
    model, state, layout, len(batch.tokens) // micro_batches, update_program=None, make_score=lambda: read
  )
  reference = Frozen(ref_params, read, layout, model)
  placed = method.prepare(policy.place(batch), Roles(policy, reference=reference), config)
  loss = train.make_loss(model, method.objective(config), layout, tiny.EXACT)
  (value, metrics), grads = jax.jit(
    lambda params, batch: train.accumulate(lambda params, micro: loss(params, micro, 0, {}), params, batch)
  )(params, placed)
  return value, metrics, grads


def assert_same(a, b, tolerance=1e-5):
  """Compares two results of `computed`."""
  for one, two in zip(a[:2], b[:2]):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), one, two)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance * tiny.largest(y)), a[2], b[2])


@pytest.mark.parametrize('algorithm', METHODS)
def test_results_do_not_depend_on_the_layout_of_a_batch(models, algorithm):
  """Shared or repeated prompts, packing, micro-batches, padding and order give the same loss and gradients."""
  expected = computed(models, algorithm, packed(algorithm))
  assert float(expected[0]) > 0.01 and tiny.largest(expected[2]['embed']) > 1e-3
  if algorithm == 'kto':
    assert float(expected[1]['kl']) > 0.1
  assert_same(computed(models, algorithm, packed(algorithm, share_prompt=False, row_length=120)), expected)
  assert_same(computed(models, algorithm, packed(algorithm, row_length=250, rows=4, order=-1), 2), expected)


def test_the_prompt_is_read_once():
  shared, apart = (examples('dpo', share)[0] for share in (True, False))
  assert len(shared.tokens) < 0.7 * len(apart.tokens)


def random_outputs(algorithm):
  """Returns (Batch, Outputs) of a method with random log-probs of policy and reference."""
  batch, random = packed(algorithm), np.random.default_rng(0)

  def draw():
    return -random.uniform(0.1, 2, batch.tokens.shape).astype(np.float32)

  batch.arrays.update(ref_logprobs=draw(), kl=np.full_like(batch.loss_weights, 0.7))
  return batch, Outputs(draw(), -draw(), collision=draw())


@pytest.mark.parametrize('algorithm', METHODS)
def test_only_trained_tokens_have_a_gradient(algorithm):
  method, config = settings(algorithm)
  batch, outputs = random_outputs(algorithm)

  def fn(logprobs):
    return method.objective(config).fn(outputs.replace(logprobs=logprobs), batch)[0]

  gradient = jax.grad(fn)(outputs.logprobs)
  np.testing.assert_array_equal(gradient != 0, batch.loss_weights > 0)
  if algorithm == 'kto':
    assert not np.any((gradient != 0) & (batch.arrays['kl_mask'] > 0))


@pytest.mark.parametrize('algorithm', ['dpo', 'kto'])
def test_policy_equal_to_its_reference_has_the_known_first_loss(models, algorithm):
  model, params, _ = models
  method, config = settings(algorithm)
  loss, metrics, _ = computed((model, params, params), algorithm, packed(algorithm))
  expected = math.log(2) if algorithm == 'dpo' else 0.5
  assert float(loss) == pytest.approx(expected, abs=1e-6)
  method.check_first_step({'loss': float(loss)} | {k: float(v) for k, v in metrics.items()}, config)
  with_other_reference = computed(models, algorithm, packed(algorithm))
  with pytest.raises(AssertionError, match='its own reference'):
    method.check_first_step(
      {'loss': float(with_other_reference[0])} | {k: float(v) for k, v in with_other_reference[1].items()}, config
    )


def test_rewards_without_a_reference_are_scaled_logprobs():
  """The rewards of CPO are sums of log-probs; those of ORPO and SimPO are means, as in TRL."""
  for name, of_means in (('cpo', False), ('orpo', True), ('simpo', True)):
    batch, outputs = random_outputs(name)
    method, config = settings(name)
    _, metrics = method.objective(config).fn(outputs, batch)
    beta = 2.0 if name == 'simpo' else 0.1
    close(metrics['rewards/chosen'], beta * metrics['logps/chosen'])
    assert (float(metrics['logps/chosen']) > -2) == of_means


def test_simpo_defaults_are_those_of_its_paper():
  """SimPO has beta 2 and gamma 1 (arXiv:2405.14734, section 4.2) and not beta 0.1 of DPO; a config may set others."""
  assert settings('simpo')[1].preference.beta == 2.0
  assert settings('simpo')[1].preference.gamma == 1.0
  assert settings('dpo')[1].preference.beta == 0.1
  assert settings('simpo', beta=2.5, gamma=0.3)[1].preference.beta == 2.5


def test_default_nll_coef_of_each_method():
  values = {name: settings(name)[1].preference.nll_coef for name in METHODS}
  assert values == dict(dpo=0, ld_dpo=0, wpo=0, orpo=1, cpo=1, simpo=0, kto=0)
  assert settings('cpo', nll_coef=0.0)[1].preference.nll_coef == 0


# -------------------------------------- fields of config.preference, valid and invalid


@pytest.mark.parametrize(
  'algorithm, fields',
  [
    ('dpo', dict(losses=('hinge',))),
    ('dpo', dict(losses=('sigmoid', 'ipo'))),
    ('dpo', dict(losses=('sigmoid',), loss_weights=(0.5,))),
    ('dpo', dict(beta=0.3)),
    ('dpo', dict(label_smoothing=0.1)),
    ('simpo', dict(gamma=0.9)),
    ('simpo', dict(simpo_alpha=0.25)),
    ('dpo', dict(losses=('discopop',), discopop_tau=0.2)),
    ('dpo', dict(f_divergence='alpha_divergence', f_alpha=0.9)),
    ('dpo', dict(nll_coef=0.2)),
    ('dpo', dict(f_divergence='forward_kl')),
    ('dpo', dict(losses=('ipo',), ipo_average=False)),
    ('dpo', dict(ld_alpha=0.5)),
    ('dpo', dict(losses=('hinge',), weighting='wpo')),
    ('kto', dict(desirable_weight=2.0)),
    ('kto', dict(undesirable_weight=2.0)),
    ('kto', dict(losses=('apo_zero_unpaired',))),
  ],
  ids=str,
)
def test_every_field_counts(algorithm, fields):
  """Not share_prompt and precompute_ref, which change no result (test_preference_runs.py)."""
  base = dict(list(fields.items())[:-1])  # the last field may have an effect only together with those before it
  batch, outputs = random_outputs(algorithm)
  values = []
  for preference_fields in (base, fields):
    method, config = settings(algorithm, **preference_fields)
    values.append(float(method.objective(config).fn(outputs, batch)[0]))
  assert abs(values[0] - values[1]) > 1e-5


def test_every_preference_field_has_a_case():
  tested = {name for mark in test_every_field_counts.pytestmark for _, fields in mark.args[1] for name in fields}
  section = config_lib.defaults()['preference']
  assert tested | {'share_prompt', 'precompute_ref'} == set(section)


@pytest.mark.parametrize(
  'algorithm, fields, message',
  [
    ('dpo', dict(losses=('sigmod',)), "no 'sigmod'; did you mean 'sigmoid'"),
    ('dpo', dict(losses=('kto',)), "config.algorithm='kto'"),
    ('dpo', dict(losses=('ipo', 'sft'), loss_weights=(1.0,)), '1 weights for 2 losses'),
    ('dpo', dict(losses=('ipo',), label_smoothing=0.1), 'label_smoothing: ipo would ignore it'),
    ('dpo', dict(label_smoothing=0.5), 'less than 0.5'),
    ('dpo', dict(losses=('exo_pair',)), "'exo_pair' needs a number"),
    ('dpo', dict(losses=('aot',), f_divergence='forward_kl'), 'f_divergence: aot would ignore it'),
    ('dpo', dict(ipo_average=False), 'ipo_average: sigmoid would ignore it'),
    ('dpo', dict(gamma=1.0), 'gamma: sigmoid would ignore it; it is read by simpo'),
    ('dpo', dict(desirable_weight=2.0), 'desirable_weight: sigmoid would'),
    ('dpo', dict(losses=('sft',), nll_coef=1.0), 'is that NLL already'),
    ('dpo', dict(losses=('sigmoid', 'ipo'), ld_alpha=0.5), 'ld_alpha: weighs the sums of sigmoid, hinge, robust only'),
    ('dpo', dict(ld_alpha=-0.5), 'ld_alpha: -0.5 must be from 0 to 1'),
    ('kto', dict(weighting='wpo'), 'weighting: kto would ignore'),
    ('cpo', dict(precompute_ref=True), 'nothing reads a reference in cpo'),
    ('simpo', dict(f_divergence='forward_kl'), 'simpo would ignore it'),
    ('kto', dict(losses=('kto', 'apo_zero_unpaired')), '2 of them; kto'),
    ('kto', dict(losses=('kt',)), "did you mean 'kto'"),
    ('kto', dict(loss_weights=(1.0,)), 'kto has one loss'),
    ('kto', dict(nll_coef=1.0), 'no chosen answers'),
    ('kto', dict(label_smoothing=0.1), 'label_smoothing: kto would ignore'),
    ('online_dpo', dict(precompute_ref=True), 'not known before'),
  ],
  ids=str,
)
def test_invalid_or_ignored_fields_are_refused(algorithm, fields, message):
  with pytest.raises(InputError, match='config.preference.*' + message):
    settings(algorithm, **fields)


def test_message_weights_in_answers_are_refused():
  """A message of weight 0.5 has no meaning where sums of log-probs of whole answers are compared."""
  row = generated.rows('arithmetic_pairs', 'size=1')[0]
  weighted_answer = [{**row['chosen'][0], 'weight': 0.5}]
  _, config = settings('dpo')
  rows = sources.Rows('x', [{**row, 'chosen': weighted_answer}], [('x:', 7)])
  render = preference.render(rows, tokenizer_lib.load('bytes'), config)
  with pytest.raises(InputError, match='^x:7: chosen: a message has a weight'):
    render(0)


def test_objective_uses_the_sampling_temperature_in_online_dpo_only():
  config = settings('online_dpo')[1]
  at_temperature_0_7 = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, temperature=0.7))
  assert online_dpo.objective(at_temperature_0_7).temperature == 0.7
  assert preference.objective(at_temperature_0_7).temperature == 1.0


# ------------------------------------------------- options of single losses

OPTIONS = {'simpo_alpha': 0.25, 'discopop_tau': 0.2, 'f_alpha': 0.9}


@pytest.mark.parametrize('name', OPTIONS)
def test_an_option_that_no_loss_reads_is_refused(name):
  with pytest.raises(InputError, match=f'config.preference.{name}: .*would ignore it'):
    settings('dpo', **{name: OPTIONS[name]})
