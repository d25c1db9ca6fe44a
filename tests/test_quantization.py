"""model.quantize: int8 and nf4 codes of frozen matrices, products and models with them, and runs on such a base."""

import dataclasses
import functools
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import tiny

from jaxpost import stages, types
from jaxpost.errors import InputError
from jaxpost.matmul import einsum
from jaxpost.models import lora, quantization
from jaxpost.models import model as model_lib
from jaxpost.models.config import Experts
from jaxpost.models.parameters import flatten
from jaxpost.monitor import metrics
from jaxpost.programs import train
from jaxpost.stage import assemble, place, prepare
from jaxpost.tools import inference
from jaxpost.types import Batch

ALL = 'q|k|v|o|gate|up|down'
PAIRS = 'generated:arithmetic_pairs:max=99,split=train,size=60'
# Upper bounds of the quantization error of normal weights: its root mean square relative to that of the weights
ERROR = {'int8': 0.0075, 'nf4': 0.095}


def normal(shape, seed=0):
  return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def dequantize(quantized, axis, dtype='float32'):
  return np.asarray(quantization.QuantizedMatrix(axis=axis, **quantized).dense(dtype))


def rms(x):
  return float(np.sqrt(np.mean(np.square(x))))


# --------------------------------------------------------------------- numbers


@pytest.mark.parametrize('kind', quantization.KINDS)
@pytest.mark.parametrize('shape, axis', [((128, 48), -2), ((4, 96, 20), -2), ((256, 4, 8), -3)])
def test_quantization_error_and_size_of_codes_and_scales(kind, shape, axis):
  w = normal(shape)
  quantized = quantization.quantize(jnp.asarray(w), kind, axis)
  packed = 2 if kind == 'nf4' else 1
  assert quantized['codes'].size * packed == w.size
  assert quantized['scales'].size == w.size // (48 if 96 in shape else 64)
  assert 0.5 * ERROR[kind] < rms(dequantize(quantized, axis) - w) / rms(w) < ERROR[kind]


@pytest.mark.parametrize('kind', quantization.KINDS)
def test_values_that_a_code_represents_are_restored_exactly(kind):
  values = quantization._NF4 if kind == 'nf4' else np.arange(-127, 128, 2) / 127
  w = np.resize(values, (64, 8)).astype(np.float32) * 0.5
  w[0] = 0.5  # a power of two in each block, which scales hold exactly
  quantized = quantization.quantize(jnp.asarray(w), kind, -2)
  np.testing.assert_allclose(dequantize(quantized, -2), w, rtol=1e-6)
  requantized = quantization.quantize(jnp.asarray(dequantize(quantized, -2)), kind, -2)
  jax.tree.map(np.testing.assert_array_equal, quantized, requantized)


def test_nf4_by_bits_equals_the_lookup_table():
  codes = np.arange(16, dtype=np.uint8).reshape(4, 4)
  for decoded in quantization._nf4_by_bits(jnp.asarray(codes)), quantization._nf4_values(jnp.asarray(codes)):
    np.testing.assert_array_equal(decoded, quantization._NF4[codes])


def test_zeros_are_restored_exactly():
  for kind in quantization.KINDS:
    quantized = quantization.quantize(jnp.zeros((8, 4)), kind, -2)
    assert not np.any(dequantize(quantized, -2))


def test_nf4_rounds_to_the_nearest_value():
  w = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
  restored = dequantize(quantization.quantize(jnp.asarray(w), 'nf4', -2), -2)
  smallest_error = np.abs(w - quantization._NF4).min(1)
  np.testing.assert_allclose(np.abs(restored - w)[:, 0], smallest_error, atol=1e-6)


