"""Hidden states to per-token log-probs, entropy and loss, chunk by chunk.

Legend: B rows, T tokens, C tokens of a chunk, D hidden size, V vocabulary.

The only place where logits exist, and never [B, T, V] of them. One pass
computes a chunk's logits, its loss and, in training, the gradients: the loss
of a token depends on nothing but that token's outputs and the batch, so the
backward pass needs no second look at the logits (Hsu et al., "Liger Kernel",
2024): 3 products with the head where rematerialisation takes 4. A loss that
couples the tokens of a sequence differentiates `token_outputs` instead.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import BATCH_AXES, Layout, TiedWeight
from jaxpost.matmul import Compute, einsum
from jaxpost.types import Outputs

_HIDE = -1e30


class HeadConfig(NamedTuple):
  """What is fixed when the head is compiled.

  objective: (Outputs of [B, C], {name: [B, C]}) -> (loss [B, C],
    {metric: [B, C]}), elementwise in tokens; None only reads outputs.
  vocab_size: rows of the head that are real; the rest is padding.
  temperature: logits are divided by it.
  reads: fields of `Outputs` to compute besides `logprobs`.
  learns: those of them that the loss is differentiated through.
  divergence: (logits [B, C, V], teachers' logits, {name: [B, C, ...]}) ->
    [B, C], for `outputs.divergence`.
  form, teacher_forms: see `logits`; of the model and of each teacher.
  """

  objective: Callable | None
  vocab_size: int
  temperature: float
  compute: Compute
  layout: Layout
  reads: tuple[str, ...] = ('entropy',)
  learns: tuple[str, ...] = ('entropy',)
  divergence: Callable | None = None
  form: tuple[float, float] = (1.0, 0.0)
  teacher_forms: tuple[tuple[float, float], ...] = ()


def logits(hidden, head, form: tuple[float, float], dtype: str):
  """The logits of hidden states, in training, scoring and sampling alike.

  Args:
    hidden: [B, T, D] or [S, D]; head: [V, D].
    form: (divisor, c): x = hidden head^T / divisor, and c tanh(x / c) of it
      unless c is 0.

  Returns:
    [B, T, V] or [S, V] float32, not divided by a temperature yet.
  """
  spec = 'sd,vd->sv' if hidden.ndim == 2 else 'bcd,vd->bcv'
  x = einsum(spec, hidden, head, dtype)
  divisor, cap = form
  if divisor != 1:
    x = x / divisor
  return cap * jnp.tanh(x / cap) if cap else x


def _slope(plan, logits):
  """d logits / d (hidden head^T), of logits over the temperature."""
  divisor, cap = plan.form
  slope = 1 / (divisor * plan.temperature)
  if not cap:
    return slope
  part = jnp.clip(logits * (plan.temperature / cap), -1, 1)  # padding: -1e30
  return slope * (1 - part * part)


def token_outputs(plan: HeadConfig, hidden, head, labels, mask) -> Outputs:
  """Outputs of `labels` [B, T], differentiable in hidden and head.

  Positions where `mask` is 0 are skipped and come out as 0.
  """
  plan = plan._replace(objective=None, divergence=None)
  hidden, labels, part = _parts(plan, (hidden, labels, mask))
  found = _outputs(plan, *_arguments(hidden, head, labels, part, {}, ()))
  return _parts(plan, found, mask.shape)


def _parts(plan, tree, back=()):
  """Parts of rows split over `context`, as rows where they are, or `back`."""
  n, shards = plan.layout.mesh.shape['context'], plan.layout.batch_shards

  def move(x):
    rows, length, *rest = back or x.shape
    split = (n, -1) if back else (-1, n)
    x = x.reshape(shards if rows % shards == 0 else 1, *split, length // n, *rest).swapaxes(1, 2)
    return x.reshape(back or (-1, length // n, *rest))

  return tree if n == 1 else jax.tree.map(move, tree)


def top_tokens(plan: HeadConfig, hidden, head, mask, k: int):
  """The k most probable tokens after each position, most probable first.

  Args:
    hidden: [B, T, D]; head: [V, D]; mask: [B, T], 0 where nothing is wanted.

  Returns:
    (ids [B, T, k] int32, log_softmax(logits / temperature) [B, T, k] float32),
    0 where the mask is.
  """
  order = _wanted_first(mask)
  rows, length = mask.shape
  chunk = chunk_length(rows, length, head.shape[0], plan.compute.head_elements)
  order = jnp.pad(order, ((0, 0), (0, -length % chunk)))

  def body(i, found):
    index = jax.lax.dynamic_slice_in_dim(order, i * chunk, chunk, axis=1)
    logits = _logits(plan, _take(hidden, index), head)
    top, ids = jax.lax.top_k(logits, k)
    top -= jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return tuple(
      jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), i * chunk, axis=1)
      for x, new in zip(found, (ids, top))
    )

  found = (jnp.zeros((*order.shape, k), jnp.int32), jnp.zeros((*order.shape, k), jnp.float32))
  longest = jnp.max(jnp.sum(mask != 0, axis=1))
  found = jax.lax.fori_loop(0, -(-longest // chunk), body, found)
  back = _inverse(order[:, :length])
  return tuple(jnp.where((mask != 0)[..., None], _take(x[:, :length], back), 0) for x in found)


def fused_loss(plan: HeadConfig, hidden, head, labels, weights, arrays, teachers=()):
  """Sum over tokens of weights * objective, differentiable in hidden, head.

  Args:
    hidden: [B, T, D]; head: [V, D]; labels: [B, T] int32.
    weights: [B, T]; tokens of weight 0 are skipped.
    arrays: dict of [B, T, ...] arrays that the objective reads.
    teachers: (hidden [B, T, D'], head [V', D']) of each teacher; what is
      beyond its V' <= V tokens has probability 0.

  Returns:
    (loss [], {metric: []}), sums weighted by `weights`.
  """
  hidden, labels, weights, arrays = _parts(plan, (hidden, labels, weights, arrays))
  teachers = [(_parts(plan, h), w) for h, w in teachers]
  return _fused(plan, *_arguments(hidden, head, labels, weights, arrays, teachers))


def _arguments(hidden, head, labels, weights, arrays, teachers):
  """Moves the tokens that count to the front of each row.

  Chunks then end at the longest row, and prompts and padding cost nothing.
  """
  order = _wanted_first(weights)
  return (
    hidden,
    head,
    order,
    _take(labels, order),
    _take(weights, order),
    {k: _take(v, order) for k, v in arrays.items()},
    ([h for h, _ in teachers], [w for _, w in teachers]),
  )


def _wanted_first(weights):
  """Zeros last in each row; no sort, which takes XLA for TPU 20 s."""
  at, seen = jnp.arange(weights.shape[1]), jnp.cumsum(weights != 0, axis=1)
  return _inverse(jnp.where(weights, seen - 1, seen[:, -1:] - seen + at))


def _inverse(order):
  """The permutation of each row that undoes `order` [B, T]."""
  return jnp.put_along_axis(jnp.zeros_like(order), order, jnp.arange(order.shape[1])[None], axis=1, inplace=False)


def _take(x, order):
  """x[b, order[b, c]], for x of [B, T, ...]."""
  index = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, index, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(plan, *args):
  return _run(plan, False, *args)[:2]


def _fused_forward(plan, *args):
  loss, metrics, _, grads = _run(plan, True, *args)
  return (loss, metrics), grads


def _fused_backward(plan, grads, cotangents):
  del plan
  scale, _ = cotangents  # metrics are not differentiated
  grads = jax.tree.map(lambda g: (scale * g).astype(g.dtype), grads)
  return *grads, None, None, None, None, None


_fused.defvjp(_fused_forward, _fused_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outputs(plan, *args):
  return _run(plan, False, *args)[2]


def _outputs_forward(plan, *args):
  return _run(plan, False, *args)[2], args


def _outputs_backward(plan, args, cotangents):
  """A second pass, whose loss is linear in the outputs."""
  hidden, head, order, labels, weights, _, teachers = args
  wanted = ('logprobs', *plan.learns)
  slopes = {k: _take(cotangents.__dict__[k], order) for k in wanted}

  def linear(outputs, arrays):
    return sum(outputs.__dict__[k] * arrays[k] for k in wanted), {}

  counts = (weights != 0).astype(jnp.float32)
  grads = _run(
    plan._replace(objective=linear, reads=plan.learns), True, hidden, head, order, labels, counts, slopes, teachers
  )[3]
  return *grads, None, None, None, None, None


_outputs.defvjp(_outputs_forward, _outputs_backward)


def _run(plan, grad, hidden, head, order, labels, weights, arrays, teachers):
  """(loss, metrics, Outputs [B, T], (d hidden, d head) or ()).

  Each batch shard loops over its own chunks. Left to the partitioner, the
  gradient of the head would be summed over the mesh at every chunk.
  """
  shape = plan.layout.mesh.shape
  axes = tuple(a for a in (*BATCH_AXES, 'context') if shape[a] > 1)
  if not axes or hidden.shape[0] % math.prod(shape[a] for a in axes):
    loss, metrics, outputs, grads = _loop(plan, grad, hidden, head, order, labels, weights, arrays, teachers)
    if grad:
      grads = grads[0], grads[1].astype(head.dtype)
    return loss, metrics, outputs, grads
  rows, whole = PartitionSpec(axes), PartitionSpec()

  def local(*args):
    loss, metrics, outputs, grads = _loop(plan, grad, *args)
    loss, metrics = jax.lax.psum((loss, metrics), axes)
    if grad:
      grads = grads[0], grads[1][None]
    return loss, metrics, outputs, grads

  run = jax.shard_map(
    local,
    mesh=plan.layout.mesh,
    in_specs=(rows, whole, rows, rows, rows, rows, (rows, whole)),
    out_specs=(whole, whole, rows, (rows, rows) if grad else ()),
    axis_names=set(axes),
    check_vma=False,
  )
  # Cast before the shards of the head are gathered: half the bytes.
  table, teachers = head.astype(plan.compute.dtype), (teachers[0], [w.astype(plan.compute.dtype) for w in teachers[1]])
  loss, metrics, outputs, grads = run(hidden, table, order, labels, weights, arrays, teachers)
  if grad:
    grads = (
      grads[0],
      TiedWeight(None, grads[1])
      if isinstance(head, TiedWeight)
      else (plan.layout.reduced(grads[1], ('vocab', 'embed'), axes).astype(head.dtype)),
    )
  return loss, metrics, outputs, grads


def _loop(plan, grad, hidden, head, order, labels, weights, arrays, teachers):
  """As `_run`, on the rows of one shard."""
  rows, length, width = hidden.shape
  chunk = chunk_length(rows, length, head.shape[0], plan.compute.head_elements)
  pad = -length % chunk
  widen = lambda x: jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
  order, labels, weights = widen(order), widen(labels), widen(weights)
  arrays = {k: widen(v) for k, v in arrays.items()}
  longest = jnp.max(jnp.sum(weights != 0, axis=1))

  def body(i, carry):
    at = i * chunk
    take = lambda x: jax.lax.dynamic_slice_in_dim(x, at, chunk, axis=1)
    put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, at, axis=1)
    h, *states = (_take(x, take(order)) for x in (hidden, *teachers[0]))
    loss, metrics, outputs, grads = _chunk(
      plan, grad, h, head, take(labels), take(weights), {k: take(v) for k, v in arrays.items()}, (states, teachers[1])
    )
    total, sums, outs, acc = carry
    if grad:
      acc = (put(acc[0], grads[0].astype(acc[0].dtype)), acc[1] + grads[1])
    return (total + loss, jax.tree.map(jnp.add, sums, metrics), jax.tree.map(put, outs, outputs), acc)

  zeros = jnp.zeros((rows, length + pad), jnp.float32)
  fields = 'logprobs', *plan.reads, *(['divergence'] if plan.divergence else [])
  outs = Outputs(**dict.fromkeys(fields, zeros))
  sums = {}
  if plan.objective:
    _, metrics = jax.eval_shape(plan.objective, outs, arrays)
    sums = {name: jnp.zeros((), jnp.float32) for name in metrics}
  acc = (jnp.zeros((rows, length + pad, width), hidden.dtype), jnp.zeros(head.shape[::-1], jnp.float32)) if grad else ()
  total, sums, outs, acc = jax.lax.fori_loop(0, -(-longest // chunk), body, (jnp.zeros(()), sums, outs, acc))
  back = _inverse(order[:, :length])
  outs = jax.tree.map(lambda x: _take(x[:, :length], back), outs)
  if grad:
    acc = (_take(acc[0][:, :length], back), acc[1].T)
  return total, sums, outs, acc


def chunk_length(rows: int, length: int, vocab: int, elements: int) -> int:
  """Tokens of a row per chunk, so that a chunk has <= `elements` logits."""
  most = max(1, min(length, elements // (rows * vocab)))
  return -(-length // -(-length // most))  # equal chunks


def _chunk(plan, grad, h, head, labels, weights, arrays, teachers):
  """One chunk [B, C, D]: (loss, metrics, Outputs, (d h, d head) or ())."""
  dtype = plan.compute.dtype
  logits = _logits(plan, h, head)
  top = jnp.max(logits, axis=-1, keepdims=True)
  exp = jnp.exp(logits - top)
  norm = jnp.sum(exp, axis=-1, keepdims=True)
  lse = top + jnp.log(norm)
  # A comparison, not a gather: it stays local when V is sharded.
  is_label = jnp.arange(head.shape[0]) == labels[..., None]
  real = jnp.arange(head.shape[0]) < plan.vocab_size
  found = {'logprobs': jnp.sum(jnp.where(is_label, logits, 0), axis=-1) - lse[..., 0]}
  if 'entropy' in plan.reads:
    entropy = lse - jnp.sum(exp * logits, axis=-1, keepdims=True) / norm
    found['entropy'] = entropy[..., 0]
  if 'lse' in plan.reads:
    found['lse'] = lse[..., 0]
  if 'mean_logprob' in plan.reads:
    found['mean_logprob'] = jnp.sum(jnp.where(real, logits, 0), axis=-1) / plan.vocab_size - lse[..., 0]
  pull = None
  if plan.divergence:
    forms = plan.teacher_forms or ((1.0, 0.0),) * len(teachers[0])
    others = [
      _widen(_logits(plan._replace(form=form), *teacher), head.shape[0]) for form, *teacher in zip(forms, *teachers)
    ]
    found['divergence'], pull = jax.vjp(lambda x: plan.divergence(x, others, arrays), logits)
  outputs = Outputs(**{k: jnp.where(weights != 0, v, 0) for k, v in found.items()})
  if plan.objective is None:
    return jnp.zeros(()), {}, outputs, ()

  def weighted(outputs):
    loss, metrics = plan.objective(outputs, arrays)
    return jnp.sum(weights * loss), {k: jnp.sum(weights * v) for k, v in metrics.items()}

  if not grad:
    return *weighted(outputs), outputs, ()
  (loss, metrics), g = jax.value_and_grad(weighted, has_aux=True)(outputs)
  slope = lambda name: g.__dict__[name][..., None]
  probs = exp / norm
  d_logits = slope('logprobs') * (is_label - probs)
  if 'entropy' in plan.learns:
    d_logits -= slope('entropy') * probs * (logits - lse + entropy)
  if 'lse' in plan.learns:
    d_logits += slope('lse') * probs
  if 'mean_logprob' in plan.learns:
    d_logits += slope('mean_logprob') * (real / plan.vocab_size - probs)
  if pull:
    d_logits += pull(jnp.where(weights != 0, g.divergence, 0))[0]
  d_logits = d_logits * _slope(plan, logits)
  d_h = einsum('bcv,vd->bcd', d_logits, head, dtype, h.dtype.name)
  # [D, V]: the form that XLA:CPU contracts without copying d_logits.
  d_head = einsum('bcd,bcv->dv', h, d_logits, dtype)
  return loss, metrics, outputs, (d_h, d_head)


def _logits(plan, h, head):
  """[B, C, V] over the temperature; padding of the vocabulary never wins."""
  x = logits(h, head, plan.form, plan.compute.dtype) / plan.temperature
  if plan.vocab_size < head.shape[0]:
    x = jnp.where(jnp.arange(head.shape[0]) < plan.vocab_size, x, _HIDE)
  return x


def _widen(logits, vocab):
  """[B, C, V'] -> [B, C, vocab], for teachers of fewer tokens."""
  return jnp.pad(logits, ((0, 0), (0, 0), (0, vocab - logits.shape[-1])), constant_values=_HIDE)
