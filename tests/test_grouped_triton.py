"""The kernels of grouped matrix products of experts: results, their check, and their place in plans.

On CPUs, Pallas' interpreter runs the kernel.

Legend: N rows, E groups, D inputs, F outputs.
"""

import dataclasses
import functools
import importlib.util
import json

import children
import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpost.distributed import coordination
from jaxpost.hardware import kernel_check, layer_check, probe
from jaxpost.matmul import Compute, compute_for
from jaxpost.models import expert_mlp, grouped, grouped_triton, moe
from jaxpost.models import model as model_lib
from jaxpost.models.config import Experts
from jaxpost.planning import cost
from jaxpost.stage import place, prepare

ROWS, GROUPS = grouped_triton.rows_by_groups, grouped_triton.groups_of_rows
# (N, D, F, sizes). The groups are uneven: some are empty, one ends inside a tile and one has several tiles. Some rows
# belong to no group, some sides are no multiples of a tile, and tiles are for 16, 64 or 128 rows.
CASES = {
  'uneven': (100, 40, 24, [5, 0, 60, 1, 10]),
  'none past the end': (64, 32, 16, [40, 24]),
  'the first is empty': (70, 16, 40, [0, 0, 37, 33]),
  'all are empty': (20, 24, 16, [0, 0, 0]),
  'one row': (1, 16, 16, [1]),
  'many tiles': (700, 136, 144, [430, 3]),
  'tiles of 64': (300, 72, 130, [200, 0, 9]),
  'one group': (130, 64, 128, [129]),
}


@pytest.fixture
def interpreted(monkeypatch):
  """Runs the kernels in Pallas' interpreter."""
  monkeypatch.setattr(grouped_triton, 'rows_by_groups', functools.partial(ROWS, interpret=True))
  monkeypatch.setattr(grouped_triton, 'groups_of_rows', functools.partial(GROUPS, interpret=True))


def draw(case, dtype):
  """Returns x [N, D], w [E, D, F], g [N, F], sizes, and the group of each row (-1 if it belongs to none)."""
  n, d, f, sizes = case
  random = np.random.RandomState(0)
  x, w, g = (jnp.asarray(random.standard_normal(s), dtype) for s in ((n, d), (len(sizes), d, f), (n, f)))
  groups = np.append(np.repeat(np.arange(len(sizes)), sizes), [-1] * (n - sum(sizes)))
  return x, w, g, jnp.asarray(sizes, jnp.int32), groups


def reference(x, w, g, groups):
  """Returns (x w, g w^T, x^T g) of each group in float32."""
  x, w, g = (np.asarray(a, np.float32) for a in (x, w, g))
  out, dx, dw = np.zeros_like(g), np.zeros_like(x), np.zeros_like(w)
  for e in range(len(w)):
    in_group = groups == e
    out[in_group], dx[in_group], dw[e] = x[in_group] @ w[e], g[in_group] @ w[e].T, x[in_group].T @ g[in_group]
  return out, dx, dw


def close(ours, expected, tolerance):
  assert np.max(np.abs(np.asarray(ours, np.float32) - expected), initial=0) <= tolerance * max(
    1, tiny.largest(expected)
  )


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_kernels_match_one_product_per_group(case, dtype):
  x, w, g, sizes, groups = draw(case, dtype)
  out, dx, dw = reference(x, w, g, groups)
  # Rows that belong to no group are not read.
  x, g = (jnp.where(groups[:, None] < 0, jnp.nan, a).astype(dtype) for a in (x, g))
  ours = ROWS(x, w, sizes, interpret=True)
  assert ours.dtype == jnp.float32
  close(ours, out, 1e-5)
  close(ROWS(g, w, sizes, transposed=True, interpret=True), dx, 1e-5)
  close(GROUPS(x, g, sizes, interpret=True), dw, 1e-5)


