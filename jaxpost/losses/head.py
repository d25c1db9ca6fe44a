"""Hidden states to per-token log-probs, entropy and loss, chunk by chunk.

Legend: B rows, T tokens, C tokens of a chunk, D hidden size, V vocabulary.

Logits exist only here and in `head_chunk.py`, and never [B, T, V] of them. One pass computes a chunk's logits, its loss
and, in training, the gradients: the loss of a token depends on nothing but that token's outputs and the batch, so the
backward pass does not need the logits again (Hsu et al., "Liger Kernel", 2024): 3 products with the head instead of the
4 of rematerialization. A loss that couples the tokens of a sequence differentiates `token_outputs` instead.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import BATCH_AXES, TiedWeight
from jaxpost.losses.head_chunk import ChunkResult, HeadConfig, chunk_length, chunk_loss
from jaxpost.types import Outputs


def token_outputs(
  config: HeadConfig, hidden: jax.Array, head: jax.Array, labels: jax.Array, mask: jax.Array, arrays: dict | None = None
) -> Outputs:
  """Computes the outputs of `labels` [B, T], differentiable in hidden and head.

  Positions where `mask` [B, T] is 0 are skipped and come out as 0. `arrays`: those of `chunk_loss` and of a divergence.
  """
  config = config._replace(objective=None)
  hidden, labels, rows_mask, arrays = _split_context(config, (hidden, labels, mask, arrays or {}))
  found = _outputs(config, hidden, head, _nonzero_weights_first(labels, rows_mask, arrays, ()))
  return _split_context(config, found, restore=mask.shape)


def _split_context(config: HeadConfig, tree: Any, restore: tuple[int, ...] = ()) -> Any:
  """Makes each part of a row that is split over `context` a row of its own.

  No data moves between devices. With the original shape `restore` = (B, T), it undoes that.
  """
  n = config.layout.mesh.shape['context']
  shards = config.layout.batch_shards

  def move(x):
    rows, length, *rest = restore or x.shape
    split = (n, -1) if restore else (-1, n)
    x = x.reshape(shards if rows % shards == 0 else 1, *split, length // n, *rest).swapaxes(1, 2)
    return x.reshape(restore or (-1, length // n, *rest))

  return tree if n == 1 else jax.tree.map(move, tree)


def fused_loss(
  config: HeadConfig,
  hidden: jax.Array,
  head: jax.Array,
  labels: jax.Array,
  weights: jax.Array,
  arrays: dict[str, jax.Array],
  teachers: Sequence[tuple[jax.Array, jax.Array]] = (),
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Sums weights * objective over tokens, differentiable in hidden and head.

  Args:
    hidden: [B, T, D].
    head: [V, D].
    labels: [B, T] int32.
    weights: [B, T]; tokens of weight 0 are skipped.
    arrays: arrays [B, T, ...] that the objective reads; 'allowed' [B, T, k], 'temperature' [B, T]: see `chunk_loss`.
    teachers: (hidden [B, T, D'], head [V', D']) of each teacher; tokens beyond
      its V' <= V have probability 0.

  Returns:
    (loss [], {metric: []}), sums weighted by `weights`.
  """
  hidden, labels, weights, arrays = _split_context(config, (hidden, labels, weights, arrays))
  teachers = [(_split_context(config, h), w) for h, w in teachers]
  return _fused(config, hidden, head, _nonzero_weights_first(labels, weights, arrays, teachers))


class _Tokens(NamedTuple):
  """The tokens of each row with what the loss needs of them; tokens of nonzero weight come first.

  Chunks then end at the longest row, and prompts and padding cost nothing.
  """

  order: jax.Array  # [B, T], where the tokens of the next three are in `hidden`
  labels: jax.Array
  weights: jax.Array
  arrays: dict[str, jax.Array]
  states: list[jax.Array]  # hidden states of each teacher, in the order of `hidden`
  heads: list[jax.Array]


def _nonzero_weights_first(labels, weights, arrays, teachers) -> _Tokens:
  order = nonzero_first(weights)
  arrays = {k: reorder(v, order) for k, v in arrays.items()}
  states, heads = [h for h, _ in teachers], [w for _, w in teachers]
  return _Tokens(order, reorder(labels, order), reorder(weights, order), arrays, states, heads=heads)


def nonzero_first(weights: jax.Array) -> jax.Array:
  """Returns a permutation of each row [B, T] that puts its zeros last.

  From a cumulative sum: a sort takes XLA for TPU 20 s to compile.
  """
  position = jnp.arange(weights.shape[1])
  seen = jnp.cumsum(weights != 0, axis=1)
  return inverse(jnp.where(weights, seen - 1, seen[:, -1:] - seen + position))


def inverse(order: jax.Array) -> jax.Array:
  """Returns the permutation of each row that undoes `order` [B, T]."""
  return jnp.put_along_axis(jnp.zeros_like(order), order, jnp.arange(order.shape[1])[None], axis=1, inplace=False)


def reorder(x: jax.Array, order: jax.Array) -> jax.Array:
  """Returns x[b, order[b, c]], for x of [B, T, ...]."""
  index = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, index, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(config, *args):
  return _run(config, False, *args)[:2]


def _fused_forward(config, *args):
  loss, metrics, _, grads = _run(config, True, *args)
  return (loss, metrics), grads


def _fused_backward(config, grads, cotangents):
  del config
  scale, _ = cotangents  # metrics are not differentiated
  grads = jax.tree.map(lambda g: (scale * g).astype(g.dtype), grads)
  return *grads, None


