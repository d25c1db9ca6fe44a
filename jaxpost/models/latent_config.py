"""The configuration record of decoders with multi-head latent attention."""

import dataclasses

from jaxpost.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class LatentConfig(ModelConfig):
  """A decoder with multi-head latent attention in all layers (`mla.py`).

  `head_dim` is the head size of queries and keys. With `index_topk`, attention is to that many keys that an indexer
  chooses (`sparse_attention.py`).
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
    return 1, (self.kv_rank + self.rope_dim, *(self.index_dim,) * bool(self.index_topk))

  @property
  def layer_widths(self) -> tuple[int, ...]:
    return tuple(x + self.index_heads * self.index_dim // self.num_heads for x in super().layer_widths)
