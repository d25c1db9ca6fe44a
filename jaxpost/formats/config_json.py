"""Fields of a `config.json` <-> fields of ModelConfig, for any family.

Whether a family has a field stands in `families.FAMILIES`, whose entries are
the `spec` here; `raw` is its `config.json` with the family's defaults.
"""

import dataclasses

from jaxpost.errors import InputError
from jaxpost.formats.layers_json import FULL, LOCAL, ORIGINAL, positive, write_rope
from jaxpost.models.config import Experts, ModelConfig

_ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'gelu_new': 'gelu_tanh',
}
# Field -> ModelConfig's, and the way there and back; None is off.
_SCALARS = {
  'query_pre_attn_scalar': ('attention_scale', lambda x: x**-0.5, lambda y: _plain(y**-2)),
  'attention_multiplier': ('attention_scale', float, float),
  'attn_logit_softcapping': ('attention_softcap', lambda x: x or 0.0, lambda y: y or None),
  'final_logit_softcapping': ('logit_softcap', lambda x: x or 0.0, lambda y: y or None),
  'logits_scaling': ('logit_divisor', float, float),
  'embedding_multiplier': ('embed_scale', float, float),
  'residual_multiplier': ('residual_scale', float, float),
}
_MAY_BE_OFF = ('attn_logit_softcapping', 'final_logit_softcapping')
_BIASES = {'attention_bias': ('q', 'k', 'v', 'o'), 'mlp_bias': ('gate', 'up', 'down')}
# Of families that do not read these, what says nothing; else it is refused.
_NEUTRAL = {
  'attention_bias': (False, None),
  'mlp_bias': (False, None),
  'use_sliding_window': (False, None),
  'sliding_window': (None,),
  'auto_map': (None,),
  'partial_rotary_factor': (1, None),
  'pretraining_tp': (1, None),
  'use_bidirectional_attention': (False, None),
  'quantization_config': (None,),
  'no_rope_layers': (None,),
  'decoder_sparse_step': (1, None),
  'mlp_only_layers': ([], None),
  'router_jitter_noise': (0.0, None),
  'clip_qkv': (None,),
}
READ = frozenset(
  """
    vocab_size hidden_size intermediate_size num_hidden_layers hidden_act
    num_attention_heads num_key_value_heads head_dim rope_theta rms_norm_eps
    tie_word_embeddings max_position_embeddings rope_scaling rope_parameters
    layer_types
    """.split()
)
# These do not change the function computed here.
_IGNORED = frozenset(
  """
    architectures model_type torch_dtype dtype transformers_version use_cache
    bos_token_id eos_token_id pad_token_id attention_dropout initializer_range
    _name_or_path output_attentions output_hidden_states return_dict
    chunk_size_feed_forward id2label label2id is_encoder_decoder problem_type
    cache_implementation max_window_layers output_router_logits
    router_aux_loss_coef
    """.split()
)


def unread(raw: dict, spec: dict) -> set:
  """Names of the fields of a config.json that have no effect and might."""
  silent = {
    *READ,
    *_IGNORED,
    *_NEUTRAL,
    *spec['reads'],
    spec.get('local_rope'),
    spec.get('activation_field'),
    *spec.get('ignored', ()),
    *spec.get('reported', ()),
  }
  loud = {*spec.get('reported', ())}
  if 'activation_field' in spec:
    loud.add('hidden_act')
  return set(raw) - silent | {k for k in loud if raw.get(k)}


