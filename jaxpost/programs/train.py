"""The update: gradients of an objective over micro-batches, one optimizer step.

Legend: M micro-batches, B rows, T tokens, D hidden size, V vocabulary.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpost.losses import head as head_lib
from jaxpost.matmul import Compute
from jaxpost.models.model import Model
from jaxpost.models.transformer import Param, flops_per_token, nest
from jaxpost.programs.compile import Ledger, Program
from jaxpost.sharding import Layout
from jaxpost.types import Batch, Outputs, TrainState


@dataclasses.dataclass(frozen=True)
class Objective:
  """Per-token model outputs and batch -> per-token loss and metrics.

  fn(outputs, arrays) -> (loss, {metric: value}), all of one shape; `arrays`
  holds the batch's fields of per-token data by name. Losses and metrics are
  summed with `Batch.loss_weights`.
  """

  fn: Callable
  entropy: bool = False  # reads outputs.entropy
  entropy_grad: bool = True  # and is differentiated through it
  temperature: float = 1.0


def per_token_arrays(batch: Batch) -> dict:
  """The optional per-token fields that this batch has."""
  names = ('advantages', 'old_logprobs', 'ref_logprobs', 'sampler_logprobs')
  return {n: x for n in names if (x := batch.__dict__[n]) is not None}


def next_token(x):
  """Aligns per-token data with the position that predicts it.

  The first token of a row has weight 0, so what wraps around never counts.
  """
  return jnp.roll(x, -1, axis=1)


def make_loss(model: Model, objective: Objective, layout: Layout,
              compute: Compute) -> Callable:
  """loss(params, batch of [B, T]) -> (loss [], {metric: []})."""
  plan = head_lib.Plan(
      objective.fn, model.config.vocab_size, objective.temperature, compute,
      layout, objective.entropy, objective.entropy_grad)

  def loss(params, batch):
    hidden = model.forward(
        params, batch.tokens, batch.positions, batch.segment_ids,
        compute=compute, constrain=layout.constrain)
    return head_lib.fused_loss(
        plan, hidden, model.head(params), next_token(batch.tokens),
        next_token(batch.loss_weights),
        jax.tree.map(next_token, per_token_arrays(batch)))

  return loss


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
  zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(grad, params, micro(0)))
  return jax.lax.fori_loop(
      0, used, lambda i, acc: jax.tree.map(
          jnp.add, acc, grad(params, micro(i))), zeros)


def make_update(model: Model, objective: Objective,
                optimizer: optax.GradientTransformation, schedule: Callable,
                layout: Layout, compute: Compute, ledger: Ledger, *,
                clip_norm: float, shardings: TrainState) -> Program:
  """update(state, batch [M, B, T]) -> (state, metrics); the state is donated.

  A step whose gradient is not finite changes nothing and is counted in
  `skipped_updates`.
  """
  loss_fn = make_loss(model, objective, layout, compute)

  def update(state: TrainState, batch: Batch):
    (loss, metrics), grads = accumulate(loss_fn, state.params, batch)
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)

    def apply(state):
      scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
      clipped = jax.tree.map(lambda g: g * scale, grads)
      updates, opt_state = optimizer.update(
          clipped, state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
      return params, opt_state

    params, opt_state = jax.lax.cond(
        finite, apply, lambda s: (s.params, s.opt_state), state)
    metrics = metrics | {
        'loss': loss, 'grad_norm': norm, 'lr': schedule(state.step),
        'skipped_updates': 1.0 - finite}
    return TrainState(state.step + finite, params, opt_state), metrics

  def flops(state, batch):
    del state
    rows = batch.tokens.shape
    return 3 * rows[0] * rows[1] * rows[2] * flops_per_token(
        model.config, rows[2] / 2)

  return Program('update', update, ledger, (shardings, layout.sharding()),
                 donate=(0,), flops=flops)


def make_score(model: Model, layout: Layout, compute: Compute,
               ledger: Ledger, *, temperature: float) -> Program:
  """score(params, batch [M, B, T]) -> Outputs [M, B, T] of weighted tokens."""

  plan = head_lib.Plan(
      None, model.config.vocab_size, temperature, compute, layout)

  def score_rows(params, batch):
    hidden = model.forward(
        params, batch.tokens, batch.positions, batch.segment_ids,
        compute=compute, constrain=layout.constrain)
    outputs = head_lib.token_outputs(
        plan, hidden, model.head(params), next_token(batch.tokens),
        next_token(batch.loss_weights))
    return jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), outputs)

  def score(params, batch):
    if batch.tokens.shape[0] == 1:
      outputs = score_rows(params, jax.tree.map(lambda x: x[0], batch))
      return jax.tree.map(lambda x: x[None], outputs)
    used = jnp.sum(jnp.any(batch.segment_ids > 0, axis=(1, 2)))
    zeros = jnp.zeros(batch.tokens.shape, jnp.float32)

    def body(i, acc):
      out = score_rows(params, jax.tree.map(lambda x: x[i], batch))
      return jax.tree.map(lambda a, x: a.at[i].set(x), acc, out)

    return jax.lax.fori_loop(0, used, body, Outputs(zeros, zeros))

  def flops(params, batch):
    del params
    return batch.tokens.size * flops_per_token(
        model.config, batch.tokens.shape[-1] / 2)

  rows = layout.sharding((None, 'batch', None))
  return Program('score', score, ledger, rows, flops=flops)


def state_shardings(model: Model, optimizer, layout: Layout) -> TrainState:
  """Optimizer state lies where its parameters lie."""
  params = model.shardings(layout)
  shapes = jax.tree.map(
      lambda s: jax.ShapeDtypeStruct(s, jnp.float32), model.shapes(),
      is_leaf=lambda x: isinstance(x, tuple))
  # Factored moments (adafactor) follow parameters in number, not in shape.
  opt = optax.tree_utils.tree_map_params(
      optimizer,
      lambda x, p, s: s if x.shape == p.shape else layout.sharding(),
      jax.eval_shape(optimizer.init, shapes), shapes, params,
      transform_non_params=lambda _: layout.sharding())
  return TrainState(layout.sharding(), params, opt)


def make_state(params, optimizer, shardings: TrainState,
               ledger: Ledger) -> TrainState:
  """The state before the first update; takes over the parameters' buffers."""
  def init(params):
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
  return Program('init', init, ledger, shardings, donate=(0,))(params)


def random_params(model: Model, seed: int, dtype, shardings,
                  ledger: Ledger) -> dict:
  """Random parameters, created in their final layout."""
  def init(key):
    return model.init(jax.random.wrap_key_data(key), dtype=dtype)

  mesh = jax.tree.leaves(shardings)[0].mesh
  key = jax.device_put(
      np.asarray(jax.random.key_data(jax.random.key(seed))),
      NamedSharding(mesh, PartitionSpec()))
  return Program('random', init, ledger, shardings)(key)


def frozen_copy(model: Model, params, compute: Compute, shardings,
                ledger: Ledger) -> dict:
  """A copy that only scores, in the type that products round it to anyway."""
  def copy(params):
    return jax.tree.map(
        lambda x, p: narrow(x, p, compute), params, nest(model.table))
  return Program('copy', copy, ledger, shardings)(params)


def narrow(x, param: Param, compute: Compute):
  """A new array of the operand type; norm scales are never rounded."""
  return jnp.array(x, x.dtype if param.init == 'ones' else compute.dtype,
                   copy=True)
