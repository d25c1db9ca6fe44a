"""What defines a decoder: numbers only, no behaviour."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer, in the field's terms.

  `rope_scaling` is () or ('llama3', factor, low_freq_factor,
  high_freq_factor, original_max_position_embeddings).
  """

  family: str  # key of families.FAMILIES
  vocab_size: int  # rows of the embedding that mean something
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 10_000.0
  rope_scaling: tuple = ()
  norm_eps: float = 1e-6
  tie_embeddings: bool = True
  qk_norm: bool = False
  max_position: int = 32_768
  initializer_range: float = 0.02
  num_labels: int = 0  # 1: a scalar head in place of the one for tokens
  value_head: bool = False  # a scalar head beside the one for tokens
  lora: tuple = ()  # or (rank, alpha, rslora, targets): `lora.py`
  vocab_multiple: int = 64  # the embedding is padded to tile and shard well

  @property
  def padded_vocab_size(self) -> int:
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
