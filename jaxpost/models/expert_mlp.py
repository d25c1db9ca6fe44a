"""The expert MLPs of one device: rows sorted by expert, multiplied in groups.

Legend: N tokens of the device, D hidden size, F size of an expert, e experts of the device, k experts of a token, M
rows (a token counts once for each of its experts here).

Rows are sorted by expert, and `grouped.grouped` multiplies each run of them by its matrices. With expert parallelism
the number of rows of a device is known only at run time; `_in_rounds` processes them in as many rounds of a fixed
number of rows as it takes, so that no token is dropped and no memory is reserved for the worst case.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpost.matmul import Compute
from jaxpost.models import expert_parallel, layers
from jaxpost.models.config import ModelConfig
from jaxpost.models.grouped import grouped


def apply_experts(
  p: dict,
  x: jax.Array,
  weights: jax.Array,
  chosen: jax.Array,
  first: jax.Array | int = 0,
  *,
  cfg: ModelConfig,
  compute: Compute,
  room: int = 0,
) -> jax.Array:
  """Returns, for each token, the weighted sum of the outputs of its chosen experts on this device.

  Args:
    p: parameters of the device's e experts.
    x: [N, D].
    weights, chosen: [N, k], of the router.
    first: number of the device's first expert.
    room: rows of a round; 0: no rounds.

  Returns:
    [N, D] in `compute.residual`, summed in float32.
  """
  num_local = len(p['up'])
  top_k = chosen.shape[1]
  expert = chosen.reshape(-1) - first
  # Rows of other devices' experts get the number e, and so are sorted last.
  expert = jnp.where((expert >= 0) & (expert < num_local), expert, num_local)
  order, expert = expert_parallel.sort_by_key(expert, num_local + 1)  # [N k]
  if room and room < len(order):
    padding = (0, -len(order) % room)
    order, expert = jnp.pad(order, padding), jnp.pad(expert, padding, constant_values=num_local)
    return _in_rounds(p, x, weights, order, expert, cfg=cfg, compute=compute, room=room).astype(compute.residual)
  inverse = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
  y, weights = jnp.repeat(x, top_k, axis=0), weights.reshape(-1, 1)
  if cfg.experts.on_inputs:
    y, weights = (y * weights).astype(y.dtype), 1.0
  y = _mlp_by_expert(p, _permute(y, order, inverse), expert, cfg, compute)
  y = _permute(y, inverse, order) * weights
  return jnp.sum(y.reshape(*chosen.shape, -1), axis=1).astype(compute.residual)


def _weighted_mlp(
  p: dict, x: jax.Array, weights: jax.Array, expert: jax.Array, cfg: ModelConfig, compute: Compute
) -> jax.Array:
  """Returns `_mlp_by_expert` of x [M, D], with outputs (inputs: `Experts.on_inputs`) multiplied by weights [M]."""
  weights = weights[:, None]
  if cfg.experts.on_inputs:
    return _mlp_by_expert(p, (x * weights).astype(x.dtype), expert, cfg, compute)
  return _mlp_by_expert(p, x, expert, cfg, compute) * weights


def _mlp_by_expert(p: dict, x: jax.Array, expert: jax.Array, cfg: ModelConfig, compute: Compute) -> jax.Array:
  """Applies each row's expert to it.

  Args:
    x: [M, D], sorted by expert.
    expert: [M], number of each row's expert; the results of rows with number e are 0.

  Returns:
    [M, D] float32.
  """
  sizes = jnp.sum(expert[:, None] == jnp.arange(len(p['up'])), axis=0, dtype=jnp.int32)

  def dot(x, name):
    adapted = f'{name}_a' in p  # the update of a low-rank adapter is added in float32
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
  """Applies the gate as in `layers.mlp`, or clipped as in GPT-OSS if the experts have a limit."""
  experts = cfg.experts
  if not experts.limit:
    return layers.ACTIVATIONS[cfg.activation](gate) * up
  gate, up = jnp.minimum(gate, experts.limit), jnp.clip(up, -experts.limit, experts.limit)
  return gate * jax.nn.sigmoid(experts.alpha * gate) * (up + 1)


@jax.custom_vjp
def _permute(x, order, inverse):
  """Returns x[order]; the gradient is g[inverse], a gather, where that of indexing would be a scatter."""
  return x[order]


_permute.defvjp(lambda x, order, inverse: (x[order], inverse), lambda inverse, g: (g[inverse], None, None))


# --------------------------------------------------------------------- rounds


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _in_rounds(p, x, weights, order, expert, cfg, compute, room):
  """`apply_experts` in rounds of `room` rows.

  The backward pass recomputes each round, so that memory does not grow with the number of rounds.

  Args:
    order: [M] int32, indices of the rows in [N k], sorted by expert, those of
      this device first; M is a multiple of `room`.
    expert: [M], the expert of each row.
  """

  def run_round(i, out):
    rows, tokens, experts = _rows_of_round(i, order, expert, weights, room)
    return out.at[tokens].add(_weighted_mlp(p, x[tokens], weights.reshape(-1)[rows], experts, cfg=cfg, compute=compute))

  return _loop_rounds(p, expert, room, run_round, jnp.zeros(x.shape, jnp.float32))


def _loop_rounds(p, expert, room, run_round, carry):
  rounds = -(-jnp.sum(expert < len(p['up'])) // room)
  with jax.named_scope('rounds'):  # `jaxpost.planning` finds the loop by this name
    return jax.lax.fori_loop(0, rounds, run_round, carry)


def _rows_of_round(i, order, expert, weights, room):
  """Returns (indices in [N k], tokens, experts) of the rows of round i, each [room]."""
  rows, experts = (jax.lax.dynamic_slice_in_dim(y, i * room, room) for y in (order, expert))
  return rows, rows // weights.shape[1], experts


def _in_rounds_backward(cfg, compute, room, saved, g):
  p, x, weights, order, expert = saved

  def run_round(i, grads):
    rows, tokens, experts = _rows_of_round(i, order, expert, weights, room)

    def forward(p, x, w):
      return _weighted_mlp(p, x, w, experts, cfg=cfg, compute=compute)

    _, pull_back = jax.vjp(forward, p, x[tokens], weights.reshape(-1)[rows])
    dp, dx, dw = pull_back(g[tokens])
    return jax.tree.map(jnp.add, grads[0], dp), grads[1].at[tokens].add(dx), grads[2].at[rows].add(dw)

  zeros = jax.tree.map(jnp.zeros_like, (p, x, weights.reshape(-1)))
  dp, dx, dw = _loop_rounds(p, expert, room, run_round, zeros)
  return dp, dx, dw.reshape(weights.shape), None, None


_in_rounds.defvjp(lambda *args: (_in_rounds(*args), args[:5]), _in_rounds_backward)
