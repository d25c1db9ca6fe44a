"""Linear recurrences with decay, as functions of arrays: the gated delta rule, and state spaces (Mamba-2).

Legend: B rows, T tokens, K heads of queries and keys, G value heads for each of them,
H = K G value heads, d size of keys, e size of values, N chunks, C tokens of a chunk.

A head has a state S [d, e], which is read by queries and forgets, with decay
a_t = exp(log_decay_t). A state space (Dao and Gu, arXiv:2405.21060, eq. 2) adds to it; the
gated delta rule (Yang et al., arXiv:2412.06464, eq. 10) corrects it, with step b_t:

  S_t = a_t S_{t-1} + k_t b_t v_t^T                              corrected=False
  S_t = a_t S_{t-1} + k_t b_t (v_t - (a_t S_{t-1})^T k_t)^T      corrected=True
  o_t = S_t^T q_t

The decay is one number or, in Kimi Delta Attention (Kimi Linear, arXiv:2510.26692), a
diagonal matrix with one for each of the d channels of queries and keys.

`chunked` computes whole rows, `step` one token, and `over_row` the one of them that a row needs.
A row has runs of tokens (`convolution.runs_of`); a new run starts from an empty state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpost.matmul import einsum

Terms = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]  # q, k, v, log_decay and beta, see `chunked`
CHUNK = 64  # tokens whose states are never materialized
BLOCK = 1024  # tokens whose terms are in memory at a time
_EXACT = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


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

  The float32 terms of chunks are large: longer rows are computed in blocks, which the backward pass computes again.

  Within a chunk the corrections u_t = b_t (v_t - (a_t S_{t-1})^T k_t) solve a triangular
  system (the WY form of Yang et al., arXiv:2406.06484; decay: arXiv:2412.06464, section 3.3).

  Args:
    q, k: [B, T, K, d].
    v: [B, T, H, e].
    log_decay: [B, T, H, 1] or, of each channel, [B, T, H, d]; never positive.
    beta: [B, T, H]; 0 here and in the decay leaves the state as it is.
    runs: [B, T], see `convolution.runs_of`.
    dtype: type of the operands of products; states, decays and the solution of the
      triangular system are float32.
    corrected: see above.
    state: [B, H, d, e] that run 0 continues; None: zeros.
    chunk: C, a power of 2; 0: `CHUNK`, or less for a shorter row.
    block: tokens of a block, at most, if it has several chunks.

  Returns:
    (out [B, T, H, e], state [B, H, d, e] at the end of the row), float32.
  """
  rows, length, heads, size = k.shape
  groups, width = v.shape[2] // heads, v.shape[3]
  chunk = chunk or min(CHUNK, 1 << (length - 1).bit_length())
  shape = rows, heads, groups, size, width
  first = jnp.zeros(shape, jnp.float32) if state is None else state.astype(jnp.float32).reshape(shape)
  carry = first, jnp.zeros_like(runs[:, 0])
  one = functools.partial(_block, product=functools.partial(einsum, dtype=dtype), corrected=corrected, chunk=chunk)
  terms = q, k, v, log_decay, beta
  count = -(-length // max(block, chunk))
  if count == 1:
    (last, _), out = one(carry, (*terms, runs))
  else:
    each = chunk * -(-length // (count * chunk))
    padding = each * count - length

    def split(x, mode='constant'):
      x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)), mode=mode)
      return x.reshape(rows, count, each, *x.shape[2:]).swapaxes(0, 1)

    blocks = (*map(split, terms), split(runs, mode='edge'))
    (last, _), out = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), carry, blocks)
    out = out.swapaxes(0, 1).reshape(rows, -1, *out.shape[3:])[:, :length]
  return out, last.reshape(rows, heads * groups, size, width)


