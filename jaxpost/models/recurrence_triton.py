"""The recurrences of `recurrence.py` for NVIDIA GPUs, in Pallas for Triton: over rows, and of single tokens.

One program computes some channels of the values of a head, chunk by chunk, and keeps their part of the state in
registers: the terms of a chunk, for which XLA takes about fifty kernels, are never in main memory. The backward pass
reads the state before each chunk, computes the terms of the chunk again, and differentiates them inside the kernel.

Legend: B rows, T tokens, K heads of queries and keys, H value heads, d size of keys, e size of values, C tokens of a
chunk, N chunks, P parts of the values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import Layout
from jaxpost.matmul import precision_of
from jaxpost.models.recurrence_chunk import Terms, across_chunk, step_of_head, within_chunk

_CHUNK = 32  # with 64 tokens, a thread spills ten times as much of its registers
_STATE_SIZE = 8192  # elements of the state of a program
_WARPS = 8


class _Static(NamedTuple):
  """Settings that a kernel is compiled for."""

  dtype: str
  corrected: bool
  interpret: bool


def supports(size: int, width: int, channels: int, single: bool) -> bool:
  """Returns whether the kernels support heads whose keys and values have these sizes.

  Args:
    channels: decays of a head.
    single: whether it is for `one_token`, which supports several channels.
  """
  return (channels == 1 or single) and all(16 <= n <= 256 and n & (n - 1) == 0 for n in (size, width))


def over_mesh(
  terms: Terms, runs: jax.Array, state: jax.Array | None, layout: Callable, *, dtype: str, corrected: bool
) -> tuple[jax.Array, jax.Array]:
  """Computes rows, or one more token of sequences with a state, on each device's rows and value heads."""
  q, k, v, *others = terms
  run: Callable = functools.partial(over_rows, dtype=dtype, corrected=corrected)
  if state is not None and k.shape[1] == 1:
    run = functools.partial(one_token, corrected=corrected)
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


