"""Decoders whose layers have either attention or another mixer of tokens.

Legend: B rows, T tokens, D hidden size, H heads of a mixer, e size of its outputs.

A mixer is a module of `MIXERS`, named after its stack of layers. It declares its parameters (`rows`) and mixes the
tokens of whole rows or of their continuation (`mix`). Its state of a sequence has a fixed size
(`HybridConfig.state_shapes`): the last inputs of each convolution and, in most mixers, a recurrent state. A model has
one such mixer. In some models a layer has one part only: attention, another mixer, an MLP or experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from jaxpost.distributed.mesh import row_shards
from jaxpost.errors import InputError
from jaxpost.models import convolution, delta_mixer, layers, state_space
from jaxpost.models.parameters import STACKS, Param, in_stacks, rows_of_layers, unstack_layers

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.attention_xla import PackedRows
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.decoder_configs import HybridConfig, LatentConfig

MIXERS = {'delta': delta_mixer, 'convolution': convolution, 'state_space': state_space}
# The rows of attention, which those of another mixer replace.
_ATTENTION = {*'qkvo', 'sinks', *(f'{name}_{kind}' for name in 'qkvo' for kind in ('norm', 'bias'))}
_ATTENTION |= {'q_a', 'q_a_norm', 'q_b', 'kv_a', 'kv_a_norm', 'kv_b'}


def table(plain: dict[str, Param], dense: dict[str, Param], cfg: HybridConfig) -> dict[str, Param]:
  """Returns the parameter table, with a stack for each kind of layers.

  Args:
    plain: the table of the same model with attention in all layers.
    dense: the rows of a dense MLP.
  """
  if cfg.kv_rank:
    from jaxpost.models import mla

    plain = mla.table(plain, cast('LatentConfig', cfg))  # it has the fields of a `LatentConfig`
  rows_of = functools.partial(_of_stack, rows_of_layers(plain), rows_of_layers(dense), cfg)
  return in_stacks(plain, cfg.layer_stacks, rows_of)


def _of_stack(common: dict[str, Param], dense: dict[str, Param], cfg: HybridConfig, stack: str) -> dict[str, Param]:
  """Returns the rows {name: spec} of the layers of a stack; `common` and `dense` are those of attention and an MLP."""
  mixer = MIXERS.get(stack.removeprefix('dense_'))
  mixer_rows = {name: spec for name, spec in common.items() if name in _ATTENTION}
  other_rows = {name: spec for name, spec in common.items() if name not in _ATTENTION}
  if mixer:
    mixer_rows = mixer.rows(cfg)
  elif cfg.gated:  # one matrix projects to the queries and to the gates of the output
    *shape, size = mixer_rows['q'].shape
    mixer_rows['q'] = dataclasses.replace(mixer_rows['q'], shape=(*shape, 2 * size))
  if stack.startswith('dense') or stack == 'mlp':
    other_rows = {name: spec for name, spec in other_rows.items() if name.endswith('_norm')} | dense
  if mixer and cfg.norms == 'post':  # the layers of other mixers have norms before their parts (OLMo Hybrid)
    scale = other_rows['attention_post_norm']
    other_rows = {name: spec for name, spec in other_rows.items() if not name.endswith('_post_norm')}
    first = scale.hf.replace('post_attention', 'input')
    other_rows |= {'attention_norm': dataclasses.replace(scale, hf=first), 'mlp_norm': scale}
  if not cfg.single:
    return mixer_rows | other_rows
  norm = other_rows.pop('attention_norm')  # that of the one part of a layer
  return other_rows if stack in ('mlp', 'moe') else mixer_rows | {'attention_norm': norm}


def over_rows(cfg: HybridConfig, rows: PackedRows, compute: Compute, layout: Callable, keep: bool = False) -> Callable:
  """Returns (p, y) -> (out, state or None), the mixer over packed rows; see `mix`.

  keep: return the state at the end of each row, which has one document.

  Raises:
    InputError: rows have branches, or are split over devices.
  """
  if rows.branch_ids is not None:
    raise InputError(
      'config.preference.share_prompt: layers with a recurrent state cannot read branches of a shared prompt, which '
      'would need a state each; set it to False'
    )
  if row_shards(layout) > 1:
    raise InputError(
      'config.mesh: context is not for models with recurrent layers: devices would have to pass states on to each '
      'other; set it to 1'
    )

  def mixer(p, y):
    out, state = mix(p, y, cfg, compute, layout, segment_ids=rows.segment_ids)
    return out, list(state) if keep else None

  return mixer


def over_state(cfg: HybridConfig, states: list[tuple], place: int, compute: Compute, layout: Callable) -> Callable:
  """Returns (p, y) -> (out, None), the mixer of new tokens, which reads and replaces `states[place]`; see `mix`."""

  def mixer(p, y):
    out, states[place] = mix(p, y, cfg, compute, layout, state=states[place])
    return out, None

  return mixer


def mix(
  p: dict,
  y: jax.Array,
  cfg: HybridConfig,
  compute: Compute,
  layout: Callable,
  segment_ids: jax.Array | None = None,
  state: tuple = (),
) -> tuple[jax.Array, tuple]:
  """Mixes tokens by the mixer of the model, without the output projection.

  Args:
    y: [B, T, D], the normed input.
    segment_ids: [B, T], ids of the documents of each row, 0 for padding; None: one document without padding.
    state: the state before the rows, an array [B, *shape] for each of `cfg.state_shapes`; (): zeros.

  Returns:
    ([B, T, H, e], the state after the last token that is not padding).
  """
  if segment_ids is None:
    segment_ids = jnp.ones(y.shape[:2], jnp.int32)
  return MIXERS[cfg.mixer].mix(p, y, cfg, compute, layout, segment_ids=segment_ids, state=state)


def scan_periods(
  layer_of_kind: Callable, params: dict, x: jax.Array, cfg: ModelConfig, chosen: jax.Array | None
) -> tuple[jax.Array, list, Any]:
  """Runs layers of several kinds by a scan over periods, the shortest sequence of kinds that the model repeats.

  The layers of a period run one after the other. It also serves models whose layers differ only in their attention.

  Args:
    layer_of_kind: `LayerKind` -> ((parameters of a layer, x, chosen experts) -> (x, (kept, routing))).
    chosen: [L, B, T, k], experts to use (`moe.mlp`), or None.

  Returns:
    (x, `kept` of each layer, `Routing` of all layers or None).
  """
  count, period = cfg.num_layers, cfg.layer_period

  def run_period(x, xs):
    stacks, chosen = xs
    period_params = unstack_layers(stacks, cfg.layer_stacks[:period])['layers']
    x, *kept_and_routing = layers.in_a_row(layer_of_kind, period_params, x, cfg, chosen)
    return x, kept_and_routing

  stacks = {name: params[name] for name in STACKS if name in params}
  by_period = jax.tree.map(lambda y: y.reshape(count // period, -1, *y.shape[1:]), (stacks, chosen))
  x, (kept, routing) = jax.lax.scan(run_period, x, by_period)
  kept = [jax.tree.map(lambda y, i=i: y[i // period], kept[i % period]) for i in range(count)]
  return x, kept, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), routing)
