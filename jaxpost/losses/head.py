"""Hidden states to per-token log-probs, entropy and loss, chunk by chunk.

Legend: B rows, T tokens, C tokens of a chunk, D hidden size, V vocabulary.

Logits exist only for one chunk at a time, never as [B, T, V]. One pass computes a chunk's logits, its loss and, in
training, the gradients: the loss of a token depends only on that token's outputs and the batch, so the backward pass
does not need the logits again (Hsu et al., "Liger Kernel", 2024). This takes 3 products with the head, where
rematerialization takes 4. A loss that couples the tokens of a sequence differentiates `token_outputs` instead.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import BATCH_AXES, TiedWeight
from jaxpost.losses.head_chunk import HeadConfig, HeadResult, chunk_length, chunk_loss, transposes_gradient
from jaxpost.types import Outputs


def token_outputs(
  config: HeadConfig, hidden: jax.Array, head: jax.Array, labels: jax.Array, mask: jax.Array, arrays: dict | None = None
) -> Outputs:
  """Computes the outputs of `labels` [B, T], differentiable in hidden and head.

  Positions where `mask` [B, T] is 0 are skipped; their outputs are 0. `arrays`: as in `chunk_loss`.
  """
  config = config._replace(loss_fn=None)
  hidden, labels, rows_mask, arrays = _split_context(config, (hidden, labels, mask, arrays or {}))
  outputs = _outputs(config, hidden, head, _nonzero_weights_first(labels, rows_mask, arrays, ()))
  return _join_context(config, outputs, mask.shape)


def _split_context(config: HeadConfig, tree: Any) -> Any:
  """Turns the n parts of rows that are split over `context` into rows, locally: [B, T, ...] -> [n B, T / n, ...]."""
  n, shards = config.layout.mesh.shape['context'], config.layout.batch_shards

  def split(x):
    rows, length, *dims = x.shape
    x = x.reshape(shards if rows % shards == 0 else 1, -1, n, length // n, *dims).swapaxes(1, 2)
    return x.reshape(n * rows, length // n, *dims)

  return tree if n == 1 else jax.tree.map(split, tree)


def _join_context(config: HeadConfig, outputs: Outputs, shape: tuple[int, int]) -> Outputs:
  """Undoes `_split_context`: outputs [n B, T / n] -> `shape`, (B, T)."""
  (rows, length), n, shards = shape, config.layout.mesh.shape['context'], config.layout.batch_shards

  def join(x):
    x = x.reshape(shards if rows % shards == 0 else 1, n, -1, length // n).swapaxes(1, 2)
    return x.reshape(rows, length)

  return outputs if n == 1 else jax.tree.map(join, outputs)


def fused_loss(
  config: HeadConfig,
  hidden: jax.Array,
  head: jax.Array,
  labels: jax.Array,
  weights: jax.Array,
  arrays: dict[str, jax.Array],
  teachers: Sequence[tuple[jax.Array, jax.Array]] = (),
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Sums weights * loss over tokens, differentiable in hidden and head.

  Args:
    hidden: [B, T, D].
    head: [V, D].
    labels: [B, T] int32.
    weights: [B, T]; tokens of weight 0 are skipped.
    arrays: arrays [B, T, ...] that the loss reads; 'allowed' [B, T, k], 'temperature' [B, T]: see `chunk_loss`.
    teachers: (hidden [B, T, D'], head [V', D']) of each teacher; tokens beyond its V' <= V have probability 0.

  Returns:
    (loss [], {metric: []}), sums weighted by `weights`.
  """
  hidden, labels, weights, arrays = _split_context(config, (hidden, labels, weights, arrays))
  teachers = [(_split_context(config, h), w) for h, w in teachers]
  return _fused(config, hidden, head, _nonzero_weights_first(labels, weights, arrays, teachers))


