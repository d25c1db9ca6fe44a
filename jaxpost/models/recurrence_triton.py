"""The recurrences of `recurrence.py` for NVIDIA GPUs, in Pallas for Triton: over rows, and of single tokens.

One program computes some channels of the values of a head, chunk by chunk, and keeps their part of the state in
registers. The terms of a chunk take about fifty kernels of XLA.

Legend: B rows, T tokens, K heads of queries and keys, H value heads, d size of keys, e size of values, C tokens of a
chunk, N chunks, P parts of the values.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxpost.models.recurrence_chunk import KernelSettings, Terms, chunk_of_head, step_of_head

CHUNK = 32  # with 64 tokens, a thread spills ten times as much of its registers
_STATE_SIZE = 8192  # elements of the state of a program
HEAD = 2
PARAMETERS = plgpu.CompilerParams(num_warps=8, num_stages=1)


def supports(size: int, width: int, channels: int, single: bool) -> bool:
  """Returns whether the kernels support such heads, see `recurrence_kernels.supports`; `one_token` has any channels."""
  return (channels == 1 or single) and all(16 <= n <= 256 and n & (n - 1) == 0 for n in (size, width))


def one_token(
  terms: Terms, runs: jax.Array, state: jax.Array, *, corrected: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Computes `recurrence.chunked` of one token of each sequence, whose run (`runs`) is that of the state.

  It reads the state once, and writes the new one in its place. It has no gradient. The result is rounded to the type of
  v.

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


# -------------------------------------------------------------------- kernels


def _chunk(settings: KernelSettings, runs: jax.Array, run_before: jax.Array) -> Callable:
  # Three products in TF32 come close to one in float32, for which there are no matrix units.
  exactly = jax.lax.Precision.HIGHEST if settings.interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
  return chunk_of_head(settings, functools.partial(jnp.einsum, precision=exactly), runs, run_before)


def forward_kernel(*refs, settings: KernelSettings) -> None:
  *term_refs, runs_ref, run_before_ref, state_ref, out_ref, last_state_ref = refs[:10]
  states_ref = refs[10] if len(refs) > 10 else None

  def run(i, state):
    tokens = pl.ds(i * CHUNK, CHUNK)
    if states_ref is not None:
      states_ref[i] = state.astype(states_ref.dtype)
    chunk = _chunk(settings, runs_ref[i], run_before_ref[i])
    # Triton has no rule for functions with gradients of their own; `jax.vjp` replaces them by what they compute.
    (state, out), _ = jax.vjp(chunk, state, *(ref[tokens] for ref in term_refs))
    out_ref[tokens] = out.astype(out_ref.dtype)
    return state

  last_state_ref[...] = jax.lax.fori_loop(0, run_before_ref.shape[0], run, state_ref[...])


def backward_kernel(*refs, settings: KernelSettings) -> None:
  *term_refs, runs_ref, run_before_ref, states_ref, g_ref, g_state_ref = refs[:10]
  *d_refs, d_state_ref = refs[10:]
  count = run_before_ref.shape[0]

  def run(n, g_state):
    i = count - 1 - n
    tokens = pl.ds(i * CHUNK, CHUNK)
    chunk = _chunk(settings, runs_ref[i], run_before_ref[i])
    _, vjp = jax.vjp(chunk, states_ref[i].astype(jnp.float32), *(ref[tokens] for ref in term_refs))
    g_state, *gradients = vjp((g_state, g_ref[tokens].astype(jnp.float32)))
    for ref, gradient in zip(d_refs, gradients, strict=True):
      ref[tokens] = gradient.astype(ref.dtype)
    return g_state

  d_state_ref[...] = jax.lax.fori_loop(0, count, run, g_state_ref[...])


# ---------------------------------------------------------------------- calls


def arranged(terms: Terms) -> Terms:
  """Returns q and k [B, T, K, d], v [B, T, H, e], log_decay and beta [B, T, H] as they are."""
  return terms


def _parts(size: int, width: int) -> int:
  return max(1, width * size // _STATE_SIZE)


def gradient_parts(k: jax.Array, v: jax.Array) -> tuple[tuple[int, ...], int]:
  """Returns the shape of the gradients of keys, and P: each part of each value head has its own gradients."""
  parts = _parts(k.shape[3], v.shape[3])
  return (parts, *v.shape[:3], k.shape[3]), parts


def blocks(k: jax.Array, v: jax.Array, reverse: bool) -> tuple[tuple[int, ...], dict[str, pl.BlockSpec]]:
  """Returns the grid, and blocks of arrays that the program (part of the values, value head, row) reads or writes."""
  del reverse
  (rows, length, kv_heads, size), (heads, width) = k.shape, v.shape[2:]
  group, chunks, parts = heads // kv_heads, length // CHUNK, _parts(size, width)
  part = width // parts
  return (parts, heads, rows), {
    'keys': pl.BlockSpec((None, length, None, size), lambda p, h, b: (b, 0, h // group, 0)),
    'values': pl.BlockSpec((None, length, None, part), lambda p, h, b: (b, 0, h, p)),
    'scalars': pl.BlockSpec((None, length, None), lambda p, h, b: (b, 0, h)),
    'runs': pl.BlockSpec((None, chunks, None, CHUNK), lambda p, h, b: (b, 0, 0, 0)),
    'runs_before': pl.BlockSpec((None, chunks, None, None), lambda p, h, b: (b, 0, 0, 0)),
    'state': pl.BlockSpec((None, None, size, part), lambda p, h, b: (b, h, 0, p)),
    'states': pl.BlockSpec((None, None, chunks, size, part), lambda p, h, b: (b, h, 0, 0, p)),
    'd_keys': pl.BlockSpec((None, None, length, None, size), lambda p, h, b: (p, b, 0, h, 0)),
    'd_scalars': pl.BlockSpec((None, None, length, None), lambda p, h, b: (p, b, 0, h)),
  }
