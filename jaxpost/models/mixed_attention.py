"""Decoders with attention heads of two sizes, shared keys and values, and per-layer embeddings (Gemma 4).

Legend: B rows, T tokens, D hidden size, L layers, H heads, K kv heads, h head size, P side size.

Layers with a sliding window and full ones have heads of different sizes, so each kind has a
stack of parameters (`MixedConfig.layer_stacks`). The last layers may have no keys and values of their
own: they attend to those of the last layer of their kind that has some. The features are those of
Gemma 3n and Gemma 4 as `transformers` 5 computes them (models/gemma4).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpost.models import layers, moe, rope
from jaxpost.models.parameters import LAYER, Param, in_stacks, rows_of_layers, unstack_layers

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.decoder_configs import MixedConfig

# Inputs of a layer that are passed among its parameters: its embeddings, and the keys and values of another layer.
_SIDE, _PAIR = 'side', 'pair'


def table(plain: dict[str, Param], cfg: MixedConfig) -> dict[str, Param]:
  """Returns the parameter table, with a stack for each kind of layers.

  plain: the table of the same model with heads of one size.
  """
  rows = in_stacks(plain, cfg.layer_stacks, functools.partial(_of_stack, rows_of_layers(plain) | _own_rows(cfg), cfg))
  if p := cfg.side_size:
    width, d = cfg.num_layers * p, cfg.hidden_size
    rows |= {
      'side_embed': Param((cfg.padded_vocab_size, width), ('vocab', 'embed'), 'model.embed_tokens_per_layer.weight'),
      'side_project': Param((d, width), ('embed', None), 'model.per_layer_model_projection.weight', matrix=True),
      'side_input_norm': Param((p,), (None,), 'model.per_layer_projection_norm.weight', 'ones', exact=True),
    }
  return rows


def _own_rows(cfg: MixedConfig) -> dict[str, Param]:
  """Returns the rows of a layer that are specific to these models."""
  d = cfg.hidden_size

  def vector(size, hf):
    return Param((1, size), ('layers', None), LAYER + hf, 'ones', exact=True)

  rows = {'scalar': vector(1, 'layer_scalar')}
  if p := cfg.side_size:
    rows |= {
      'side_gate': Param((1, d, p), ('layers', 'embed', None), f'{LAYER}per_layer_input_gate.weight', matrix=True),
      'side_out': Param((1, p, d), ('layers', None, 'embed'), f'{LAYER}per_layer_projection.weight', matrix=True),
      'side_norm': vector(d, 'post_per_layer_input_norm.weight'),
    }
  if cfg.experts:
    rows |= {
      'router_in': vector(d, 'router.scale'),
      'router_scale': vector(cfg.experts.num, 'router.per_expert_scale'),
      'shared_post_norm': vector(d, 'post_feedforward_layernorm_1.weight'),
      'experts_norm': vector(d, 'pre_feedforward_layernorm_2.weight'),
      'experts_post_norm': vector(d, 'post_feedforward_layernorm_2.weight'),
    }
  return rows


def _of_stack(common: dict[str, Param], cfg: MixedConfig, stack: str) -> dict[str, Param]:
  """Returns the rows of the layers of a stack: those of `common` that they have, in their sizes."""
  full, shared = not stack.startswith('local'), stack.endswith('shared')
  kv_heads, size, _ = cfg.head_shapes[full]
  shapes = {
    'q': (cfg.hidden_size, cfg.num_heads, size),
    'k': (cfg.hidden_size, kv_heads, size),
    'v': (cfg.hidden_size, kv_heads, size),
    'o': (cfg.num_heads, size, cfg.hidden_size),
    'q_norm': (size,),
    'k_norm': (size,),
  }
  rows = {}
  for name, spec in common.items():
    if (shared and name in ('k', 'v', 'k_norm')) or (full and cfg.values_are_keys and name == 'v'):
      continue
    shape = shapes.get(name, spec.shape[1:])
    if shared and cfg.wide_shared_mlp and 'mlp' in spec.axes and 'expert' not in spec.axes:
      shape = tuple(2 * size if axis == 'mlp' else size for size, axis in zip(shape, spec.axes[1:]))
    rows[name] = dataclasses.replace(spec, shape=(1, *shape))
  return rows


def with_side_inputs(
  params: dict, tokens: jax.Array, x: jax.Array, cfg: MixedConfig, compute: Compute, layout: Callable
) -> dict:
  """Returns the parameters, with per-layer embeddings [B, T, P] (`side`) among those of each layer.

  They are the sum of an embedding of each token and a projection of the input of the first layer.

  Args:
    tokens: [B, T].
    x: [B, T, D], their embeddings, the input of the first layer.
  """
  if not cfg.side_size:
    return params
  shape = *tokens.shape, cfg.num_layers, cfg.side_size
  embedded = layers.embed(params['side_embed'], tokens, compute.dtype, layout)
  embedded = (embedded * jnp.asarray(cfg.side_size**0.5, embedded.dtype)).reshape(shape)
  projected = layers.project('btd,df->btf', x, params, 'side_project', compute) * cfg.hidden_size**-0.5
  projected = layers.rms_norm(projected.reshape(shape), params['side_input_norm'], cfg)
  side = jnp.moveaxis(((projected + embedded) * 2**-0.5).astype(compute.residual), 2, 0)  # [L, B, T, P]
  if isinstance(params['layers'], list):  # of a sampler
    return params | {'layers': [_with(p, _SIDE, y) for p, y in zip(params['layers'], side)]}
  stacks = {}
  for name in sorted({*cfg.layer_stacks}):
    numbers = [i for i, stack in enumerate(cfg.layer_stacks) if stack == name]
    stacks[name] = params[name] | {_SIDE: side[jnp.array(numbers)]}
  return params | stacks


def _with(p: Any, name: str, value: Any) -> Any:
  """Returns the parameters of a layer, or the function that returns them, with the entry {name: value}."""
  return (lambda x: p(x) | {name: value}) if callable(p) else p | {name: value}


def in_a_row(
  layer_of_kind: Callable, params: dict, x: jax.Array, cfg: MixedConfig, chosen: jax.Array | None
) -> tuple[jax.Array, list, Any]:
  """Runs all layers without a scan, so that the last ones get keys and values of others; see `hybrid.scan_periods`."""
  kept, routings = [], []
  pairs: list[tuple] = []  # keys and values of each layer
  first_shared = cfg.num_layers - cfg.shared_layers
  for i, (p, kind) in enumerate(zip(unstack_layers(params, cfg.layer_stacks)['layers'], cfg.layer_kinds)):
    if i >= first_shared:
      p = p | {_PAIR: pairs[cfg.place_in_cache(i)]}
    x, ((layer_kept, pair), routing) = layer_of_kind(kind)(p, x, None if chosen is None else chosen[i])
    kept.append(layer_kept)
    pairs.append(pair)
    routings.append(routing)
  return x, kept, jax.tree.map(lambda *y: jnp.stack(y), *routings)


def layer(
  p: dict,
  x: jax.Array,
  table: tuple | None,
  attend: Callable,
  cfg: MixedConfig,
  compute: Compute,
  layout: Callable,
  chosen: jax.Array | None = None,
) -> tuple[jax.Array, Any, Any]:
  """Applies one layer to [B, T, D]; see `transformer.layer`.

  In models whose layers share keys and values, `kept` is a tuple of it and the pair (k, v) of this layer.
  """

  def norm(x, name):
    return layers.rms_norm(x, p[name], cfg)

  q, pair = _queries_and_pair(p, norm(x, 'attention_norm'), table, cfg, compute=compute, layout=layout)
  shared = 'o' in p and 'k_norm' not in p
  out, kept = attend(q, *pair, () if shared else pair)
  out = layers.project('btnh,nhd->btd', out, p, 'o', compute, layout=layout)
  x = x + norm(out, 'attention_post_norm').astype(x.dtype)
  y, routing = norm(x, 'mlp_norm'), None
  if cfg.experts:
    # The norm of the router's input has no scale; the router's matrix is multiplied by a scale instead.
    router = p['router'] * (p['router_in'] * cfg.hidden_size**-0.5)[:, None]
    router_input = layers.rms_norm(x.astype(jnp.float32), 1.0, cfg)
    experts_out, routing = moe.mlp(
      p | {'router': router}, norm(x, 'experts_norm'), cfg, compute, layout, chosen=chosen, router_input=router_input
    )
    dense_out = layers.mlp(moe.shared_params(p), y, cfg, compute, layout)
    out = norm(dense_out, 'shared_post_norm') + norm(experts_out, 'experts_post_norm')
  else:
    out = layers.mlp(p, y, cfg, compute, layout)
  x = x + norm(out, 'mlp_post_norm').astype(x.dtype)
  if cfg.side_size:
    gate = layers.project('btd,dp->btp', x, p, 'side_gate', compute, layout=layout)
    out = layers.ACTIVATIONS[cfg.activation](gate.astype(jnp.float32)) * p[_SIDE]
    out = layers.project('btp,pd->btd', out.astype(compute.residual), p, 'side_out', compute, layout=layout)
    x = x + norm(out, 'side_norm').astype(x.dtype)
  x = (x * jax.lax.stop_gradient(p['scalar'])).astype(x.dtype)  # loaded and saved, but not trained
  return x, (kept, pair) if cfg.shared_layers else kept, routing


def _queries_and_pair(p: dict, y: jax.Array, table, cfg: MixedConfig, compute: Compute, layout) -> tuple:
  """Returns (queries [B, T, H, h], (keys, values) [B, T, K, h] each).

  Keys and values may be those of another layer, which are (None, None) if they are in a cache.
  """
  spec, options = 'btd,dnh->btnh', dict(compute=compute, layout=layout)
  if 'k_norm' not in p:
    q, pair = layers.project(spec, y, p, 'q', **options), p.get(_PAIR, (None, None))
    return rope.rotate(layers.rms_norm(q, p['q_norm'], cfg), table, cfg), pair
  if 'v' in p or 'qkv' in p:
    q, k, v = layers.project_all(spec, y, p, 'qkv', cfg=cfg, **options)
  else:
    q, k = (layers.project(spec, y, p, name, **options) for name in 'qk')
    v = k
  q, k = layers.rms_norm(q, p['q_norm'], cfg), layers.rms_norm(k, p['k_norm'], cfg)
  return rope.rotate(q, table, cfg), (rope.rotate(k, table, cfg), layers.rms_norm(v, 1.0, cfg))
