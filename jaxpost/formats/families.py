"""The table of families: an entry of `FAMILIES` for each `model_type` of config.json.

A new family is one entry here (docs/models.md, "Adding a family"). Only this file
knows the families' names; the fields of an entry are explained in `family.Family`.
"""

import dataclasses

from jaxpost.errors import InputError
from jaxpost.formats.family import ExpertFields, Family
from jaxpost.models import mla

_WINDOW = ('sliding_window', 'layer_types')
_QWEN = (*_WINDOW, 'use_sliding_window', 'max_window_layers')
_GEMMA = dict(norm_offset=1.0, embed_scale='sqrt')  # of hidden_size

_DEEPSEEK = Family(
  architecture='DeepseekV3ForCausalLM',
  latent=True,
  extra_layers=True,
  experts=ExpertFields(num='n_routed_experts', size='moe_intermediate_size'),
  reads=mla.READS,
  aliases={'num_local_experts': 'n_routed_experts'},
  ignored=(*mla.ONLY, 'ep_size', 'aux_loss_alpha', 'seq_aux', 'qk_head_dim'),  # the sum of two others
  # Modules that predict several tokens at once are not read.
  reported=('num_nextn_predict_layers', 'num_mtp_layers', 'auto_map'),
  defaults=dict(
    moe_intermediate_size=2048,
    n_shared_experts=1,
    n_routed_experts=256,
    routed_scaling_factor=2.5,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_rope_head_dim=64,
    v_head_dim=128,
    qk_nope_head_dim=128,
    n_group=8,
    topk_group=4,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    norm_topk_prob=True,
    rope_interleave=True,
    max_position_embeddings=4096,
  ),
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
    reads=_QWEN,
    defaults=dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=28, max_position_embeddings=32_768),
  ),
  'qwen3': Family(
    architecture='Qwen3ForCausalLM',
    fixed=dict(qk_norm='head'),
    window='upper',
    reads=('attention_bias', *_QWEN),
    defaults=dict(
      num_key_value_heads=32, sliding_window=4096, max_window_layers=28, max_position_embeddings=32_768, head_dim=128
    ),
  ),
  'qwen3_moe': Family(
    architecture='Qwen3MoeForCausalLM',
    fixed=dict(qk_norm='head'),
    experts=ExpertFields(num='num_experts', size='moe_intermediate_size'),
    aliases={'num_local_experts': 'num_experts'},
    window='all',
    reads=(
      'attention_bias',
      'use_sliding_window',
      'sliding_window',
      'num_experts',
      'num_experts_per_tok',
      'moe_intermediate_size',
      'norm_topk_prob',
    ),
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
    reads=('sliding_window', 'num_local_experts', 'num_experts_per_tok'),
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
    fused={
      f'layers/{name}{kind}': (f'model.layers.{{}}.mlp.experts.{where}_proj{kind}', first, step)
      for name, where, first, step in (('gate', 'gate_up', 0, 2), ('up', 'gate_up', 1, 2), ('down', 'down', 0, 1))
      for kind in ('', '_bias')
    },
    reads=('attention_bias', *_WINDOW, 'num_local_experts', 'num_experts_per_tok', 'swiglu_limit', 'swiglu_alpha'),
    # Spellings of what is read besides, in the files of OpenAI.
    ignored=('experts_per_token', 'initial_context_length', 'quantization_config'),
    defaults=dict(
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
    ),
  ),
  'gemma': Family(
    architecture='GemmaForCausalLM',
    fixed=_GEMMA,
    reads=('attention_bias',),
    activations={'gelu': 'gelu_tanh'},  # what it says for historic reasons
    defaults=dict(
      num_key_value_heads=16,
      head_dim=256,
      tie_word_embeddings=True,
      max_position_embeddings=8192,
      hidden_act='gelu_pytorch_tanh',
    ),
  ),
  'gemma2': Family(
    architecture='Gemma2ForCausalLM',
    activation_field='hidden_activation',
    fixed=_GEMMA | dict(norms='both'),
    window=2,
    reads=('attention_bias', *_WINDOW, 'query_pre_attn_scalar', 'attn_logit_softcapping', 'final_logit_softcapping'),
    defaults=dict(
      num_key_value_heads=4,
      head_dim=256,
      tie_word_embeddings=True,
      max_position_embeddings=8192,
      hidden_activation='gelu_pytorch_tanh',
      sliding_window=4096,
      query_pre_attn_scalar=256,
      attn_logit_softcapping=50.0,
      final_logit_softcapping=30.0,
    ),
  ),
  'gemma3_text': Family(
    architecture='Gemma3ForCausalLM',
    classifier='Gemma3TextForSequenceClassification',
    ignored=('_sliding_window_pattern',),
    activation_field='hidden_activation',
    fixed=_GEMMA | dict(norms='both', qk_norm='head'),
    window=6,
    local_rope='rope_local_base_freq',
    reads=(
      'attention_bias',
      *_WINDOW,
      'query_pre_attn_scalar',
      'attn_logit_softcapping',
      'final_logit_softcapping',
      'sliding_window_pattern',
    ),
    defaults=dict(
      num_key_value_heads=4,
      head_dim=256,
      tie_word_embeddings=True,
      rope_theta=1e6,
      rope_local_base_freq=1e4,
      sliding_window=4096,
      max_position_embeddings=131_072,
      hidden_activation='gelu_pytorch_tanh',
      query_pre_attn_scalar=256,
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
    reads=('attention_bias', *_WINDOW),
    defaults=dict(rms_norm_eps=1e-5, rope_theta=5e5, sliding_window=4096),
  ),
  'olmoe': Family(
    architecture='OlmoeForCausalLM',
    fixed=dict(qk_norm='wide'),
    experts=ExpertFields(num='num_experts', size='intermediate_size'),
    aliases={'num_local_experts': 'num_experts'},
    reads=('attention_bias', 'num_experts', 'num_experts_per_tok', 'norm_topk_prob'),
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
    reads=('attention_bias', 'mlp_bias', *_WINDOW, 'use_sliding_window', 'no_rope_layers', 'no_rope_layer_interval'),
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
    reads=(
      'attention_bias',
      'mlp_bias',
      'embedding_multiplier',
      'residual_multiplier',
      'attention_multiplier',
      'logits_scaling',
    ),
    defaults=dict(embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0, logits_scaling=1.0),
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
