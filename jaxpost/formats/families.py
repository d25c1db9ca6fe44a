"""The table of families: an entry of `FAMILIES` for each `model_type` of config.json.

A new family is one entry in the table below; `Family` explains its fields, each a
difference from Llama (docs/models.md, "Adding a family"). Only this file knows the
families' names. What a field of config.json means is a line in a dictionary of
`config_fields` (`_SCALARS`, `_BIASES`, `_NEUTRAL`; its type in `_INTEGERS`, `_POSITIVE` or
`_BOOLEANS`): a field that no family has yet is one more line there.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxpost.errors import InputError
from jaxpost.formats import latent_fields

if TYPE_CHECKING:
  from collections.abc import Mapping


def _mapping() -> Any:
  return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ExpertFields:
  """Names of the fields of config.json that describe a mixture of experts.

  The number of experts per token is `num_experts_per_tok` in all families.
  """

  num: str  # number of routed experts
  size: str  # intermediate size of one expert
  normalize: bool | None = None  # the chosen weights sum to 1; None: `norm_topk_prob` says
  limit: str = ''  # clipping of SwiGLU, '' where the family has none
  alpha: str = ''  # slope of its gate

  @property
  def fields(self) -> tuple[str, ...]:
    """Fields of config.json that describe the experts and that Llama lacks."""
    size = () if self.size == 'intermediate_size' else (self.size,)
    normalize = ('norm_topk_prob',) if self.normalize is None else ()
    clipping = (self.limit, self.alpha) if self.limit else ()
    return (self.num, 'num_experts_per_tok', *size, *normalize, *clipping)


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of decoders as data. Every field is a difference from Llama.

  The entry of `llama` itself has two more fields in `reads`: copy it for a Llama with changes.
  """

  architecture: str = ''  # its class in `transformers`, which an export names
  classifier: str = ''  # the class with a scalar head, where it is not called after `architecture`
  written_as: str = ''  # `model_type` of an export, where it is another family's

  # config.json -> ModelConfig.
  reads: tuple[str, ...] = ()  # fields that Llama lacks, besides those of `experts`; see `fields`
  defaults: Mapping[str, Any] = _mapping()  # values of fields that config.json may leave out
  fixed: Mapping[str, Any] = _mapping()  # fields of `ModelConfig` (models/config.py) alike in all its models
  aliases: Mapping[str, str] = _mapping()  # other spelling of a field -> the one that is read
  ignored: tuple[str, ...] = ()  # fields without effect
  reported: tuple[str, ...] = ()  # fields without effect here, named in a warning where they are set
  activation_field: str = 'hidden_act'
  activations: Mapping[str, str] = _mapping()  # value of that field -> ModelConfig.activation
  experts: ExpertFields | None = None
  latent: bool = False  # multi-head latent attention (models/mla.py, latent_fields.py)

  # Layers that differ. `window` is the rule for the layers that see `sliding_window`
  # tokens where no `layer_types` is given: 'all', 'upper' (from `max_window_layers`
  # on), 'no_rope' (those without rotary embeddings), or n: all but every n-th.
  window: str | int | None = None
  local_rope: str = ''  # field with the rope base of sliding-window layers, which is never scaled
  rope_types: Mapping[str, str] = _mapping()  # other names of rope types

  # Tensors.
  names: Mapping[str, str] = _mapping()  # Llama's module -> the family's; parameters of one name are its rows
  # Parameter -> (tensor, first, step): all experts are in one tensor, which is not
  # transposed, and the parameter is every `step`-th entry of its last dimension.
  fused: Mapping[str, tuple[str, int, int]] = _mapping()
  quantized: str = ''  # a `quant_method` that can be read
  extra_layers: bool = False  # folders may hold layers for multi-token prediction, which are not read

  @property
  def fields(self) -> tuple[str, ...]:
    """Fields of config.json that Llama lacks; the *_fields.py modules say what each means."""
    return (*self.reads, *(self.experts.fields if self.experts else ()))


# ------------------------------------------------------------------ the table

# Groups of fields that several families read.
_LAYERS = ('sliding_window', 'layer_types')
_QWEN_LAYERS = (*_LAYERS, 'use_sliding_window', 'max_window_layers')
_SCALED_ATTENTION = ('query_pre_attn_scalar', 'attn_logit_softcapping', 'final_logit_softcapping')
_MULTIPLIERS = ('embedding_multiplier', 'residual_multiplier', 'attention_multiplier', 'logits_scaling')

# Facts that several families share.
_GEMMA = dict(norm_offset=1.0, embed_scale='sqrt')  # of hidden_size
_TANH = 'gelu_pytorch_tanh'
# The general name of the number of experts, which files of any family may have.
_EXPERTS = {'num_local_experts': 'num_experts'}
_QWEN_DEFAULTS = dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=28, max_position_embeddings=32_768)