class _Tokens(NamedTuple):
  """The inputs of the loss, in an order in which tokens with a weight come first in each row.

  The loop over chunks can then end at the largest number of such tokens in a row: prompts and padding cost nothing.
  """

  order: jax.Array  # [B, T], the place of each token in `hidden`; the next three are in this order
  labels: jax.Array  # [B, T]
  weights: jax.Array  # [B, T]
  arrays: dict[str, jax.Array]  # [B, T, ...]
  states: list[jax.Array]  # hidden states [B, T, D'] of each teacher, in the order of `hidden`
  heads: list[jax.Array]  # [V', D'] of each teacher


def _nonzero_weights_first(labels, weights, arrays, teachers) -> _Tokens:
  order = nonzero_first(weights)
  arrays = {k: reorder(v, order) for k, v in arrays.items()}
  states, heads = [h for h, _ in teachers], [w for _, w in teachers]
  return _Tokens(order, reorder(labels, order), reorder(weights, order), arrays, states, heads=heads)


def nonzero_first(weights: jax.Array) -> jax.Array:
  """Returns a permutation of each row [B, T] that puts its zeros last, in order.

  It is made of a cumulative sum, because XLA for TPU takes 20 s to compile a sort.
  """
  position = jnp.arange(weights.shape[1])
  nonzero = jnp.cumsum(weights != 0, axis=1)
  return inverse(jnp.where(weights, nonzero - 1, nonzero[:, -1:] - nonzero + position))


def inverse(order: jax.Array) -> jax.Array:
  """Returns the permutation of each row that undoes `order` [B, T]."""
  return jnp.put_along_axis(jnp.zeros_like(order), order, jnp.arange(order.shape[1])[None], axis=1, inplace=False)


def reorder(x: jax.Array, order: jax.Array) -> jax.Array:
  """Returns x[b, order[b, c]], for x of [B, T, ...]."""
  index = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, index, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(config, *args):
  result = _run(config, *args, gradients=False)
  return result.loss, result.metrics


def _fused_forward(config, *args):
  result = _run(config, *args, gradients=True)
  return (result.loss, result.metrics), (result.d_hidden, result.d_head)


def _fused_backward(config, grads, cotangents):
  del config
  scale, _ = cotangents  # metrics are not differentiated
  grads = jax.tree.map(lambda g: (scale * g).astype(g.dtype), grads)
  return *grads, None