def _block(carry: tuple, terms: tuple, product: Callable, corrected: bool, chunk: int) -> tuple[tuple, jax.Array]:
  """Computes a block of chunks: ((state, run) before it, terms of its tokens) -> ((state, run) behind it, out)."""
  (state, before), (q, k, v, log_decay, beta, runs) = carry, terms
  rows, length, heads, size = k.shape
  groups, width = v.shape[2] // heads, v.shape[3]
  last_run = runs[:, -1]
  q, k = (_chunks(x, chunk, heads, size) for x in (q, k))  # [B, N, K, C, d]
  v = _chunks(v, chunk, heads, groups, width)  # [B, N, K, G, C, e]
  log_decay = _chunks(log_decay, chunk, heads, groups, log_decay.shape[-1])  # [B, N, K, G, C, 1 or d]
  beta = _chunks(beta[..., None], chunk, heads, groups, 1)  # [B, N, K, G, C, 1]
  runs = jnp.pad(runs, ((0, 0), (0, -length % chunk)), mode='edge').reshape(rows, -1, chunk)

  similar = _similarity(k, log_decay, runs, product)
  start, last = _to_borders(log_decay, runs, before)
  own, carried = beta * v, None
  if corrected:
    inverse = _inverse(jnp.tril(similar(k) * beta, -1))
    own = product('bnkgij,bnkgje->bnkgie', inverse, own)
    carried = product('bnkgij,bnkgjd->bnkgid', inverse, beta * start * k[:, :, :, None])
  scores = similar(q)
  state, out = _over_chunks((q, k, own, carried, scores, start, last), state, product)
  out = jnp.transpose(out, (1, 0, 4, 2, 3, 5)).reshape(rows, -1, heads * groups, width)
  return (state, last_run), out[:, :length]


def _over_chunks(terms: tuple, state: jax.Array, product: Callable) -> tuple[jax.Array, jax.Array]:
  """Carries the state [B, K, G, d, e] through the chunks; returns it, and outputs [N, B, K, G, C, e]."""

  def one(state, terms):
    q, k, u, carried, scores, start, last = terms
    if carried is not None:
      u = u - product('bkgid,bkgde->bkgie', carried, state)
    out = product('bkgid,bkgde->bkgie', start * q[:, :, None], state) + product('bkgij,bkgje->bkgie', scores, u)
    kept = start[..., -1, :, None]
    return kept * state + product('bkgjd,bkgje->bkgde', last * k[:, :, None], u), out

  return jax.lax.scan(one, state, jax.tree.map(lambda x: x.swapaxes(0, 1), terms))


def step(
  q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array, *, corrected: bool
) -> tuple[jax.Array, jax.Array]:
  """Computes a recurrence of one token, in float32.

  Args:
    q, k: [B, K, d].
    v: [B, H, e].
    log_decay: [B, H, 1 or d].
    beta: [B, H].
    state: [B, H, d, e].

  Returns:
    (out [B, H, e], state [B, H, d, e]).
  """
  groups = v.shape[1] // k.shape[1]
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  q, k = (jnp.repeat(x, groups, axis=1)[..., None] for x in (q, k))
  state = jnp.exp(log_decay)[..., None] * state
  u = beta[..., None] * (v - jnp.sum(k * state, axis=2) if corrected else v)
  state = state + k * u[:, :, None]
  return jnp.sum(q * state, axis=2), state


