"""Families whose layers have either attention or another mixer, for the table in `families.py`."""

import dataclasses

from jaxpost.formats.family import DEEPSEEK_ROUTER, MULTIPLIERS, TAKEN_BY_EXPERTS, ExpertFields, Family, fused_experts
from jaxpost.formats.other_families import SIZES

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
_JOINED = {f'in_proj_{name}': 'in_proj_qkv' for name in 'qkv'} | {f'{name}_conv1d': 'conv1d' for name in 'qkv'}
_SIZES_OF_EXPERTS = dict(
  num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512, intermediate_size=5632
)
_MOE, _W = 'block_sparse_moe', {'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'}
_SPACE = dict(mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_head='auto', mamba_d_conv=4)
_SPACE_LAYERS = ('layer_types', 'layers_block_type', 'position_embedding_type', 'mamba_expand', 'time_step_limit')
_ONE = 'model.layers.{}.block_sparse_moe.%s_linear.weight'  # all experts of a layer

QWEN3_5 = Family(
  architecture='Qwen3_5ForCausalLM',
  hybrid='delta',
  names=_JOINED,
  fixed=dict(qk_norm='head', norm_offset=1.0),
  reads=(*_DELTA, 'partial_rotary_factor', 'layer_types'),
  only=dict(attn_output_gate=True),
  # Text has the same positions in all sections of the rotary embedding.
  ignored=('mamba_ssm_dtype', 'rope_parameters.mrope_section', 'rope_parameters.mrope_interleaved'),
  reported=('mtp_num_hidden_layers', 'mtp_use_dedicated_embeddings'),
  predictor={'enorm': 'mtp.pre_fc_norm_embedding', 'hnorm': 'mtp.pre_fc_norm_hidden', 'eh_proj': 'mtp.fc'}
  | {'shared_head.norm': 'mtp.norm', '': 'mtp.layers.0.'},
  defaults=_DEFAULTS | dict(num_key_value_heads=4),
)
QWEN3_5_MOE = dataclasses.replace(
  QWEN3_5,
  architecture='Qwen3_5MoeForCausalLM',
  experts=dataclasses.replace(_EXPERTS, normalize=True),
  aliases={'num_local_experts': 'num_experts'},
  names=_JOINED | {'shared_experts': 'shared_expert'},
  reads=(*QWEN3_5.reads, 'shared_expert_intermediate_size'),
  defaults=_DEFAULTS | _SIZES_OF_EXPERTS | dict(num_experts=256, num_experts_per_tok=8),
)

LFM2 = Family(
  architecture='Lfm2ForCausalLM',
  hybrid='convolution',
  mixer=dict(gated=False),
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
  # Repeated sizes, and initial values.
  ignored=tuple('block_dim conv_dim conv_dim_out num_heads use_pos_enc block_norm_eps block_use_swiglu'.split())
  + tuple('block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init'.split()),
  defaults=dict(num_key_value_heads=8, rope_theta=1e6, tie_word_embeddings=True, max_position_embeddings=128_000)
  | dict(conv_L_cache=3, rms_norm_eps=1e-5, block_multiple_of=256, block_ffn_dim_multiplier=1.0)
  | dict(block_auto_adjust_ff_dim=True),
)

