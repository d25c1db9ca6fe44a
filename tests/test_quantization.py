"""A base in 8 or 4 bits: what is stored, what it computes, runs on it."""

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
# Root mean square of what is lost, as a part of that of normal weights.
LOST = {'int8': 0.0075, 'nf4': 0.095}


def normal(shape, seed=0):
  return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def back(held, axis, dtype='float32'):
  return np.asarray(quantization.QuantizedMatrix(axis=axis, **held).dense(dtype))


def rms(x):
  return float(np.sqrt(np.mean(np.square(x))))


# --------------------------------------------------------------------- numbers


@pytest.mark.parametrize('kind', quantization.KINDS)
@pytest.mark.parametrize('shape, axis', [((128, 48), -2), ((4, 96, 20), -2), ((256, 4, 8), -3)])
def test_what_is_lost(kind, shape, axis):
  w = normal(shape)
  held = quantization.quantize(jnp.asarray(w), kind, axis)
  packed = 2 if kind == 'nf4' else 1
  assert held['codes'].size * packed == w.size
  assert held['scales'].size == w.size // (48 if 96 in shape else 64)
  assert 0.5 * LOST[kind] < rms(back(held, axis) - w) / rms(w) < LOST[kind]


@pytest.mark.parametrize('kind', quantization.KINDS)
def test_values_that_there_are_come_back(kind):
  values = quantization._NF4 if kind == 'nf4' else np.arange(-127, 128, 2) / 127
  w = np.resize(values, (64, 8)).astype(np.float32) * 0.5
  w[0] = 0.5  # a power of two in each block, which scales hold exactly
  held = quantization.quantize(jnp.asarray(w), kind, -2)
  np.testing.assert_allclose(back(held, -2), w, rtol=1e-6)
  again = quantization.quantize(jnp.asarray(back(held, -2)), kind, -2)
  jax.tree.map(np.testing.assert_array_equal, held, again)


def test_codes_become_numbers_by_their_bits_as_by_a_table():
  x = np.arange(16, dtype=np.uint8).reshape(4, 4)
  for found in quantization._nf4_by_bits(jnp.asarray(x)), quantization._nf4_values(jnp.asarray(x)):
    np.testing.assert_array_equal(found, quantization._NF4[x])


def test_zeros_stay_zeros():
  for kind in quantization.KINDS:
    held = quantization.quantize(jnp.zeros((8, 4)), kind, -2)
    assert not np.any(back(held, -2))


def test_nf4_takes_the_nearest_value():
  w = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
  found = back(quantization.quantize(jnp.asarray(w), 'nf4', -2), -2)
  nearest = np.abs(w - quantization._NF4).min(1)
  np.testing.assert_allclose(np.abs(found - w)[:, 0], nearest, atol=1e-6)


