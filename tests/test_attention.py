"""Attention of `jaxpost.models`: each implementation equals a reference in outputs and gradients; how one is chosen.

The implementations are XLA in chunks, splash (TPU), and a Triton kernel (GPU). Further tests cover the choice by
platform and shape, the check of kernels before a run (`hardware.kernel_check`), meshes of eight devices, and train
steps that are compiled for described accelerators.

Legend: B rows, T tokens, H heads, K kv heads, h head size, hv head size of values.
"""

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys
import types

import children
import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from attention_reference import reference
from test_processes import environment, finish

from jaxpost import models
from jaxpost.distributed import coordination
from jaxpost.distributed.mesh import AXES, Layout, row_shards
from jaxpost.errors import InputError
from jaxpost.hardware import kernel_check, layer_check
from jaxpost.matmul import Compute, compute_for
from jaxpost.models import attention_kernels, attention_triton, attention_xla, context_parallel, decode_kernels, layers
from jaxpost.models.config import Experts
from jaxpost.rollout.sampler_config import SamplerConfig
from jaxpost.stage import place, prepare

CLONE = pathlib.Path(__file__).parents[1]
# Options that a layer may have besides documents and groups of heads.
LAYERS = {
  'plain': {},
  'window': dict(window=40),
  'cap': dict(cap=5.0),
  'sinks': dict(sinks=True),
  'scale': dict(scale=0.3),
  'all': dict(window=150, cap=5.0, sinks=True),
}
SHAPES = {  # T, H, K, h, hv
  'groups': (256, 4, 2, 64, 64),
  'one_kv_head': (256, 3, 1, 64, 64),
  'odd_length': (200, 2, 2, 64, 64),
  'latent': (256, 2, 2, 96, 64),
  'blocks': (1280, 1, 1, 8, 8),  # several blocks, also of each of two stripes
}


def case(shape, *, window=0, cap=0.0, sinks=False, scale=0.0, branches=False):
  """Returns (q, k, v, sinks) of two packed rows, the other arguments of attention, and the gradient of its output."""
  length, heads, kv_heads, size, values = shape
  random = np.random.RandomState(0)

  def draw(*shape):
    return jnp.asarray(random.standard_normal((2, length, *shape)), jnp.float32)

  qkv = draw(heads, size), draw(kv_heads, size), draw(kv_heads, values)
  boundaries = np.array([[0, 30, 31, length - 20], [0, 100, 140, length]])
  token = np.arange(length)
  document = np.stack([np.searchsorted(row, token, side='right') for row in boundaries])
  position = token - np.take_along_axis(boundaries, document - 1, 1)
  segments = np.where(token < length - 20, document, document % 4)
  cfg = tiny.config(num_heads=heads, num_kv_heads=kv_heads, head_dim=size, attention_softcap=cap, attention_scale=scale)
  branch = None
  if branches:  # branches of several lengths, one of a single token, follow a shared part of 10 tokens
    branch_starts = np.array([10, 11, 27, 95, 400, 640])
    branch = np.searchsorted(branch_starts, position, side='right')
    position = np.where(branch, position - branch_starts[branch - 1] + 10, position)
  rows = attention_xla.PackedRows(jnp.asarray(segments, jnp.int32), jnp.asarray(position, jnp.int32), branch)
  options = dict(rows=rows, window=window, cfg=cfg)
  sink = jnp.asarray(random.standard_normal(heads), jnp.float32)
  return (*qkv, sink if sinks else None), options, draw(heads, values)


def output_and_gradients(run, args, g):
  """Returns (output, gradients by q, k, v and sinks) of a compiled program."""
  present = [x for x in args if x is not None]

  def run_both(present, g):
    out, back = jax.vjp(lambda *x: run(*x, *[None] * (4 - len(x))), *present)
    return out, back(g.astype(out.dtype))

  return jax.jit(run_both)(present, g)


def assert_close(actual, expected, tolerance):
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert tiny.largest(a - b) <= tolerance * tiny.largest(b)


def implementation(name, options, compute=tiny.EXACT):
  """Returns the function `reference`, or `layers.attention` with the implementation of that name."""
  run = reference if name == 'reference' else layers.attention
  compute = dataclasses.replace(compute, attention=name)
  return lambda q, k, v, sinks: run(q, k, v, compute=compute, sinks=sinks, **options)


def splash_interpreted(options, n=1):
  """Returns the splash kernel in Pallas' interpreter, in float32, with each row as n stripes."""

  def run(q, k, v, sinks):
    q = attention_xla.scale_queries(q, options['cfg'])
    return jnp.stack(
      [
        attention_kernels.splash(
          q[:, i::n],
          k,
          v,
          options['rows'],
          sinks,
          window=options['window'],
          cfg=options['cfg'],
          stripe=(i, n),
          interpret=True,
        )
        for i in range(n)
      ],
      axis=2,
    ).reshape(*q.shape[:3], v.shape[-1])

  return run


@functools.cache
def expected_results(shape, layer, branches=False):
  args, options, g = case(SHAPES[shape], branches=branches, **LAYERS[layer])
  return output_and_gradients(implementation('reference', options), args, g)


def attend_by_hand(args, options):
  """Computes the output [B, T, H, hv] in numpy from the definition, one query at a time."""
  q, k, v, sinks = (None if x is None else np.asarray(x, float) for x in args)
  cfg, out = options['cfg'], np.zeros((*q.shape[:3], v.shape[-1]))
  segments, position, branch = (x if x is None else np.asarray(x) for x in options['rows'])
  scale = cfg.attention_scale or q.shape[3] ** -0.5
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = [
      s
      for s in range(t + 1)
      if segments[b, s] == segments[b, t]
      and position[b, t] - position[b, s] < (options['window'] or 10**6)
      and (branch is None or branch[b, s] in (0, branch[b, t]))
    ]
    head = n // (q.shape[2] // k.shape[2])
    score = scale * k[b, seen, head] @ q[b, t, n]
    if cfg.attention_softcap:
      score = cfg.attention_softcap * np.tanh(score / cfg.attention_softcap)
    weight = np.exp(score)
    total = weight.sum() + (0 if sinks is None else np.exp(sinks[n]))
    out[b, t, n] = weight @ v[b, seen, head] / total
  return out


