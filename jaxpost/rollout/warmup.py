"""Compilations that an engine needs before it samples, so that none happens later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost.rollout import sequence

if TYPE_CHECKING:
  from jaxpost.rollout.native import NativeEngine


def compile_jobs(
  engine: NativeEngine, params: Any, lengths: Sequence[int], group_size: int, turns: bool
) -> list[Callable[[], Any]]:
  """Functions that compile what sampling from prompts needs; independent of each other.

  Args:
    params: the trainer's parameters, or their shapes and shardings.
    lengths: tokens of each prompt.
    group_size: samples of each prompt.
    turns: conversations of several turns will be served.
  """
  buckets = engine.buckets
  programs = engine.programs
  weights, state = engine.described(params)
  key = _abstract(engine, (2,), np.uint32, axes=(None,))
  step = _abstract(engine, (), np.int32, axes=())
  entry = jax.tree.map(lambda x: _abstract(engine, x.shape, x.dtype), sequence.make_entry(engine, {}, {}))

  def tables(rows, read):
    return [_abstract(engine, (rows, read // engine.page), np.int32, axes=())] if engine.page else []

  jobs: list[Callable[[], Any]] = [functools.partial(engine.reshard.compile, params), programs.init.compile]
  low = min(lengths)
  high = engine.config.room
  if not turns:  # an environment's first message may make prompts longer
    high = min(max(lengths) + engine.config.max_new_tokens, high)
  # Preempted sequences are prefilled again, with what they have drawn.
  again = range(low, high) if turns or engine.page else ()
  rows = buckets.prefill_rows(group_size)
  for size in sorted({buckets.prompt(n) for n in (*lengths, *again)}):
    tokens = _abstract(engine, (rows, size))
    counts = _abstract(engine, (rows,))
    prefix = programs.prefill.outputs(weights, tokens, counts)
    jobs.append(functools.partial(programs.prefill.compile, weights, tokens, counts))
    jobs.append(functools.partial(programs.insert.compile, state, prefix, entry, key, step))
  for read in sorted({buckets.read(n + engine.block) for n in range(low, high)}):
    for count in buckets.row_sizes():
      jobs.append(functools.partial(programs.decoder(count, read).compile, weights, state, *tables(count, read)))
    if turns and engine.can_reuse_cache:
      chunk = jax.tree.map(
        lambda x: _abstract(engine, x.shape, x.dtype), sequence.make_chunk(engine.max_concurrent_decodes, {}, 0)
      )
      table = tables(engine.max_concurrent_decodes, read)
      jobs.append(functools.partial(programs.extender(read).compile, weights, state, entry, chunk, key, step, *table))
  if len(buckets.row_sizes()) > 1:
    jobs.append(functools.partial(programs.move.compile, state, _abstract(engine, (engine.max_concurrent_decodes,))))
  return jobs


def _abstract(engine: NativeEngine, shape: tuple, dtype: Any = np.int32, axes: tuple | None = None):
  """Shape, type and sharding of an argument; its first dimension is the batch unless `axes` are given."""
  if axes is None:
    axes = ('batch', *(None,) * (len(shape) - 1))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=engine.layout.sharding(axes, shape))