@pytest.mark.parametrize('kind', quantization.KINDS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_products_are_those_of_the_whole_matrix(kind, dtype):
  x, w = normal((2, 5, 64)), jnp.asarray(normal((64, 2, 24), 1))
  held = quantization.QuantizedMatrix(axis=-3, **quantization.quantize(w, kind, -3))

  def loss(x, w):
    return jnp.sum(jnp.sin(einsum('btd,dnh->btnh', x, w, dtype)))

  ours, theirs = (jax.jit(jax.value_and_grad(loss))(x, m) for m in (held, held.dense(dtype)))
  for a, b in zip(ours, theirs):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
  # In the type that is asked for, which is what a mesh sends; an adapter is added to that in float32.
  pair = lora.Adapted(held, normal((64, 3)), normal((3, 2, 24)), None, 1.0, 0.0)
  for out in 'float32', 'bfloat16':
    assert einsum('btd,dnh->btnh', x, held, dtype, out).dtype == out
    traced = jax.make_jaxpr(lambda x, out=out: pair.product('btd,dnh->btnh', x, dtype, out))(x)
    assert f'preferred_element_type={out}' in str(traced)


# ---------------------------------------------------------------------- models


def held_model(kind, rank=3, **fields):
  spec = (rank, 5.0, False, ALL) if rank else ()
  return quantization.quantize_model(model_lib.freeze(model_lib.build(tiny.config(lora=spec, **fields)), ''), kind)


def logits(model, params, compute=tiny.EXACT):
  ids = tiny.tokens((2, 9))
  positions = np.broadcast_to(np.arange(9, dtype=np.int32), ids.shape)
  x = jax.jit(functools.partial(model.forward, compute=compute))(params, ids, positions, np.ones_like(ids))
  return np.einsum('btd,vd->btv', np.asarray(x, np.float32), np.asarray(model.head(params)))


@pytest.mark.parametrize('kind', quantization.KINDS)
@pytest.mark.parametrize('unroll', [True, False])
def test_a_model_computes_as_with_whole_matrices(kind, unroll):
  model = held_model(kind)
  compute = dataclasses.replace(tiny.EXACT, unroll=unroll, remat='full')
  params = model.init(jax.random.key(0))
  for pair in params['lora']['layers'].values():
    pair['b'] = jnp.asarray(0.2 * normal(pair['b'].shape))
  merged = model.merge(params)
  assert set(flatten(merged)) == set(model.base.table)
  found = logits(model, params, compute)
  np.testing.assert_allclose(found, logits(model.base, merged, compute), atol=3e-5 * tiny.largest(found))
  # Frozen parameters are in codes, and none of them is trained.
  assert {p for p in model.table if 'codes' in p} == {f'layers/{n}/codes' for n in ALL.split('|')}
  assert all(p.startswith('lora/') for p in model_lib.trained_part(model).table)


def test_so_do_latents_with_dense_layers():
  cfg = tiny.latent(lora=(2, 5.0, False, 'q_b|o'))
  model = quantization.quantize_model(model_lib.freeze(model_lib.build(cfg), ''), 'int8')
  params = model.init(jax.random.key(0))
  assert 'codes' in params['dense']['o'] and 'codes' in params['layers']['o']
  found = logits(model, params)
  np.testing.assert_allclose(found, logits(model.base, model.merge(params)), atol=3e-5 * tiny.largest(found))


def test_experts_are_quantized_and_routers_are_not():
  experts = Experts(num=4, top_k=2, size=16)
  model = quantization.quantize_model(model_lib.build(tiny.config(family='qwen3_moe', experts=experts)), 'int8')
  params = tiny.params(model)
  assert params['layers']['gate']['codes'].shape == (2, 4, 32, 16)
  assert params['layers']['router'].dtype == jnp.float32
  found = logits(model, params)
  np.testing.assert_allclose(found, logits(model.base, model.merge(params)), atol=3e-5 * tiny.largest(found))


def test_no_matrix_of_another_layer_is_whole():
  """Neither kept for the backward pass, nor taken out of the loop."""
  shape = dict(hidden_size=128, intermediate_size=256, num_layers=16)
  rows = Batch(*(np.ones((2, 1, 8), np.int32),) * 3, loss_weights=np.ones((2, 1, 8), np.float32))
  temporary = {}
  for kind in '', 'nf4':
    model = held_model(kind, **shape)
    compute = dataclasses.replace(tiny.EXACT, dtype='bfloat16', unroll=False)
    loss = train.make_loss(model, types.Objective(lambda o, a: (-o.logprobs, {})), tiny.one_device(), compute)
    own, fixed = model_lib.split(
      jax.eval_shape(functools.partial(model.init, dtype=jnp.bfloat16), jax.random.key(0)), model
    )
    done = (
      jax.jit(lambda p, f, b, loss=loss: train.accumulate(lambda p, m: loss(p, m, 0, {'params': f}), p, b))
      .lower(own, fixed, rows)
      .compile()
    )
    temporary[kind] = done.memory_analysis().temp_size_in_bytes
  matrices = sum(2 * math.prod(model.base.table[p].shape) for p in quantization.block_axes(model.base.table))
  assert temporary['nf4'] < temporary[''] + matrices / 4


# ------------------------------------------------------------------------ runs


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano', num_layers=2)


def sft(base, kind='nf4', **over):
  return tiny.merged(
    tiny.run_config(base),
    tiny.merged(
      dict(lora=dict(rank=2), model=dict(quantize=kind), train=dict(steps=4), save=dict(every=2, export=True)), over
    ),
  )


def run(config, workdir):
  stages.run(config, workdir, rich.console.Console(quiet=True))
  return [r for r in metrics.comparable_rows(workdir / 'metrics.jsonl') if r['split'] == 'train']


def parts(config):
  kit = place.place_stage(prepare.prepare_all(config)[0])
  roles, stream, _ = assemble.make_parts(kit, stages.initial_params(kit, None))
  stream.close()
  return roles


def pointers(tree):
  return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}


