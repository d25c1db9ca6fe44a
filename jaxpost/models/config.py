"""What defines a decoder: numbers only, no behaviour."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Rope:
  """One set of rotary frequencies (Su et al., arXiv:2104.09864).

  `scaling` holds the (name, value) pairs of a `rope_parameters` block with
  its `rope_type` first, or nothing; `rope.py` has the formulas.
  """

  theta: float = 10_000.0
  scaling: tuple = ()


@dataclasses.dataclass(frozen=True)
class Experts:
  """The MLPs of a mixture, of which each token passes the `top_k` likeliest."""

  num: int
  top_k: int
  size: int  # of each, as `intermediate_size` is of a dense MLP
  normalize: bool = True  # the weights of those chosen add up to 1
  limit: float = 0.0  # of what the gate and the rest of SwiGLU may be; 0 none
  alpha: float = 1.0  # with a limit: gate sigmoid(alpha gate) (rest + 1)
  record: bool = False  # caches keep the chosen ones, to be replayed
  shared: int = 0  # experts, of that size, that all tokens pass besides
  # Of a router by sigmoids, with a bias that counts in the choice only: the
  # best `top_groups` of `groups` are chosen from, weights times `scale`.
  sigmoid: bool = False
  groups: int = 1
  top_groups: int = 1
  scale: float = 1.0

  def share(self, devices: int) -> float:
    """Of the tokens, those that want one of a device's experts, if all experts
    are as likely."""
    others = self.num - self.num // devices
    return 1 - math.comb(others, self.top_k) / math.comb(self.num, self.top_k)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer, in the field's terms.

  Where layers differ, `layer_ropes` and `layer_windows` have an entry each;
  an empty one says that all layers have `ropes[0]`, or see everything.
  """

  family: str  # key of families.FAMILIES
  vocab_size: int  # rows of the embedding that mean something
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  ropes: tuple[Rope, ...] = (Rope(),)
  layer_ropes: tuple[int, ...] = ()  # index into `ropes`; -1 rotates nothing
  layer_windows: tuple[int, ...] = ()  # tokens seen with its own; 0 is all
  rotary_dim: int = 0  # rotated entries of a head; 0 is all
  norms: str = 'pre'  # 'pre', 'post' or 'both' of attention and MLP
  norm_eps: float = 1e-6
  norm_offset: float = 0.0  # added to every norm scale
  qk_norm: str = ''  # '', 'head' (each by itself) or 'wide' (all heads)
  biases: tuple[str, ...] = ()  # of q, k, v, o, gate, up, down, router, sinks
  activation: str = 'silu'  # or 'gelu', 'gelu_tanh'
  tie_embeddings: bool = True
  embed_scale: float = 1.0
  residual_scale: float = 1.0  # of what attention and MLP add
  attention_scale: float = 0.0  # of query times key; 0 is 1 / sqrt(head_dim)
  attention_softcap: float = 0.0  # c: scores become c tanh(score / c); 0 none
  logit_softcap: float = 0.0  # the same for the logits
  logit_divisor: float = 1.0  # of the logits, before the cap
  max_position: int = 32_768
  experts: Experts | None = None  # in place of the MLP of each layer: `moe.py`
  initializer_range: float = 0.02
  num_labels: int = 0  # 1: a scalar head in place of the one for tokens
  value_head: bool = False  # a scalar head beside the one for tokens
  lora: tuple = ()  # or (rank, alpha, rslora, targets): `lora.py`
  vocab_multiple: int = 64  # the embedding is padded to tile and shard well

  @property
  def padded_vocab_size(self) -> int:
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

  @property
  def value_dim(self) -> int:
    return self.head_dim

  @property
  def rope_size(self) -> int:
    """Of what is rotated, entries of it that are left alone included."""
    return self.head_dim

  @property
  def cached(self) -> tuple[int, tuple[int, ...]]:
    """(heads, their sizes in keys and in values) of an entry of a cache."""
    return self.num_kv_heads, (self.head_dim, self.head_dim)

  @property
  def sparse_layers(self) -> int:
    """Those with experts, if there are any; they come last."""
    return self.num_layers

  @property
  def logit_form(self) -> tuple[float, float]:
    """(divisor, soft cap), as `losses.head_chunk.logits` takes them."""
    return self.logit_divisor, self.logit_softcap


@dataclasses.dataclass(frozen=True)
class LatentConfig(ModelConfig):
  """A decoder with latent attention, `mla.py`; `head_dim` is that of keys."""

  q_rank: int = 0  # of queries; 0: a plain projection
  kv_rank: int = 0
  rope_dim: int = 0  # entries of a head that are rotated, the last ones
  v_dim: int = 0
  first_dense: int = 0  # layers with an MLP in place of experts
  interleaved: bool = True  # rotated pairs are neighbours

  @property
  def value_dim(self) -> int:
    return self.v_dim

  @property
  def rope_size(self) -> int:
    return self.rope_dim

  @property
  def cached(self) -> tuple[int, tuple[int, ...]]:
    return 1, (self.kv_rank + self.rope_dim,)

  @property
  def sparse_layers(self) -> int:
    return self.num_layers - self.first_dense


@dataclasses.dataclass(frozen=True)
class CustomConfig:
  """A module of the user's (`custom.py`), as far as anybody has to ask.

  code: FILE.py:FUNCTION that makes it. size: its parameters. The rest is as
  in `ModelConfig`.
  """

  vocab_size: int
  hidden_size: int
  size: int
  code: str = ''
  family: str = 'custom'
  num_layers: int = 0
  num_kv_heads: int = 0
  head_dim: int = 0
  num_labels: int = 0
  value_head: bool = False
  tie_embeddings: bool = False
  logit_form: tuple[float, float] = (1.0, 0.0)
  experts: None = None
  ropes: tuple = ()
  lora: tuple = ()

  @property
  def padded_vocab_size(self) -> int:
    return self.vocab_size

  @property
  def cached(self) -> tuple[int, tuple[int, ...]]:
    return 0, ()  # nobody knows


def from_json(fields: dict) -> ModelConfig | CustomConfig:
  """What `dataclasses.asdict` and JSON made of a config, back again."""
  if 'code' in fields:
    return CustomConfig(**{k: _tuples(v) for k, v in fields.items()})
  fields = {k: _tuples(v) for k, v in fields.items()}
  experts = fields.get('experts')
  kind = LatentConfig if 'kv_rank' in fields else ModelConfig
  return kind(
    **fields | {'ropes': tuple(Rope(**rope) for rope in fields['ropes']), 'experts': experts and Experts(**experts)}
  )


def _tuples(value):
  if isinstance(value, dict):
    return {k: _tuples(v) for k, v in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
