"""Families of decoders as data: how each is written in a `config.json`.

Only this file knows a family's name. A family is the defaults that its
`config.json` may leave out and the `ModelConfig` fields it fixes.
"""

from jaxpost.errors import InputError
from jaxpost.models.config import ModelConfig

FAMILIES = {
    'llama': dict(
        architecture='LlamaForCausalLM', fixed=dict(qk_norm=False),
        defaults=dict(rope_theta=10_000.0, tie_word_embeddings=False,
                      rms_norm_eps=1e-6)),
    'qwen3': dict(
        architecture='Qwen3ForCausalLM', fixed=dict(qk_norm=True),
        defaults=dict(rope_theta=10_000.0, tie_word_embeddings=False,
                      rms_norm_eps=1e-6, head_dim=128)),
}


def _qwen3(hidden, mlp, layers, heads, kv_heads, head_dim=128,
           vocab=151_936, tied=True, **fields) -> ModelConfig:
  return ModelConfig(
      'qwen3', vocab, hidden, mlp, layers, heads, kv_heads, head_dim,
      rope_theta=1e6, tie_embeddings=tied, qk_norm=True, max_position=40_960,
      **fields)


def _llama3(hidden, mlp, layers, heads, rope=(), positions=8192, tied=False):
  return ModelConfig(
      'llama', 128_256, hidden, mlp, layers, heads, 8, 128, 5e5, rope, 1e-5,
      tied, max_position=positions)


_LLAMA3_ROPE = ('llama3', 32.0, 1.0, 4.0, 8192)

# Shapes to start from when there is no folder: `config.model.preset`.
PRESETS = {
    'tiny': _qwen3(128, 384, 3, 4, 2, 32, vocab=259),
    'xs': _qwen3(256, 768, 4, 4, 2, 64, vocab=8192),
    's': _qwen3(512, 1536, 8, 8, 4, 64, vocab=32_768),
    'qwen3_0_6b': _qwen3(1024, 3072, 28, 16, 8),
    'qwen3_1_7b': _qwen3(2048, 6144, 28, 16, 8),
    'qwen3_4b': _qwen3(2560, 9728, 36, 32, 8),
    'qwen3_8b': _qwen3(4096, 12_288, 36, 32, 8, tied=False),
    'qwen3_14b': _qwen3(5120, 17_408, 40, 40, 8, tied=False),
    'qwen3_32b': _qwen3(5120, 25_600, 64, 64, 8, tied=False),
    'llama3_2_1b': ModelConfig(
        'llama', 128_256, 2048, 8192, 16, 32, 8, 64, rope_theta=5e5,
        rope_scaling=_LLAMA3_ROPE, norm_eps=1e-5, max_position=131_072),
    'llama3_2_3b': _llama3(3072, 8192, 28, 24, _LLAMA3_ROPE, 131_072, True),
    'llama3_8b': _llama3(4096, 14_336, 32, 32),
    'llama3_70b': _llama3(8192, 28_672, 80, 64),
}

# Fields of config.json that do not change the function computed here, or are
# checked below; any other field is reported.
_IGNORED = frozenset('''
    architectures model_type torch_dtype dtype transformers_version use_cache
    bos_token_id eos_token_id pad_token_id attention_dropout initializer_range
    pretraining_tp max_window_layers _name_or_path output_attentions
    output_hidden_states return_dict hidden_act attention_bias mlp_bias
    use_sliding_window sliding_window layer_types rope_scaling rope_parameters
    auto_map chunk_size_feed_forward id2label label2id is_encoder_decoder
    problem_type
    '''.split())
_READ = frozenset('''
    vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim rope_theta rms_norm_eps
    tie_word_embeddings max_position_embeddings
    '''.split())


def from_hf(raw: dict, where: str) -> tuple[ModelConfig, list[str]]:
  """config.json -> (ModelConfig, names of fields nobody reads).

  Raises InputError where the folder asks for something that is not built.
  """
  family = raw.get('model_type')
  if family not in FAMILIES:
    raise InputError(
        f'{where}: model_type {family!r} is not supported; supported: '
        f'{", ".join(FAMILIES)}')
  spec = FAMILIES[family]
  known = {**spec['defaults'], **raw}
  _refuse(known, where)
  _check_values(known, where)
  rope_theta, scaling = _rope(known, where)
  try:
    hidden, heads = known['hidden_size'], known['num_attention_heads']
    cfg = ModelConfig(
        family=family, vocab_size=known['vocab_size'], hidden_size=hidden,
        intermediate_size=known['intermediate_size'],
        num_layers=known['num_hidden_layers'], num_heads=heads,
        num_kv_heads=known.get('num_key_value_heads') or heads,
        head_dim=known.get('head_dim') or hidden // heads,
        rope_theta=float(rope_theta), rope_scaling=scaling,
        norm_eps=known['rms_norm_eps'],
        tie_embeddings=known['tie_word_embeddings'],
        max_position=known.get('max_position_embeddings', 2048),
        num_labels=_num_labels(raw, where), **spec['fixed'])
  except KeyError as e:
    raise InputError(f'{where}: field {e.args[0]!r} is missing') from None
  return cfg, sorted(set(raw) - _READ - _IGNORED)


