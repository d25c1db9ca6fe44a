"""Decoders whose layers have either attention or another mixer of tokens.

Legend: B rows, T tokens, D hidden size, H heads of a mixer, e size of its outputs.

A mixer is a module of `MIXERS`, named after its stack of layers. It declares its parameters
(`rows`) and mixes the tokens of rows, or continues them (`mix`). What it keeps of a sequence
has a fixed size: the last inputs of each convolution and, with most, a state
(`HybridConfig.state_shapes`). A model has one such mixer. The layers of some models have one part
each: attention, another mixer, an MLP or experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from jaxpost.distributed.mesh import row_shards
from jaxpost.errors import InputError
from jaxpost.models import convolution, delta_mixer, layers, state_space
from jaxpost.models.parameters import STACKS, Param, unstack_layers

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.attention_configs import LatentConfig
  from jaxpost.models.attention_xla import PackedRows
  from jaxpost.models.config import ModelConfig
  from jaxpost.models.hybrid_config import HybridConfig

MIXERS = {'delta': delta_mixer, 'convolution': convolution, 'state_space': state_space}
# Rows that other mixers replace.
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

    plain = mla.table(plain, cast('LatentConfig', cfg))  # whose sizes it has
  common, dense = ({k.split('/')[1]: v for k, v in x.items() if v.stacked} for x in (plain, dense))
  rows = {}
  for stack in (name for name in STACKS if name in cfg.layer_stacks):
    numbers = tuple(i for i, name in enumerate(cfg.layer_stacks) if name == stack)
    for name, spec in _of_stack(common, dense, stack, cfg).items():
      rows[f'{stack}/{name}'] = dataclasses.replace(spec, shape=(len(numbers), *spec.shape[1:]), numbers=numbers)
  outside = {path: spec for path, spec in plain.items() if not spec.stacked}
  return {'embed': outside.pop('embed')} | rows | outside


def _of_stack(common: dict[str, Param], dense: dict[str, Param], stack: str, cfg: HybridConfig) -> dict[str, Param]:
  """Returns the rows of the layers of a stack."""
  own = MIXERS.get(stack.removeprefix('dense_'))
  mixer = {name: spec for name, spec in common.items() if name in _ATTENTION}
  rest = {name: spec for name, spec in common.items() if name not in _ATTENTION}
  if own:
    mixer = own.rows(cfg)
  elif cfg.gated:  # queries, and gates of the output
    *shape, size = mixer['q'].shape
    mixer['q'] = dataclasses.replace(mixer['q'], shape=(*shape, 2 * size))
  if stack.startswith('dense') or stack == 'mlp':
    rest = {name: spec for name, spec in rest.items() if name.endswith('_norm')} | dense
  if own and cfg.norms == 'post':
    scale, rest = rest['attention_post_norm'], {k: v for k, v in rest.items() if not k.endswith('_post_norm')}
    first = scale.hf.replace('post_attention', 'input')
    rest |= {'attention_norm': dataclasses.replace(scale, hf=first), 'mlp_norm': scale}
  if not cfg.single:
    return mixer | rest
  norm = rest.pop('attention_norm')
  return rest if stack in ('mlp', 'moe') else mixer | {'attention_norm': norm}


def over_rows(cfg: HybridConfig, rows: PackedRows, compute: Compute, layout: Callable, keep: bool = False) -> Callable:
  """Returns (p, y) -> (out, state or None), the mixer over packed rows; see `mix`.

  keep: return the state at the end of each row, which has one document.

  Raises:
    InputError: for what the mixer does not support.
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
  """Returns (p, y) -> (out, None), the mixer of new tokens of sequences, which replaces `states[place]`; see `mix`."""

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
    segment_ids: [B, T], documents of each row, 0 for padding; None: one without padding.
    state: arrays [B, *shape] for each of `cfg.state_shapes`, which the row continues; (): zeros.

  Returns:
    ([B, T, H, e], the state after the last token that is no padding).
  """
  if segment_ids is None:
    segment_ids = jnp.ones(y.shape[:2], jnp.int32)
  return MIXERS[cfg.mixer].mix(p, y, cfg, compute, layout, segment_ids=segment_ids, state=state)


def scan_periods(
  alike: Callable, params: dict, x: jax.Array, cfg: ModelConfig, chosen: jax.Array | None
) -> tuple[jax.Array, list, Any]:
  """Runs layers of several kinds under a scan over the shortest sequence that repeats, itself straight code.

  Also of models whose layers differ in their attention alone.

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
    x, *found = layers.in_a_row(alike, unstack_layers(stacks, cfg.layer_stacks[:period])['layers'], x, cfg, chosen)
    return x, found

  def split_layers(x):
    return x.reshape(count // period, -1, *x.shape[1:])

  stacks = {name: params[name] for name in STACKS if name in params}
  x, (kept, routing) = jax.lax.scan(one, x, jax.tree.map(split_layers, (stacks, chosen)))
  kept = [jax.tree.map(lambda y, i=i: y[i // period], kept[i % period]) for i in range(count)]
  return x, kept, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), routing)
