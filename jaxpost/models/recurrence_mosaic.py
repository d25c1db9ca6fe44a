"""The recurrences of `recurrence.py` over rows for TPUs, in Pallas for Mosaic.

One program computes several value heads, so that a product of one head does not wait for the result of the product
before it, chunk by chunk, and keeps their states in vector memory. XLA writes the terms of each chunk to main memory,
and the inverse of the triangular matrix of a chunk after each of its steps.

Legend: B rows, T tokens, K heads of queries and keys, H value heads, d size of keys, e size of values, C tokens of a
chunk, N chunks; a program has k of the key heads and h of the value heads, and P programs have parts of the value heads
of the same key heads.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxpost.models.recurrence_chunk import EXACT, KernelSettings, Terms, chunk_of_head

CHUNK = 64
_HEADS = 8  # value heads of a program, at most; with 4, it takes a fifth longer
_STATES = 2**18  # elements of the states of a program, at most; with 2^19, a v5p has too little vector memory
HEAD = 1
PARAMETERS = pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'parallel', 'arbitrary'))


def supports(size: int, width: int, channels: int, single: bool) -> bool:
  """Returns whether the kernel supports such heads, see `recurrence_kernels.supports`.

  Single tokens are left to XLA, which updates their states in place on TPUs.
  """
  return channels == 1 and not single and all(n % 16 == 0 and n <= 256 for n in (size, width))


# -------------------------------------------------------------------- kernels


def _exact(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
  """Computes an einsum of float32 matrices from three products in bfloat16, with an error of about 2^-16.

  `Precision.HIGHEST` has six products, and the inverse of a chunk is most of the work.
  """

  def split(x):
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)

  (x_high, x_low), (w_high, w_low) = split(x), split(w)
  product = functools.partial(jnp.einsum, spec, preferred_element_type='float32')
  return product(x_high, w_high) + (product(x_high, w_low) + product(x_low, w_high))


def _chunk(settings: KernelSettings, runs_ref, run_before_ref) -> Callable:
  """Returns (states before, q, k, v, log_decay, beta) -> (states after, outputs), for the heads of a program."""
  exact = EXACT if settings.dtype == 'float32' else _exact
  of_head = chunk_of_head(settings, exact, runs_ref[0], run_before_ref[0, 0])

  def run(states, q, k, v, log_decay, beta):
    def of_value_heads(x):  # [k, C, d] -> [h, C, d]
      repeated = jnp.broadcast_to(x[:, None], (len(x), len(v) // len(x), *x.shape[1:]))
      return repeated.reshape(len(v), *x.shape[1:])

    return jax.vmap(of_head)(states, of_value_heads(q), of_value_heads(k), v, log_decay, beta)

  return run


def _terms(refs: Sequence) -> tuple[jax.Array, ...]:
  """Returns q and k [k, C, d], v [h, C, e], log_decay and beta [h, C]."""
  *qkv, log_decay_ref, beta_ref = refs
  return *(ref[...] for ref in qkv), log_decay_ref[:, 0], beta_ref[:, 0]


def forward_kernel(*refs, settings: KernelSettings) -> None:
  *term_refs, runs_ref, run_before_ref, first_state_ref, out_ref, state_ref = refs[:10]

  @pl.when(pl.program_id(3) == 0)
  def _():
    state_ref[...] = first_state_ref[...]

  state = state_ref[...]
  for states_ref in refs[10:]:
    states_ref[...] = state.astype(states_ref.dtype)
  # Mosaic has no rule for functions with gradients of their own; `jax.vjp` replaces them by what they compute.
  (state_ref[...], out), _ = jax.vjp(_chunk(settings, runs_ref, run_before_ref), state, *_terms(term_refs))
  out_ref[...] = out.astype(out_ref.dtype)


def backward_kernel(*refs, settings: KernelSettings) -> None:
  *term_refs, runs_ref, run_before_ref, states_ref, g_ref, last_g_state_ref = refs[:10]
  *d_refs, d_decay_ref, d_beta_ref, g_state_ref = refs[10:]

  @pl.when(pl.program_id(3) == 0)
  def _():
    g_state_ref[...] = last_g_state_ref[...]

  chunk = _chunk(settings, runs_ref, run_before_ref)
  _, vjp = jax.vjp(chunk, states_ref[...].astype(jnp.float32), *_terms(term_refs))
  g_state_ref[...], *gradients, d_decay, d_beta = vjp((g_state_ref[...], g_ref[...].astype(jnp.float32)))
  for ref, gradient in zip(d_refs, gradients, strict=True):
    ref[...] = gradient.astype(ref.dtype)
  d_decay_ref[:, 0], d_beta_ref[:, 0] = d_decay, d_beta


# ---------------------------------------------------------------------- calls


def arranged(terms: Terms) -> Terms:
  """Returns q and k [B, K, T, d], v [B, H, T, e], log_decay and beta [B, H, N, 1, C]."""
  q, k, v, log_decay, beta = (x.swapaxes(1, 2) for x in terms)
  log_decay, beta = (x.reshape(*x.shape[:2], -1, 1, CHUNK) for x in (log_decay, beta))
  return q, k, v, log_decay, beta


def _split(kv_heads: int, heads: int, size: int, width: int) -> tuple[int, int, int]:
  """Returns k, h and P, see the module."""
  group, lanes = heads // kv_heads, -(-width // 128) * 128
  most = min(_HEADS, _STATES // (size * lanes))
  of_key_head = max(n for n in range(1, most + 1) if group % n == 0)
  if of_key_head < group:
    return 1, of_key_head, group // of_key_head
  k = max(n for n in range(1, most // group + 1) if kv_heads % n == 0)
  return k, k * group, 1


def gradient_parts(k: jax.Array, v: jax.Array) -> tuple[tuple[int, ...], int]:
  """Returns the shape of the gradients of q and k, of which each of P programs has its own, and 1: decays have one."""
  return (_split(k.shape[1], v.shape[1], k.shape[3], v.shape[3])[2], *k.shape), 1


def blocks(k: jax.Array, v: jax.Array, reverse: bool) -> tuple[tuple[int, ...], dict[str, pl.BlockSpec]]:
  """Returns the grid, and the blocks of arrays that a program reads or writes.

  A program is of (row, key heads, part of their value heads, chunk).

  Args:
    reverse: whether the last chunk comes first.
  """
  (rows, kv_heads, length, size), (heads, width) = k.shape, (v.shape[1], v.shape[3])
  chunks, (k_heads, h, parts) = length // CHUNK, _split(kv_heads, heads, size, width)

  def at(n):
    return chunks - 1 - n if reverse else n

  return (rows, kv_heads // k_heads, parts, chunks), {
    'keys': pl.BlockSpec((None, k_heads, CHUNK, size), lambda b, i, p, n: (b, i, at(n), 0)),
    'values': pl.BlockSpec((None, h, CHUNK, width), lambda b, i, p, n: (b, i * parts + p, at(n), 0)),
    'scalars': pl.BlockSpec((None, h, None, 1, CHUNK), lambda b, i, p, n: (b, i * parts + p, at(n), 0, 0)),
    'runs': pl.BlockSpec((None, None, 1, CHUNK), lambda b, i, p, n: (b, at(n), 0, 0)),
    'runs_before': pl.BlockSpec((None, None, 1, 1), lambda b, i, p, n: (b, at(n), 0, 0)),
    'state': pl.BlockSpec((None, h, size, width), lambda b, i, p, n: (b, i * parts + p, 0, 0)),
    'states': pl.BlockSpec((None, h, None, size, width), lambda b, i, p, n: (b, i * parts + p, at(n), 0, 0)),
    'd_keys': pl.BlockSpec((None, None, k_heads, CHUNK, size), lambda b, i, p, n: (p, b, i, at(n), 0)),
    'd_scalars': pl.BlockSpec((None, None, h, None, 1, CHUNK), lambda b, i, p, n: (0, b, i * parts + p, at(n), 0, 0)),
  }