@pytest.mark.parametrize('case', ['uneven', 'many tiles', 'tiles of 64'])
def test_the_order_of_programs_does_not_matter(monkeypatch, case):
  """No program writes rows of another one: a device runs them concurrently, the interpreter one after the other."""
  x, w, g, sizes, groups = draw(CASES[case], 'bfloat16')
  of = grouped_triton._Places.of
  monkeypatch.setattr(grouped_triton._Places, 'of', lambda places, i: of(places, places.rows * places.columns - 1 - i))
  out, _, dw = reference(x, w, g, groups)
  close(ROWS(x, w, sizes, interpret=True), out, 1e-5)
  close(GROUPS(x, g, sizes, interpret=True), dw, 1e-5)


def test_a_result_may_be_rounded():
  x, w, g, sizes, groups = draw(CASES['uneven'], 'bfloat16')
  for kernel, operands in (ROWS, (x, w)), (GROUPS, (x, g)):
    exact = kernel(*operands, sizes, interpret=True)
    ours = kernel(*operands, sizes, out='bfloat16', interpret=True)
    assert ours.dtype == jnp.bfloat16 and jnp.all(ours == exact.astype(jnp.bfloat16))


@pytest.mark.parametrize('rows, columns', [(1, 1), (3, 2), (8, 3), (19, 4)])
def test_every_tile_is_computed_once(rows, columns):
  places = grouped_triton._Places(rows, columns)
  tiles = [tuple(map(int, places.of(i))) for i in range(rows * columns)]
  assert sorted(tiles) == [(i, j) for i in range(rows) for j in range(columns)]
  # Consecutive programs stay in a column until the last row of a band of 8 rows of tiles.
  assert all(a[1] == b[1] for a, b in zip(tiles, tiles[1:]) if a[0] % 8 < min(rows - a[0] // 8 * 8, 8) - 1)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('out', ['float32', 'bfloat16'])
def test_gradients_match_xla(interpreted, dtype, out):
  """Both round the same operands and results, for each type that parameters may have."""
  x, w, g, sizes, _ = draw(CASES['uneven'], dtype)
  ours, plain = (Compute(platform='gpu', grouped_kernel=on) for on in (True, False))

  def run(compute):
    y, back = jax.vjp(lambda x, w: grouped.grouped(x, w, sizes, compute, out), x, w)
    return y, *back(g.astype(out))

  for a, b in zip(run(ours), run(plain), strict=True):
    assert a.dtype == b.dtype
    close(a, np.asarray(b, np.float32), 1e-5 if a.dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize('room', [0, 20])
def test_layer_of_experts_matches_xla(interpreted, room):
  """A layer with biases and adapters on a device with 4 of 8 experts, as a whole and in rounds."""
  random = np.random.RandomState(0)
  cfg = tiny.config(family='qwen3_moe', experts=Experts(8, 3, 24))
  shapes = {'gate': (32, 24), 'up': (32, 24), 'down': (24, 32), 'up_a': (32, 4), 'up_b': (4, 24), 'down_bias': (32,)}
  p = {k: jnp.asarray(random.standard_normal((4, *s)) / 5, jnp.float32) for k, s in shapes.items()}
  x = jnp.asarray(random.standard_normal((20, 32)), jnp.float32)
  weights = jnp.asarray(random.uniform(size=(20, 3)), jnp.float32)
  chosen = jnp.asarray(np.argsort(random.uniform(size=(20, 8)), axis=1)[:, :3])

  def loss(compute, p, x):
    out = expert_mlp.apply_experts(p, x, weights, chosen, 2, cfg=cfg, compute=compute, room=room)
    return jnp.sum(out * jnp.cos(jnp.arange(32.0)))

  ours, plain = (
    jax.tree.leaves(
      jax.jit(jax.grad(functools.partial(loss, Compute(platform='gpu', grouped_kernel=on)), (0, 1)))(p, x)
    )
    for on in (True, False)
  )
  for a, b in zip(ours, plain, strict=True):
    close(a, np.asarray(b), 1e-2)  # sums of another order are rounded to bfloat16 between products


def main():
  """Prints {mesh: (largest relative error, loops)} of a layer of experts on 4 devices, which run the kernel."""
  from jaxpost.distributed.phases import make_layout

  grouped_triton.rows_by_groups = functools.partial(ROWS, interpret=True)
  grouped_triton.groups_of_rows = functools.partial(GROUPS, interpret=True)
  model = model_lib.build(tiny.config(family='qwen3_moe', experts=Experts(8, 3, 24)))
  params = {k: tiny.params(model)['layers'][k][0] for k in ('router', 'gate', 'up', 'down')}
  x = jnp.asarray(np.random.RandomState(0).standard_normal((8, 4, 32)), jnp.float32)

  def run(layout, on):
    compute = Compute(platform='gpu', grouped_kernel=on)

    def loss(p, x):
      return jnp.sum(jnp.square(moe.mlp(p, x, model.config, compute, layout)[0]))

    loops = str(jax.make_jaxpr(loss)(params, x)).count(' while[')  # whose end the device decides
    return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)), loops

  (expected, _), results = run(tiny.one_device(), False), {}
  for mesh, at_once in ('expert=4', 96), ('expert=4', 95), ('expert=2,tensor=2', 0), ('tensor=2,fsdp=2', 0):
    moe._ROWS_AT_ONCE = at_once
    ours, loops = run(make_layout(mesh, 'train', '--mesh'), True)
    error = max(tiny.difference(a, b) for a, b in zip(ours, expected, strict=True))
    results[f'{mesh} {at_once}'] = error, loops
  print(json.dumps(results))


def test_kernel_on_each_of_four_devices_matches_one_device():
  """Each device has 24 token-expert pairs; up to `_ROWS_AT_ONCE` of all devices need no rounds, and so no loop."""
  results = children.printed(__file__, devices=4)
  assert {k: error for k, (error, _) in results.items() if not error <= 1e-2} == {}
  assert [loops for _, loops in results.values()] == [3, 4, 3, 3]  # three are those of the kernel


@pytest.fixture
def interpreted_on_tpus(monkeypatch):
  """Runs the kernel for TPUs, which is part of JAX, in Pallas' interpreter, and takes this device for a TPU."""
  megablox = importlib.import_module('jax.experimental.pallas.ops.tpu.megablox.gmm')
  monkeypatch.setattr(megablox, 'tgmm', functools.partial(megablox.tgmm, interpret=True))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  return megablox


@pytest.mark.parametrize('out', ['bfloat16', 'float32'])
@pytest.mark.parametrize('case', [*CASES, 'tiles for TPUs'])
def test_matrices_of_tpus_match_one_product_per_group(interpreted_on_tpus, case, out):
  """Rows that belong to no group do not count: NaN among them would show."""
  case = (CASES | {'tiles for TPUs': (600, 1100, 800, [300, 0, 256, 5])})[case]
  x, w, g, sizes, groups = draw(case, 'bfloat16')
  _, _, dw = reference(x, w, g, groups)
  x, g = (jnp.where(groups[:, None] < 0, jnp.nan, a).astype(a.dtype) for a in (x, g))
  ours = grouped._groups_of_rows(x, g, sizes, compute_for('tpu', 'bfloat16', 'none'), out)
  assert ours.dtype == out
  close(ours, dw, 1e-5 if out == 'float32' else 5e-3)


def test_the_kernel_for_tpus_is_checked(monkeypatch, interpreted_on_tpus):
  matrix, kernel = layer_check.Matrix(40, 24), interpreted_on_tpus.tgmm
  monkeypatch.setattr(layer_check, '_ROWS', (60,))
  assert not layer_check.trusted.__wrapped__(layer_check.EXPERTS, matrix, 'bfloat16')
  monkeypatch.setattr(interpreted_on_tpus, 'tgmm', lambda *args: kernel(*args) * 2)
  assert 'off by' in layer_check.trusted.__wrapped__(layer_check.EXPERTS, matrix, 'bfloat16')


def test_kernel_is_on_for_accelerators_in_16_bits_only():
  assert compute_for('gpu', 'bfloat16', 'none').grouped_kernel
  assert compute_for('gpu', 'float16', 'none', 'chunked').grouped_kernel
  assert compute_for('tpu', 'bfloat16', 'none').grouped_kernel
  for platform, dtype in ('gpu', 'float32'), ('tpu', 'float16'), ('tpu', 'float32'), ('cpu', 'bfloat16'):
    assert not compute_for(platform, dtype, 'none').grouped_kernel


# ---------------------------------------------------- the check before a run


@pytest.mark.parametrize('out', ['bfloat16', 'float32'])
@pytest.mark.parametrize('name', ['rows_by_groups', 'groups_of_rows'])
def test_each_type_of_a_result_is_checked(monkeypatch, interpreted, name, out):
  monkeypatch.setattr(layer_check, '_ROWS', (6,))
  kernel = getattr(grouped_triton, name)

  def wrong(*args, **options):
    return kernel(*args, **options) * (3 if options['out'] == out else 1)

  assert not layer_check.trusted.__wrapped__(layer_check.EXPERTS, layer_check.Matrix(24, 16), 'bfloat16')
  monkeypatch.setattr(grouped_triton, name, wrong)
  assert 'off by' in layer_check.trusted.__wrapped__(layer_check.EXPERTS, layer_check.Matrix(24, 16), 'bfloat16')


def test_a_wrong_kernel_is_not_used(monkeypatch, interpreted, caplog, tmp_path):
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.setattr(layer_check, '_ROWS', (6, 20))
  cfg = tiny.config(family='qwen3_moe', experts=Experts(8, 3, 24))
  compute, kernel = compute_for('gpu', 'bfloat16', 'none'), grouped_triton.rows_by_groups
  calls = []

  def beyond(x, w, sizes, **options):  # writes a row too many, as without a mask
    return kernel(x, w, sizes.at[-1].add(1), **options)

  def unsupported(*args, **options):
    raise NotImplementedError('cannot lower')

  def counted(*args, **options):
    calls.append(args)
    return kernel(*args, **options)

  for replacement, reason in (beyond, 'in out'), (unsupported, 'NotImplementedError: cannot lower'), (counted, ''):
    monkeypatch.setattr(grouped_triton, 'rows_by_groups', replacement)
    layer_check.trusted.cache_clear()
    caplog.clear()
    assert layer_check.verify(compute, [cfg]) == dataclasses.replace(compute, grouped_kernel=not reason)
    assert reason in caplog.text and caplog.text.count('XLA computes all of them') == bool(reason)
  remembered = json.loads(probe.cache_file('attention.json').read_text())
  assert sorted(k.split()[:4] for k in remembered) == [
    ['grouped', 'bfloat16', '24', '32'],
    ['grouped', 'bfloat16', '32', '24'],
  ]
  # A remembered result is not checked again, and models without experts are not checked.
  calls.clear()
  layer_check.trusted.cache_clear()
  assert layer_check.verify(compute, [cfg]) == layer_check.verify(compute, [tiny.config()]) == compute
  assert not calls
  # If the check fails on one process, no process uses the kernel.
  monkeypatch.setattr(
    coordination, 'all_gather', lambda own_results: [own_results, ['off by 2.0e+00 in out'] * len(own_results)]
  )
  assert not layer_check.verify(compute, [cfg]).grouped_kernel


def test_choices_of_a_run_name_the_kernel_of_its_experts(tmp_path):
  """The choices in the first line of a run name XLA if the check refused the kernel."""
  choices = {}
  for name, fields in ('dense', {}), ('moe', dict(family='qwen3_moe', experts=Experts(8, 3, 24))):
    (prepared,) = prepare.prepare_all(tiny.run_config(tiny.folder(tmp_path / name, **fields)))
    try:
      placed = place.place_stage(prepared)
    finally:
      prepared.close()
    with_kernel = compute_for('gpu', 'bfloat16', 'none')
    without_kernel = dataclasses.replace(with_kernel, grouped_kernel=False)
    for case, compute in ('cpu', placed.compute), ('right', with_kernel), ('wrong', without_kernel):
      choices[name, case] = dataclasses.replace(placed, compute=compute).choices.get('experts')
  assert choices == {
    **{('dense', case): None for case in ('cpu', 'right', 'wrong')},
    ('moe', 'cpu'): 'XLA (cpu)',
    ('moe', 'right'): 'kernel (gpu)',
    ('moe', 'wrong'): 'XLA (gpu)',
  }


def test_the_errors_of_a_right_kernel_are_small(monkeypatch, interpreted):
  monkeypatch.setattr(layer_check, '_ROWS', (6, 60))
  errors = layer_check.errors(layer_check.EXPERTS, layer_check.Matrix(40, 24), 'bfloat16')
  assert errors.keys() == {'out', 'x', 'w'} and max(errors.values()) < 0.005
  assert kernel_check.judge(lambda: errors) == ''


def test_check_covers_all_matrices_of_experts_and_adapters():
  """The inputs of experts may be latents; `tensor` splits the size of an expert if it divides that size."""
  cfg = tiny.config(family='qwen3_moe', experts=Experts(8, 3, 24))
  assert layer_check.matrices(cfg) == layer_check.matrices(cfg, 5) == {(32, 24), (24, 32)}
  assert layer_check.matrices(cfg, 2) == {(32, 12), (12, 32)}
  adapted = dataclasses.replace(cfg, lora=(8, 16.0, False, 'experts/gate|experts/down'))
  assert layer_check.matrices(adapted) == {(32, 24), (24, 32), (32, 8), (8, 32), (8, 24), (24, 8)}
  assert layer_check.matrices(adapted, 2) == {(32, 12), (12, 32), (32, 8), (8, 32), (8, 12), (12, 8)}
  # Adapters of attention alone need no check of experts.
  assert layer_check.matrices(dataclasses.replace(cfg, lora=(8, 16.0, False, 'q|v'))) == layer_check.matrices(cfg)
  latent = dataclasses.replace(cfg, experts=Experts(8, 3, 24, latent=16))
  assert layer_check.matrices(latent) == {(16, 24), (24, 16)}
  assert not layer_check.matrices(tiny.config())


# -------------------------------------------------------------------- plans


@pytest.mark.parametrize('scope, share', [('', 1), ('rounds/while/body/', 0.5)])
@pytest.mark.parametrize('kernel', ['rows', 'rows_transposed', 'matrices'])
def test_plans_count_products_of_groups(kernel, scope, share):
  """Matrices are 16 x 8. In rounds, half of the rows count; with few rows, matrices of some experts are not read."""
  operands, out = {
    'rows': (('bf16[6,16]', 'bf16[4,16,8]'), 'f32[6,8]'),
    'rows_transposed': (('bf16[6,8]', 'bf16[4,16,8]'), 'f32[6,16]'),
    'matrices': (('bf16[6,16]', 'bf16[6,8]'), 'f32[4,16,8]'),
  }[kernel]
  text = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: A, b: B, s: s32[2,4]) -> OUT {
  %a = A parameter(0)
  %b = B parameter(1)
  %s = s32[2,4] parameter(2)
  ROOT %y = OUT custom-call(%a, %b, %s), custom_call_target="TARGET", metadata={op_name="NAME"}
}
"""
  name = f'jit(f)/while/body/{scope}grouped_{kernel}'
  for placeholder, value in zip(
    ('A ', 'B ', 'OUT', 'TARGET', 'NAME'), (f'{operands[0]} ', f'{operands[1]} ', out, '__gpu$xla.gpu.triton', name)
  ):
    text = text.replace(placeholder, value)
  counted = cost.count(text)
  assert counted.flops == 2 * share * 6 * 16 * 8
  unread = 0.75 ** (6 * share) * 4 * 16 * 8 * 2 * (kernel != 'matrices')
  as_other_call = cost.count(text.replace('grouped', 'other'))
  assert as_other_call.flops == 0 and as_other_call.bytes - counted.bytes == pytest.approx(unread)


COMPILE_FOR_H200 = """
import json, re, jax
from jaxpost.models import grouped
from jaxpost.matmul import Compute
from jaxpost.planning import cost, machines