@pytest.mark.parametrize('layer', LAYERS)
@pytest.mark.parametrize('branches', [False, True])
def test_reference_equals_attention_computed_by_hand(layer, branches):
  args, options, _ = case((50, 4, 2, 8, 6), branches=branches, **LAYERS[layer])
  expected = attend_by_hand(args, options)
  actual = implementation('reference', options)(*args)
  assert tiny.largest(actual - expected) <= 1e-5 * tiny.largest(expected)


@pytest.mark.parametrize(
  'shape, layer, branches',
  [
    *(('groups', layer, b) for layer in LAYERS for b in (False, True)),
    ('one_kv_head', 'all', False),
    ('odd_length', 'all', True),
    ('latent', 'plain', False),
  ],
)
def test_chunked_attention_equals_reference(shape, layer, branches):
  args, options, g = case(SHAPES[shape], branches=branches, **LAYERS[layer])
  assert_close(
    output_and_gradients(implementation('chunked', options), args, g), expected_results(shape, layer, branches), 1e-5
  )


@pytest.mark.parametrize(
  'length, kind', [(512, {}), (523, dict(cap=5.0, sinks=True, window=150)), (512, dict(branches=True))]
)
def test_long_rows_keep_no_weights(monkeypatch, length, kind):
  """The backward pass computes them again, to the same numbers, in less than half of the temporary memory."""
  args, options, g = case((length, 4, 2, 32, 32), **kind)
  run = implementation('chunked', options, tiny.EXACT)  # in chunks of 64

  def temporary_bytes():
    def loss(present):
      return jnp.sum(run(*present, *[None] * (4 - len(present))) * g)

    return (
      jax.jit(jax.grad(loss)).lower([x for x in args if x is not None]).compile().memory_analysis().temp_size_in_bytes
    )

  kept_bytes, expected = temporary_bytes(), output_and_gradients(run, args, g)
  assert kept_bytes > 2 * 4 * 512 * 512 / 2 * 4  # at least the weights: 2 rows, 4 heads, pairs of tokens, 4 bytes
  monkeypatch.setattr(attention_xla, '_LONG', 100)
  assert temporary_bytes() < kept_bytes / 2
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * tiny.largest(b)),
    output_and_gradients(run, args, g),
    expected,
  )


GRADIENTS_OF_STRIPES = """
import sys
sys.path.insert(0, 'tests')
import jax, jax.numpy as jnp, numpy as np
import test_attention as t, tiny
from jaxpost.models import attention_xla, context_parallel, layers
from jaxpost.distributed.phases import make_layout

layout = make_layout('context=2', 'train')
args, rest, g = t.case((512, 4, 2, 32, 32), cap=5.0, sinks=True, window=150)
order = lambda x: layout(context_parallel.stripe(x, 2), 'batch', 'time')

def run(*args):
  q, k, v = map(order, args[:3])
  out = layers.attention(q, k, v, compute=tiny.EXACT, sinks=args[3],
                            layout=layout, **rest)
  return context_parallel.unstripe(out, 2)

def compiled():
  loss = lambda *args: jnp.sum(run(*args) * g)
  made = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*args).compile()
  return made.memory_analysis().temp_size_in_bytes, made(*args)

right = jax.grad(lambda *args: jnp.sum(t.implementation(
    'reference', rest)(*args) * g), (0, 1, 2, 3))(*args)
kept, one = compiled()
attention_xla._LONG = 100
less, two = compiled()
for found in one, two:
  t.assert_close(found, right, 1e-5)
assert less < kept / 2, (less, kept)
"""


def test_long_rows_split_over_devices_recompute_weights():
  children.run('-c', GRADIENTS_OF_STRIPES, devices=2, timeout=600)


@pytest.mark.parametrize(
  'shape, layer, branches',
  [
    *(('groups', layer, False) for layer in LAYERS),
    *(('groups', layer, True) for layer in ('plain', 'sinks', 'scale')),
    ('one_kv_head', 'all', False),
    ('odd_length', 'all', False),
    ('odd_length', 'sinks', True),
    ('latent', 'plain', False),
    ('latent', 'plain', True),
    ('blocks', 'all', False),
    ('blocks', 'sinks', True),
  ],
)
def test_splash_equals_reference(shape, layer, branches):
  args, options, g = case(SHAPES[shape], branches=branches, **LAYERS[layer])
  assert_close(
    output_and_gradients(splash_interpreted(options), args, g), expected_results(shape, layer, branches), 1e-5
  )


@pytest.mark.parametrize('n', [2, 4])
@pytest.mark.parametrize(
  'shape, layer, branches',
  [
    ('groups', 'plain', False),
    ('groups', 'plain', True),
    ('groups', 'all', False),
    ('odd_length', 'all', False),
    ('odd_length', 'sinks', True),
    ('latent', 'plain', False),
    ('blocks', 'plain', False),
    ('blocks', 'plain', True),
    ('blocks', 'all', False),
  ],
)
def test_splash_of_stripes_equals_reference(shape, layer, branches, n):
  args, options, g = case(SHAPES[shape], branches=branches, **LAYERS[layer])
  assert_close(
    output_and_gradients(splash_interpreted(options, n), args, g), expected_results(shape, layer, branches), 1e-5
  )


