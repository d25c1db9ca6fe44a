"""Samplers in 8 bits (`rollout.weights`, `rollout.cache`): what they compute, and that a run corrects for it."""

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

# Kind -> error of a number by the largest of its group, and by itself: half the distance of two codes.
LOST = {'int8': (0.5 / 127, 0.0), 'float8': (2.0**-10 / 448, 2.0**-4)}
FORMS = [('int8', ''), ('float8', ''), ('', 'int8'), ('', 'float8')]


@pytest.fixture(scope='module')
def model():
  return model_lib.build(tiny.config())


def engine_of(model, params, weights='', cache='', **fields):
  """An engine of three slots with these forms of weights and cache, and the parameters loaded."""
  model, compute = scaled.for_sampler(model, tiny.EXACT, RolloutSection(weights=weights, cache=cache))
  settings = dict(slots=3, max_prompt=9, max_new_tokens=24, stop_ids=(-2,), block=4)
  layout = tiny.one_device('rollout')
  made = native.NativeEngine(model, native.SamplerConfig(**settings | fields), layout, compute, Ledger())
  made.load(params, version=0)
  return made


def rounded(x, kind, axes):
  """`scaled.encode` and back in float64, written down plainly."""
  x = np.asarray(x, np.float64)
  largest = scaled.KINDS[kind][1]
  scales = np.abs(x).max(axes, keepdims=True).astype(np.float32) / np.float32(largest)
  y = x / np.where(scales > 0, scales, 1)
  return (np.rint(y) if kind == 'int8' else y.astype(np.float32).astype(jnp.float8_e4m3fn).astype(float)) * scales


@pytest.mark.parametrize('kind', scaled.KINDS)
def test_codes_are_as_near_as_8_bits_are(kind):
  x = np.random.RandomState(0).standard_normal((3, 40, 5, 7)).astype('f')
  x[1, :, 2] = 0  # a group without scale
  found = scaled.encode(jnp.asarray(x), scaled.KINDS[kind][0], (1, 3), jnp.float32)
  assert found.codes.shape == x.shape and found.codes.dtype.itemsize == 1 and found.scales.shape == (3, 1, 5, 1)
  back = np.asarray(found.dense('float32'))
  of_group, of_self = LOST[kind]
  bound = of_group * np.abs(x).max((1, 3), keepdims=True) + of_self * np.abs(x)
  assert (np.abs(back - x) <= 1.0001 * bound).all() and (np.abs(back - x) > 0.5 * bound).any()
  np.testing.assert_allclose(back, rounded(x, kind, (1, 3)), rtol=1e-6)
  again = scaled.encode(found.dense('float32'), scaled.KINDS[kind][0], (1, 3), jnp.float32)
  np.testing.assert_allclose(again.dense('float32'), back, rtol=1e-6)  # what is read twice loses nothing more


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
def test_products_are_those_of_what_codes_stand_for(spec, shapes, axes, dtype):
  """Covers products of weights, of scores, and of values, whose scales multiply the attention weights."""
  random = np.random.RandomState(1)
  x, w = (jnp.asarray(random.standard_normal(s).astype('f')).astype(dtype).astype('float32') for s in shapes)
  codes = scaled.encode(w, 'int8', axes, jnp.float32)
  meant = np.einsum(spec, np.asarray(x, np.float64), np.asarray(codes.dense('float32'), np.float64))
  found = jax.jit(lambda x, w: w.product(spec, x, dtype))(x, codes)
  assert found.dtype == jnp.float32
  # Codes are exact in bfloat16; attention weights times scales are rounded to it.
  np.testing.assert_allclose(found, meant, atol=0.05 if (dtype, spec[:4]) == ('bfloat16', 'bkgs') else 2e-5)


def with_rounded_weights(model, params, kind):
  """The parameters of which a sampler in 8 bits would make the same codes."""
  layers = dict(params['layers'])
  for name, axes in scaled.input_axes(model).items():
    layers[name] = jnp.asarray(rounded(layers[name], kind, axes).astype('f'))
  return params | {'layers': layers}


@pytest.mark.parametrize('weights,cache', FORMS)
def test_the_sampler_computes_what_the_scorer_would_of_the_same_codes(model, params, monkeypatch, weights, cache):
  """Weights and cache rounded by other code, in a forward pass over the whole text; the plain one differs."""
  engine = engine_of(model, params, weights, cache)
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    proofs.check_slots(model, params, engine)
  exact = with_rounded_weights(model, params, weights) if weights else params
  if cache:
    tiny._forward.cache_clear()
    plain = layers.attention

    def rounding(q, k, v, *args, **rest):
      pair = (scaled.encode(x, scaled.KINDS[cache][0], (-1,), jnp.float32).dense(x.dtype) for x in (k, v))
      return plain(q, *pair, *args, **rest)

    monkeypatch.setattr(layers, 'attention', rounding)
  proofs.check_slots(model, exact, engine)
  tiny._forward.cache_clear()


