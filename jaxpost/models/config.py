"""Configuration records of decoders: numbers only, no behavior."""

import dataclasses
import math
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Rope:
  """One set of rotary frequencies (Su et al., arXiv:2104.09864).

  `scaling` holds the (name, value) pairs of the `rope_parameters` in a config.json,
  `rope_type` first, or nothing; `rope_scalings.py` has the formulas.
  """

  theta: float = 10_000.0
  scaling: tuple = ()
  interleaved: bool = False  # rotated pairs are adjacent entries
  size: int = 0  # size of the heads that it rotates; 0: `ModelConfig.rope_size`


@dataclasses.dataclass(frozen=True)
class Experts:
  """A mixture of experts: each token goes through its `top_k` experts of `num`."""

  num: int
  top_k: int
  size: int  # hidden size of an expert, as `intermediate_size` of a dense MLP
  normalize: bool = True  # the weights of the chosen experts sum to 1
  limit: float = 0.0  # gate and up projections are clipped to it (GPT-OSS); 0: not clipped
  alpha: float = 1.0  # with a limit: gate sigmoid(alpha gate) (up + 1)
  record: bool = False  # caches record the chosen experts, for routing replay
  shared: int = 0  # shared experts of that size, for all tokens
  shared_size: int = 0  # hidden size of all shared experts together; 0: shared x size
  shared_gate: bool = False  # the output of shared experts is multiplied by a gate
  first_dense: int = 0  # leading layers with a dense MLP instead of experts
  sigmoid: bool = False  # the router's scores are sigmoids (DeepSeek-V3) instead of a softmax
  choice_bias: bool = False  # a bias per expert that counts in the choice only
  # Experts are chosen from the best `top_groups` of `groups`, and their weights are multiplied by `scale`.
  groups: int = 1
  top_groups: int = 1
  scale: float = 1.0
  epsilon: float = 1e-20  # added to the sum of the chosen sigmoids
  latent: int = 0  # size of the inputs and outputs of experts, projected from and to the hidden size; 0: no projections
  on_inputs: bool = False  # the router's weights multiply the inputs of experts instead of their outputs

  def share(self, devices: int) -> float:
    """Expected fraction of tokens that are routed to a device, for a uniform router."""
    others = self.num - self.num // devices
    return 1 - math.comb(others, self.top_k) / math.comb(self.num, self.top_k)