def triton_interpreted(options):
  """Returns the Triton kernels in Pallas' interpreter, in float32."""

  def run(q, k, v, sinks):
    q = attention_xla.scale_queries(q, options['cfg'])
    with pytest.MonkeyPatch.context() as patch:
      small = functools.partial(attention_triton.attend, tiles=TILES, interpret=True)
      patch.setattr(attention_triton, 'attend', small)
      return attention_kernels.triton(q, k, v, options['rows'], sinks, window=options['window'], cfg=options['cfg'])

  return run


# Blocks of queries and keys differ in size, so that a test fails where one size is used for the other.
TILES = attention_triton.Tiles(forward=(64, 32, 4, 1), queries=(32, 64, 4, 1), keys=(64, 32, 4, 1))


@pytest.mark.parametrize(
  'shape, layer, branches',
  [
    *(('groups', layer, layer in ('window', 'all')) for layer in LAYERS),
    ('groups', 'plain', True),
    ('one_kv_head', 'all', False),
    ('odd_length', 'all', False),
    ('latent', 'plain', False),
    ('blocks', 'all', True),
  ],
)
def test_triton_equals_reference(shape, layer, branches):
  args, options, g = case(SHAPES[shape], branches=branches, **LAYERS[layer])
  assert_close(
    output_and_gradients(triton_interpreted(options), args, g), expected_results(shape, layer, branches), 1e-5
  )


def test_triton_does_not_read_other_documents():
  """Keys of other documents may be anything: their blocks are not read, and nothing of them is added to a gradient."""
  args, options, g = case((512, 2, 1, 64, 64))
  segments = np.repeat([[1, 2, 3, 4]], 128, axis=1).repeat(2, axis=0)
  options |= dict(rows=attention_xla.PackedRows(jnp.asarray(segments), jnp.tile(jnp.arange(128), (2, 4))))
  out, _ = output_and_gradients(triton_interpreted(options), args, g)
  q, k, v, _ = args
  broken = slice(128, 256)
  broken_kv = [x.at[:, broken].set(jnp.nan) for x in (k, v)]
  actual, _ = output_and_gradients(triton_interpreted(options), (q, *broken_kv, None), g)
  kept = np.r_[0:128, 256:512]
  assert bool((actual[:, kept] == out[:, kept]).all()) and bool(jnp.isnan(actual[:, broken]).all())


def test_triton_does_not_read_other_branches():
  """A document has a shared part and three branches of 128 tokens each; NaN in one branch stays in that branch."""
  args, options, g = case((512, 2, 1, 64, 64))
  branches = np.repeat([[0, 1, 2, 3]], 128, axis=1).repeat(2, axis=0)
  positions = np.arange(512) - 128 * np.maximum(branches - 1, 0)
  options |= dict(rows=attention_xla.PackedRows(jnp.ones((2, 512), jnp.int32), positions, jnp.asarray(branches)))
  out, grads = output_and_gradients(triton_interpreted(options), args, g)
  q, k, v, _ = args
  broken = slice(256, 384)
  broken_kv = [x.at[:, broken].set(jnp.nan) for x in (k, v)]
  actual, actual_grads = output_and_gradients(triton_interpreted(options), (q, *broken_kv, None), g)
  kept = np.r_[0:256, 384:512]
  assert bool((actual[:, kept] == out[:, kept]).all()) and bool(jnp.isnan(actual[:, broken]).all())
  assert bool((actual_grads[0][:, kept] == grads[0][:, kept]).all())  # gradients of queries
  for a, b in zip(actual_grads[1:], grads[1:]):  # not those of the shared part, which all branches read
    assert bool((a[:, 384:] == b[:, 384:]).all() and (a[:, 128:256] == b[:, 128:256]).all())


# --------------------------------------------------------------------- choice


def called_kernels(monkeypatch, compute, **fields):
  """Returns [name of the kernel] if `layers.attention` calls one for this case, else []."""
  args, options, _ = case((300, 4, 2, 64, 64), **fields)
  called = []

  def attend(q, *_, compute, **__):
    called.append(compute.attention)
    return q

  monkeypatch.setattr(attention_kernels, 'attend', attend)
  layers.attention(*args[:3], compute=compute, sinks=args[3], **options)
  return called


def test_platform_dtype_and_shape_select_the_kernel(monkeypatch):
  tpu = compute_for('tpu', 'bfloat16', 'none')
  assert called_kernels(monkeypatch, tpu) == ['splash']
  assert called_kernels(monkeypatch, tpu, **LAYERS['all']) == ['splash']
  assert called_kernels(monkeypatch, tpu, branches=True, sinks=True) == ['splash']
  assert not called_kernels(monkeypatch, tpu, branches=True, cap=5.0)
  for name, windowed in ('splash', False), ('triton', True):
    windows = dataclasses.replace(MODEL, layer_windows=(40, 0))
    assert attention_kernels.supports_branches(name, windows) is windowed
  assert not called_kernels(monkeypatch, compute_for('tpu', 'float32', 'none'))
  gpu = compute_for('gpu', 'bfloat16', 'none')
  assert called_kernels(monkeypatch, gpu) == called_kernels(monkeypatch, gpu, window=40) == ['triton']
  for fields in dict(cap=5.0), dict(sinks=True), dict(branches=True):
    assert called_kernels(monkeypatch, gpu, **fields) == ['triton']
  # Chunks of branches are not contiguous.
  q = jnp.zeros((1, 512, 4, 64))
  for chunked in False, True:
    cfg = types.SimpleNamespace(**vars(MODEL), head_shapes=MODEL.head_shapes, chunked=chunked)
    ids = jnp.zeros((1, 512), int)
    assert attention_kernels.kernel_fits(q, q, ids, gpu, cfg, parts=1) is not chunked
  assert not called_kernels(monkeypatch, compute_for('gpu', 'float32', 'none'))
  old = compute_for('gpu', 'float16', 'none', triton=False)  # a T4, for example
  assert not called_kernels(monkeypatch, old) and not old.decode_kernel and not old.grouped_kernel
  forced = compute_for('gpu', 'float16', 'none', 'triton', triton=False)  # the check of kernels refuses this one
  assert forced.uses_kernel and not forced.decode_kernel and compute_for('tpu', 'bfloat16', 'none').uses_kernel
  assert not called_kernels(monkeypatch, compute_for('cpu', 'bfloat16', 'none'))