_DEEPSEEK_ATTENTION = dict(
  kv_lora_rank=512,
  q_lora_rank=1536,
  qk_rope_head_dim=64,
  qk_nope_head_dim=128,
  v_head_dim=128,
  rope_interleave=True,
  max_position_embeddings=4096,
)
_DEEPSEEK_EXPERTS = dict(
  first_k_dense_replace=3,
  moe_intermediate_size=2048,
  n_shared_experts=1,
  n_routed_experts=256,
  num_experts_per_tok=8,
  n_group=8,
  topk_group=4,
  norm_topk_prob=True,
  routed_scaling_factor=2.5,
)
_DEEPSEEK = Family(
  architecture='DeepseekV3ForCausalLM',
  latent=True,
  extra_layers=True,
  experts=ExpertFields(num='n_routed_experts', size='moe_intermediate_size'),
  reads=latent_fields.READS,
  aliases={'num_local_experts': 'n_routed_experts'},
  # qk_head_dim is the sum of two others.
  ignored=(*latent_fields.FIXED, 'ep_size', 'aux_loss_alpha', 'seq_aux', 'qk_head_dim'),
  # Modules that predict several tokens at once are not read.
  reported=('num_nextn_predict_layers', 'num_mtp_layers', 'auto_map'),
  defaults=_DEEPSEEK_ATTENTION | _DEEPSEEK_EXPERTS,
)

_GEMMA2 = Family(
  architecture='Gemma2ForCausalLM',
  activation_field='hidden_activation',
  fixed=_GEMMA | dict(norms='both'),
  window=2,
  reads=('attention_bias', *_LAYERS, *_SCALED_ATTENTION),
  defaults=dict(
    num_key_value_heads=4,
    head_dim=256,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    hidden_activation=_TANH,
    sliding_window=4096,
    query_pre_attn_scalar=256,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
  ),
)

# A tensor has gate and up in turn: gate is every second entry from 0 on, up from 1 on.
_GPT_OSS_EXPERTS = {
  f'layers/{name}{kind}': (f'model.layers.{{}}.mlp.experts.{tensor}_proj{kind}', first, step)
  for name, tensor, first, step in (('gate', 'gate_up', 0, 2), ('up', 'gate_up', 1, 2), ('down', 'down', 0, 1))
  for kind in ('', '_bias')
}
_GPT_OSS_DEFAULTS = dict(
  num_key_value_heads=8,
  head_dim=64,
  sliding_window=128,
  attention_bias=True,
  rms_norm_eps=1e-5,
  rope_theta=150_000.0,
  max_position_embeddings=131_072,
  num_local_experts=128,
  num_experts_per_tok=4,
  swiglu_limit=7.0,
  swiglu_alpha=1.702,
)

