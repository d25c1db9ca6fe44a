"""The configuration record of decoders in which some layers have another mixer of tokens than attention."""

import dataclasses

from jaxpost.models.config import ModelConfig
from jaxpost.models.parameters import STATEFUL


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
