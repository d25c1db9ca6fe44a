"""Attention: each implementation against its definition, both ways; choice.

Legend: B rows, T tokens, H heads, K kv heads, h head size.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from attention_reference import reference
from test_processes import environment, finish, free_address

from jaxpost import models
from jaxpost.distributed import coordination
from jaxpost.distributed.mesh import AXES, Layout, row_shards
from jaxpost.errors import InputError
from jaxpost.hardware import grouped_check, kernel_check, probe
from jaxpost.matmul import Compute, compute_for
from jaxpost.models import (
  attention_kernels,
  attention_triton,
  attention_xla,
  context_parallel,
  decode_triton,
  decoding,
  layers,
)
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
  'blocks': (1280, 1, 1, 8, 8),
}  # two, of a stripe of two


def case(shape, *, window=0, cap=0.0, sinks=False, scale=0.0, branches=False):
  """Arrays of two packed rows, and what tells how to attend."""
  length, heads, kv_heads, size, values = shape
  random = np.random.RandomState(0)

  def draw(*shape):
    return jnp.asarray(random.standard_normal((2, length, *shape)), jnp.float32)

  qkv = draw(heads, size), draw(kv_heads, size), draw(kv_heads, values)
  cuts = np.array([[0, 30, 31, length - 20], [0, 100, 140, length]])
  number = np.arange(length)
  found = np.stack([np.searchsorted(c, number, side='right') for c in cuts])
  at = number - np.take_along_axis(cuts, found - 1, 1)
  segments = np.where(number < length - 20, found, found % 4)
  cfg = tiny.config(num_heads=heads, num_kv_heads=kv_heads, head_dim=size, attention_softcap=cap, attention_scale=scale)
  branch = None
  if branches:  # of several lengths, one of a single token, after a shared part of 10 tokens
    begins = np.array([10, 11, 27, 95, 400, 640])
    branch = np.searchsorted(begins, at, side='right')
    at = np.where(branch, at - begins[branch - 1] + 10, at)
  rows = attention_xla.PackedRows(jnp.asarray(segments, jnp.int32), jnp.asarray(at, jnp.int32), branch)
  rest = dict(rows=rows, window=window, cfg=cfg)
  sink = jnp.asarray(random.standard_normal(heads), jnp.float32)
  return (*qkv, sink if sinks else None), rest, draw(heads, values)


def both_ways(run, args, g):
  """(out, gradients by q, k, v and sinks), compiled."""
  given = [x for x in args if x is not None]

  def whole(given, g):
    out, back = jax.vjp(lambda *x: run(*x, *[None] * (4 - len(x))), *given)
    return out, back(g.astype(out.dtype))

  return jax.jit(whole)(given, g)


def close(ours, right, tolerance):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
    assert tiny.largest(a - b) <= tolerance * tiny.largest(b)


def plain(name, rest, compute=tiny.EXACT):
  """`reference`, or what `layers.attention` takes by that name."""
  run = reference if name == 'reference' else layers.attention
  compute = dataclasses.replace(compute, attention=name)
  return lambda q, k, v, sinks: run(q, k, v, compute=compute, sinks=sinks, **rest)


def interpreted(rest, n=1):
  """Splash, as a TPU would do it, in float32; a row as n stripes."""

  def run(q, k, v, sinks):
    q = attention_xla.scale_queries(q, rest['cfg'])
    return jnp.stack(
      [
        attention_kernels.splash(
          q[:, i::n], k, v, rest['rows'], sinks, window=rest['window'], cfg=rest['cfg'], stripe=(i, n), interpret=True
        )
        for i in range(n)
      ],
      axis=2,
    ).reshape(*q.shape[:3], v.shape[-1])

  return run


@functools.cache
def right(shape, layer, branches=False):
  args, rest, g = case(SHAPES[shape], branches=branches, **LAYERS[layer])
  return both_ways(plain('reference', rest), args, g)


def by_hand(args, rest):
  """[B, T, H, hv] in numpy: one query at a time."""
  q, k, v, sinks = (None if x is None else np.asarray(x, float) for x in args)
  cfg, out = rest['cfg'], np.zeros((*q.shape[:3], v.shape[-1]))
  segments, at, branch = (x if x is None else np.asarray(x) for x in rest['rows'])
  scale = cfg.attention_scale or q.shape[3] ** -0.5
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = [
      s
      for s in range(t + 1)
      if segments[b, s] == segments[b, t]
      and at[b, t] - at[b, s] < (rest['window'] or 10**6)
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
def test_the_reference_is_the_definition(layer, branches):
  args, rest, _ = case((50, 4, 2, 8, 6), branches=branches, **LAYERS[layer])
  right = by_hand(args, rest)
  out = plain('reference', rest)(*args)
  assert tiny.largest(out - right) <= 1e-5 * tiny.largest(right)


@pytest.mark.parametrize(
  'shape, layer, branches',
  [
    *(('groups', layer, b) for layer in LAYERS for b in (False, True)),
    ('one_kv_head', 'all', False),
    ('odd_length', 'all', True),
    ('latent', 'plain', False),
  ],
)
def test_chunks_are_the_reference(shape, layer, branches):
  args, rest, g = case(SHAPES[shape], branches=branches, **LAYERS[layer])
  close(both_ways(plain('chunked', rest), args, g), right(shape, layer, branches), 1e-5)


@pytest.mark.parametrize(
  'length, kind', [(512, {}), (523, dict(cap=5.0, sinks=True, window=150)), (512, dict(branches=True))]
)
def test_long_rows_keep_no_weights(monkeypatch, length, kind):
  """Computed again in the backward pass, to the same numbers."""
  args, rest, g = case((length, 4, 2, 32, 32), **kind)
  run = plain('chunked', rest, tiny.EXACT)  # in chunks of 64

  def temporaries():
    def loss(given):
      return jnp.sum(run(*given, *[None] * (4 - len(given))) * g)

    return (
      jax.jit(jax.grad(loss)).lower([x for x in args if x is not None]).compile().memory_analysis().temp_size_in_bytes
    )

  kept, right = temporaries(), both_ways(run, args, g)
  assert kept > 2 * 4 * 512 * 512 / 2 * 4  # the weights, at least
  monkeypatch.setattr(attention_xla, '_LONG', 100)
  assert temporaries() < kept / 2
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * tiny.largest(b)), both_ways(run, args, g), right
  )


PARTS = """
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

