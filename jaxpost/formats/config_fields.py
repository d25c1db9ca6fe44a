"""Fields of config.json that are equal for all layers -> fields of ModelConfig, and checks of single values.

`Family.fields` names the fields that a family has. `raw` is a config.json, completed by the defaults of its family.
"""

from typing import Any

from jaxpost.errors import InputError
from jaxpost.formats.family import ACTIVATIONS, BIASES, SCALARS, ExpertFields, Family
from jaxpost.models.config import Experts

_MAY_BE_OFF = ('attn_logit_softcapping', 'final_logit_softcapping')
# Field -> values without effect. Families that do not read the field refuse any other value.
_NEUTRAL: dict[str, tuple] = {
  'attention_bias': (False, None),
  'mlp_bias': (False, None),
  'use_bias': (False, None),
  'use_sliding_window': (False, None),
  'sliding_window': (None,),
  'auto_map': (None,),
  'partial_rotary_factor': (1, None),
  'use_bidirectional_attention': (False, None),
  'is_causal': (True, None),
  'quantization_config': (None,),
  'no_rope_layers': (None,),
  'decoder_sparse_step': (1, None),
  'mlp_only_layers': ([], None),
  'router_jitter_noise': (0.0, None),
  'clip_qkv': (None,),
  'conv_bias': (False, None),
  'mamba_proj_bias': (False, None),
}
READ = frozenset(
  """
    vocab_size hidden_size intermediate_size num_hidden_layers hidden_act
    num_attention_heads num_key_value_heads head_dim rope_theta rms_norm_eps
    tie_word_embeddings max_position_embeddings rope_scaling rope_parameters
    layer_types
    """.split()
)
# Fields that do not change the function computed here.
_IGNORED = frozenset(
  """
    architectures model_type torch_dtype dtype transformers_version use_cache
    bos_token_id eos_token_id pad_token_id attention_dropout initializer_range
    _name_or_path output_attentions output_hidden_states return_dict
    chunk_size_feed_forward id2label label2id is_encoder_decoder problem_type
    cache_implementation max_window_layers output_router_logits
    router_aux_loss_coef pretraining_tp
    """.split()
)


_INTEGERS = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
  'max_window_layers',
  'sliding_window_pattern',
  'no_rope_layer_interval',
  'max_position_embeddings',
  'original_max_position_embeddings',
  'qk_rope_head_dim',
)
_OPTIONAL_INTEGERS = ('head_dim', 'num_key_value_heads', 'sliding_window')  # may be null
_POSITIVE = (
  'rope_theta',
  'rms_norm_eps',
  *SCALARS,
  'swiglu_limit',
  'swiglu_alpha',
  'partial_rotary_factor',
  'rope_local_base_freq',
)
_BOOLEANS = (
  'use_sliding_window',
  'norm_topk_prob',
  'use_qk_norm',
  'attention_out_bias',
  'use_bias',
  'mamba_conv_bias',
  'linear_allow_neg_eigval',
  *BIASES,
)
_NAME = 'a name', lambda x: isinstance(x, str)
_NAMES = 'a list of names', lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x)
_OBJECT = 'an object', lambda x: isinstance(x, dict) or not x
# Field -> (name of its type, check of a value that is not null).
_TYPES = {
  'hidden_act': _NAME,
  'hidden_activation': _NAME,
  'mlp_hidden_act': _NAME,
  'architectures': _NAMES,
  'layer_types': _NAMES,
  'mlp_layer_types': _NAMES,
  'quantization_config': _OBJECT,
  'rope_scaling': _OBJECT,
  'rope_parameters': _OBJECT,
  **dict.fromkeys(_OPTIONAL_INTEGERS, ('a whole number, 1 or above', lambda x: type(x) is int and x > 0)),
  **dict.fromkeys(_BOOLEANS, ('true or false', lambda x: x in (True, False))),
  'no_rope_layers': ('a list of 0 and 1', lambda x: isinstance(x, list) and all(bit in (0, 1) for bit in x)),
  'num_nextn_predict_layers': ('a whole number', lambda x: type(x) is int and x >= 0),
}


