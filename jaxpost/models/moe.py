"""Mixtures of experts: each token passes a few MLPs that a router chooses.

Legend: B rows, T tokens, N tokens in all, D hidden size, F size of an expert,
E experts, k of them for a token, L layers.

Nothing is dropped and nothing is padded to a capacity: tokens are sorted by
expert, and `matmul.grouped` multiplies each run of them by its matrix.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import Layout
from jaxpost.errors import InputError
from jaxpost.matmul import Compute, grouped
from jaxpost.models import expert_parallel, layers
from jaxpost.models.parameters import Param
from jaxpost.models.routing import Routing, route

if TYPE_CHECKING:
  from jaxpost.models.config import ModelConfig

SHARED_PREFIX = 'shared_'  # of what all tokens pass


def param_rows(cfg: ModelConfig) -> dict[str, Param]:
  """The rows of the parameter table in place of those of a dense MLP."""
  n, d, e, f = (cfg.sparse_layers, cfg.hidden_size, cfg.experts.num, cfg.experts.size)
  block, at = 'model.layers.{}.mlp.', dict(first=cfg.num_layers - n)

  def matrix(name, shape, axes):
    return Param(
      (n, e, *shape), ('layers', 'expert', *axes), f'{block}experts.{{}}.{name}_proj.weight', matrix=True, **at
    )

  def bias(name, shape, axes):
    return Param((n, *shape), ('layers', *axes), f'{block}{name}.bias', 'zeros', exact=True, **at)

  def shared(name, shape, axes):
    return Param((n, *shape), ('layers', *axes), f'{block}shared_experts.{name}_proj.weight', matrix=True, **at)

  s = cfg.experts.shared * f
  biases = {
    'router': bias('gate', (e,), (None,)),
    'gate': bias('experts.{}.gate_proj', (e, f), ('expert', 'mlp')),
    'up': bias('experts.{}.up_proj', (e, f), ('expert', 'mlp')),
    'down': bias('experts.{}.down_proj', (e, d), ('expert', None)),
  }
  return {
    'layers/router': Param((n, d, e), ('layers', 'embed', None), f'{block}gate.weight', matrix=True, exact=True, **at),
    'layers/gate': matrix('gate', (d, f), ('embed', 'mlp')),
    'layers/up': matrix('up', (d, f), ('embed', 'mlp')),
    'layers/down': matrix('down', (f, d), ('mlp', 'embed')),
    **{f'layers/{k}_bias': v for k, v in biases.items() if k in cfg.biases},
    **(
      {
        'layers/router_choice': dataclasses.replace(
          biases['router'], hf=f'{block}gate.e_score_correction_bias', dtype='float32'
        )
      }
      if cfg.experts.sigmoid
      else {}
    ),
    **(
      {
        f'layers/{SHARED_PREFIX}{k}': shared(k, *v)
        for k, v in dict(
          gate=((d, s), ('embed', 'mlp')), up=((d, s), ('embed', 'mlp')), down=((s, d), ('mlp', 'embed'))
        ).items()
      }
      if s
      else {}
    ),
  }


def mlp(p, x, cfg: ModelConfig, compute: Compute, layout, chosen=None):
  """([B, T, D], `Routing`): the weighted sum of what k experts say.

  On a mesh each device routes the rows that it holds. Over 'expert', which
  splits rows and experts, each row goes to the devices that have its experts,
  which do what these have to do with it, and the sums come back: see
  `exchange`. A device that has more to do than others takes more rounds, see
  `_in_rounds`.

  Args:
    layout: a `Layout`, or any function where there is one device.
    chosen: [B, T, k], experts to take in place of the router's choice.
  """
  names = ('router', 'gate', 'up', 'down')
  names += tuple(f'{n}_bias' for n in names if f'{n}_bias' in p)
  names += ('router_choice',) * ('router_choice' in p)
  matrices = {}
  for n in names:
    w = p[n]
    if hasattr(w, 'apart'):  # a matrix with its adapter
      w, matrices[f'{n}_a'], matrices[f'{n}_b'] = w.apart()
    matrices[n] = w.dense(compute.dtype) if hasattr(w, 'dense') else w
  if not isinstance(layout, Layout) or layout.mesh.size == 1:
    return _local(matrices, x, chosen, cfg, compute)
  size = layout.mesh.shape['expert']
  if cfg.experts.num % size:
    raise InputError(f'config.mesh: expert={size} must divide the {cfg.experts.num} experts of the model')
  table = param_rows(cfg)
  specs = {name: layout.spec(s.axes[1:], s.shape[1:]) for name in names for s in [table[f'layers/{name}']]}
  specs['router'] = PartitionSpec()  # which is small
  for n in names[1:4]:
    if f'{n}_a' in matrices:
      of, into, onto = specs[n]
      specs[f'{n}_a'] = PartitionSpec(of, into, None)
      specs[f'{n}_b'] = PartitionSpec(of, None, onto)
  tokens = layout.spec(('batch', 'time', None), x.shape)
  split = 'expert' in jax.tree.leaves(tuple(tokens))
  run = functools.partial(
    _local,
    cfg=cfg,
    compute=compute,
    split=split,
    specs=specs,
    size=size,
    exact=layout.mesh.devices.flat[0].platform != 'cpu',
  )
  return jax.shard_map(
    run,
    mesh=layout.mesh,
    in_specs=(specs, tokens, tokens),
    out_specs=(tokens, Routing(tokens, tokens)),
    check_vma=False,
  )(matrices, x, chosen)


def _local(p, x, chosen, cfg, compute, split=False, specs=None, size=1, exact=False):
  """As `mlp`, of the rows and the experts of one device of a mesh.

  split: whether others on its 'expert' axis, of `size`, have other rows.
  specs: how the matrices are split.
  exact: as of `exchange.exchange`.
  """
  weights, routing = route(p, x, cfg, chosen)
  flat = lambda y: y.reshape(-1, y.shape[-1])
  given = flat(x), flat(weights), flat(routing.chosen)
  first = 0
  if specs:
    p = {n: _whole(w, specs[n], compute.dtype) for n, w in p.items()}
  if size > 1:
    first = jax.lax.axis_index('expert') * (cfg.experts.num // size)
    if split:
      trip, given = expert_parallel.dispatch_tokens(*given, cfg.experts.num // size, exact)
  parts = jax.lax.axis_size('tensor') if specs and 'tensor' in specs['gate'] else 1
  if 'down_bias' in p:  # of which each part of a sum has a share
    p = p | {'down_bias': p['down_bias'] / parts}
  # Twice what a device has to do where the experts share the work evenly.
  room = 2 * routing.chosen.size if split else 0
  out = _experts(p, *given, first, cfg, compute, room).astype(compute.residual)
  if size > 1:
    out = expert_parallel.combine(out.reshape(size, -1, x.shape[-1]), trip) if (split) else jax.lax.psum(out, 'expert')
  if parts > 1:
    out = jax.lax.psum(out, 'tensor')
  return out.reshape(x.shape), routing


def _whole(w, spec, dtype):
  """A shard of experts with all of the hidden size, moved in `dtype`.

  Of its own type again, in which gradients are summed on the way back.
  """
  for axis, part in enumerate(spec):
    if part == 'fsdp':
      w = _gathered(w, part, axis, dtype)
  return w


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(w, part, axis, dtype):
  return jax.lax.all_gather(w.astype(dtype), part, axis=axis, tiled=True).astype(w.dtype)


_gathered.defvjp(
  lambda w, *how: (_gathered(w, *how), None),
  lambda part, axis, dtype, _, g: (jax.lax.psum_scatter(g, part, scatter_dimension=axis, tiled=True),),
)


def _experts(p, x, weights, chosen, first, cfg, compute, room: int = 0):
  """x [N, D], weights and chosen [N, k] -> [N, D] float32.

  Of the experts in `p`, the first of which has the number `first`. Of the
  others `room` rows at a time are enough: see `_in_rounds`.
  """
  e, k = len(p['gate']), chosen.shape[1]
  number = chosen.reshape(-1) - first
  number = jnp.where((number >= 0) & (number < e), number, e)
  order, number = expert_parallel.sort_by_key(number, e + 1)  # [N k], by expert
  if room and room < len(order):
    fill = (0, -len(order) % room)
    return _in_rounds(p, x, weights, jnp.pad(order, fill), jnp.pad(number, fill, constant_values=e), cfg, compute, room)
  back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
  y = _permute(jnp.repeat(x, k, axis=0), order, back)
  y = _rows(p, y, number, cfg, compute)
  y = _permute(y, back, order).reshape(*weights.shape, -1)
  return jnp.sum(y * weights[..., None], axis=1)


def _rows(p, y, number, cfg, compute):
  """Rows [M, D] and the expert of each, in order, -> [M, D] float32."""
  sizes = jnp.sum(number[:, None] == jnp.arange(len(p['gate'])), axis=0, dtype=jnp.int32)

  def dot(x, name):
    y = grouped(x, p[name], sizes, compute)
    if f'{name}_a' in p:  # the low rank of an adapter
      x = grouped(x, p[f'{name}_a'], sizes, compute)
      y = y + grouped(x, p[f'{name}_b'], sizes, compute)
    bias = p.get(f'{name}_bias')
    return y if bias is None else y + bias.at[number].get(mode='fill', fill_value=0, indices_are_sorted=True)

  y = _gated(dot(y, 'gate'), dot(y, 'up'), cfg)
  return dot(y.astype(compute.residual), 'down')


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _in_rounds(p, x, weights, order, number, cfg, compute, room):
  """`_experts` of some of the experts, in rounds of `room` rows.

  As many rounds as there are rows: none is dropped if all tokens want the
  experts of one device, and no memory is set aside for that. The backward
  pass computes what is inside of a round again.

  Args:
    order: [M] int32, of N k, those of these experts first, by expert; M is a
      multiple of `room`. number: [M], the expert of each.
  """

  def one(i, out):
    pick, token, local = _round(i, order, number, weights, room)
    y = _rows(p, x[token], local, cfg, compute)
    return out.at[token].add(y * weights.reshape(-1)[pick][:, None])

  return _rounds(p, number, room, one, jnp.zeros(x.shape, jnp.float32))


def _rounds(p, number, room, one, out):
  turns = -(-jnp.sum(number < len(p['gate'])) // room)
  with jax.named_scope('rounds'):  # which plans look for
    return jax.lax.fori_loop(0, turns, one, out)


def _round(i, order, number, weights, room):
  pick, local = (jax.lax.dynamic_slice_in_dim(y, i * room, room) for y in (order, number))
  return pick, pick // weights.shape[1], local


def _in_rounds_forward(p, x, weights, order, number, cfg, compute, room):
  out = _in_rounds(p, x, weights, order, number, cfg, compute, room)
  return out, (p, x, weights, order, number)


def _in_rounds_backward(cfg, compute, room, saved, g):
  p, x, weights, order, number = saved

  def one(i, grads):
    pick, token, local = _round(i, order, number, weights, room)
    run = lambda p, x, w: _rows(p, x, local, cfg, compute) * w[:, None]
    of_p, of_x, of_w = jax.vjp(run, p, x[token], weights.reshape(-1)[pick])[1](g[token])
    return (jax.tree.map(jnp.add, grads[0], of_p), grads[1].at[token].add(of_x), grads[2].at[pick].add(of_w))

  zeros = jax.tree.map(jnp.zeros_like, (p, x, weights.reshape(-1)))
  of_p, of_x, of_w = _rounds(p, number, room, one, zeros)
  return of_p, of_x, of_w.reshape(weights.shape), None, None


_in_rounds.defvjp(_in_rounds_forward, _in_rounds_backward)


def _gated(gate, x, cfg):
  """SwiGLU and its like; with a limit, that of GPT-OSS."""
  e = cfg.experts
  if not e.limit:
    return layers.ACTIVATIONS[cfg.activation](gate) * x
  gate, x = jnp.minimum(gate, e.limit), jnp.clip(x, -e.limit, e.limit)
  return gate * jax.nn.sigmoid(e.alpha * gate) * (x + 1)


@jax.custom_vjp
def _permute(x, order, back):
  """x[order]; `back` undoes it, so that the gradient is no scatter."""
  return x[order]


_permute.defvjp(lambda x, order, back: (x[order], back), lambda back, g: (g[back], None, None))


# --------------------------------------------------------------------- replay
#
# Sampler and trainer round differently, and a token at the edge between two
# experts then goes different ways: its log-prob jumps, and importance ratios
# with it. Taking the experts that were chosen while sampling in the update
# (and in scoring, that of the reference too) keeps them together: "rollout
# routing replay", Ma et al., arXiv:2510.11370. The router still learns: from
# the weights of those experts.


# --------------------------------------------------------------- load balance
