"""Attention over rows that are split over the `context` axis of the mesh.

Legend: B rows, T tokens, D width, n parts of a row.

Token i of a row is token i // n of part i % n, so that every part has as much
of the early tokens, which see little, as of the late ones: chunk by chunk all
parts read the keys up to the same place, and no product behind it is computed
(striped attention, arXiv:2311.09431). Keys and values of a row are gathered,
in each layer once; nothing else of a layer crosses the axis.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpost.matmul import Compute
from jaxpost.models import scores
from jaxpost.models.config import ModelConfig
from jaxpost.sharding import Layout, axes_of


def parts(layout) -> int:
  """Into how many a row is split; `layout` may be any `constrain`."""
  if not isinstance(layout, Layout) or layout.phase == 'rollout':
    return 1
  return layout.mesh.shape['context']


def stripe(x, n: int):
  """[B, T, ...] -> [B, T, ...] with the tokens of a part side by side."""
  split = x.reshape(len(x), -1, n, *x.shape[2:])
  return split.swapaxes(1, 2).reshape(x.shape)


def unstripe(x, n: int):
  split = x.reshape(len(x), n, -1, *x.shape[2:])
  return split.swapaxes(1, 2).reshape(x.shape)


def gather(x, n: int):
  """On a device: its stripe [B, t, ...] of n -> the rows [B, T, ...]."""
  return unstripe(jax.lax.all_gather(x, 'context', axis=1, tiled=True), n)


def in_order(x, layout: Layout):
  """Striped [B, T, D] -> [B, T, D], still split: each token travels once."""
  n, part = parts(layout), x.shape[1] // parts(layout)
  if part % n:
    return layout(unstripe(x, n), 'batch', 'time', None)

  def local(x):  # of my stripe, a run of each part
    x = x.reshape(len(x), n, part // n, x.shape[-1])
    x = jax.lax.all_to_all(x, 'context', 1, 1, tiled=True)
    return unstripe(x.reshape(len(x), part, -1), n)

  split = layout.spec(('batch', 'time'), x.shape)
  return jax.shard_map(local, **_by(layout, split), in_specs=split,
                       out_specs=split)(x)


def _by(layout: Layout, split) -> dict:
  """The mesh axes that arrays are split over; gradients are whole in others."""
  return dict(mesh=layout.mesh, check_vma=False, axis_names={
      a for part in split for a in axes_of(part)})


def causal(q, k, v, segment_ids, compute: Compute, branch_ids, positions,
           window, cfg: ModelConfig, sinks, layout: Layout):
  """As `attention.attention`, of striped q, k and v; the rest is in order.

  Each device for itself: the partitioner would sum the gradients of keys and
  values everywhere.
  """
  n, length = parts(layout), q.shape[1]
  k, v = (x.astype(compute.dtype) for x in (k, v))
  if layout.mesh.devices.flat[0].platform == 'cpu':
    k, v = (x.astype(jnp.float32) for x in (k, v))  # XLA:CPU sums no bfloat16
  rows = segment_ids, positions, branch_ids
  mine = *(x if x is None else stripe(x, n) for x in rows), (
      stripe(jnp.arange(length)[None], n))
  split = layout.spec(('batch', 'time', 'kv_heads'), k.shape)
  rest = (PartitionSpec(*split[:2]),) * 3 + (PartitionSpec(None, split[1]),), (
      PartitionSpec(split[0]))

  def local(q, k, v, mine, rows, window, sinks):
    k, v = (gather(x, n) for x in (k, v))
    return scores.in_chunks(
        q, k, v, mine, rows, window, compute, cfg, sinks, n)

  # A number is known where this is compiled; of layers in a scan it is not.
  number = isinstance(window, int)
  return jax.shard_map(
      lambda *given: local(*given[:5], window if number else given[5],
                           given[6]),
      **_by(layout, split),
      in_specs=(split,) * 3 + (*rest, PartitionSpec(), PartitionSpec(split[2])),
      out_specs=split)(
          q, k, v, mine, rows, None if number else window, sinks)