@pytest.mark.parametrize(
  'platform, name, dtype, fields, words',
  [
    ('tpu', 'splash', 'float32', {}, 'splash does not support .*dtype=float32'),
    ('tpu', 'splash', 'bfloat16', dict(branches=True, cap=5.0), 'share_prompt'),
    ('gpu', 'triton', 'float32', {}, 'triton does not support .*dtype=float32'),
  ],
)
def test_configured_kernel_that_does_not_support_the_case_is_refused(monkeypatch, platform, name, dtype, fields, words):
  with pytest.raises(InputError, match=f'config.model.attention: .*{words}'):
    called_kernels(monkeypatch, compute_for(platform, dtype, 'none', name), **fields)


@pytest.mark.parametrize('name', ['auto', 'triton'])
def test_triton_is_not_used_for_rows_split_over_context(monkeypatch, name):
  """XLA attends in rows that `context` splits, also in plans, which check no kernel."""
  monkeypatch.setattr(kernel_check, 'errors', None)
  compute = compute_for('gpu', 'bfloat16', 'none', name)
  assert kernel_check.verify(compute, [kernel_check.KernelUse(MODEL, 512, parts=2)]) == compute
  mesh = jax.sharding.AbstractMesh((1, 2, 1, 2, 1), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))
  args, options, _ = case((512, 4, 2, 64, 64))
  run = functools.partial(layers.attention, compute=compute, layout=Layout(mesh), **options)
  if name == 'auto':
    parts = []
    monkeypatch.setattr(context_parallel, 'attend', lambda q, *_, n, **options: parts.append(n) or q)
    assert jax.eval_shape(run, *args[:3]).shape == (2, 512, 4, 64)
    assert parts == [2]
  else:
    with pytest.raises(InputError, match='^config.model.attention: triton does not support rows that a context'):
      jax.eval_shape(run, *args[:3])


def test_run_uses_the_configured_attention(tmp_path, monkeypatch):
  import jaxpost
  from jaxpost.monitor import metrics

  path = tiny.folder(tmp_path / 'model')
  losses, called = {}, []
  for name in ('chunked', 'reference'):
    jaxpost.run(
      tiny.merged(tiny.run_config(path), dict(model=dict(attention='chunked'), train=dict(steps=2))), tmp_path / name
    )
    losses[name] = [r['loss'] for r in metrics.read_rows(tmp_path / name / 'metrics.jsonl') if 'loss' in r]
    monkeypatch.setattr(
      layers, 'attend_in_chunks', lambda *args, **options: called.append(1) or reference(*args, **options)
    )
  assert called and losses['chunked'] == pytest.approx(losses['reference'], rel=1e-5)
  with pytest.raises(InputError, match='splash runs on TPU only'):
    jaxpost.run(tiny.merged(tiny.run_config(path), dict(model=dict(attention='splash'))), tmp_path / 'other')


@pytest.mark.parametrize(
  'platform, name, words',
  [
    ('cpu', 'splash', 'splash runs on TPU only, and this is cpu'),
    ('tpu', 'triton', 'triton runs on GPU only, and this is tpu'),
  ],
)
def test_a_kernel_of_another_platform_is_refused(platform, name, words):
  compute = compute_for(platform, 'bfloat16', 'none', name)
  with pytest.raises(InputError, match=words):
    attention_kernels.check_platform(compute, platform)


# ----------------------------------------------------------------------- check


def one_document(q, k, v, rows, sinks, **options):
  """A kernel with a defect: documents see each other."""
  rows = rows._replace(segment_ids=jnp.ones_like(rows.segment_ids))
  return attention_kernels.splash(q, k, v, rows, sinks, **options, interpret=True)


def no_gradient(q, k, v, *inputs, **options):
  """A kernel with a defect: the gradient of keys is zero."""
  stop = jax.lax.stop_gradient
  return attention_kernels.splash(q, stop(k), v, *inputs, **options, interpret=True)


def not_there(*args, **options):
  """A kernel that calls a function which this version of JAX lacks."""
  return jax.lax.make_splash(*args, **options)


CORRECT_SPLASH = functools.partial(attention_kernels.splash, interpret=True)
MODEL = tiny.config(num_heads=4, num_kv_heads=2, head_dim=64)


def wrong_for_length(wrong, length):
  """Returns a kernel that is `wrong` in rows of this length, and correct in all others."""

  def kernel(q, *inputs, **options):
    return (wrong if q.shape[1] == length else CORRECT_SPLASH)(q, *inputs, **options)

  return kernel


@pytest.fixture
def verify_splash(monkeypatch, tmp_path):
  """verify_splash(kernel, *lengths) checks a kernel for rows of these lengths; no earlier result is known."""
  monkeypatch.setenv('HOME', str(tmp_path))
  kernel_check.trusted.cache_clear()

  def run(kernel, *lengths, cfg=MODEL, parts=1, branches=False, **fields):
    monkeypatch.setitem(attention_kernels.KERNELS, 'splash', kernel)
    compute = dataclasses.replace(compute_for('tpu', 'bfloat16', 'none'), **fields)
    return kernel_check.verify(compute, [kernel_check.KernelUse(cfg, n, parts, branches) for n in lengths])

  yield run
  kernel_check.trusted.cache_clear()


