"""What a rollout engine can do, with the verbs of JetStream's Engine.

The sampler role needs `__call__`, and conversations need `serve`; the verbs
are for adapters and for drivers of their own. `native.py` is the engine that
ships, and `serve.py` its driver.

Legend: S slots.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from jaxpost.types import Completion, Prompt, Request, Rollout


class Engine(Protocol):
  """Samples completions from weights that it is given."""

  max_concurrent_decodes: int  # slots
  weights: Any  # that `load` made; None: none
  version: int  # updates behind them

  def load(self, params: Any, version: int) -> dict:
    """Takes the trainer's parameters; returns {'bytes': ..., ...} moved."""

  def init_decode_state(self) -> Any:
    """Slots with nothing in them."""

  def prefill(self, texts: Sequence[Any]) -> Any:
    """Reads token ids once; the result may be inserted any number of times."""

  def unload(self):
    """Frees the weights until the next `load`."""

  def jobs(self, params: Any, lengths: Sequence[int],
           group_size: int) -> list[Callable]:
    """Compilations that prompts of these lengths need; may run together."""

  def insert(self, state: Any, prefix: Any, entry: Any, run_key: Any,
             step: int) -> Any:
    """Puts samples of the prefix into free slots; the key decides draws."""

  def generate(self, state: Any) -> tuple[Any, Any]:
    """(state, `programs.generate.Block`): some tokens for every slot."""

  def serve(self, requests: Iterable[Request], *, run_key: Any, step: int,
            follow: Callable[[list[Completion], bool], Iterable[Request]]
            ) -> dict:
    """All requests, and those that follow from what was drawn; figures.

    `follow(completions, idle)` is asked between any two blocks.
    """

  def __call__(self, prompts: Sequence[Prompt], *, group_size: int,
               run_key: Any, step: int,
               sampling: dict | None = None) -> Rollout:
    """All samples of all prompts, whatever the number of slots.

    `sampling`: fields of `types.Sampling` that differ from the default.
    """
