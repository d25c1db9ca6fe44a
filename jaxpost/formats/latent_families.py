"""Families with multi-head latent attention, for the table in `families.py`; `latent_fields.py` reads their fields."""

import dataclasses

from jaxpost.formats.family import DEEPSEEK_ROUTER, QUERY_SCALE, TAKEN_BY_EXPERTS, Family, fused_experts

SIZES = ('kv_lora_rank', 'qk_rope_head_dim', 'qk_nope_head_dim', 'v_head_dim')
INDEX_SIZES = ('index_n_heads', 'index_head_dim', 'index_topk')

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

MISTRAL4 = Family(
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
  'mistral4': MISTRAL4,
}
