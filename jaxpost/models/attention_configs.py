"""Configuration records of decoders whose attention `ModelConfig` cannot describe."""

import dataclasses

from jaxpost.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ChunkedConfig(ModelConfig):
  """A decoder whose windows are chunks: a token attends to the tokens of its own chunk of a document (Llama 4).

  Layers without a window may have no rotary embeddings.
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


@dataclasses.dataclass(frozen=True)
class LatentConfig(ModelConfig):
  """A decoder with multi-head latent attention in all layers (`mla.py`).

  `head_dim` is the head size of queries and keys. With `index_topk`, a query attends to that many keys, which an
  indexer chooses (`sparse_attention.py`).
  """

  q_rank: int = 0  # rank of the query projection; 0: a full projection
  kv_rank: int = 0  # size of the latent of keys and values
  rope_dim: int = 0  # rotated entries of a head, the last ones
  v_dim: int = 0  # head size of values
  index_topk: int = 0  # keys that a query attends to; 0: all
  index_heads: int = 0  # of the indexer
  index_dim: int = 0  # size of its queries and keys, whose first `rope_dim` entries are rotated
  index_interleaved: bool = False  # rotated pairs are adjacent entries

  latent = True

  @property
  def value_dim(self) -> int:
    return self.v_dim

  @property
  def rope_size(self) -> int:
    return self.rope_dim

  @property
  def cached(self) -> tuple[int, tuple[int, ...]]:
    indexer_sizes = (self.index_dim,) if self.index_topk else ()
    return 1, (self.kv_rank + self.rope_dim, *indexer_sizes)

  @property
  def layer_widths(self) -> tuple[int, ...]:
    return tuple(x + self.index_heads * self.index_dim // self.num_heads for x in super().layer_widths)


@dataclasses.dataclass(frozen=True)
class MixedConfig(ModelConfig):
  """A decoder with sliding-window layers and full layers whose heads differ (`mixed_attention.py`).

  `head_dim` and `num_kv_heads` are those of layers with a window.
  """

  full_head_dim: int = 0  # head size of layers without a window
  full_kv_heads: int = 0
  values_are_keys: bool = False  # layers without a window: the values are the keys before norm and rotation
  shared_layers: int = 0  # how many of the last layers attend to keys and values of an earlier layer of their kind
  wide_shared_mlp: bool = False  # the MLP of those layers is twice as wide
  side_size: int = 0  # size of the embedding that each layer has for a token; 0: none

  mixed = True

  @property
  def layer_stacks(self) -> tuple[str, ...]:
    first_shared = self.num_layers - self.shared_layers
    names = (('layers', 'local'), ('shared', 'local_shared'))
    return tuple(names[i >= first_shared][bool(kind.window)] for i, kind in enumerate(self.layer_kinds))

  @property
  def head_shapes(self) -> tuple[tuple[int, int, int], ...]:
    local = (self.num_kv_heads, self.head_dim, self.head_dim)
    return local, (self.full_kv_heads, self.full_head_dim, self.full_head_dim)

  @property
  def layer_caches(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
    kinds = self.layer_kinds[: self.num_layers - self.shared_layers]
    shapes = (self.head_shapes[not kind.window] for kind in kinds)
    return tuple((heads, (size, values)) for heads, size, values in shapes)

  @property
  def layer_widths(self) -> tuple[int, ...]:
    return tuple(2 * self.head_shapes[not kind.window][1] for kind in self.layer_kinds)

  def place_in_cache(self, layer: int) -> int:
    """Index of the layer to whose keys and values this one attends."""
    first_shared = self.num_layers - self.shared_layers
    if layer < first_shared:
      return layer
    windows = [bool(kind.window) for kind in self.layer_kinds]
    return max(i for i in range(first_shared) if windows[i] == windows[layer])
