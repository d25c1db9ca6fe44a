"""Families of decoders as data: how each is written in a `config.json`.

Only this file knows a family's name. A family is

  architecture: its class in `transformers`; classifier: with a scalar head,
    where that is called otherwise.
  defaults: fields that its `config.json` may leave out.
  fixed: the `ModelConfig` fields that are the same for all its models.
  reads: fields of `config.json` that it has besides those of Llama.
  names: modules that its tensors are called after, where not as in Llama;
    parameters of one name are rows of one tensor, see `stored.py`.
  fused: parameters that are, of all experts, every n-th of the last dimension
    of one tensor, which is not transposed: (name, first, n).
  quantized: a `quant_method` that is read.
  window: which layers see `sliding_window` tokens where `layer_types` does not
    say: 'all', 'upper' (from `max_window_layers` on), 'no_rope', or n for all
    but every n-th.
  local_rope: the field with the rope base of those layers, unscaled.
  experts: which fields say how many there are and how large each is;
    `normalize` where none says that their weights add up to 1.
  activation_field, activations, rope_types, aliases: other spellings.
  ignored, reported: fields without effect here, without or with a warning.
  latent: whether its attention is that of `mla.py`.
  beyond: whether a folder may have layers after the last, which are not read.
"""

from jaxpost.errors import InputError
from jaxpost.formats import config_json, layers_json
from jaxpost.models import mla
from jaxpost.models.config import CustomConfig, ModelConfig

_WINDOW = ('sliding_window', 'layer_types')
_QWEN = (*_WINDOW, 'use_sliding_window', 'max_window_layers')
_GEMMA = dict(norm_offset=1.0, embed_scale='sqrt')  # of hidden_size