topology = machines.parse('h200:1x1x1')
machines.set_environment(topology)
sharding = jax.sharding.SingleDeviceSharding(machines.devices(topology)[0])
compute, out = Compute(platform='gpu', grouped_kernel=True), {}

def step(x, w, sizes, g):
  y, back = jax.vjp(lambda x, w: grouped.grouped(x, w, sizes, compute, 'bfloat16'), x, w)
  return y, back(g)

for n, d, f, e in SHAPES:
  shapes = ((n, d), 'bfloat16'), ((e, d, f), 'bfloat16'), ((e,), 'int32'), ((n, f), 'bfloat16')
  done = jax.jit(step).lower(*(jax.ShapeDtypeStruct(*s, sharding=sharding) for s in shapes)).compile()
  out[f'{n} {d} {f} {e}'] = done.memory_analysis().temp_size_in_bytes, cost.count(done.as_text()).flops
print(json.dumps(out))
"""


@described.GPUS
@pytest.mark.long
def test_kernel_compiles_for_gpus_without_copies():
  """Training and decoding of Qwen3-30B-A3B and GPT-OSS-20B, an adapter, and sides that are no multiples of a tile."""
  shapes = [
    (65536, 2048, 768, 128),
    (256, 768, 2048, 128),
    (32768, 2880, 2880, 32),
    (65536, 2048, 16, 128),
    (999, 40, 24, 5),
  ]
  figures = children.printed('-c', COMPILE_FOR_H200.replace('SHAPES', str(shapes)), timeout=900)
  for (n, d, f, _), (memory, flops) in zip(shapes, figures.values(), strict=True):
    assert memory < 2**17  # room for the numbers of tiles, but for no array of rows or matrices
    assert flops == pytest.approx(3 * 2 * n * d * f, rel=0.01)


COMPILE_FOR_V5E = """
import json, jax
from jaxpost.models import grouped
from jaxpost.matmul import compute_for
from jaxpost.planning import machines

