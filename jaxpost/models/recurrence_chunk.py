"""A chunk of tokens of one head in the recurrences of `recurrence.py`, as functions of matrices.

XLA computes them for all heads and chunks at once. Kernels for GPUs (`recurrence_triton.py`) and TPUs
(`recurrence_mosaic.py`) compute one chunk after the other.

Legend: C tokens of the chunk, d size of keys, e size of values.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.matmul import precision_of

# q, k, v, log_decay and beta, see `recurrence.chunked`
Terms = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
EXACT = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class KernelSettings(NamedTuple):
  """Settings that a kernel is compiled for."""

  dtype: str  # of the operands of products
  corrected: bool
  interpret: bool = False  # run it on the CPU, for tests


class ChunkTerms(NamedTuple):
  """The terms of a chunk of a head that do not depend on the state before it."""

  u: jax.Array  # [C, e], updates of the state, without the corrections w S by the state S before the chunk
  w: jax.Array | None  # [C, d]; None: not corrected
  scores: jax.Array  # [C, C], decayed products of queries and keys
  from_start: jax.Array  # [C, 1 or d], decay from before the chunk to each token
  to_end: jax.Array  # [C, 1 or d], decay from each token to the end of the chunk
  whole: jax.Array  # [] or [d], decay over the whole chunk


def within_chunk(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  runs: jax.Array,
  run_before: jax.Array,
  *,
  product: Callable,
  exact: Callable,
  corrected: bool,
) -> ChunkTerms:
  """Computes the terms of a chunk of a head that do not depend on the state before it.

  Args:
    q, k: [C, d]; v: [C, e]; beta: [C]; float32.
    log_decay: [C] or, of each channel, [C, d].
    runs, run_before: [C] and [], the runs of the tokens and of the token before the chunk.
    product: einsum of two matrices of the type of operands.
    exact: einsum of two float32 matrices.
    corrected: whether to use the gated delta rule.
  """
  row, column = _indices(len(runs))
  visible = (row >= column) & (runs[:, None] == runs[None, :])
  by_channel = log_decay.ndim > 1
  decays = None if by_channel else _decays(exact, log_decay, visible)

  def decayed_products(x):
    """Returns the products [C, C] of x_i and k_j, decayed from token j to i; 0 unless j <= i are of one run."""
    if by_channel:
      return jnp.where(visible, _by_channel(x, k, log_decay, product), 0)
    return product('id,jd->ij', x, k) * decays

  def decay_over(tokens, same_run):
    """Returns the decay [C, 1 or d] over some tokens [C, C], as `_decays` does; 0 across the border of two runs."""
    if by_channel:
      total = exact('il,ld->id', tokens.astype('f'), log_decay)
    else:
      total = jnp.sum(jnp.where(tokens, log_decay[None, :], 0), axis=1, keepdims=True)
    return jnp.where(same_run, jnp.exp(total), 0)

  last_run = jnp.max(runs)
  from_start = decay_over(column <= row, runs[:, None] == run_before)
  to_end = decay_over(column > row, runs[:, None] == last_run)
  whole = jnp.where(last_run == run_before, jnp.exp(jnp.sum(log_decay, axis=0)), 0)
  steps = _column(beta)
  u, w = steps * v, None
  if corrected:
    # u = (I + A)^-1 (beta v) and w = (I + A)^-1 (beta decay k), with the decayed products A of beta k and earlier keys.
    inverse = _inverse(exact, jnp.where(row > column, decayed_products(k) * steps, 0))
    u, w = product('ij,je->ie', inverse, u), product('ij,jd->id', inverse, steps * from_start * k)
  return ChunkTerms(u, w, scores=decayed_products(q), from_start=from_start, to_end=to_end, whole=whole)


def across_chunk(
  state: jax.Array, q: jax.Array, k: jax.Array, terms: ChunkTerms, product: Callable
) -> tuple[jax.Array, jax.Array]:
  """Returns the state [d, e] of a head after a chunk, and the outputs [C, e], from the state before it."""
  u = terms.u if terms.w is None else terms.u - product('id,de->ie', terms.w, state)
  out = product('id,de->ie', terms.from_start * q, state) + product('ij,je->ie', terms.scores, u)
  return terms.whole[..., None] * state + product('jd,je->de', terms.to_end * k, u), out


def chunk_of_head(settings: KernelSettings, exact: Callable, runs: jax.Array, run_before: jax.Array) -> Callable:
  """Returns (state before, q, k, v, log_decay, beta) -> (state after, outputs), for a chunk of a head in a kernel."""
  product = functools.partial(_product, settings.dtype)

  def run(state, q, k, v, log_decay, beta):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    options = dict(runs=runs, run_before=run_before, product=product, exact=exact, corrected=settings.corrected)
    terms = within_chunk(q, k, v, log_decay, beta, **options)
    return across_chunk(state, q, k, terms, product)

  return run


def step_of_head(
  state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, *, corrected: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns the state [d, e] after one token, and its output [e]; log_decay is [] or [d], and the rest as above."""
  state = jnp.exp(log_decay)[..., None] * state
  u = beta * (v - jnp.sum(k[:, None] * state, axis=0) if corrected else v)
  state = state + k[:, None] * u[None, :]
  return state, jnp.sum(q[:, None] * state, axis=0)


