"""The mixer of a selective state space (Mamba-2; Dao and Gu, arXiv:2405.21060), as in Granite 4 and Nemotron-H.

Legend: B rows, T tokens, D hidden size, K groups, H heads, d size of the state, e size of a head.

A layer projects its input to gates, x, B, C and steps; convolves x, B and C over time
(`convolution.py`); and mixes tokens by `recurrence.py`, with C as queries, B as keys, x as
values, and steps dt that scale values and decays. The state of a head is [d, e].
"""

from __future__ import annotations

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

_BLOCK = 'model.layers.{}.mamba.'


def rows(cfg: HybridConfig) -> dict[str, Param]:
  """Returns the rows of the mixer of a layer; `hybrid.table` sets the number of layers."""
  d, h, e, groups, size = cfg.hidden_size, cfg.value_heads, cfg.value_size, cfg.key_heads, cfg.key_size
  axes = ('layers', 'embed', 'heads', None)

  def of_heads(hf, init, count=h):
    return Param((1, count), ('layers', 'heads'), f'{_BLOCK}{hf}', init, exact=True)

  shapes = {'z': (h, e), 'x': (h, e), 'b': (groups, size), 'c': (groups, size), 'step': (h,)}
  table = {
    f'in_{name}': Param((1, d, *shape), axes[: 2 + len(shape)], f'{_BLOCK}in_proj.weight', matrix=True)
    for name, shape in shapes.items()
  }
  for name, (heads, width) in zip('xbc', cfg.convolved):
    table[f'conv_{name}'] = Param(
      (1, heads * width, 1, cfg.taps), ('layers', 'heads', None, None), f'{_BLOCK}conv1d.weight', exact=True
    )
    if 'conv' in cfg.biases:
      table[f'conv_{name}_bias'] = of_heads('conv1d.bias', 'zeros', heads * width)
  return table | {
    'log_decay': of_heads('A_log', 'zeros'),
    'step_bias': of_heads('dt_bias', 'ones'),
    'skip': of_heads('D', 'ones'),
    'out_norm': of_heads('norm.weight', 'ones', h * e),
    'o': Param((1, h, e, d), ('layers', 'heads', None, 'embed'), f'{_BLOCK}out_proj.weight', matrix=True),
  }


def mix(
  p: dict, y: jax.Array, cfg: HybridConfig, compute: Compute, layout: Callable, segment_ids: jax.Array, state: tuple
) -> tuple[jax.Array, tuple]:
  """Mixes tokens by a state space, whose outputs are gated and then normed by group; see `hybrid.mix`."""
  *tails, state = state or (None,) * 4
  real = (segment_ids > 0)[..., None].astype(jnp.float32)
  z, *xbc = (layers.project('btd,dnh->btnh', y, p, f'in_{name}', compute, layout=layout) for name in 'zxbc')
  dt = layers.project('btd,dn->btn', y, p, 'in_step', compute, layout=layout)
  convolved, tails = convolution.over_row(xbc, [p[f'conv_{name}'] for name in 'xbc'], segment_ids, tails)
  if 'conv' in cfg.biases:
    convolved = [out + p[f'conv_{name}_bias'].reshape(out.shape[2:]) for name, out in zip('xbc', convolved)]
  x, b, c = (jax.nn.silu(out).astype(compute.residual) for out in convolved)  # kept for the backward pass
  # Padding leaves the state unchanged: its step dt is 0, and so is its log decay.
  dt = real * jnp.maximum(jax.nn.softplus(dt.astype(jnp.float32) + p['step_bias']), cfg.step_min)
  log_decay = -dt * jnp.exp(p['log_decay'])
  terms, runs = (c, b, x, log_decay[..., None], dt), convolution.runs_of(segment_ids)
  out, state = recurrence.over_row(terms, runs, compute=compute, layout=layout, corrected=False, state=state)
  out = (out + p['skip'][:, None] * x) * jax.nn.silu(z.astype(jnp.float32))
  shape, out = out.shape, out.reshape(*out.shape[:2], cfg.key_heads, -1)
  out = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + cfg.norm_eps)
  out = out.reshape(shape) * p['out_norm'].reshape(shape[2:])
  return checkpoint_name(out.astype(compute.residual), 'dots'), (*tails, state)