right = jax.grad(lambda *args: jnp.sum(t.plain(
    'reference', rest)(*args) * g), (0, 1, 2, 3))(*args)
kept, one = compiled()
attention_xla._LONG = 100
less, two = compiled()
for found in one, two:
  t.close(found, right, 1e-5)
assert less < kept / 2, (less, kept)
"""


def test_so_do_rows_that_are_split():
  children.run('-c', PARTS, devices=2, timeout=600)


@pytest.mark.parametrize(
  'shape, layer',
  [
    *(('groups', layer) for layer in LAYERS),
    ('one_kv_head', 'all'),
    ('odd_length', 'all'),
    ('latent', 'plain'),
    ('blocks', 'all'),
  ],
)
def test_splash_is_the_reference(shape, layer):
  args, rest, g = case(SHAPES[shape], **LAYERS[layer])
  close(both_ways(interpreted(rest), args, g), right(shape, layer), 1e-5)


@pytest.mark.parametrize('n', [2, 4])
@pytest.mark.parametrize(
  'shape, layer',
  [
    ('groups', 'plain'),
    ('groups', 'all'),
    ('odd_length', 'all'),
    ('latent', 'plain'),
    ('blocks', 'plain'),
    ('blocks', 'all'),
  ],
)
def test_splash_of_stripes_is_the_reference(shape, layer, n):
  args, rest, g = case(SHAPES[shape], **LAYERS[layer])
  close(both_ways(interpreted(rest, n), args, g), right(shape, layer), 1e-5)


def in_triton(rest):
  """The Triton kernels in Pallas' interpreter, in float32."""

  def run(q, k, v, sinks):
    q = attention_xla.scale_queries(q, rest['cfg'])
    with pytest.MonkeyPatch.context() as patch:
      small = functools.partial(attention_triton.attend, tiles=TILES, interpret=True)
      patch.setattr(attention_triton, 'attend', small)
      return attention_kernels.triton(q, k, v, rest['rows'], sinks, window=rest['window'], cfg=rest['cfg'])

  return run


# Other blocks for queries and keys, so that neither is taken for the other.
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
def test_triton_is_the_reference(shape, layer, branches):
  args, rest, g = case(SHAPES[shape], branches=branches, **LAYERS[layer])
  close(both_ways(in_triton(rest), args, g), right(shape, layer, branches), 1e-5)


def test_triton_reads_only_what_is_attended_to():
  """Keys of other documents may be anything: their blocks are not read, and nothing of them is added to a gradient."""
  args, rest, g = case((512, 2, 1, 64, 64))
  segments = np.repeat([[1, 2, 3, 4]], 128, axis=1).repeat(2, axis=0)
  rest |= dict(rows=attention_xla.PackedRows(jnp.asarray(segments), jnp.tile(jnp.arange(128), (2, 4))))
  out, _ = both_ways(in_triton(rest), args, g)
  q, k, v, _ = args
  broken = slice(128, 256)
  bad = [x.at[:, broken].set(jnp.nan) for x in (k, v)]
  ours, _ = both_ways(in_triton(rest), (q, *bad, None), g)
  kept = np.r_[0:128, 256:512]
  assert bool((ours[:, kept] == out[:, kept]).all()) and bool(jnp.isnan(ours[:, broken]).all())


def test_triton_does_not_read_other_branches():
  """A document of a shared part and three branches of 128 tokens each: what is wrong in one stays in it."""
  args, rest, g = case((512, 2, 1, 64, 64))
  branches = np.repeat([[0, 1, 2, 3]], 128, axis=1).repeat(2, axis=0)
  positions = np.arange(512) - 128 * np.maximum(branches - 1, 0)
  rest |= dict(rows=attention_xla.PackedRows(jnp.ones((2, 512), jnp.int32), positions, jnp.asarray(branches)))
  out, grads = both_ways(in_triton(rest), args, g)
  q, k, v, _ = args
  broken = slice(256, 384)
  bad = [x.at[:, broken].set(jnp.nan) for x in (k, v)]
  ours, ours_back = both_ways(in_triton(rest), (q, *bad, None), g)
  kept = np.r_[0:256, 384:512]
  assert bool((ours[:, kept] == out[:, kept]).all()) and bool(jnp.isnan(ours[:, broken]).all())
  assert bool((ours_back[0][:, kept] == grads[0][:, kept]).all())  # of the queries
  for a, b in zip(ours_back[1:], grads[1:]):  # of keys and values: the shared part has queries in all branches
    assert bool((a[:, 384:] == b[:, 384:]).all() and (a[:, 128:256] == b[:, 128:256]).all())