@pytest.mark.parametrize('parts', [1, 2])
def test_a_kernel_is_measured_forward_and_backward(monkeypatch, parts):
  monkeypatch.setitem(attention_kernels.KERNELS, 'splash', CORRECT_SPLASH)
  shape = attention_kernels.attention_shape(
    dataclasses.replace(MODEL, biases=('sinks',), layer_windows=(40, 0)), 256, parts
  )
  assert shape.windows == (0, 40)
  for window in shape.windows:
    error_of = kernel_check.errors('splash', shape, 'bfloat16', window)
    assert set(error_of) == {'out', 'q', 'k', 'v', 'sinks'}
    assert 1e-4 < max(error_of.values()) < 0.03


@pytest.mark.parametrize(
  'wrong, problem',
  [
    (one_document, 'in out'),
    (no_gradient, r'off by 1\.0e\+00 in k'),
    (not_there, 'AttributeError: .* no attribute .make_splash'),
  ],
)
def test_only_shapes_with_wrong_results_fall_back_to_xla(monkeypatch, caplog, verify_splash, wrong, problem):
  compute = verify_splash(wrong_for_length(wrong, 384), 256, 384)
  assert compute.attention == 'splash'
  assert [w.length for w in compute.rejected_shapes] == [384]
  (line,) = [r.message for r in caplog.records if r.levelname == 'WARNING']
  assert 'splash is wrong on' in line and 'rows of 384 tokens' in line
  assert re.search(problem, line)
  kernel_lengths = []
  monkeypatch.setattr(attention_kernels, 'attend', lambda q, *_, **__: kernel_lengths.append(q.shape[1]) or q)
  for length in 256, 384:
    args, options, _ = case((length, 4, 2, 64, 64))
    options['cfg'] = MODEL
    layers.attention(*args[:3], compute=compute, **options)
  assert kernel_lengths == [256]


def test_kernel_that_is_wrong_on_stripes_falls_back_to_xla(monkeypatch, verify_splash):
  """The check covers the stripes of a split row, whose work differs from that of a whole row."""

  def kernel(q, *inputs, stripe=(0, 1), **options):
    part, n = stripe
    return CORRECT_SPLASH(q, *inputs, stripe=(jnp.where(part == 1, 0, part), n), **options)

  assert not verify_splash(kernel, 512).rejected_shapes
  assert [(w.length, w.parts) for w in verify_splash(kernel, 512, parts=2).rejected_shapes] == [(512, 2)]


def test_kernel_that_mixes_branches_falls_back_to_xla_for_them(monkeypatch, verify_splash):
  """Rows with branches are checked unless the model has windows, for which splash does not support branches."""

  def kernel(q, k, v, rows, *inputs, **options):
    return CORRECT_SPLASH(q, k, v, rows._replace(branch_ids=None), *inputs, **options)

  assert not verify_splash(CORRECT_SPLASH, 256, branches=True).rejected_shapes
  windowed = dataclasses.replace(MODEL, layer_windows=(40,))
  assert not verify_splash(kernel, 384, cfg=windowed, branches=True).rejected_shapes
  assert [w.branches for w in verify_splash(kernel, 384, branches=True).rejected_shapes] == [True]


def test_a_shape_is_checked_once(monkeypatch, verify_splash, tmp_path):
  checked, errors = [], kernel_check.errors

  def counted(name, work, dtype, window):
    checked.append((work.length, dtype, window))
    return errors(name, work, dtype, window)

  monkeypatch.setattr(kernel_check, 'errors', counted)
  first = verify_splash(wrong_for_length(one_document, 384), 128, 256, 384, 256)
  assert checked == [(256, 'bfloat16', 0), (384, 'bfloat16', 0)]  # rows of 128 tokens use no kernel
  assert verify_splash(attention_kernels.KERNELS['splash'], 384, 256) == first
  assert len(checked) == 2
  # Another run on this machine has already checked these shapes.
  note = tmp_path / '.cache/jaxpost/attention.json'
  (key,) = json.loads(note.read_text())
  assert jax.__version__ in key and jax.devices()[0].device_kind in key
  kernel_check.trusted.cache_clear()
  assert verify_splash(attention_kernels.KERNELS['splash'], 384, 256) == first
  assert checked[2:] == [(384, 'bfloat16', 0)]
  verify_splash(CORRECT_SPLASH, 256, cfg=dataclasses.replace(MODEL, layer_windows=(40, 0)))
  verify_splash(CORRECT_SPLASH, 256, dtype='float32')  # splash does not support it, so nothing is checked
  assert checked[3:] == [(256, 'bfloat16', 0), (256, 'bfloat16', 40)]
  for damaged in '{"cut', 'null':
    checked.clear()
    note.write_text(damaged)
    kernel_check.trusted.cache_clear()
    verify_splash(CORRECT_SPLASH, 256)
    assert checked == [(256, 'bfloat16', 0)]


def test_xla_attention_and_traced_programs_check_no_kernel(monkeypatch):
  monkeypatch.setattr(kernel_check, 'errors', None)
  compute = compute_for('tpu', 'bfloat16', 'none')
  assert compute.uses_kernel
  for other in (
    compute_for('cpu', 'bfloat16', 'none'),
    *(compute_for(p, 'bfloat16', 'none', 'chunked') for p in ('gpu', 'tpu')),
  ):
    assert not other.uses_kernel
  # A program that is traced looks up the result of the check, and never checks.
  compute = dataclasses.replace(compute, rejected_shapes=(attention_kernels.attention_shape(MODEL, 256, 1),))
  args, options, _ = case((256, 4, 2, 64, 64))
  options['cfg'] = MODEL
  jax.jit(lambda q, k, v: layers.attention(q, k, v, compute=compute, **options)).lower(*args[:3])


