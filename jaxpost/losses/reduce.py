"""Reductions from tokens to sequences of packed rows, and back.

Legend: B rows, T tokens a row, N sequences a row at most (here T).

`sequence_ids` [B, T] numbers the sequences of a row from 1; 0 is none. All reductions are segment sums inside a row, so
their gradients cost nothing compared with those of the model. This module also has helpers that the losses share: the
bound of log-ratios, the check of shapes, and functions that are imported at their first call.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
  from jaxpost.types import Array

MAX_LOG_RATIO = 20.0  # bound of |log r|: exp(20) is practically infinite, but finite in float32


def sequence_sum(x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Sums x [B, T] by sequence; entry [b, n - 1] is the sum over sequence n of row b."""
  segment_sum = functools.partial(jax.ops.segment_sum, num_segments=x.shape[1] + 1)
  return jax.vmap(segment_sum)(x, sequence_ids)[:, 1:]


def to_tokens(per_sequence: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Returns [B, T]: for each token the entry of its sequence in `per_sequence` [B, N], 0 without a sequence."""
  index = jnp.maximum(sequence_ids - 1, 0)
  return jnp.where(sequence_ids > 0, jnp.take_along_axis(per_sequence, index, axis=1), 0)


def sequence_mean(x: jax.Array, mask: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Returns the mean over the trained tokens of each sequence, at all of its tokens [B, T]."""
  mask = mask.astype(jnp.float32)
  total = sequence_sum(x * mask, sequence_ids)
  count = sequence_sum(mask, sequence_ids)
  return to_tokens(total / jnp.maximum(count, 1), sequence_ids)


def sequence_total(x: jax.Array, mask: jax.Array, sequence_ids: jax.Array) -> jax.Array:
  """Returns the sum over the trained tokens of each sequence, at all of its tokens [B, T]."""
  return to_tokens(sequence_sum(x * mask, sequence_ids), sequence_ids)


def same_shape(names: str, rank: int | None, *arrays: Array) -> None:
  """Raises ValueError unless all arrays have the same shape, of `rank` axes if given.

  `names` are those of the arrays and axes in the message, such as 'rewards, valid [N, G]'.
  """
  shapes = [np.shape(a) for a in arrays]
  if len(set(shapes)) > 1 or rank not in (None, len(shapes[0])):
    raise ValueError(f'{names}: shapes are {", ".join(map(str, shapes))}')


def by_name(target: str) -> Callable[..., Any]:
  """Returns the function 'module:function' of jaxpost.losses, which is imported at its first call.

  So a run imports only the methods that its config names.
  """
  module, _, name = target.partition(':')

  def call(*args: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(f'jaxpost.losses.{module}'), name)(*args, **options)

  return call