@pytest.mark.parametrize('layer', LAYERS)
@pytest.mark.parametrize('shape', ['groups', 'latent'])
@pytest.mark.parametrize('chunked', [False, True])
def test_decoding_in_triton_is_that_in_xla(monkeypatch, shape, layer, chunked):
  """In slots that are empty, short, and full, and with entries over which several blocks of the device are split."""
  (_, heads, kv_heads, size, values), fields = SHAPES[shape], LAYERS[layer]
  window = fields.get('window', 0)
  if chunked and not window:
    pytest.skip('chunks are a kind of window')
  random = np.random.RandomState(0)
  room, block, step = 600, 8, jnp.int32(5)
  filled = jnp.array([0, 1, 65, 599, 1000])  # the last one is idle: its number goes on

  def draw(*shape):
    return jnp.asarray(random.standard_normal((len(filled), *shape)), jnp.float32)

  q = draw(1, heads, size)
  cache, recent = ((draw(kv_heads, n, size), draw(kv_heads, n, values)) for n in (room, block))
  cfg = tiny.config(num_heads=heads, num_kv_heads=kv_heads, head_dim=size, attention_softcap=fields.get('cap', 0.0))
  if chunked:
    cfg = types.SimpleNamespace(
      **{n: getattr(cfg, n) for n in ('head_dim', 'attention_scale', 'attention_softcap')}, chunked=True
    )
  sinks = draw(heads)[0] if fields.get('sinks') else None
  given = dict(compute=tiny.EXACT, window=window, cfg=cfg, sinks=sinks)
  right = decoding.cached_attention(q, cache, recent, filled, step, **given)
  monkeypatch.setattr(decode_triton, 'attend', functools.partial(decode_triton.attend, interpret=True))
  out = decode_triton.cached_attention(q, cache, recent, filled, step, **given)
  if window:  # XLA counts a window from where an idle slot has come to
    out, right = out[:-1], right[:-1]
  assert tiny.largest(out - right) <= 1e-5 * tiny.largest(right)


@pytest.mark.parametrize('size, values', [(64, 64), (128, 128), (96, 256), (192, 128), (256, 256)])
def test_decoding_fits_the_shared_memory_of_small_gpus(monkeypatch, size, values):
  """An L4 has 99 KiB for a block; the compiler keeps the queries, and keys and values of all stages but one, there."""
  asked, call = [], decode_triton.pl.pallas_call

  def kept(*args, compiler_params, **more):
    asked.append(compiler_params.num_stages)
    return call(*args, compiler_params=compiler_params, **more)

  monkeypatch.setattr(decode_triton.pl, 'pallas_call', kept)
  arrays = [[jnp.zeros((4, 2, n, h), jnp.bfloat16) for h in (size, values)] for n in (512, 32)]
  run = functools.partial(decode_triton.attend, window=0, cfg=tiny.config(), interpret=True)
  jax.eval_shape(run, jnp.zeros((4, 2, 16, size)), *map(tuple, arrays), jnp.zeros(4, int), jnp.int32(0), None)
  (stages,) = asked
  wide, wide_v = map(attention_triton.padded, (size, values))
  assert ((stages - 1) * decode_triton._ENTRIES * (wide + wide_v) + 16 * wide) * 2 + 1024 <= 99 * 1024


# --------------------------------------------------------------------- choice


def taken(monkeypatch, compute, **fields):
  """Returns whether `attention` asks a kernel for this shape, and which kernel."""
  args, rest, _ = case((300, 4, 2, 64, 64), **fields)
  asked = []

  def attend(q, *rest, compute, **options):
    asked.append(compute.attention)
    return q

  monkeypatch.setattr(attention_kernels, 'attend', attend)
  layers.attention(*args[:3], compute=compute, sinks=args[3], **rest)
  return asked


def test_the_platform_chooses(monkeypatch):
  tpu = compute_for('tpu', 'bfloat16', 'none')
  assert taken(monkeypatch, tpu) == ['splash']
  assert taken(monkeypatch, tpu, **LAYERS['all']) == ['splash']
  assert not taken(monkeypatch, tpu, branches=True)
  assert not taken(monkeypatch, compute_for('tpu', 'float32', 'none'))
  gpu = compute_for('gpu', 'bfloat16', 'none')
  assert taken(monkeypatch, gpu) == taken(monkeypatch, gpu, window=40) == ['triton']
  for fields in dict(cap=5.0), dict(sinks=True), dict(branches=True):
    assert taken(monkeypatch, gpu, **fields) == ['triton']
  # Chunks of branches are not contiguous.
  q = jnp.zeros((1, 512, 4, 64))
  for chunked in False, True:
    cfg = types.SimpleNamespace(**vars(SETTLED), head_shapes=SETTLED.head_shapes, chunked=chunked)
    ids = jnp.zeros((1, 512), int)
    assert attention_kernels.kernel_fits(q, q, ids, gpu, cfg, parts=1) is not chunked
  assert not taken(monkeypatch, compute_for('gpu', 'float32', 'none'))
  old = compute_for('gpu', 'float16', 'none', triton=False)  # a T4, for example
  assert not taken(monkeypatch, old) and not old.decode_kernel and not old.grouped_kernel
  forced = compute_for('gpu', 'float16', 'none', 'triton', triton=False)  # which its check refuses
  assert forced.uses_kernel and not forced.decode_kernel and compute_for('tpu', 'bfloat16', 'none').uses_kernel
  assert not taken(monkeypatch, compute_for('cpu', 'bfloat16', 'none'))


