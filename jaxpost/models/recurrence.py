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


def _block(carry: tuple, terms: tuple, product: Callable, corrected: bool, chunk: int) -> tuple[tuple, jax.Array]:
  """Computes a block of chunks: ((state, run) before it, terms of its tokens) -> ((state, run) after it, out)."""
  (state, run_before), (q, k, v, log_decay, beta, runs) = carry, terms
  rows, length, heads, size = k.shape
  groups, width = v.shape[2] // heads, v.shape[3]
  last_run = runs[:, -1]
  q, k = _chunks(q, chunk, heads, size), _chunks(k, chunk, heads, size)  # [B, N, K, C, d]
  v = _chunks(v, chunk, heads, groups, width)  # [B, N, K, G, C, e]
  log_decay = _chunks(log_decay, chunk, heads, groups, log_decay.shape[-1])  # [B, N, K, G, C, 1 or d]
  beta = _chunks(beta[..., None], chunk, heads, groups, 1)  # [B, N, K, G, C, 1]
  runs = jnp.pad(runs, ((0, 0), (0, -length % chunk)), mode='edge').reshape(rows, -1, chunk)

  decayed_products = _decayed_products(k, log_decay, runs, product)
  from_start, to_end = _to_borders(log_decay, runs, run_before)
  # If corrected, the updates are u_chunk - w S, with the state S before the chunk: u_chunk = (I + A)^-1 (beta v) and
  # w = (I + A)^-1 (beta decay k), with the decayed products A of beta k and earlier keys of the chunk.
  u_chunk, w = beta * v, None
  if corrected:
    inverse = _inverse(jnp.tril(decayed_products(k) * beta, -1))
    u_chunk = product('bnkgij,bnkgje->bnkgie', inverse, u_chunk)
    w = product('bnkgij,bnkgjd->bnkgid', inverse, beta * from_start * k[:, :, :, None])
  scores = decayed_products(q)
  state, out = _over_chunks((q, k, u_chunk, w, scores, from_start, to_end), state, product)
  out = jnp.transpose(out, (1, 0, 4, 2, 3, 5)).reshape(rows, -1, heads * groups, width)
  return (state, last_run), out[:, :length]


def _over_chunks(terms: tuple, state: jax.Array, product: Callable) -> tuple[jax.Array, jax.Array]:
  """Carries the state [B, K, G, d, e] through the chunks; returns it, and outputs [N, B, K, G, C, e]."""

  def run_chunk(state, terms):
    q, k, u, w, scores, from_start, to_end = terms
    if w is not None:
      u = u - product('bkgid,bkgde->bkgie', w, state)
    out = product('bkgid,bkgde->bkgie', from_start * q[:, :, None], state) + product('bkgij,bkgje->bkgie', scores, u)
    decay = from_start[..., -1, :, None]  # of the state over the whole chunk
    return decay * state + product('bkgjd,bkgje->bkgde', to_end * k[:, :, None], u), out

  return jax.lax.scan(run_chunk, state, jax.tree.map(lambda x: x.swapaxes(0, 1), terms))


def step(
  q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array, *, corrected: bool
) -> tuple[jax.Array, jax.Array]:
  """Computes a recurrence of one token, in float32; arguments and result are those of `chunked`, without T."""
  groups = v.shape[1] // k.shape[1]
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  q, k = jnp.repeat(q, groups, axis=1)[..., None], jnp.repeat(k, groups, axis=1)[..., None]
  state = jnp.exp(log_decay)[..., None] * state
  u = beta[..., None] * (v - jnp.sum(k * state, axis=2) if corrected else v)
  state = state + k * u[:, :, None]
  return jnp.sum(q * state, axis=2), state