def _num_labels(raw: dict, where: str) -> int:
  """0 of a language model, 1 of a reward model."""
  if not any('ForSequenceClassification' in name
             for name in raw.get('architectures') or ()):
    return 0
  labels = len(raw.get('id2label') or (0, 1))  # transformers' default is 2
  if labels != 1:
    raise InputError(
        f'{where}: a classifier of {labels} labels; only heads of one label '
        '(reward models) are supported')
  return 1


def _refuse(raw: dict, where: str):
  """What would silently change the model is refused by name."""
  allowed = {
      'hidden_act': ('silu', None), 'attention_bias': (False, None),
      'mlp_bias': (False, None), 'use_sliding_window': (False, None),
      'pretraining_tp': (1, None), 'auto_map': (None,),
  }
  for field, values in allowed.items():
    if raw.get(field) not in values:
      raise InputError(
          f'{where}: {field}={raw[field]!r} is not supported (only '
          f'{values[0]!r})')
  kinds = set(raw.get('layer_types') or ()) - {'full_attention'}
  if kinds:
    raise InputError(f'{where}: layer_types {sorted(kinds)} not supported')


def _check_values(raw: dict, where: str):
  """Sizes are whole numbers above 0 and divide where they must."""
  optional = ('head_dim', 'num_key_value_heads')
  for field in ('vocab_size', 'hidden_size', 'intermediate_size',
                'num_hidden_layers', 'num_attention_heads',
                'max_position_embeddings', *optional):
    value = raw.get(field)
    missing = field not in raw or (value is None and field in optional)
    if not missing and (type(value) is not int or value < 1):
      raise InputError(
          f'{where}: {field}={value!r} must be a whole number above 0')
  for field in ('rope_theta', 'rms_norm_eps'):
    if type(raw[field]) not in (int, float) or raw[field] <= 0:
      raise InputError(f'{where}: {field}={raw[field]!r} must be above 0')
  if type(raw['tie_word_embeddings']) is not bool:
    raise InputError(
        f'{where}: tie_word_embeddings={raw["tie_word_embeddings"]!r} must '
        'be true or false')
  heads = raw.get('num_attention_heads', 1)
  kv_heads = raw.get('num_key_value_heads') or heads
  if heads % kv_heads:
    raise InputError(
        f'{where}: num_key_value_heads={kv_heads} must divide '
        f'num_attention_heads={heads}')


def _rope(raw: dict, where: str) -> tuple[float, tuple]:
  """(theta, scaling) from either spelling: rope_scaling or rope_parameters."""
  params = {**(raw.get('rope_scaling') or {}),
            **(raw.get('rope_parameters') or {})}
  theta = params.get('rope_theta', raw['rope_theta'])
  kind = params.get('rope_type', params.get('type', 'default'))
  if params.get('partial_rotary_factor', 1) != 1:
    raise InputError(f'{where}: partial_rotary_factor is not supported')
  if kind == 'default':
    return theta, ()
  if kind != 'llama3':
    raise InputError(
        f'{where}: rope type {kind!r} is not supported (default, llama3)')
  names = ('factor', 'low_freq_factor', 'high_freq_factor',
           'original_max_position_embeddings')
  missing = [n for n in names if n not in params]
  if missing:
    raise InputError(f'{where}: rope type llama3 lacks {", ".join(missing)}')
  return theta, ('llama3', *(params[n] for n in names))


def to_hf(cfg: ModelConfig, stop_ids=(), bos_id=None, pad_id=None) -> dict:
  """ModelConfig -> config.json for `transformers`."""
  rope = dict(rope_type='default', rope_theta=cfg.rope_theta)
  if cfg.rope_scaling:
    kind, factor, low, high, original = cfg.rope_scaling
    rope |= dict(rope_type=kind, factor=factor, low_freq_factor=low,
                 high_freq_factor=high,
                 original_max_position_embeddings=original)
  # Older readers know rope_theta and rope_scaling, newer rope_parameters.
  old = {k: v for k, v in rope.items() if k != 'rope_theta'}
  name = FAMILIES[cfg.family]['architecture']
  labels = {}
  if cfg.num_labels:
    name = name.replace('ForCausalLM', 'ForSequenceClassification')
    labels = dict(id2label={'0': 'reward'}, label2id={'reward': 0})
  return dict(
      **labels, architectures=[name],
      model_type=cfg.family, vocab_size=cfg.vocab_size,
      hidden_size=cfg.hidden_size, intermediate_size=cfg.intermediate_size,
      num_hidden_layers=cfg.num_layers, num_attention_heads=cfg.num_heads,
      num_key_value_heads=cfg.num_kv_heads, head_dim=cfg.head_dim,
      rms_norm_eps=cfg.norm_eps, tie_word_embeddings=cfg.tie_embeddings,
      max_position_embeddings=cfg.max_position, hidden_act='silu',
      attention_bias=False, rope_theta=cfg.rope_theta, rope_parameters=rope,
      rope_scaling=old if cfg.rope_scaling else None, torch_dtype='float32',
      bos_token_id=bos_id, pad_token_id=pad_id,
      eos_token_id=list(stop_ids) or None)