def test_kernels_that_jax_cannot_import_are_not_used(monkeypatch, verify_splash, caplog):
  """A later JAX may lack Pallas for Triton: a run goes on without these kernels, with one warning for each."""
  missing = 'attention_triton', 'decode_triton', 'grouped_triton'
  for name in missing:
    monkeypatch.delattr(models, name, raising=False)
    monkeypatch.setitem(sys.modules, f'jaxpost.models.{name}', None)
  layer_check.trusted.cache_clear()
  compute = compute_for('gpu', 'bfloat16', 'none')
  cfg = tiny.config(num_heads=4, num_kv_heads=2, head_dim=64, family='qwen3_moe', experts=Experts(4, 2, 16))
  settled = kernel_check.verify(compute, [kernel_check.KernelUse(cfg, 256)], [cfg])
  assert [x.length for x in settled.rejected_shapes] == [256] and not settled.decode_kernel
  assert not layer_check.verify(settled, [cfg]).grouped_kernel
  assert not decode_kernels.compute_of_decoding(settled, cfg, SamplerConfig(4, 16, 16, (1,))).decode_kernel
  for name, record in zip(missing, caplog.records, strict=True):
    assert f'ModuleNotFoundError: import of jaxpost.models.{name}' in record.message
  layer_check.trusted.cache_clear()


def test_choices_report_what_xla_computes(tmp_path):
  """This is decoding, or rows whose samples share their prompt."""
  folder, shared = tiny.folder(tmp_path / 'model', head_dim=64), dict(train=dict(share_prompt=True))
  windowed = tiny.folder(tmp_path / 'windowed', family='mistral', qk_norm='', layer_windows=(40,))
  for path, platform, overrides, rejected, attention in (
    (folder, 'gpu', dict(), False, 'triton (gpu)'),
    (folder, 'gpu', shared, False, 'triton (gpu)'),
    (folder, 'gpu', dict(), True, 'triton (gpu), decoding by XLA'),
    (folder, 'gpu', dict(rollout=dict(page_size=16)), False, 'triton (gpu)'),
    (folder, 'gpu', dict(rollout=dict(page_size=8)), False, 'triton (gpu), decoding by XLA'),
    (folder, 'gpu', dict(rollout=dict(cache='int8')), False, 'triton (gpu), decoding by XLA'),
    (folder, 'tpu', dict(), False, 'splash (tpu)'),
    (folder, 'tpu', dict(), True, 'splash (tpu), decoding by XLA'),
    (folder, 'tpu', dict(rollout=dict(page_size=128)), False, 'splash (tpu)'),
    (folder, 'tpu', dict(rollout=dict(page_size=16)), False, 'splash (tpu), decoding by XLA'),
    (folder, 'tpu', shared, False, 'splash (tpu)'),
    (windowed, 'tpu', shared, False, 'splash (tpu), by XLA for rows with a shared prompt'),
  ):
    (prepared,) = prepare.prepare_all(tiny.grpo_config(path, **overrides))
    try:
      placed = place.place_stage(prepared)
    finally:
      prepared.close()
    compute = dataclasses.replace(
      compute_for(platform, 'bfloat16', 'none'), **{'decode_kernel': ''} if rejected else {}
    )
    assert dataclasses.replace(placed, compute=compute).choices['model.attention'] == attention


def test_configured_kernel_with_wrong_results_ends_the_run(monkeypatch, verify_splash):
  """Short rows are checked as well, for which `auto` would use no kernel."""
  monkeypatch.setattr(kernel_check, 'errors', lambda name, work, *rest: {'v': float(work.length == 64)})
  for platform, name in ('gpu', 'triton'), ('tpu', 'splash'):
    compute = compute_for(platform, 'bfloat16', 'none', name)
    assert compute.uses_kernel
    assert kernel_check.verify(compute, [kernel_check.KernelUse(MODEL, 256)]) == compute
    with pytest.raises(
      InputError, match=f'attention: {name} is wrong on .* for rows of 64 tokens, .*: off by 1.0e[+]00 in v; '
    ):
      kernel_check.verify(compute, [kernel_check.KernelUse(MODEL, n) for n in (256, 64)])


def test_shape_rejected_by_another_process_is_not_used(monkeypatch, verify_splash):
  reasons = []

  def gather(own):
    reasons.append(own)
    return [own, ['off by 2.0e+00 in v'] * len(own)]

  monkeypatch.setattr(coordination, 'all_gather', gather)
  assert [w.length for w in verify_splash(CORRECT_SPLASH, 256).rejected_shapes] == [256]
  assert [w.length for w in verify_splash(CORRECT_SPLASH, 256).rejected_shapes] == [256]
  assert reasons == [[''], ['']]  # processes compare results each time, also those of earlier checks


VERIFY_AS_RANK = """
import sys
sys.path.insert(0, 'tests')
import tiny
from jaxpost.distributed import cluster
from jaxpost.matmul import compute_for
from jaxpost.hardware import kernel_check as kernel_check_lib
rank = int(sys.argv[2])
cluster.connect(sys.argv[1], 2, rank)
kernel_check_lib.errors = lambda name, work, *rest: {
    'out': float(rank and work.length == 384)}
cfg = tiny.config(head_dim=64)
compute = kernel_check_lib.verify(compute_for('tpu', 'bfloat16', 'none'), [
    kernel_check_lib.KernelUse(cfg, n) for n in (512, 384, 256)])
print([w.length for w in compute.rejected_shapes])
"""


def test_two_processes_agree_on_rejected_shapes(tmp_path):
  """The process of rank 1 finds rows of 384 tokens wrong, and neither process uses the kernel for them."""
  address = children.free_address()
  outputs = finish(
    [
      subprocess.Popen(
        [sys.executable, '-c', VERIFY_AS_RANK, address, str(rank)],
        text=True,
        cwd=CLONE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path) | {'HOME': str(tmp_path / str(rank))},
      )
      for rank in range(2)
    ]
  )
  assert [out.splitlines()[-1] for out, _ in outputs] == ['[384]', '[384]']


