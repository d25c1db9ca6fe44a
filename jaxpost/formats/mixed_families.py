"""Families whose attention layers are of two kinds.

Those of Gemma 4 have heads of two sizes (`mixed_fields.py`), and some of Llama 4 attend in chunks
(`chunked_fields.py`).
"""

from jaxpost.formats.family import FULL, LOCAL, ExpertFields, Family, fused_experts

_SIDE = ('hidden_size_per_layer_input', 'vocab_size_per_layer_input')
_FULL = ('global_head_dim', 'num_global_key_value_heads', 'per_layer_config', 'attention_k_eq_v')

FAMILIES = {
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
    unused=r'model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight',  # of layers that read those of others
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
