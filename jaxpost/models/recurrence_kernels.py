"""The recurrences of `recurrence.py` by kernels of accelerators: rows, with a gradient, and single tokens.

`recurrence_triton.py` (NVIDIA GPUs) and `recurrence_mosaic.py` (TPUs) compute a row chunk by chunk; the terms of a
chunk are never in main memory. The backward pass reads the state before each chunk, computes the terms of the chunk
again, and differentiates them inside the kernel.

A module of a kernel has `supports`, `arranged` (the terms as the kernel reads them), `HEAD` (the axis of heads then),
`CHUNK`, `PARAMETERS`, `forward_kernel`, `backward_kernel`, `blocks` and `gradient_parts`.

Legend: B rows, T tokens, K heads of queries and keys, H value heads, d size of keys, e size of values, N chunks.
"""

import functools
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import Layout
from jaxpost.matmul import Compute
from jaxpost.models import recurrence_mosaic, recurrence_triton
from jaxpost.models.recurrence_chunk import KernelSettings, Terms

KERNELS: dict[str, ModuleType] = {'triton': recurrence_triton, 'mosaic': recurrence_mosaic}


def supports(kernel: str, size: int, width: int, channels: int, single: bool) -> bool:
  """Returns whether a kernel supports heads whose keys and values have these sizes.

  Args:
    kernel: one of `KERNELS`, or '' for XLA, which this returns False for.
    channels: decays of a head.
    single: whether it is for one token of sequences with a state.
  """
  return bool(kernel) and KERNELS[kernel].supports(size, width, channels, single)


def over_mesh(
  terms: Terms, runs: jax.Array, state: jax.Array | None, layout: Callable, *, compute: Compute, corrected: bool
) -> tuple[jax.Array, jax.Array]:
  """Computes rows, or one more token of sequences with a state, on each device's rows and value heads."""
  q, k, v, *others = terms
  options = dict(kernel=compute.recurrence_kernel, dtype=compute.dtype, corrected=corrected)
  run: Callable = functools.partial(over_rows, **options)
  if state is not None and k.shape[1] == 1:
    run = functools.partial(recurrence_triton.one_token, corrected=corrected)
  if state is None:
    state = jnp.zeros((len(q), v.shape[2], q.shape[3], v.shape[3]))
  if isinstance(layout, Layout) and layout.mesh.size > 1:
    rows, _, heads, _ = layout.spec(('batch', None, 'heads', None), v.shape)
    key_heads = layout.spec(('batch', None, 'heads', None), k.shape)[2]
    if key_heads != heads and k.shape[2] > 1:  # a device would need other key heads than it has
      q, k = (jnp.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
      key_heads = heads
    of_keys, of_values = (PartitionSpec(rows, None, x) for x in (key_heads, heads))
    of_state = PartitionSpec(rows, heads)
    in_specs = (of_keys, of_keys, *[of_values] * 3), PartitionSpec(rows), of_state
    run = jax.shard_map(run, mesh=layout.mesh, in_specs=in_specs, out_specs=(of_values, of_state), check_vma=False)
  return run((q, k, v, *others), runs, state)


def over_rows(
  terms: Terms, runs: jax.Array, state: jax.Array, *, kernel: str, dtype: str, corrected: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Computes `recurrence.chunked` of heads that `supports` accepts; the result is rounded to the type of v.

  interpret: run the kernel on the CPU, for tests.
  """
  q, k, v, log_decay, beta = terms
  module, length = KERNELS[kernel], k.shape[1]
  padding = -length % module.CHUNK
  runs = jnp.pad(runs, ((0, 0), (0, padding)), mode='edge')
  q, k, v, log_decay, beta = (
    jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2))) for x in (q, k, v, log_decay[..., 0], beta)
  )
  settings = KernelSettings(dtype, corrected, interpret)
  arranged = module.arranged((q, k, v, log_decay, beta))
  out, state = _over_rows(kernel, settings, arranged, state.astype(jnp.float32), runs)
  return jnp.moveaxis(out, 3 - module.HEAD, 1)[:, :length].astype(jnp.float32), state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _over_rows(kernel: str, settings: KernelSettings, terms: Terms, state: jax.Array, runs: jax.Array):
  return tuple(_forward(kernel, settings, terms, state, runs=runs, keep=False))


def _over_rows_forward(kernel, settings, terms, state, runs):
  out, state, states = _forward(kernel, settings, terms, state, runs=runs, keep=True)
  return (out, state), (terms, runs, states)


def _forward(kernel, settings, terms, state, *, runs, keep):
  """Returns the outputs, as v is arranged, state [B, H, d, e], and with `keep` states before chunks [B, H, N, d, e]."""
  module, v, (rows, heads, *sizes) = KERNELS[kernel], terms[2], state.shape
  outputs = [('values', v.shape, v.dtype), ('state', state.shape, jnp.float32)]
  outputs += [('states', (rows, heads, runs.shape[1] // module.CHUNK, *sizes), settings.dtype)] * keep
  return _call(module, 'forward', settings, terms, runs=runs, inputs=[('state', state)], outputs=outputs)


def _over_rows_backward(kernel, settings, saved, g):
  (terms, runs, states), module = saved, KERNELS[kernel]
  _, k, v, log_decay, _ = terms
  d_keys, parts = module.gradient_parts(k, v)
  outputs = [('d_keys', d_keys, k.dtype)] * 2 + [('values', v.shape, v.dtype)]
  outputs += [('d_scalars', (parts, *log_decay.shape), jnp.float32)] * 2 + [('state', g[1].shape, jnp.float32)]
  inputs = [('states', states), ('values', g[0]), ('state', g[1])]
  gradients = _call(module, 'backward', settings, terms, runs=runs, inputs=inputs, outputs=outputs)
  dq, dk, dv, d_decay, d_beta, d_state = gradients
  # Parts, and perhaps the value heads of a key head, have their own gradients of what they share.
  head = module.HEAD + 1
  dq, dk = (x.reshape(len(x), *k.shape[:head], -1, *k.shape[head:]) for x in (dq, dk))
  dq, dk = (jnp.sum(x, axis=(0, head + 1), dtype=jnp.float32).astype(k.dtype) for x in (dq, dk))
  return (dq, dk, dv, jnp.sum(d_decay, axis=0), jnp.sum(d_beta, axis=0)), d_state, None


_over_rows.defvjp(_over_rows_forward, _over_rows_backward)


def _call(module, direction, settings, terms, *, runs, inputs, outputs):
  """Calls a kernel with the terms, the runs, and further inputs (block, array); `outputs` are (block, shape, type)."""
  kernel = module.backward_kernel if direction == 'backward' else module.forward_kernel
  grid, blocks = module.blocks(terms[1], terms[2], reverse=direction == 'backward')
  by_chunk = runs.reshape(len(runs), -1, 1, module.CHUNK)
  runs_before = jnp.pad(by_chunk[:, :-1, :, -1:], ((0, 0), (1, 0), (0, 0), (0, 0)))
  names = 'keys', 'keys', 'values', 'scalars', 'scalars'
  inputs = [*zip(names, terms), ('runs', by_chunk), ('runs_before', runs_before), *inputs]
  return pl.pallas_call(
    functools.partial(kernel, settings=settings),
    grid=grid,
    in_specs=[blocks[name] for name, _ in inputs],
    out_specs=[blocks[name] for name, *_ in outputs],
    out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs],
    compiler_params=module.PARAMETERS,
    interpret=settings.interpret,
    name=f'recurrence_{direction}_{module.CHUNK}',  # `planning.kernels` reads it
  )(*(x for _, x in inputs))
