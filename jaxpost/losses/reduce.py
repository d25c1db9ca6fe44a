"""Reductions from tokens to sequences of packed rows, and back.

Legend: B rows, T tokens a row, N sequences a row at most (here T).

`sequence_ids` [B, T] numbers the sequences of a row from 1; 0 is none. All reductions are segment sums inside a row, so
their gradients cost nothing compared with those of the model. Also what the losses share: the bound of log-ratios, the
check of shapes, and functions that are imported when called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
  from jaxpost.types import Array

MAX_LOG_RATIO = 20.0  # exp(20) is practically infinite, and finite in float32


def sequence_sum(x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Sums x [B, T] by sequence; entry [b, n - 1] is the sum over sequence n of row b."""
  length = x.shape[1]

  def one_row(row, ids):
    return jax.ops.segment_sum(row, ids, num_segments=length + 1)[1:]

  return jax.vmap(one_row)(x, sequence_ids)


def to_tokens(per_sequence: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Gives each token [B, T] the entry [B, N] of its sequence; 0 without one."""
  index = jnp.maximum(sequence_ids - 1, 0)
  return jnp.where(sequence_ids > 0, jnp.take_along_axis(per_sequence, index, axis=1), 0)


def sequence_mean(x: jax.Array, mask: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Returns the mean over the trained tokens of each sequence, at its tokens [B, T]."""
  mask = mask.astype(jnp.float32)
  total = sequence_sum(x * mask, sequence_ids)
  count = sequence_sum(mask, sequence_ids)
  return to_tokens(total / jnp.maximum(count, 1), sequence_ids)


def sequence_total(x: jax.Array, mask: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Returns the sum over the trained tokens of each sequence, at its tokens [B, T]."""
  return to_tokens(sequence_sum(x * mask, sequence_ids), sequence_ids)


def same_shape(what: str, rank: int | None, *arrays: Array) -> None:
  """Raises ValueError unless all arrays have the same shape, of `rank` axes if given.

  `what` names arrays and axes in the message, such as 'rewards, valid [N, G]'.
  """
  shapes = [np.shape(a) for a in arrays]
  if len(set(shapes)) > 1 or rank not in (None, len(shapes[0])):
    raise ValueError(f'{what}: shapes are {", ".join(map(str, shapes))}')


def by_name(target: str) -> Callable[..., Any]:
  """Returns a function of this room, 'module:function', that is imported at its first call.

  A run imports the methods that its config names, and no others.
  """
  module, _, name = target.partition(':')

  def call(*args: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(f'jaxpost.losses.{module}'), name)(*args, **options)

  return call