_DEEPSEEK = dict(
  architecture='DeepseekV3ForCausalLM',
  latent=True,
  beyond=True,
  experts=dict(num='n_routed_experts', size='moe_intermediate_size'),
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
  'kimi_k2': _DEEPSEEK | dict(family='deepseek_v3'),  # as it is written
  'llama': dict(architecture='LlamaForCausalLM', reads=('attention_bias', 'mlp_bias')),
  'mistral': dict(
    architecture='MistralForCausalLM',
    window='all',
    reads=('sliding_window',),
    defaults=dict(num_key_value_heads=8, sliding_window=4096, max_position_embeddings=131_072),
  ),
  'qwen2': dict(
    architecture='Qwen2ForCausalLM',
    fixed=dict(biases=('q', 'k', 'v')),
    window='upper',
    reads=_QWEN,
    defaults=dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=28, max_position_embeddings=32_768),
  ),
  'qwen3': dict(
    architecture='Qwen3ForCausalLM',
    fixed=dict(qk_norm='head'),
    window='upper',
    reads=('attention_bias', *_QWEN),
    defaults=dict(
      num_key_value_heads=32, sliding_window=4096, max_window_layers=28, max_position_embeddings=32_768, head_dim=128
    ),
  ),
  'qwen3_moe': dict(
    architecture='Qwen3MoeForCausalLM',
    fixed=dict(qk_norm='head'),
    experts=dict(num='num_experts', size='moe_intermediate_size'),
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
  'mixtral': dict(
    architecture='MixtralForCausalLM',
    window='all',
    experts=dict(num='num_local_experts', size='intermediate_size', normalize=True),
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
  'gpt_oss': dict(
    architecture='GptOssForCausalLM',
    window=2,
    quantized='mxfp4',
    fixed=dict(biases=('router', 'gate', 'up', 'down', 'sinks')),
    experts=dict(
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
  'gemma': dict(
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
  'gemma2': dict(
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
  'gemma3_text': dict(
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
  'olmo2': dict(
    architecture='Olmo2ForCausalLM',
    reads=('attention_bias',),
    fixed=dict(norms='post', qk_norm='wide'),
    defaults=dict(rms_norm_eps=1e-5),
  ),
  'olmo3': dict(
    architecture='Olmo3ForCausalLM',
    window=4,
    local_rope='rope_theta',
    fixed=dict(norms='post', qk_norm='wide'),
    reads=('attention_bias', *_WINDOW),
    defaults=dict(rms_norm_eps=1e-5, rope_theta=5e5, sliding_window=4096),
  ),
  'olmoe': dict(
    architecture='OlmoeForCausalLM',
    fixed=dict(qk_norm='wide'),
    experts=dict(num='num_experts', size='intermediate_size'),
    aliases={'num_local_experts': 'num_experts'},
    reads=('attention_bias', 'num_experts', 'num_experts_per_tok', 'norm_topk_prob'),
    defaults=dict(
      rms_norm_eps=1e-5, max_position_embeddings=4096, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False
    ),
  ),
  'phi3': dict(
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
  'smollm3': dict(
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
  'granite': dict(
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
_DEFAULTS = dict(
  rope_theta=10_000.0, tie_word_embeddings=False, rms_norm_eps=1e-6, hidden_act='silu', max_position_embeddings=2048
)


def _names(value) -> bool:
  return isinstance(value, list) and all(isinstance(x, str) for x in value)


# What a field has to be where the rest of its value is not looked at before.
_KINDS = {
  **dict.fromkeys(('hidden_act', 'hidden_activation'), ('a name', lambda x: isinstance(x, str))),
  **dict.fromkeys(('architectures', 'layer_types'), ('a list of names', _names)),
  'no_rope_layers': ('a list of 0 and 1', lambda x: isinstance(x, list) and all(y in (0, 1) for y in x)),
  'num_nextn_predict_layers': ('a whole number', lambda x: type(x) is int and x >= 0),
}


def from_hf(raw: dict, where: str) -> tuple[ModelConfig, list[str]]:
  """config.json -> (ModelConfig, names of fields nobody reads).

  Raises InputError where the folder asks for something that is not built.
  """
  family = raw.get('model_type')
  if not isinstance(family, str) or family not in FAMILIES:
    raise InputError(
      f'{where}: model_type {family!r} is not supported'
      + (
        '; name the code of your own model in config.model.preset, too'
        if family == 'custom'
        else f'; supported: {", ".join(FAMILIES)}'
      )
    )
  spec = FAMILIES[family]
  for field, (kind, right) in _KINDS.items():
    if raw.get(field) is not None and not right(raw[field]):
      raise InputError(f'{where}: {field}={raw[field]!r} must be {kind}')
  aliases = spec.get('aliases', {})
  raw = {aliases.get(k, k): v for k, v in raw.items()}
  try:
    return _read(raw, spec, family, where)
  except InputError:
    raise
  except KeyError as e:
    raise InputError(f'{where}: field {e.args[0]!r} is missing') from None
  except (AttributeError, OverflowError, TypeError, ValueError) as e:
    raise InputError(f'{where}: a field has a value of another kind than it may: {e}') from e


def _read(raw: dict, spec: dict, family: str, where: str) -> tuple[ModelConfig, list[str]]:
  known = {**_DEFAULTS, **spec.get('defaults', {}), **raw}
  config_json.check(known, spec, where)
  fixed = dict(spec.get('fixed', {}))
  hidden, heads = known['hidden_size'], known['num_attention_heads']
  layers = known['num_hidden_layers']
  head_dim = known.get('head_dim') or hidden // heads
  if fixed.get('embed_scale'):
    fixed['embed_scale'] = hidden**0.5
  fixed['activation'] = config_json.activation(known, spec, where)
  fixed['biases'] = fixed.get('biases', ()) + config_json.biases(known, spec)
  turned = known['qk_rope_head_dim'] if 'latent' in spec else head_dim
  rope, unknown = layers_json.ropes(known, spec, layers, turned, where)
  windows = layers_json.windows(known, spec, layers, rope['layer_ropes'], where)
  cfg = ModelConfig(
    family=spec.get('family', family),
    vocab_size=known['vocab_size'],
    hidden_size=hidden,
    intermediate_size=known['intermediate_size'],
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=known.get('num_key_value_heads') or heads,
    head_dim=head_dim,
    norm_eps=known['rms_norm_eps'],
    tie_embeddings=known['tie_word_embeddings'],
    max_position=known['max_position_embeddings'],
    num_labels=_num_labels(raw, where),
    layer_windows=windows,
    experts=config_json.experts(known, spec, where),
    **rope,
    **config_json.scalars(known, spec),
    **fixed,
  )
  if 'latent' in spec:
    cfg = mla.fields(known, cfg, where)
  return cfg, sorted([*config_json.unread(raw, spec), *unknown])


def _num_labels(raw: dict, where: str) -> int:
  """0 of a language model, 1 of a reward model."""
  if not any('ForSequenceClassification' in name for name in raw.get('architectures') or ()):
    return 0
  named = raw.get('id2label') or (0, 1)  # transformers' default is 2
  if not isinstance(named, (dict, list, tuple)):
    raise InputError(f'{where}: id2label={named!r} must be an object')
  labels = len(named)
  if labels != 1:
    raise InputError(f'{where}: a classifier of {labels} labels; only heads of one label (reward models) are supported')
  return 1


def to_hf(cfg: ModelConfig, stop_ids=(), bos_id=None, pad_id=None) -> dict:
  """ModelConfig -> config.json for `transformers`."""
  if isinstance(cfg, CustomConfig):
    return dict(
      model_type=cfg.family,
      code=cfg.code,
      vocab_size=cfg.vocab_size,
      bos_token_id=bos_id,
      pad_token_id=pad_id,
      eos_token_id=list(stop_ids) or None,
    )
  spec = FAMILIES[cfg.family]
  name, labels = spec['architecture'], {}
  if cfg.num_labels:
    name = spec.get('classifier') or name.replace('ForCausalLM', 'ForSequenceClassification')
    labels = dict(id2label={'0': 'reward'}, label2id={'reward': 0})
  return dict(
    **labels,
    architectures=[name],
    model_type=cfg.family,
    vocab_size=cfg.vocab_size,
    hidden_size=cfg.hidden_size,
    intermediate_size=cfg.intermediate_size,
    num_hidden_layers=cfg.num_layers,
    num_attention_heads=cfg.num_heads,
    num_key_value_heads=cfg.num_kv_heads,
    head_dim=cfg.head_dim,
    rms_norm_eps=cfg.norm_eps,
    tie_word_embeddings=cfg.tie_embeddings,
    max_position_embeddings=cfg.max_position,
    torch_dtype='float32',
    bos_token_id=bos_id,
    pad_token_id=pad_id,
    eos_token_id=list(stop_ids) or None,
    **config_json.write(cfg, spec),
  ) | (mla.write(cfg) if 'latent' in spec else {})