def test_all_shapes_of_a_run_are_checked(tmp_path, monkeypatch):
  """They are those of the rows of every role, and the padded lengths in which the sampler reads prompts."""
  from jaxpost.programs.compile import Ledger
  from jaxpost.stage import config as config_lib
  from jaxpost.stage import kernel_uses
  from jaxpost.tools import completions, inference

  def key_of(use):
    return use.model.head_dim, use.length, use.parts, *['branches'] * use.branches

  verified = []
  monkeypatch.setattr(Compute, 'uses_kernel', True)
  monkeypatch.setattr(
    kernel_check, 'verify', lambda compute, uses, decoded=(): (verified.append(set(map(key_of, uses))), compute)[1]
  )
  path = tiny.folder(tmp_path / 'model')
  other = tiny.folder(tmp_path / 'other', head_dim=32)
  size = tiny.config().head_dim

  def uses(config, **options):
    (prepared,) = prepare.prepare_all(config)
    try:
      place.place_stage(prepared, **options)
    finally:
      prepared.close()
    return verified.pop()

  distill = tiny.run_config(path, algorithm='distill', distill=dict(teachers=(other,)), train=dict(row_length=96))
  assert uses(distill) == {(size, 96, 1), (32, 96, 1)}
  with monkeypatch.context() as split:  # student and teacher on meshes of their own
    split.setattr(kernel_uses, 'row_shards', lambda layout: layout)
    (prepared,) = prepare.prepare_all(distill)
    prepared.close()
    assert set(map(key_of, kernel_uses.attention_uses(prepared, dict(train=2, score=4), 96))) == {
      (size, 96, 2),
      (32, 96, 4),
    }
  with pytest.raises(IndexError):  # there is no device to check on
    uses(distill, ledger=Ledger(dry=True))
  rollout = dict(max_prompt_length=100, max_new_tokens=60)
  of_grpo = uses(tiny.grpo_config(path, rollout=rollout))
  assert of_grpo == {(size, n, 1) for n in (32, 64, 128, 160)}
  pairs = tiny.run_config(
    path,
    algorithm='dpo',
    data=dict(path='generated:arithmetic_pairs:max=99,ops=+,split=train,size=40'),
    train=dict(row_length=128),
  )
  assert uses(pairs) == {(size, 128, 1, 'branches')}
  assert uses(tiny.merged(pairs, dict(preference=dict(share_prompt=False)))) == {(size, 128, 1)}
  completions.make_engine(
    inference.from_folder(path, config_lib.parse(distill)['distill']), slots=2, max_prompt=40, max_new_tokens=60
  )
  assert verified.pop() == {(size, n, 1) for n in (32, 64, 100)}


# ---------------------------------------------------------------- many devices

LAYOUTS = (
  'tensor=8',
  'data=2,fsdp=2,tensor=2',
  'fsdp=8',
  'context=8',
  'data=2,context=2,tensor=2',
  'context=2,tensor=4',
)


def main():
  """Prints JSON {layout: relative error} of splash and of decoding on eight devices; a child process runs this."""
  from jaxpost.distributed.phases import make_layout

  kernel = attention_kernels.splash
  attention_kernels.KERNELS['splash'] = functools.partial(kernel, interpret=True)
  attention_kernels.REFUSALS['splash'] = lambda *_: ''  # splash refuses float32 otherwise
  out = {}
  # Layers alike, or of two kinds, with the window as an array.
  for windows, branches in ((), False), ((), True), ((40, 0), False):
    args, options, g = case((128, 8, 2, 16, 16), sinks=True, branches=branches)
    args, options, g = jax.tree.map(
      lambda x: jnp.tile(x, (4,) + (1,) * (x.ndim - 1)) if hasattr(x, 'ndim') and x.ndim > 1 else x, (args, options, g)
    )
    options |= dict(cfg=dataclasses.replace(options['cfg'], layer_windows=windows))
    if windows:
      options |= dict(window=jnp.asarray(40))
    expected = output_and_gradients(implementation('reference', options), args, g)
    for text in LAYOUTS:
      layout = make_layout(text, 'train')
      compute = dataclasses.replace(tiny.EXACT, attention='splash', forced=True)

      def run(q, k, v, sinks, layout=layout, compute=compute, options=options):
        n = row_shards(layout)
        q, k, v = (context_parallel.stripe(x, n) for x in (q, k, v))
        return context_parallel.unstripe(
          layers.attention(q, k, v, compute=compute, sinks=sinks, layout=layout, **options), n
        )

      actual = output_and_gradients(run, args, g)
      out[f'{text} {windows} {branches}'] = max(
        tiny.difference(a, b) for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
      )
  print(json.dumps(out))


def test_sharded_kernels_equal_reference_in_all_layouts():
  errors = children.printed(__file__, devices=8)
  assert len(errors) == 3 * len(LAYOUTS)
  assert {k: x for k, x in errors.items() if not x <= 1e-5} == {}


# ------------------------------------------------------- described accelerators