FAMILIES = {
  'deepseek_v3': _DEEPSEEK,
  'kimi_k2': dataclasses.replace(_DEEPSEEK, written_as='deepseek_v3'),
  'llama': Family(architecture='LlamaForCausalLM', reads=('attention_bias', 'mlp_bias')),
  'mistral': Family(
    architecture='MistralForCausalLM',
    window='all',
    reads=('sliding_window',),
    defaults=dict(num_key_value_heads=8, sliding_window=4096, max_position_embeddings=131_072),
  ),
  'qwen2': Family(
    architecture='Qwen2ForCausalLM',
    fixed=dict(biases=('q', 'k', 'v')),
    window='upper',
    reads=_QWEN_LAYERS,
    defaults=_QWEN_DEFAULTS,
  ),
  'qwen3': Family(
    architecture='Qwen3ForCausalLM',
    fixed=dict(qk_norm='head'),
    window='upper',
    reads=('attention_bias', *_QWEN_LAYERS),
    defaults=_QWEN_DEFAULTS | dict(head_dim=128),
  ),
  'qwen3_moe': Family(
    architecture='Qwen3MoeForCausalLM',
    fixed=dict(qk_norm='head'),
    experts=ExpertFields(num='num_experts', size='moe_intermediate_size'),
    aliases=_EXPERTS,
    window='all',
    reads=('attention_bias', 'use_sliding_window', 'sliding_window'),
    defaults=dict(
      num_key_value_heads=4,
      sliding_window=4096,
      max_position_embeddings=32_768,
      num_experts=128,
      num_experts_per_tok=8,
      moe_intermediate_size=768,
      norm_topk_prob=False,
    ),
  ),
  'mixtral': Family(
    architecture='MixtralForCausalLM',
    window='all',
    experts=ExpertFields(num='num_local_experts', size='intermediate_size', normalize=True),
    names={'mlp': 'block_sparse_moe', 'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'},
    reads=('sliding_window',),
    defaults=dict(
      num_key_value_heads=8,
      rms_norm_eps=1e-5,
      rope_theta=1e6,
      max_position_embeddings=131_072,
      num_local_experts=8,
      num_experts_per_tok=2,
    ),
  ),
  'gpt_oss': Family(
    architecture='GptOssForCausalLM',
    window=2,
    quantized='mxfp4',
    fixed=dict(biases=('router', 'gate', 'up', 'down', 'sinks')),
    experts=ExpertFields(
      num='num_local_experts', size='intermediate_size', normalize=True, limit='swiglu_limit', alpha='swiglu_alpha'
    ),
    names={'gate': 'router'},
    fused=_GPT_OSS_EXPERTS,
    reads=('attention_bias', *_LAYERS),
    # Spellings of what is read besides, in the files of OpenAI.
    ignored=('experts_per_token', 'initial_context_length', 'quantization_config'),
    defaults=_GPT_OSS_DEFAULTS,
  ),
  'gemma': Family(
    architecture='GemmaForCausalLM',
    fixed=_GEMMA,
    reads=('attention_bias',),
    activations={'gelu': 'gelu_tanh'},  # what it says for historic reasons
    defaults=dict(
      num_key_value_heads=16, head_dim=256, tie_word_embeddings=True, max_position_embeddings=8192, hidden_act=_TANH
    ),
  ),
  'gemma2': _GEMMA2,
  'gemma3_text': dataclasses.replace(
    _GEMMA2,
    architecture='Gemma3ForCausalLM',
    classifier='Gemma3TextForSequenceClassification',
    ignored=('_sliding_window_pattern',),
    fixed=_GEMMA | dict(norms='both', qk_norm='head'),
    window=6,
    local_rope='rope_local_base_freq',
    reads=(*_GEMMA2.reads, 'sliding_window_pattern'),
    defaults=_GEMMA2.defaults
    | dict(
      rope_theta=1e6,
      rope_local_base_freq=1e4,
      max_position_embeddings=131_072,
      attn_logit_softcapping=None,
      final_logit_softcapping=None,
    ),
  ),
  'olmo2': Family(
    architecture='Olmo2ForCausalLM',
    reads=('attention_bias',),
    fixed=dict(norms='post', qk_norm='wide'),
    defaults=dict(rms_norm_eps=1e-5),
  ),
  'olmo3': Family(
    architecture='Olmo3ForCausalLM',
    window=4,
    local_rope='rope_theta',
    fixed=dict(norms='post', qk_norm='wide'),
    reads=('attention_bias', *_LAYERS),
    defaults=dict(rms_norm_eps=1e-5, rope_theta=5e5, sliding_window=4096),
  ),
  'olmoe': Family(
    architecture='OlmoeForCausalLM',
    fixed=dict(qk_norm='wide'),
    experts=ExpertFields(num='num_experts', size='intermediate_size'),
    aliases=_EXPERTS,
    reads=('attention_bias',),
    defaults=dict(
      rms_norm_eps=1e-5, max_position_embeddings=4096, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False
    ),
  ),
  'phi3': Family(
    architecture='Phi3ForCausalLM',
    window='all',
    reads=('sliding_window', 'partial_rotary_factor', 'original_max_position_embeddings'),
    names={
      **dict.fromkeys(('q_proj', 'k_proj', 'v_proj'), 'qkv_proj'),
      **dict.fromkeys(('gate_proj', 'up_proj'), 'gate_up_proj'),
    },
    rope_types={'su': 'longrope', 'yarn': 'longrope'},
    # Microsoft's folders name code of their own, which is never run.
    reported=('auto_map',),
    ignored=('embd_pdrop', 'resid_pdrop'),
    defaults=dict(rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096),
  ),
  'smollm3': Family(
    architecture='SmolLM3ForCausalLM',
    window='no_rope',
    reads=('attention_bias', 'mlp_bias', *_LAYERS, 'use_sliding_window', 'no_rope_layers', 'no_rope_layer_interval'),
    defaults=dict(
      num_key_value_heads=4,
      tie_word_embeddings=True,
      rope_theta=2e6,
      max_position_embeddings=32_768,
      no_rope_layer_interval=4,
    ),
  ),
  'granite': Family(
    architecture='GraniteForCausalLM',
    reads=('attention_bias', 'mlp_bias', *_MULTIPLIERS),
    defaults=dict.fromkeys(_MULTIPLIERS, 1.0),
  ),
}


def find(model_type: object, where: str) -> Family:
  """Returns the family of a config.json, or raises InputError naming those there are."""
  if isinstance(model_type, str) and model_type in FAMILIES:
    return FAMILIES[model_type]
  if model_type == 'custom':
    hint = '; name the code of your own model in config.model.preset, too'
  else:
    hint = f'; supported: {", ".join(FAMILIES)}'
  raise InputError(f'{where}: model_type {model_type!r} is not supported{hint}')


def of_model(family: str) -> Family:
  """Returns the family of `ModelConfig.family`; that of custom models has no differences."""
  return FAMILIES.get(family, Family())
