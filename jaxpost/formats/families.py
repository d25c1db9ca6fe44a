"""The table of families: an entry of `FAMILIES` for each `model_type` of config.json.

A new family is one entry in the table below; `family.Family` explains its fields, each a difference from Llama
(docs/models.md, "Adding a family"). Only this file knows the families' names. A field of config.json that no family
has yet needs a line in a dictionary that gives its meaning, in `family` (`SCALARS`, `BIASES`) or `config_fields`
(`_NEUTRAL`), and one for its type in `config_fields` (`_INTEGERS`, `_POSITIVE` or `_BOOLEANS`).
"""

import dataclasses
from typing import Any

from jaxpost.errors import InputError
from jaxpost.formats.family import DEEPSEEK_ROUTER, MULTIPLIERS, TAKEN_BY_EXPERTS, ExpertFields, Family, fused_experts

# Groups of fields that several families read.
_LAYERS = ('sliding_window', 'layer_types')
_QWEN_LAYERS = (*_LAYERS, 'use_sliding_window', 'max_window_layers')
_SCALED_ATTENTION = ('query_pre_attn_scalar', 'attn_logit_softcapping', 'final_logit_softcapping')

# Facts that several families share.
_GEMMA = dict(norm_offset=1.0, embed_scale='sqrt')  # of hidden_size
_TANH = 'gelu_pytorch_tanh'
# A general name of the number of experts, which files of any family may use.
_EXPERTS = {'num_local_experts': 'num_experts'}
_QKV = ('q', 'k', 'v')
_GLM = Family(
  biases=dict(attention_bias=_QKV),
  reads=('attention_bias', 'partial_rotary_factor'),
  defaults=dict(partial_rotary_factor=0.5, max_position_embeddings=131_072),
)
_QWEN_DEFAULTS = dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=28, max_position_embeddings=32_768)