topology = machines.parse('v5e:2x2')
machines.set_environment(topology)
sharding = jax.sharding.SingleDeviceSharding(machines.devices(topology)[0])
compute, out = compute_for('tpu', 'bfloat16', 'none'), {}

def gradient(x, g, sizes):
  return grouped._groups_of_rows(x, g, sizes, compute, 'float32')

for n, d, f, e in SHAPES:
  shapes = ((n, d), 'bfloat16'), ((n, f), 'bfloat16'), ((e,), 'int32')
  done = jax.jit(gradient).lower(*(jax.ShapeDtypeStruct(*s, sharding=sharding) for s in shapes)).compile()
  out[f'{n} {d} {f} {e}'] = done.memory_analysis().temp_size_in_bytes, done.as_text().count('"tpu_custom_call"')
print(json.dumps(out))
"""


@described.TPUS
@pytest.mark.long
def test_kernel_compiles_for_tpus_without_copies():
  """Training of Qwen3-30B-A3B and GPT-OSS-20B, whose tiles fit into the fast memory of a v5e."""
  shapes = [(65536, 2048, 768, 128), (65536, 768, 2048, 128), (8192, 2880, 2880, 32)]
  for memory, calls in children.printed('-c', COMPILE_FOR_V5E.replace('SHAPES', str(shapes)), timeout=900).values():
    assert memory < 2**20 and calls == 1


if __name__ == '__main__':
  main()
