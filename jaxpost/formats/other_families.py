"""Families with other attention than Llama's, for the table in `families.py`, and families that are refused by name.

DeepSeek-V3 and others have multi-head latent attention (`latent_fields.py`). Gemma 4 has heads of two sizes
(`mixed_fields.py`), and some layers of Llama 4 attend in chunks (`chunked_fields.py`).
"""

import dataclasses

from jaxpost.formats.family import (
  DEEPSEEK_ROUTER,
  FULL,
  LOCAL,
  QUERY_SCALE,
  TAKEN_BY_EXPERTS,
  ExpertFields,
  Family,
  fused_experts,
)

SIZES = ('kv_lora_rank', 'qk_rope_head_dim', 'qk_nope_head_dim', 'v_head_dim')
INDEX_SIZES = ('index_n_heads', 'index_head_dim', 'index_topk')
_SIDE = ('hidden_size_per_layer_input', 'vocab_size_per_layer_input')
_FULL = ('global_head_dim', 'num_global_key_value_heads', 'per_layer_config', 'attention_k_eq_v')

DEEPSEEK = Family(
  architecture='DeepseekV3ForCausalLM',
  latent=True,
  extra_layers=True,
  predictor={},
  lost_adapters=TAKEN_BY_EXPERTS,
  experts=DEEPSEEK_ROUTER,
  reads=(*SIZES, 'q_lora_rank', 'rope_interleave'),
  aliases={'num_local_experts': 'n_routed_experts'},
  only=dict(scoring_func='sigmoid', topk_method='noaux_tc', moe_layer_freq=1),
  # qk_head_dim is the sum of two others.
  ignored=('ep_size', 'aux_loss_alpha', 'seq_aux', 'qk_head_dim'),
  reported=('num_nextn_predict_layers', 'num_mtp_layers', 'auto_map'),
  defaults=dict(
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    rope_interleave=True,
    max_position_embeddings=4096,
    first_k_dense_replace=3,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
  ),
)

DEEPSEEK_SPARSE = dataclasses.replace(
  DEEPSEEK,
  architecture='DeepseekV32ForCausalLM',
  predictor=None,
  interleaved=True,
  reads=(*SIZES, 'q_lora_rank', *INDEX_SIZES, 'mlp_layer_types', 'indexer_types'),
  only=DEEPSEEK.only | dict(rope_interleave=True, indexer_rope_interleave=False),
  ignored=(*DEEPSEEK.ignored, 'index_topk_freq', 'index_skip_topk_offset', 'index_topk_pattern'),
  defaults=DEEPSEEK.defaults
  | dict(index_n_heads=64, index_head_dim=128, index_topk=2048, max_position_embeddings=163_840),
)