_MIXTRAL_NAMES = {'mlp': 'block_sparse_moe', 'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'}
_ERNIE_DEFAULTS = dict(rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True, max_position_embeddings=131_072)
_ERNIE_ROUTER = ExpertFields(
  num='moe_num_experts',
  size='moe_intermediate_size',
  normalize=True,
  shared='moe_num_shared_experts',
  first_dense='moe_layer_start_index',
  choice_bias=True,
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

FAMILIES = {
  'llama': Family(architecture='LlamaForCausalLM', reads=('attention_bias', 'mlp_bias')),
  'mistral': Family(
    architecture='MistralForCausalLM',
    window='all',
    reads=('sliding_window',),
    defaults=dict(num_key_value_heads=8, sliding_window=4096, max_position_embeddings=131_072),
  ),
  'ministral3': Family(
    architecture='Ministral3ForCausalLM',
    window='all',
    rope=dict(rope_type='yarn', rope_theta=1e6, factor=16.0, original_max_position_embeddings=16_384)
    | dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
    reads=('sliding_window', 'llama_4_scaling_beta'),
    defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=262_144),
  ),
  'qwen2': Family(
    architecture='Qwen2ForCausalLM',
    fixed=dict(biases=_QKV),
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
    lost_adapters=TAKEN_BY_EXPERTS,
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
    names=_MIXTRAL_NAMES,
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
    fused=fused_experts('model.layers.{}.mlp.experts.%s_proj', 'interleaved', kinds=('', '_bias')),
    rope=dict(rope_type='yarn', factor=32.0, original_max_position_embeddings=4096)
    | dict(beta_fast=32.0, beta_slow=1.0, truncate=False),
    reads=('attention_bias', *_LAYERS),
    # OpenAI's files repeat fields under these names.
    ignored=('experts_per_token', 'initial_context_length', 'quantization_config'),
    defaults=dict(num_key_value_heads=8, head_dim=64, sliding_window=128, attention_bias=True, rms_norm_eps=1e-5)
    | dict(rope_theta=150_000.0, max_position_embeddings=131_072, num_local_experts=128, num_experts_per_tok=4)
    | dict(swiglu_limit=7.0, swiglu_alpha=1.702),
  ),
  'gemma': Family(
    architecture='GemmaForCausalLM',
    fixed=_GEMMA,
    reads=('attention_bias',),
    activations={'gelu': 'gelu_tanh'},  # its files say 'gelu' for the tanh form, for historic reasons
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
    only=dict(attn_logit_softcapping=None),  # transformers has the field and does not read it
    reads=('attention_bias', *_LAYERS, 'query_pre_attn_scalar', 'final_logit_softcapping', 'sliding_window_pattern'),
    defaults=_GEMMA2.defaults
    | dict(rope_theta=1e6, rope_local_base_freq=1e4, max_position_embeddings=131_072)
    | dict(attn_logit_softcapping=None, final_logit_softcapping=None),
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
    lost_adapters=TAKEN_BY_EXPERTS,
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
    # Microsoft's folders name custom code, which is never run.
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
  'seed_oss': Family(
    architecture='SeedOssForCausalLM',
    biases=dict(attention_bias=_QKV, attention_out_bias=('o',)),
    reads=('attention_bias', 'attention_out_bias', 'mlp_bias'),
    ignored=('residual_dropout',),
    defaults=dict(num_key_value_heads=8, head_dim=128, attention_bias=True, max_position_embeddings=524_288),
  ),
  'hunyuan_v1_dense': Family(
    architecture='HunYuanDenseV1ForCausalLM',
    fixed=dict(qk_norm='rotated'),
    rope_types={'dynamic': 'ntk_alpha'},
    names={'q_norm': 'query_layernorm', 'k_norm': 'key_layernorm'},
    reads=('attention_bias',),
    ignored=('eod_token_id',),
    defaults=dict(rms_norm_eps=1e-5),
  ),
  'ernie4_5': Family(
    architecture='Ernie4_5ForCausalLM',
    interleaved=True,
    biases=dict(use_bias=(*_QKV, 'o', 'gate', 'up', 'down')),
    reads=('use_bias',),
    defaults=_ERNIE_DEFAULTS | dict(num_key_value_heads=2, head_dim=128),
  ),
  'ernie4_5_moe': Family(
    architecture='Ernie4_5_MoeForCausalLM',
    interleaved=True,
    extra_layers=True,
    lost_adapters=TAKEN_BY_EXPERTS,
    experts=_ERNIE_ROUTER,
    names={'gate.e_score_correction_bias': 'moe_statics.e_score_correction_bias'},
    rows=('layers/router_choice',),
    aliases={'moe_k': 'num_experts_per_tok', 'num_experts': 'moe_num_experts'},
    only=dict(moe_layer_interval=1),
    reads=('moe_layer_end_index',),
    ignored=('moe_norm_min',),
    reported=('num_nextn_predict_layers', 'auto_map'),
    defaults=_ERNIE_DEFAULTS
    | dict(num_key_value_heads=4, num_experts_per_tok=6, moe_num_experts=64, moe_num_shared_experts=2)
    | dict(moe_intermediate_size=1536, moe_layer_start_index=1),
  ),
  'glm4': dataclasses.replace(
    _GLM,
    architecture='Glm4ForCausalLM',
    fixed=dict(norms='both'),
    interleaved=True,
    names={
      'post_attention_layernorm': 'post_self_attn_layernorm',
      'pre_feedforward_layernorm': 'post_attention_layernorm',
      'post_feedforward_layernorm': 'post_mlp_layernorm',
      **dict.fromkeys(('gate_proj', 'up_proj'), 'gate_up_proj'),
    },
    defaults=_GLM.defaults | dict(num_key_value_heads=2, head_dim=128, attention_bias=True, rms_norm_eps=1.5625e-7),
  ),
  'glm4_moe': dataclasses.replace(
    _GLM,
    architecture='Glm4MoeForCausalLM',
    fixed=dict(qk_norm='head'),
    extra_layers=True,
    predictor={},
    lost_adapters=TAKEN_BY_EXPERTS,
    experts=DEEPSEEK_ROUTER,
    aliases={'num_local_experts': 'n_routed_experts'},
    reads=(*_GLM.reads, 'use_qk_norm'),
    reported=('num_nextn_predict_layers', 'num_mtp_layers'),
    defaults=_GLM.defaults
    | dict(num_key_value_heads=8, rms_norm_eps=1e-5, use_qk_norm=False, num_experts_per_tok=8, n_routed_experts=128)
    | dict(moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)
    | dict(norm_topk_prob=True, routed_scaling_factor=1.0),
  ),
  'minimax_m2': Family(
    architecture='MiniMaxM2ForCausalLM',
    fixed=dict(qk_norm='wide'),
    experts=ExpertFields(
      num='num_local_experts', size='intermediate_size', normalize=True, sigmoid=True, choice_bias=True
    ),
    names=_MIXTRAL_NAMES | {'gate.e_score_correction_bias': 'e_score_correction_bias'},
    aliases={'num_experts': 'num_local_experts'},
    only=dict(scoring_func='sigmoid', use_routing_bias=True, use_qk_norm=True, qk_norm_type='per_layer'),
    reads=('partial_rotary_factor', 'rotary_dim'),
    reported=('auto_map', 'attn_type_list', 'use_mtp'),
    defaults=dict(num_key_value_heads=8, head_dim=128, rope_theta=5e6, max_position_embeddings=196_608)
    | dict(num_experts_per_tok=8, num_local_experts=256),
  ),
  'granite': Family(
    architecture='GraniteForCausalLM',
    reads=('attention_bias', 'mlp_bias', *MULTIPLIERS),
    defaults=dict.fromkeys(MULTIPLIERS, 1.0),
  ),
}


def every() -> dict[str, Family]:
  """Returns all families: `FAMILIES`, and those with layers that Llama lacks, whose tables are imported on demand."""
  from jaxpost.formats import hybrid_families, other_families

  return FAMILIES | other_families.FAMILIES | hybrid_families.FAMILIES


def find(model_type: object, where: str) -> Family:
  """Returns the family of a `model_type`; InputError, which lists the supported ones, if there is none."""
  if isinstance(model_type, str) and (family := FAMILIES.get(model_type) or every().get(model_type)):
    return family
  from jaxpost.formats.other_families import NOT_BUILT

  if isinstance(model_type, str) and model_type in NOT_BUILT:
    hint = f': it needs {NOT_BUILT[model_type]}'
  elif model_type == 'custom':
    hint = '; name the code of your own model in config.model.preset, too'
  else:
    hint = f'; supported: {", ".join(every())}'
  raise InputError(f'{where}: model_type {model_type!r} is not supported{hint}')


def of_model(family: str) -> Family:
  """Returns the family named `ModelConfig.family`; for custom models, one without differences from Llama."""
  return FAMILIES.get(family) or every().get(family, Family())


def own_fields(family: Family) -> Any:
  """Returns the module that reads and writes the fields of layers that Llama lacks; None if there are none.

  Its read(raw, cfg, where, family) returns the config of a folder, from the common fields `cfg` and its config.json
  `raw`. The inverse is write(cfg, family). Some modules also have completed(raw, family, where), which derives fields
  that are left out. Both readers raise InputError, which names the field, for values that are impossible or not
  supported.
  """
  module: Any = None
  if family.hybrid:
    from jaxpost.formats import hybrid_fields as module
  elif family.latent:
    from jaxpost.formats import latent_fields as module
  elif family.mixed:
    from jaxpost.formats import mixed_fields as module
  elif family.chunked:
    from jaxpost.formats import chunked_fields as module
  return module
