"""Configuration records of decoders that `ModelConfig` cannot describe, and the way back from JSON to all records."""

import dataclasses
from typing import Any

from jaxpost.models.config import CustomConfig, Experts, ModelConfig, Rope
from jaxpost.models.parameters import STATEFUL


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


@dataclasses.dataclass(frozen=True)
class HybridConfig(ModelConfig):
  """A decoder whose layers have either attention or one other mixer of tokens (`hybrid.py`).

  With `norms='post'`, layers with attention have norms after attention and MLP, others before their mixer and MLP.

  The sizes below are those of the other mixer; of a convolution only `taps` matters. In the terms of Mamba-2, the
  queries of a state space are C, its keys B, its values x, and the key heads are groups.
  """

  # The mixer of each layer: 'layers' (attention), 'delta' (the gated delta rule), 'convolution' or 'state_space'. If
  # there are also 'mlp' or 'moe', each layer has one part only: those with attention or another mixer have no MLP.
  mixers: tuple[str, ...] = ()
  key_heads: int = 0  # of queries and keys
  value_heads: int = 0  # a multiple of `key_heads`
  key_size: int = 0
  value_size: int = 0
  taps: int = 0  # tokens in the window of a convolution
  joined: bool = False  # one matrix projects to queries, keys, values and gates, grouped by key head
  gated: bool = True  # the outputs of attention have gates; one matrix projects to them and to the queries
  beta_scale: float = 1.0  # factor of the steps of the delta rule; with 2, its eigenvalues may be negative
  # Rank of the projections to gates and decays in Kimi Delta Attention, where each channel of a key has its own decay;
  # 0: these projections have full rank, and a head has one decay.
  gate_rank: int = 0
  out_norm_eps: float = 0.0  # of the norm after the delta rule; 0: `norm_eps`
  step_min: float = 0.0  # lower bound of the steps of a state space
  # Sizes of multi-head latent attention, as in `LatentConfig`; kv_rank 0: attention is not of this kind.
  q_rank: int = 0
  kv_rank: int = 0
  rope_dim: int = 0
  v_dim: int = 0
  index_topk = 0  # no indexer chooses keys

  @property
  def value_dim(self) -> int:
    return self.v_dim or super().value_dim

  @property
  def rope_size(self) -> int:
    return self.rope_dim or super().rope_size

  @property
  def cached(self) -> tuple[int, tuple[int, ...]]:
    return (1, (self.kv_rank + self.rope_dim,)) if self.kv_rank else super().cached

  @property
  def layer_stacks(self) -> tuple[str, ...]:
    first = self.num_layers - self.sparse_layers if self.experts and not self.single else 0
    dense = ('dense' if name == 'layers' else f'dense_{name}' for name in self.mixers[:first])
    return (*dense, *self.mixers[first:])

  @property
  def single(self) -> bool:
    """True if each layer has one part: attention, another mixer, an MLP or experts."""
    return not {'mlp', 'moe'}.isdisjoint(self.mixers)

  @property
  def sparse_layers(self) -> int:
    return self.mixers.count('moe') if self.single else super().sparse_layers

  @property
  def layer_widths(self) -> tuple[int, ...]:
    width = self.head_dim + self.value_dim
    return tuple(width * (name == 'layers') for name in self.mixers)

  @property
  def mixer(self) -> str:
    """The mixer of the layers without attention; '' if all have it."""
    return next((name for name in self.mixers if name in STATEFUL), '')

  @property
  def state_shapes(self) -> tuple[tuple[int, ...], ...]:
    if not self.mixer:
      return ()
    tails = tuple((heads, self.taps - 1, size) for heads, size in self.convolved)
    return tails if self.mixer == 'convolution' else (*tails, (self.value_heads, self.key_size, self.value_size))

  @property
  def convolved(self) -> tuple[tuple[int, int], ...]:
    """(heads, size) of the inputs of convolutions: queries, keys and values (delta); x, B and C (state_space)."""
    if self.mixer == 'convolution':
      return ((self.num_heads, self.hidden_size // self.num_heads),)
    keys, values = (self.key_heads, self.key_size), (self.value_heads, self.value_size)
    return (keys, keys, values) if self.mixer == 'delta' else (values, keys, keys)

  @property
  def layer_caches(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return (self.cached,) * self.mixers.count('layers')

  @property
  def state_flops(self) -> float:
    # Each token reads the state with its query and updates it; in the gated delta rule it also reads with its key.
    passes = 2.0 * self.mixers.count('state_space') + 3.0 * self.mixers.count('delta')
    return 2 * passes * self.value_heads * self.key_size * self.value_size

  def place_of_experts(self, layer: int) -> int | None:
    if not self.single:
      return super().place_of_experts(layer)
    return self.mixers[:layer].count('moe') if self.mixers[layer] == 'moe' else None

  def place_in_cache(self, layer: int) -> int:
    return self.mixers[:layer].count(self.mixers[layer])


def from_json(fields: dict) -> ModelConfig | CustomConfig:
  """Restores a config from its `dataclasses.asdict` after a JSON round trip."""
  fields = {k: _tuples(v) for k, v in fields.items()}
  if fields.pop('value_head', False):  # a field in checkpoints until November 2026
    fields['more_heads'] = ('value',)
  if 'code' in fields:
    return CustomConfig(**fields)
  experts = fields.get('experts')
  kinds = {'mixers': HybridConfig, 'kv_rank': LatentConfig, 'full_head_dim': MixedConfig, 'sparse': ChunkedConfig}
  kind = next((kind for field, kind in kinds.items() if field in fields), ModelConfig)
  return kind(
    **fields | {'ropes': tuple(Rope(**rope) for rope in fields['ropes']), 'experts': experts and Experts(**experts)}
  )


def _tuples(value: Any) -> Any:
  """Turns the lists of JSON back into tuples."""
  if isinstance(value, dict):
    return {k: _tuples(v) for k, v in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
