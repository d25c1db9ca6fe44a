"""Rows that are split over the `context` axis of the mesh.

Legend: B rows, T tokens (t of a part), D width, n parts of a row.

Token i of a row is token i // n of part i % n, so that every part has as much
of the early tokens, which see little, as of the late ones: chunk by chunk all
parts read the keys up to the same place, and no product behind it is computed
(striped attention, arXiv:2311.09431). Keys and values of a row are gathered by
`attention.py` in each layer once; nothing else of a layer crosses the axis.
"""

import jax

from jaxpost.distributed.mesh import Layout, axes_of

WHOLE_ROW_KERNELS = 'reference', 'cudnn'  # of `model.attention`: cannot do a part of a row


def num_shards(layout) -> int:
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


def unstripe_sharded(x, layout: Layout):
  """Striped [B, T, D] -> [B, T, D], still split: each token travels once."""
  n, part = num_shards(layout), x.shape[1] // num_shards(layout)
  if part % n:
    return layout(unstripe(x, n), 'batch', 'time', None)

  def local(x):  # of my stripe, a run of each part
    x = x.reshape(len(x), n, part // n, x.shape[-1])
    x = jax.lax.all_to_all(x, 'context', 1, 1, tiled=True)
    return unstripe(x.reshape(len(x), part, -1), n)

  split = layout.spec(('batch', 'time'), x.shape)
  return jax.shard_map(local, **shard_map_axes(layout, split), in_specs=split, out_specs=split)(x)


def shard_map_axes(layout: Layout, split) -> dict:
  """The mesh axes that arrays are split over; gradients are whole in others."""
  return dict(mesh=layout.mesh, check_vma=False, axis_names={a for part in split for a in axes_of(part)})