_fused.defvjp(_fused_forward, _fused_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outputs(config, *args):
  return _run(config, *args, gradients=False).outputs


def _outputs_forward(config, *args):
  return _run(config, *args, gradients=False).outputs, args


def _outputs_backward(config, args, cotangents):
  """Runs a second pass, with the sum of cotangents times outputs as its loss."""
  hidden, head, tokens = args
  fields = ('logprobs', *config.learns)
  slopes = {k: reorder(vars(cotangents)[k], tokens.order) for k in fields}

  def linear_loss(outputs, arrays):
    return sum(vars(outputs)[k] * arrays[k] for k in fields), {}

  mask = (tokens.weights != 0).astype(jnp.float32)
  config = config._replace(loss_fn=linear_loss, reads=config.learns)
  tokens = tokens._replace(weights=mask, arrays=tokens.arrays | slopes)
  result = _run(config, hidden, head, tokens, gradients=True)
  return result.d_hidden, result.d_head, None


_outputs.defvjp(_outputs_forward, _outputs_backward)


def _run(config: HeadConfig, hidden, head, tokens: _Tokens, *, gradients: bool) -> HeadResult:
  """Loops over chunks on each batch shard, and sums over shards at the end.

  The partitioner would sum the gradient of the head over the mesh for every chunk.
  """
  shape = config.layout.mesh.shape
  axes = tuple(a for a in (*BATCH_AXES, 'context') if shape[a] > 1)
  if not axes or hidden.shape[0] % math.prod(shape[a] for a in axes):
    result = _loop(config, hidden, head, tokens, gradients=gradients)
    return result._replace(d_head=result.d_head.astype(head.dtype)) if gradients else result
  rows, whole = PartitionSpec(axes), PartitionSpec()

  def local(*args):
    result = _loop(config, *args, gradients=gradients)
    loss, metrics = jax.lax.psum((result.loss, result.metrics), axes)
    return result._replace(loss=loss, metrics=metrics, d_head=result.d_head[None] if gradients else None)

  run = jax.shard_map(
    local,
    mesh=config.layout.mesh,
    in_specs=(rows, whole, _Tokens(rows, rows, rows, rows, rows, heads=whole)),
    out_specs=HeadResult(whole, whole, rows, rows, rows),
    axis_names=set(axes),
    check_vma=False,
  )
  # Cast before the shards of the head are gathered: half the bytes.
  table = head.astype(config.compute.dtype)
  tokens = tokens._replace(heads=[w.astype(config.compute.dtype) for w in tokens.heads])
  result = run(hidden, table, tokens)
  if not gradients:
    return result
  if isinstance(head, TiedWeight):  # the gradient of the embedding is added before the sum over the mesh
    return result._replace(d_head=TiedWeight(None, result.d_head))
  return result._replace(d_head=config.layout.reduced(result.d_head, ('vocab', 'embed'), axes).astype(head.dtype))


def _loop(config: HeadConfig, hidden, head, tokens: _Tokens, *, gradients: bool) -> HeadResult:
  """Loops over the chunks of one shard's rows; arguments and result are those of `_run`."""
  rows, length, width = hidden.shape
  chunk = chunk_length(rows, length, head.shape[0], config.compute.head_elements)
  padding = -length % chunk

  def pad(x):
    return jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))

  order, labels, weights, arrays = jax.tree.map(pad, tokens[:4])
  longest = jnp.max(jnp.sum(weights != 0, axis=1))

  def body(i, carry):
    start = i * chunk
    take = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=chunk, axis=1)
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
    h, *states = (reorder(x, take(order)) for x in (hidden, *tokens.states))
    chunk_result = chunk_loss(
      config,
      h,
      head,
      take(labels),
      weights=take(weights),
      arrays={k: take(v) for k, v in arrays.items()},
      teachers=(states, tokens.heads),
      gradients=gradients,
    )
    if gradients:
      d_hidden = chunk_result.d_hidden.astype(carry.d_hidden.dtype)
      carry = carry._replace(d_hidden=put(carry.d_hidden, d_hidden), d_head=carry.d_head + chunk_result.d_head)
    return carry._replace(
      loss=carry.loss + chunk_result.loss,
      metrics=jax.tree.map(jnp.add, carry.metrics, chunk_result.metrics),
      outputs=jax.tree.map(put, carry.outputs, chunk_result.outputs),
    )

  zeros = jnp.zeros((rows, length + padding), jnp.float32)
  fields = ['logprobs', *config.reads]
  if config.divergence:
    fields.append('divergence')
  carry = HeadResult(jnp.zeros(()), {}, Outputs(**dict.fromkeys(fields, zeros)))
  if config.loss_fn:
    _, metrics = jax.eval_shape(config.loss_fn, carry.outputs, arrays)
    carry = carry._replace(metrics={name: jnp.zeros((), jnp.float32) for name in metrics})
  if gradients:
    d_hidden = jnp.zeros((rows, length + padding, width), hidden.dtype)
    d_head = jnp.zeros(head.shape[::-1] if transposes_gradient(config) else head.shape, jnp.float32)
    carry = carry._replace(d_hidden=d_hidden, d_head=d_head)
  result = jax.lax.fori_loop(0, -(-longest // chunk), body, carry)
  places = inverse(order[:, :length])  # back to the order of `hidden`
  result = result._replace(outputs=jax.tree.map(lambda x: reorder(x[:, :length], places), result.outputs))
  if gradients:
    d_head = result.d_head.T if transposes_gradient(config) else result.d_head
    result = result._replace(d_hidden=reorder(result.d_hidden[:, :length], places), d_head=d_head)
  return result
