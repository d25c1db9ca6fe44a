"""Kernels for decoding: each equals attention by XLA over the same cache, in slots, in pages and on meshes.

Pallas' interpreter runs them. Legend: S slots, H heads, K kv heads, h head size, hv head size of values.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import types

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpost.distributed.mesh import AXES, Layout
from jaxpost.hardware import kernel_check, probe
from jaxpost.matmul import compute_for
from jaxpost.models import attention_triton, decode_kernels, decode_mosaic, decode_triton, decoding, parameters
from jaxpost.models import model as model_lib
from jaxpost.models.config import Rope
from jaxpost.programs import generate
from jaxpost.rollout.sampler_config import SamplerConfig
from jaxpost.types import Cache

MODULES = dict(triton=decode_triton, mosaic=decode_mosaic)
# Windows of the slot with 530 entries begin in its first chunk, of 512. The count of the last slot, which is idle, goes
# on past the room.
FILLED = [0, 1, 65, 530, 599, 1000]
ROOM, BLOCK, STEP = 600, 8, 5
SHAPES = {'groups': (4, 2, 64, 64), 'latent': (2, 2, 96, 64), 'wide': (6, 2, 128, 128)}  # H, K, h, hv
LAYERS = {
  'plain': {},
  'window': dict(window=40),
  'cap': dict(attention_softcap=5.0),
  'sinks': dict(sinks=True),
  'all': dict(window=150, attention_softcap=5.0, sinks=True),
  'chunks': dict(window=40, chunked=True),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  """All kernels run in Pallas' interpreter."""
  for module in MODULES.values():
    monkeypatch.setattr(module, 'attend', functools.partial(module.attend, interpret=True))
  monkeypatch.setattr(
    decode_triton, 'rotate_and_write', functools.partial(decode_triton.rotate_and_write, interpret=True)
  )


def case(shape, *, room=ROOM, sinks=False, window=0, chunked=False, **fields):
  """Returns (arguments of `decoding.cached_attention`, its options)."""
  heads, kv_heads, size, values = SHAPES[shape]
  random = np.random.RandomState(0)

  def draw(*shape):
    return jnp.asarray(random.standard_normal((len(FILLED), *shape)), jnp.float32)

  q = draw(1, heads, size)
  cache, recent = ([draw(kv_heads, n, x) for x in (size, values)] for n in (room, BLOCK))
  config = tiny.config(num_heads=heads, num_kv_heads=kv_heads, head_dim=size, **fields)
  names = 'head_dim', 'attention_scale', 'attention_softcap'
  cfg = types.SimpleNamespace(**{n: getattr(config, n) for n in names}, chunked=chunked)
  args = q, cache, recent, jnp.array(FILLED), jnp.int32(STEP)
  return args, dict(window=window, cfg=cfg, sinks=draw(heads)[0] if sinks else None)


def difference(actual, expected, window):
  """Returns the largest difference over the largest value."""
  if window:  # In an idle slot XLA's window starts from the count, which is past all entries.
    actual, expected = actual[:-1], expected[:-1]
  return tiny.largest(actual - expected) / tiny.largest(expected)


