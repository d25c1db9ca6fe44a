"""The expert MLPs of one device: rows sorted by expert, multiplied in groups.

Legend: N tokens of the device, D hidden size, F size of an expert, e experts of
the device, k experts of a token, M rows (a token counts once for each of its
experts here).

Rows are sorted by expert, and `grouped.grouped` multiplies each run of them by
its matrices. With expert parallelism the number of rows of a device is known
only at run time; `_in_rounds` processes them in rounds of a fixed number of
rows, as many rounds as it takes, so that no token is dropped and no memory is
set aside for the worst case.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpost.matmul import Compute
from jaxpost.models import expert_parallel, layers
from jaxpost.models.grouped import grouped

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig


def apply_experts(
  p: dict,
  x: jax.Array,
  weights: jax.Array,
  chosen: jax.Array,
  first: jax.Array | int,
  cfg: ModelConfig,
  compute: Compute,
  room: int = 0,
) -> jax.Array:
  """Sums the weighted outputs of those chosen experts that this device has.

  Args:
    p: parameters of the device's e experts.
    x: [N, D].
    weights, chosen: [N, k], of the router.
    first: number of the device's first expert.
    room: rows of a round; 0 if there are no rounds.

  Returns:
    [N, D] float32.
  """
  num_local = len(p['up'])
  top_k = chosen.shape[1]
  expert = chosen.reshape(-1) - first
  # Rows of other devices' experts get the number e, and so are sorted last.
  expert = jnp.where((expert >= 0) & (expert < num_local), expert, num_local)
  order, expert = expert_parallel.sort_by_key(expert, num_local + 1)  # [N k]
  if room and room < len(order):
    fill = (0, -len(order) % room)
    order = jnp.pad(order, fill)
    expert = jnp.pad(expert, fill, constant_values=num_local)
    return _in_rounds(p, x, weights, order, expert, cfg=cfg, compute=compute, room=room)
  inverse = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
  y, weights = jnp.repeat(x, top_k, axis=0), weights.reshape(-1, 1)
  if cfg.experts.on_inputs:
    y, weights = (y * weights).astype(y.dtype), 1.0
  y = _mlp_by_expert(p, _permute(y, order, inverse), expert, cfg, compute)
  y = _permute(y, inverse, order) * weights
  return jnp.sum(y.reshape(*chosen.shape, -1), axis=1)


def _weighted_mlp(
  p: dict, x: jax.Array, weights: jax.Array, expert: jax.Array, cfg: ModelConfig, compute: Compute
) -> jax.Array:
  """Returns `_mlp_by_expert` times the weights [M] of the rows, which multiply its input with `Experts.on_inputs`."""
  weights = weights[:, None]
  if cfg.experts.on_inputs:
    return _mlp_by_expert(p, (x * weights).astype(x.dtype), expert, cfg, compute)
  return _mlp_by_expert(p, x, expert, cfg, compute) * weights


def _mlp_by_expert(p: dict, x: jax.Array, expert: jax.Array, cfg: ModelConfig, compute: Compute) -> jax.Array:
  """Applies its expert to each row.

  Args:
    x: [M, D], sorted by expert.
    expert: [M], number of each row's expert; rows of e give 0.

  Returns:
    [M, D] float32.
  """
  sizes = jnp.sum(expert[:, None] == jnp.arange(len(p['up'])), axis=0, dtype=jnp.int32)

  def dot(x, name):
    adapted = f'{name}_a' in p  # a low-rank adapter is added in float32
    y = grouped(x, p[name], sizes, compute, 'float32' if adapted else compute.residual)
    if adapted:
      x = grouped(x, p[f'{name}_a'], sizes, compute)
      y = y + grouped(x, p[f'{name}_b'], sizes, compute)
    y = checkpoint_name(y.astype(compute.residual), 'dots')
    bias = p.get(f'{name}_bias')
    return y if bias is None else y + bias.at[expert].get(mode='fill', fill_value=0, indices_are_sorted=True)

  if 'gate' in p:
    x = _gated(dot(x, 'gate').astype(jnp.float32), dot(x, 'up'), cfg)
  else:
    x = layers.UNGATED[cfg.activation](dot(x, 'up').astype(jnp.float32))
  return dot(x.astype(compute.residual), 'down')


def _gated(gate: jax.Array, up: jax.Array, cfg: ModelConfig) -> jax.Array:
  """Applies the gate: SwiGLU and its like; with a limit, the clipped one of GPT-OSS."""
  experts = cfg.experts
  if not experts.limit:
    return layers.ACTIVATIONS[cfg.activation](gate) * up
  gate, up = jnp.minimum(gate, experts.limit), jnp.clip(up, -experts.limit, experts.limit)
  return gate * jax.nn.sigmoid(experts.alpha * gate) * (up + 1)


@jax.custom_vjp
def _permute(x, order, inverse):
  """x[order]; the gradient is x[inverse], a gather in place of a scatter."""
  return x[order]


def _permute_forward(x, order, inverse):
  return x[order], inverse


def _permute_backward(inverse, g):
  return g[inverse], None, None


_permute.defvjp(_permute_forward, _permute_backward)


# --------------------------------------------------------------------- rounds


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _in_rounds(p, x, weights, order, expert, cfg, compute, room):
  """`apply_experts` in rounds of `room` rows.

  The backward pass recomputes each round, so that memory does not grow with
  the number of rounds.

  Args:
    order: [M] int32, numbers in [N k] of the rows, sorted by expert, those of
      this device first; M is a multiple of `room`.
    expert: [M], the expert of each.
  """

  def one_round(i, out):
    pick, token, local = _rows_of_round(i, order, expert, weights, room)
    return out.at[token].add(_weighted_mlp(p, x[token], weights.reshape(-1)[pick], local, cfg=cfg, compute=compute))

  return _loop_rounds(p, expert, room, one_round, jnp.zeros(x.shape, jnp.float32))


def _loop_rounds(p, expert, room, one_round, carry):
  rounds = -(-jnp.sum(expert < len(p['up'])) // room)
  with jax.named_scope('rounds'):  # planning finds the loop by this name
    return jax.lax.fori_loop(0, rounds, one_round, carry)


def _rows_of_round(i, order, expert, weights, room):
  """Returns (row numbers in [N k], their tokens, their experts) of round i, each [room]."""
  pick, local = (jax.lax.dynamic_slice_in_dim(y, i * room, room) for y in (order, expert))
  return pick, pick // weights.shape[1], local


def _in_rounds_forward(p, x, weights, order, expert, cfg, compute, room):
  out = _in_rounds(p, x, weights, order, expert, cfg=cfg, compute=compute, room=room)
  return out, (p, x, weights, order, expert)


def _in_rounds_backward(cfg, compute, room, saved, g):
  p, x, weights, order, expert = saved

  def one_round(i, grads):
    pick, token, local = _rows_of_round(i, order, expert, weights, room)

    def run(p, x, w):
      return _weighted_mlp(p, x, w, local, cfg=cfg, compute=compute)

    _, pull = jax.vjp(run, p, x[token], weights.reshape(-1)[pick])
    d_p, d_x, d_w = pull(g[token])
    return jax.tree.map(jnp.add, grads[0], d_p), grads[1].at[token].add(d_x), grads[2].at[pick].add(d_w)

  zeros = jax.tree.map(jnp.zeros_like, (p, x, weights.reshape(-1)))
  d_p, d_x, d_w = _loop_rounds(p, expert, room, one_round, zeros)
  return d_p, d_x, d_w.reshape(weights.shape), None, None


_in_rounds.defvjp(_in_rounds_forward, _in_rounds_backward)
