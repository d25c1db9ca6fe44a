"""`programs.reshard.Reshard`: parameters of the trainer become weights of the sampler, a group of layers at a time."""

import dataclasses

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpost.distributed import transfer
from jaxpost.models import model as model_lib
from jaxpost.models import parameters
from jaxpost.models.config import Experts
from jaxpost.programs import reshard as reshard_lib
from jaxpost.programs.compile import Ledger
from jaxpost.programs.reshard import Reshard, group_of

BFLOAT16 = dataclasses.replace(tiny.EXACT, dtype='bfloat16', cache='bfloat16')


def make(kind):
  fields = dict(num_layers=6)
  if kind == 'hybrid':
    return model_lib.build(tiny.hybrid(mixers=('delta', 'layers') * 2, num_layers=4, lora=(2, 4.0, False, '.*/o|q|v')))
  if kind == 'dense first':
    fields |= dict(experts=Experts(4, 2, 16, first_dense=2), lora=(2, 4.0, False, 'q|v|down'))
    return model_lib.build(tiny.config(**fields))
  if kind == 'lora':
    fields['lora'] = (2, 4.0, False, 'q|v|down')
    return model_lib.build(tiny.config(**fields))
  return model_lib.build(tiny.config(**fields))


def params_of(model, dtype=jnp.float32):
  """Random parameters; adapters are changed by noise, as they are initialized to have no effect."""
  params = jax.jit(model.init)(jax.random.key(3))
  if parameters.ADAPTER_ROOT in params:
    params[parameters.ADAPTER_ROOT] = jax.tree.map(
      lambda x: x + 0.1 * jax.random.normal(jax.random.key(4), x.shape), params[parameters.ADAPTER_ROOT]
    )
  return transfer.move(tiny.one_device(), jax.tree.map(lambda x: x.astype(dtype), params))


@pytest.mark.parametrize('kind', ['plain', 'lora'])
@pytest.mark.parametrize('compute', [tiny.EXACT, BFLOAT16], ids=lambda c: c.dtype)
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_weights_do_not_depend_on_the_group_size(kind, compute, dtype):
  model, ledger = make(kind), Ledger()
  params, layout = params_of(model, dtype), tiny.one_device('rollout')
  whole = Reshard(model, layout, compute, ledger)
  assert whole.groups['layers'].step == 6
  layer_bytes = sum(x.nbytes for x in jax.tree.leaves(whole(params)['layers'])) // 6
  by_three = Reshard(model, layout, compute, ledger, most=5 * layer_bytes)
  assert by_three.groups['layers'].step == 3  # 5 layers would fit, but do not divide 6
  by_one = Reshard(model, layout, compute, ledger, most=1)
  assert by_one.groups['layers'].step == 1
  ledger.rows.clear()
  for grouped in by_three, by_one:
    expected, actual = whole(params), grouped(params)
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    jax.tree.map(np.testing.assert_array_equal, expected, actual)
    shapes = grouped.outputs(params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), actual)
  # All groups share one program, and its output is bounded.
  rows = [r for r in ledger.rows if r['program'] == 'reshard' and r['output_bytes'] >= layer_bytes]
  assert [r['output_bytes'] <= 5 * layer_bytes + 64 for r in rows] == [True] * len(rows) and len(ledger.rows) <= 4


@pytest.mark.parametrize(
  'kind, most, groups',
  [
    ('dense first', 1, {'dense': range(0, 2, 1), 'layers': range(0, 4, 1)}),
    ('dense first', 80_000, {'dense': range(0, 2, 2), 'layers': range(0, 4, 2)}),
    ('hybrid', 1, {'delta': range(0, 2, 1), 'layers': range(0, 2, 1)}),
  ],
)
def test_each_stack_of_layers_is_copied_in_groups_of_its_own(kind, most, groups):
  """One program for all layers of GLM-4.5-Air, of which the first is dense, took 17 GiB more than an H100 has."""
  model = make(kind)
  params = params_of(model)
  reshard = Reshard(model, tiny.one_device('rollout'), tiny.EXACT, Ledger(), most=most)
  assert reshard.groups == groups
  merged = parameters.unstack_layers(model.merge(params), model.config.layer_stacks)['layers']
  expected = [reshard_lib._fuse(layer, reshard._fused) for layer in merged]
  weights = reshard(params)['layers']
  assert jax.tree.structure(weights) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, weights, expected)
  assert jax.tree.map(lambda x: x.shape, weights) == jax.tree.map(lambda x: x.shape, reshard.outputs(params)['layers'])


@pytest.mark.parametrize(
  'compute,dtype,shared',
  [
    (tiny.EXACT, jnp.float32, {'embed', 'norm'}),
    (BFLOAT16, jnp.float32, {'embed', 'norm'}),
    (BFLOAT16, jnp.bfloat16, {'embed', 'head', 'norm'}),
  ],
)
def test_weights_that_need_no_conversion_share_buffers_of_parameters(compute, dtype, shared):
  """`shared` has the weights outside of the layers that need neither a cast nor a copy."""
  model = make('lora')
  params = params_of(model, dtype)
  weights = Reshard(model, tiny.one_device('rollout'), compute, Ledger())(params)
  param_buffers = tiny.pointers(params)
  assert {k for k, x in weights.items() if k != 'layers' and tiny.pointers(x) <= param_buffers} == shared
  assert not tiny.pointers(weights['layers']) & param_buffers


def test_groups_divide_the_layers():
  assert [group_of(n, 100, 10) for n in (1, 8, 12, 13, 28, 80)] == [1, 8, 6, 1, 7, 10]
  assert group_of(36, 5, 10) == 1 and group_of(0, 5, 0) == 1


MESHES = """
import json, sys
sys.path.insert(0, 'tests')
import jax, tiny
import test_reshard as here
from jaxpost.distributed.phases import make_layout

model = here.make('plain')
train, rollout = (make_layout(text, phase) for text, phase in (
    ('fsdp=8', 'train'), ('data=8', 'rollout')))
params = jax.device_put(jax.jit(model.init)(jax.random.key(3)),
                        model.shardings(train))
weights = here.Reshard(model, rollout, tiny.EXACT, here.Ledger())
described = weights.outputs(params)
made = weights(params)
parts = lambda x: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
print(json.dumps(dict(
    meshes=[str(dict(m.shape)) for m in {
        x.sharding.mesh for tree in (made, described)
        for x in jax.tree.leaves(tree)}],
    shared=parts(made['norm']) == parts(params['norm']),
    right=weights.shared_bytes == params['norm'].nbytes)))
"""


def test_all_weights_have_the_rollout_mesh_and_shared_ones_no_copy():
  """Kernels with partitioning rules of their own require one mesh, also of the weights that share buffers."""
  report = children.printed('-c', MESHES, devices=8)
  assert len(report['meshes']) == 1 and "'data': 8" in report['meshes'][0]
  assert report['shared'] and report['right']
