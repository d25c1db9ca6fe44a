"""The kernels for recurrences (`models/recurrence_kernels.py`) in Pallas' interpreter, and the check before a run."""

import dataclasses
import functools
import json
import pathlib

import children
import jax
import jax.numpy as jnp
import numpy as np
import proofs
import pytest
import tiny

from jaxpost.hardware import kernel_check, layer_check
from jaxpost.matmul import compute_for
from jaxpost.models import model as model_lib
from jaxpost.models import recurrence, recurrence_chunk, recurrence_kernels, recurrence_mosaic, recurrence_triton
from jaxpost.stage import place, prepare

ROWS, TOKEN = recurrence_kernels.over_rows, recurrence_triton.one_token
HEADS = layer_check.Heads('triton', 16, 32, 1, corrected=True, key_heads=2, value_heads=4)
SIZES = dict(key_size=16, value_size=16)  # the smallest that the kernels support


@pytest.fixture
def interpreted(monkeypatch):
  monkeypatch.setattr(recurrence_kernels, 'over_rows', functools.partial(ROWS, interpret=True))
  monkeypatch.setattr(recurrence_triton, 'one_token', functools.partial(TOKEN, interpret=True))


def draw(length, heads, groups, size, width):
  """Returns (terms, runs, state, gradients of the result) for two rows; runs begin inside of chunks and at borders."""
  random = np.random.RandomState(0)
  q, k = random.standard_normal((2, 2, length, heads, size)).astype('f')
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  v = random.standard_normal((2, length, heads * groups, width)).astype('f')
  beta = random.uniform(0, 1, (2, length, heads * groups)).astype('f')
  # Two tokens decay the state to 0 at once. Others decay it slowly, so that it matters for several chunks.
  decay = (
    random.uniform(0, 0.01, (*beta.shape, 1)) * np.where(np.isin(np.arange(length), (11, 50)), 1e4, 1)[:, None, None]
  )
  starts = [[0] * length, [i in (20, 32, 33, 50, 64, 100) for i in range(length)]]
  state, g_state = random.standard_normal((2, 2, heads * groups, size, width)).astype('f')
  g = random.standard_normal(v.shape).astype('f'), g_state
  return (q, k, v, -decay.astype('f'), beta), jnp.cumsum(jnp.asarray(starts, jnp.int32), axis=1), state, g


def by_xla(terms, runs, state, **options):
  return recurrence.chunked(*terms, runs=runs, state=state, **options)


def with_gradients(fn, case, dtype, **options):
  """Returns the result and the gradients of the terms and of the state, as one list."""
  (*qkv, log_decay, beta), runs, state, g = case
  terms = *(jnp.asarray(x, dtype) for x in qkv), log_decay, beta

  def run(*args):
    *terms, state = args
    return fn(tuple(terms), runs, state, dtype=dtype, **options)

  @jax.jit
  def measured(args, g):
    out, vjp = jax.vjp(run, *args)
    return [*out, *vjp(g)]

  return measured((*terms, state), g)


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-6), ('bfloat16', 0.01)])
@pytest.mark.parametrize(
  'kernel, sizes, corrected',
  [
    ('triton', (150, 2, 2, 16, 32), True),
    ('triton', (150, 1, 3, 32, 16), False),
    ('triton', (32, 1, 1, 256, 64), True),
    ('mosaic', (150, 2, 2, 16, 32), True),
    ('mosaic', (150, 1, 12, 48, 16), False),
    ('mosaic', (70, 2, 10, 16, 16), True),
    ('mosaic', (70, 3, 4, 16, 16), True),
  ],
  ids=str,
)
def test_kernels_compute_the_same_as_xla(kernel, sizes, corrected, dtype, tolerance):
  """Rows may end inside of a chunk. Values of large heads, or of many heads, are in parts with their own gradients."""
  case = draw(*sizes)
  expected = with_gradients(by_xla, case, 'float32', corrected=corrected)
  ours = with_gradients(ROWS, case, dtype, kernel=kernel, corrected=corrected, interpret=True)
  errors = [float(tiny.largest(a.astype('f') - b) / tiny.largest(b)) for a, b in zip(ours, expected, strict=True)]
  assert max(errors) < tolerance, errors
  if dtype != 'float32':  # the tolerance is that of rounding, which XLA's result has, too
    rounded = with_gradients(by_xla, case, dtype, corrected=corrected)
    theirs = [float(tiny.largest(a.astype('f') - b) / tiny.largest(b)) for a, b in zip(rounded, expected, strict=True)]
    assert max(errors) < 2 * max(theirs)