FAMILIES = {
  'qwen3_next': dataclasses.replace(
    QWEN3_5_MOE,
    architecture='Qwen3NextForCausalLM',
    lost_adapters=TAKEN_BY_EXPERTS,
    mixer=dict(joined=True),
    experts=_EXPERTS,
    defaults=_DEFAULTS | _SIZES_OF_EXPERTS | dict(num_experts=512, num_experts_per_tok=10, norm_topk_prob=True),
  ),
  'qwen3_5_text': QWEN3_5,
  'qwen3_5_moe_text': QWEN3_5_MOE,
  'olmo_hybrid': Family(
    architecture='OlmoHybridForCausalLM',
    hybrid='delta',
    mixer=dict(gated=False, out_norm_eps=1e-5),
    fixed=dict(norms='post', qk_norm='wide'),
    rope_optional=True,
    names={f'in_proj_{ours}': f'{theirs}_proj' for ours, theirs in zip('qkvzba', 'qkvgba')}
    | {'linear_attn.out_proj': 'linear_attn.o_proj', 'linear_attn.norm': 'linear_attn.o_norm'}
    | {'input_layernorm': 'attention_layer_norm', 'post_attention_layernorm': 'feedforward_layer_norm'},
    # Published folders have this name in layers with attention. `transformers` reads both and writes the other one.
    spellings={'post_attention_layernorm': 'feedforward_layer_norm'},
    reads=(*_DELTA, 'layer_types', 'attention_bias', 'linear_allow_neg_eigval'),
    # Initial values.
    ignored=tuple('linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor'.split()),
    defaults={name: None for name in _DELTA if name.endswith(('heads', 'head_dim'))}
    | dict(linear_conv_kernel_dim=4, full_attention_interval=4, linear_allow_neg_eigval=True)
    | dict(max_position_embeddings=65_536),
  ),
  'kimi_linear': Family(
    architecture='KimiLinearForCausalLM',
    lost_adapters=r'\.block_sparse_moe\.|\.f_[ab]_proj\.',
    hybrid='delta',
    latent=True,
    mixer=dict(gated=False),
    extra_layers=True,
    experts=DEEPSEEK_ROUTER,
    names={f'in_proj_{name}': f'{name}_proj' for name in 'qkvb'}
    | {'linear_attn.out_proj': 'self_attn.o_proj', 'linear_attn.norm': 'self_attn.o_norm', 'linear_attn': 'self_attn'}
    | {f'mlp.experts.{{}}.{ours}': f'{_MOE}.experts.{{}}.{theirs}' for ours, theirs in _W.items()}
    | {f'mlp.{name}': f'{_MOE}.{name}' for name in ('gate', 'shared_experts')},
    # `transformers` reads both and writes the names of experts in dense layers as well.
    spellings={f'{_MOE}.{name}': f'mlp.{name}' for name in _W},
    aliases={'model_max_length': 'max_position_embeddings', 'moe_renormalize': 'norm_topk_prob'}
    | {'num_expert_group': 'n_group', 'num_experts': 'n_routed_experts', 'num_local_experts': 'n_routed_experts'}
    | {'num_experts_per_token': 'num_experts_per_tok', 'num_shared_experts': 'n_shared_experts'},
    reads=(*SIZES, 'q_lora_rank', 'layer_types', 'mlp_layer_types', 'linear_attn_config')
    + ('linear_num_heads', 'linear_head_dim', 'linear_conv_kernel_dim'),
    only=dict(mla_use_nope=True, moe_layer_freq=1, moe_router_activation_func='sigmoid', topk_method='noaux_tc')
    | dict(use_grouped_topk=True),
    ignored=('qk_head_dim',),
    reported=('num_nextn_predict_layers', 'auto_map'),
    defaults=dict(kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
    | dict(n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=1024, n_group=1)
    | dict(topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.446, rms_norm_eps=1e-5)
    | dict(max_position_embeddings=1_048_576),
  ),
  'lfm2': LFM2,
  'lfm2_moe': dataclasses.replace(
    LFM2,
    architecture='Lfm2MoeForCausalLM',
    experts=ExpertFields(
      num='num_experts',
      size='moe_intermediate_size',
      first_dense='num_dense_layers',
      sigmoid=True,
      choice_bias=True,
      scaled=True,
      epsilon=1e-6,
    ),
    names={'mlp.gate.e_score_correction_bias': 'feed_forward.expert_bias'} | LFM2.names,
    aliases=LFM2.aliases | {'num_local_experts': 'num_experts'},
    only=dict(use_expert_bias=True),
    reads=('layer_types', 'full_attn_idxs', 'conv_L_cache'),
    ignored=(),
    defaults=LFM2.defaults
    | dict(block_auto_adjust_ff_dim=False, num_dense_layers=2, num_experts=32, num_experts_per_tok=4)
    | dict(moe_intermediate_size=1792, norm_topk_prob=True, routed_scaling_factor=1.0),
  ),
  'granitemoehybrid': Family(
    architecture='GraniteMoeHybridForCausalLM',
    hybrid='state_space',
    mixer=dict(gated=False),
    biases=dict(mamba_conv_bias=('conv',)),
    experts=ExpertFields(num='num_local_experts', size='intermediate_size', normalize=True, optional=True),
    names={'mlp.gate': 'block_sparse_moe.router.layer', 'mlp.shared_experts': 'shared_mlp', 'mlp': 'shared_mlp'}
    | {'gate_proj': 'input_linear', 'up_proj': 'input_linear', 'down_proj': 'output_linear'},
    fused=fused_experts(_ONE, 'transposed', inner='input', down='output'),
    reads=('attention_bias', 'mamba_conv_bias', 'shared_intermediate_size', *_SPACE_LAYERS, *_SPACE, *MULTIPLIERS),
    only=dict(normalization_function='rmsnorm'),
    ignored=('mamba_chunk_size', 'init_method'),
    defaults=_SPACE
    | dict.fromkeys(MULTIPLIERS, 1.0)
    | dict(mamba_conv_bias=True, mamba_expand=2, shared_intermediate_size=1024, position_embedding_type=None)
    | dict(num_local_experts=8, num_experts_per_tok=2),
  ),
  'nemotron_h': Family(
    architecture='NemotronHForCausalLM',
    lost_adapters=r'\.out_proj\.',
    hybrid='state_space',
    mixer=dict(gated=False),
    single=True,
    prefix='backbone',
    activation_field='mlp_hidden_act',
    activations={'relu2': 'relu2'},
    biases=dict(mamba_conv_bias=('conv',)),
    experts=dataclasses.replace(DEEPSEEK_ROUTER, first_dense='', shared='', optional=True),
    names={'mamba.norm': 'mamba.mixer_norm', 'backbone.norm': 'backbone.norm_f', 'embed_tokens': 'embeddings'}
    | dict.fromkeys(('mamba', 'self_attn', 'mlp'), 'mixer')
    | dict.fromkeys(('input_layernorm', 'post_attention_layernorm'), 'norm')
    | {'mixer_norm': 'norm'},
    aliases={
      'n_groups': 'mamba_n_groups',
      'mamba_num_heads': 'mamba_n_heads',
      'ssm_state_size': 'mamba_d_state',
      'mamba_head_dim': 'mamba_d_head',
      'conv_kernel': 'mamba_d_conv',
      'use_conv_bias': 'mamba_conv_bias',
      'layer_norm_epsilon': 'rms_norm_eps',
      'num_local_experts': 'n_routed_experts',
    },
    reads=('mamba_conv_bias', 'time_step_min', 'moe_latent_size', 'moe_shared_expert_intermediate_size', *_SPACE)
    + ('layer_types', 'layers_block_type', 'hybrid_override_pattern'),
    only=dict(mamba_hidden_act='silu', n_shared_experts=1),
    # Initial values, and settings of other implementations.
    ignored=tuple('expand chunk_size time_step_limit time_step_max time_step_floor num_logits_to_keep'.split())
    + tuple('hidden_dropout use_mamba_kernels mamba_ssm_cache_dtype moe_shared_expert_overlap'.split())
    + tuple('residual_in_fp32 rescale_prenorm_residual mtp_layers_block_type mtp_hybrid_override_pattern'.split()),
    reported=('num_nextn_predict_layers', 'auto_map'),
    defaults=dict(mamba_n_heads=128, mamba_n_groups=8, mamba_d_state=128, mamba_d_head=64, mamba_d_conv=4)
    | dict(mamba_conv_bias=True, time_step_min=0.001, moe_latent_size=None, moe_shared_expert_intermediate_size=7688)
    | dict(num_key_value_heads=8, head_dim=128, intermediate_size=21_504, mlp_hidden_act='relu2', rms_norm_eps=1e-5)
    | dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=7688, n_group=1, topk_group=1)
    | dict(norm_topk_prob=True, routed_scaling_factor=1.0, max_position_embeddings=4096),
  ),
}
