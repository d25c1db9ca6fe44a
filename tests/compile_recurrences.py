"""Compiles the kernels for recurrences for a machine that is not here: `compile_recurrences.py KERNEL TOPOLOGY`.

It prints for each kind of heads how many kernels a loss with its gradient, the loss alone and single tokens have.
"""

import sys

from jaxpost.planning import machines

kernel, topology = sys.argv[1], machines.parse(sys.argv[2])
machines.set_environment(topology)
import jax  # noqa: E402  the environment comes first
import jax.numpy as jnp  # noqa: E402

from jaxpost.models import recurrence_kernels, recurrence_triton  # noqa: E402

ROWS, LENGTH = 2, 250
# Key and value heads, their sizes, whether it is the delta rule, and the type: those of families, and the largest.
CASES = {
  'triton': (
    (2, 4, 128, 128, True, 'bfloat16'),
    (2, 4, 128, 64, False, 'bfloat16'),
    (2, 4, 256, 256, True, 'float16'),
    (2, 4, 16, 256, False, 'bfloat16'),
  ),
  'mosaic': (
    (16, 32, 128, 128, True, 'bfloat16'),
    (1, 48, 128, 64, False, 'bfloat16'),
    (30, 30, 96, 192, True, 'bfloat16'),
    (4, 8, 256, 256, True, 'bfloat16'),
    (7, 7, 256, 144, True, 'bfloat16'),
  ),
}
TARGETS = {'triton': '__gpu$xla.gpu.triton', 'mosaic': 'tpu_custom_call'}

sharding = jax.sharding.SingleDeviceSharding(machines.devices(topology)[0])


def array(shape, dtype='float32'):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compiled(fn, *args):
  return jax.jit(fn).lower(*args).compile().as_text()


def programs(kv_heads, heads, size, width, corrected, dtype):
  """Yields the text of each program."""
  shapes = [(ROWS, LENGTH, kv_heads, size)] * 2 + [(ROWS, LENGTH, heads, width)]
  terms = *(array(shape, dtype) for shape in shapes), array((ROWS, LENGTH, heads, 1)), array((ROWS, LENGTH, heads))
  args = array((ROWS, LENGTH), 'int32'), array((ROWS, heads, size, width))

  def loss(terms, runs, state):
    options = dict(kernel=kernel, dtype=dtype, corrected=corrected)
    return jnp.sum(recurrence_kernels.over_rows(terms, runs, state, **options)[0] ** 2)

  yield compiled(jax.grad(loss), terms, *args)
  yield compiled(loss, terms, *args)
  for channels in (1, size) if recurrence_kernels.supports(kernel, size, width, 1, single=True) else ():
    token = [array((ROWS, 1, *x.shape[2:]), x.dtype) for x in terms]
    token[3] = array((ROWS, 1, heads, channels))
    yield compiled(lambda *args: recurrence_triton.one_token(*args, corrected=corrected), tuple(token), *args)


for case in CASES[kernel]:
  lines = ''.join(programs(*case)).splitlines()
  kernels = [line for line in lines if f'custom_call_target="{TARGETS[kernel]}"' in line]
  print(*(sum(f'recurrence_{name}' in line for line in kernels) for name in ('forward', 'backward', 'token')))
