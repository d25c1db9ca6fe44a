"""Layers of the decoder: embedding, norm, projections, attention, MLP; and their rematerialization.

Legend: B rows, T tokens, D hidden size, F MLP size, N or H heads, K kv heads, h head size, hv that of values.
`decoding.py` attends over a cache.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpost.distributed.mesh import Layout, TiedWeight, row_shards
from jaxpost.matmul import Compute, einsum
from jaxpost.models.attention_xla import PackedRows, attend_in_chunks
from jaxpost.models.config import ModelConfig

ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
  'silu': jax.nn.silu,
  'gelu': functools.partial(jax.nn.gelu, approximate=False),
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}
UNGATED = {'relu2': lambda x: jnp.square(jax.nn.relu(x))}  # of MLPs without a gate


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embed(table: jax.Array | TiedWeight, tokens: jax.Array, dtype: str, constrain: Callable) -> jax.Array:
  """Looks up tokens [B, T] in a table [V, D], in `dtype`.

  The table is gathered over fsdp before the lookup: from sharded rows XLA would replicate the activations of the global
  batch. It is rounded before it is gathered, for half the bytes; the gradient is summed in float32. On one device
  nothing is gathered, and rounding the rows of few tokens is cheaper than rounding the table.
  """
  sharded = isinstance(constrain, Layout) and constrain.mesh.size > 1
  if not sharded and 8 * tokens.size < len(table):
    return table[tokens].astype(dtype)
  return constrain(table.astype(dtype), 'vocab', None)[tokens]


def _embed_backward(_dtype, constrain, residuals, g):
  table, tokens = residuals

  def scatter_add(tokens, g):
    return jnp.zeros(table.shape, jnp.float32).at[tokens].add(g.astype(jnp.float32))

  if isinstance(constrain, Layout):
    grad = constrain.sum_over_tokens(scatter_add, (tokens, g), 'vocab', 'embed', of=table)
    if grad is not None:
      return grad if isinstance(grad, TiedWeight) else grad.astype(table.dtype), None
  return constrain(scatter_add(tokens, g), 'vocab', None).astype(table.dtype), None


embed.defvjp(lambda table, tokens, *static: (embed(table, tokens, *static), (table, tokens)), _embed_backward)


def rms_norm(x: jax.Array, scale: jax.Array | float, cfg: ModelConfig) -> jax.Array:
  """x / rms(x) * scale in float32 (Zhang and Sennrich, 2019)."""
  dtype = x.dtype
  x = x.astype(jnp.float32)
  x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + cfg.norm_eps)
  if cfg.norm_offset:
    scale = scale + cfg.norm_offset
  return (x * scale).astype(dtype)


def norm_heads(q: jax.Array, k: jax.Array, p: dict, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
  """QK norm of queries and keys [B, T, N, h]: over all heads if 'wide', else per head."""

  def norm(x, scale):
    wide = x.reshape(*x.shape[:2], -1) if cfg.qk_norm == 'wide' else x
    return rms_norm(wide, scale, cfg).reshape(x.shape)

  return norm(q, p.get('q_norm', 1.0)), norm(k, p.get('k_norm', 1.0))


def project(spec: str, x: jax.Array, p: dict, name: str, compute: Compute, layout: Callable | None = None) -> jax.Array:
  """Computes `einsum(spec, x, p[name])` plus its bias, in the residual type."""
  w, out = p[name], compute.residual
  # The update of an adapter may be small: x W stays in float32 for that sum, unless it is sent between tensor shards.
  if hasattr(w, 'product') and not (_tensor_split(layout) and spec.endswith('->btd')):
    out = 'float32'
  y = einsum(spec, x, w, compute.dtype, out, layout=layout if isinstance(layout, Layout) else None)
  return _finish(y, p, name, compute)


def _tensor_split(layout: Callable | None) -> bool:
  return isinstance(layout, Layout) and layout.mesh.shape['tensor'] > 1


def _finish(y, p, name: str, compute: Compute):
  """Adds the bias; rematerialization keeps the result ('dots')."""
  bias = p.get(f'{name}_bias')
  y = y if bias is None else y + bias.reshape(y.shape[2:])
  return checkpoint_name(y.astype(compute.residual), 'dots')


# Matrices that multiply the same activations; a sampler may hold each of these groups as one matrix (`Reshard`).
FUSED = {'qkv': ('q', 'k', 'v'), 'gate_up': ('gate', 'up')}
FUSED_AXIS = {'qkv': -2, 'gate_up': -1}  # the dimension they are joined in


def project_all(
  spec: str, x: jax.Array, p: dict, name: str, compute: Compute, cfg: ModelConfig, layout: Callable
) -> list[jax.Array]:
  """Projects x by each of the matrices FUSED[name], with biases; by one product where `p` has them fused."""
  if name not in p:
    parts = FUSED[name]
    ws = tuple(p[part] for part in parts)
    quantized = any(hasattr(getattr(w, 'w', w), 'product') for w in ws)  # `w.w` is the matrix below an adapter
    if quantized or not _tensor_split(layout):
      return [project(spec, x, p, part, compute, layout=layout) for part in parts]
    from jaxpost.models import tensor_parallel

    ys = tensor_parallel.adapted_products(spec, x, ws, compute, layout)
    return [_finish(y, p, part, compute) for y, part in zip(ys, parts)]
  ends = [cfg.num_heads, cfg.num_heads + cfg.num_kv_heads] if name == 'qkv' else 2
  return jnp.split(project(spec, x, p, name, compute, layout=layout), ends, FUSED_AXIS[name])


def attention(
  q: jax.Array | tuple,
  k: jax.Array | tuple,
  v: jax.Array,
  rows: PackedRows,
  window: int | jax.Array,
  cfg: ModelConfig,
  compute: Compute,
  sinks: jax.Array | None = None,
  layout: Callable | None = None,
) -> jax.Array:
  """Computes causal attention inside each document of a packed row.

  Branches of a document (`types.Batch`) attend to its shared part and to themselves. `compute.attention` selects the
  implementation, where it supports the arguments; `attention_kernels.py` has the kernels of accelerators and their
  limits.

  Args:
    q: [B, T, H, h]; k: [B, T, K, h]; v: [B, T, K, hv]. q and k may be `sparse_attention.Queries` and `Keys`.
    window: a token attends to the tokens of its document that are fewer than `window` positions back; 0: to all. An
      array in a scan over layers with different windows.
    cfg: for the scale and the soft cap of the scores.
    sinks: [H], the score of an extra key without value for each head, or None.
    layout: a `Layout`, or any function on one device. If it splits rows, q, k and v are striped (`context_parallel`).

  Returns:
    [B, T, H, hv].

  Raises:
    InputError: the requested implementation does not support the arguments.
  """
  if cfg.chunked and window:  # each chunk is a document of its own
    chunk_ids = rows.segment_ids * (1 + q.shape[1] // window) + rows.positions // window
    rows = rows._replace(segment_ids=chunk_ids)
  options: dict[str, Any] = dict(window=window, cfg=cfg, compute=compute, sinks=sinks)
  parts = row_shards(layout)
  if isinstance(q, tuple):
    from jaxpost.models import sparse_attention

    return sparse_attention.attend(q, k, v, rows, **options, parts=parts)
  if compute.uses_kernel:
    from jaxpost.models import attention_kernels

    if attention_kernels.kernel_fits(q, v, rows.branch_ids, compute, cfg, parts=parts):
      return attention_kernels.attend(q, k, v, rows, **options, layout=layout, parts=parts)
  if parts > 1:
    from jaxpost.models import context_parallel

    return context_parallel.attend(q, k, v, rows, **options, layout=layout, n=parts)
  return checkpoint_name(attend_in_chunks(q, k, v, rows, **options).astype(compute.residual), 'dots')


def mlp(p: dict, x: jax.Array, cfg: ModelConfig, compute: Compute, layout: Callable) -> jax.Array:
  """An MLP with a gate, such as SwiGLU (Shazeer, arXiv:2002.05202), or without: [B, T, D] -> [B, T, D]."""
  if cfg.activation in UNGATED:
    hidden = UNGATED[cfg.activation](project('btd,df->btf', x, p, 'up', compute, layout=layout).astype(jnp.float32))
  else:
    gate, up = project_all('btd,df->btf', x, p, 'gate_up', compute, cfg=cfg, layout=layout)
    hidden = ACTIVATIONS[cfg.activation](gate.astype(jnp.float32)) * up
  return project('btf,fd->btd', hidden.astype(compute.residual), p, 'down', compute, layout=layout)


def add(x: jax.Array, out: jax.Array, cfg: ModelConfig) -> jax.Array:
  """Adds the output of attention or MLP to the residual stream [B, T, D]."""
  if cfg.residual_scale != 1:
    out = out * cfg.residual_scale
  return x + out.astype(x.dtype)


def in_a_row(
  layer_of_kind: Callable, params: Sequence[dict], x: jax.Array, cfg: ModelConfig, chosen: jax.Array | None
) -> tuple[jax.Array, list, Any]:
  """Runs the first len(params) layers without a scan; for arguments and results see `hybrid.scan_periods`."""
  kept, routings = [], []
  for i, (p, kind) in enumerate(zip(params, cfg.layer_kinds)):
    place = cfg.place_of_experts(i)
    x, (layer_kept, routing) = layer_of_kind(kind)(p, x, None if chosen is None or place is None else chosen[place])
    kept.append(layer_kept)
    if routing is not None:
      routings.append(routing)
  return x, kept, jax.tree.map(lambda *y: jnp.stack(y), *routings) if routings else None


_POLICIES = {'full': None, 'dots': jax.checkpoint_policies.save_only_these_names('dots')}


def rematerialized(block: Callable, compute: Compute, alone: bool = False) -> Callable:
  """Returns `block` with a backward pass that recomputes it as `compute.remat` says; `alone`: in a scan over layers."""
  if compute.remat == 'none':
    return block
  # Barriers keep XLA from recomputing several layers at once. In a scan over single layers they only prevent fusions.
  return jax.checkpoint(block, policy=_POLICIES[compute.remat], prevent_cse=not alone)
