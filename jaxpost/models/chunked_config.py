"""The configuration record of decoders with attention in chunks, and dense layers between those with experts."""

import dataclasses

from jaxpost.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ChunkedConfig(ModelConfig):
  """A decoder whose layers with a window cut documents into chunks of its size (Llama 4).

  A token attends to the tokens of its own chunk. Layers without a window may be without rotary embeddings, too.
  """

  sparse: tuple[int, ...] = ()  # numbers of the layers with experts; others have a dense MLP

  chunked = True

  @property
  def sparse_layers(self) -> int:
    return len(self.sparse) if self.experts else self.num_layers

  @property
  def layer_stacks(self) -> tuple[str, ...]:
    return tuple('layers' if i in self.sparse else 'dense' for i in range(self.num_layers))

  def place_of_experts(self, layer: int) -> int | None:
    return self.sparse.index(layer) if layer in self.sparse else None
