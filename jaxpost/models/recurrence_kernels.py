"""The recurrences of `recurrence.py` by kernels of accelerators: rows, with a gradient, and single tokens.

`recurrence_triton.py` (NVIDIA GPUs) and `recurrence_mosaic.py` (TPUs) compute a row chunk by chunk; the terms of a
chunk are never in main memory. The backward pass reads the state before each chunk, computes the terms of the chunk
again, and differentiates them inside the kernel.

Legend: B rows, T tokens, K heads of queries and keys, H value heads, d size of keys, e size of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
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
  length = k.shape[1]
  padding = -length % KERNELS[kernel].CHUNK
  runs = jnp.pad(runs, ((0, 0), (0, padding)), mode='edge')
  whole_chunks = tuple(
    jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2))) for x in (q, k, v, log_decay[..., 0], beta)
  )
  settings = KernelSettings(dtype, corrected, interpret)
  out, state = _over_rows(kernel, settings, whole_chunks, state.astype(jnp.float32), runs)
  return out[:, :length].astype(jnp.float32), state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _over_rows(kernel: str, settings: KernelSettings, terms: Terms, state: jax.Array, runs: jax.Array):
  return KERNELS[kernel].forward(settings, terms, state, runs)[:2]


def _over_rows_forward(kernel, settings, terms, state, runs):
  out, state, states = KERNELS[kernel].forward(settings, terms, state, runs, keep=True)
  return (out, state), (terms, runs, states)


def _over_rows_backward(kernel, settings, saved, g):
  return *KERNELS[kernel].backward(settings, *saved, g), None


_over_rows.defvjp(_over_rows_forward, _over_rows_backward)
