"""The decoder: its parameter table, one layer, and `forward` over packed rows (training, scoring).

Legend: B rows, T tokens, D hidden size, V padded vocabulary, L layers, H heads, K kv heads, h head size, F MLP size.

The sampler's passes in `decoding.py` run the same layers with attention over a cache.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpost.distributed.mesh import row_shards
from jaxpost.models import layers, rope
from jaxpost.models.attention_xla import PackedRows
from jaxpost.models.config import CustomConfig, ModelConfig
from jaxpost.models.parameters import LAYER, Param, in_stacks, is_mtp, rows_of_layers, unstack_layers

if TYPE_CHECKING:
  from jaxpost.matmul import Compute
  from jaxpost.models.routing import Routing


def param_table(cfg: ModelConfig) -> dict[str, Param]:
  """Returns {path: parameter}: drives init, sharding, HF import, export and counts."""
  d, f, n = cfg.hidden_size, cfg.intermediate_size, cfg.num_layers
  h, k, size = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
  stacked = functools.partial(_stacked, n)
  scale = 'zeros' if cfg.norm_offset else 'ones'

  def vector(size, hf, init):
    return Param((n, size), ('layers', None), LAYER + hf, init, exact=True)

  def norm(hf):
    return vector(d, f'{hf}_layernorm.weight', scale)

  def tokens(hf):
    return Param((cfg.padded_vocab_size, d), ('vocab', 'embed'), f'{hf}.weight')

  table = {
    'embed': tokens('model.embed_tokens'),
    'layers/attention_norm': norm('input'),
    'layers/q': stacked((d, h, size), ('embed', 'heads', None), 'self_attn.q_proj'),
    'layers/k': stacked((d, k, size), ('embed', 'kv_heads', None), 'self_attn.k_proj'),
    'layers/v': stacked((d, k, size), ('embed', 'kv_heads', None), 'self_attn.v_proj'),
    'layers/o': stacked((h, size, d), ('heads', None, 'embed'), 'self_attn.o_proj'),
    'layers/mlp_norm': norm('pre_feedforward' if cfg.norms == 'both' else 'post_attention'),
    **_mlp_rows(cfg),
    'norm': Param((d,), (None,), 'model.norm.weight', scale, exact=True),
    'layers/attention_post_norm': norm('post_attention'),
    'layers/mlp_post_norm': norm('post_feedforward'),
  }
  absent_norms = {'pre': ('post_norm',), 'post': ('attention_norm', 'mlp_norm'), 'both': ()}[cfg.norms]
  table = {path: spec for path, spec in table.items() if not path.endswith(absent_norms)}
  if cfg.qk_norm not in ('', 'unscaled'):
    for name, heads in ('q', h), ('k', k):
      width = size * (heads if cfg.qk_norm == 'wide' else 1)
      table[f'layers/{name}_norm'] = vector(width, f'self_attn.{name}_norm.weight', scale)
  widths = dict(q=h * size, k=k * size, v=k * size, o=d, gate=f, up=f, down=d)
  for name in cfg.biases:
    if name in widths and f'layers/{name}_bias' not in table:  # `moe.param_rows` has the biases of experts
      hf = table[f'layers/{name}'].hf.removeprefix(LAYER)
      table[f'layers/{name}_bias'] = vector(widths[name], hf.replace('.weight', '.bias'), 'zeros')
  if 'sinks' in cfg.biases:
    table['layers/sinks'] = vector(h, 'self_attn.sinks', 'zeros')
  if cfg.num_labels or 'value' in cfg.more_heads:
    table['score'] = Param((d, 1), ('embed', None), 'score.weight', 'zeros', matrix=True)  # at first all score 0
  if not cfg.num_labels and not cfg.tie_embeddings:
    table['head'] = tokens('lm_head')
  table = _other_layers(table, cfg)
  if not cfg.state_shapes and cfg.sparse_layers < cfg.num_layers:
    dense = param_table(dataclasses.replace(cfg, experts=None, more_heads=()))
    stacks = {'dense': rows_of_layers(dense), 'layers': rows_of_layers(table)}
    table = in_stacks(table, cfg.layer_stacks, stacks.__getitem__)
  if 'mtp' in cfg.more_heads:
    from jaxpost.models import multi_token

    table |= multi_token.rows(table, cfg)
  return table


def _other_layers(table: dict[str, Param], cfg: ModelConfig) -> dict[str, Param]:
  """Returns `table`, that of a model with Llama's layers, changed to the layers that the model of `cfg` has."""
  if cfg.latent:
    from jaxpost.models import mla

    return mla.table(table, cfg)
  if cfg.state_shapes:
    from jaxpost.models import hybrid

    return hybrid.table(table, _mlp_rows(dataclasses.replace(cfg, experts=None)), cfg)
  if cfg.mixed:
    from jaxpost.models import mixed_attention

    return mixed_attention.table(table, cfg)
  return table