@pytest.mark.parametrize(
  'platform, name, dtype, fields, words',
  [
    ('tpu', 'splash', 'float32', {}, 'splash does not support .*dtype=float32'),
    ('tpu', 'splash', 'bfloat16', dict(branches=True), 'share_prompt'),
    ('gpu', 'triton', 'float32', {}, 'triton does not support .*dtype=float32'),
  ],
)
def test_what_is_asked_for_and_cannot_be_is_refused_by_name(monkeypatch, platform, name, dtype, fields, words):
  with pytest.raises(InputError, match=f'config.model.attention: .*{words}'):
    taken(monkeypatch, compute_for(platform, dtype, 'none', name), **fields)


@pytest.mark.parametrize('name', ['auto', 'triton'])
def test_triton_is_not_asked_for_parts_of_rows(monkeypatch, name):
  """Rows that `context` splits are XLA's, in plans as well, which check no kernel."""
  monkeypatch.setattr(kernel_check, 'errors', None)
  compute = compute_for('gpu', 'bfloat16', 'none', name)
  assert kernel_check.verify(compute, [kernel_check.KernelUse(SETTLED, 512, parts=2)]) == compute
  mesh = jax.sharding.AbstractMesh((1, 2, 1, 2, 1), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))
  args, rest, _ = case((512, 4, 2, 64, 64))
  run = functools.partial(layers.attention, compute=compute, layout=Layout(mesh), **rest)
  if name == 'auto':
    parts = []
    monkeypatch.setattr(context_parallel, 'attend', lambda q, *_, n, **rest: parts.append(n) or q)
    assert jax.eval_shape(run, *args[:3]).shape == (2, 512, 4, 64)
    assert parts == [2]
  else:
    with pytest.raises(InputError, match='^config.model.attention: triton does not support rows that a context'):
      jax.eval_shape(run, *args[:3])


def test_a_run_takes_the_one_it_is_told(tmp_path, monkeypatch):
  import jaxpost
  from jaxpost.monitor import metrics

  path = tiny.folder(tmp_path / 'model')
  losses, called = {}, []
  for name in ('chunked', 'reference'):
    jaxpost.run(
      tiny.merged(tiny.run_config(path), dict(model=dict(attention='chunked'), train=dict(steps=2))), tmp_path / name
    )
    losses[name] = [r['loss'] for r in metrics.read_rows(tmp_path / name / 'metrics.jsonl') if 'loss' in r]
    monkeypatch.setattr(layers, 'attend_in_chunks', lambda *args, **rest: called.append(1) or reference(*args, **rest))
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


def one_document(q, k, v, rows, sinks, **rest):
  """Wrong: documents see each other."""
  rows = rows._replace(segment_ids=jnp.ones_like(rows.segment_ids))
  return attention_kernels.splash(q, k, v, rows, sinks, **rest, interpret=True)


def no_gradient(q, k, v, *rest, **more):
  """Wrong: backward."""
  stop = jax.lax.stop_gradient
  return attention_kernels.splash(q, stop(k), v, *rest, **more, interpret=True)


def not_there(*args, **more):
  """Stands for a version of JAX in which the function has another name."""
  return jax.lax.make_splash(*args, **more)


GOOD = functools.partial(attention_kernels.splash, interpret=True)
SETTLED = tiny.config(num_heads=4, num_kv_heads=2, head_dim=64)


def of_one_length(wrong, length):
  """Wrong in rows of that length alone."""

  def kernel(q, *rest, **more):
    return (wrong if q.shape[1] == length else GOOD)(q, *rest, **more)

  return kernel


@pytest.fixture
def settle(monkeypatch, tmp_path):
  """settle(kernel, *lengths) of rows as a TPU would; nothing known before."""
  monkeypatch.setenv('HOME', str(tmp_path))
  kernel_check.trusted.cache_clear()

  def run(kernel, *lengths, cfg=SETTLED, parts=1, **fields):
    monkeypatch.setitem(attention_kernels.KERNELS, 'splash', kernel)
    compute = dataclasses.replace(compute_for('tpu', 'bfloat16', 'none'), **fields)
    return kernel_check.verify(compute, [kernel_check.KernelUse(cfg, n, parts) for n in lengths])

  yield run
  kernel_check.trusted.cache_clear()


