"""The interface of rollout engines.

`rollout.sampler.Sampler` needs `__call__`, conversations need `serve`. `native.py` has the engine of this library; its
other methods, `prefill`, `insert`, `extend` and `generate` as in JetStream's Engine, are for `scheduler.py` and
`jetstream.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.rollout.sequence import Completion, Request
  from jaxpost.types import Prompt, Rollout


# Called before each block with the number of blocks dispatched so far; it may `load` newer weights (in-flight weight
# update). Cache entries that older weights have computed stay as they are.
OnDispatch = Callable[[int], None]


class Engine(Protocol):
  """Samples completions from weights that the trainer loads into it.

  Attributes:
    max_concurrent_decodes: number of slots.
    weights: those that `load` has made; None: there are none.
    layout: mesh and shardings of its arrays.
    version: number of optimizer updates that produced its weights (0: the initial ones).
  """

  max_concurrent_decodes: int
  weights: Any
  layout: Layout
  version: int

  # ----------------------------------------------------------------- weights

  def load(self, params: Any, version: int) -> dict:
    """Copies the trainer's parameters into the sampling layout and type.

    Returns:
      {'bytes': number of bytes moved}.
    """

  def unload(self) -> None:
    """Frees the weights until the next `load`."""

  def preserve_weights(self) -> AbstractContextManager:
    """Restores the current weights and version when the block ends."""

  # --------------------------------------------------------------- compiling

  def described(self, params: Any) -> Any:
    """Returns shapes and shardings of the weights and caches that it will hold."""

  def jobs(self, params: Any, lengths: Sequence[int], group_size: int, turns: bool = False) -> list[Callable]:
    """Returns functions that compile the programs of sampling; they are independent, and may run in parallel.

    Args:
      params: the trainer's parameters, or their shapes and shardings.
      lengths: tokens of each prompt.
      group_size: samples of each prompt.
      turns: conversations of several turns will be served.
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
    on_dispatch: OnDispatch | None = None,
  ) -> dict:
    """Serves requests with continuous batching, until no more come.

    Turns of conversations, and any request that depends on what was drawn, come from `next_requests`. Draws depend on
    (run key, step, prompt, sample, position in the sequence), never on other requests or on the order of arrival.

    Args:
      requests: the first ones; sequences of any length that fits a slot.
      run_key: key data, [2] uint32.
      next_requests: (completions, idle) -> requests, called between any two blocks with the completions that ended
        since the last call; it returns the requests that are ready now. Both may be empty. With `idle` nothing is
        decoded and the queue is empty: it may block until a request is ready, and returning none ends `serve`. It must
        return the same on every process.
      prefill_rows: prompts of a prefill; None: as many as are queued, up to the slots.
      on_tokens: called with (request, token ids that a block drew for it) after each block, before `next_requests`.
      reuse_cache: a request that begins with a finished sequence continues from its cache entries; False prefills it
        from its beginning.
      on_dispatch: see `OnDispatch`.

    Returns:
      Metrics of the call, such as those of `Scheduler.figures`.
    """

  def prefill_rows(self, group_size: int) -> int:
    """Returns how many prompts to prefill together, if each has `group_size` samples."""

  def check(self, request: Request) -> None:
    """Raises InputError if a request cannot be served."""

  def __call__(
    self,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    run_key: Any,
    step: int,
    sampling: dict | None = None,
    on_dispatch: OnDispatch | None = None,
  ) -> Rollout:
    """Samples `group_size` completions of each prompt, of one turn each; there may be fewer slots.

    Args:
      run_key: key data, [2] uint32; with step, prompt index and sample index it decides every draw.
      sampling: fields of `Sampling` that differ from the config, as scalars.
      on_dispatch: see `OnDispatch`.
    """
