"""Causal convolutions of each channel over time, and the mixer that consists of one (LFM2).

Legend: B rows, T tokens, D hidden size, N heads, h head size, W taps.

The state of a convolution is its tail, the last W - 1 inputs of a sequence. A row has runs of
tokens (`runs_of`); no convolution reaches into the run before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpost.models import layers
from jaxpost.models.parameters import Param

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.decoder_configs import HybridConfig

_BLOCK = 'model.layers.{}.conv.'


def runs_of(segment_ids: jax.Array) -> jax.Array:
  """Returns the run [B, T] of each token: its document's number in the row, from 0. Padding (0) extends the run before.

  Run 0 continues the state that a row begins with.
  """
  previous = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
  return jnp.cumsum((segment_ids > 0) & (segment_ids != previous), axis=1)


def over_row(
  inputs: Sequence[jax.Array], weights: Sequence[jax.Array], segment_ids: jax.Array, tails: Sequence[jax.Array | None]
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Convolves each channel of several inputs of one row over time, causally and within runs, in float32.

  Args:
    inputs: [B, T, N, h] each.
    weights: [N h, 1, W] for each of them, the newest token last.
    segment_ids: [B, T], ids of the documents of each row, 0 for padding.
    tails: [B, N, W - 1, h] for each of them, the inputs before the row, which belong to run 0; None: zeros.

  Returns:
    (outputs [B, T, N, h], the tails after the last token that is not padding).
  """
  runs, length, taps = runs_of(segment_ids), segment_ids.shape[1], weights[0].shape[-1]
  runs_with_tail = jnp.pad(runs, ((0, 0), (taps - 1, 0)))
  # [B, W - 1]: places of the last inputs before padding, which is on the right where tails are used.
  places = jnp.sum(segment_ids > 0, axis=1, keepdims=True, dtype=jnp.int32) + jnp.arange(taps - 1)
  outputs, new_tails = [], []
  for x, weight, tail in zip(inputs, weights, tails, strict=True):
    weight, x = weight.reshape(*x.shape[2:], taps), x.astype(jnp.float32)
    if tail is None:
      x = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0), (0, 0)))
    else:
      x = jnp.concatenate([tail.swapaxes(1, 2).astype(jnp.float32), x], axis=1)
    out = jnp.zeros(())
    for i in range(taps):
      same = runs_with_tail[:, i : i + length] == runs
      out += jnp.where(same[..., None, None], x[:, i : i + length], 0) * weight[..., i]
    outputs.append(out)
    new_tails.append(jnp.take_along_axis(x, places[..., None, None], axis=1).swapaxes(1, 2))
  return outputs, new_tails


def rows(cfg: HybridConfig) -> dict[str, Param]:
  """Returns the rows of the mixer of a layer; its channels are split into as many heads as attention has."""
  d, (heads, size) = cfg.hidden_size, cfg.convolved[0]
  axes = ('layers', 'embed', 'heads', None)
  inputs = {
    f'in_{name}': Param((1, d, heads, size), axes, f'{_BLOCK}in_proj.weight', matrix=True) for name in ('b', 'c', 'x')
  }
  return inputs | {
    'conv': Param((1, d, 1, cfg.taps), ('layers', 'heads', None, None), f'{_BLOCK}conv.weight', exact=True),
    'o': Param((1, heads, size, d), ('layers', 'heads', None, 'embed'), f'{_BLOCK}out_proj.weight', matrix=True),
  }


def mix(
  p: dict, y: jax.Array, _cfg: HybridConfig, compute: Compute, layout: Callable, segment_ids: jax.Array, state: tuple
) -> tuple[jax.Array, tuple]:
  """Mixes tokens by a convolution between two gates (LFM2): c * convolution(b * x). See `hybrid.mix`."""
  b, c, x = (
    layers.project('btd,dnh->btnh', y, p, f'in_{name}', compute, layout=layout).astype(jnp.float32) for name in 'bcx'
  )
  (out,), tails = over_row([b * x], [p['conv']], segment_ids, state or (None,))
  return checkpoint_name((c * out).astype(compute.residual), 'dots'), tuple(tails)