def test_only_adapters_are_trained_on_codes(base):
  for kind, bits in {'int8': 8, 'nf4': 4}.items():
    policy = parts(sft(base, kind)).policy
    assert list(policy.state.params) == ['lora']
    fixed = flatten(policy.frozen['params'])
    for path in quantization.block_axes(policy.model.base.table):
      size = math.prod(policy.model.base.table[path].shape)
      assert fixed[f'{path}/codes'].nbytes == size * bits // 8
      assert fixed[f'{path}/scales'].dtype == jnp.bfloat16
    assert fixed['embed'].dtype == jnp.float32


def test_run_resumes_and_exports_what_it_computed(base, tmp_path):
  from jaxpost.stage import config as config_lib

  rows = run(sft(base), tmp_path / 'whole')
  assert len({r['loss'] for r in rows}) == 4
  run(sft(base, train=dict(steps=2)), tmp_path / 'halves')
  assert run(sft(base), tmp_path / 'halves') == rows
  files = [tmp_path / d / 'export/model.safetensors' for d in ('whole', 'halves')]
  assert files[0].read_bytes() == files[1].read_bytes()
  found = inference.from_run(tmp_path / 'whole')
  made = logits(found.inputs.model, found.params)
  plain = config_lib.parse(tiny.run_config(''))['sft']
  other = inference.from_folder(tmp_path / 'whole/export', plain)
  np.testing.assert_allclose(logits(other.inputs.model, other.params), made, atol=3e-5 * tiny.largest(made))
  # On the whole base, the adapter is near to what was trained with.
  other = inference.from_folder(tmp_path / 'whole/export/adapter', plain)
  near = logits(other.inputs.model, other.params)
  assert 1e-3 < rms(near - made) / rms(made) < 0.5


def test_reference_of_dpo_shares_the_codes(base):
  roles = parts(sft(base, algorithm='dpo', data=dict(path=PAIRS), train=dict(batch_size=4, row_length=96)))
  fixed = pointers(roles.policy.frozen['params'])
  assert fixed <= pointers(roles.reference.params)


@pytest.mark.parametrize('kind', quantization.KINDS)
def test_grpo_learns_on_codes(base, tmp_path, kind):
  """The sampler has the weights that training multiplies with."""
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


def test_stages_change_how_matrices_are_held(base, tmp_path):
  """Adapters go on over another base; without any, they are merged."""
  made = sft(
    base,
    stages=('one', 'two', 'three', 'four'),
    one=dict(),
    two=dict(model=dict(quantize='')),
    three=dict(model=dict(quantize='int8')),
    four=dict(model=dict(quantize=''), lora=dict(rank=0)),
    train=dict(steps=2),
  )
  rows = run(made, tmp_path)
  losses = [r['loss'] for r in rows]
  assert [r['stage'] for r in rows] == [s for s in ('one', 'two', 'three', 'four') for _ in range(2)]
  assert losses[-1] < losses[0]
  assert inference.from_run(tmp_path, 'three').inputs.model.quantized
  assert not inference.from_run(tmp_path).inputs.model.quantized