def check_whole(value: Any, field: str, where: str, least: int = 1) -> int:
  """Returns the value of a field; InputError unless it is a whole number, `least` or above."""
  if type(value) is not int or value < least:
    raise InputError(f'{where}: {field}={value!r} must be a whole number, {least} or above')
  return value


def check_positive(value: Any, field: str, where: str) -> float:
  """Returns the value of a field; InputError unless it is a finite number above 0."""
  if type(value) not in (int, float) or not 0 < value < float('inf'):
    raise InputError(f'{where}: {field}={value!r} must be above 0')
  return value


def check_boolean(value: Any, field: str, where: str) -> bool:
  """Returns the value of a field; InputError unless it is true or false."""
  if type(value) is not bool:
    raise InputError(f'{where}: {field}={value!r} must be true or false')
  return value


def other_parts(raw: dict[str, Any]) -> list[str]:
  """Returns the names of other parts of a model than its text model, such as 'vision_config'."""
  return [part for part in ('vision_config', 'audio_config') if raw.get(part)]


def check_types(raw: dict[str, Any], where: str) -> None:
  """Raises InputError, naming the field, for a value of a type that its field has in no family."""
  for field, (expected, is_valid) in _TYPES.items():
    if raw.get(field) is not None and not is_valid(raw[field]):
      raise InputError(f'{where}: {field}={raw[field]!r} must be {expected}')
  for field in _INTEGERS:
    if field in raw:
      check_whole(raw[field], field, where, least=0 if field == 'max_window_layers' else 1)


def unread(raw: dict[str, Any], family: Family) -> set[str]:
  """Returns the fields of a config.json without effect here that other implementations might read."""
  not_reported = READ | _IGNORED | {*_NEUTRAL, *family.fields, *family.only, *family.ignored, *family.reported}
  not_reported |= {family.local_rope, family.activation_field}
  reported = {*family.reported}
  if family.activation_field != 'hidden_act':
    reported.add('hidden_act')
  return set(raw) - not_reported | {k for k in reported if raw.get(k)}


def check(raw: dict[str, Any], family: Family, where: str) -> None:
  """Raises InputError, naming the field, for values of the right types that are impossible or not supported."""
  quant_method = (raw.get('quantization_config') or {}).get('quant_method')
  if quant_method and quant_method in ('fp8', family.quantized):
    raw = raw | {'quantization_config': None}
  for field, neutral in _NEUTRAL.items():
    is_read = field in family.fields or field in family.reported
    if not is_read and raw.get(field) not in neutral:
      raise InputError(f'{where}: {field}={raw[field]!r} is not supported (only {neutral[0]!r})')
  for field, value in family.only.items():
    if raw.get(field, value) != value:
      raise InputError(f'{where}: {field}={raw[field]!r} is not supported (only {value!r})')
  for field in _POSITIVE:
    if field in raw and not (field in _MAY_BE_OFF and raw[field] is None):
      check_positive(raw[field], field, where)
  check_boolean(raw['tie_word_embeddings'], 'tie_word_embeddings', where)
  heads = raw.get('num_attention_heads')
  kv_heads = raw.get('num_key_value_heads') or heads
  if heads and heads % kv_heads:
    raise InputError(f'{where}: num_key_value_heads={kv_heads} must divide num_attention_heads={heads}')


def activation(raw: dict[str, Any], family: Family, where: str) -> str:
  """Returns `ModelConfig.activation`."""
  supported = ACTIVATIONS | family.activations
  field = family.activation_field
  value = raw[field] or family.defaults.get(field, 'silu')
  if value not in supported:
    raise InputError(f'{where}: {field}={value!r} is not supported (only {", ".join(supported)})')
  return supported[value]


