"""The interface of rollout engines, with the verbs of JetStream's Engine.

`rollout.sampler.Sampler` needs `__call__`, conversations need `serve`; the verbs `prefill`, `insert`, `extend` and
`generate` are for adapters and for drivers of a user. `native.py` is the engine that ships, `scheduler.py` drives it.

Legend: S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.rollout.sequence import Completion, Request
  from jaxpost.types import Prompt, Rollout


class Engine(Protocol):
  """Samples completions from weights that the trainer loads into it.

  Attributes:
    max_concurrent_decodes: number of slots.
    weights: made by `load`; None: there are none.
    layout: mesh and shardings that it samples on.
    version: optimizer updates behind its weights.
  """

  max_concurrent_decodes: int
  weights: Any
  layout: Layout
  version: int

  # ----------------------------------------------------------------- weights

  def load(self, params: Any, version: int) -> dict:
    """Copies the trainer's parameters into the sampling layout and type.

    Returns:
      {'bytes': moved}.
    """

  def unload(self):
    """Frees the weights until the next `load`."""

  def preserve_weights(self) -> AbstractContextManager:
    """Restores the present weights and version when the block ends."""

  # --------------------------------------------------------------- compiling

  def described(self, params: Any) -> Any:
    """Returns shapes and shardings of the weights and caches that it will hold."""

  def jobs(self, params: Any, lengths: Sequence[int], group_size: int, turns: bool = False) -> list[Callable]:
    """Returns functions that compile what sampling needs; they may run in parallel.

    Args:
      lengths: of the prompts.
      turns: conversations of several turns will be served.
    """

  # ------------------------------------------------------------------- verbs

  def init_decode_state(self) -> Any:
    """Returns a decode state with empty slots."""

  def prefill(self, prompts: Sequence[Any]) -> Any:
    """Runs token ids through the model once and returns their KV cache.

    The result may be inserted any number of times.
    """

  def insert(self, state: Any, prefix: Any, entry: Any, run_key: Any, step: int) -> Any:
    """Copies samples of a prefix into free slots; `run_key` decides the draws."""

  def extend(self, state: Any, entry: Any, suffixes: dict, run_key: Any, step: int) -> Any:
    """Prefills the rest of texts that begin with the contents of their slots."""

  def generate(self, state: Any) -> tuple[Any, Any]:
    """Decodes a block of tokens in every slot.

    Returns:
      The new state and a `programs.generate.Block`.
    """

  # ------------------------------------------------------------------- calls

  def serve(
    self,
    requests: Iterable[Request],
    *,
    run_key: Any,
    step: int,
    next_requests: Callable[[list[Completion], bool], Iterable[Request]],
    prefill_rows: int | None = None,
    on_tokens: Callable | None = None,
    reuse_cache: bool = True,
    on_dispatch: Callable[[int], None] | None = None,
  ) -> dict:
    """Serves requests and those that follow from their completions.

    Args:
      next_requests: (completions since the last call, idle) -> further requests; called
        between any two blocks.
      prefill_rows: prompts of one prefill.
      on_tokens: called with (request, token ids so far) after each block.
      reuse_cache: a request that begins with a finished text continues from its cache.
      on_dispatch: called before each block with the number of blocks dispatched
        so far; it may `load` newer weights (in-flight weight update).

    Returns:
      Metrics of the call.
    """

  def prefill_rows(self, group_size: int) -> int:
    """Returns how many texts to prefill together, each with `group_size` samples."""

  def check(self, request: Request):
    """Raises InputError if a request cannot be served."""

  def __call__(
    self,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    run_key: Any,
    step: int,
    sampling: dict | None = None,
    on_dispatch: Callable[[int], None] | None = None,
  ) -> Rollout:
    """Samples `group_size` completions of each prompt; there may be fewer slots.

    Args:
      sampling: fields of `Sampling` that differ from the default.
      on_dispatch: see `serve`.
    """
