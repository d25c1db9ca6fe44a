"""Families whose attention layers have heads of two sizes; `mixed_fields.py` reads their fields."""

from jaxpost.formats.family import ExpertFields, Family
from jaxpost.formats.layer_fields import FULL, LOCAL

_ROPES = {
  FULL: dict(rope_type='proportional', partial_rotary_factor=0.25, rope_theta=1e6),
  LOCAL: dict(rope_type='default', rope_theta=1e4),
}
_EXPERTS = 'model.layers.{}.experts.%s_proj'  # all experts of a layer
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
    experts=ExpertFields(
      num='num_experts', size='moe_intermediate_size', normalize=True, optional=True, switch='enable_moe_block'
    ),
    aliases={'top_k_experts': 'num_experts_per_tok'},
    names={'mlp.shared_experts': 'mlp', 'mlp.gate': 'router.proj'},
    fused={f'layers/{x}': (_EXPERTS % y, 0, -1) for x, y in dict(gate='gate_up', up='gate_up', down='down').items()},
    unused=r'model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight',  # of layers that read those of others
    reads=('sliding_window', 'layer_types', 'final_logit_softcapping', *_SIDE, *_FULL, 'use_bidirectional_attention')
    + ('num_kv_shared_layers', 'use_double_wide_mlp'),
    defaults=dict(num_key_value_heads=4, head_dim=256, global_head_dim=512, num_global_key_value_heads=None)
    | dict(tie_word_embeddings=True, max_position_embeddings=131_072, hidden_activation='gelu_pytorch_tanh')
    | dict(sliding_window=512, final_logit_softcapping=None, rope_parameters=_ROPES, attention_k_eq_v=False)
    | dict(hidden_size_per_layer_input=256, vocab_size_per_layer_input=262_144, num_kv_shared_layers=0)
    | dict(use_double_wide_mlp=False, enable_moe_block=False, num_experts=None, use_bidirectional_attention=None),
  )
}