def abstract_mesh(data, tensor):
  sizes = {'data': data, 'tensor': tensor}
  shape = tuple(sizes.get(axis, 1) for axis in AXES)
  return jax.sharding.AbstractMesh(shape, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


@pytest.mark.parametrize('layer', LAYERS)
@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('kernel', MODULES)
def test_kernels_equal_xla(kernel, shape, layer):
  """Slots are empty, short and full, and some have so many entries that several programs share them."""
  args, options = case(shape, **LAYERS[layer])
  expected = decoding.cached_attention(*args, compute=tiny.EXACT, **options)
  actual = decode_kernels.cached_attention(*args, kernel=kernel, **options)
  assert difference(actual, expected, options['window']) <= 1e-5


@pytest.mark.parametrize('kernel', MODULES)
def test_unused_memory_may_have_nan(kernel):
  """It is that of tokens that are not drawn yet, and that of entries which are not filled."""
  (q, cache, recent, filled, step), options = case('groups')
  expected = decode_kernels.cached_attention(q, cache, recent, filled, step, kernel=kernel, **options)
  unfilled = (jnp.arange(ROOM) >= filled[:, None])[:, None, :, None]
  cache = [jnp.where(unfilled, jnp.nan, x) for x in cache]
  drawn = [x.at[:, :, STEP + 1 :].set(jnp.nan) for x in recent]
  actual = decode_kernels.cached_attention(q, cache, drawn, filled, step, kernel=kernel, **options)
  assert bool((actual == expected).all())


@pytest.mark.parametrize('layer', ['plain', 'all'])
@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('kernel, page', [*itertools.product(MODULES, (32, 320)), ('triton', 16), ('mosaic', 1024)])
def test_kernels_read_pages(kernel, shape, layer, page):
  """Pages are in any order, smaller and larger than a chunk; those of no slot have NaN."""
  room = 640 if page < 1024 else 2048
  (q, cache, *rest), options = case(shape, room=room, **LAYERS[layer])
  expected = decoding.cached_attention(q, cache, *rest, compute=tiny.EXACT, **options)
  numbers = np.random.RandomState(1).permutation(2 * len(FILLED) * room // page)[: len(FILLED) * room // page]
  table = jnp.asarray(numbers.reshape(len(FILLED), -1))

  def in_pages(x):
    pages = x.reshape(len(FILLED), x.shape[1], room // page, page, -1).swapaxes(1, 2)
    pool = jnp.full((2 * len(FILLED) * room // page, *pages.shape[2:]), jnp.nan)
    return pool.at[table.reshape(-1)].set(pages.reshape(-1, *pages.shape[2:]))

  pools = [in_pages(x) for x in cache]
  actual = decode_kernels.cached_attention(q, pools, *rest, kernel=kernel, table=table, **options)
  assert difference(actual, expected, options['window']) <= 1e-5


@pytest.mark.parametrize('window, chunked', [(0, False), (40, False), (150, True)])
def test_mosaic_lists_only_chunks_with_visible_entries(window, chunked):
  """Each slot has one item at least, the items of a slot follow each other, and both parts of the list have slots.

  A slot without entries reads the chunk that is there already.
  """
  filled, chunk, room = np.array([0, 300, 128, 0, 600, 599, 1, 129, 160]), 128, 600
  items = decode_mosaic._list_chunks(
    jnp.asarray(filled), 0, None, room=room, chunk=chunk, window=window, cfg=types.SimpleNamespace(chunked=chunked)
  )
  expected, sources = [], []
  for slot, n in enumerate(filled):
    first = (n - n % window if chunked else max(0, n - window + 1)) if window else 0
    numbers = range(min(first, max(n - 1, 0)) // chunk, max(1, -(-n // chunk)))
    expected += [slot for _ in numbers]
    sources += [(slot, number) if n or not sources else sources[-1] for number in numbers]
  begin, border, end = items.ends.tolist()
  assert items.slots.tolist()[:end] == expected
  assert list(zip(items.sources.tolist(), items.chunks.tolist()))[:end] == sources
  assert begin == 0 < border < end and expected[border - 1] != expected[border]
  assert abs(border - end / 2) <= 5  # chunks of the longest slot


def test_mosaic_decodes_a_single_slot():
  args, options = case('groups')
  args = jax.tree.map(lambda x: x[3:4] if x.ndim else x, args)
  expected = decoding.cached_attention(*args, compute=tiny.EXACT, **options)
  assert difference(decode_kernels.cached_attention(*args, kernel='mosaic', **options), expected, 0) <= 1e-5


# (whether heads are rotated in the kernel, fields of the config)
ROTATED = {
  'norm': (True, {}),
  'no_norm': (True, dict(qk_norm='', num_heads=3, num_kv_heads=1)),
  'offset': (True, dict(norm_offset=1.0, attention_scale=0.3, attention_softcap=5.0)),
  'sinks': (True, dict(qk_norm='', biases=('q', 'k', 'v', 'sinks'))),
  'odd_size': (True, dict(head_dim=24, layer_windows=(4, 0))),
  'scaled': (True, dict(ropes=(Rope(scaling=(('rope_type', 'linear'), ('factor', 4.0))),))),
  'one_layer': (True, dict(layer_ropes=(0, -1))),
  'part': (False, dict(rotary_dim=4)),
  'pairs': (False, dict(ropes=(Rope(interleaved=True),))),
  'wide': (False, dict(qk_norm='wide')),
}


@pytest.mark.parametrize('name', ROTATED)
def test_decoding_with_heads_rotated_in_a_kernel_equals_xla(monkeypatch, name):
  """Hidden states and cache entries are those of XLA, in a block that already has tokens."""
  in_kernel, fields = ROTATED[name]
  cfg = tiny.config(**fields)
  params = parameters.unstack_layers(tiny.params(model_lib.build(cfg)), cfg.layer_stacks)
  random = np.random.RandomState(0)
  slots, step = 3, jnp.int32(2)
  tokens, filled = jnp.array([3, 5, 9]), jnp.array([0, 4, 7])

  def entries(number):
    shape = slots, cfg.num_kv_heads, number, cfg.head_dim
    return [tuple(jnp.asarray(random.standard_normal(shape), jnp.float32) for _ in range(2)) for _ in range(2)]

  cache, recent = Cache(*entries(8)), Cache(*entries(4))
  args = params, cache, recent, tokens, filled, step, cfg
  expected = decoding.decode(*args, tiny.EXACT)
  rotate, rotated = decode_triton.rotate_and_write, []
  monkeypatch.setattr(decode_triton, 'rotate_and_write', lambda *a, **kw: rotated.append(1) or rotate(*a, **kw))
  actual = decoding.decode(*args, dataclasses.replace(tiny.EXACT, decode_kernel='triton'))
  assert len(rotated) == (len([r for r in cfg.layer_ropes or (0, 0) if r >= 0]) if in_kernel else 0)
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert tiny.largest(a - b) <= 1e-5 * tiny.largest(b)


@pytest.mark.parametrize('size, values', [(64, 64), (128, 128), (96, 256), (192, 128), (256, 256)])
def test_decoding_fits_the_shared_memory_of_small_gpus(monkeypatch, size, values):
  """An L4 has 99 KiB per block, which hold the queries, and the keys and values of all stages but one."""
  stages_used, call = [], decode_triton.pl.pallas_call

  def record_stages(*args, compiler_params, **options):
    stages_used.append(compiler_params.num_stages)
    return call(*args, compiler_params=compiler_params, **options)

  monkeypatch.setattr(decode_triton.pl, 'pallas_call', record_stages)
  arrays = [[jnp.zeros((4, 2, n, h), jnp.bfloat16) for h in (size, values)] for n in (512, 32)]
  run = functools.partial(decode_triton.attend, window=0, cfg=tiny.config())
  jax.eval_shape(run, jnp.zeros((4, 2, 16, size)), *map(tuple, arrays), jnp.zeros(4, int), jnp.int32(0), None)
  (stages,) = stages_used
  padded_size, padded_values = map(attention_triton.padded, (size, values))
  assert (
    (stages - 1) * decode_triton._ENTRIES * (padded_size + padded_values) + 16 * padded_size
  ) * 2 + 1024 <= 99 * 1024


MODEL = tiny.config(num_heads=4, num_kv_heads=2, head_dim=64)


@pytest.fixture
def checked_anew(monkeypatch, tmp_path):
  """No result of an earlier check is known, and checks take few entries."""
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.setattr(kernel_check, '_DECODED', ((4, 4, 96, 8, 0), (3, 5, 50, 16, 0), (2, 3, 64, 8, 16)))
  kernel_check.trusted.cache_clear()
  yield
  kernel_check.trusted.cache_clear()


@pytest.mark.parametrize('kernel, attention', [('triton', 'triton'), ('mosaic', 'auto')])
def test_kernels_with_wrong_results_are_not_used(monkeypatch, checked_anew, caplog, kernel, attention):
  """`attention: triton` names no decoding kernel, so this is no error. Without a model that samples, no check runs."""
  module, calls = MODULES[kernel], []
  attend, rotate = module.attend, decode_triton.rotate_and_write

  def correct(*args, **options):
    calls.append(args[0].shape)
    return attend(*args, **options)

  def wrong(q, cache, recent, filled, *inputs, **options):
    return correct(q, cache, recent, filled // 2, *inputs, **options)

  def wrong_for_pages(*args, **options):
    return wrong(*args, **options) if len(args) > 6 else correct(*args, **options)

  def wrong_rotate(q, k, v, *inputs, **options):
    return rotate(q, v, k, *inputs, **options)

  compute = compute_for('gpu' if kernel == 'triton' else 'tpu', 'bfloat16', 'none', attention)
  assert compute.decode_kernel == kernel
  cases = [(wrong, rotate, ''), (wrong_for_pages, rotate, ''), (correct, rotate, kernel)]
  if kernel == 'triton':
    cases.insert(0, (correct, wrong_rotate, ''))
  for function, rotation, used in cases:
    monkeypatch.setattr(module, 'attend', function)
    monkeypatch.setattr(decode_triton, 'rotate_and_write', rotation)
    kernel_check.trusted.cache_clear()
    settled = kernel_check.verify(compute, [], [MODEL])
    assert settled == dataclasses.replace(compute, decode_kernel=used)
  assert f'decode_{kernel} is wrong on' in caplog.text
  (key,) = json.loads((probe.cache_file('attention.json')).read_text())
  assert key.startswith(f'decode_{kernel} ')
  calls.clear()
  assert kernel_check.verify(compute, []) == compute and not calls


def test_checks_are_repeated_when_a_kernel_changes(monkeypatch):
  """The key of a remembered check depends on the code of every kernel and of what the kernels share."""
  read, files = pathlib.Path.read_bytes, set()
  monkeypatch.setattr(pathlib.Path, 'read_bytes', lambda path: files.add(path.name) or read(path))
  kernel_check._key('decode_mosaic', 'bfloat16', ())
  models = pathlib.Path(decode_kernels.__file__).parent
  kernels = {file.name for name in ('*_triton.py', '*_mosaic.py', '*_kernels.py') for file in models.glob(name)}
  assert {*kernels, 'grouped.py', 'decoding.py', 'attention_xla.py', 'kernel_check.py', 'layer_check.py'} <= files


def test_kernels_decode_models_and_caches_that_they_support():
  """Kernels read no caches of 8 or 32 bits and no small pages; those of Mosaic fill the lanes unless heads do."""
  gpu, tpu = (compute_for(platform, 'bfloat16', 'none') for platform in ('gpu', 'tpu'))
  wide, odd = (dataclasses.replace(MODEL, head_dim=size) for size in (128, 20))

  def used(compute, cfg, **fields):
    rollout = dataclasses.replace(SamplerConfig(4, 16, 16, (1,)), **fields)
    return decode_kernels.compute_of_decoding(compute, cfg, rollout).decode_kernel

  assert used(gpu, MODEL) == used(gpu, odd) == 'triton' and used(tpu, MODEL) == 'mosaic' and not used(tpu, odd)
  assert used(gpu, MODEL, page_size=16) and not used(gpu, MODEL, page_size=8) and not used(tpu, MODEL, speculation=4)
  assert used(tpu, MODEL, page_size=128) and not used(tpu, MODEL, page_size=64)
  assert used(tpu, wide, page_size=8) and not used(tpu, wide, page_size=4)
  assert not used(dataclasses.replace(tpu, cache='int8'), MODEL) and not used(
    compute_for('tpu', 'float32', 'none'), MODEL
  )
  assert [decode_kernels.entries_multiple(tpu, x) for x in (MODEL, wide)] == [128, 8]
  assert decode_kernels.entries_multiple(gpu, MODEL) == 1


def test_mosaic_leaves_to_xla_what_its_memories_do_not_hold(caplog):
  tpu = compute_for('tpu', 'bfloat16', 'none')
  cfg = dataclasses.replace(MODEL, num_heads=32, num_kv_heads=8, head_dim=128)

  def used(slots, entries, page_size=0, block=32, tensor=1):
    lengths = dict(entries=entries, page_size=page_size, block=block)
    layout = Layout(abstract_mesh(2, tensor), 'rollout')
    return decode_kernels.compute_of_engine(tpu, cfg, layout, 2 * slots, **lengths).decode_kernel

  assert (
    used(256, 16384) and used(256, 1088, block=256) and used(256, 16384, 64) and used(64, 32768, block=1024, tensor=8)
  )
  assert not used(256, 131_072) and not used(256, 16384, 16) and not used(256, 4096, block=2048)
  assert 'does not support 256 slots of 16384 entries in pages of 16; XLA decodes' in caplog.text


def test_a_mesh_that_splits_the_slots_decodes_all_of_them():
  """A device would append the entries of other slots than it has."""
  entries = jnp.zeros((4, 2, 8, 8))
  of_slots = dict(positions=jnp.zeros(4, int), counts=jnp.zeros(4, int), active=jnp.ones(4, bool))
  state = generate.DecodeState(Cache((entries,), (entries,)), jnp.zeros((4, 8)), sampling=(), keys=(), **of_slots)
  slots = jax.tree.map(lambda x: x[:2], state)
  with pytest.raises(AssertionError, match='decodes all of them'):
    generate.with_first_slots(
      state,
      slots.replace(cache=None),
      slots.cache,
      None,
      compute=tiny.EXACT,
      layout=Layout(abstract_mesh(2, 1), 'rollout'),
    )


def main():
  """Prints {case: relative error} on meshes; with tensor=4 there are more devices than kv heads."""
  from jaxpost.distributed.phases import make_layout

  out, random = {}, np.random.RandomState(0)
  cfg = tiny.config(num_heads=4, num_kv_heads=2, head_dim=16)

  def draw(*shape):
    return jnp.asarray(random.standard_normal(shape), jnp.float32)

  cache, recent = ((draw(8, 2, n, 16), draw(8, 2, n, 16)) for n in (40, 4))
  inputs = draw(8, 1, 4, 16), cache, recent, jnp.arange(8) * 5, jnp.int32(2)
  for kernel, module in MODULES.items():
    module.attend = functools.partial(module.attend, interpret=True)
    for text, sinks in ('data=2,tensor=2', draw(4)), ('tensor=4', None):
      options = dict(window=0, cfg=cfg, sinks=sinks)
      layout = make_layout(text, 'rollout', '--mesh')
      run = functools.partial(decode_kernels.cached_attention, kernel=kernel, layout=layout, **options)
      expected = decoding.cached_attention(*inputs, compute=tiny.EXACT, **options)
      out[f'{kernel} {text}'] = tiny.difference(jax.jit(run)(*inputs), expected)
  print(json.dumps(out))


def test_kernels_on_meshes_equal_xla():
  errors = children.printed(__file__, devices=4)
  assert len(errors) == 4
  assert {k: x for k, x in errors.items() if not x <= 1e-5} == {}


if __name__ == '__main__':
  main()