COMPILE_TRAIN_STEP = r"""
import json, re, sys
from jaxpost.planning import machines
top = machines.parse(sys.argv[1])
machines.set_environment(top)
from jaxpost.planning import aot, dry_run
import dataclasses
import jaxpost.models.model as model_lib
out, kept, mesh = {}, [], sys.argv[3]
queries = 1024 // int((re.findall(r'context=(\d+)', mesh) or [1])[0])
count, fields = aot.cost.count, json.loads(sys.argv[4])
algorithm = 'dpo' if fields.pop('branches', False) else 'sft'
aot.cost.count = lambda *args: (kept.append(args[0]), count(*args))[1]
for name in sys.argv[2], 'chunked':
  p, = dry_run.prepare_all(dict(
      algorithm=algorithm, data=dict(path='none'), model=dict(
          preset='xs', remat='full', attention=name),
      mesh=dict(train=mesh),
      train=dict(batch_size=8, row_length=1024)))
  cfg = dataclasses.replace(p.inputs.model.config, **fields)
  p = dataclasses.replace(p, inputs=dataclasses.replace(p.inputs, model=model_lib.build(cfg)))
  row, = aot.compile_stage(p, top, ('update',)).rows
  out[name] = dict(
      flops=row['totals'].flops, model=row['flops'] / 8,
      # One product of all queries and keys of a device, which has 2 rows.
      product=2 * 2 * 1024**2 * cfg.num_heads // 2 * cfg.head_dim * (
          cfg.num_layers),
      # What has arrays with a place for each query and key.
      pairs=[(re.findall('op_name="([^"]*)', li) or [''])[0]
             for li in kept[-1].splitlines() if re.search(
                 rf'\[[0-9,]*{queries},(?:[0-9]+,)?1024[],]', li)],
      calls=[(re.findall('op_name="([^"]*)', li) or [''])[0]
             for li in kept[-1].splitlines() if re.search(
                 'custom_call_target="(tpu_custom_call|__gpu.xla.gpu.triton)', li)])
print(json.dumps(out))
"""


def compiled_train_step(topology, name, mesh='data=2,fsdp=2,tensor=2', **fields):
  """Returns what the train step compiled for `topology` does, with implementation `name` and with chunked attention."""
  measured = children.printed('-c', COMPILE_TRAIN_STEP, topology, name, mesh, json.dumps(fields), timeout=900)
  return measured[name], measured['chunked']


@described.TPUS
@pytest.mark.long
@pytest.mark.parametrize(
  'fields',
  [
    {},
    dict(num_layers=2, layer_windows=[300, 0], attention_softcap=20.0, biases=['sinks'], num_kv_heads=1),
    dict(num_layers=2, head_dim=256),
    dict(branches=True, num_layers=2, head_dim=128),
  ],
)
def test_a_train_step_with_splash_compiles_for_tpus(fields):
  """Each kind of layer has four kernels: forward, the same recomputed, and two of the backward pass."""
  kernel, chunked = compiled_train_step('v5e:2x4', 'splash', **fields)
  kinds = len(set(fields.get('layer_windows', [0])))
  assert len(kernel['calls']) == 4 * kinds and not chunked['calls']
  assert chunked['pairs'] and not kernel['pairs']
  # Recomputation of the forward pass adds a third.
  assert 1.1 * kernel['model'] < kernel['flops']
  # Splash has 11 products of queries with keys: 2 forward, 2 recomputed, 3 and 4 in the kernels of the backward pass;
  # of the 2 x 2 blocks of a row it computes three. XLA has 2, 2 and 4 products, each of all pairs.
  products = 11 + 6 * 24 / 128 * fields.get('branches', False)  # 24 features keep branches apart in 6 of them
  assert kernel['flops'] - chunked['flops'] == pytest.approx((0.75 * products - 8) * kernel['product'], rel=1e-3)


@pytest.mark.parametrize(
  'tokens, n, window',
  [(1024, 1, 0), (1024, 1, 300), (1280, 2, 0), (600, 2, 0), (4096, 4, 0), (9216, 4, 700), (8192, 8, 128), (5000, 8, 0)],
)
def test_plans_count_the_blocks_of_splash(monkeypatch, tokens, n, window):
  """The plan counts the same blocks as the kernel itself."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as lib

  from jaxpost.planning import kernels

  masks, process = [], lib.mask_info_lib.process_mask

  def record_mask(mask, block, **options):
    out = process(mask, block, **options)
    masks.append((*mask.shape[1:], block[0], np.count_nonzero(out[0].block_mask)))
    return out

  monkeypatch.setattr(lib.mask_info_lib, 'process_mask', record_mask)
  shapes = [jax.ShapeDtypeStruct((1, t, 1, 8), jnp.float32) for t in (tokens // n, tokens, tokens)]
  jax.eval_shape(
    functools.partial(
      attention_kernels.splash, sinks=None, window=window, cfg=tiny.config(), stripe=(0, n), interpret=True
    ),
    *shapes,
    rows=attention_xla.PackedRows(*(jax.ShapeDtypeStruct((1, tokens), jnp.int32),) * 2),
  )
  ((*sizes, blocks),) = set(masks)  # the masks of forward and of dq are the same
  assert kernels.splash_blocks(*sizes, n, window) == blocks


@described.TPUS
@pytest.mark.long
def test_train_step_with_splash_of_stripes_compiles_for_tpus():
  kernel, chunked = compiled_train_step('v5e:2x4', 'splash', 'data=2,context=2,tensor=2')
  assert len(kernel['calls']) == 4 and not chunked['calls']
  assert chunked['pairs'] and not kernel['pairs']
  # The 512 queries of a stripe are one block, so none of its keys is left out.
  assert kernel['flops'] - chunked['flops'] == pytest.approx((11 - 8) * kernel['product'], rel=1e-3)


@described.GPUS
@pytest.mark.long
def test_a_train_step_with_triton_compiles_for_gpus():
  fields = dict(layer_windows=[256, 0] * 2, attention_softcap=20.0, biases=['sinks'])
  kernel, chunked = compiled_train_step('h200:1x1x8', 'triton', **fields)
  assert chunked['pairs'] and not kernel['pairs']
  # Four kernels for each of two kinds of layer: forward, the same recomputed, and two of the backward pass.
  # Loops are unrolled once, so names repeat.
  assert len(set(kernel['calls'])) == 8 and not chunked['calls']
  assert 1.1 * kernel['model'] < kernel['flops'] < chunked['flops']


if __name__ == '__main__':
  main()