def check(raw: dict, spec: dict, where: str):
  """InputError for what is not built, by name, and for impossible values."""
  for field in ('quantization_config', 'rope_scaling', 'rope_parameters'):
    if not isinstance(raw.get(field) or {}, dict):
      raise InputError(f'{where}: {field}={raw[field]!r} must be an object')
  method = (raw.get('quantization_config') or {}).get('quant_method')
  if method and method == spec.get('quantized'):
    raw = raw | {'quantization_config': None}
  for field, values in _NEUTRAL.items():
    known = field in spec['reads'] or field in spec.get('reported', ())
    if not known and raw.get(field) not in values:
      raise InputError(f'{where}: {field}={raw[field]!r} is not supported (only {values[0]!r})')
  for field in ('use_sliding_window', 'tie_word_embeddings', 'norm_topk_prob', *_BIASES):
    if raw.get(field) not in (True, False, None):
      raise InputError(f'{where}: {field}={raw[field]!r} must be true or false')
  optional = ('head_dim', 'num_key_value_heads', 'sliding_window')
  for field in (
    'vocab_size',
    'hidden_size',
    'intermediate_size',
    'num_hidden_layers',
    'num_attention_heads',
    'max_window_layers',
    'sliding_window_pattern',
    'no_rope_layer_interval',
    'max_position_embeddings',
    'num_experts',
    'num_local_experts',
    'num_experts_per_tok',
    'moe_intermediate_size',
    ORIGINAL,
    'qk_rope_head_dim',
    'n_routed_experts',
    *optional,
  ):
    value = raw.get(field)
    low = 0 if field == 'max_window_layers' else 1
    missing = field not in raw or (value is None and field in optional)
    if not missing and (type(value) is not int or value < low):
      raise InputError(f'{where}: {field}={value!r} must be a whole number above {low - 1}')
  for field in (
    'rope_theta',
    'rms_norm_eps',
    *_SCALARS,
    'swiglu_limit',
    'swiglu_alpha',
    'partial_rotary_factor',
    'rope_local_base_freq',
  ):
    if field in raw and not (field in _MAY_BE_OFF and raw[field] is None):
      positive(raw[field], field, where)
  if type(raw['tie_word_embeddings']) is not bool:
    raise InputError(f'{where}: tie_word_embeddings={raw["tie_word_embeddings"]!r} must be true or false')
  heads = raw.get('num_attention_heads')
  kv_heads = raw.get('num_key_value_heads') or heads
  if heads and heads % kv_heads:
    raise InputError(f'{where}: num_key_value_heads={kv_heads} must divide num_attention_heads={heads}')


def activation(raw: dict, spec: dict, where: str) -> str:
  """ModelConfig.activation."""
  known = _ACTIVATIONS | spec.get('activations', {})
  field = spec.get('activation_field', 'hidden_act')
  value = raw[field] or spec.get('defaults', {}).get(field, 'silu')
  if value not in known:
    raise InputError(f'{where}: {field}={value!r} is not supported (only {", ".join(known)})')
  return known[value]


def biases(raw: dict, spec: dict) -> tuple:
  return tuple(name for field, names in _BIASES.items() if field in spec['reads'] and raw.get(field) for name in names)


def experts(raw: dict, spec: dict, where: str) -> Experts | None:
  """ModelConfig.experts."""
  if not (said := spec.get('experts')):
    return None
  found = Experts(
    raw[said['num']],
    raw['num_experts_per_tok'],
    raw[said['size']],
    said.get('normalize', raw.get('norm_topk_prob')),
    *(float(raw[said[k]]) for k in ('limit', 'alpha') if k in said),
  )
  if found.limit and raw['hidden_act'] != 'silu':
    raise InputError(f'{where}: hidden_act={raw["hidden_act"]!r} is not supported (only silu)')
  if found.top_k > found.num:
    raise InputError(f'{where}: num_experts_per_tok={found.top_k} of {found.num} experts')
  return found


def scalars(raw: dict, spec: dict) -> dict:
  """The ModelConfig fields that are one number here and there."""
  return {_SCALARS[f][0]: _SCALARS[f][1](raw[f]) for f in spec['reads'] if f in _SCALARS}


def _plain(x: float):
  """Without what rounding left; whole numbers as such."""
  x = float(f'{x:.12g}')
  return int(x) if x == int(x) else x


def write(cfg: ModelConfig, spec: dict) -> dict:
  """The fields of a config.json that say what `cfg` does."""
  reads, types = spec['reads'], [LOCAL if size else FULL for size in cfg.layer_windows] or [FULL] * cfg.num_layers
  local = LOCAL in types
  names = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
  out = {spec.get('activation_field', 'hidden_act'): names[cfg.activation], **write_rope(cfg, spec, types)}
  for field in reads:
    if field in _SCALARS:
      ours, _, back = _SCALARS[field]
      out[field] = back(dataclasses.asdict(cfg)[ours])
    if field in _BIASES:
      out[field] = set(_BIASES[field]) <= set(cfg.biases)
  every = {
    'sliding_window': max(cfg.layer_windows, default=None),
    'layer_types': types,
    'use_sliding_window': local,
    'max_window_layers': types.index(LOCAL) if local else cfg.num_layers,
    'no_rope_layers': [1 + i for i in cfg.layer_ropes] or [1] * cfg.num_layers,
  }
  if cfg.experts:
    said, e = spec['experts'], cfg.experts
    every |= {
      said['num']: e.num,
      said['size']: e.size,
      'num_experts_per_tok': e.top_k,
      'norm_topk_prob': e.normalize,
      'swiglu_limit': e.limit,
      'swiglu_alpha': e.alpha,
    }
  out |= {k: v for k, v in every.items() if k in reads}
  return out | {k: out[v] for k, v in spec.get('aliases', {}).items()}