def over_row(
  terms: Terms, runs: jax.Array, *, dtype: str, corrected: bool, state: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Computes a recurrence over rows, or for one more token of sequences with a state; see `chunked`."""
  if state is None or terms[0].shape[1] > 1:
    return chunked(*terms, runs=runs, dtype=dtype, corrected=corrected, state=state)
  q, k, v, log_decay, beta = (term[:, 0] for term in terms)
  out, state = step(q, k, v, log_decay, beta, state=state, corrected=corrected)
  return out[:, None], state


def _chunks(x: jax.Array, chunk: int, *shape: int) -> jax.Array:
  """Splits time into chunks, padded with zeros: [B, T, H, d] -> float32 [B, N, K, C, d] or [B, N, K, G, C, d].

  shape: the dimensions of the result without B, N and C: (K, d) or (K, G, d).
  """
  x = x.astype(jnp.float32)
  x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk), (0, 0), (0, 0)))
  x = x.reshape(x.shape[0], -1, chunk, *shape)
  return jnp.moveaxis(x, 2, x.ndim - 2)


def _to_borders(log_decay: jax.Array, runs: jax.Array, run_before: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the decays from before a chunk to each of its tokens, and from each token to the end of the chunk.

  Both are [B, N, K, G, C, 1 or d], and 0 across the border of two runs. As in `_decayed_products`, the log of each is
  summed directly. run_before: [B], the run before the first chunk.
  """
  runs_before = jnp.concatenate([run_before[:, None], runs[:, :-1, -1]], axis=1)
  same = [(runs == x[..., None])[:, :, None, None, :, None] for x in (runs_before, runs[..., -1])]
  later = jnp.pad(log_decay[..., 1:, :], ((0, 0),) * 4 + ((0, 1), (0, 0)))
  sums = jnp.cumsum(log_decay, axis=4), jax.lax.cumsum(later, axis=4, reverse=True)
  return jnp.exp(sums[0]) * same[0], jnp.exp(sums[1]) * same[1]


def _decayed_products(k: jax.Array, log_decay: jax.Array, runs: jax.Array, product: Callable) -> Callable:
  """Returns x [B, N, K, C, d] -> [B, N, K, G, C, C]: the products of x_i and k_j, decayed from token j to token i.

  They are 0 unless j <= i are tokens of one run. The log of each decay is summed directly over
  (j, i]. A difference of two cumulative sums would lose the bits of a slow decay after a fast
  one, and overflow where the decay is split into factors.
  """
  chunk = runs.shape[-1]
  causal = jnp.tril(jnp.ones((chunk, chunk), bool))
  visible = (causal & (runs[..., :, None] == runs[..., None, :]))[:, :, None, None]
  if log_decay.shape[-1] > 1:
    return lambda x: jnp.where(visible, _by_channel(x, k, log_decay, product), 0)
  # The log decay of (i, j) is the sum over tokens l with j < l <= i.
  up_to_i = jnp.where(visible, log_decay.swapaxes(-1, -2), 0)
  decay = jnp.where(visible, jnp.exp(_EXACT('...il,lj->...ij', up_to_i, jnp.tril(causal, -1).astype('f'))), 0)
  return lambda x: product('bnkid,bnkjd->bnkij', x, k)[:, :, :, None] * decay


def _by_channel(x: jax.Array, k: jax.Array, log_decay: jax.Array, product: Callable) -> jax.Array:
  """Returns sum_c x_ic k_jc exp(sum of log_decay_c over (j, i]) for j <= i: [B, N, K, G, C, C].

  Blocks double in size, as in `_inverse`: the decay between tokens of two neighboring blocks is that
  from j to their border times that from the border to i, and neither exceeds 1.
  """
  index = jnp.arange(x.shape[-2])
  x, k = x[:, :, :, None], k[:, :, :, None]

  @functools.partial(jax.checkpoint, static_argnums=3)  # the factors, which have the size of x, are recomputed
  def between(x, k, log_decay, size):
    block = index // size
    upper = (block % 2 == 1)[:, None]  # tokens i, in the second block of a pair; tokens j are in the first
    # Between i or j and the border of the pair are the tokens l <= i of the second block, or l > j of the first.
    order = jnp.where(upper, index <= index[:, None], index > index[:, None])
    terms = order & (block[:, None] == block)
    decay = jnp.exp(_EXACT('il,...ld->...id', terms.astype('f'), log_decay))
    products = product('bnkgid,bnkgjd->bnkgij', x * decay, k * decay)
    return jnp.where(upper & (block == block[:, None] - 1), products, 0)

  out, size = jnp.sum(x * k, -1, keepdims=True) * jnp.eye(len(index)), 1
  while size < len(index):
    out = out + between(x, k, log_decay, size)
    size *= 2
  return out


@jax.custom_vjp
def _inverse(lower: jax.Array) -> jax.Array:
  """Returns (I + A)^-1 of strictly lower triangular A [..., C, C], by doubling blocks, in float32.

  It is as stable as substitution, which a series of powers of A is not if keys are similar.
  """
  index = jnp.arange(lower.shape[-1])
  inverse, size = jnp.eye(len(index)), 1
  while size < len(index):
    # The off-diagonal block of each pair of neighboring diagonal blocks, whose inverses are known.
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
