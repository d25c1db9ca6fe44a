"""The configuration record of decoders whose attention layers have two sizes of heads."""

import dataclasses

from jaxpost.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class MixedConfig(ModelConfig):
  """A decoder with sliding-window layers and full layers whose heads differ (`mixed_attention.py`).

  `head_dim` and `num_kv_heads` are those of layers with a window.
  """

  full_head_dim: int = 0  # head size of layers without a window
  full_kv_heads: int = 0
  values_are_keys: bool = False  # layers without a window: the values are the keys before norm and rotation
  shared_layers: int = 0  # the last layers, which read keys and values of an earlier layer of their kind
  wide_shared_mlp: bool = False  # the MLP of those layers is twice as wide
  side_size: int = 0  # entries of the embedding that each layer has of a token; 0: none

  mixed = True

  @property
  def layer_stacks(self) -> tuple[str, ...]:
    own = self.num_layers - self.shared_layers
    names = (('layers', 'local'), ('shared', 'local_shared'))
    return tuple(names[i >= own][bool(kind.window)] for i, kind in enumerate(self.layer_kinds))

  @property
  def head_shapes(self) -> tuple[tuple[int, int, int], ...]:
    local = (self.num_kv_heads, self.head_dim, self.head_dim)
    return local, (self.full_kv_heads, self.full_head_dim, self.full_head_dim)

  @property
  def layer_caches(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
    kinds = self.layer_kinds[: self.num_layers - self.shared_layers]
    return tuple((heads, sizes) for heads, *sizes in (self.head_shapes[not kind.window] for kind in kinds))

  @property
  def layer_widths(self) -> tuple[int, ...]:
    return tuple(2 * self.head_shapes[not kind.window][1] for kind in self.layer_kinds)

  def place_in_cache(self, layer: int) -> int:
    """Index of the layer whose keys and values this one reads."""
    own = self.num_layers - self.shared_layers
    if layer < own:
      return layer
    windows = [bool(kind.window) for kind in self.layer_kinds]
    return max(i for i in range(own) if windows[i] == windows[layer])
