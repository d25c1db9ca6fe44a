"""The configuration record of decoders with a mixer beside attention."""

import dataclasses

from jaxpost.models.config import ModelConfig
from jaxpost.models.parameters import STATEFUL


@dataclasses.dataclass(frozen=True)
class HybridConfig(ModelConfig):
  """A decoder whose layers have either attention or one other mixer of tokens (`hybrid.py`).

  With `norms='post'` only layers with attention have their norms behind; others have them in front.

  The sizes are those of the other mixer. The convolution has taps alone. In the terms of Mamba-2, the queries of a
  state space are C, its keys B, its values x, and the key heads are groups.
  """

  # The mixer of each layer is 'layers' (attention), 'delta' (the gated delta rule), 'convolution' or 'state_space'.
  # With 'mlp' or 'moe' for some, layers have one part each, and those with attention or another mixer have no MLP.
  mixers: tuple[str, ...] = ()
  key_heads: int = 0  # of queries and keys
  value_heads: int = 0  # a multiple of it
  key_size: int = 0
  value_size: int = 0
  taps: int = 0  # tokens that a convolution sees
  joined: bool = False  # one projection makes queries, keys, values and gates, by key head
  gated: bool = True  # the outputs of attention have gates, whose projection is joined to that of the queries
  beta_scale: float = 1.0  # multiplies the steps of the delta rule; 2: its eigenvalues may be negative
  # Rank of the projections of gates and decays in Kimi Delta Attention, where each channel of a key decays by itself;
  # 0: they have full ranks, and a head has one decay.
  gate_rank: int = 0
  out_norm_eps: float = 0.0  # of the norm behind the delta rule; 0: `norm_eps`
  step_min: float = 0.0  # least step of a state space
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
    # A state is read by the query and added to; the gated delta rule reads it by the key, too.
    passes = 2.0 * self.mixers.count('state_space') + 3.0 * self.mixers.count('delta')
    return 2 * passes * self.value_heads * self.key_size * self.value_size

  def place_of_experts(self, layer: int) -> int | None:
    if not self.single:
      return super().place_of_experts(layer)
    return self.mixers[:layer].count('moe') if self.mixers[layer] == 'moe' else None

  def place_in_cache(self, layer: int) -> int:
    return self.mixers[:layer].count(self.mixers[layer])