def test_large_values_are_computed_in_parts():
  assert [recurrence_triton._parts(*sizes) for sizes in ((128, 128), (128, 64), (64, 64), (256, 256))] == [2, 1, 1, 8]


def test_programs_for_tpus_have_up_to_eight_value_heads():
  """Key heads, value heads, and programs for the same key heads."""
  cases = (16, 32), (30, 30), (1, 48), (2, 18), (2, 4)
  found = [recurrence_mosaic._split(*heads, 128, 128) for heads in cases]
  assert found == [(4, 8, 1), (6, 6, 1), (1, 8, 6), (1, 3, 3), (2, 4, 1)]
  # The states of fewer heads fit into vector memory if they are larger.
  assert recurrence_mosaic._split(4, 8, 256, 256) == (2, 4, 1)


def test_three_products_come_close_to_float32():
  """The inverse of a chunk with similar keys, the worst case; one product in bfloat16 has an error of 6e-3."""
  random = np.random.RandomState(0)
  keys = random.standard_normal((64, 16)) + 4 * random.standard_normal(16)
  keys /= np.linalg.norm(keys, axis=1, keepdims=True)
  lower = np.tril(0.95 * keys @ keys.T, -1).astype('f')
  found = jax.jit(lambda x: recurrence_chunk._inverse(recurrence_mosaic._exact, x))(lower)
  expected = np.linalg.inv(np.eye(64) + lower.astype(float))
  assert tiny.largest(found - expected) < 2**-14 * tiny.largest(expected)


@pytest.mark.parametrize('channels', [1, 16])
@pytest.mark.parametrize('corrected', [True, False])
def test_a_token_computes_the_same_as_xla(corrected, channels):
  (q, k, v, log_decay, beta), runs, state, _ = draw(1, 2, 2, 16, 32)
  log_decay = jnp.broadcast_to(log_decay, (*log_decay.shape[:3], channels)) * jnp.arange(1, channels + 1)
  terms = q, k, v, log_decay, beta
  expected = recurrence.step(*(x[:, 0] for x in terms), state, corrected=corrected)
  out, new_state = TOKEN(terms, runs, state, corrected=corrected, interpret=True)
  for ours, theirs in zip((out[:, 0], new_state), expected, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * tiny.largest(theirs))


@pytest.mark.parametrize(
  'family, kernel', [('qwen3_5_text', 'triton'), ('kimi_linear', 'triton'), ('qwen3_5_text', 'mosaic')]
)
def test_slots_sampled_with_the_kernels_have_the_log_probs_of_xla(monkeypatch, interpreted, family, kernel):
  """The state after a prompt, which is a row of XLA for Kimi Linear, goes on token by token: for TPUs by XLA."""
  heads = dict(num_kv_heads=2) if family == 'kimi_linear' else {}
  model = model_lib.build(tiny.hybrid(family, **SIZES, **heads))
  params = tiny.params(model)
  with monkeypatch.context() as patch:
    patch.setattr(tiny, 'EXACT', dataclasses.replace(tiny.EXACT, recurrence_kernel=kernel))
    sampler = proofs.engine(model, max_new_tokens=24)
  sampler.load(params, version=0)
  proofs.check_slots(model, params, sampler)


@pytest.mark.parametrize(
  'family, remat, kernel',
  [('qwen3_5_text', 'dots', 'triton'), ('granitemoehybrid', 'full', 'triton'), ('qwen3_5_text', 'dots', 'mosaic')],
)
def test_models_compute_the_same_with_the_kernels(interpreted, family, remat, kernel):
  """The scan over layers and rematerialization run the kernel, and differentiate it."""
  model = model_lib.build(tiny.hybrid(family, **SIZES))
  params, ids = tiny.params(model), tiny.tokens((2, 20))
  segments = np.repeat([[1, 2, 3, 0]], 2, axis=0).repeat([3, 9, 6, 2], axis=1)

  def gradient(kernel):
    compute = dataclasses.replace(tiny.EXACT, unroll=False, remat=remat, recurrence_kernel=kernel)

    def loss(p):
      x = tiny.hidden(model, p, ids, compute, segments=segments)
      return jnp.sum(jnp.cos(x[:, :18]))

    assert ('name=recurrence_forward' in str(jax.make_jaxpr(loss)(params))) == bool(kernel)
    return jax.jit(jax.value_and_grad(loss))(params)

  jax.tree.map(
    lambda a, b: np.testing.assert_array_less(tiny.largest(a - b), 1e-4 * tiny.largest(b) + 1e-9),
    gradient(kernel),
    gradient(''),
  )


