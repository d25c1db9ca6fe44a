"""The mixer of the gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear): projections, convolutions, gates.

Legend: B rows, T tokens, D hidden size, K key heads, G value heads for each of them,
H = K G value heads, d size of keys, e size of values.

A layer projects its input to queries, keys, values, gates, steps and decays; convolves the
first three over time (`convolution.py`); and mixes tokens by `recurrence.py`. In Kimi Delta
Attention (arXiv:2510.26692; `gate_rank`) each channel of a key has a decay of its own,
decays and gates have low-rank projections, and gates are sigmoids instead of SiLUs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpost.models import convolution, layers, recurrence
from jaxpost.models.parameters import Param

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.decoder_configs import HybridConfig

_BLOCK = 'model.layers.{}.linear_attn.'
_EPS = 1e-6  # of the norm of queries and keys, independent of the config


def rows(cfg: HybridConfig) -> dict[str, Param]:
  """Returns the rows of the mixer of a layer; `hybrid.table` sets the number of layers."""
  d, h, e, taps = cfg.hidden_size, cfg.value_heads, cfg.value_size, cfg.taps

  def matrix(hf, *shape):
    axes = ('layers', 'embed', 'heads', None)[: 2 + len(shape)]
    return Param((1, d, *shape), axes, f'{_BLOCK}{hf}.weight', matrix=True)

  def of_heads(hf, init, count=h):
    return Param((1, count), ('layers', 'heads'), f'{_BLOCK}{hf}', init, exact=True)

  if cfg.joined:
    groups = h // cfg.key_heads
    width = 2 * cfg.key_size + 2 * groups * e
    inputs = {
      'in_qkvz': matrix('in_proj_qkvz', cfg.key_heads, width),
      'in_ba': matrix('in_proj_ba', cfg.key_heads, 2 * groups),
    }
  else:
    inputs = {f'in_{name}': matrix(f'in_proj_{name}', *shape) for name, shape in zip('qkv', cfg.convolved)}
    full_rank = {'in_z': matrix('in_proj_z', h, e), 'in_a': matrix('in_proj_a', h)}
    inputs |= {'in_b': matrix('in_proj_b', h)} | (_low_rank(cfg) if cfg.gate_rank else full_rank)
  convolutions = {
    f'conv_{name}': Param(
      (1, heads * size, 1, taps), ('layers', 'heads', None, None), f'{_BLOCK}{name}_conv1d.weight', exact=True
    )
    for name, (heads, size) in zip('qkv', cfg.convolved)
  }
  decay = of_heads('A_log', 'zeros')
  if cfg.gate_rank:
    decay = dataclasses.replace(decay, shape=(1, 1, 1, h, 1), axes=('layers', None, None, 'heads', None))
  others = {
    'log_decay': decay,
    'decay_bias': of_heads('dt_bias', 'ones', h * cfg.key_size if cfg.gate_rank else h),
    'out_norm': Param((1, e), ('layers', None), f'{_BLOCK}norm.weight', 'ones', exact=True),
    'o': Param((1, h, e, d), ('layers', 'heads', None, 'embed'), f'{_BLOCK}out_proj.weight', matrix=True),
  }
  return inputs | convolutions | others


def _low_rank(cfg: HybridConfig) -> dict[str, Param]:
  """Returns the projections of decays (a) and gates (z) to `gate_rank` numbers, and from these to all channels."""
  table, down_axes, up_axes = {}, ('layers', 'embed', None), ('layers', 'embed', 'heads', None)
  for name, hf, size in (('a', 'f', cfg.key_size), ('z', 'g', cfg.value_size)):
    down, up = (1, cfg.hidden_size, cfg.gate_rank), (1, cfg.gate_rank, cfg.value_heads, size)
    table[f'in_{name}_down'] = Param(down, down_axes, f'{_BLOCK}{hf}_a_proj.weight', matrix=True)
    table[f'in_{name}_up'] = Param(up, up_axes, f'{_BLOCK}{hf}_b_proj.weight', matrix=True)
  return table


def mix(
  p: dict, y: jax.Array, cfg: HybridConfig, compute: Compute, layout: Callable, segment_ids: jax.Array, state: tuple
) -> tuple[jax.Array, tuple]:
  """Mixes tokens by the gated delta rule, whose outputs are normed by head and gated; see `hybrid.mix`."""
  *tails, state = state or (None,) * 4
  real = (segment_ids > 0)[..., None].astype(jnp.float32)
  *qkv, z, b, a = _inputs(p, y, cfg, functools.partial(layers.project, compute=compute, layout=layout))
  convolved, tails = convolution.over_row(qkv, [p[f'conv_{name}'] for name in 'qkv'], segment_ids, tails)
  q, k, v = map(jax.nn.silu, convolved)
  # The backward pass keeps these, in the type of other activations.
  q, k, v = (x.astype(compute.residual) for x in (_normed(q) * cfg.key_size**-0.5, _normed(k), v))
  # Padding leaves the state unchanged: its step beta and its log decay are 0.
  beta = real * cfg.beta_scale * jax.nn.sigmoid(b.astype(jnp.float32))
  decay = jnp.exp(p['log_decay']) * jax.nn.softplus(a.astype(jnp.float32) + p['decay_bias'].reshape(a.shape[2:]))
  log_decay = -real[..., None] * (decay if cfg.gate_rank else decay[..., None])
  terms, runs = (q, k, v, log_decay, beta), convolution.runs_of(segment_ids)
  out, state = recurrence.over_row(terms, runs, compute=compute, layout=layout, corrected=True, state=state)
  eps = cfg.out_norm_eps or cfg.norm_eps
  out = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps) * p['out_norm']
  out = out * (jax.nn.sigmoid if cfg.gate_rank else jax.nn.silu)(z.astype(jnp.float32))
  return checkpoint_name(out.astype(compute.residual), 'dots'), (*tails, state)


def _inputs(p: dict, y: jax.Array, cfg: HybridConfig, project: Callable) -> tuple[jax.Array, ...]:
  """Projects [B, T, D] to q, k [B, T, K, d], v, z [B, T, H, e], b [B, T, H] and a, [B, T, H] or [B, T, H, d]."""

  def by_value_head(x, *size):
    return x.reshape(*x.shape[:2], cfg.value_heads, *size)

  if cfg.joined:
    d, group_size = cfg.key_size, cfg.value_heads // cfg.key_heads * cfg.value_size  # of the values of a key head
    qkvz = project('btd,dnh->btnh', y, p, 'in_qkvz')
    q, k, v, z = jnp.split(qkvz, (d, 2 * d, 2 * d + group_size), axis=-1)
    b, a = jnp.split(project('btd,dnh->btnh', y, p, 'in_ba'), 2, axis=-1)
    v, z = by_value_head(v, cfg.value_size), by_value_head(z, cfg.value_size)
    return q, k, v, z, by_value_head(b), by_value_head(a)
  q, k, v = (project('btd,dnh->btnh', y, p, f'in_{name}') for name in 'qkv')
  b = project('btd,dn->btn', y, p, 'in_b')
  if cfg.gate_rank:
    z, a = (
      project('btr,rnh->btnh', project('btd,dr->btr', y, p, f'in_{name}_down'), p, f'in_{name}_up') for name in 'za'
    )
    return q, k, v, z, b, a
  return q, k, v, project('btd,dnh->btnh', y, p, 'in_z'), b, project('btd,dn->btn', y, p, 'in_a')


def _normed(x: jax.Array) -> jax.Array:
  """Divides each vector by its L2 norm."""
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)