FAMILIES = {
  'deepseek_v3': DEEPSEEK,
  'deepseek_v32': DEEPSEEK_SPARSE,
  'glm_moe_dsa': dataclasses.replace(
    DEEPSEEK_SPARSE,
    architecture='GlmMoeDsaForCausalLM',
    only=DEEPSEEK_SPARSE.only | dict(indexer_rope_interleave=True),
    defaults=DEEPSEEK_SPARSE.defaults
    | dict(index_n_heads=32, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, n_group=1, topk_group=1)
    | dict(max_position_embeddings=202_752, rms_norm_eps=1e-5),
  ),
  'kimi_k2': dataclasses.replace(DEEPSEEK, written_as='deepseek_v3'),
  'mistral4': Family(
    architecture='Mistral4ForCausalLM',
    latent=True,
    experts=dataclasses.replace(DEEPSEEK_ROUTER, sigmoid=False, choice_bias=False),
    fused=fused_experts('model.layers.{}.mlp.experts.%s_proj', 'transposed'),
    rope=dict(rope_type='yarn', rope_theta=1e4, factor=128.0, original_max_position_embeddings=8192)
    | dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
    reads=(*DEEPSEEK.reads, QUERY_SCALE),
    aliases=DEEPSEEK.aliases,
    ignored=('qk_head_dim',),
    defaults=DEEPSEEK.defaults
    | dict(kv_lora_rank=256, q_lora_rank=1024, qk_nope_head_dim=64, max_position_embeddings=1_048_576)
    | dict(first_k_dense_replace=0, n_routed_experts=128, num_experts_per_tok=4, n_group=1, topk_group=1)
    | dict(routed_scaling_factor=1.0),
  ),
  'gemma4_text': Family(
    architecture='Gemma4ForCausalLM',
    mixed=True,
    activation_field='hidden_activation',
    fixed=dict(embed_scale='sqrt', norms='both', qk_norm='head', attention_scale=1.0),
    window=6,
    local_rope='rope_theta',
    rope={
      FULL: dict(rope_type='proportional', partial_rotary_factor=0.25, rope_theta=1e6),
      LOCAL: dict(rope_type='default', rope_theta=1e4),
    },
    experts=ExpertFields(
      num='num_experts', size='moe_intermediate_size', normalize=True, optional=True, switch='enable_moe_block'
    ),
    aliases={'top_k_experts': 'num_experts_per_tok'},
    names={'mlp.shared_experts': 'mlp', 'mlp.gate': 'router.proj'},
    fused=fused_experts('model.layers.{}.experts.%s_proj', 'transposed'),
    unused=r'model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight',  # of layers with shared KV
    reads=('sliding_window', 'layer_types', 'final_logit_softcapping', *_SIDE, *_FULL, 'use_bidirectional_attention')
    + ('num_kv_shared_layers', 'use_double_wide_mlp'),
    defaults=dict(num_key_value_heads=4, head_dim=256, global_head_dim=512, num_global_key_value_heads=None)
    | dict(tie_word_embeddings=True, max_position_embeddings=131_072, hidden_activation='gelu_pytorch_tanh')
    | dict(sliding_window=512, final_logit_softcapping=None, attention_k_eq_v=False)
    | dict(hidden_size_per_layer_input=256, vocab_size_per_layer_input=262_144, num_kv_shared_layers=0)
    | dict(use_double_wide_mlp=False, enable_moe_block=False, num_experts=None, use_bidirectional_attention=None),
  ),
  'llama4_text': Family(
    architecture='Llama4ForCausalLM',
    chunked=True,
    interleaved=True,
    fixed=dict(qk_norm='unscaled'),
    experts=ExpertFields(num='num_local_experts', size='intermediate_size', normalize=False, sigmoid=True),
    names={
      'mlp.shared_experts': 'feed_forward.shared_expert',
      'mlp.gate': 'feed_forward.router',
      'mlp': 'feed_forward',
    },
    fused=fused_experts('model.layers.{}.feed_forward.experts.%s_proj', 'joined'),
    reads=('attention_bias', 'use_qk_norm', 'no_rope_layers', 'no_rope_layer_interval', 'layer_types')
    + ('intermediate_size_mlp', 'moe_layers', 'interleave_moe_layer_step', 'attention_chunk_size')
    + ('attn_temperature_tuning', 'floor_scale', 'attn_scale'),
    ignored=('for_llm_compressor',),
    defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, use_qk_norm=True)
    | dict(max_position_embeddings=131_072, no_rope_layer_interval=4, attention_chunk_size=8192)
    | dict(intermediate_size=8192, intermediate_size_mlp=16_384, interleave_moe_layer_step=1)
    | dict(num_local_experts=16, num_experts_per_tok=1)
    | dict(attn_temperature_tuning=True, floor_scale=8192, attn_scale=0.1),
  ),
}

# model_type of a text model, or of the folder that holds it -> the feature that is not implemented here.
NOT_BUILT = {
  'deepseek_v2': 'groups of experts that are ranked by their best expert',
  'falcon_h1': 'attention and Mamba-2 side by side in each layer',
  'jamba': 'Mamba-1, whose decay differs by channel',
  'zamba2': 'one block of attention for several layers',
  'minimax': 'linear attention with a fixed decay (lightning attention)',
  'gemma3n_text': 'several residual streams (AltUp) and low-rank layers beside attention (LAuReL)',
  'apertus': 'an activation with trained parameters (xIELU)',
}
NOT_BUILT |= {'gemma3n': NOT_BUILT['gemma3n_text']}