def _column(x: jax.Array) -> jax.Array:
  """Returns x [C] as [C, 1]; its gradient is a sum over the first axis."""
  row, column = _indices(len(x))
  return jnp.sum(jnp.where(row == column, x[None, :], 0), axis=1, keepdims=True)


def _indices(size: int) -> tuple[jax.Array, jax.Array]:
  """Returns the rows and the columns of a square matrix."""
  return jax.lax.broadcasted_iota('int32', (size, size), 0), jax.lax.broadcasted_iota('int32', (size, size), 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(dtype: str, spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
  """Computes an einsum of two float32 matrices, and its gradient, from operands of a type."""
  return _product_forward(dtype, spec, x, w)[0]


def _product_forward(dtype, spec, x, w):
  x, w = x.astype(dtype), w.astype(dtype)
  return jnp.einsum(spec, x, w, precision=precision_of(dtype), preferred_element_type='float32'), (x, w)


def _product_backward(dtype, spec, saved, g):
  (x, w), (x_term, w_term, out), g = saved, spec.replace('->', ',').split(','), g.astype(dtype)
  dx = _product_forward(dtype, f'{out},{w_term}->{x_term}', g, w)[0]
  return dx, _product_forward(dtype, f'{x_term},{out}->{w_term}', x, g)[0]


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decays(exact: Callable, log_decay: jax.Array, visible: jax.Array) -> jax.Array:
  """Returns the decays [C, C] from token j to token i, or 0 where i does not see j.

  The log of each is summed directly over (j, i]. A difference of two cumulative sums would lose the bits of a slow
  decay after a fast one, and overflow where the decay is split into factors.
  """
  return _decays_forward(exact, log_decay, visible)[0]


def _decays_forward(exact, log_decay, visible):
  row, column = _indices(len(log_decay))
  sums = exact('il,lj->ij', jnp.where(visible, log_decay[None, :], 0), (row > column).astype('f'))
  decays = jnp.where(visible, jnp.exp(sums), 0)
  return decays, decays


def _decays_backward(exact, decays, g):
  del exact
  row, column = _indices(len(decays))
  # Token l is in (j, i] for all j < l <= i. One token later, the pairs to l are gone, and those from l are new.
  by_pair = g * decays
  change = jnp.sum(jnp.where(row == column, jnp.sum(by_pair, axis=0)[None, :], 0) - by_pair, axis=1, keepdims=True)
  return jnp.sum(jnp.where(row < column, change, 0), axis=0), None


_decays.defvjp(_decays_forward, _decays_backward)


def _by_channel(x: jax.Array, k: jax.Array, log_decay: jax.Array, product: Callable) -> jax.Array:
  """Returns sum_c x_ic k_jc exp(sum of log_decay_c over (j, i]) for j <= i: [C, C].

  Blocks double in size, as in `_inverse`: the decay between tokens of two neighboring blocks is that
  from j to their border times that from the border to i, and neither exceeds 1.
  """
  index = jnp.arange(len(x))

  @functools.partial(jax.checkpoint, static_argnums=3)  # the factors, which have the size of x, are recomputed
  def between(x, k, log_decay, size):
    block = index // size
    upper = (block % 2 == 1)[:, None]  # tokens i, in the second block of a pair; tokens j are in the first
    # Between i or j and the border of the pair are the tokens l <= i of the second block, or l > j of the first.
    order = jnp.where(upper, index <= index[:, None], index > index[:, None])
    terms = order & (block[:, None] == block)
    decay = jnp.exp(EXACT('il,ld->id', terms.astype('f'), log_decay))
    products = product('id,jd->ij', x * decay, k * decay)
    return jnp.where(upper & (block == block[:, None] - 1), products, 0)

  out, size = jnp.sum(x * k, -1, keepdims=True) * jnp.eye(len(index)), 1
  while size < len(index):
    out = out + between(x, k, log_decay, size)
    size *= 2
  return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _inverse(exact: Callable, lower: jax.Array) -> jax.Array:
  """Returns (I + A)^-1 of strictly lower triangular A [C, C], by doubling blocks, in float32.

  It is as stable as substitution, which a series of powers of A is not if keys are similar.
  """
  return _inverse_forward(exact, lower)[0]


def _inverse_forward(exact, lower):
  row, column = _indices(len(lower))
  inverse, size = (row == column).astype('f'), 1
  while size < len(lower):
    # The off-diagonal block of each pair of neighboring diagonal blocks, whose inverses are known.
    block = jnp.where((row > column) & ((row ^ column) & -size == size), lower, 0)
    inverse = inverse - (block if size == 1 else exact('ij,jk->ik', inverse, exact('ij,jk->ik', block, inverse)))
    size *= 2
  return inverse, inverse


def _inverse_backward(exact, inverse, g):
  row, column = _indices(len(inverse))
  return (jnp.where(row > column, -exact('ji,jk->ik', inverse, exact('ij,kj->ik', g, inverse)), 0),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
