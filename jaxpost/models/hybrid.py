"""Decoders whose layers have either attention or the gated delta rule (Qwen3-Next, Qwen3.5).

Legend: B rows, T tokens, D hidden size, K key heads, G value heads for each of them,
H = K G value heads, d size of keys, e size of values, W taps of the convolutions.

A layer of the stack `delta` projects its input to queries, keys, values, gates, steps and
decays; convolves the first three over time; and mixes tokens by `delta_rule.py`. What it
keeps of a sequence has a fixed size: the last W - 1 inputs of each convolution and the
state, as `HybridConfig.state_shapes` says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpost.distributed.mesh import row_shards
from jaxpost.errors import InputError
from jaxpost.models import delta_rule, layers
from jaxpost.models.parameters import STACKS, STATEFUL, Param, unstack_layers

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.config import HybridConfig

_BLOCK = 'model.layers.{}.linear_attn.'
_ATTENTION = ('q', 'k', 'v', 'o', 'q_norm', 'k_norm', 'sinks')  # rows that other mixers replace
_EPS = 1e-6  # of the norm of queries and keys, independent of the config


def table(plain: dict[str, Param], cfg: HybridConfig) -> dict[str, Param]:
  """Returns the parameter table, with a stack for each kind of layers.

  plain: the table of the same model with attention in all layers.
  """
  common = {k.split('/')[1]: v for k, v in plain.items() if v.stacked}
  rows = {}
  for stack in (name for name in STACKS if name in cfg.mixers):
    numbers = tuple(i for i, name in enumerate(cfg.mixers) if name == stack)
    mixer = {name: spec for name, spec in common.items() if name in _ATTENTION}
    if stack in STATEFUL:
      mixer = _delta_rows(cfg)
    else:  # queries, and gates of the output
      *shape, size = mixer['q'].shape
      mixer['q'] = dataclasses.replace(mixer['q'], shape=(*shape, 2 * size))
    rest = {name: spec for name, spec in common.items() if name not in _ATTENTION}
    for name, spec in (mixer | rest).items():
      rows[f'{stack}/{name}'] = dataclasses.replace(spec, shape=(len(numbers), *spec.shape[1:]), numbers=numbers)
  outside = {path: spec for path, spec in plain.items() if not spec.stacked}
  return {'embed': outside.pop('embed')} | rows | outside


def _delta_rows(cfg: HybridConfig) -> dict[str, Param]:
  """Returns the rows of the mixer of a layer; `table` sets the number of layers."""
  d, h, e, taps = cfg.hidden_size, cfg.value_heads, cfg.value_size, cfg.taps

  def matrix(hf, *shape):
    return Param(
      (1, d, *shape), ('layers', 'embed', 'heads', None)[: 2 + len(shape)], f'{_BLOCK}{hf}.weight', matrix=True
    )

  def of_heads(hf, init):
    return Param((1, h), ('layers', 'heads'), f'{_BLOCK}{hf}', init, exact=True)

  if cfg.joined:
    groups = h // cfg.key_heads
    width = 2 * cfg.key_size + 2 * groups * e
    inputs = {
      'in_qkvz': matrix('in_proj_qkvz', cfg.key_heads, width),
      'in_ba': matrix('in_proj_ba', cfg.key_heads, 2 * groups),
    }
  else:
    inputs = {f'in_{name}': matrix('in_proj_qkv', *shape) for name, shape in zip('qkv', cfg.convolved)}
    inputs |= {'in_z': matrix('in_proj_z', h, e), 'in_b': matrix('in_proj_b', h), 'in_a': matrix('in_proj_a', h)}
  taken = {
    f'conv_{name}': Param(
      (1, heads * size, 1, taps), ('layers', 'heads', None, None), f'{_BLOCK}conv1d.weight', exact=True
    )
    for name, (heads, size) in zip('qkv', cfg.convolved)
  }
  return (
    inputs
    | taken
    | {
      'log_decay': of_heads('A_log', 'zeros'),
      'decay_bias': of_heads('dt_bias', 'ones'),
      'out_norm': Param((1, e), ('layers', None), f'{_BLOCK}norm.weight', 'ones', exact=True),
      'o': Param((1, h, e, d), ('layers', 'heads', None, 'embed'), f'{_BLOCK}out_proj.weight', matrix=True),
    }
  )


def over_rows(
  cfg: HybridConfig, segment_ids: jax.Array, compute: Compute, layout, branch_ids: jax.Array | None = None, keep=False
) -> Callable:
  """Returns (p, y) -> (out, state or None), the mixer over packed rows; see `mix`.

  keep: return the state at the end of each row, which has one document.

  Raises:
    InputError: for what the mixer does not support.
  """
  if branch_ids is not None:
    raise InputError(
      'config.preference.share_prompt: layers with a recurrent state cannot read branches of a shared prompt, which '
      'would need a state each (online_dpo always has branches and is not for these models); set it to False'
    )
  if row_shards(layout) > 1:
    raise InputError(
      'config.mesh: context is not for models with recurrent layers: devices would have to pass states on to each '
      'other; set it to 1'
    )

  def mixer(p, y):
    out, state = mix(p, y, cfg, compute, layout, segment_ids=segment_ids)
    return out, list(state) if keep else None

  return mixer


def mix(
  p: dict,
  y: jax.Array,
  cfg: HybridConfig,
  compute: Compute,
  layout,
  segment_ids: jax.Array | None = None,
  state: tuple | None = None,
) -> tuple[jax.Array, tuple]:
  """Mixes tokens by the gated delta rule, without the output projection.

  Args:
    y: [B, T, D], the normed input.
    segment_ids: [B, T], documents of each row, 0 for padding; None: one without padding.
    state: arrays [B, *shape] for each of `cfg.state_shapes`, which the row continues; None: zeros.

  Returns:
    ([B, T, H, e], the state after the last token that is no padding).
  """
  if segment_ids is None:
    segment_ids = jnp.ones(y.shape[:2], jnp.int32)
  *tails, state = state or (None,) * 4
  runs, real = delta_rule.runs_of(segment_ids), (segment_ids > 0)[..., None].astype(jnp.float32)
  *qkv, z, b, a = _inputs(p, y, cfg, functools.partial(layers.project, compute=compute, layout=layout))
  # The inputs before the first token of padding, which is on the right where states are used.
  ends = jnp.sum(real, axis=1).astype(jnp.int32) + jnp.arange(cfg.taps - 1)
  new_tails, mixed = [], []
  for name, x, tail in zip('qkv', qkv, tails):
    weight = p[f'conv_{name}'].reshape(*x.shape[2:], cfg.taps)
    mixed.append(jax.nn.silu(delta_rule.convolve(x, weight, runs, tail)))
    seen = delta_rule.with_tail(x, tail, cfg.taps)
    new_tails.append(jnp.take_along_axis(seen, ends[..., None, None], axis=1).swapaxes(1, 2))
  q, k, v = mixed
  q, k = _normed(q) * cfg.key_size**-0.5, _normed(k)
  beta = real * jax.nn.sigmoid(b.astype(jnp.float32))
  log_decay = -real * jnp.exp(p['log_decay']) * jax.nn.softplus(a.astype(jnp.float32) + p['decay_bias'])
  if state is not None and y.shape[1] == 1:
    out, state = delta_rule.step(*(x[:, 0] for x in (q, k, v, log_decay, beta)), state)
    out = out[:, None]
  else:
    out, state = delta_rule.chunked(q, k, v, log_decay, beta, runs=runs, dtype=compute.dtype, state=state)
  out = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + cfg.norm_eps) * p['out_norm']
  out = out * jax.nn.silu(z.astype(jnp.float32))
  return checkpoint_name(out.astype(compute.residual), 'dots'), (*new_tails, state)


def _inputs(p: dict, y: jax.Array, cfg: HybridConfig, project: Callable) -> tuple[jax.Array, ...]:
  """Projects [B, T, D] to q, k [B, T, K, d], v, z [B, T, H, e] and b, a [B, T, H]."""

  def by_value_head(x, *size):
    return x.reshape(*x.shape[:2], cfg.value_heads, *size)

  if cfg.joined:
    d, values = cfg.key_size, cfg.value_heads // cfg.key_heads * cfg.value_size
    both = project('btd,dnh->btnh', y, p, 'in_qkvz')
    q, k, v, z = jnp.split(both, (d, 2 * d, 2 * d + values), axis=-1)
    b, a = jnp.split(project('btd,dnh->btnh', y, p, 'in_ba'), 2, axis=-1)
    return q, k, *(by_value_head(x, cfg.value_size) for x in (v, z)), by_value_head(b), by_value_head(a)
  of_heads = (project('btd,dnh->btnh', y, p, f'in_{name}') for name in 'qkvz')
  return *of_heads, *(project('btd,dn->btn', y, p, f'in_{name}') for name in 'ba')


def _normed(x: jax.Array) -> jax.Array:
  """Divides each vector by its length."""
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def scan_periods(
  alike: Callable, params: dict, x: jax.Array, cfg: HybridConfig, chosen: jax.Array | None
) -> tuple[jax.Array, list, Any]:
  """Runs all layers under a scan over the shortest sequence of them that repeats, itself straight code.

  Args:
    alike: kind -> ((parameters of a layer, x, chosen experts) -> (x, (kept, routing))).
    chosen: [L, B, T, k], experts to use (`moe.mlp`), or None.

  Returns:
    (x, `kept` of each layer, `Routing` of all layers or None).
  """
  order, count = list(zip(cfg.layer_stacks, cfg.layer_kinds)), cfg.num_layers
  period = next(n for n in range(1, count + 1) if count % n == 0 and order[:n] * (count // n) == order)

  def one(x, xs):
    stacks, chosen = xs
    kept = []
    for i, p in enumerate(unstack_layers(stacks, cfg.layer_stacks[:period])['layers']):
      x, kept_l = alike(order[i][1])(p, x, None if chosen is None else chosen[i])
      kept.append(kept_l)
    kept, routing = zip(*kept)
    return x, (kept, jax.tree.map(lambda *y: jnp.stack(y), *routing))

  def split_layers(x):
    return x.reshape(count // period, -1, *x.shape[1:])

  stacks = {name: params[name] for name in STACKS if name in params}
  x, (kept, routing) = jax.lax.scan(one, x, jax.tree.map(split_layers, (stacks, chosen)))
  kept = [jax.tree.map(lambda y, i=i: y[i // period], kept[i % period]) for i in range(count)]
  return x, kept, jax.tree.map(lambda y: y.reshape(count, *y.shape[2:]), routing)