def _stacked(num_layers: int, shape: tuple[int, ...], axes: tuple, hf: str) -> Param:
  """Returns the table row of a matrix [num_layers, *shape]; `hf` is its name inside a layer, as in Hugging Face."""
  return Param((num_layers, *shape), ('layers', *axes), f'{LAYER}{hf}.weight', matrix=True)


def _mlp_rows(cfg: ModelConfig) -> dict[str, Param]:
  if cfg.experts:
    from jaxpost.models import moe

    return moe.param_rows(cfg)
  d, f = cfg.hidden_size, cfg.intermediate_size
  stacked = functools.partial(_stacked, cfg.num_layers)
  gate = {} if cfg.activation in layers.UNGATED else {'layers/gate': stacked((d, f), ('embed', 'mlp'), 'mlp.gate_proj')}
  return gate | {
    'layers/up': stacked((d, f), ('embed', 'mlp'), 'mlp.up_proj'),
    'layers/down': stacked((f, d), ('mlp', 'embed'), 'mlp.down_proj'),
  }


def num_params(cfg: ModelConfig | CustomConfig) -> int:
  """Returns the number of parameters."""
  if isinstance(cfg, CustomConfig):
    return cfg.size
  return sum(math.prod(p.shape) for p in param_table(cfg).values())


def num_active(cfg: ModelConfig, table: dict[str, Param]) -> int:
  """Returns the number of parameters of `table` that one token uses: those of `top_k` experts and all others."""
  active_share = cfg.experts.top_k / cfg.experts.num if cfg.experts else 1
  return round(sum(math.prod(p.shape) * (active_share if 'expert' in p.axes else 1) for p in table.values()))


def flops_per_token(cfg: ModelConfig, context: float, rows: dict[str, Param] | None = None) -> float:
  """Returns the forward FLOPs of a token that attends to `context` tokens (causal: half T).

  rows: the parameters of the layers, without the head; None: all of `param_table` except the module for multi-token
    prediction, which `forward` does not run.
  """
  if isinstance(cfg, CustomConfig):  # assumes that each parameter is used once per token
    return 2.0 * cfg.size
  table = rows or {path: p for path, p in param_table(cfg).items() if not is_mtp(path)}
  looked_up = sum(math.prod(p.shape) for path, p in table.items() if p.axes[0] == 'vocab' and path != 'head')
  head = cfg.padded_vocab_size * cfg.hidden_size if cfg.tie_embeddings or rows else 0  # elsewhere it is in `table`
  matrices = num_active(cfg, table) - looked_up + head
  windows = [kind.window / 2 if cfg.chunked else kind.window for kind in cfg.layer_kinds]  # half a chunk; 0: no window
  attended = sum(min(context, window or context) * width for window, width in zip(windows, cfg.layer_widths))
  return cfg.state_flops + 2 * matrices + 2 * cfg.num_heads * attended


def layer(
  p: dict,
  x: jax.Array,
  table: tuple | None,
  attend: Callable,
  cfg: ModelConfig,
  compute: Compute,
  layout: Callable,
  chosen: jax.Array | None = None,
  absorbed: bool = False,
  recur: Callable | None = None,
) -> tuple[jax.Array, Any, Routing | None]:
  """Applies one layer to [B, T, D].

  Args:
    table: RoPE table of the layer, or None.
    attend: (q, k, v, cache entries of the tokens) -> (out, what to keep of the layer).
    chosen: [B, T, k], experts to use instead of the router's choice, or None.
    absorbed: latent attention works on latents, see `mla.attend`.
    recur: (p, normed x) -> (out, kept), for layers with a recurrent state instead of attention.

  Returns:
    ([B, T, D], what `attend` or `recur` keeps, `Routing` or None).
  """
  if cfg.mixed:
    from jaxpost.models import mixed_attention

    return mixed_attention.layer(p, x, table, attend, cfg, compute=compute, layout=layout, chosen=chosen)

  def norm(x, name):
    return layers.rms_norm(x, p[name], cfg) if name in p else x

  kept, routing = None, None
  if 'o' in p:
    y = norm(x, 'attention_norm')
    out, kept = _mix(p, y, table, attend, cfg, compute=compute, layout=layout, absorbed=absorbed, recur=recur)
    out = layers.project('btnh,nhd->btd', out, p, 'o', compute, layout=layout)
    x = layers.add(x, norm(out, 'attention_post_norm'), cfg)
  if 'down' not in p:
    return x, kept, routing
  y = norm(x, 'mlp_norm')
  if 'router' in p:
    from jaxpost.models import moe

    out, routing = moe.with_shared(p, y, cfg, compute, layout, chosen=chosen)
  else:
    out = layers.mlp(p, y, cfg, compute, layout)
  return layers.add(x, norm(out, 'mlp_post_norm'), cfg), kept, routing


