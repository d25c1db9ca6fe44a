"""The update: gradients of an objective over micro-batches, one optimizer step.

Legend: M micro-batches, B rows, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpost.distributed import transfer
from jaxpost.losses import head as head_lib
from jaxpost.losses import head_chunk
from jaxpost.models import layers
from jaxpost.models import routing as routing_lib
from jaxpost.models.parameters import join
from jaxpost.models.transformer import flops_per_token
from jaxpost.programs import loss_scale
from jaxpost.programs.compile import Ledger, Program
from jaxpost.types import Batch, Objective, TrainState

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model

write = jax.jit(  # in place: what is read goes to its shards
  transfer.write, donate_argnums=0, static_argnums=(3, 4, 5, 6, 7)
)
_ROUTER = 'router'  # among the metrics of a micro-batch: sums, see `moe`


def next_token(x):
  """Aligns per-token data with the position that predicts it.

  The first token of a row has weight 0, so what wraps around never counts.
  """
  return jnp.roll(x, -1, axis=1)


def run_model(
  model: Model, params, batch: Batch, layout: Layout, compute: Compute, noise=None, dropout=None, routing=None
):
  """Hidden states [B, T, D] of packed rows; with `routing`, a pair with it."""
  # Optional fields that a batch lacks are not passed, so a custom model need not take them.
  given = dict(branch_ids=batch.branch_ids, noise=noise, dropout=dropout, routing=routing, chosen=batch.experts)
  return model.forward(
    params,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    compute=compute,
    constrain=layout,
    **{k: v for k, v in given.items() if v is not None},
  )


def read_outputs(model: Model, plan: head_chunk.HeadConfig, params, hidden, batch):
  """`Outputs` [B, T] of the tokens that have a weight."""
  outputs = head_lib.Outputs()
  if model.head:
    outputs = jax.tree.map(
      lambda x: jnp.roll(x, 1, axis=1),
      (
        head_lib.token_outputs(
          plan, hidden, model.head(params), next_token(batch.tokens), next_token(batch.loss_weights)
        )
      ),
    )
  if model.values:
    outputs = outputs.replace(values=model.values(params, hidden))
  return outputs


def make_loss(model: Model, objective: Objective, layout: Layout, compute: Compute) -> Callable:
  """loss(params, batch of [B, T], step, frozen, scale, tokens).

  Returns (loss [], metrics): {name: []}, and the `moe.totals` of a mixture of
  experts.

  scale: the loss is that many times as large (loss_scale.py).
  tokens: that are no padding, in the whole batch; by default in this one.
  """
  plan = head_chunk.HeadConfig(
    objective.fn,
    model.config.vocab_size,
    objective.temperature,
    compute,
    layout,
    objective.reads,
    objective.learns,
    objective.divergence,
    model.config.logit_form,
    objective.teacher_forms,
  )

  def head_loss(params, batch, hidden, frozen, scale):
    if objective.coupled:
      total, metrics = objective.fn(read_outputs(model, plan, params, hidden, batch), batch)
      return total * scale, metrics
    # The pass that makes the loss makes gradients, too: scaled from the start.
    total, metrics = head_lib.fused_loss(
      plan,
      hidden,
      model.head(params),
      next_token(batch.tokens),
      next_token(batch.loss_weights) * scale,
      jax.tree.map(next_token, batch.arrays),
      list(zip(batch.teacher_hidden, (frozen or {}).get('teacher_heads', ()))),
    )
    return total, jax.tree.map(lambda x: x / scale, metrics)

  def loss(params, batch, step=0, frozen=None, scale=1.0, tokens=None):
    params = join((frozen or {}).get('params', {}), params)
    if model.head and model.config.tie_embeddings:
      params |= {'embed': layers.tie_embeddings(params['embed'], batch.tokens, compute.dtype, layout)}
    noise = dropout = None
    if model.dropout:
      dropout = jax.random.key_data(row_keys(batch, step, 1, objective.seed))
    if objective.neftune_alpha:
      noise = neftune(batch, step, model.config.hidden_size, objective.neftune_alpha, objective.seed)
    if not model.config.experts:
      return head_loss(params, batch, run_model(model, params, batch, layout, compute, noise, dropout), frozen, scale)
    hidden, routing = run_model(model, params, batch, layout, compute, noise, dropout, True)
    sums = routing_lib.totals(routing, batch.segment_ids > 0)
    value, metrics = head_loss(params, batch, hidden, frozen, scale)
    if any(objective.router):
      terms = routing_lib.balance_loss(sums, sums['tokens'] if tokens is None else tokens)
      value += scale * jnp.dot(jnp.array(objective.router), jnp.stack(terms))
    return value, metrics | {_ROUTER: jax.lax.stop_gradient(sums)}

  return loss


def row_keys(batch: Batch, step, purpose: int, seed: int):
  """[B] keys that depend on the step and on what a row holds only."""
  factors = 2 * jnp.arange(batch.tokens.shape[1], dtype=jnp.uint32) + 1
  text = jnp.sum(batch.tokens.astype(jnp.uint32) * factors, axis=1)
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), step)
  return jax.vmap(lambda t: jax.random.fold_in(key, t))(text)


def neftune(batch: Batch, step, width: int, alpha: float, seed: int):
  """Uniform noise [B, T, D] of size alpha / sqrt(document length * D).

  Jain et al. 2023 (arXiv:2310.05914), algorithm 1.
  """
  draw = jax.vmap(lambda key: jax.random.uniform(key, (batch.tokens.shape[1], width), minval=-1.0))(
    row_keys(batch, step, 0, seed)
  )
  same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None]
  lengths = jnp.sum(same, axis=-1)
  return draw * (alpha / jnp.sqrt(lengths * width))[..., None] * (batch.segment_ids > 0)[..., None]


def accumulate(loss: Callable, params, batch: Batch):
  """((loss, metrics), grads) over micro-batches [M, B, T].

  Normalisers are global, so micro-batches only add up. Empty ones at the end
  are not run: a batch of rollouts has one shape and costs what it holds.
  """
  grad = jax.value_and_grad(loss, has_aux=True)
  if batch.tokens.shape[0] == 1:
    return grad(params, jax.tree.map(lambda x: x[0], batch))
  used = jnp.sum(jnp.any(batch.segment_ids > 0, axis=(1, 2)))
  micro = lambda i: jax.tree.map(lambda x: x[i], batch)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(grad, params, micro(0)))
  return jax.lax.fori_loop(0, used, lambda i, acc: jax.tree.map(jnp.add, acc, grad(params, micro(i))), zeros)


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
  """The program update(state, batch [M, B, T], frozen) -> (state, metrics); it donates `state`.

  `frozen` holds arrays that are the same for all micro-batches: 'params', the
  parameters that are not in the state, and 'teacher_heads'.

  A step whose gradient is not finite changes nothing and is counted in
  `skipped_updates`. A step that trains no token, because all are masked, changes
  nothing either, as Adam's momentum would move the weights (`empty_updates`). A
  step whose scaled gradient overflows float16 halves the loss scale
  (`overflowed_updates`), and counts as skipped once nothing is left to halve.
  """
  loss_fn = make_loss(model, objective, layout, compute)

  def update(state: TrainState, batch: Batch, frozen: dict):
    scale = loss_scale.scale_of(state.opt_state)
    tokens = jnp.sum(batch.segment_ids > 0)
    (loss, metrics), grads = accumulate(
      lambda params, micro: loss_fn(params, micro, state.step, frozen, scale, tokens), state.params, batch
    )
    loss, grads = jax.tree.map(lambda x: x / scale, (loss, grads))
    routing = metrics.pop(_ROUTER, None)
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    empty = ~jnp.any(batch.loss_weights != 0)
    if objective.token_means or not objective.coupled:
      total = jnp.where(empty, 1.0, jnp.sum(batch.loss_weights))
      metrics = jax.tree.map(lambda x: x / total, metrics)

    if routing:
      metrics |= routing_lib.metrics(routing)
    params, opt_state = jax.lax.cond(
      finite & ~empty,
      functools.partial(clipped_step, optimizer=optimizer, grads=grads, norm=norm, clip_norm=clip_norm),
      lambda s: (s.params, loss_scale.unmoved(s.opt_state, finite)),
      state,
    )
    metrics |= {
      'loss': loss,
      'grad_norm': norm,
      'lr': schedule(state.step),
      'skipped_updates': 1.0 - finite,
      'empty_updates': 1.0 * empty,
    }
    metrics |= loss_scale.report(state.opt_state, finite)
    return TrainState(state.step + (finite & ~empty), params, opt_state), metrics

  flops = functools.partial(_update_flops, model)
  return Program('update', update, ledger, (shardings, layout.sharding()), donate=(0,), flops=flops)


def _update_flops(model: Model, state: TrainState, batch: Batch, frozen: dict) -> float:
  del state, frozen
  micro, rows, length = batch.tokens.shape
  return model.passes * micro * rows * length * flops_per_token(model.config, length / 2)


def clipped_step(
  state: TrainState, optimizer: optax.GradientTransformation, grads: Any, norm: jax.Array, clip_norm: float
) -> tuple[Any, Any]:
  """(params, opt_state) after one optimizer step with gradients of global norm `norm`, clipped to `clip_norm`."""
  scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
  clipped = jax.tree.map(lambda g: g * scale, grads)
  updates, opt_state = optimizer.update(clipped, state.opt_state, state.params)
  return optax.apply_updates(state.params, updates), opt_state


def make_evaluate(model: Model, objective: Objective, layout: Layout, compute: Compute, ledger: Ledger) -> Program:
  """evaluate(params, batch [M, B, T], step, frozen) -> {metric: []}.

  The sums of the objective, without noise, gradients or an update.
  """
  loss_fn = make_loss(
    dataclasses.replace(model, dropout=0.0),
    dataclasses.replace(objective, neftune_alpha=0.0, router=(0.0, 0.0)),
    layout,
    compute,
  )

  def evaluate(params, batch: Batch, step, frozen: dict):
    run = lambda micro: loss_fn(params, micro, step, frozen)
    micro = lambda i: jax.tree.map(lambda x: x[i], batch)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, micro(0)))
    loss, metrics = jax.lax.fori_loop(
      0, batch.tokens.shape[0], lambda i, acc: jax.tree.map(jnp.add, acc, run(micro(i))), zeros
    )
    metrics.pop(_ROUTER, None)
    return metrics | {'loss': loss}

  return Program('evaluate', evaluate, ledger, layout.sharding())


def state_shardings(model: Model, optimizer, layout: Layout) -> TrainState:
  """Optimizer state lies where its parameters lie."""
  params = model.shardings(layout)
  shapes = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.float32), model.shapes(), is_leaf=lambda x: isinstance(x, tuple)
  )
  # Factored moments (adafactor) follow parameters in number, not in shape.
  opt = optax.tree_utils.tree_map_params(
    optimizer,
    lambda x, p, s: s if x.shape == p.shape else layout.sharding(),
    jax.eval_shape(optimizer.init, shapes),
    shapes,
    params,
    transform_non_params=lambda _: layout.sharding(),
  )
  return TrainState(layout.sharding(), params, opt)


def make_state(params, optimizer, shardings: TrainState, ledger: Ledger) -> TrainState:
  """The state before the first update; takes over the parameters' buffers."""

  def init(params):
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

  return Program('init', init, ledger, shardings, donate=(0,))(params)


def random_params(model: Model, seed: int, dtype, shardings, ledger: Ledger) -> dict:
  """Random parameters, created in their final layout."""

  def init(key):
    return model.init(jax.random.wrap_key_data(key), dtype=dtype)

  mesh = jax.tree.leaves(shardings)[0].mesh
  key = jax.device_put(np.asarray(jax.random.key_data(jax.random.key(seed))), NamedSharding(mesh, PartitionSpec()))
  return Program('random', init, ledger, shardings)(key)
