"""Tokens to sequences and back, inside rows.

Legend: B rows, T tokens a row, N sequences a row at most (here T), P = N / 2
pairs.

Sequences of a row are numbered from 1 by `sequence_ids` [B, T]; 0 is none.
Sums are segment sums over tokens that a row holds anyway, so that their
gradients cost nothing beside the model's.
"""

import jax
import jax.numpy as jnp
import numpy as np


def sequence_sum(x, sequence_ids):
  """[B, T] -> [B, T]: entry n - 1 is the sum over sequence n of its row."""
  length = x.shape[1]
  one_row = lambda row, ids: jax.ops.segment_sum(row, ids, num_segments=length + 1)[1:]
  return jax.vmap(one_row)(x, sequence_ids)


def sequence_max(x, sequence_ids, initial=0.0):
  """[B, T] -> [B, T]: the largest entry of each sequence.

  For values that are the same on all tokens of a sequence (weights, labels).
  Sequences that do not exist give `initial`.
  """
  length = x.shape[1]

  def one_row(row, ids):
    found = jax.ops.segment_max(row, ids, num_segments=length + 1)[1:]
    return jnp.where(jnp.isfinite(found), found, initial)

  return jax.vmap(one_row)(x, sequence_ids)


def to_tokens(per_sequence, sequence_ids):
  """[B, N] -> [B, T]: each token gets the entry of its sequence, others 0."""
  index = jnp.maximum(sequence_ids - 1, 0)
  return jnp.where(sequence_ids > 0, jnp.take_along_axis(per_sequence, index, axis=1), 0)


def sequence_mean(x, mask, sequence_ids):
  """Mean of x over the masked tokens of each sequence, at its tokens [B, T]."""
  mask = mask.astype(jnp.float32)
  total = sequence_sum(x * mask, sequence_ids)
  count = sequence_sum(mask, sequence_ids)
  return to_tokens(total / jnp.maximum(count, 1), sequence_ids)


def split_pairs(per_sequence):
  """[B, N] -> chosen, rejected [B, P]: odd sequences and the ones after."""
  even = per_sequence[:, : per_sequence.shape[1] // 2 * 2]
  return even[:, 0::2], even[:, 1::2]


def same_shape(what: str, rank: int | None, *arrays):
  """ValueError unless all have one shape, and `rank` axes if that is given.

  `what` names arrays and axes in the message, such as 'rewards, valid [N, G]'.
  """
  shapes = [np.shape(a) for a in arrays]
  if len(set(shapes)) > 1 or rank not in (None, len(shapes[0])):
    raise ValueError(f'{what}: shapes are {", ".join(map(str, shapes))}')
