"""Hidden states to per-token log-probs, entropy and loss, chunk by chunk.

Legend: B rows, T tokens, C tokens of a chunk, D hidden size, V vocabulary.

The only place where logits exist, and never [B, T, V] of them. One pass
computes a chunk's logits, its loss and, in training, the gradients: the loss
of a token depends on nothing but that token's outputs and the batch, so the
backward pass needs no second look at the logits (Hsu et al., "Liger Kernel",
2024): 3 products with the head where rematerialisation takes 4.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.matmul import Compute, einsum
from jaxpost.sharding import BATCH_AXES, Layout
from jaxpost.types import Outputs

_HIDE = -1e30


class Plan(NamedTuple):
  """What is fixed when the head is compiled.

  objective: (Outputs of [B, C], {name: [B, C]}) -> (loss [B, C],
    {metric: [B, C]}), elementwise in tokens.
  vocab_size: rows of the head that are real; the rest is padding.
  temperature: logits are divided by it.
  entropy: whether the objective reads `outputs.entropy`.
  entropy_grad: whether the loss, and not only a metric, depends on it.
  """

  objective: Callable
  vocab_size: int
  temperature: float
  compute: Compute
  layout: Layout
  entropy: bool = True
  entropy_grad: bool = True


def _no_objective(outputs, arrays):
  del arrays
  return jnp.zeros_like(outputs.logprobs), {}


def token_outputs(plan: Plan, hidden, head, labels, mask) -> Outputs:
  """Log-probs and entropy of `labels` [B, T], without gradients.

  Positions where `mask` is 0 are skipped and come out as 0.
  """
  plan = plan._replace(objective=_no_objective)
  args = _arguments(hidden, head, labels, mask, {})
  return _run(plan, False, *args)[2]


def fused_loss(plan: Plan, hidden, head, labels, weights, arrays):
  """Sum over tokens of weights * objective, differentiable in hidden, head.

  Args:
    hidden: [B, T, D]; head: [V, D]; labels: [B, T] int32.
    weights: [B, T]; tokens of weight 0 are skipped.
    arrays: dict of [B, T] arrays that the objective reads.

  Returns:
    (loss [], {metric: []}), sums weighted by `weights`.
  """
  return _fused(plan, *_arguments(hidden, head, labels, weights, arrays))


def _arguments(hidden, head, labels, weights, arrays):
  """Moves the tokens that count to the front of each row.

  Chunks then end at the longest row, and prompts and padding cost nothing.
  """
  order = jnp.argsort(weights == 0, axis=1, stable=True)
  front = lambda x: jnp.take_along_axis(x, order, axis=1)
  return hidden, head, order, front(labels), front(weights), {
      k: front(v) for k, v in arrays.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(plan, *args):
  return _run(plan, False, *args)[:2]


def _fused_forward(plan, *args):
  loss, metrics, _, grads = _run(plan, True, *args)
  return (loss, metrics), grads


def _fused_backward(plan, grads, cotangents):
  del plan
  scale, _ = cotangents  # metrics are not differentiated
  d_hidden, d_head = ((scale * g).astype(g.dtype) for g in grads)
  return d_hidden, d_head, None, None, None, None


_fused.defvjp(_fused_forward, _fused_backward)


def _run(plan, grad, hidden, head, order, labels, weights, arrays):
  """(loss, metrics, Outputs [B, T], (d hidden, d head) or ()).

  Each batch shard loops over its own chunks. Left to the partitioner, the
  gradient of the head would be summed over the mesh at every chunk.
  """
  shape = plan.layout.mesh.shape
  axes = tuple(a for a in BATCH_AXES if shape[a] > 1)
  if not axes or hidden.shape[0] % plan.layout.batch_shards:
    loss, metrics, outputs, grads = _loop(
        plan, grad, hidden, head, order, labels, weights, arrays)
    if grad:
      grads = grads[0], grads[1].astype(head.dtype)
    return loss, metrics, outputs, grads
  rows, whole = PartitionSpec(axes), PartitionSpec()

  def local(*args):
    loss, metrics, outputs, grads = _loop(plan, grad, *args)
    loss, metrics = jax.lax.psum((loss, metrics), axes)
    if grad:
      grads = grads[0], jax.lax.psum(grads[1], axes)
    return loss, metrics, outputs, grads

  run = jax.shard_map(
      local, mesh=plan.layout.mesh,
      in_specs=(rows, whole, rows, rows, rows, rows),
      out_specs=(whole, whole, rows, (rows, whole) if grad else ()),
      axis_names=set(axes), check_vma=False)
  # Cast before the shards of the head are gathered: half the bytes.
  loss, metrics, outputs, grads = run(
      hidden, head.astype(plan.compute.dtype), order, labels, weights, arrays)
  if grad:
    grads = grads[0], grads[1].astype(head.dtype)
  return loss, metrics, outputs, grads


def _loop(plan, grad, hidden, head, order, labels, weights, arrays):
  """As `_run`, on the rows of one shard."""
  rows, length, width = hidden.shape
  chunk = chunk_length(
      rows, length, head.shape[0], plan.compute.head_elements)
  pad = -length % chunk
  widen = lambda x: jnp.pad(x, ((0, 0), (0, pad)))
  order, labels, weights = widen(order), widen(labels), widen(weights)
  arrays = {k: widen(v) for k, v in arrays.items()}
  longest = jnp.max(jnp.sum(weights != 0, axis=1))

  def body(i, carry):
    at = i * chunk
    take = lambda x: jax.lax.dynamic_slice_in_dim(x, at, chunk, axis=1)
    put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, at, axis=1)
    h = jnp.take_along_axis(hidden, take(order)[..., None], axis=1)
    loss, metrics, outputs, grads = _chunk(
        plan, grad, h, head, take(labels), take(weights),
        {k: take(v) for k, v in arrays.items()})
    total, sums, outs, acc = carry
    if grad:
      acc = (put(acc[0], grads[0].astype(acc[0].dtype)), acc[1] + grads[1])
    return (total + loss, jax.tree.map(jnp.add, sums, metrics),
            jax.tree.map(put, outs, outputs), acc)

  zeros = jnp.zeros((rows, length + pad), jnp.float32)
  outs = Outputs(zeros, zeros)
  _, metrics = jax.eval_shape(plan.objective, outs, arrays)
  sums = {name: jnp.zeros((), jnp.float32) for name in metrics}
  acc = (jnp.zeros((rows, length + pad, width), hidden.dtype),
         jnp.zeros(head.shape[::-1], jnp.float32)) if grad else ()
  total, sums, outs, acc = jax.lax.fori_loop(
      0, -(-longest // chunk), body, (jnp.zeros(()), sums, outs, acc))
  back = jnp.argsort(order[:, :length], axis=1)
  restore = lambda x: jnp.take_along_axis(x[:, :length], back, axis=1)
  outs = jax.tree.map(restore, outs)
  if grad:
    d_hidden = jnp.take_along_axis(
        acc[0][:, :length], back[..., None], axis=1)
    acc = (d_hidden, acc[1].T)
  return total, sums, outs, acc


def chunk_length(rows: int, length: int, vocab: int, elements: int) -> int:
  """Tokens of a row per chunk, so that a chunk has <= `elements` logits."""
  most = max(1, min(length, elements // (rows * vocab)))
  return -(-length // -(-length // most))  # equal chunks


def _chunk(plan, grad, h, head, labels, weights, arrays):
  """One chunk [B, C, D]: (loss, metrics, Outputs, (d h, d head) or ())."""
  dtype = plan.compute.dtype
  logits = einsum('bcd,vd->bcv', h, head, dtype) / plan.temperature
  vocab = jnp.arange(head.shape[0])
  if plan.vocab_size < head.shape[0]:
    logits = jnp.where(vocab < plan.vocab_size, logits, _HIDE)
  top = jnp.max(logits, axis=-1, keepdims=True)
  exp = jnp.exp(logits - top)
  norm = jnp.sum(exp, axis=-1, keepdims=True)
  lse = top + jnp.log(norm)
  # A comparison, not a gather: it stays local when V is sharded.
  is_label = vocab == labels[..., None]
  logp = jnp.sum(jnp.where(is_label, logits, 0), axis=-1) - lse[..., 0]
  if plan.entropy:
    ent = (lse - jnp.sum(exp * logits, axis=-1, keepdims=True) / norm)[..., 0]
  else:
    ent = jnp.zeros_like(logp)
  counts = weights != 0
  outputs = Outputs(jnp.where(counts, logp, 0), jnp.where(counts, ent, 0))

  def weighted(outputs):
    loss, metrics = plan.objective(outputs, arrays)
    return jnp.sum(weights * loss), {
        k: jnp.sum(weights * v) for k, v in metrics.items()}

  if not grad:
    return *weighted(outputs), outputs, ()
  (loss, metrics), g = jax.value_and_grad(weighted, has_aux=True)(outputs)
  probs = exp / norm
  d_logits = g.logprobs[..., None] * (is_label - probs)
  if plan.entropy and plan.entropy_grad:
    d_logits -= g.entropy[..., None] * probs * (logits - lse + ent[..., None])
  d_logits = d_logits / plan.temperature
  d_h = einsum('bcv,vd->bcd', d_logits, head, dtype)
  # [D, V]: the form that XLA:CPU contracts without copying d_logits.
  d_head = einsum('bcd,bcv->dv', h, d_logits, dtype)
  return loss, metrics, outputs, (d_h, d_head)
