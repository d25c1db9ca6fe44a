"""What a rollout engine can do, with the verbs of JetStream's Engine.

The sampler role needs `__call__`, and conversations need `serve`; the verbs
are for adapters and for drivers of their own. `native.py` is the engine that
ships, and `serve.py` its driver.

Legend: S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.types import Completion, Prompt, Request, Rollout


class Engine(Protocol):
  """Samples completions from weights that it is given."""

  max_concurrent_decodes: int  # slots
  weights: Any  # that `load` made; None: none
  layout: Layout  # of the devices that it samples on
  version: int  # updates behind the weights that it has

  def load(self, params: Any, version: int) -> dict:
    """Takes the trainer's parameters; returns {'bytes': ..., ...} moved."""

  def init_decode_state(self) -> Any:
    """Slots with nothing in them."""

  def prefill(self, texts: Sequence[Any]) -> Any:
    """Reads token ids once; the result may be inserted any number of times."""

  def unload(self):
    """Frees the weights until the next `load`."""

  def preserve_weights(self) -> AbstractContextManager:
    """Restores the present weights and version when the block ends."""

  def described(self, params: Any) -> Any:
    """Shapes and shardings of the arrays that it will keep."""

  def jobs(self, params: Any, lengths: Sequence[int], group_size: int, turns: bool = False) -> list[Callable]:
    """Compilations that prompts of these lengths need; may run together.

    turns: of conversations, which go on.
    """

  def insert(self, state: Any, prefix: Any, entry: Any, run_key: Any, step: int) -> Any:
    """Puts samples of the prefix into free slots; the key decides draws."""

  def extend(self, state: Any, entry: Any, more: dict, run_key: Any, step: int) -> Any:
    """As `insert`, of texts that begin with what is in their slots."""

  def generate(self, state: Any) -> tuple[Any, Any]:
    """(state, `programs.generate.Block`): some tokens for every slot."""

  def serve(
    self,
    requests: Iterable[Request],
    *,
    run_key: Any,
    step: int,
    follow: Callable[[list[Completion], bool], Iterable[Request]],
    read_rows: int | None = None,
    tell: Callable | None = None,
    reuse_cache: bool = True,
    on_dispatch: Callable[[int], None] | None = None,
  ) -> dict:
    """All requests, and those that follow from what was drawn; figures.

    `follow(completions, idle)` is asked between any two blocks. read_rows:
    texts read at a time. tell: tell(request, ids so far), of each block.
    reuse_cache: a request that begins with a finished text continues from its
    cache. on_dispatch: called before each block with the number of blocks
    dispatched so far; it may `load` newer weights (in-flight weight update).
    """

  def prefix_rows(self, group_size: int) -> int:
    """Texts to read at a time, of which each has so many samples."""

  def check(self, request: Request):
    """InputError where a request cannot be served."""

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
    """All samples of all prompts, whatever the number of slots.

    Args:
      sampling: fields of `types.Sampling` that differ from the default.
      on_dispatch: as in `serve`.
    """