class LayerKind(NamedTuple):
  """The properties in which layers differ; traced arrays in a scan over layers."""

  rope: int  # index of its RoPE table, -1 for none
  window: int  # sliding window in tokens, 0 for full attention


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer.

  Where layers differ, `layer_ropes` and `layer_windows` have an entry per layer;
  if they are empty, all layers use `ropes[0]` and full attention.
  """

  family: str  # key of families.FAMILIES
  vocab_size: int  # rows of the embedding without padding
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  ropes: tuple[Rope, ...] = (Rope(),)
  layer_ropes: tuple[int, ...] = ()  # index into `ropes`; -1: no rotation
  layer_windows: tuple[int, ...] = ()  # sliding window in tokens; 0: full attention
  rotary_dim: int = 0  # rotated entries of a head; 0: all
  norms: str = 'pre'  # norm before ('pre'), after ('post') or 'both' of attention and MLP
  norm_eps: float = 1e-6
  norm_offset: float = 0.0  # added to every norm scale
  qk_norm: str = ''  # '', 'wide' (over all heads) or per head: 'head', 'rotated' (after RoPE), 'unscaled' (no scale)
  biases: tuple[str, ...] = ()  # those present, of q k v o gate up down router sinks
  activation: str = 'silu'  # or 'gelu', 'gelu_tanh'; 'relu2' in MLPs without a gate
  tie_embeddings: bool = True
  embed_scale: float = 1.0
  residual_scale: float = 1.0  # multiplies the outputs of attention and MLP
  attention_scale: float = 0.0  # multiplies query times key; 0: 1 / sqrt(head_dim)
  attention_softcap: float = 0.0  # c: scores become c tanh(score / c); 0: none
  logit_softcap: float = 0.0  # the same for the logits
  logit_divisor: float = 1.0  # divides the logits, before the cap
  max_position: int = 32_768
  experts: Experts | None = None  # mixture of experts instead of a dense MLP: `moe.py`
  initializer_range: float = 0.02
  num_labels: int = 0  # 1: a scalar head instead of the language-model head
  # Beside the language-model head: 'value', a scalar head; 'mtp', which predicts the token after the next one.
  more_heads: tuple[str, ...] = ()
  lora: tuple = ()  # (rank, alpha, rslora, targets): `lora.py`
  vocab_multiple: int = 64  # the vocabulary is padded to a multiple of it

  latent = False  # multi-head latent attention (`decoder_configs.py`)
  mixed = False  # attention layers have heads of two sizes (`mixed_attention.py`)
  gated = False  # outputs of attention have gates
  chunked = False  # windows are chunks of a document (`decoder_configs.py`)

  @property
  def padded_vocab_size(self) -> int:
    """Rows of the embedding and the head, padding included."""
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

  @property
  def value_dim(self) -> int:
    """Head size of the values."""
    return self.head_dim

  @property
  def rope_size(self) -> int:
    """Size of the part of a head to which RoPE tables apply, unrotated entries included."""
    return self.head_dim

  @property
  def cached(self) -> tuple[int, tuple[int, ...]]:
    """(heads, (size of keys, size of values)) of an entry of the KV cache."""
    return self.num_kv_heads, (self.head_dim, self.head_dim)

  @property
  def layer_caches(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """`cached` of each layer that has keys and values of its own."""
    return (self.cached,) * self.num_layers

  @property
  def head_shapes(self) -> tuple[tuple[int, int, int], ...]:
    """(kv heads, head size, that of values) of each kind of attention layers."""
    return ((self.num_kv_heads, self.head_dim, self.value_dim),)

  @property
  def layer_widths(self) -> tuple[int, ...]:
    """The sum of the head sizes of keys and values, for each layer."""
    return (self.head_dim + self.value_dim,) * self.num_layers

  @property
  def sparse_layers(self) -> int:
    """Number of layers with experts, if the model has any."""
    return self.num_layers - (self.experts.first_dense if self.experts else 0)

  @property
  def layer_stacks(self) -> tuple[str, ...]:
    """The stack of parameters that each layer is in (`parameters.STACKS`)."""
    return ('dense',) * (self.num_layers - self.sparse_layers) + ('layers',) * self.sparse_layers

  @property
  def state_shapes(self) -> tuple[tuple[int, ...], ...]:
    """Shapes of the arrays in a layer's recurrent state of a sequence; () for models without such states."""
    return ()

  @property
  def state_flops(self) -> float:
    """Forward FLOPs of a token for the states of all layers."""
    return 0.0

  def place_in_cache(self, layer: int) -> int:
    """Index of a layer among those with the same kind of cache: keys and values, or recurrent states."""
    return layer

  def place_of_experts(self, layer: int) -> int | None:
    """Index of a layer among those with experts, if the model has any; None for dense layers."""
    place = layer - self.num_layers + self.sparse_layers
    return None if place < 0 else place

  @property
  def layer_kinds(self) -> list[LayerKind]:
    """The kind of each layer."""
    zeros = (0,) * self.num_layers
    return [LayerKind(*x) for x in zip(self.layer_ropes or zeros, self.layer_windows or zeros)]

  @property
  def layer_period(self) -> int:
    """Length of the shortest sequence of layers that the model repeats, by their stacks and kinds; at most all."""
    layers, count = [*zip(self.layer_stacks, self.layer_kinds)], self.num_layers
    return next(n for n in range(1, count + 1) if count % n == 0 and layers[:n] * (count // n) == layers)

  @property
  def logit_form(self) -> tuple[float, float]:
    """(divisor, soft cap), for `losses.head_chunk.logits`."""
    return self.logit_divisor, self.logit_softcap


@dataclasses.dataclass(frozen=True)
class CustomConfig:
  """Config of a custom model (`custom.py`): the fields of `ModelConfig` that other rooms read, and two of its own."""

  vocab_size: int
  hidden_size: int
  size: int  # number of parameters
  code: str = ''  # FILE.py:FUNCTION that makes the model
  family: str = 'custom'
  num_layers: int = 0
  num_kv_heads: int = 0
  head_dim: int = 0
  num_labels: int = 0
  more_heads: tuple[str, ...] = ()
  tie_embeddings: bool = False
  logit_form: tuple[float, float] = (1.0, 0.0)
  experts: None = None
  ropes: tuple = ()
  lora: tuple = ()

  max_position = 1 << 30  # this and the following are unknown
  cached = (0, ())
  layer_stacks = ()
  state_shapes = ()

  @property
  def padded_vocab_size(self) -> int:
    return self.vocab_size