@pytest.mark.parametrize('parts', [1, 2])
def test_a_kernel_is_measured_forward_and_backward(monkeypatch, parts):
  monkeypatch.setitem(attention_kernels.KERNELS, 'splash', GOOD)
  work = attention_kernels.attention_shape(
    dataclasses.replace(SETTLED, biases=('sinks',), layer_windows=(40, 0)), 256, parts
  )
  assert work.windows == (0, 40)
  for window in work.windows:
    found = kernel_check.errors('splash', work, 'bfloat16', window)
    assert set(found) == {'out', 'q', 'k', 'v', 'sinks'}
    assert 1e-4 < max(found.values()) < 0.03


@pytest.mark.parametrize(
  'wrong, where',
  [
    (one_document, 'in out'),
    (no_gradient, r'off by 1\.0e\+00 in k'),
    (not_there, 'AttributeError: .* no attribute .make_splash'),
  ],
)
def test_a_shape_that_is_wrong_goes_to_xla_and_others_do_not(monkeypatch, caplog, settle, wrong, where):
  compute = settle(of_one_length(wrong, 384), 256, 384)
  assert compute.attention == 'splash'
  assert [w.length for w in compute.rejected_shapes] == [384]
  (line,) = [r.message for r in caplog.records if r.levelname == 'WARNING']
  assert 'splash is wrong on' in line and 'rows of 384 tokens' in line
  assert re.search(where, line)
  asked = []
  monkeypatch.setattr(attention_kernels, 'attend', lambda q, *rest, **options: asked.append(q.shape[1]) or q)
  for length in 256, 384:
    args, rest, _ = case((length, 4, 2, 64, 64))
    rest['cfg'] = SETTLED
    layers.attention(*args[:3], compute=compute, **rest)
  assert asked == [256]


def test_a_wrong_stripe_goes_to_xla(monkeypatch, settle):
  """The check covers the stripes of a split row, whose work differs from that of a whole row."""

  def kernel(q, *rest, stripe=(0, 1), **more):
    part, n = stripe
    return GOOD(q, *rest, stripe=(jnp.where(part == 1, 0, part), n), **more)

  assert not settle(kernel, 512).rejected_shapes
  assert [(w.length, w.parts) for w in settle(kernel, 512, parts=2).rejected_shapes] == [(512, 2)]


def test_a_shape_is_checked_once(monkeypatch, settle, tmp_path):
  asked, errors = [], kernel_check.errors

  def counted(name, work, dtype, window):
    asked.append((work.length, dtype, window))
    return errors(name, work, dtype, window)

  monkeypatch.setattr(kernel_check, 'errors', counted)
  first = settle(of_one_length(one_document, 384), 128, 256, 384, 256)
  assert asked == [(256, 'bfloat16', 0), (384, 'bfloat16', 0)]  # 128: none
  assert settle(attention_kernels.KERNELS['splash'], 384, 256) == first
  assert len(asked) == 2
  # Another run on this machine has already checked these shapes.
  note = tmp_path / '.cache/jaxpost/attention.json'
  (key,) = json.loads(note.read_text())
  assert jax.__version__ in key and jax.devices()[0].device_kind in key
  kernel_check.trusted.cache_clear()
  assert settle(attention_kernels.KERNELS['splash'], 384, 256) == first
  assert asked[2:] == [(384, 'bfloat16', 0)]
  settle(GOOD, 256, cfg=dataclasses.replace(SETTLED, layer_windows=(40, 0)))
  settle(GOOD, 256, dtype='float32')  # which it refuses by itself
  assert asked[3:] == [(256, 'bfloat16', 0), (256, 'bfloat16', 40)]
  for damaged in '{"cut', 'null':
    asked.clear()
    note.write_text(damaged)
    kernel_check.trusted.cache_clear()
    settle(GOOD, 256)
    assert asked == [(256, 'bfloat16', 0)]


def test_nothing_is_checked_where_there_is_no_choice(monkeypatch):
  monkeypatch.setattr(kernel_check, 'errors', None)
  compute = compute_for('tpu', 'bfloat16', 'none')
  assert compute.uses_kernel
  for other in (
    compute_for('cpu', 'bfloat16', 'none'),
    *(compute_for(p, 'bfloat16', 'none', 'chunked') for p in ('gpu', 'tpu')),
  ):
    assert not other.uses_kernel
  # And never by a program: what is settled is only looked up.
  compute = dataclasses.replace(compute, rejected_shapes=(attention_kernels.attention_shape(SETTLED, 256, 1),))
  args, rest, _ = case((256, 4, 2, 64, 64))
  rest['cfg'] = SETTLED
  jax.jit(lambda q, k, v: layers.attention(q, k, v, compute=compute, **rest)).lower(*args[:3])