def _mix(p, y, table, attend, cfg, compute, layout, absorbed, recur):
  """Applies attention or `recur` to the normed input y [B, T, D]; returns ([B, T, H, h], kept), see `layer`."""
  if recur and p.keys().isdisjoint(('q', 'qkv', 'kv_a')):
    return recur(p, y)
  if 'kv_a' in p:
    from jaxpost.models import mla

    return mla.attend(p, y, table, attend, cfg, compute=compute, absorbed=absorbed, layout=layout)
  q, k, v = layers.project_all('btd,dnh->btnh', y, p, 'qkv', compute, cfg=cfg, layout=layout)
  if cfg.gated:  # one matrix projects to the queries and to the gates of the output
    q, gate = jnp.split(q, 2, axis=-1)
  if cfg.qk_norm in ('head', 'wide'):
    q, k = layers.norm_heads(q, k, p, cfg)
  q, k = rope.rotate(q, table, cfg), rope.rotate(k, table, cfg)
  if cfg.qk_norm == 'rotated' or (cfg.qk_norm == 'unscaled' and table and table[0] is not None):
    q, k = layers.norm_heads(q, k, p, cfg)
  out, kept = attend(rope.scale_queries(q, table), k, v, (k, v))
  if cfg.gated:
    out = (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)
  return out, kept


def run_layers(
  params: dict,
  x: jax.Array,
  tables: list,
  attend: Callable,
  cfg: ModelConfig,
  compute: Compute,
  constrain: Callable,
  chosen: jax.Array | None = None,
  recur: Callable | None = None,
) -> tuple[jax.Array, list, Routing | None]:
  """Runs all layers and the final norm on embedded tokens.

  Args:
    tables: see `rope.tables`.
    attend: (q, k, v, cache entries, window, sinks) -> (out, kept).
    chosen: [L, B, T, k], experts to use (`moe.mlp`), or None.
    recur: see `layer`.

  Returns:
    (normed x, `kept` of each layer, `Routing` of all layers or None).
  """

  def block(p, x, chosen, kind):
    table = rope.pick(tables, kind.rope)
    attend_layer = functools.partial(attend, window=kind.window, sinks=p.get('sinks'))
    x, *kept = layer(p, x, table, attend_layer, cfg, compute=compute, layout=constrain, chosen=chosen, recur=recur)
    return constrain(x, 'batch', 'time', None), kept

  @functools.cache  # layers of a kind share a checkpointed function, which JAX then traces once
  def layer_of_kind(kind):
    return layers.rematerialized(functools.partial(block, kind=kind), compute)

  if cfg.mixed and cfg.shared_layers:
    from jaxpost.models import mixed_attention

    x, kept, routing = mixed_attention.in_a_row(layer_of_kind, params, x, cfg, chosen)
  elif compute.unroll or isinstance(params['layers'], list):  # a sampler's weights are a list
    each_layer = unstack_layers(params, cfg.layer_stacks)['layers']
    x, kept, routing = layers.in_a_row(layer_of_kind, each_layer, x, cfg, chosen)
  elif cfg.state_shapes or cfg.mixed or cfg.chunked or 1 < cfg.layer_period < cfg.num_layers:
    # Each layer of a period has a static window, so that keys outside of it are skipped, and no device has to branch.
    from jaxpost.models import hybrid

    x, kept, routing = hybrid.scan_periods(layer_of_kind, params, x, cfg, chosen)
  else:
    x, kept, routing = _scan(block, params, x, cfg, compute, chosen=chosen)
  return layers.rms_norm(x, params['norm'], cfg), kept, routing


