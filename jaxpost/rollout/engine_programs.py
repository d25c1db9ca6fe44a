"""The compiled programs of the native engine, and the jobs that compile them before a run samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpost.programs import generate
from jaxpost.programs.compile import Ledger, Program

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model
  from jaxpost.rollout.native import NativeEngine


class EnginePrograms:
  """Programs of one engine on one layout; `programs.generate` has their arguments and results."""

  def __init__(
    self,
    model: Model,
    layout: Layout,
    compute: Compute,
    ledger: Ledger,
    *,
    empty_state: Callable,
    paged: bool,
    block: int,
    report: dict[str, int],
  ):
    """Creates the programs; nothing is compiled yet.

    Args:
      empty_state: () -> `DecodeState` without sequences.
      report: arguments `top` and `allowed` of `sampling.draw`.
    """
    self._model = model
    self._placed = dict(layout=layout, compute=compute, ledger=ledger)
    self.ledger = ledger
    self.platform = compute.platform
    self._block = block
    self._report = report
    self.init = Program('init_state', empty_state, ledger, generate.slot_shardings(layout))
    self.prefill = generate.make_prefill(model, layout, compute, ledger)
    self.insert = generate.make_insert(layout, ledger)
    self.move = generate.make_move(layout, ledger, paged=paged)
    self._programs: dict[tuple, Program] = {}

  def decoder(self, rows: int, read: int) -> Program:
    """The program that decodes a block in `rows` slots, attending to `read` cache entries."""
    return self._once(generate.make_generate, self._block, rows, read, report=self._report)

  def extender(self, read: int) -> Program:
    """The program that extends cached prefixes, attending to `read` cache entries."""
    from jaxpost.programs import extend

    return self._once(extend.make_extend, read)

  def verifier(self, rows: int, read: int) -> Program:
    """The program that verifies drafts in `rows` slots, attending to `read` cache entries."""
    from jaxpost.programs import verify

    return self._once(verify.make_verify, rows, read, report=self._report)

  def _once(self, make: Callable[..., Program], *sizes: int, **options: Any) -> Program:
    """Returns make(model, *sizes, ...), which is called once for the same sizes."""
    if (make, *sizes) not in self._programs:
      self._programs[make, *sizes] = make(self._model, *sizes, **options, **self._placed)
    return self._programs[make, *sizes]


def compile_jobs(
  engine: NativeEngine, params: Any, lengths: Sequence[int], group_size: int, turns: bool
) -> list[Callable[[], Any]]:
  """Returns functions that compile the programs that sampling from prompts needs; see `engine.Engine.jobs`."""
  buckets = engine.buckets
  programs = engine.programs
  slots = engine.max_concurrent_decodes
  page_size = engine.config.page_size
  weights, state = engine.described(params)
  key = _abstract(engine, (2,), np.uint32, axes=(None,))
  step = _abstract(engine, (), np.int32, axes=())

  def like(arrays):
    return jax.tree.map(lambda x: _abstract(engine, x.shape, x.dtype), arrays)

  def tables(rows, read):
    return [_abstract(engine, (rows, (read or engine.length) // page_size), np.int32, axes=())] if page_size else []

  jobs: list[Callable[[], Any]] = [functools.partial(engine.reshard.compile, params), programs.init.compile]
  entry = like(engine.entry({}, {}))
  min_length = min(lengths)
  max_length = engine.config.room
  if not turns:  # an environment's first message may make prompts longer
    max_length = min(max(lengths) + engine.config.max_new_tokens, max_length)
  # Preempted sequences are prefilled again, with the tokens that they have drawn.
  longer = range(min_length, max_length) if turns or page_size else ()
  rows = engine.prefill_rows(group_size)
  for size in sorted({buckets.prompt(n) for n in (*lengths, *longer)}):
    tokens = _abstract(engine, (rows, size))
    counts = _abstract(engine, (rows,))
    prefilled = programs.prefill.outputs(weights, tokens, counts)
    jobs.append(functools.partial(programs.prefill.compile, weights, tokens, counts))
    for copies in buckets.copy_sizes(rows, size) if page_size else [0]:
      entry_with_copies = entry.replace(copies=_abstract(engine, (copies, 3))) if copies else entry
      jobs.append(functools.partial(programs.insert.compile, state, prefilled, entry_with_copies, key, step))
  for count in buckets.row_sizes():
    for read in sorted({buckets.decode(n + engine.block, count) for n in range(min_length, max_length)}):
      jobs.append(functools.partial(programs.decoder(count, read).compile, weights, state, *tables(count, read)))
      if engine.config.speculation:
        from jaxpost.rollout import drafts

        draft = like(drafts.no_draft(count, engine.block - 1))
        verify = programs.verifier(count, read)
        jobs.append(functools.partial(verify.compile, weights, state, draft, *tables(count, read)))
  if turns and engine.can_reuse_cache:
    from jaxpost.programs import extend

    chunk = like(next(extend.chunks(slots, {0: (0, np.zeros(1, np.int32))}, programs.platform)))
    for read in sorted({buckets.read(n + engine.block) for n in range(min_length, max_length)}):
      extender = programs.extender(read)
      jobs.append(functools.partial(extender.compile, weights, state, entry, chunk, key, step, *tables(slots, read)))
  if len(buckets.row_sizes()) > 1:
    jobs.append(functools.partial(programs.move.compile, state, _abstract(engine, (slots,))))
  return jobs


def _abstract(engine: NativeEngine, shape: tuple, dtype: Any = np.int32, axes: tuple | None = None):
  """Shape, type and sharding of an argument; its first dimension is the batch unless `axes` are given."""
  if axes is None:
    axes = ('batch', *(None,) * (len(shape) - 1))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=engine.layout.sharding(axes, shape))
