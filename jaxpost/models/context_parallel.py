"""Context parallelism: rows that are split over the `context` axis of the mesh.

Legend: B rows, T tokens (t of a part), D width, n parts of a row.

Token i of a row is token i // n of part i % n (striped attention, arXiv:2311.09431), so that every part has the same
mix of early tokens, which attend to few keys, and late ones: chunk by chunk all parts read the keys up to the same
position, and products beyond it are never computed. `attend` gathers the keys and values of a row once per layer;
nothing else of a layer crosses the axis.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.distributed.mesh import Layout, axes_of, row_shards
from jaxpost.matmul import Compute
from jaxpost.models.attention_xla import PackedRows, attend_in_chunks
from jaxpost.models.config import ModelConfig


def stripe(x: jax.Array, n: int) -> jax.Array:
  """Reorders [B, T, ...] so that the tokens of a part are adjacent."""
  split = x.reshape(len(x), -1, n, *x.shape[2:])
  return split.swapaxes(1, 2).reshape(x.shape)


def unstripe(x: jax.Array, n: int) -> jax.Array:
  """Undoes `stripe`, the transpose of [T / n, n]."""
  return stripe(x, x.shape[1] // n)


def unstripe_sharded(x: jax.Array, layout: Layout) -> jax.Array:
  """Undoes `stripe` for [B, T, D] split over `context`; each token is sent to another device at most once."""
  n = row_shards(layout)
  part = x.shape[1] // n
  if part % n:
    return layout(unstripe(x, n), 'batch', 'time', None)

  def local(x):  # [B, t, D]: sends a contiguous run of the stripe to each device
    x = x.reshape(len(x), n, part // n, x.shape[-1])
    x = jax.lax.all_to_all(x, 'context', 1, 1, tiled=True)
    return unstripe(x.reshape(len(x), part, -1), n)

  split = layout.spec(('batch', 'time'), x.shape)
  return jax.shard_map(local, **shard_map_axes(layout, split), in_specs=split, out_specs=split)(x)


def gather_stripes(x: jax.Array) -> jax.Array:
  """Gathers the stripes [B, t, ...] of a row inside a `shard_map` over `context`: [B, T, ...]."""
  x = jax.lax.all_gather(x, 'context', axis=2)
  return x.reshape(len(x), -1, *x.shape[3:])


def shard_map_axes(layout: Layout, split: PartitionSpec) -> dict:
  """Returns arguments of `shard_map` that make the mesh axes of `split` manual; the other axes stay automatic."""
  return dict(mesh=layout.mesh, check_vma=False, axis_names={a for part in split for a in axes_of(part)})


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  rows: PackedRows,
  window: int | jax.Array,
  cfg: ModelConfig,
  compute: Compute,
  sinks: jax.Array | None,
  layout: Layout,
  n: int,
) -> jax.Array:
  """Computes `layers.attention` of rows in n parts: q, k and v are striped, `rows` are in order.

  It is a `shard_map`, because the partitioner would sum the gradients of keys and values over the whole mesh.
  """
  k, v = k.astype(compute.dtype), v.astype(compute.dtype)
  if layout.mesh.devices.flat[0].platform == 'cpu':  # XLA:CPU cannot sum gradients in bfloat16
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
  queries = *(x if x is None else stripe(x, n) for x in rows), stripe(jnp.arange(q.shape[1])[None], n)
  split = layout.spec(('batch', 'time', 'kv_heads'), k.shape)
  queries_split = *(PartitionSpec(*split[:2]),) * 3, PartitionSpec(None, split[1])

  # A window that is an int stays static; a traced one, of a scan over layers, has to be an argument of the `shard_map`.
  traced_window = None if isinstance(window, int) else window

  def local(q, k, v, queries, rows, traced_window, sinks):
    k, v = gather_stripes(k), gather_stripes(v)
    local_window = window if traced_window is None else traced_window
    return attend_in_chunks(q, k, v, rows, local_window, cfg=cfg, compute=compute, sinks=sinks, queries=queries, n=n)

  return jax.shard_map(
    local,
    **shard_map_axes(layout, split),
    in_specs=(split, split, split, queries_split, PartitionSpec(split[0]), PartitionSpec(), PartitionSpec(split[2])),
    out_specs=split,
  )(q, k, v, queries, rows, traced_window, sinks)
