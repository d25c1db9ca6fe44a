"""The trainer's parameters as the sampler's weights, in groups."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpost.distributed import transfer
from jaxpost.models import model as model_lib
from jaxpost.models import parameters
from jaxpost.programs.compile import Ledger
from jaxpost.programs.reshard import Reshard, group_of

BFLOAT16 = dataclasses.replace(tiny.EXACT, dtype='bfloat16', cache='bfloat16')


def make(kind):
  fields = dict(num_layers=6)
  if kind == 'lora':
    fields['lora'] = (2, 4.0, False, 'q|v|down')
    return model_lib.build(tiny.config(**fields))
  return model_lib.build(tiny.config(**fields))


def params_of(model, dtype=jnp.float32):
  made = jax.jit(model.init)(jax.random.key(3))
  if parameters.ADAPTER_ROOT in made:
    made[parameters.ADAPTER_ROOT] = jax.tree.map(
      lambda x: x + 0.1 * jax.random.normal(jax.random.key(4), x.shape), made[parameters.ADAPTER_ROOT]
    )
  return transfer.move(tiny.one_device(), jax.tree.map(lambda x: x.astype(dtype), made))


def pointers(tree):
  return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}


@pytest.mark.parametrize('kind', ['plain', 'lora'])
@pytest.mark.parametrize('compute', [tiny.EXACT, BFLOAT16], ids=lambda c: c.dtype)
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_groups_change_nothing(kind, compute, dtype):
  model, ledger = make(kind), Ledger()
  params, layout = params_of(model, dtype), tiny.one_device('rollout')
  whole = Reshard(model, layout, compute, ledger)
  assert whole.group == 6
  each = sum(x.nbytes for x in jax.tree.leaves(whole(params)['layers'])) // 6
  few = Reshard(model, layout, compute, ledger, most=5 * each)
  assert few.group == 3  # 5 do not divide 6
  one = Reshard(model, layout, compute, ledger, most=1)
  assert one.group == 1
  ledger.rows.clear()
  for some in few, one:
    a, b = whole(params), some(params)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    shapes = some.outputs(params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), b)
  # The layers take one program, whatever their number; its bytes are bounded.
  rows = [r for r in ledger.rows if r['program'] == 'reshard' and r['output_bytes'] >= each]
  assert [r['output_bytes'] <= 5 * each + 64 for r in rows] == [True] * len(rows) and len(ledger.rows) <= 4


@pytest.mark.parametrize(
  'compute,dtype,shared',
  [
    (tiny.EXACT, jnp.float32, {'embed', 'norm'}),
    (BFLOAT16, jnp.float32, {'embed', 'norm'}),
    (BFLOAT16, jnp.bfloat16, {'embed', 'head', 'norm'}),
  ],
)
def test_what_needs_no_copy_is_not_copied(compute, dtype, shared):
  """By their buffers; a base that adapters are trained on among them."""
  model = make('lora')
  params = params_of(model, dtype)
  weights = Reshard(model, tiny.one_device('rollout'), compute, Ledger())(params)
  theirs = pointers(params)
  assert {k for k, x in weights.items() if k != 'layers' and pointers(x) <= theirs} == shared
  assert not pointers(weights['layers']) & theirs


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


def test_weights_are_of_one_mesh_those_that_are_shared_too():
  """Kernels with partitioning rules of their own require it; nothing else is copied."""
  done = subprocess.run(
    [sys.executable, '-c', MESHES],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[1],
    env=children.environment(devices=8),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads(done.stdout.splitlines()[-1])
  assert len(found['meshes']) == 1 and "'data': 8" in found['meshes'][0]
  assert found['shared'] and found['right']
