"""Fields of config.json that hold for a whole model <-> fields of ModelConfig.

`Family.fields` names the fields that a family has. `raw` is its config.json, completed by the family's defaults.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpost.errors import InputError
from jaxpost.formats import expert_fields
from jaxpost.formats.family import Family
from jaxpost.formats.layer_fields import FULL, LOCAL, ORIGINAL, check_positive, write_rope
from jaxpost.models.config import ModelConfig

_ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'gelu_new': 'gelu_tanh',
}


class _Scalar(NamedTuple):
  """A number of ModelConfig, and how it is computed from config.json and back."""

  name: str
  read: Callable = float
  write: Callable = float


_OFF = (lambda x: x or 0.0), (lambda y: y or None)  # 0 here is null in config.json

_SCALARS = {
  'query_pre_attn_scalar': _Scalar('attention_scale', lambda x: x**-0.5, lambda y: _rounded(y**-2)),
  'attention_multiplier': _Scalar('attention_scale'),
  'attn_logit_softcapping': _Scalar('attention_softcap', *_OFF),
  'final_logit_softcapping': _Scalar('logit_softcap', *_OFF),
  'logits_scaling': _Scalar('logit_divisor'),
  'embedding_multiplier': _Scalar('embed_scale'),
  'residual_multiplier': _Scalar('residual_scale'),
}
_MAY_BE_OFF = ('attn_logit_softcapping', 'final_logit_softcapping')
# Fields that say which projections have biases; `Family.biases` may say otherwise.
BIASES = {'attention_bias': ('q', 'k', 'v', 'o'), 'mlp_bias': ('gate', 'up', 'down')}
# Values that change nothing. Any other is refused for families that do not read the field.
_NEUTRAL = {
  'attention_bias': (False, None),
  'mlp_bias': (False, None),
  'use_bias': (False, None),
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
    router_aux_loss_coef
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
  ORIGINAL,
  'qk_rope_head_dim',
)
_OPTIONAL_INTEGERS = ('head_dim', 'num_key_value_heads', 'sliding_window')  # may be null
_POSITIVE = (
  'rope_theta',
  'rms_norm_eps',
  *_SCALARS,
  'swiglu_limit',
  'swiglu_alpha',
  'partial_rotary_factor',
  'rope_local_base_freq',
)
_BOOLEANS = (
  'use_sliding_window',
  'tie_word_embeddings',
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
# Types of the fields that are used before their values are checked.
_TYPES = {
  'hidden_act': _NAME,
  'hidden_activation': _NAME,
  'architectures': _NAMES,
  'layer_types': _NAMES,
  'no_rope_layers': ('a list of 0 and 1', lambda x: isinstance(x, list) and all(bit in (0, 1) for bit in x)),
  'num_nextn_predict_layers': ('a whole number', lambda x: type(x) is int and x >= 0),
}


def other_parts(raw: dict[str, Any]) -> list[str]:
  """Returns the names of the parts of a model beside its text model, such as 'vision_config'."""
  return [part for part in ('vision_config', 'audio_config') if raw.get(part)]


def check_types(raw: dict[str, Any], where: str) -> None:
  """Raises InputError where a name or a list of a config.json is something else."""
  for field, (kind, is_right) in _TYPES.items():
    if raw.get(field) is not None and not is_right(raw[field]):
      raise InputError(f'{where}: {field}={raw[field]!r} must be {kind}')


def unread(raw: dict[str, Any], family: Family) -> set[str]:
  """Returns the fields of a config.json that have no effect here, though they might elsewhere."""
  silent = {
    *READ,
    *_IGNORED,
    *_NEUTRAL,
    *family.fields,
    family.local_rope,
    family.activation_field,
    *family.only,
    *family.ignored,
    *family.reported,
  }
  reported = {*family.reported}
  if family.activation_field != 'hidden_act':
    reported.add('hidden_act')
  return set(raw) - silent | {k for k in reported if raw.get(k)}


def check(raw: dict[str, Any], family: Family, where: str) -> None:
  """Raises InputError, naming the field, for values that are impossible or not supported."""
  for field in ('quantization_config', 'rope_scaling', 'rope_parameters'):
    if not isinstance(raw.get(field) or {}, dict):
      raise InputError(f'{where}: {field}={raw[field]!r} must be an object')
  method = (raw.get('quantization_config') or {}).get('quant_method')
  if method and method in ('fp8', family.quantized):
    raw = raw | {'quantization_config': None}
  for field, neutral in _NEUTRAL.items():
    known = field in family.fields or field in family.reported
    if not known and raw.get(field) not in neutral:
      raise InputError(f'{where}: {field}={raw[field]!r} is not supported (only {neutral[0]!r})')
  for field, value in family.only.items():
    if raw.get(field, value) != value:
      raise InputError(f'{where}: {field}={raw[field]!r} is not supported (only {value!r})')
  for field in _BOOLEANS:
    if raw.get(field) not in (True, False, None):
      raise InputError(f'{where}: {field}={raw[field]!r} must be true or false')
  for field in (*_INTEGERS, *_OPTIONAL_INTEGERS):
    _check_integer(raw, field, where)
  for field in _POSITIVE:
    if field in raw and not (field in _MAY_BE_OFF and raw[field] is None):
      check_positive(raw[field], field, where)
  if type(raw['tie_word_embeddings']) is not bool:
    raise InputError(f'{where}: tie_word_embeddings={raw["tie_word_embeddings"]!r} must be true or false')
  heads = raw.get('num_attention_heads')
  kv_heads = raw.get('num_key_value_heads') or heads
  if heads and heads % kv_heads:
    raise InputError(f'{where}: num_key_value_heads={kv_heads} must divide num_attention_heads={heads}')


def _check_integer(raw: dict, field: str, where: str) -> None:
  value = raw.get(field)
  lowest = 0 if field == 'max_window_layers' else 1
  missing = field not in raw or (value is None and field in _OPTIONAL_INTEGERS)
  if not missing and (type(value) is not int or value < lowest):
    raise InputError(f'{where}: {field}={value!r} must be a whole number above {lowest - 1}')


def activation(raw: dict[str, Any], family: Family, where: str) -> str:
  """Returns `ModelConfig.activation`."""
  known = _ACTIVATIONS | dict(family.activations)
  field = family.activation_field
  value = raw[field] or family.defaults.get(field, 'silu')
  if value not in known:
    raise InputError(f'{where}: {field}={value!r} is not supported (only {", ".join(known)})')
  return known[value]


def biases(raw: dict[str, Any], family: Family) -> tuple[str, ...]:
  """Returns the projections that have biases by config.json, for `ModelConfig.biases`."""
  return tuple(
    name for field, names in _biases(family).items() if field in family.fields and raw.get(field) for name in names
  )


def _biases(family: Family) -> dict[str, tuple[str, ...]]:
  return BIASES | dict(family.biases)


def scalars(raw: dict[str, Any], family: Family) -> dict[str, float]:
  """Returns the fields of ModelConfig that are one number in config.json, too."""
  return {_SCALARS[f].name: _SCALARS[f].read(raw[f]) for f in family.fields if f in _SCALARS}


def _rounded(x: float) -> float | int:
  """Removes the rounding error of a power, so that 64 is written as 64."""
  x = float(f'{x:.12g}')
  return int(x) if x == int(x) else x


def write(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the fields of config.json that the modules of this package read.

  `config_json.to_hf` adds those that all families have.
  """
  types = [LOCAL if size else FULL for size in cfg.layer_windows] or [FULL] * cfg.num_layers
  has_windows = LOCAL in types
  # Reversed: of several spellings the first is written.
  spelling = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
  out = {family.activation_field: spelling.get(cfg.activation, cfg.activation), **write_rope(cfg, family)}
  for field in family.fields:
    if field in _SCALARS:
      scalar = _SCALARS[field]
      out[field] = scalar.write(dataclasses.asdict(cfg)[scalar.name])
    if field in _biases(family):
      out[field] = set(_biases(family)[field]) <= set(cfg.biases)
  # Without a window, families with `layer_types` still want a size.
  unused = family.defaults.get('sliding_window') if 'layer_types' in family.fields else None
  optional = {
    'sliding_window': max(cfg.layer_windows, default=0) or unused,
    'layer_types': types,
    'use_sliding_window': has_windows,
    'max_window_layers': types.index(LOCAL) if has_windows else cfg.num_layers,
    'use_qk_norm': bool(cfg.qk_norm),
    'no_rope_layers': [1 + i for i in cfg.layer_ropes] or [1] * cfg.num_layers,
  }
  out |= {k: v for k, v in optional.items() if k in family.fields} | expert_fields.write(cfg, family)
  modules = cfg.more_heads.count('mtp')
  out |= {'num_nextn_predict_layers': modules} if family.extra_layers else {}
  out |= {'mtp_num_hidden_layers': modules} if modules and family.predictor else {}
  out |= family.only
  return out | {other: out[name] for other, name in family.aliases.items() if name in out}
