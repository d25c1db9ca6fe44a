"""Families of decoders as data: the record that describes a family, and fields of config.json that families share.

`families.py` has the table of families. Both `config_json` and `config_export` use this module.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

FULL, LOCAL = 'full_attention', 'sliding_attention'  # of `layer_types`
ORIGINAL = 'original_max_position_embeddings'
QUERY_SCALE = 'llama_4_scaling_beta'  # among the rope parameters; it scales queries by position
# Value of `hidden_act` -> ModelConfig.activation.
ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'gelu_new': 'gelu_tanh',
}
# Fields that say which projections have biases; `Family.biases` replaces entries.
BIASES = {'attention_bias': ('q', 'k', 'v', 'o'), 'mlp_bias': ('gate', 'up', 'down')}


class Scalar(NamedTuple):
  """A number of ModelConfig, and how it is computed from config.json and back."""

  name: str
  read: Callable = float
  write: Callable = float


def _rounded(x: float) -> float | int:
  """Removes the rounding error of a power, so that 64 is written as 64."""
  x = float(f'{x:.12g}')
  return int(x) if x == int(x) else x


_OFF = (lambda x: x or 0.0), (lambda y: y or None)  # 0 here is null in config.json

SCALARS = {
  'query_pre_attn_scalar': Scalar('attention_scale', lambda x: x**-0.5, lambda y: _rounded(y**-2)),
  'attention_multiplier': Scalar('attention_scale'),
  'attn_logit_softcapping': Scalar('attention_softcap', *_OFF),
  'final_logit_softcapping': Scalar('logit_softcap', *_OFF),
  'logits_scaling': Scalar('logit_divisor'),
  'embedding_multiplier': Scalar('embed_scale'),
  'residual_multiplier': Scalar('residual_scale'),
}


def _mapping() -> Any:
  return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ExpertFields:
  """Names of the fields of config.json that describe a mixture of experts.

  The number of experts per token is `num_experts_per_tok` in all families. A name is ''
  if the family has no such field.
  """

  num: str  # number of routed experts
  size: str  # intermediate size of one expert
  normalize: bool | None = None  # the chosen weights sum to 1; None: read `norm_topk_prob`
  limit: str = ''  # clipping of SwiGLU
  alpha: str = ''  # slope of the gate of SwiGLU
  shared: str = ''  # number of shared experts
  first_dense: str = ''  # number of leading layers with a dense MLP
  grouped: bool = False  # experts are chosen within groups: `n_group`, `topk_group`
  scaled: bool = False  # weights are multiplied by `routed_scaling_factor`
  sigmoid: bool = False  # scores are sigmoids instead of a softmax
  choice_bias: bool = False  # a bias per expert affects which are chosen, not their weights
  epsilon: float = 1e-20  # added to the sum of the chosen sigmoids
  optional: bool = False  # 0 experts: all layers are dense
  switch: str = ''  # a field that is false where all layers are dense

  @property
  def fields(self) -> tuple[str, ...]:
    """Fields of config.json that describe the experts and that Llama lacks."""
    size = () if self.size == 'intermediate_size' else (self.size,)
    normalize = ('norm_topk_prob',) if self.normalize is None else ()
    clipping = (self.limit, self.alpha) if self.limit else ()
    groups = ('n_group', 'topk_group') if self.grouped else ()
    scale = ('routed_scaling_factor',) if self.scaled else ()
    optional = [name for name in (self.shared, self.first_dense, self.switch) if name]
    return (self.num, 'num_experts_per_tok', *size, *normalize, *clipping, *optional, *groups, *scale)


MULTIPLIERS = ('embedding_multiplier', 'residual_multiplier', 'attention_multiplier', 'logits_scaling')  # of Granite
DEEPSEEK_ROUTER = ExpertFields(
  num='n_routed_experts',
  size='moe_intermediate_size',
  shared='n_shared_experts',
  first_dense='first_k_dense_replace',
  grouped=True,
  scaled=True,
  sigmoid=True,
  choice_bias=True,
)
# Adapters of dense and shared MLPs, in families where `peft` mistakes modules of these names for experts.
TAKEN_BY_EXPERTS = r'\.mlp\.(shared_experts?\.)?(gate|up|down)_proj\.'


def fused_experts(tensor: str, order: str, *, inner: str = 'gate_up', down: str = 'down', kinds: tuple = ('',)) -> dict:
  """Returns `Family.fused` of experts with gate and up in one tensor; %s in `tensor` stands for `inner` or `down`."""
  modules = dict(gate=inner, up=inner, down=down)
  return {f'layers/{name}{kind}': (tensor % module + kind, order) for name, module in modules.items() for kind in kinds}


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of decoders as data. Every field is a difference from Llama.

  The entry of `llama` has two more fields in `reads`: start from a copy of it for a variant of Llama.
  """

  architecture: str = ''  # its class in `transformers`, which an export names
  classifier: str = ''  # the class with a scalar head, where its name does not follow from `architecture`
  written_as: str = ''  # `model_type` of an export, if it differs

  # config.json -> ModelConfig.
  reads: tuple[str, ...] = ()  # fields that Llama lacks, except those of `experts`; see `fields`
  defaults: dict[str, Any] = _mapping()  # values of fields that config.json may leave out
  fixed: dict[str, Any] = _mapping()  # fields of `ModelConfig` (models/config.py) with one value in all its models
  aliases: dict[str, str] = _mapping()  # other spelling of a field -> the one that is read
  only: dict[str, Any] = _mapping()  # fields of which one value is supported
  ignored: tuple[str, ...] = ()  # fields without effect
  reported: tuple[str, ...] = ()  # fields without effect on the model, named in a warning if they are set
  activation_field: str = 'hidden_act'
  activations: dict[str, str] = _mapping()  # value of that field -> ModelConfig.activation
  biases: dict[str, tuple[str, ...]] = _mapping()  # field -> projections with biases, where `BIASES` differs
  experts: ExpertFields | None = None
  latent: bool = False  # multi-head latent attention (models/mla.py, latent_fields.py)
  # The mixer that some layers have instead of attention: 'delta', 'convolution' or 'state_space' (models/hybrid.py,
  # hybrid_fields.py), and fields of `HybridConfig` with one value in all models.
  hybrid: str = ''
  mixer: dict[str, Any] = _mapping()
  single: bool = False  # each layer is only one of attention, another mixer, an MLP or experts
  mixed: bool = False  # attention layers of two sizes (models/mixed_attention.py, mixed_fields.py)
  chunked: bool = False  # attention in chunks, and dense layers among those with experts (chunked_fields.py)

  # Layers that differ. `window` is the rule for the layers that see `sliding_window` tokens if no `layer_types` is
  # given: 'all', 'upper' (from `max_window_layers` on), 'no_rope' (without rotary embeddings), or n: all but each n-th.
  window: Literal['all', 'upper', 'no_rope'] | int | None = None
  local_rope: str = ''  # field with the rope base of sliding-window layers, which is never scaled
  rope: dict[str, Any] = _mapping()  # rope parameters of a folder that has none
  rope_types: dict[str, str] = _mapping()  # other names of rope types
  rope_optional: bool = False  # a rope_theta of null turns rotary embeddings off
  interleaved: bool = False  # rotated pairs are adjacent entries, unless a field `rope_interleave` says otherwise

  # Tensors.
  prefix: str = 'model'  # beginning of the names of all tensors but the head
  spellings: dict[str, str] = _mapping()  # other spelling of a part of a name -> the one that is read
  names: dict[str, str] = _mapping()  # Llama's module -> the family's; parameters with one name are rows of that tensor
  # Parameter -> (tensor with all experts, order of its parameters): 'joined' one after the other along the outputs of
  # [experts, inputs, outputs], 'interleaved' entry by entry along them, or 'transposed': joined in [experts, out, in].
  fused: dict[str, tuple[str, str]] = _mapping()
  rows: tuple[str, ...] = ()  # parameters that a folder stores as matrices of one row
  quantized: str = ''  # a `quant_method` that can be read, in addition to 'fp8'
  unused: str = ''  # regular expression of tensors that folders may hold and that have no effect
  lost_adapters: str = ''  # regular expression of adapters that `peft` 0.21 drops or refuses
  extra_layers: bool = False  # folders may hold layers for multi-token prediction after the last
  # Beginnings of names in that layer -> the family's; None: its multi-token prediction cannot be trained.
  predictor: dict[str, str] | None = None

  @property
  def fields(self) -> tuple[str, ...]:
    """Fields of config.json that Llama lacks; the *_fields.py modules read them."""
    return (*self.reads, *(self.experts.fields if self.experts else ()))

  @property
  def bias_fields(self) -> dict[str, tuple[str, ...]]:
    """The projections that have biases, by the field that says so."""
    return BIASES | self.biases