def over_row(
  terms: Terms, runs: jax.Array, *, dtype: str, corrected: bool, state: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Computes a recurrence over rows, or the next token of sequences whose state is given.

  Args:
    terms: like the others and the result, see `chunked`.
  """
  if state is None or terms[0].shape[1] > 1:
    return chunked(*terms, runs=runs, dtype=dtype, corrected=corrected, state=state)
  q, k, v, log_decay, beta = (term[:, 0] for term in terms)
  out, state = step(q, k, v, log_decay, beta, state=state, corrected=corrected)
  return out[:, None], state


def _chunks(x: jax.Array, chunk: int, *shape: int) -> jax.Array:
  """[B, T, H, d] -> float32 [B, N, K, C, d] or [B, N, K, G, C, d]: time behind the heads.

  shape: the dimensions after time.
  """
  x = x.astype(jnp.float32)
  x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk), (0, 0), (0, 0)))
  x = x.reshape(x.shape[0], -1, chunk, *shape)
  return jnp.moveaxis(x, 2, x.ndim - 2)


def _to_borders(log_decay: jax.Array, runs: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the decays of the state before a chunk at each token, and of each token at its end.

  first: [B], the run before the first chunk.
  Both are [B, N, K, G, C, 1 or d]. Each is a sum of its own, see `_similarity`, and 0 across the border of two runs.
  """
  before = jnp.concatenate([first[:, None], runs[:, :-1, -1]], axis=1)
  same = [(runs == x[..., None])[:, :, None, None, :, None] for x in (before, runs[..., -1])]
  later = jnp.pad(log_decay[..., 1:, :], ((0, 0),) * 4 + ((0, 1), (0, 0)))
  sums = jnp.cumsum(log_decay, axis=4), jax.lax.cumsum(later, axis=4, reverse=True)
  return jnp.exp(sums[0]) * same[0], jnp.exp(sums[1]) * same[1]


def _similarity(k: jax.Array, log_decay: jax.Array, runs: jax.Array, product: Callable) -> Callable:
  """Returns x [B, N, K, C, d] -> [B, N, K, G, C, C]: the products of x_i with keys as they have decayed at i.

  These are 0 unless j <= i are tokens of one run. Each decay is the exponential of a sum of
  its own over (j, i], never of a difference of two cumulative sums: that would lose the bits
  of a slow decay after a fast one, and overflow where it is split into factors.
  """
  chunk = runs.shape[-1]
  causal = jnp.tril(jnp.ones((chunk, chunk), bool))
  visible = (causal & (runs[..., :, None] == runs[..., None, :]))[:, :, None, None]
  if log_decay.shape[-1] > 1:
    return lambda x: jnp.where(visible, _by_channel(x, k, log_decay, product), 0)
  # Summed over l: token i sees l, and j is before it.
  seen = jnp.where(visible, log_decay.swapaxes(-1, -2), 0)
  decay = jnp.where(visible, jnp.exp(_EXACT('...il,lj->...ij', seen, jnp.tril(causal, -1).astype('f'))), 0)
  return lambda x: product('bnkid,bnkjd->bnkij', x, k)[:, :, :, None] * decay


def _by_channel(x: jax.Array, k: jax.Array, log_decay: jax.Array, product: Callable) -> jax.Array:
  """Returns sum_c x_ic k_jc exp(sum of log_decay_c over (j, i]) for j <= i: [B, N, K, G, C, C].

  By doubling blocks, as `_inverse`: the decay between tokens of two neighboring blocks is that
  from j to the border times that from the border to i, and neither exceeds 1.
  """
  index = jnp.arange(x.shape[-2])
  x, k = x[:, :, :, None], k[:, :, :, None]

  @functools.partial(jax.checkpoint, static_argnums=3)  # recomputes what has the size of x
  def between(x, k, log_decay, size):
    block = index // size
    upper = (block % 2 == 1)[:, None]  # tokens i, whose block is behind the border
    # The sum to the border of the pair of blocks counts token l if it is at most i, or comes after j.
    order = jnp.where(upper, index <= index[:, None], index > index[:, None])
    terms = order & (block[:, None] == block)
    factor = jnp.exp(_EXACT('il,...ld->...id', terms.astype('f'), log_decay))
    some = product('bnkgid,bnkgjd->bnkgij', x * factor, k * factor)
    return jnp.where(upper & (block == block[:, None] - 1), some, 0)

  out, size = jnp.sum(x * k, -1, keepdims=True) * jnp.eye(len(index)), 1
  while size < len(index):
    out = out + between(x, k, log_decay, size)
    size *= 2
  return out


@jax.custom_vjp
def _inverse(lower: jax.Array) -> jax.Array:
  """Returns (I + A)^-1 of strictly lower triangular A [..., C, C], by doubling blocks, in float32.

  It is as stable as substitution; a series of powers of A is not, where keys are alike.
  """
  index = jnp.arange(lower.shape[-1])
  inverse, size = jnp.eye(len(index)), 1
  while size < len(index):
    # The block below the diagonal of each pair of blocks whose inverses are known.
    row, column = index[:, None] // size, index // size
    block = jnp.where((row % 2 == 1) & (column == row - 1), lower, 0)
    inverse = inverse - (block if size == 1 else _EXACT('...ij,...jk,...kl->...il', inverse, block, inverse))
    size *= 2
  return inverse


def _inverse_forward(lower):
  inverse = _inverse(lower)
  return inverse, inverse


def _inverse_backward(inverse, g):
  return (-jnp.tril(_EXACT('...ji,...jk,...lk->...il', inverse, g, inverse), -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
