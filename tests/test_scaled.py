"""Samplers in 8 bits (`rollout.weights`, `rollout.cache`): values of codes, and runs that correct for the rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import proofs
import pytest
import test_scheduler
import tiny
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxpost
from jaxpost.distributed.mesh import AXES, Layout
from jaxpost.errors import InputError
from jaxpost.hardware import memory
from jaxpost.models import layers, scaled
from jaxpost.models import model as model_lib
from jaxpost.monitor import metrics
from jaxpost.planning import sampling_arithmetic
from jaxpost.planning.case import Case
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import native
from jaxpost.stage import prepare
from jaxpost.stage.schema_rl import RolloutSection
from jaxpost.tools import inference

# Kind -> largest error of a number, relative to the largest of its group and to itself: half the distance of two codes.
LARGEST_ERRORS = {'int8': (0.5 / 127, 0.0), 'float8': (2.0**-10 / 448, 2.0**-4)}
FORMS = [('int8', ''), ('float8', ''), ('', 'int8'), ('', 'float8')]


@pytest.fixture(scope='module')
def model():
  return model_lib.build(tiny.config())


def engine_of(model, params, weights='', cache='', **fields):
  """Returns an engine of three slots with these forms of weights and cache, and with the parameters loaded."""
  model, compute = scaled.for_sampler(model, tiny.EXACT, RolloutSection(weights=weights, cache=cache))
  settings = dict(slots=3, max_prompt=9, max_new_tokens=24, stop_ids=(-2,), block=4)
  layout = tiny.one_device('rollout')
  engine = native.NativeEngine(model, native.SamplerConfig(**settings | fields), layout, compute, Ledger())
  engine.load(params, version=0)
  return engine


def rounded(x, kind, axes):
  """Rounds x as `scaled.encode` does, in float64 and by other code."""
  x = np.asarray(x, np.float64)
  largest = scaled.KINDS[kind][1]
  scales = np.abs(x).max(axes, keepdims=True).astype(np.float32) / np.float32(largest)
  scaled_x = x / np.where(scales > 0, scales, 1)
  return (
    np.rint(scaled_x) if kind == 'int8' else scaled_x.astype(np.float32).astype(jnp.float8_e4m3fn).astype(float)
  ) * scales


@pytest.mark.parametrize('kind', scaled.KINDS)
def test_rounding_errors_of_codes_are_within_8_bits(kind):
  x = np.random.RandomState(0).standard_normal((3, 40, 5, 7)).astype('f')
  x[1, :, 2] = 0  # a group without scale
  codes = scaled.encode(jnp.asarray(x), scaled.KINDS[kind][0], (1, 3), jnp.float32)
  assert codes.codes.shape == x.shape and codes.codes.dtype.itemsize == 1 and codes.scales.shape == (3, 1, 5, 1)
  decoded = np.asarray(codes.dense('float32'))
  error_by_group, error_by_self = LARGEST_ERRORS[kind]
  bound = error_by_group * np.abs(x).max((1, 3), keepdims=True) + error_by_self * np.abs(x)
  assert (np.abs(decoded - x) <= 1.0001 * bound).all() and (np.abs(decoded - x) > 0.5 * bound).any()
  np.testing.assert_allclose(decoded, rounded(x, kind, (1, 3)), rtol=1e-6)
  recoded = scaled.encode(codes.dense('float32'), scaled.KINDS[kind][0], (1, 3), jnp.float32)
  np.testing.assert_allclose(recoded.dense('float32'), decoded, rtol=1e-6)  # rounding again changes nothing


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
  'spec,shapes,axes',
  [
    ('btd,dnh->btnh', ((2, 3, 16), (16, 4, 5)), (0,)),
    ('btnh,nhd->btd', ((2, 3, 4, 5), (4, 5, 16)), (0, 1)),
    ('bkgh,bksh->bkgs', ((2, 3, 4, 8), (2, 3, 6, 8)), (3,)),
    ('bkgs,bksh->bkgh', ((2, 3, 4, 6), (2, 3, 6, 8)), (3,)),
  ],
)
def test_products_with_codes_equal_products_with_decoded_values(spec, shapes, axes, dtype):
  """Products with weights, with keys, and with values, whose scales multiply the attention weights."""
  random = np.random.RandomState(1)
  x, w = (jnp.asarray(random.standard_normal(s).astype('f')).astype(dtype).astype('float32') for s in shapes)
  codes = scaled.encode(w, 'int8', axes, jnp.float32)
  expected = np.einsum(spec, np.asarray(x, np.float64), np.asarray(codes.dense('float32'), np.float64))
  actual = jax.jit(lambda x, w: w.product(spec, x, dtype))(x, codes)
  assert actual.dtype == jnp.float32
  # Codes are exact in bfloat16, so only attention weights times scales are rounded: hence its larger tolerance.
  np.testing.assert_allclose(actual, expected, atol=0.05 if (dtype, spec[:4]) == ('bfloat16', 'bkgs') else 2e-5)


def with_rounded_weights(model, params, kind):
  """Returns the parameters with all matrices rounded to the values that an 8-bit sampler would store."""
  layers = dict(params['layers'])
  for name, axes in scaled.input_axes(model).items():
    layers[name] = jnp.asarray(rounded(layers[name], kind, axes).astype('f'))
  return params | {'layers': layers}


@pytest.mark.parametrize('weights,cache', FORMS)
def test_8_bit_sampler_equals_scorer_with_rounded_weights_and_cache(model, params, monkeypatch, weights, cache):
  """The scorer reads the whole text, with weights and cache rounded by other code. Without rounding it differs."""
  engine = engine_of(model, params, weights, cache)
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    proofs.check_slots(model, params, engine)
  rounded_params = with_rounded_weights(model, params, weights) if weights else params
  if cache:
    tiny._forward.cache_clear()
    attention = layers.attention

    def rounding(q, k, v, *args, **options):
      pair = (scaled.encode(x, scaled.KINDS[cache][0], (-1,), jnp.float32).dense(x.dtype) for x in (k, v))
      return attention(q, *pair, *args, **options)

    monkeypatch.setattr(layers, 'attention', rounding)
  proofs.check_slots(model, rounded_params, engine)
  tiny._forward.cache_clear()


def test_pages_and_turns_of_8_bit_sampler_give_the_same_samples(model, params):
  """Entries are rounded when they are made, so blocks, turns that continue a prefix, and pages give the same."""
  fields = dict(slots=4, max_prompt=20, max_new_tokens=test_scheduler.NEW, stop_ids=(), max_context=60)
  engine = engine_of(model, params, 'int8', 'int8', **fields)
  requests = test_scheduler.requests(3)
  whole = test_scheduler.serve(engine, requests)
  ends = {r.prompt: len(r.tokens) + test_scheduler.NEW - 4 for r in requests}
  turns = test_scheduler.serve(engine, test_scheduler.requests(3, max_tokens=4), test_scheduler.later(ends))
  for key, (one,) in whole.items():
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in turns[key]]), one.tokens)
    np.testing.assert_allclose(np.concatenate([p.logprobs for p in turns[key]]), one.logprobs, atol=1e-5)
  paged = engine_of(model, params, 'int8', 'int8', page_size=8, **fields)
  test_scheduler.same(test_scheduler.serve(paged, requests), whole)


def test_scales_are_replicated_where_inputs_are_split(model):
  """With `tensor=2`, scales of split outputs are split with their codes; scales of split inputs are on every device."""
  sizes = dict.fromkeys(AXES, 1) | dict(tensor=2)
  shardings = model.shardings(Layout(AbstractMesh(tuple(sizes.values()), AXES), 'rollout'))['layers']
  layer = {k: NamedSharding(x.mesh, PartitionSpec(*x.spec[1:])) for k, x in shardings.items()}
  stored = scaled.for_sampler(model, tiny.EXACT, RolloutSection(weights='int8'))[0].store(layer)
  assert stored['o'].codes.spec == PartitionSpec('tensor', None, None)
  assert stored['o'].scales.spec == PartitionSpec(None, None, None)
  assert stored['up'].codes.spec == stored['up'].scales.spec == PartitionSpec(None, 'tensor')
  assert stored['mlp_norm'] is layer['mlp_norm']


@pytest.mark.parametrize('weights,cache', [('', ''), ('int8', 'float8')])
def test_plans_count_the_bytes_of_8_bit_weights_and_cache(tmp_path, weights, cache):
  """The arithmetic of `launch.plan` gives the bytes of the arrays of an engine, for products in float32."""
  folder = tiny.folder(tmp_path / 'm', num_layers=2, num_kv_heads=2, head_dim=8)
  config = tiny.grpo_config(folder, rollout=dict(weights=weights, cache=cache, prompts=3, slots=3))
  inputs = prepare.prepare_all(config)[0].inputs
  case = Case(inputs, None, None, tiny.one_device('rollout'), tiny.EXACT, shape=None)
  engine = engine_of(inputs.model, inputs.model.init(jax.random.key(0)), weights, cache)
  assert sampling_arithmetic.weight_bytes(case) == memory.size(engine.weights)
  assert sampling_arithmetic.entry_bytes(case) * 3 * engine.length == engine.cache_bytes()


def test_grpo_learns_from_an_8_bit_sampler(tmp_path):
  """The difference to the trainer is measured and corrected for, and a resumed run is equal bit for bit."""
  folder = tiny.folder(tmp_path / 'm', num_layers=2)
  config = tiny.grpo_config(
    folder,
    rollout=dict(weights='int8', cache='int8', prompts=8, group_size=8),
    train=dict(steps=6),
    save=dict(every=3, export=True),
    optim=dict(lr=1e-2),
  )
  jaxpost.run(config, tmp_path / 'whole')
  rows = [r for r in metrics.comparable_rows(tmp_path / 'whole' / 'metrics.jsonl') if r['split'] == 'train']
  assert np.mean([r['reward'] for r in rows[-2:]]) > np.mean([r['reward'] for r in rows[:2]]) + 0.1
  assert all(1 + 1e-5 < r['sampler_mismatch'] < 1.2 for r in rows)
  assert all(0 < r['rollout_corr/k3_kl'] < 0.01 and r['importance_weight/ess'] > 0.9 for r in rows)
  assert all(abs(r['ratio'] - 1) < 1e-4 for r in rows)  # the ratio of the trainer to itself
  jaxpost.run(tiny.merged(config, dict(train=dict(steps=3))), tmp_path / 'parts')
  jaxpost.run(config, tmp_path / 'parts')
  one, two = (proofs.exported(tmp_path / name) for name in ('whole', 'parts'))
  jax.tree.map(np.testing.assert_array_equal, one, two)


def test_check_of_first_step_allows_for_rounding_of_the_sampler(tmp_path):
  """With `old_policy=sampler` the ratio need not be 1. Log-probs of another model still end the run."""
  folder, row = tiny.folder(tmp_path / 'm'), dict(ratio=1.03, kl=0.0, sampler_mismatch=1.1)
  for old_policy, fails in (('recomputed', 'ratio'), ('sampler', '')):
    overrides = dict(rollout=dict(weights='int8'), rl=dict(old_policy=old_policy))
    inputs = prepare.prepare_all(tiny.grpo_config(folder, **overrides))[0].inputs
    assert inputs.config.rl.importance == (('token_truncated',) if fails else ())
    for metrics_row, wrong in ((row, fails), (row | dict(ratio=1.0, sampler_mismatch=3.0), 'sampler_mismatch')):
      if wrong:
        with pytest.raises(AssertionError, match=f'{wrong} is'):
          inputs.algorithm.check_first_step(metrics_row, inputs.config)
      else:
        inputs.algorithm.check_first_step(metrics_row, inputs.config)


def test_evaluation_of_finished_weights_is_not_in_8_bits():
  config = tiny.grpo_config('x', rollout=dict(weights='int8', cache='float8'))
  ((_, section),) = jaxpost.stage.config.parse(config).items()
  rollout = inference._on_these_devices(section, True, tiny.one_device(), 'data=-1').rollout
  assert (rollout.weights, rollout.cache) == ('', '')


@pytest.mark.parametrize(
  'family,over,message',
  [
    ('qwen3', dict(rollout=dict(weights='int8'), rl=dict(importance=())), r'config\.rl\.importance: \(\) corrects'),
    ('qwen3', dict(rollout=dict(cache='int8'), rl=dict(importance=('opsm',))), r'config\.rl\.importance: .*corrects'),
    ('qwen3', dict(rollout=dict(weights='int4')), r"config\.rollout\.weights: 'int4' is not one of"),
    ('qwen3', dict(rollout=dict(weights='int8', share_base=True), lora=dict(rank=2)), 'weights: rollout.share_base'),
    ('deepseek_v3', dict(rollout=dict(weights='int8')), 'weights: the matrices of experts'),
    ('deepseek_v3', dict(rollout=dict(cache='int8')), 'cache: deepseek_v3 models do not cache'),
  ],
)
def test_8_bit_settings_that_are_not_supported_are_refused(tmp_path, family, over, message):
  fields = {} if family == 'qwen3' else dict(family=family, num_layers=3, num_heads=4, num_kv_heads=4)
  with pytest.raises(InputError, match=message):
    prepare.prepare_all(tiny.grpo_config(tiny.folder(tmp_path / 'm', **fields), **over))


@pytest.mark.parametrize('cfg', [tiny.latent(), tiny.hybrid('kimi_linear')], ids=['all_layers', 'some_layers'])
def test_latents_are_not_cached_in_8_bits(cfg):
  with pytest.raises(InputError, match='rollout.cache: .* models do not cache keys and values of heads'):
    scaled.check(RolloutSection(cache='int8'), model_lib.build(cfg))