def _scan(block, params, x, cfg, compute, chosen):
  """Runs the layers by a scan over stacked parameters: first those with a dense MLP, if a model has experts."""
  kinds = cfg.layer_kinds
  num_dense = cfg.num_layers - cfg.sparse_layers
  # Properties that all layers share stay static: attention specializes on them.
  values = {field: [getattr(kind, field) for kind in kinds] for field in kinds[0]._fields}
  varying = {field: jnp.array(x) for field, x in values.items() if len(set(x)) > 1}

  def scanned_block(x, xs):
    p, chosen, varying = xs
    return block(p, x, chosen, kinds[0]._replace(**varying))

  run_layer = layers.rematerialized(scanned_block, compute, alone=True)

  def by_layer(kept, count):  # arrays [count, ...] -> a list of arrays for each layer
    return [[y[i] for y in kept] for i in range(count)] if kept else []

  dense_kept = []
  if num_dense:
    dense_varying = {field: x[:num_dense] for field, x in varying.items()}
    varying = {field: x[num_dense:] for field, x in varying.items()}
    x, (kept, _) = jax.lax.scan(run_layer, x, (params['dense'], None, dense_varying))
    dense_kept = by_layer(kept, num_dense)
  x, (kept, routing) = jax.lax.scan(run_layer, x, (params['layers'], chosen, varying))
  return x, dense_kept + by_layer(kept, cfg.sparse_layers), routing


def recurrence_over(
  rows: PackedRows, cfg: ModelConfig, compute: Compute, layout: Callable, keep: bool = False
) -> Callable | None:
  """Returns the `recur` of `layer` for packed rows; None for models without recurrent states."""
  if not cfg.state_shapes:
    return None
  from jaxpost.models import hybrid

  return hybrid.over_rows(cfg, rows, compute, layout, keep=keep)


def embed(params: dict, tokens: jax.Array, cfg: ModelConfig, compute: Compute, constrain: Callable) -> jax.Array:
  """Returns the embeddings [B, T, D] of tokens [B, T] as the first layer reads them."""
  x = layers.embed(params['embed'], tokens, compute.dtype, constrain)
  if cfg.embed_scale != 1:
    x = x * jnp.asarray(cfg.embed_scale, compute.dtype)  # rounded, as in HF
  return x.astype(compute.residual)


def with_inputs(
  params: dict, tokens: jax.Array, x: jax.Array, cfg: ModelConfig, compute: Compute, layout: Callable
) -> dict:
  """Returns the parameters, with per-layer embeddings of the tokens in each layer if the model has them (Gemma 4)."""
  if not cfg.mixed:
    return params
  from jaxpost.models import mixed_attention

  return mixed_attention.with_side_inputs(params, tokens, x, cfg, compute=compute, layout=layout)


def unconstrained(x: jax.Array, *_axes: str | None) -> jax.Array:
  """Returns x: the `Layout` of a single device."""
  return x


def forward(
  params: dict,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  cfg: ModelConfig,
  compute: Compute,
  constrain: Callable = unconstrained,
  branch_ids: jax.Array | None = None,
  noise: jax.Array | None = None,
  chosen: jax.Array | None = None,
  routing: bool = False,
  inputs: jax.Array | None = None,
) -> Any:
  """Packed rows [B, T] -> final hidden states [B, T, D].

  Args:
    constrain: (x, *logical axes) -> x, pins the sharding of activations at layer boundaries; a `Layout`.
    branch_ids: [B, T] or None, see `types.Batch`.
    noise: [B, T, D], added to the embeddings, or None.
    chosen: [B, T, L, k], experts to use, or None.
    routing: also return the `Routing` [L, B, T, ...].
    inputs: [B, T, D], read by the first layer instead of the embeddings of `tokens`, or None.
  """
  n = row_shards(constrain)
  stripe = unconstrained  # keeps the order of tokens
  if n > 1:
    from jaxpost.models import context_parallel

    stripe = functools.partial(context_parallel.stripe, n=n)
  x = embed(params, stripe(tokens), cfg, compute, constrain) if inputs is None else stripe(inputs)
  if noise is not None:
    x = (x + stripe(noise)).astype(x.dtype)
  x = constrain(x, 'batch', 'time', None)
  params = with_inputs(params, stripe(tokens), x, cfg, compute=compute, layout=constrain)
  lengths = stripe(rope.document_lengths(positions, segment_ids)) if rope.by_length(cfg) else None
  rows = PackedRows(segment_ids, positions, branch_ids)

  def attend(q, k, v, _cache_entries, window, sinks):
    return layers.attention(q, k, v, rows, window, cfg=cfg, compute=compute, sinks=sinks, layout=constrain), None

  if chosen is not None:
    chosen = jnp.moveaxis(stripe(chosen), 2, 0)
  tables = rope.tables(stripe(positions), lengths, cfg)
  recur = recurrence_over(rows, cfg, compute, constrain)
  options = dict(compute=compute, constrain=constrain, chosen=chosen, recur=recur)
  x, _, routes = run_layers(params, x, tables, attend, cfg, **options)
  if n > 1:
    x = context_parallel.unstripe_sharded(x, constrain)
    routes = jax.tree.map(jax.vmap(functools.partial(context_parallel.unstripe, n=n)), routes)
  return (x, routes) if routing else x
