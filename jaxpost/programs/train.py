"""The update: gradients of an objective over micro-batches, one optimizer step.

Legend: M micro-batches, B rows, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpost.losses import head as head_lib
from jaxpost.losses import head_chunk
from jaxpost.models.parameters import in_float32, join
from jaxpost.programs.compile import Ledger, Program
from jaxpost.types import Batch, Objective, Outputs, TrainState

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model

ROUTER = 'router'  # key of the router's sums among the metrics of a micro-batch, see models/routing.py


def next_token(x: jax.Array) -> jax.Array:
  """Aligns per-token data with the position that predicts it.

  The first token of a row has weight 0, so the value that wraps around never counts.
  """
  return jnp.roll(x, -1, axis=1)


def _sampled_by(batch: Batch) -> dict[str, jax.Array]:
  return {k: next_token(x) for k in ('allowed', 'temperature') if (x := getattr(batch, k)) is not None}


def run_model(
  model: Model, params: dict, batch: Batch, layout: Layout, compute: Compute, options: dict[str, Any] | None = None
) -> Any:
  """Returns the hidden states [B, T, D] of packed rows; with the option routing=True, (hidden states, routing).

  options: more arguments of `Model.forward`.
  """
  # Optional fields that a batch lacks are not passed, so a custom model need not take them.
  optional = dict(branch_ids=batch.branch_ids, chosen=batch.experts) | (options or {})
  return model.forward(
    params,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    compute=compute,
    constrain=layout,
    **{k: v for k, v in optional.items() if v is not None},
  )


def read_outputs(model: Model, head: head_chunk.HeadConfig, params: dict, hidden: jax.Array, batch: Batch) -> Outputs:
  """Returns the `Outputs` [B, T] of the tokens that have a weight, from hidden states [B, T, D]."""
  outputs = Outputs()
  if model.head:
    arrays = jax.tree.map(next_token, batch.arrays if head.divergence else {}) | _sampled_by(batch)
    labels, mask = next_token(batch.tokens), next_token(batch.loss_weights)
    predicted = head_lib.token_outputs(head, hidden, model.head(params), labels, mask, arrays=arrays)
    # Moves outputs from the position that predicts a token to the token itself.
    outputs = jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), predicted)
  if model.values:
    outputs = outputs.replace(values=model.values(params, hidden))
  return outputs


def head_config(model: Model, objective: Objective, layout: Layout, compute: Compute) -> head_chunk.HeadConfig:
  """Returns the HeadConfig for an objective; one with fn=None only reads outputs."""
  fields = {k: getattr(objective, k) for k in ('temperature', 'reads', 'learns', 'divergence', 'teacher_forms')}
  return head_chunk.HeadConfig(
    objective.fn, model.config.vocab_size, compute=compute, layout=layout, form=model.config.logit_form, **fields
  )


def make_loss(model: Model, objective: Objective, layout: Layout, compute: Compute) -> Callable:
  """Returns loss(params, micro-batch [B, T], step, frozen, scale, tokens) -> (loss [], {metric: []}).

  Metrics of a mixture of experts include its `routing.totals`. Arguments of the loss:
    scale: multiplies the loss (loss_scale.py).
    tokens: number of tokens without padding in the whole batch; default: in the micro-batch.
  """
  head = head_config(model, objective, layout, compute)

  def head_loss(params, batch, hidden, frozen, scale):
    if objective.coupled:
      total, metrics = objective.fn(read_outputs(model, head, params, hidden, batch), batch)
      return total * scale, metrics
    # `fused_loss` computes gradients in its forward pass, where small ones must not become 0 in float16. So the weights
    # are scaled instead of the result, and the metrics are divided by the scale.
    total, metrics = head_lib.fused_loss(
      head,
      hidden,
      model.head(params),
      next_token(batch.tokens),
      next_token(batch.loss_weights) * scale,
      arrays=jax.tree.map(next_token, batch.arrays) | _sampled_by(batch),
      teachers=list(zip(batch.teacher_hidden, (frozen or {}).get('teacher_heads', ()))),
    )
    if objective.mtp_weight:
      from jaxpost.programs import multi_token

      mtp_loss, mtp_metrics = multi_token.loss(model, head, params, batch, states=hidden, scale=scale)
      total, metrics = total + objective.mtp_weight * mtp_loss, metrics | mtp_metrics
    return total, jax.tree.map(lambda x: x / scale, metrics)

  def loss(params, batch, step=0, frozen=None, scale=1.0, tokens=None):
    params = join((frozen or {}).get('params', {}), params)
    if model.head and model.config.tie_embeddings and layout.mesh.size > 1:
      from jaxpost.models import tied_embedding

      params |= {'embed': tied_embedding.tie(params['embed'], batch.tokens, compute.dtype, layout)}
    draws = {}
    if model.dropout or objective.neftune_alpha:
      from jaxpost.programs import noise

      draws = noise.draws(model, objective, batch, step)
    if not model.config.experts:
      hidden = run_model(model, params, batch, layout, compute, options=draws)
      return head_loss(params, batch, hidden, frozen, scale)
    from jaxpost.models import routing as routing_lib

    hidden, routing = run_model(model, params, batch, layout, compute, options=draws | {'routing': True})
    sums = routing_lib.totals(routing, batch.segment_ids > 0)
    value, metrics = head_loss(params, batch, hidden, frozen, scale)
    if any(objective.router):
      terms = routing_lib.balance_loss(sums, sums['tokens'] if tokens is None else tokens)
      value += scale * jnp.dot(jnp.array(objective.router), jnp.stack(terms))
    return value, metrics | {ROUTER: jax.lax.stop_gradient(sums)}

  return loss


def accumulate(loss: Callable, params: dict, batch: Batch) -> tuple[tuple[jax.Array, dict], dict]:
  """Returns ((loss, metrics), grads), summed over micro-batches [M, B, T].

  Normalizers are global, so micro-batches only add up. Gradients are float32, whatever
  the type of the parameters: a sum in bfloat16 loses micro-batches.
  """

  def value_and_grads(micro):
    loss_and_metrics, grads = jax.value_and_grad(loss, has_aux=True)(params, micro)
    return loss_and_metrics, in_float32(grads)

  return fold_micro_batches(value_and_grads, batch)


def fold_micro_batches(fn: Callable, batch: Batch, stack: bool = False, count: int | None = None) -> Any:
  """Adds, or stacks along a new first axis, fn(micro-batch [B, T]) over the first `count` of [M, B, T]."""

  def result_of(i):
    return fn(jax.tree.map(lambda x: x[i], batch))

  if len(batch.tokens) == 1:
    result = result_of(0)
    return jax.tree.map(lambda x: x[None], result) if stack else result
  if count is None:  # empty micro-batches at the end, which give a batch of rollouts its static shape, are skipped
    count = jnp.sum(jnp.any(batch.segment_ids > 0, axis=(1, 2)))
  leading = batch.tokens.shape[:1] if stack else ()

  def body(i, folded):
    return jax.tree.map(lambda all_, x: all_.at[i].set(x) if stack else all_ + x, folded, result_of(i))

  shapes = jax.eval_shape(result_of, 0)
  zeros = jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), shapes)
  return jax.lax.fori_loop(0, count, body, zeros)


def make_update(
  model: Model,
  objective: Objective,
  optimizer: optax.GradientTransformation,
  schedule: Callable,
  layout: Layout,
  compute: Compute,
  ledger: Ledger,
  *,
  clip_norm: float,
  shardings: TrainState,
) -> Program:
  """Makes the program update(state, batch [M, B, T], frozen) -> (state, metrics), which donates `state`.

  `frozen` holds what all micro-batches share: 'params', the parameters outside of the state, and 'teacher_heads'.

  A step whose loss, gradient or new state is not finite changes nothing and is counted in `skipped_updates`. A step in
  which all tokens are masked changes nothing either (`empty_updates`), because Adam's momentum would move the weights.
  A step whose scaled gradient overflows float16 halves the loss scale (`overflowed_updates`); with the scale at its
  minimum it counts as skipped.
  """
  loss_fn = make_loss(model, objective, layout, compute)
  scaling = None
  if compute.dtype == 'float16':
    from jaxpost.programs import loss_scale as scaling

  def update(state: TrainState, batch: Batch, frozen: dict):
    scale = state.opt_state.scale if scaling else 1.0
    options = dict(step=state.step, frozen=frozen, scale=scale, tokens=jnp.sum(batch.segment_ids > 0))
    (loss, metrics), grads = accumulate(functools.partial(loss_fn, **options), state.params, batch)
    loss, grads = jax.tree.map(lambda x: x / scale, (loss, grads))
    norm = optax.tree.norm(grads)
    empty = ~jnp.any(batch.loss_weights != 0)
    metrics = _metrics_of_batch(metrics, objective, batch.loss_weights, empty)
    new = clipped_step(state, optimizer, grads, norm, clip_norm)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    finite &= empty | jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(new)]))
    old = state.params, scaling.unmoved(state.opt_state, finite) if scaling else state.opt_state
    # Elements are selected, so that XLA writes the new state over the old one; a `lax.cond` would copy both on GPU, and
    # wait there for the host.
    params, opt_state = jax.tree.map(functools.partial(jnp.where, finite & ~empty), new, old)
    metrics |= {
      'loss': loss,
      'grad_norm': norm,
      'lr': schedule(state.step),
      'skipped_updates': 1.0 - finite,
      'empty_updates': 1.0 * empty,
    }
    if scaling:
      metrics |= scaling.report(state.opt_state, finite)
    return TrainState(state.step + (finite & ~empty), params, opt_state), metrics

  def flops(_state, batch, _frozen):
    return batch.tokens.size * model.flops_of_update(batch.tokens.shape[-1] / 2)

  return Program('update', update, ledger, (shardings, layout.sharding()), donate=(0,), flops=flops)


def _metrics_of_batch(sums: dict, objective: Objective, loss_weights: jax.Array, empty: jax.Array) -> dict:
  """Returns the metrics of an update, [] each, from the sums over its micro-batches; `empty`: all weights are 0."""
  routing = sums.pop(ROUTER, None)
  if objective.token_means or not objective.coupled:
    total_weight = jnp.where(empty, 1.0, jnp.sum(loss_weights))
    sums = jax.tree.map(lambda x: x / total_weight, sums)
  if routing:
    from jaxpost.models import routing as routing_lib

    sums |= routing_lib.metrics(routing)
  return sums


def clipped_step(
  state: TrainState, optimizer: optax.GradientTransformation, grads: Any, norm: jax.Array, clip_norm: float
) -> tuple[Any, Any]:
  """Returns (params, opt_state) after an optimizer step; gradients of global norm `norm` are clipped to `clip_norm`."""
  scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
  clipped = jax.tree.map(lambda g: g * scale, grads)
  updates, opt_state = optimizer.update(clipped, state.opt_state, in_float32(state.params))
  if any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(state.params)):
    from jaxpost.programs import noise

    return noise.add_rounded(state.params, updates, state.step), opt_state
  return optax.apply_updates(state.params, updates), opt_state


def state_shardings(model: Model, optimizer: optax.GradientTransformation, layout: Layout) -> TrainState:
  """Returns the shardings of a state; the state of the optimizer is split like the parameters."""
  params = model.shardings(layout)
  shapes = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.float32), model.shapes(), is_leaf=lambda x: isinstance(x, tuple)
  )

  def sharding(x: Any, param: jax.ShapeDtypeStruct, param_sharding: jax.sharding.Sharding) -> Any:
    if isinstance(x, optax.MaskedNode):  # a parameter that another part of the optimizer updates
      return x
    # Factored moments (adafactor) exist for each parameter, but have other shapes.
    return param_sharding if x.shape == param.shape else layout.sharding()

  opt_state = optax.tree_utils.tree_map_params(
    optimizer,
    sharding,
    jax.eval_shape(optimizer.init, shapes),
    shapes,
    params,
    transform_non_params=lambda _: layout.sharding(),
    is_leaf=lambda x: isinstance(x, optax.MaskedNode),
  )
  return TrainState(layout.sharding(), params, opt_state)


def make_state(
  params: dict, optimizer: optax.GradientTransformation, shardings: TrainState, ledger: Ledger
) -> TrainState:
  """Returns the state before the first update; the parameters are donated."""

  def init(params):
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(in_float32(params)))

  return Program('init', init, ledger, shardings, donate=(0,))(params)


def random_params(model: Model, seed: int, dtype: Any, shardings: dict, ledger: Ledger) -> dict:
  """Returns random parameters of type `dtype`, created in their final layout."""

  def init(key):
    return model.init(jax.random.wrap_key_data(key), dtype=dtype)

  mesh = jax.tree.leaves(shardings)[0].mesh
  key = jax.device_put(np.asarray(jax.random.key_data(jax.random.key(seed))), NamedSharding(mesh, PartitionSpec()))
  return Program('random', init, ledger, shardings)(key)