def one_token(
  terms: Terms, runs: jax.Array, state: jax.Array, *, corrected: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Computes `recurrence.chunked` of one token of each sequence, whose run (`runs`) is that of the state.

  It reads the state once, and writes the new one in its place. It has no gradient. The result is rounded to the type of
  v, as that of `over_rows`.

  interpret: run it on the CPU, for tests.
  """
  del runs
  _, k, v, log_decay, _ = terms
  (slots, heads, size, width), group = state.shape, v.shape[2] // k.shape[2]
  parts = _parts(size, width)
  keys = pl.BlockSpec((None, None, None, size), lambda p, h, b: (b, 0, h // group, 0))
  values = pl.BlockSpec((None, None, None, width // parts), lambda p, h, b: (b, 0, h, p))
  decays = pl.BlockSpec((None, None, None, log_decay.shape[3]), lambda p, h, b: (b, 0, h, 0))
  steps = pl.BlockSpec((None, None, 1), lambda p, h, b: (b, 0, h))
  states = pl.BlockSpec((None, None, size, width // parts), lambda p, h, b: (b, h, 0, p))
  out, state = pl.pallas_call(
    functools.partial(_token_kernel, corrected=corrected),
    grid=(parts, heads, slots),
    in_specs=[keys, keys, values, decays, steps, states],
    out_specs=[values, states],
    out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)],
    input_output_aliases={5: 1},
    compiler_params=plgpu.CompilerParams(num_warps=4),
    interpret=interpret,
    name='recurrence_token',
  )(*terms, state)
  return out.astype(jnp.float32), state


def _token_kernel(q_ref, k_ref, v_ref, log_decay_ref, beta_ref, state_ref, out_ref, new_state_ref, *, corrected: bool):
  q, k, v = (ref[...].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref))
  log_decay = log_decay_ref[0] if log_decay_ref.shape == (1,) else log_decay_ref[...]
  new_state_ref[...], out = step_of_head(state_ref[...], q, k, v, log_decay, beta=beta_ref[0], corrected=corrected)
  out_ref[...] = out.astype(out_ref.dtype)


def over_rows(
  terms: Terms, runs: jax.Array, state: jax.Array, *, dtype: str, corrected: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Computes `recurrence.chunked` of heads that `supports` accepts; the result is rounded to the type of v.

  interpret: run it on the CPU, for tests.
  """
  q, k, v, log_decay, beta = terms
  length = k.shape[1]
  runs = jnp.pad(runs, ((0, 0), (0, -length % _CHUNK)), mode='edge')
  whole_chunks = tuple(
    jnp.pad(x, ((0, 0), (0, -length % _CHUNK), *((0, 0),) * (x.ndim - 2))) for x in (q, k, v, log_decay[..., 0], beta)
  )
  out, state = _over_rows(_Static(dtype, corrected, interpret), whole_chunks, state.astype(jnp.float32), runs)
  return out[:, :length].astype(jnp.float32), state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_rows(static: _Static, terms: Terms, state: jax.Array, runs: jax.Array):
  return _forward(static, terms, state, runs)[:2]


def _over_rows_fwd(static, terms, state, runs):
  out, state, states = _forward(static, terms, state, runs, keep=True)
  return (out, state), (terms, runs, states)


def _over_rows_bwd(static, saved, g):
  return *_backward(static, *saved, g), None


_over_rows.defvjp(_over_rows_fwd, _over_rows_bwd)

# -------------------------------------------------------------------- kernels


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(dtype, spec, x, w):
  """Computes an einsum of two float32 matrices, and its gradient, from operands of a type."""
  return _product_fwd(dtype, spec, x, w)[0]


def _product_fwd(dtype, spec, x, w):
  x, w = x.astype(dtype), w.astype(dtype)
  return jnp.einsum(spec, x, w, precision=precision_of(dtype), preferred_element_type='float32'), (x, w)


def _product_bwd(dtype, spec, saved, g):
  (x, w), (x_term, w_term, out), g = saved, spec.replace('->', ',').split(','), g.astype(dtype)
  dx = _product_fwd(dtype, f'{out},{w_term}->{x_term}', g, w)[0]
  return dx, _product_fwd(dtype, f'{x_term},{out}->{w_term}', x, g)[0]


_product.defvjp(_product_fwd, _product_bwd)


def _chunk(static: _Static, runs: jax.Array, run_before: jax.Array) -> Callable:
  """Returns (state before, q, k, v, log_decay, beta) -> (state after, outputs), for a chunk of a head."""
  # Three products in TF32 come close to one in float32, for which there are no matrix units.
  exactly = jax.lax.Precision.HIGHEST if static.interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
  exact = functools.partial(jnp.einsum, precision=exactly)
  product = functools.partial(_product, static.dtype)

  def run(state, q, k, v, log_decay, beta):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    options = dict(runs=runs, run_before=run_before, product=product, exact=exact, corrected=static.corrected)
    terms = within_chunk(q, k, v, log_decay, beta, **options)
    return across_chunk(state, q, k, terms, product)

  return run


def _forward_kernel(*refs, static: _Static):
  *term_refs, runs_ref, run_before_ref, state_ref, out_ref, last_state_ref = refs[:10]
  states_ref = refs[10] if len(refs) > 10 else None

  def run(i, state):
    tokens = pl.ds(i * _CHUNK, _CHUNK)
    if states_ref is not None:
      states_ref[i] = state.astype(states_ref.dtype)
    chunk = _chunk(static, runs_ref[tokens], run_before_ref[i])
    # Triton has no rule for functions with gradients of their own; `jax.vjp` replaces them by what they compute.
    (state, out), _ = jax.vjp(chunk, state, *(ref[tokens] for ref in term_refs))
    out_ref[tokens] = out.astype(out_ref.dtype)
    return state

  last_state_ref[...] = jax.lax.fori_loop(0, run_before_ref.shape[0], run, state_ref[...])


def _backward_kernel(*refs, static: _Static):
  *term_refs, runs_ref, run_before_ref, states_ref, g_ref, g_state_ref = refs[:10]
  *d_refs, d_state_ref = refs[10:]
  count = run_before_ref.shape[0]

  def run(n, g_state):
    i = count - 1 - n
    tokens = pl.ds(i * _CHUNK, _CHUNK)
    chunk = _chunk(static, runs_ref[tokens], run_before_ref[i])
    _, vjp = jax.vjp(chunk, states_ref[i].astype(jnp.float32), *(ref[tokens] for ref in term_refs))
    g_state, *gradients = vjp((g_state, g_ref[tokens].astype(jnp.float32)))
    for ref, gradient in zip(d_refs, gradients, strict=True):
      ref[tokens] = gradient.astype(ref.dtype)
    return g_state

  d_state_ref[...] = jax.lax.fori_loop(0, count, run, g_state_ref[...])


# ---------------------------------------------------------------------- calls

_TERM_BLOCKS = 'keys', 'keys', 'values', 'scalars', 'scalars'  # blocks of q, k, v, log_decay and beta, see `_blocks`


def _parts(size: int, width: int) -> int:
  return max(1, width * size // _STATE_SIZE)


def _blocks(q: jax.Array, v: jax.Array) -> dict[str, pl.BlockSpec]:
  """Returns the blocks of arrays that the program (part of the values, value head, row) reads or writes."""
  (_, length, kv_heads, size), (heads, width) = q.shape, v.shape[2:]
  group, chunks, part = heads // kv_heads, length // _CHUNK, width // _parts(size, width)
  return {
    'keys': pl.BlockSpec((None, length, None, size), lambda p, h, b: (b, 0, h // group, 0)),
    'values': pl.BlockSpec((None, length, None, part), lambda p, h, b: (b, 0, h, p)),
    'scalars': pl.BlockSpec((None, length, None), lambda p, h, b: (b, 0, h)),
    'runs': pl.BlockSpec((None, length), lambda p, h, b: (b, 0)),
    'runs_before': pl.BlockSpec((None, chunks), lambda p, h, b: (b, 0)),
    'state': pl.BlockSpec((None, None, size, part), lambda p, h, b: (b, h, 0, p)),
    'states': pl.BlockSpec((None, None, chunks, size, part), lambda p, h, b: (b, h, 0, 0, p)),
    # Each part of the values has its own gradient of what it shares with the other parts and heads.
    'd_keys': pl.BlockSpec((None, None, length, None, size), lambda p, h, b: (p, b, 0, h, 0)),
    'd_scalars': pl.BlockSpec((None, None, length, None), lambda p, h, b: (p, b, 0, h)),
  }


def _call(kernel: Callable, static: _Static, terms: Terms, runs: jax.Array, inputs: Sequence, outputs: Sequence):
  """Calls a kernel with the terms, the runs, and further inputs (block, array); `outputs` are (block, shape, type)."""
  q, _, v, *_ = terms
  blocks = _blocks(q, v)
  runs_before = jnp.pad(runs[:, _CHUNK - 1 : -1 : _CHUNK], ((0, 0), (1, 0)))
  inputs = [*zip(_TERM_BLOCKS, terms), ('runs', runs), ('runs_before', runs_before), *inputs]
  return pl.pallas_call(
    functools.partial(kernel, static=static),
    grid=(_parts(q.shape[3], v.shape[3]), v.shape[2], len(q)),
    in_specs=[blocks[name] for name, _ in inputs],
    out_specs=[blocks[name] for name, *_ in outputs],
    out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs],
    compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
    interpret=static.interpret,
    name=f'recurrence{kernel.__name__.removesuffix("_kernel")}',
  )(*(x for _, x in inputs))


def _forward(static: _Static, terms, state: jax.Array, runs: jax.Array, keep: bool = False):
  """Returns (outputs [B, T, H, e], state [B, H, d, e]), and with `keep` states before chunks [B, H, N, d, e]."""
  (rows, heads, *sizes), chunks = state.shape, runs.shape[1] // _CHUNK
  outputs = [('values', terms[2].shape, terms[2].dtype), ('state', state.shape, jnp.float32)]
  outputs += [('states', (rows, heads, chunks, *sizes), static.dtype)] * keep
  return _call(_forward_kernel, static, terms, runs, inputs=[('state', state)], outputs=outputs)


def _backward(static: _Static, terms, runs: jax.Array, states: jax.Array, g):
  """Returns the gradients of the terms, as a tuple, and of the state before the row."""
  q, k, v, *_ = terms
  parts, (rows, length, heads, _) = _parts(q.shape[3], v.shape[3]), v.shape
  inputs = [('states', states), ('values', g[0]), ('state', g[1])]
  d_keys = 'd_keys', (parts, rows, length, heads, q.shape[3]), q.dtype
  d_scalars = 'd_scalars', (parts, rows, length, heads), jnp.float32
  d_values, d_state = ('values', v.shape, v.dtype), ('state', g[1].shape, jnp.float32)
  outputs = [d_keys, d_keys, d_values, d_scalars, d_scalars, d_state]
  dq, dk, dv, d_decay, d_beta, d_state = _call(_backward_kernel, static, terms, runs, inputs=inputs, outputs=outputs)

  def summed(x):
    """Sums the gradients of the parts and of the value heads of each key head."""
    x = x.reshape(parts, rows, length, k.shape[2], -1, k.shape[3])
    return jnp.sum(x, axis=(0, 4), dtype=jnp.float32).astype(k.dtype)

  return (summed(dq), summed(dk), dv, jnp.sum(d_decay, axis=0), jnp.sum(d_beta, axis=0)), d_state
