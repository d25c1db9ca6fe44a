"""The configuration record of decoders with a mixer beside attention."""

import dataclasses

from jaxpost.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class HybridConfig(ModelConfig):
  """A decoder whose layers have either attention or one other mixer of tokens (`hybrid.py`).

  The sizes are those of the other mixer. The convolution has taps alone. In the terms of Mamba-2, the queries of a
  state space are C, its keys B, its values x, and the key heads are groups.
  """

  mixers: tuple[str, ...] = ()  # of each layer: 'layers' (attention), or 'delta' (the gated delta rule), ...
  key_heads: int = 0  # of queries and keys
  value_heads: int = 0  # a multiple of it
  key_size: int = 0
  value_size: int = 0
  taps: int = 0  # tokens that a convolution sees
  joined: bool = False  # one projection makes queries, keys, values and gates, by key head
  gated: bool = True  # the outputs of attention have gates, whose projection is joined to that of the queries

  @property
  def layer_stacks(self) -> tuple[str, ...]:
    return self.mixers

  @property
  def mixer(self) -> str:
    """The mixer of the layers without attention."""
    return next(name for name in self.mixers if name != 'layers')

  @property
  def state_shapes(self) -> tuple[tuple[int, ...], ...]:
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

  def place_in_cache(self, layer: int) -> int:
    return self.mixers[:layer].count(self.mixers[layer])