@pytest.mark.nightly
@pytest.mark.parametrize(
  'second', [dict(model=dict(quantize='')), dict(lora=dict(rank=3)), dict(model=dict(quantize=''), lora=dict(rank=0))]
)
def test_a_resumed_stage_has_the_base_that_it_began_with(base, tmp_path, second):
  """It does not matter whether the stage before is in memory or on disk."""

  def made(steps):
    return sft(
      base,
      stages=('one', 'two'),
      one=dict(),
      two=tiny.merged(second, dict(train=dict(steps=steps))),
      train=dict(steps=2),
    )

  rows = run(made(2), tmp_path / 'at_once')
  run(made(1), tmp_path / 'halves')
  shutil.rmtree(tmp_path / 'halves/export')
  assert run(made(2), tmp_path / 'halves') == rows


def test_ppo_has_a_critic_on_the_same_codes(base):
  roles = parts(
    tiny.merged(tiny.grpo_config(base, algorithm='ppo', lora=dict(rank=2)), dict(model=dict(quantize='int8')))
  )
  both = [pointers(r.frozen['params']) for r in roles.trainable.values()]
  assert both[0] == both[1]


def test_a_critic_that_is_trained_whole_has_no_codes(base):
  """Beside a policy of which `train.freeze` leaves only the embedding to train."""
  over = dict(model=dict(quantize='int8'), train=dict(freeze='(?!embed).*'))
  roles = parts(tiny.merged(tiny.grpo_config(base, algorithm='ppo'), over))
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
def test_bad_config_is_one_line(base, over, text):
  with pytest.raises(InputError, match=text) as error:
    prepare.prepare_all(sft(base, **over))
  assert '\n' not in str(error.value)


def test_an_adapter_of_codes_loads_in_peft(base, tmp_path):
  """It is for the base as it was."""
  torch = pytest.importorskip('torch', reason='parity with peft needs torch')
  library = pytest.importorskip('peft', reason='peft is not installed')
  from transformers import AutoModelForCausalLM

  run(sft(base, train=dict(steps=2)), tmp_path / 'run')
  adapter = tmp_path / 'run/export/adapter'
  network = library.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
  with torch.no_grad():
    theirs = network(input_ids=torch.tensor(tiny.tokens((2, 9))).long()).logits.numpy()
  from jaxpost.stage import config as config_lib

  weights = inference.from_folder(adapter, config_lib.parse(tiny.run_config(''))['sft'])
  ours = logits(weights.inputs.model, weights.params)[..., : theirs.shape[-1]]
  np.testing.assert_allclose(ours, theirs, atol=3e-5 * tiny.largest(theirs))


def test_random_weights_are_quantized_too(tmp_path):
  made = tiny.merged(
    sft(''),
    dict(model=dict(path='', preset='tiny', dtype='bfloat16'), train=dict(steps=2), save=dict(every=1, export=False)),
  )
  run(tiny.merged(made, dict(train=dict(steps=1))), tmp_path / 'halves')
  assert run(made, tmp_path / 'halves') == run(made, tmp_path / 'whole')
  found = inference.from_run(tmp_path / 'whole')
  assert found.params['layers']['q']['codes'].dtype == jnp.uint8


def test_a_mixture_trains_adapters_on_quantized_experts(tmp_path):
  folder = tiny.folder(tmp_path / 'moe', family='qwen3_moe', num_layers=2, experts=Experts(num=4, top_k=2, size=16))
  made = sft(folder, lora=dict(targets='q|v'), model=dict(remat='full'))
  exact = run(tiny.merged(made, dict(model=dict(quantize=''))), tmp_path / 'exact')
  rows = run(made, tmp_path / 'nf4')
  assert all(r['grad_norm'] > 0 for r in rows)
  for a, b in zip(rows, exact):
    assert a['loss'] == pytest.approx(b['loss'], rel=0.3)
    assert a['loss'] != b['loss']
  policy = parts(made).policy
  assert policy.frozen['params']['layers']['gate']['codes'].ndim == 4