def test_a_wrong_kernel_for_single_tokens_is_not_used(monkeypatch, settle, caplog):
  """Also where attention is asked for by name: that names no kernel of decoding. No model that samples, no check."""
  monkeypatch.setattr(kernel_check, '_DECODED', ((4, 4, 96, 8), (3, 5, 50, 16)))
  attend, calls = decode_triton.attend, []

  def right(*args, **more):
    calls.append(args[0].shape)
    return attend(*args, interpret=True, **more)

  def wrong(q, cache, recent, filled, *rest, **more):
    return right(q, cache, recent, filled // 2, *rest, **more)

  for name in 'auto', 'triton':
    compute = compute_for('gpu', 'bfloat16', 'none', name)
    for kernel, used in ((wrong, False), (right, True)):
      monkeypatch.setattr(decode_triton, 'attend', kernel)
      kernel_check.trusted.cache_clear()
      settled = kernel_check.verify(compute, [], [SETTLED])
      assert settled == dataclasses.replace(compute, decode_kernel=used)
    assert 'decode is wrong on' in caplog.text
    (key,) = json.loads((probe.cache_file('attention.json')).read_text())
    assert key.startswith('decode ')
    probe.cache_file('attention.json').unlink()
  calls.clear()
  assert kernel_check.verify(compute, []) == compute and not calls


def test_kernels_that_jax_cannot_import_are_not_used(monkeypatch, settle, caplog):
  """As all of these once JAX has no Pallas for Triton; a run goes on, with a line for each of them."""
  missing = 'attention_triton', 'decode_triton', 'grouped_triton'
  for name in missing:
    monkeypatch.delattr(models, name, raising=False)
    monkeypatch.setitem(sys.modules, f'jaxpost.models.{name}', None)
  grouped_check.trusted.cache_clear()
  compute = compute_for('gpu', 'bfloat16', 'none')
  cfg = tiny.config(num_heads=4, num_kv_heads=2, head_dim=64, family='qwen3_moe', experts=Experts(4, 2, 16))
  settled = kernel_check.verify(compute, [kernel_check.KernelUse(cfg, 256)], [cfg])
  assert [x.length for x in settled.rejected_shapes] == [256] and not settled.decode_kernel
  assert not grouped_check.verify(settled, [cfg]).grouped_kernel
  assert not attention_kernels.compute_of_decoding(settled, cfg, SamplerConfig(4, 16, 16, (1,))).decode_kernel
  for name, record in zip(missing, caplog.records, strict=True):
    assert f'ModuleNotFoundError: import of jaxpost.models.{name}' in record.message
  grouped_check.trusted.cache_clear()


def test_a_run_says_what_decodes(tmp_path):
  folder = tiny.folder(tmp_path / 'model', head_dim=64)
  for over, rejected, said in (
    (dict(), False, 'triton (gpu)'),
    (dict(), True, 'triton (gpu), decoding by XLA'),
    (dict(rollout=dict(page_size=16)), False, 'triton (gpu), decoding by XLA'),
  ):
    (prepared,) = prepare.prepare_all(tiny.grpo_config(folder, **over))
    try:
      placed = place.place_stage(prepared)
    finally:
      prepared.close()
    compute = dataclasses.replace(
      compute_for('gpu', 'bfloat16', 'none'), **{'decode_kernel': False} if rejected else {}
    )
    assert dataclasses.replace(placed, compute=compute).choices['model.attention'] == said


def test_what_is_asked_for_by_name_and_wrong_ends_the_run(monkeypatch, settle):
  """This holds for short rows as well, for which `auto` would take no kernel."""
  monkeypatch.setattr(kernel_check, 'errors', lambda name, work, *rest: {'v': float(work.length == 64)})
  for platform, name in ('gpu', 'triton'), ('tpu', 'splash'):
    compute = compute_for(platform, 'bfloat16', 'none', name)
    assert compute.uses_kernel
    assert kernel_check.verify(compute, [kernel_check.KernelUse(SETTLED, 256)]) == compute
    with pytest.raises(
      InputError, match=f'attention: {name} is wrong on .* for rows of 64 tokens, .*: off by 1.0e[+]00 in v; '
    ):
      kernel_check.verify(compute, [kernel_check.KernelUse(SETTLED, n) for n in (256, 64)])


def test_what_one_process_finds_wrong_none_uses(monkeypatch, settle):
  whys = []

  def gather(mine):
    whys.append(mine)
    return [mine, ['off by 2.0e+00 in v'] * len(mine)]

  monkeypatch.setattr(coordination, 'all_gather', gather)
  assert [w.length for w in settle(GOOD, 256).rejected_shapes] == [256]
  assert [w.length for w in settle(GOOD, 256).rejected_shapes] == [256]
  assert whys == [[''], ['']]  # asked each time, whatever a process knows


EACH = """
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


def test_processes_agree_on_what_is_wrong(tmp_path):
  """One of them finds a shape wrong: neither uses it."""
  address = free_address()
  said = finish(
    [
      subprocess.Popen(
        [sys.executable, '-c', EACH, address, str(rank)],
        text=True,
        cwd=CLONE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path) | {'HOME': str(tmp_path / str(rank))},
      )
      for rank in range(2)
    ]
  )
  assert [out.splitlines()[-1] for out, _ in said] == ['[384]', '[384]']


def test_all_shapes_of_a_run_are_checked(tmp_path, monkeypatch):
  """Rows of every role, and what the sampler reads texts in."""
  from jaxpost.programs.compile import Ledger
  from jaxpost.stage import config as config_lib
  from jaxpost.stage import kernel_uses, place, prepare
  from jaxpost.tools import completions, inference

  def seen(use):
    return use.model.head_dim, use.length, use.parts

  asked = []
  monkeypatch.setattr(Compute, 'uses_kernel', True)
  monkeypatch.setattr(
    kernel_check, 'verify', lambda compute, uses, decoded=(): (asked.append(set(map(seen, uses))), compute)[1]
  )
  path = tiny.folder(tmp_path / 'model')
  other = tiny.folder(tmp_path / 'other', head_dim=32)
  size = tiny.config().head_dim

  def uses(config, **kit):
    (p,) = prepare.prepare_all(config)
    try:
      place.place_stage(p, **kit)
    finally:
      p.close()
    return asked.pop()

  distill = tiny.run_config(path, algorithm='distill', distill=dict(teachers=(other,)), train=dict(row_length=96))
  assert uses(distill) == {(size, 96, 1), (32, 96, 1)}
  with monkeypatch.context() as split:  # a student here, a teacher there
    split.setattr(kernel_uses, 'row_shards', lambda layout: layout)
    (p,) = prepare.prepare_all(distill)
    p.close()
    assert set(map(seen, kernel_uses.attention_uses(p, dict(train=2, score=4), 96))) == {(size, 96, 2), (32, 96, 4)}
  with pytest.raises(IndexError):  # a device that is only described
    uses(distill, ledger=Ledger(dry=True))
  rollout = dict(max_prompt_length=100, max_new_tokens=60)
  found = uses(tiny.grpo_config(path, rollout=rollout))
  assert found == {(size, n, 1) for n in (32, 64, 128, 160)}
  pairs = tiny.run_config(
    path,
    algorithm='dpo',
    data=dict(path='generated:arithmetic_pairs:max=99,ops=+,split=train,size=40'),
    train=dict(row_length=128),
  )
  assert uses(pairs) == set()  # pairs that share their prompt go to XLA
  assert uses(tiny.merged(pairs, dict(preference=dict(share_prompt=False)))) == {(size, 128, 1)}
  completions.make_engine(
    inference.from_folder(path, config_lib.parse(distill)['distill']), slots=2, max_prompt=40, max_new_tokens=60
  )
  assert asked.pop() == {(size, n, 1) for n in (32, 64, 100)}


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
  """Prints {layout: error} of splash, each device with its own share."""
  from jaxpost.distributed.phases import make_layout

  kernel = attention_kernels.splash
  attention_kernels.KERNELS['splash'] = functools.partial(kernel, interpret=True)
  attention_kernels.REFUSALS['splash'] = lambda *_: ''  # in float32, too
  out = {}
  for windows in (), (40, 0):  # alike, or one of two under a scan
    args, rest, g = case((128, 8, 2, 16, 16), sinks=True)
    args, rest, g = jax.tree.map(
      lambda x: jnp.tile(x, (4,) + (1,) * (x.ndim - 1)) if hasattr(x, 'ndim') and x.ndim > 1 else x, (args, rest, g)
    )
    rest |= dict(cfg=dataclasses.replace(rest['cfg'], layer_windows=windows))
    if windows:
      rest |= dict(window=jnp.asarray(40))
    right = both_ways(plain('reference', rest), args, g)
    for text in LAYOUTS:
      layout = make_layout(text, 'train')
      compute = dataclasses.replace(tiny.EXACT, attention='splash', forced=True)

      def run(q, k, v, sinks, layout=layout, compute=compute, rest=rest):
        n = row_shards(layout)
        q, k, v = (context_parallel.stripe(x, n) for x in (q, k, v))
        return context_parallel.unstripe(
          layers.attention(q, k, v, compute=compute, sinks=sinks, layout=layout, **rest), n
        )

      ours = both_ways(run, args, g)
      out[f'{text} {windows}'] = max(
        tiny.largest(a - b) / tiny.largest(b)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True)
      )
  print(json.dumps(out | decoded()))


def decoded():
  """{layout: error} of the kernel for single tokens; more devices than kv heads have all of them."""
  from jaxpost.distributed.phases import make_layout

  out, random = {}, np.random.RandomState(0)
  run = functools.partial(decode_triton.attend, interpret=True)
  cfg = tiny.config(num_heads=4, num_kv_heads=2, head_dim=16)

  def draw(*shape):
    return jnp.asarray(random.standard_normal(shape), jnp.float32)

  given = draw(8, 1, 4, 16), *((draw(8, 2, n, 16), draw(8, 2, n, 16)) for n in (40, 4)), jnp.arange(8) * 5, jnp.int32(2)
  for text in 'data=4,tensor=2', 'data=2,tensor=4':
    for sinks in (None, draw(4)):
      more = dict(compute=tiny.EXACT, window=0, cfg=cfg, sinks=sinks)
      layout = make_layout(text, 'rollout', '--mesh')
      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_triton, 'attend', run)
        ours = jax.jit(functools.partial(decode_triton.cached_attention, layout=layout, **more))(*given)
      right = decoding.cached_attention(*given, **more)
      out[f'decode {text} {sinks is not None}'] = tiny.largest(ours - right) / tiny.largest(right)
  return out


def test_each_device_has_its_own_rows_heads_and_stripe():
  run = children.run(__file__, devices=8)
  found = json.loads(run.stdout)
  assert len(found) == 2 * len(LAYOUTS) + 4
  assert {k: x for k, x in found.items() if not x <= 1e-5} == {}


# ------------------------------------------------------- described accelerators


def needs(package, extra):
  return pytest.mark.skipif(
    importlib.util.find_spec(package) is None, reason=f"no {package}, which compiles for these: pip install '{extra}'"
  )


_UPDATE = r"""
import json, re, sys
from jaxpost.planning import machines
top = machines.parse(sys.argv[1])
machines.set_environment(top)
from jaxpost.planning import aot, dry_run
import dataclasses
import jaxpost.models.model as model_lib
out, kept, mesh = {}, [], sys.argv[3]
queries = 1024 // int((re.findall(r'context=(\d+)', mesh) or [1])[0])
count = aot.cost.count
aot.cost.count = lambda *args: (kept.append(args[0]), count(*args))[1]
for name in sys.argv[2], 'chunked':
  p, = dry_run.prepare_all(dict(
      algorithm='sft', data=dict(path='none'), model=dict(
          preset='xs', remat='full', attention=name),
      mesh=dict(train=mesh),
      train=dict(batch_size=8, row_length=1024)))
  cfg = dataclasses.replace(p.inputs.model.config, **json.loads(sys.argv[4]))
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


def described(topology, name, mesh='data=2,fsdp=2,tensor=2', **fields):
  """{implementation: what its sharded train step does}, compiled for it."""
  done = subprocess.run(
    [sys.executable, '-c', _UPDATE, topology, name, mesh, json.dumps(fields)],
    capture_output=True,
    text=True,
    timeout=900,
    cwd=CLONE,
    env=os.environ | {'PYTHONPATH': str(CLONE)},
  )
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads(done.stdout.splitlines()[-1])
  return found[name], found['chunked']


@needs('libtpu', 'jax[tpu]')
@pytest.mark.long
@pytest.mark.parametrize(
  'fields',
  [
    {},
    dict(num_layers=2, layer_windows=[300, 0], attention_softcap=20.0, biases=['sinks'], num_kv_heads=1),
    dict(num_layers=1, head_dim=256),
  ],
)
def test_a_train_step_with_splash_compiles_for_tpus(fields):
  """Forward, again for the backward pass, and two kernels of that."""
  ours, plain = described('v5e:2x4', 'splash', **fields)
  kinds = len(set(fields.get('layer_windows', [0])))
  assert len(ours['calls']) == 4 * kinds and not plain['calls']
  assert plain['pairs'] and not ours['pairs']
  # Recomputation adds a third.
  assert 1.1 * ours['model'] < ours['flops']
  # Products of queries with keys: 2 forward, 2 again, 3 and 4 backward, of two
  # blocks three quarters; XLA has 2, 2 and 4, of one chunk all.
  assert ours['flops'] - plain['flops'] == pytest.approx((0.75 * 11 - 8) * ours['product'], rel=1e-3)


@pytest.mark.parametrize(
  'tokens, n, window',
  [(1024, 1, 0), (1024, 1, 300), (1280, 2, 0), (600, 2, 0), (4096, 4, 0), (9216, 4, 700), (8192, 8, 128), (5000, 8, 0)],
)
def test_plans_count_the_blocks_of_splash(monkeypatch, tokens, n, window):
  """The plan counts the same blocks as the kernel itself."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as lib

  from jaxpost.planning import kernels

  made, process = [], lib.mask_info_lib.process_mask

  def kept(mask, block, **more):
    out = process(mask, block, **more)
    made.append((*mask.shape[1:], block[0], np.count_nonzero(out[0].block_mask)))
    return out

  monkeypatch.setattr(lib.mask_info_lib, 'process_mask', kept)
  given = [jax.ShapeDtypeStruct((1, t, 1, 8), jnp.float32) for t in (tokens // n, tokens, tokens)]
  jax.eval_shape(
    functools.partial(
      attention_kernels.splash, sinks=None, window=window, cfg=tiny.config(), stripe=(0, n), interpret=True
    ),
    *given,
    rows=attention_xla.PackedRows(*(jax.ShapeDtypeStruct((1, tokens), jnp.int32),) * 2),
  )
  ((*sizes, blocks),) = set(made)  # forward, and for dq
  assert kernels.splash_blocks(*sizes, n, window) == blocks


@needs('libtpu', 'jax[tpu]')
@pytest.mark.long
def test_so_does_one_of_stripes():
  ours, plain = described('v5e:2x4', 'splash', 'data=2,context=2,tensor=2')
  assert len(ours['calls']) == 4 and not plain['calls']
  assert plain['pairs'] and not ours['pairs']
  # The 512 queries of a stripe are one block, so none of its keys is left out.
  assert ours['flops'] - plain['flops'] == pytest.approx((11 - 8) * ours['product'], rel=1e-3)


@needs('jax_cuda13_plugin', 'jax[cuda13]')
@pytest.mark.long
def test_a_train_step_with_triton_compiles_for_gpus():
  fields = dict(layer_windows=[256, 0] * 2, attention_softcap=20.0, biases=['sinks'])
  ours, plain = described('h200:1x1x8', 'triton', **fields)
  assert plain['pairs'] and not ours['pairs']
  # Forward, again for the backward pass, and two kernels of that, for each kind of layer; loops are unrolled once.
  assert len(set(ours['calls'])) == 8 and not plain['calls']
  assert 1.1 * ours['model'] < ours['flops'] < plain['flops']


if __name__ == '__main__':
  main()
