"""The compiled programs of the native engine, made when they are first needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpost.programs import extend, generate
from jaxpost.programs.compile import Ledger, Program

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.models.model import Model
  from jaxpost.types import Sampling


class EnginePrograms:
  """Programs of one engine on one layout.

  init: () -> DecodeState with empty slots.
  prefill: (weights, tokens, lengths) -> Prefix.
  insert: (state, prefix, entry, run key, step) -> state.
  move: (state, source slots) -> state.
  """

  def __init__(
    self,
    model: Model,
    layout: Layout,
    compute: Compute,
    ledger: Ledger,
    *,
    slots: int,
    cache_shape: tuple[int, int],
    paged: bool,
    block: int,
    top_logprobs: int,
    sampling: Sampling,
  ):
    """Creates the programs; nothing is compiled yet.

    Args:
      slots: sequences decoded at the same time.
      cache_shape: (slots, entries of each), or (pages, entries of each).
      paged: whether the cache has pages.
      block: decode steps of a dispatch.
      top_logprobs: most probable tokens reported at each position.
      sampling: of an empty slot.
    """
    self._model = model
    self._layout = layout
    self._compute = compute
    self._ledger = ledger
    self._block = block
    self._top_logprobs = top_logprobs
    empty = generate.empty_state(model, slots, cache_shape, sampling, compute)
    self.init = Program('init_state', empty, ledger, generate.slot_shardings(layout))
    self.prefill = generate.make_prefill(model, layout, compute, ledger)
    self.insert = generate.make_insert(layout, compute, ledger)
    self.move = generate.make_move(layout, compute, ledger, paged=paged)
    self._decoders: dict[tuple[int, int], Program] = {}
    self._extenders: dict[int, Program] = {}

  def decoder(self, rows: int, read: int) -> Program:
    """The program that decodes a block in `rows` slots, attending to `read` cache entries."""
    if (rows, read) not in self._decoders:
      self._decoders[rows, read] = generate.make_generate(
        self._model, self._block, rows, read, self._top_logprobs, self._layout, self._compute, self._ledger
      )
    return self._decoders[rows, read]

  def extender(self, read: int) -> Program:
    """The program that extends cached prefixes, attending to `read` cache entries."""
    if read not in self._extenders:
      self._extenders[read] = extend.make_extend(self._model, read, self._layout, self._compute, self._ledger)
    return self._extenders[read]
