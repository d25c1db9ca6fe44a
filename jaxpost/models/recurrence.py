"""Linear recurrences with decay, as functions of arrays: the gated delta rule, and state spaces (Mamba-2).

Legend: B rows, T tokens, K heads of queries and keys, G value heads for each of them,
H = K G value heads, d size of keys, e size of values, N chunks, C tokens of a chunk.

A head has a state S [d, e], which decays by a_t = exp(log_decay_t) and which queries read.
A state space (Dao and Gu, arXiv:2405.21060, eq. 2) adds values to it, with steps b_t; the
gated delta rule (Yang et al., arXiv:2412.06464, eq. 10) corrects the value of a key:

  S_t = a_t S_{t-1} + k_t b_t v_t^T                              corrected=False
  S_t = a_t S_{t-1} + k_t b_t (v_t - (a_t S_{t-1})^T k_t)^T      corrected=True
  o_t = S_t^T q_t

The decay is one number or, in Kimi Delta Attention (Kimi Linear, arXiv:2510.26692), a
diagonal matrix with one for each of the d channels of queries and keys.

`chunked` computes whole rows, `step` one token, and `over_row` calls the one that fits.
A row has runs of tokens (`convolution.runs_of`); a new run starts from an empty state.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpost.matmul import Compute, einsum
from jaxpost.models.recurrence_chunk import EXACT, Terms, across_chunk, step_of_head, within_chunk

CHUNK = 64  # tokens whose states are never materialized
BLOCK = 1024  # tokens whose terms are in memory at a time


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  runs: jax.Array,
  *,
  dtype: str,
  corrected: bool,
  state: jax.Array | None = None,
  chunk: int = 0,
  block: int = BLOCK,
) -> tuple[jax.Array, jax.Array]:
  """Computes a recurrence chunk by chunk: a scan over T / C states, and C x C products.

  The float32 terms of chunks take much memory: long rows are computed in blocks, which the backward pass recomputes.

  Within a chunk the corrections u_t = b_t (v_t - (a_t S_{t-1})^T k_t) solve a triangular
  system (the WY form of Yang et al., arXiv:2406.06484; decay: arXiv:2412.06464, section 3.3).

  Args:
    q, k: [B, T, K, d].
    v: [B, T, H, e].
    log_decay: [B, T, H, 1] or, of each channel, [B, T, H, d]; never positive.
    beta: [B, T, H], the steps b_t; a token with beta = log_decay = 0 leaves the state unchanged.
    runs: [B, T], see `convolution.runs_of`.
    dtype: type of the operands of products; states, decays and the solution of the
      triangular system are float32.
    corrected: whether to use the gated delta rule, see the module.
    state: [B, H, d, e], the state before the row, which run 0 continues; None: zeros.
    chunk: C, a power of 2; 0: `CHUNK`, or less for a shorter row.
    block: maximal number of tokens of a block, if it has several chunks.

  Returns:
    (out [B, T, H, e], state [B, H, d, e] at the end of the row), float32.
  """
  rows, length, heads, size = k.shape
  groups, width = v.shape[2] // heads, v.shape[3]
  chunk = chunk or min(CHUNK, 1 << (length - 1).bit_length())
  shape = rows, heads, groups, size, width
  state = jnp.zeros(shape, jnp.float32) if state is None else state.astype(jnp.float32).reshape(shape)
  carry = state, jnp.zeros_like(runs[:, 0])
  product = functools.partial(einsum, dtype=dtype)
  run_block = functools.partial(_block, product=product, corrected=corrected, chunk=chunk)
  terms = q, k, v, log_decay, beta
  count = -(-length // max(block, chunk))
  if count == 1:
    (state, _), out = run_block(carry, (*terms, runs))
  else:
    block_length = chunk * -(-length // (count * chunk))

    def split(x, mode='constant'):
      x = jnp.pad(x, ((0, 0), (0, block_length * count - length), *((0, 0),) * (x.ndim - 2)), mode=mode)
      return x.reshape(rows, count, block_length, *x.shape[2:]).swapaxes(0, 1)

    blocks = (*map(split, terms), split(runs, mode='edge'))
    (state, _), out = jax.lax.scan(jax.checkpoint(run_block, prevent_cse=False), carry, blocks)
    out = out.swapaxes(0, 1).reshape(rows, -1, *out.shape[3:])[:, :length]
  return out, state.reshape(rows, heads * groups, size, width)


def _block(carry: tuple, inputs: tuple, product: Callable, corrected: bool, chunk: int) -> tuple[tuple, jax.Array]:
  """Computes a block of chunks: ((state, run) before it, terms of its tokens) -> ((state, run) after it, out)."""
  (state, run_before), (q, k, v, log_decay, beta, runs) = carry, inputs
  rows, length, heads, _ = k.shape
  groups, width = v.shape[2] // heads, v.shape[3]
  last_run = runs[:, -1]
  q, k = _chunks(q, chunk, heads), _chunks(k, chunk, heads)  # [B, N, K, C, d]
  log_decay = log_decay[..., 0] if log_decay.shape[-1] == 1 else log_decay
  v, log_decay, beta = (_chunks(x, chunk, heads, groups) for x in (v, log_decay, beta))  # [B, N, K, G, C, ...]
  runs = jnp.pad(runs, ((0, 0), (0, -length % chunk)), mode='edge').reshape(rows, -1, chunk)
  runs_before = jnp.concatenate([run_before[:, None], runs[:, :-1, -1]], axis=1)

  within = functools.partial(within_chunk, product=product, exact=EXACT, corrected=corrected)
  of_key_head = jax.vmap(within, (None, None, 0, 0, 0, None, None))
  of_chunk = jax.vmap(of_key_head, (0, 0, 0, 0, 0, None, None))
  terms = jax.vmap(jax.vmap(of_chunk))(q, k, v, log_decay, beta, runs, runs_before)
  across = jax.vmap(functools.partial(across_chunk, product=product), (0, None, None, 0))
  of_rows = jax.vmap(jax.vmap(across))
  by_chunk = jax.tree.map(lambda x: x.swapaxes(0, 1), (q, k, terms))
  state, out = jax.lax.scan(lambda state, x: of_rows(state, *x), state, by_chunk)
  out = jnp.transpose(out, (1, 0, 4, 2, 3, 5)).reshape(rows, -1, heads * groups, width)
  return (state, last_run), out[:, :length]


def step(
  q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array, *, corrected: bool
) -> tuple[jax.Array, jax.Array]:
  """Computes a recurrence of one token, in float32; arguments and result are those of `chunked`, without T."""
  rows, heads, size = k.shape
  q, k, v, state = (x.astype(jnp.float32) for x in (q, k, v, state))
  log_decay = log_decay[..., 0] if log_decay.shape[-1] == 1 else log_decay
  v, log_decay, beta, state = (x.reshape(rows, heads, -1, *x.shape[2:]) for x in (v, log_decay, beta, state))
  of_key_head = jax.vmap(functools.partial(step_of_head, corrected=corrected), (0, None, None, 0, 0, 0))
  state, out = jax.vmap(jax.vmap(of_key_head))(state, q, k, v, log_decay, beta)
  return out.reshape(rows, -1, out.shape[-1]), state.reshape(rows, -1, size, out.shape[-1])


def over_row(
  terms: Terms, runs: jax.Array, *, compute: Compute, layout: Callable, corrected: bool, state: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Computes a recurrence over rows, or for one more token of sequences with a state; see `chunked`.

  Kernels round the result to the type of v.
  """
  q, k, v, log_decay, beta = terms
  single = state is not None and k.shape[1] == 1
  if compute.recurrence_kernel:
    from jaxpost.models import recurrence_kernels

    if recurrence_kernels.supports(compute.recurrence_kernel, k.shape[3], v.shape[3], log_decay.shape[3], single):
      return recurrence_kernels.over_mesh(terms, runs, state, layout, compute=compute, corrected=corrected)
  if not single:
    return chunked(*terms, runs=runs, dtype=compute.dtype, corrected=corrected, state=state)
  out, state = step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], beta[:, 0], state=state, corrected=corrected)
  return out[:, None], state


def _chunks(x: jax.Array, chunk: int, *heads: int) -> jax.Array:
  """Splits time into chunks, padded with zeros: [B, T, H, ...] -> float32 [B, N, *heads, C, ...]."""
  x = x.astype(jnp.float32)
  x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk), *((0, 0),) * (x.ndim - 2)))
  x = x.reshape(x.shape[0], -1, chunk, *heads, *x.shape[3:])
  return jnp.moveaxis(x, 2, 2 + len(heads))
