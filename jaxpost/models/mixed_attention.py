"""Attention layers of two sizes, keys and values that layers share, an embedding for each layer (Gemma 4).

Legend: B rows, T tokens, D hidden size, L layers, H heads, K kv heads, h head size, P side size.

Layers with a sliding window and full ones have heads of different sizes, so each kind has a
stack of parameters (`MixedConfig.layer_stacks`). The last layers may have no keys and values:
they read those of the last layer of their kind that has some. The features are those of
Gemma 3n and Gemma 4 as `transformers` 5 computes them (models/gemma4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpost.models import layers, moe, rope
from jaxpost.models.parameters import STACKS, Param, unstack_layers

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.attention_configs import MixedConfig

_BLOCK = 'model.layers.{}.'
_SIDE, _PAIR = 'side', 'pair'  # what a layer gets among its parameters: its embeddings; keys and values of another


def table(plain: dict[str, Param], cfg: MixedConfig) -> dict[str, Param]:
  """Returns the parameter table, with a stack for each kind of layers.

  plain: the table of the same model with heads of one size.
  """
  common = {k.split('/')[1]: v for k, v in plain.items() if v.stacked} | _own_rows(cfg)
  rows = {}
  for stack in (name for name in STACKS if name in cfg.layer_stacks):
    numbers = tuple(i for i, name in enumerate(cfg.layer_stacks) if name == stack)
    for name, spec in _of_stack(common, stack, cfg).items():
      rows[f'{stack}/{name}'] = dataclasses.replace(spec, shape=(len(numbers), *spec.shape[1:]), numbers=numbers)
  outside = {path: spec for path, spec in plain.items() if not spec.stacked}
  if p := cfg.side_size:
    width, d = cfg.num_layers * p, cfg.hidden_size
    outside |= {
      'side_embed': Param((cfg.padded_vocab_size, width), ('vocab', 'embed'), 'model.embed_tokens_per_layer.weight'),
      'side_project': Param((d, width), ('embed', None), 'model.per_layer_model_projection.weight', matrix=True),
      'side_input_norm': Param((p,), (None,), 'model.per_layer_projection_norm.weight', 'ones', exact=True),
    }
  return {'embed': outside.pop('embed')} | rows | outside


def _own_rows(cfg: MixedConfig) -> dict[str, Param]:
  """Returns the rows of a layer that no other decoder has."""
  d = cfg.hidden_size

  def vector(size, hf):
    return Param((1, size), ('layers', None), _BLOCK + hf, 'ones', exact=True)

  rows = {'scalar': vector(1, 'layer_scalar')}
  if p := cfg.side_size:
    rows |= {
      'side_gate': Param((1, d, p), ('layers', 'embed', None), f'{_BLOCK}per_layer_input_gate.weight', matrix=True),
      'side_out': Param((1, p, d), ('layers', None, 'embed'), f'{_BLOCK}per_layer_projection.weight', matrix=True),
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


def _of_stack(common: dict[str, Param], stack: str, cfg: MixedConfig) -> dict[str, Param]:
  """Returns the rows of the layers of a stack, with the sizes that these have."""
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
    if shared and name in ('k', 'v', 'k_norm') or full and cfg.values_are_keys and name == 'v':
      continue
    shape = shapes.get(name, spec.shape[1:])
    if shared and cfg.wide_shared_mlp and 'mlp' in spec.axes and 'expert' not in spec.axes:
      shape = tuple(n * (1 + (axis == 'mlp')) for n, axis in zip(shape, spec.axes[1:]))
    rows[name] = dataclasses.replace(spec, shape=(1, *shape))
  return rows


def with_side_inputs(
  params: dict, tokens: jax.Array, x: jax.Array, cfg: MixedConfig, compute: Compute, layout: Callable
) -> dict:
  """Returns the parameters with the embeddings of each layer among those of the layer.

  An embedding of each token, and a projection of what the first layer reads, are added.

  Args:
    tokens: [B, T]. x: [B, T, D], their embeddings as the first layer reads them.
  """
  if not cfg.side_size:
    return params
  shape = *tokens.shape, cfg.num_layers, cfg.side_size
  own = layers.embed(params['side_embed'], tokens, compute.dtype, layout)
  own = (own * jnp.asarray(cfg.side_size**0.5, own.dtype)).reshape(shape)
  made = layers.project('btd,df->btf', x, params, 'side_project', compute) * cfg.hidden_size**-0.5
  made = layers.rms_norm(made.reshape(shape), params['side_input_norm'], cfg)
  side = jnp.moveaxis(((made + own) * 2**-0.5).astype(compute.residual), 2, 0)  # [L, B, T, P]
  if isinstance(params['layers'], list):  # of a sampler
    return params | {'layers': [_with(p, _SIDE, y) for p, y in zip(params['layers'], side)]}
  return params | {
    name: params[name] | {_SIDE: side[jnp.array([i for i, other in enumerate(cfg.layer_stacks) if other == name])]}
    for name in sorted({*cfg.layer_stacks})
  }


def _with(p: Any, name: str, value: Any) -> Any:
  """Returns the parameters of a layer, or the function that makes them, with one entry more."""
  return (lambda x: p(x) | {name: value}) if callable(p) else p | {name: value}


def in_a_row(
  alike: Callable, params: dict, x: jax.Array, cfg: MixedConfig, chosen: jax.Array | None
) -> tuple[jax.Array, list, Any]:
  """Runs all layers as straight code, and hands the keys and values of some to others; see `hybrid.scan_periods`."""
  found: list[tuple] = []  # (kept, pair, routing) of each layer
  own = cfg.num_layers - cfg.shared_layers
  for i, (p, kind) in enumerate(zip(unstack_layers(params, cfg.layer_stacks)['layers'], cfg.layer_kinds)):
    if i >= own:
      p = p | {_PAIR: found[cfg.place_in_cache(i)][1]}
    x, (with_pair, routing) = alike(kind)(p, x, None if chosen is None else chosen[i])
    found.append((*with_pair, routing))
  kept, _, routings = zip(*found)
  return x, list(kept), jax.tree.map(lambda *y: jnp.stack(y), *routings)


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

  Where layers share keys and values, `kept` comes with the pair (k, v) of this layer.
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
    dense = {k.removeprefix(moe.SHARED_PREFIX): v for k, v in p.items() if k.startswith(moe.SHARED_PREFIX)}
    # The router sees the tokens under a norm of its own, which differs from that of the experts in the scale.
    scale = p['router_in'] * cfg.hidden_size**-0.5
    given = p | {'router': p['router'] * scale[:, None]}
    seen = layers.rms_norm(x.astype(jnp.float32), 1.0, cfg)
    more, routing = moe.mlp(given, norm(x, 'experts_norm'), cfg, compute, layout, chosen=chosen, seen=seen)
    out = norm(layers.mlp(dense, y, cfg, compute, layout), 'shared_post_norm') + norm(more, 'experts_post_norm')
  else:
    out = layers.mlp(p, y, cfg, compute, layout)
  x = x + norm(out, 'mlp_post_norm').astype(x.dtype)
  if cfg.side_size:
    gate = layers.project('btd,dp->btp', x, p, 'side_gate', compute, layout=layout)
    out = layers.ACTIVATIONS[cfg.activation](gate.astype(jnp.float32)) * p[_SIDE]
    out = layers.project('btp,pd->btd', out.astype(compute.residual), p, 'side_out', compute, layout=layout)
    x = x + norm(out, 'side_norm').astype(x.dtype)
  x = (x * jax.lax.stop_gradient(p['scalar'])).astype(x.dtype)  # it is read, kept and exported, but not trained
  return x, (kept, pair) if cfg.shared_layers else kept, routing


def _queries_and_pair(p: dict, y: jax.Array, table, cfg: MixedConfig, compute: Compute, layout) -> tuple:
  """Returns queries [B, T, H, h], and keys and values [B, T, K, h], or those of another layer (None: in a cache)."""
  spec, rest = 'btd,dnh->btnh', dict(compute=compute, layout=layout)
  if 'k_norm' not in p:
    q, pair = layers.project(spec, y, p, 'q', **rest), p.get(_PAIR, (None, None))
    return rope.rotate(layers.rms_norm(q, p['q_norm'], cfg), table, cfg), pair
  if 'v' in p or 'qkv' in p:
    q, k, v = layers.project_all(spec, y, p, 'qkv', cfg=cfg, **rest)
  else:
    q, k = (layers.project(spec, y, p, name, **rest) for name in 'qk')
    v = k
  q, k = (layers.rms_norm(z, p[f'{name}_norm'], cfg) for z, name in ((q, 'q'), (k, 'k')))
  return rope.rotate(q, table, cfg), (rope.rotate(k, table, cfg), layers.rms_norm(v, 1.0, cfg))