@pytest.mark.parametrize('kind', quantization.KINDS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_products_and_gradients_equal_those_of_the_dequantized_matrix(kind, dtype):
  x, w = normal((2, 5, 64)), jnp.asarray(normal((64, 2, 24), 1))
  quantized = quantization.QuantizedMatrix(axis=-3, **quantization.quantize(w, kind, -3))

  def loss(x, w):
    return jnp.sum(jnp.sin(einsum('btd,dnh->btnh', x, w, dtype)))

  ours, expected = (jax.jit(jax.value_and_grad(loss))(x, m) for m in (quantized, quantized.dense(dtype)))
  for a, b in zip(ours, expected):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
  # The product has the dtype that is asked for, in which a mesh sends it; an adapter is added to it in float32.
  pair = lora.Adapted(quantized, normal((64, 3)), normal((3, 2, 24)), None, 1.0, 0.0)
  for out in 'float32', 'bfloat16':
    assert einsum('btd,dnh->btnh', x, quantized, dtype, out).dtype == out
    traced = jax.make_jaxpr(lambda x, out=out: pair.product('btd,dnh->btnh', x, dtype, out))(x)
    assert f'preferred_element_type={out}' in str(traced)


# ---------------------------------------------------------------------- models


def quantized_model(kind, rank=3, **fields):
  """Returns a frozen, quantized tiny model, with adapters of all matrices unless `rank` is 0."""
  spec = (rank, 5.0, False, ALL) if rank else ()
  return model_lib.quantized(model_lib.freeze(model_lib.build(tiny.config(lora=spec, **fields)), ''), kind)


def logits(model, params, compute=tiny.EXACT):
  ids = tiny.tokens((2, 9))
  positions = np.broadcast_to(np.arange(9, dtype=np.int32), ids.shape)
  x = jax.jit(functools.partial(model.forward, compute=compute))(params, ids, positions, np.ones_like(ids))
  return np.einsum('btd,vd->btv', np.asarray(x, np.float32), np.asarray(model.head(params)))


@pytest.mark.parametrize('kind', quantization.KINDS)
@pytest.mark.parametrize('unroll', [True, False])
def test_quantized_model_with_adapters_equals_its_merged_model(kind, unroll):
  model = quantized_model(kind)
  compute = dataclasses.replace(tiny.EXACT, unroll=unroll, remat='full')
  params = model.init(jax.random.key(0))
  for pair in params['lora']['layers'].values():
    pair['b'] = jnp.asarray(0.2 * normal(pair['b'].shape))
  merged = model.merge(params)
  assert set(flatten(merged)) == set(model.base.table)
  actual = logits(model, params, compute)
  np.testing.assert_allclose(actual, logits(model.base, merged, compute), atol=3e-5 * tiny.largest(actual))
  # All adapted matrices are codes, and only adapters are trained.
  assert {p for p in model.table if 'codes' in p} == {f'layers/{n}/codes' for n in ALL.split('|')}
  assert all(p.startswith('lora/') for p in model_lib.trained_part(model).table)


def test_quantized_latent_attention_with_dense_layers_equals_its_merged_model():
  config = tiny.latent(lora=(2, 5.0, False, 'q_b|o'))
  model = quantization.quantize_model(model_lib.freeze(model_lib.build(config), ''), 'int8')
  params = model.init(jax.random.key(0))
  assert 'codes' in params['dense']['o'] and 'codes' in params['layers']['o']
  actual = logits(model, params)
  np.testing.assert_allclose(actual, logits(model.base, model.merge(params)), atol=3e-5 * tiny.largest(actual))


def test_experts_are_quantized_but_routers_are_not():
  experts = Experts(num=4, top_k=2, size=16)
  model = quantization.quantize_model(model_lib.build(tiny.config(family='qwen3_moe', experts=experts)), 'int8')
  params = tiny.params(model)
  assert params['layers']['gate']['codes'].shape == (2, 4, 32, 16)
  assert params['layers']['router'].dtype == jnp.float32
  actual = logits(model, params)
  np.testing.assert_allclose(actual, logits(model.base, model.merge(params)), atol=3e-5 * tiny.largest(actual))


def test_backward_pass_dequantizes_one_layer_at_a_time():
  """Dequantized matrices are neither kept for the backward pass nor hoisted out of the loop over layers."""
  shape = dict(hidden_size=128, intermediate_size=256, num_layers=16)
  rows = Batch(*(np.ones((2, 1, 8), np.int32),) * 3, loss_weights=np.ones((2, 1, 8), np.float32))
  temporary = {}
  for kind in '', 'nf4':
    model = quantized_model(kind, **shape)
    compute = dataclasses.replace(tiny.EXACT, dtype='bfloat16', unroll=False)
    loss = train.make_loss(model, types.Objective(lambda o, a: (-o.logprobs, {})), tiny.one_device(), compute)
    shapes = jax.eval_shape(functools.partial(model.init, dtype=jnp.bfloat16), jax.random.key(0))
    trained, frozen = model_lib.split(shapes, model)

    def gradients(trained, frozen, rows, loss=loss):
      return train.accumulate(lambda params, micro: loss(params, micro, 0, {'params': frozen}), trained, rows)

    compiled = jax.jit(gradients).lower(trained, frozen, rows).compile()
    temporary[kind] = compiled.memory_analysis().temp_size_in_bytes
  matrices = sum(2 * math.prod(model.base.table[p].shape) for p in quantization.block_axes(model.base.table))
  assert temporary['nf4'] < temporary[''] + matrices / 4


# ------------------------------------------------------------------------ runs


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano', num_layers=2)


def sft(base, kind='nf4', **fields):
  """Returns the config of an SFT run that trains adapters on a quantized base."""
  adapters = dict(lora=dict(rank=2), model=dict(quantize=kind), train=dict(steps=4), save=dict(every=2, export=True))
  return tiny.merged(tiny.run_config(base), tiny.merged(adapters, fields))


def run(config, workdir):
  stages.run(config, workdir, rich.console.Console(quiet=True))
  return [r for r in metrics.comparable_rows(workdir / 'metrics.jsonl') if r['split'] == 'train']


def assembled_roles(config):
  placed = place.place_stage(prepare.prepare_all(config)[0])
  roles, stream, _ = assemble.make_parts(placed, stages.initial_params(placed, None))
  stream.close()
  return roles


def test_only_adapters_are_trained_on_a_quantized_base(base):
  for kind, bits in {'int8': 8, 'nf4': 4}.items():
    policy = assembled_roles(sft(base, kind)).policy
    assert list(policy.state.params) == ['lora']
    frozen = flatten(policy.frozen['params'])
    for path in quantization.block_axes(policy.model.base.table):
      size = math.prod(policy.model.base.table[path].shape)
      assert frozen[f'{path}/codes'].nbytes == size * bits // 8
      assert frozen[f'{path}/scales'].dtype == jnp.bfloat16
    assert frozen['embed'].dtype == jnp.float32


def test_run_on_a_quantized_base_resumes_exactly_and_exports_its_model(base, tmp_path):
  from jaxpost.stage import config as config_lib

  rows = run(sft(base), tmp_path / 'whole')
  assert len({r['loss'] for r in rows}) == 4
  run(sft(base, train=dict(steps=2)), tmp_path / 'halves')
  assert run(sft(base), tmp_path / 'halves') == rows
  files = [tmp_path / d / 'export/model.safetensors' for d in ('whole', 'halves')]
  assert files[0].read_bytes() == files[1].read_bytes()
  from_run = inference.from_run(tmp_path / 'whole')
  expected = logits(from_run.inputs.model, from_run.params)
  sft_config = config_lib.parse(tiny.run_config(''))['sft']
  exported = inference.from_folder(tmp_path / 'whole/export', sft_config)
  np.testing.assert_allclose(
    logits(exported.inputs.model, exported.params), expected, atol=3e-5 * tiny.largest(expected)
  )
  # On the base before quantization, the adapter gives logits near those of the quantized base.
  exported = inference.from_folder(tmp_path / 'whole/export/adapter', sft_config)
  actual = logits(exported.inputs.model, exported.params)
  assert 1e-3 < rms(actual - expected) / rms(expected) < 0.5


def test_dpo_reference_shares_the_codes_of_the_policy(base):
  roles = assembled_roles(sft(base, algorithm='dpo', data=dict(path=PAIRS), train=dict(batch_size=4, row_length=96)))
  codes = tiny.pointers(roles.policy.frozen['params'])
  assert codes <= tiny.pointers(roles.reference.params)


@pytest.mark.nightly  # test_adapters.py has such a run whose sampler shares the base
@pytest.mark.parametrize('kind', quantization.KINDS)
def test_grpo_learns_on_a_quantized_base(base, tmp_path, kind):
  """The sampler computes with the same quantized weights as training: their mismatch is 1."""
  rows = run(
    tiny.merged(
      tiny.grpo_config(
        base,
        lora=dict(rank=4),
        rl=dict(kl_coef=0.01),
        optim=dict(lr=2e-2),
        rollout=dict(prompts=8, group_size=8),
        train=dict(steps=12),
      ),
      dict(model=dict(quantize=kind)),
    ),
    tmp_path,
  )
  rewards = [r['reward'] for r in rows]
  assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
  for row in rows:
    assert row['sampler_mismatch'] == pytest.approx(1, abs=1e-3)


def test_stages_can_change_the_quantization(base, tmp_path):
  """Adapters are trained on over another quantization of the base; a stage without adapters merges them."""
  config = sft(
    base,
    stages=('one', 'two', 'three', 'four'),
    one=dict(),
    two=dict(model=dict(quantize='')),
    three=dict(model=dict(quantize='int8')),
    four=dict(model=dict(quantize=''), lora=dict(rank=0)),
    train=dict(steps=2),
  )
  rows = run(config, tmp_path)
  losses = [r['loss'] for r in rows]
  assert [r['stage'] for r in rows] == [stage for stage in ('one', 'two', 'three', 'four') for _ in range(2)]
  assert losses[-1] < losses[0]
  assert inference.from_run(tmp_path, 'three').inputs.model.quantized
  assert not inference.from_run(tmp_path).inputs.model.quantized


@pytest.mark.nightly
@pytest.mark.parametrize(
  'second', [dict(model=dict(quantize='')), dict(lora=dict(rank=3)), dict(model=dict(quantize=''), lora=dict(rank=0))]
)
def test_resumed_stage_keeps_the_base_that_it_began_with(base, tmp_path, second):
  """The metrics are the same whether the weights of the stage before it are in memory or on disk."""

  def config(steps):
    return sft(
      base,
      stages=('one', 'two'),
      one=dict(),
      two=tiny.merged(second, dict(train=dict(steps=steps))),
      train=dict(steps=2),
    )

  rows = run(config(2), tmp_path / 'at_once')
  run(config(1), tmp_path / 'halves')
  shutil.rmtree(tmp_path / 'halves/export')
  assert run(config(2), tmp_path / 'halves') == rows


def test_ppo_critic_shares_the_codes_of_the_policy(base):
  roles = assembled_roles(
    tiny.merged(tiny.grpo_config(base, algorithm='ppo', lora=dict(rank=2)), dict(model=dict(quantize='int8')))
  )
  frozen_pointers = [tiny.pointers(r.frozen['params']) for r in roles.trainable.values()]
  assert frozen_pointers[0] == frozen_pointers[1]


def test_critic_that_is_trained_whole_is_not_quantized(base):
  """The policy is quantized, as `train.freeze` leaves only its embedding to train."""
  fields = dict(model=dict(quantize='int8'), train=dict(freeze='(?!embed).*'))
  roles = assembled_roles(tiny.merged(tiny.grpo_config(base, algorithm='ppo'), fields))
  assert roles.policy.model.quantized and not roles.critic.model.quantized
  assert set(roles.critic.model.table) == {*model_lib.build(roles.policy.model.config).table, 'score'}


@pytest.mark.parametrize(
  'over, text',
  [
    (
      dict(lora=dict(rank=0)),
      "quantize: 'nf4' is for weights that are not trained, and layers/q is trained; set config.lora.rank",
    ),
    (dict(train=dict(freeze='embed')), 'layers/q is trained; set'),
    (dict(model=dict(quantize='int4')), 'quantize'),
  ],
)
def test_bad_quantization_config_is_one_line(base, over, text):
  with pytest.raises(InputError, match=text) as error:
    prepare.prepare_all(sft(base, **over))
  assert '\n' not in str(error.value)


def test_adapter_of_a_quantized_base_loads_in_peft(base, tmp_path):
  """It is loaded on the base before quantization."""
  torch = pytest.importorskip('torch', reason='parity with peft needs torch')
  peft = pytest.importorskip('peft', reason='peft is not installed')
  from transformers import AutoModelForCausalLM

  run(sft(base, train=dict(steps=2)), tmp_path / 'run')
  adapter = tmp_path / 'run/export/adapter'
  network = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
  with torch.no_grad():
    expected = network(input_ids=torch.tensor(tiny.tokens((2, 9))).long()).logits.numpy()
  from jaxpost.stage import config as config_lib

  weights = inference.from_folder(adapter, config_lib.parse(tiny.run_config(''))['sft'])
  ours = logits(weights.inputs.model, weights.params)[..., : expected.shape[-1]]
  np.testing.assert_allclose(ours, expected, atol=3e-5 * tiny.largest(expected))


def test_randomly_initialized_weights_are_quantized(tmp_path):
  config = tiny.merged(
    sft(''),
    dict(model=dict(path='', preset='tiny', dtype='bfloat16'), train=dict(steps=2), save=dict(every=1, export=False)),
  )
  run(tiny.merged(config, dict(train=dict(steps=1))), tmp_path / 'halves')
  assert run(config, tmp_path / 'halves') == run(config, tmp_path / 'whole')
  from_run = inference.from_run(tmp_path / 'whole')
  assert from_run.params['layers']['q']['codes'].dtype == jnp.uint8


def test_mixture_of_experts_trains_adapters_on_quantized_experts(tmp_path):
  folder = tiny.folder(tmp_path / 'moe', family='qwen3_moe', num_layers=2, experts=Experts(num=4, top_k=2, size=16))
  config = sft(folder, lora=dict(targets='q|v'), model=dict(remat='full'))
  exact = run(tiny.merged(config, dict(model=dict(quantize=''))), tmp_path / 'exact')
  rows = run(config, tmp_path / 'nf4')
  assert all(r['grad_norm'] > 0 for r in rows)
  for a, b in zip(rows, exact):
    assert a['loss'] == pytest.approx(b['loss'], rel=0.3)
    assert a['loss'] != b['loss']
  policy = assembled_roles(config).policy
  assert policy.frozen['params']['layers']['gate']['codes'].ndim == 4