def biases(raw: dict[str, Any], family: Family) -> tuple[str, ...]:
  """Returns the projections with biases according to config.json, for `ModelConfig.biases`."""
  fields = [field for field in family.bias_fields if field in family.fields and raw.get(field)]
  return tuple(name for field in fields for name in family.bias_fields[field])


def scalars(raw: dict[str, Any], family: Family) -> dict[str, Any]:
  """Returns the fields of ModelConfig that are one number in config.json as well."""
  return {SCALARS[f].name: SCALARS[f].read(raw[f]) for f in family.fields if f in SCALARS}


def experts(raw: dict[str, Any], family: Family, where: str) -> Experts | None:
  """Returns `ModelConfig.experts`, None for dense models; InputError for impossible or unsupported values."""
  fields = family.experts
  if fields is None or not raw.get(fields.switch, True):  # no family has a field called ''
    return None
  if fields.optional and not raw[fields.num]:
    return None
  groups = ('n_group', 'topk_group') if fields.grouped else ()
  for name in (fields.num, fields.size, 'num_experts_per_tok', *groups):
    check_whole(raw[name], name, where)
  for name in filter(None, (fields.shared, fields.first_dense)):
    check_whole(raw[name], name, where, least=0)
  if fields.scaled:
    check_positive(raw['routed_scaling_factor'], 'routed_scaling_factor', where)
  last_layer = raw['num_hidden_layers'] - 1
  end_layer = raw.get('moe_layer_end_index', -1)
  if 'moe_layer_end_index' in family.fields and end_layer not in (-1, last_layer):
    raise InputError(f'{where}: moe_layer_end_index={end_layer!r} is not supported (only the last layer, {last_layer})')
  config = Experts(
    num=raw[fields.num],
    top_k=raw['num_experts_per_tok'],
    size=raw[fields.size],
    limit=float(raw[fields.limit]) if fields.limit else 0.0,
    alpha=float(raw[fields.alpha]) if fields.limit else 1.0,
    normalize=raw['norm_topk_prob'] if fields.normalize is None else fields.normalize,
    shared=raw[fields.shared] if fields.shared else 0,
    first_dense=raw[fields.first_dense] if fields.first_dense else 0,
    sigmoid=fields.sigmoid,
    choice_bias=fields.choice_bias,
    epsilon=fields.epsilon,
    groups=raw['n_group'] if fields.grouped else 1,
    top_groups=raw['topk_group'] if fields.grouped else 1,
    scale=float(raw['routed_scaling_factor']) if fields.scaled else 1.0,
  )
  _check_combinations(config, fields, raw, where)
  return config


def _check_combinations(config: Experts, fields: ExpertFields, raw: dict[str, Any], where: str) -> None:
  """Raises InputError for the first combination of sizes that is impossible or not supported."""
  group_size = config.num // config.groups
  layers = raw['num_hidden_layers']
  if config.limit and raw['hidden_act'] != 'silu':
    problem = f'hidden_act={raw["hidden_act"]!r} is not supported (only silu)'
  elif config.top_k > config.num:
    problem = f'num_experts_per_tok={config.top_k} of {config.num} experts'
  # A group is ranked by the sum of its two best experts (DeepSeek-V3, section 2.1.2).
  elif config.num % config.groups or (config.groups > 1 and group_size < 2):
    problem = f'n_group={config.groups} of {config.num} experts is not supported'
  elif config.top_groups > config.groups:
    problem = f'topk_group={config.top_groups} of {config.groups} groups is not supported'
  elif config.top_k > config.top_groups * group_size:
    problem = f'num_experts_per_tok={config.top_k} of {config.top_groups} groups of {group_size} is not supported'
  elif config.first_dense >= layers:
    problem = f'{fields.first_dense}={config.first_dense} of {layers} layers is not supported'
  else:
    return
  raise InputError(f'{where}: {problem}')
