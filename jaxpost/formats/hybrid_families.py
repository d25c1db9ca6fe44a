"""Families whose layers have either attention or another mixer, for the table in `families.py`."""

import dataclasses

from jaxpost.formats.family import MULTIPLIERS, ExpertFields, Family

_DELTA = dict(
  linear_num_key_heads=16,
  linear_num_value_heads=32,
  linear_key_head_dim=128,
  linear_value_head_dim=128,
  linear_conv_kernel_dim=4,
  full_attention_interval=4,
)
_DEFAULTS = _DELTA | dict(partial_rotary_factor=0.25, head_dim=256, max_position_embeddings=32_768)
_EXPERTS = ExpertFields(num='num_experts', size='moe_intermediate_size')
_SIZES_OF_EXPERTS = dict(
  num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512, intermediate_size=5632
)

QWEN3_5 = Family(
  architecture='Qwen3_5ForCausalLM',
  hybrid='apart',
  fixed=dict(qk_norm='head', norm_offset=1.0),
  reads=(*_DELTA, 'partial_rotary_factor', 'layer_types'),
  # A text has the same positions in all sections of the rotary embedding.
  ignored=('attn_output_gate', 'mamba_ssm_dtype', 'rope_parameters.mrope_section', 'rope_parameters.mrope_interleaved'),
  # Modules that predict several tokens at once are not read.
  reported=('mtp_num_hidden_layers', 'mtp_use_dedicated_embeddings'),
  defaults=_DEFAULTS | dict(num_key_value_heads=4),
)
QWEN3_5_MOE = dataclasses.replace(
  QWEN3_5,
  architecture='Qwen3_5MoeForCausalLM',
  experts=dataclasses.replace(_EXPERTS, normalize=True),
  aliases={'num_local_experts': 'num_experts'},
  names={'shared_experts': 'shared_expert'},
  reads=(*QWEN3_5.reads, 'shared_expert_intermediate_size'),
  defaults=_DEFAULTS | _SIZES_OF_EXPERTS | dict(num_experts=256, num_experts_per_tok=8),
)
QWEN3_NEXT = dataclasses.replace(
  QWEN3_5_MOE,
  architecture='Qwen3NextForCausalLM',
  hybrid='joined',
  experts=_EXPERTS,
  defaults=_DEFAULTS | _SIZES_OF_EXPERTS | dict(num_experts=512, num_experts_per_tok=10, norm_topk_prob=True),
)

LFM2 = Family(
  architecture='Lfm2ForCausalLM',
  hybrid='convolution',
  fixed=dict(qk_norm='head'),
  names={
    'input_layernorm': 'operator_norm',
    'post_attention_layernorm': 'ffn_norm',
    'norm': 'embedding_norm',
    **{'mlp': 'feed_forward', 'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'},
    **{'o_proj': 'out_proj', 'q_norm': 'q_layernorm', 'k_norm': 'k_layernorm'},
  },
  aliases={'block_ff_dim': 'intermediate_size', 'tie_embedding': 'tie_word_embeddings', 'norm_eps': 'rms_norm_eps'},
  reads=('layer_types', 'full_attn_idxs', 'conv_L_cache', 'block_multiple_of')
  + ('block_auto_adjust_ff_dim', 'block_ffn_dim_multiplier'),
  # Sizes that are said twice, and initial values.
  ignored=tuple('block_dim conv_dim conv_dim_out num_heads use_pos_enc block_norm_eps block_use_swiglu'.split())
  + tuple('block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init'.split()),
  defaults=dict(num_key_value_heads=8, rope_theta=1e6, tie_word_embeddings=True, max_position_embeddings=128_000)
  | dict(conv_L_cache=3, rms_norm_eps=1e-5, block_multiple_of=256, block_ffn_dim_multiplier=1.0)
  | dict(block_auto_adjust_ff_dim=True),
)

_SPACE = dict(mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_head='auto', mamba_d_conv=4)
_SPACE_LAYERS = ('layer_types', 'layers_block_type', 'position_embedding_type', 'mamba_expand', 'time_step_limit')
_ONE = 'model.layers.{}.block_sparse_moe.%s_linear.weight'  # all experts of a layer
GRANITE_HYBRID = Family(
  architecture='GraniteMoeHybridForCausalLM',
  hybrid='state_space',
  biases=dict(mamba_conv_bias=('conv',)),
  experts=ExpertFields(num='num_local_experts', size='intermediate_size', normalize=True, optional=True),
  names={'mlp.gate': 'block_sparse_moe.router.layer', 'mlp.shared_experts': 'shared_mlp', 'mlp': 'shared_mlp'}
  | {'gate_proj': 'input_linear', 'up_proj': 'input_linear', 'down_proj': 'output_linear'},
  fused={
    f'layers/{name}': (_ONE % side, 0, -1) for name, side in dict(gate='input', up='input', down='output').items()
  },
  reads=('attention_bias', 'mamba_conv_bias', 'shared_intermediate_size', *_SPACE_LAYERS, *_SPACE, *MULTIPLIERS),
  only=dict(normalization_function='rmsnorm'),
  ignored=('mamba_chunk_size', 'init_method'),
  defaults=_SPACE
  | dict.fromkeys(MULTIPLIERS, 1.0)
  | dict(mamba_conv_bias=True, mamba_expand=2, shared_intermediate_size=1024, position_embedding_type=None)
  | dict(num_local_experts=8, num_experts_per_tok=2),
)

FAMILIES = {
  'qwen3_next': QWEN3_NEXT,
  'qwen3_5_text': QWEN3_5,
  'qwen3_5_moe_text': QWEN3_5_MOE,
  'lfm2': LFM2,
  'granitemoehybrid': GRANITE_HYBRID,
}