_fused.defvjp(_fused_forward, _fused_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outputs(config, *args):
  return _run(config, False, *args)[2]


def _outputs_forward(config, *args):
  return _run(config, False, *args)[2], args


def _outputs_backward(config, args, cotangents):
  """Runs a second pass whose loss is the cotangents times the outputs."""
  hidden, head, tokens = args
  fields = ('logprobs', *config.learns)
  slopes = {k: reorder(cotangents.__dict__[k], tokens.order) for k in fields}

  def linear(outputs, arrays):
    return sum(outputs.__dict__[k] * arrays[k] for k in fields), {}

  counts = (tokens.weights != 0).astype(jnp.float32)
  config = config._replace(objective=linear, reads=config.learns)
  *_, grads = _run(config, True, hidden, head, tokens._replace(weights=counts, arrays=tokens.arrays | slopes))
  return *grads, None


_outputs.defvjp(_outputs_forward, _outputs_backward)


def _run(config: HeadConfig, grad: bool, hidden, head, tokens: _Tokens) -> ChunkResult:
  """Loops over chunks on each batch shard, and sums over shards at the end.

  Left to the partitioner, the gradient of the head would be summed over the mesh at every chunk.

  Args:
    grad: compute gradients, too.

  Returns:
    (loss, metrics, Outputs [B, T], (d hidden, d head) or ()).
  """
  shape = config.layout.mesh.shape
  axes = tuple(a for a in (*BATCH_AXES, 'context') if shape[a] > 1)
  if not axes or hidden.shape[0] % math.prod(shape[a] for a in axes):
    loss, metrics, outputs, grads = _loop(config, grad, hidden, head, tokens)
    if grad:
      grads = grads[0], grads[1].astype(head.dtype)
    return loss, metrics, outputs, grads
  rows = PartitionSpec(axes)
  whole = PartitionSpec()

  def local(*args):
    loss, metrics, outputs, grads = _loop(config, grad, *args)
    loss, metrics = jax.lax.psum((loss, metrics), axes)
    if grad:
      grads = grads[0], grads[1][None]
    return loss, metrics, outputs, grads

  run = jax.shard_map(
    local,
    mesh=config.layout.mesh,
    in_specs=(rows, whole, _Tokens(rows, rows, rows, rows, rows, heads=whole)),
    out_specs=(whole, whole, rows, (rows, rows) if grad else ()),
    axis_names=set(axes),
    check_vma=False,
  )
  # Cast before the shards of the head are gathered: half the bytes.
  table = head.astype(config.compute.dtype)
  tokens = tokens._replace(heads=[w.astype(config.compute.dtype) for w in tokens.heads])
  loss, metrics, outputs, grads = run(hidden, table, tokens)
  if grad:
    d_hidden, d_head = grads
    if isinstance(head, TiedWeight):
      # The embedding adds its part before both are summed over the mesh.
      d_head = TiedWeight(None, d_head)
    else:
      d_head = config.layout.reduced(d_head, ('vocab', 'embed'), axes).astype(head.dtype)
    grads = d_hidden, d_head
  return loss, metrics, outputs, grads


def _loop(config: HeadConfig, grad: bool, hidden, head, tokens: _Tokens) -> ChunkResult:
  """Loops over the chunks of one shard's rows; arguments and result of `_run`."""
  rows, length, width = hidden.shape
  chunk = chunk_length(rows, length, head.shape[0], config.compute.head_elements)
  padding = -length % chunk
  turned = config.compute.platform == 'cpu'  # the gradient of the head, see `chunk_loss`

  def pad(x):
    return jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))

  order, labels, weights, arrays = jax.tree.map(pad, tokens[:4])
  longest = jnp.max(jnp.sum(weights != 0, axis=1))

  def body(i, carry):
    start = i * chunk
    take = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=chunk, axis=1)
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
    h, *states = (reorder(x, take(order)) for x in (hidden, *tokens.states))
    loss, metrics, outputs, grads = chunk_loss(
      config,
      grad,
      h,
      head,
      take(labels),
      weights=take(weights),
      arrays={k: take(v) for k, v in arrays.items()},
      teachers=(states, tokens.heads),
    )
    total, sums, outs, acc = carry
    if grad:
      d_hidden, d_head = acc
      acc = (put(d_hidden, grads[0].astype(d_hidden.dtype)), d_head + grads[1])
    return (total + loss, jax.tree.map(jnp.add, sums, metrics), jax.tree.map(put, outs, outputs), acc)

  zeros = jnp.zeros((rows, length + padding), jnp.float32)
  fields = ['logprobs', *config.reads]
  if config.divergence:
    fields.append('divergence')
  outs = Outputs(**dict.fromkeys(fields, zeros))
  sums = {}
  if config.objective:
    _, metrics = jax.eval_shape(config.objective, outs, arrays)
    sums = {name: jnp.zeros((), jnp.float32) for name in metrics}
  acc = ()
  if grad:
    d_hidden = jnp.zeros((rows, length + padding, width), hidden.dtype)
    d_head = jnp.zeros(head.shape[::-1] if turned else head.shape, jnp.float32)
    acc = (d_hidden, d_head)
  total, sums, outs, acc = jax.lax.fori_loop(0, -(-longest // chunk), body, (jnp.zeros(()), sums, outs, acc))
  back = inverse(order[:, :length])
  outs = jax.tree.map(lambda x: reorder(x[:, :length], back), outs)
  if grad:
    acc = (reorder(acc[0][:, :length], back), acc[1].T if turned else acc[1])
  return total, sums, outs, acc