def main():
  """Prints {mesh: largest relative error} of rows and heads that are split over 4 devices, which run the kernel."""
  from jaxpost.distributed.phases import make_layout

  recurrence_kernels.over_rows = functools.partial(ROWS, interpret=True)
  results = {}
  for kernel, mesh, heads in (
    ('triton', 'fsdp=2,tensor=2', 2),
    ('triton', 'tensor=4', 2),
    ('triton', 'tensor=4', 1),
    ('mosaic', 'fsdp=2,tensor=2', 2),
    ('mosaic', 'tensor=4', 2),
    ('mosaic', 'tensor=4', 1),
  ):
    case = draw(40, heads, 4 // heads, 16, 16)
    expected = with_gradients(by_xla, case, 'float32', corrected=True)
    layout = make_layout(mesh, 'train', '--mesh')

    def over_mesh(terms, runs, state, layout=layout, kernel=kernel, *, dtype, corrected):
      compute = dataclasses.replace(tiny.EXACT, dtype=dtype, recurrence_kernel=kernel)
      return recurrence_kernels.over_mesh(terms, runs, state, layout, compute=compute, corrected=corrected)

    ours = with_gradients(over_mesh, case, 'float32', corrected=True)
    results[f'{kernel} {mesh} {heads}'] = max(
      float(tiny.largest(a - b) / tiny.largest(b)) for a, b in zip(ours, expected, strict=True)
    )
  print(json.dumps(results))


def test_kernel_on_each_of_four_devices_matches_one_device():
  """Each device computes its value heads, also if there are fewer key heads than devices."""
  results = json.loads(children.run(__file__, devices=4).stdout)
  assert len(results) == 6 and max(results.values()) < 1e-6, results


@pytest.mark.parametrize(
  'platform, dtype, triton, kernel',
  [
    ('gpu', 'bfloat16', True, 'triton'),
    ('gpu', 'float16', True, 'triton'),
    ('gpu', 'float32', True, ''),
    ('gpu', 'bfloat16', False, ''),
    ('tpu', 'bfloat16', True, 'mosaic'),
    ('tpu', 'float32', True, ''),
    ('cpu', 'bfloat16', True, ''),
  ],
)
def test_kernels_are_for_accelerators_in_16_bits(platform, dtype, triton, kernel):
  assert compute_for(platform, dtype, 'none', triton=triton).recurrence_kernel == kernel


# ---------------------------------------------------- the check before a run


def test_heads_that_the_kernel_supports():
  """Convolutions are left to XLA, rows with a decay of each channel, and for GPUs sizes that are no powers of 2."""
  families = 'qwen3_5_text', 'kimi_linear', 'granitemoehybrid'
  of_families = [layer_check.heads('triton', tiny.hybrid(family, **SIZES)) for family in families]
  shapes = [[heads[:5] for heads in found] for found in of_families]
  assert shapes == [[('triton', 16, 16, n, corrected)] for n, corrected in ((1, True), (16, True), (1, False))]
  assert not layer_check.heads('mosaic', tiny.hybrid('kimi_linear', **SIZES))
  supported = {
    (kernel, width): bool(layer_check.heads(kernel, tiny.hybrid('qwen3_5_text', key_size=16, value_size=width)))
    for kernel in ('triton', 'mosaic')
    for width in (24, 48)
  }
  assert supported == {('triton', 24): 0, ('triton', 48): 0, ('mosaic', 24): 0, ('mosaic', 48): 1}
  assert not recurrence_kernels.supports('triton', 16, 16, channels=16, single=False)
  split = dataclasses.replace(tiny.hybrid('qwen3_5_text', **SIZES), key_heads=2, value_heads=8)
  of_devices = [layer_check.heads('mosaic', split, shards)[0][-2:] for shards in (1, 2, 4, 3)]
  assert of_devices == [
    (2, 8),
    (1, 4),
    (2, 2),
    (2, 8),
  ]  # 4 devices have 2 copies of key heads; 3 do not divide the heads
  for cfg in tiny.hybrid('lfm2'), tiny.config():
    assert not layer_check.heads('triton', cfg) and not layer_check.heads('mosaic', cfg)


@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
def test_a_wrong_kernel_is_not_used(monkeypatch, interpreted, caplog, tmp_path, platform):
  monkeypatch.setenv('HOME', str(tmp_path))
  cfg, compute = tiny.hybrid('qwen3_5_text', **SIZES), compute_for(platform, 'bfloat16', 'none')
  right = recurrence_kernels.over_rows

  def leaks(terms, runs, state, **options):  # the state of a document into the next one
    return right(terms, runs * 0, state, **options)

  def unsupported(*args, **options):
    raise NotImplementedError('cannot lower')

  def forgets(*args, **options):  # the state at the border of two chunks
    of_head = recurrence_chunk.across_chunk

    def across_chunk(state, q, k, terms, product):
      return of_head(state, q, k, terms._replace(whole=0 * terms.whole), product)

    with monkeypatch.context() as patch:
      patch.setattr(recurrence_chunk, 'across_chunk', across_chunk)
      return right(*args, **options)

  def reads_other_rows(terms, runs, state, **options):
    return right(terms, jnp.broadcast_to(runs[:1], runs.shape), state, **options)

  def crosses_borders(terms, runs, state, **options):  # of chunks, with the state of the document before
    at = 64 if options['kernel'] == 'mosaic' else 32
    index = jnp.arange(runs.shape[1])
    starts = (index % at == 0) & (runs != jnp.roll(runs, 1, axis=1)) & (index > 0)
    return right(terms, runs - jnp.cumsum(starts, axis=1), state, **options)

  def writes_nan(*args, **options):
    out, state = right(*args, **options)
    return out.at[0, 3, 0, 1].set(jnp.nan), state

  class MosaicError(Exception):  # as in JAX
    __module__ = 'jax._src.pallas.mosaic.error_handling'

  def is_refused(*args, **options):
    raise MosaicError('no rule')

  for kernel, reason in (
    (leaks, 'off by'),
    (reads_other_rows, 'off by'),
    (crosses_borders, 'off by'),
    (writes_nan, 'off by inf'),
    (is_refused, 'MosaicError: no rule'),
    (forgets, 'off by'),
    (unsupported, 'NotImplementedError: cannot lower'),
    (right, ''),
  ):
    monkeypatch.setattr(recurrence_kernels, 'over_rows', kernel)
    layer_check.trusted.cache_clear()
    caplog.clear()
    expected = dataclasses.replace(compute, recurrence_kernel='') if reason else compute
    assert layer_check.verify(compute, [cfg]) == expected
    assert reason in caplog.text and caplog.text.count('XLA computes all of them') == bool(reason)
  assert layer_check.verify(compute, [tiny.config()]) == compute


def test_a_changed_formula_is_checked_again(monkeypatch):
  read, before = pathlib.Path.read_bytes, kernel_check._key('recurrence', 'bfloat16', HEADS)
  monkeypatch.setattr(pathlib.Path, 'read_bytes', lambda p: read(p) + b'#' * (p.name == 'recurrence_chunk.py'))
  assert kernel_check._key('recurrence', 'bfloat16', HEADS) != before


def test_the_errors_of_a_right_kernel_are_small(interpreted):
  errors, by_tpu, by_channel = (
    layer_check.errors(layer_check.RECURRENCE, HEADS._replace(**case), 'bfloat16')
    for case in ({}, dict(kernel='mosaic'), dict(channels=16))
  )
  of_tokens = {'out of a token', 'state of a token'}
  assert {*errors} == of_tokens | {'out', 'state', 'q', 'k', 'v', 'log_decay', 'beta', 'state before'}
  assert max(errors.values()) < 0.02 and kernel_check.judge(lambda: errors) == ''
  assert {*by_tpu} == {*errors} - of_tokens and max(by_tpu.values()) < 0.02
  assert {*by_channel} == of_tokens and max(by_channel.values()) < 0.01


def test_choices_of_a_run_name_what_computes_the_recurrence(tmp_path):
  choices = {}
  kimi = dict(family='kimi_linear', num_layers=3, num_kv_heads=2, gate_rank=16)
  for name, fields in (
    ('dense', {}),
    ('hybrid', dict(family='qwen3_5_text', num_layers=3) | SIZES),
    ('kimi', kimi | SIZES),
  ):
    (prepared,) = prepare.prepare_all(tiny.run_config(tiny.folder(tmp_path / name, **fields)))
    try:
      placed = place.place_stage(prepared)
    finally:
      prepared.close()
    for case in 'cpu', 'gpu', 'tpu':
      compute = placed.compute if case == 'cpu' else compute_for(case, 'bfloat16', 'none')
      choices[name, case] = dataclasses.replace(placed, compute=compute).choices.get('recurrence')
  assert choices == {
    ('dense', 'cpu'): None,
    ('dense', 'gpu'): None,
    ('dense', 'tpu'): None,
    ('hybrid', 'cpu'): 'XLA (cpu)',
    ('hybrid', 'gpu'): 'kernel (gpu)',
    ('hybrid', 'tpu'): 'kernel for rows (tpu)',
    ('kimi', 'cpu'): 'XLA (cpu)',
    ('kimi', 'gpu'): 'kernel for single tokens (gpu)',
    ('kimi', 'tpu'): 'XLA (tpu)',
  }


if __name__ == '__main__':
  main()