def test_pages_and_turns_read_the_same_codes(model, params):
  """Blocks, prefixes that go on, and pages: entries are rounded when they are made, wherever they lie."""
  fields = dict(slots=4, max_prompt=20, max_new_tokens=test_scheduler.NEW, stop_ids=(), max_context=60)
  engine = engine_of(model, params, 'int8', 'int8', **fields)
  wanted = test_scheduler.requests(3)
  whole = test_scheduler.serve(engine, wanted)
  ends = {r.prompt: len(r.tokens) + test_scheduler.NEW - 4 for r in wanted}
  turns = test_scheduler.serve(engine, test_scheduler.requests(3, max_tokens=4), test_scheduler.later(ends))
  for key, (one,) in whole.items():
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in turns[key]]), one.tokens)
    np.testing.assert_allclose(np.concatenate([p.logprobs for p in turns[key]]), one.logprobs, atol=1e-5)
  paged = engine_of(model, params, 'int8', 'int8', page_size=8, **fields)
  test_scheduler.same(test_scheduler.serve(paged, wanted), whole)


def test_scales_are_whole_where_inputs_are_split(model):
  """Over `tensor`, an output's scale lies beside its codes, and one of a sum over devices is on each of them."""
  sizes = dict.fromkeys(AXES, 1) | dict(tensor=2)
  shardings = model.shardings(Layout(AbstractMesh(tuple(sizes.values()), AXES), 'rollout'))['layers']
  layer = {k: NamedSharding(x.mesh, PartitionSpec(*x.spec[1:])) for k, x in shardings.items()}
  found = scaled.for_sampler(model, tiny.EXACT, RolloutSection(weights='int8'))[0].store(layer)
  assert found['o'].codes.spec == PartitionSpec('tensor', None, None)
  assert found['o'].scales.spec == PartitionSpec(None, None, None)
  assert found['up'].codes.spec == found['up'].scales.spec == PartitionSpec(None, 'tensor')
  assert found['mlp_norm'] is layer['mlp_norm']


@pytest.mark.parametrize('weights,cache', [('', ''), ('int8', 'float8')])
def test_plans_know_the_bytes(tmp_path, weights, cache):
  """The arithmetic of `launch.plan` against the arrays of an engine, for products in float32."""
  folder = tiny.folder(tmp_path / 'm', num_layers=2, num_kv_heads=2, head_dim=8)
  config = tiny.grpo_config(folder, rollout=dict(weights=weights, cache=cache, prompts=3, slots=3))
  inputs = prepare.prepare_all(config)[0].inputs
  case = Case(inputs, None, None, tiny.one_device('rollout'), tiny.EXACT, shape=None)
  engine = engine_of(inputs.model, inputs.model.init(jax.random.key(0)), weights, cache)
  assert sampling_arithmetic.weight_bytes(case) == memory.size(engine.weights)
  assert sampling_arithmetic.entry_bytes(case) * 3 * engine.length == engine.cache_bytes()


def test_grpo_learns_from_an_8_bit_sampler(tmp_path):
  """The difference is measured and corrected for, and a resumed run is the same bit for bit."""
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
  assert all(abs(r['ratio'] - 1) < 1e-4 for r in rows)  # of the trainer to itself
  jaxpost.run(tiny.merged(config, dict(train=dict(steps=3))), tmp_path / 'parts')
  jaxpost.run(config, tmp_path / 'parts')
  one, two = (proofs.exported(tmp_path / name) for name in ('whole', 'parts'))
  jax.tree.map(np.testing.assert_array_equal, one, two)


def test_the_first_step_knows_that_the_sampler_rounds(tmp_path):
  """A ratio to the sampler is not 1, and one to the trainer is; log-probs of another model still end the run."""
  folder, row = tiny.folder(tmp_path / 'm'), dict(ratio=1.03, kl=0.0, sampler_mismatch=1.1)
  for old, fails in (('recomputed', 'ratio'), ('sampler', '')):
    over = dict(rollout=dict(weights='int8'), rl=dict(old_policy=old))
    inputs = prepare.prepare_all(tiny.grpo_config(folder, **over))[0].inputs
    assert inputs.config.rl.importance == (('token_truncated',) if fails else ())
    for found, wrong in ((row, fails), (row | dict(ratio=1.0, sampler_mismatch=3.0), 'sampler_mismatch')):
      if wrong:
        with pytest.raises(AssertionError, match=f'{wrong} is'):
          inputs.algorithm.check_first_step(found, inputs.config)
      else:
        inputs.algorithm.check_first_step(found, inputs.config)


def test_finished_weights_are_evaluated_as_they_are():
  config = tiny.grpo_config('x', rollout=dict(weights='int8', cache='float8'))
  ((_, section),) = jaxpost.stage.config.parse(config).items()
  found = inference._on_these_devices(section, True, tiny.one_device(), 'data=-1').rollout
  assert (found.weights, found.cache) == ('', '')


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
def test_what_cannot_be_is_refused(tmp_path, family, over, message):
  fields = {} if family == 'qwen3' else dict(family=family, num_layers=3, num_heads=4, num_kv_heads=4)
  with pytest.raises(InputError, match=message):
    prepare.prepare_all(tiny.grpo_config(tiny.folder(tmp_path / 'm', **fields), **over))


@pytest.mark.parametrize('cfg', [tiny.latent(), tiny.hybrid('kimi_linear')], ids=['all_layers', 'some_layers'])
def test_latents_are_not_cached_in_8_bits(cfg):
  with pytest.raises(InputError, match='rollout.cache: .* models do not cache keys and values of heads'):
    scaled.check(RolloutSection(cache='int8'), model_lib.build(cfg))
