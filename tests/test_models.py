"""The decoder (`models.transformer`): prefill, decode and training agree, and documents in a row are isolated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpost.models import layers, parameters, presets, transformer
from jaxpost.models import model as model_lib
from jaxpost.models.config import Experts, Rope
from jaxpost.programs import cache_storage, pages
from jaxpost.types import Cache

LLAMA3 = dict(
  rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)


@pytest.fixture(scope='module')
def model():
  return model_lib.build(tiny.config())


def assert_close(actual, expected, tolerance):
  scale = max(1.0, tiny.largest(expected))
  assert actual.shape == expected.shape and tiny.largest(actual - expected) <= tolerance * scale


def test_cached_decode_equals_full_forward(model, params):
  ids, prompt, room = tiny.tokens((3, 20)), np.array([5, 9, 2], np.int32), 24
  full = tiny.hidden(model, params, ids)
  padded = np.where(np.arange(9) < prompt[:, None], ids[:, :9], 130)
  prefill = jax.jit(lambda p, *a: model.prefill(p, *a, compute=tiny.EXACT))
  cache, last = prefill(params, padded, prompt)
  rows = np.arange(3)
  assert_close(last, full[rows, prompt - 1], 1e-5)

  # The cache beyond a prompt must not be read: fill it with values that would show.
  def grow(x):
    return jnp.pad(
      jnp.where((jnp.arange(9) < prompt[:, None])[:, None, :, None], x, 1e3),
      ((0, 0), (0, 0), (0, room - 9), (0, 0)),
      constant_values=1e3,
    )

  cache = jax.tree.map(grow, cache)
  weights = parameters.unstack_layers(params, model.config.layer_stacks)
  decode = jax.jit(lambda w, *a: model.decode(w, *a, compute=tiny.EXACT))
  extend = jax.jit(cache_storage.extend, static_argnums=3)
  position, block, recent = prompt.copy(), 4, None
  for i in range(20 - 9):
    if i % block == 0:
      if i:
        cache = extend(cache, recent, position - block, 'cpu' if i == block else 'gpu')
      recent = jax.tree.map(lambda x: jnp.full((*x.shape[:2], block, x.shape[3]), 1e3), cache)
    recent, x = decode(weights, cache, recent, ids[rows, position], position - i % block, i % block)
    assert_close(x, full[rows, position], 1e-5)
    position += 1


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_extend_writes_new_entries_and_nothing_else(platform):
  """The cache has rows, or pages of 4 entries, of which the second slot has only two."""
  random = np.random.RandomState(0)

  def new(*shape):
    return jnp.asarray(random.standard_normal(shape), jnp.float32)

  recent, filled = Cache((new(2, 3, 5, 7),), (new(2, 3, 5, 7),)), np.array([9, 2], np.int32)
  rows = Cache((new(3, 3, 16, 7),), (new(3, 3, 16, 7),))
  table = np.array([[4, 1, 6, 8], [3, 2, 0, 0]], np.int32)
  pool = Cache((new(9, 3, 4, 7),), (new(9, 3, 4, 7),))
  out = jax.jit(cache_storage.extend, static_argnums=3)(rows, recent, filled, platform)
  expected = np.array(rows.k[0])
  for s, n in enumerate(filled):
    expected[s, :, n : n + 5] = recent.k[0][s]
  np.testing.assert_array_equal(out.k[0], expected)
  out = jax.jit(pages.extend, static_argnums=4)(pool, table, recent, filled, platform)
  expected = np.array(pool.v[0])
  for s, n in enumerate(filled):
    for t in range(n, n + 5):
      expected[table[s, t // 4], :, t % 4] = recent.v[0][s, :, t - n]
  np.testing.assert_array_equal(out.v[0], expected)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_right_padding_does_not_matter(model, params, dtype):
  compute = dataclasses.replace(tiny.EXACT, dtype=dtype, q_chunk=4)
  ids, lengths = tiny.tokens((2, 7)), np.array([7, 4], np.int32)
  prefill = jax.jit(lambda p, *a: model.prefill(p, *a, compute=compute))
  cache, last = prefill(params, ids, lengths)
  wide = np.pad(ids, ((0, 0), (0, 6)), constant_values=99)
  wide[1, 4:] = 55
  padded_cache, padded_last = prefill(params, wide, lengths)
  tolerance = 1e-6 if dtype == 'float32' else 2e-2
  assert_close(padded_last, last, tolerance)
  assert_close(padded_cache.k[1][0, :, :7], cache.k[1][0], tolerance)


@pytest.mark.parametrize('q_chunk', [4, 64])
def test_gradients_flow_only_from_the_past(model, params, q_chunk):
  compute = dataclasses.replace(tiny.EXACT, q_chunk=q_chunk)
  ids = np.arange(10, dtype=np.int32)[None] + 3  # all distinct, so that each token has its own row of embed

  def output(embed, t):
    x = tiny.hidden(model, params | {'embed': embed}, ids, compute)
    return jnp.sum(x[0, t] ** 3)

  gradient = jax.jit(jax.grad(output))
  for t in (0, 4, 9):
    rows = np.abs(gradient(params['embed'], t)[ids[0]]).max(axis=1)
    assert (rows[: t + 1] > 0).all() and (rows[t + 1 :] == 0).all()


@pytest.mark.parametrize('q_chunk', [5, 64])
def test_packing_isolates_documents(model, params, q_chunk):
  compute = dataclasses.replace(tiny.EXACT, q_chunk=q_chunk)
  lengths, ids = (7, 1, 8), tiny.tokens((1, 16))
  segments = np.repeat([1, 2, 3], lengths)[None]
  positions = np.concatenate([np.arange(n) for n in lengths])[None]
  packed = tiny.hidden(model, params, ids, compute, segments, positions=positions)
  start = 0
  for n in lengths:
    alone = tiny.hidden(model, params, ids[:, start : start + n], compute)
    assert_close(packed[:, start : start + n], alone, 1e-6)
    start += n
  mixed = tiny.hidden(model, params, ids, compute, positions=positions)
  assert tiny.largest(mixed - packed) > 0.1  # without segment_ids, documents mix


COMPUTES = {
  'scan': dict(unroll=False),
  'dots': dict(remat='dots'),
  'full': dict(remat='full'),
  'scan_dots': dict(unroll=False, remat='dots'),
  'scan_full': dict(unroll=False, remat='full'),
  'chunks': dict(q_chunk=5),
}


@pytest.fixture(scope='module')
def gradients(model, params):
  ids = tiny.tokens((2, 12))

  def run(**fields):
    compute = dataclasses.replace(tiny.EXACT, **fields)

    def loss(p):
      x = tiny.hidden(model, p, ids, compute)
      return jnp.sum(x * jnp.cos(jnp.arange(x.size).reshape(x.shape)))

    return jax.jit(jax.value_and_grad(loss))(params)

  return run, run()


@pytest.mark.parametrize('name', COMPUTES)
def test_gradients_do_not_depend_on_unroll_remat_or_chunks(gradients, name):
  run, (value, grads) = gradients
  other, other_grads = run(**COMPUTES[name])
  assert abs(other - value) <= 1e-5 * abs(value)
  jax.tree.map(lambda a, b: assert_close(a / tiny.largest(b), b / tiny.largest(b), 1e-5), other_grads, grads)


@pytest.mark.parametrize('experts', [None, Experts(4, 2, 24)], ids=['dense', 'experts'])
@pytest.mark.parametrize('windows, static', [((3, 0, 3, 0), True), ((3, 0, 0, 0), False)], ids=str)
def test_scanned_layers_with_windows_equal_unrolled_ones(windows, static, experts, monkeypatch):
  """Windows that repeat are static in the scan, so that attention skips keys and no device branches over kernels."""
  family = 'qwen3_moe' if experts else 'qwen3'
  cfg = tiny.config(family=family, num_layers=4, layer_windows=windows, layer_ropes=(0, -1, 0, -1), experts=experts)
  model = model_lib.build(cfg)
  params, ids, seen = tiny.params(model), tiny.tokens((2, 12)), []
  attention = layers.attention

  def spy(q, k, v, rows, window, **options):
    seen.append(window)
    return attention(q, k, v, rows, window, **options)

  def loss_and_gradient(**fields):
    compute = dataclasses.replace(tiny.EXACT, **fields)
    return jax.value_and_grad(lambda p: jnp.sum(jnp.sin(tiny.hidden(model, p, ids, compute))))(params)

  value, grads = loss_and_gradient()
  monkeypatch.setattr(layers, 'attention', spy)
  for remat in ('none', 'full'):
    other, other_grads = loss_and_gradient(unroll=False, remat=remat)
    assert abs(other - value) <= 1e-5 * abs(value)
    jax.tree.map(lambda a, b: assert_close(a / tiny.largest(b), b / tiny.largest(b), 1e-5), other_grads, grads)
  assert all(isinstance(window, int) for window in seen) == static and len(seen) >= 2
  assert cfg.layer_period == (2 if static else 4)


def llama3_rope(theta=100.0, **fields):
  return Rope(theta, tuple((LLAMA3 | fields).items()))


FIELDS = [
  dict(ropes=(llama3_rope(theta=110.0),)),
  dict(norm_eps=1e-3),
  dict(qk_norm=''),
  dict(ropes=(llama3_rope(factor=9.0),)),
  dict(ropes=(llama3_rope(low_freq_factor=2.0),)),
  dict(ropes=(llama3_rope(high_freq_factor=5.0),)),
  dict(ropes=(llama3_rope(original_max_position_embeddings=48),)),
  dict(ropes=(Rope(100.0),)),
  dict(layer_ropes=(0, -1)),
  dict(layer_windows=(0, 8)),
  dict(rotary_dim=4),
  dict(norm_offset=0.5),
  dict(activation='gelu'),
  dict(activation='gelu_tanh'),
  dict(embed_scale=2.0),
  dict(residual_scale=0.5),
  dict(attention_scale=0.3),
  dict(attention_softcap=1.0),
  dict(logit_softcap=1.0),
  dict(logit_divisor=1.5),
]


@pytest.mark.parametrize('fields', FIELDS)
def test_every_field_counts(fields):
  cfg = tiny.config(ropes=(llama3_rope(),))
  ids, weights = tiny.tokens((1, 40)), tiny.params(model_lib.build(cfg), 3)
  base, changed = (tiny.logits(model_lib.build(c), weights, ids) for c in (cfg, dataclasses.replace(cfg, **fields)))
  assert tiny.largest(changed - base) > 1e-3 * tiny.largest(base)


def test_the_padded_vocabulary_is_zero_and_counted(model):
  cfg = model.config
  assert cfg.padded_vocab_size == 192
  untied = model_lib.build(tiny.config(tie_embeddings=False))
  for m in (model, untied):
    params = jax.jit(lambda key, m=m: m.init(key, dtype=jnp.bfloat16))(jax.random.key(0))
    assert not np.any(params['embed'][131:]) and np.all(np.any(params['embed'][:131], axis=1))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}
    assert jax.tree.map(jnp.shape, params) == m.shapes()
    assert transformer.num_params(m.config) == sum(x.size for x in jax.tree.leaves(params))
  assert np.any(untied.head(params) != params['embed'])
  assert model.head({'embed': 1}) == 1


@pytest.mark.parametrize('make', [tiny.config, tiny.latent, tiny.hybrid], ids=lambda make: make.__name__)
def test_tiny_models_have_the_weights_that_init_gives(make):
  """The weights are equal up to rounding, which may depend on the place of a number in an array."""
  model, key = model_lib.build(make(vocab_multiple=192)), jax.random.key(3)
  actual = tiny.initial(key, model.config, model.table)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, jax.jit(model.init)(key))


def test_flops_per_token_are_near_the_count_of_xla(model):
  """The estimate is near the count of XLA, which includes the head and attention to all pairs of tokens."""
  ids = tiny.tokens((1, 64))
  compute = dataclasses.replace(tiny.EXACT, q_chunk=64)
  weights = model.init(jax.random.key(0))
  compiled = (
    jax.jit(lambda p: jnp.einsum('btd,vd->btv', tiny.hidden(model, p, ids, compute), model.head(p)))
    .lower(weights)
    .compile()
  )
  estimated = 64 * transformer.flops_per_token(model.config, 64)
  assert 0.9 < compiled.cost_analysis()['flops'] / estimated < 1.2


def test_a_window_saves_the_products_outside_it(model):
  cfg = model.config
  window = dataclasses.replace(cfg, layer_windows=(0, 16))
  saved = transformer.flops_per_token(cfg, 64) - transformer.flops_per_token(window, 64)
  assert saved == 4 * cfg.num_heads * cfg.head_dim * (64 - 16)
  assert transformer.flops_per_token(window, 9) == (transformer.flops_per_token(cfg, 9))


def test_presets_have_the_size_in_their_name():
  billions = {
    'qwen3_0_6b': 0.596,
    'qwen3_1_7b': 1.72,
    'qwen3_4b': 4.02,
    'qwen3_8b': 8.19,
    'llama3_2_1b': 1.236,
    'llama3_2_3b': 3.213,
    'llama3_1_8b': 8.03,
    'llama3_1_70b': 70.55,
    'qwen2_5_0_5b': 0.494,
    'qwen2_5_1_5b': 1.544,
    'qwen2_5_7b': 7.616,
    'gemma3_1b': 1.0,
    'gemma3_4b_text': 3.88,
    'olmo2_7b': 7.3,
    'smollm3_3b': 3.075,
    'mistral_7b': 7.242,
    'lfm2_1_2b': 1.17,
    'glm4_5_air': 106.85,
    'qwen3_5_0_8b': 0.7524,
    'qwen3_5_9b': 8.95,
    'qwen3_5_35b_a3b': 34.66,
  }
  for name, size in billions.items():
    count = transformer.num_params(presets.every()[name]) / 1e9
    assert abs(count - size) < 0.01 * size, (name, count)
