"""ModelConfig -> config.json, for every family in `families.FAMILIES`: the inverse of `config_json.from_hf`."""

from collections.abc import Sequence
from typing import Any

from jaxpost.formats import families
from jaxpost.formats.family import ACTIVATIONS, FULL, LOCAL, ORIGINAL, SCALARS, Family
from jaxpost.models.config import CustomConfig, ModelConfig, Rope


def to_hf(
  cfg: ModelConfig | CustomConfig, stop_ids: Sequence[int] = (), bos_id: int | None = None, pad_id: int | None = None
) -> dict[str, Any]:
  """Returns the config.json with which `transformers` and vLLM compute the same model as `cfg`."""
  tokens = dict(bos_token_id=bos_id, pad_token_id=pad_id, eos_token_id=list(stop_ids) or None)
  if isinstance(cfg, CustomConfig):
    return dict(model_type=cfg.family, code=cfg.code, vocab_size=cfg.vocab_size, **tokens)
  family = families.of_model(cfg.family)
  architecture = family.architecture
  labels = {}
  if cfg.num_labels:
    architecture = family.classifier or architecture.replace('ForCausalLM', 'ForSequenceClassification')
    labels = dict(id2label={'0': 'reward'}, label2id={'reward': 0})
  out = dict(
    **labels,
    architectures=[architecture],
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
    **tokens,
    **_common_fields(cfg, family),
  )
  if fields_module := families.own_fields(family):
    out |= fields_module.write(cfg, family)
  return out


def _common_fields(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the fields that `config_fields` and `layer_fields` read, except those that all families have."""
  types = [LOCAL if size else FULL for size in cfg.layer_windows] or [FULL] * cfg.num_layers
  has_windows = LOCAL in types
  # Reversed, so that of several spellings of an activation the first one is written.
  spelling = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
  out = {family.activation_field: spelling.get(cfg.activation, cfg.activation), **_rope_fields(cfg, family)}
  for field in family.fields:
    if field in SCALARS:
      scalar = SCALARS[field]
      out[field] = scalar.write(vars(cfg)[scalar.name])
    if field in family.bias_fields:
      out[field] = set(family.bias_fields[field]) <= set(cfg.biases)
  # Families with `layer_types` need a window size even if no layer has a window.
  default_window = family.defaults.get('sliding_window') if 'layer_types' in family.fields else None
  optional = {
    'sliding_window': max(cfg.layer_windows, default=0) or default_window,
    'layer_types': types,
    'use_sliding_window': has_windows,
    'max_window_layers': types.index(LOCAL) if has_windows else cfg.num_layers,
    'use_qk_norm': bool(cfg.qk_norm),
    'no_rope_layers': [1 + i for i in cfg.layer_ropes] or [1] * cfg.num_layers,
  }
  out |= {k: v for k, v in optional.items() if k in family.fields} | _expert_fields(cfg, family)
  num_predictors = cfg.more_heads.count('mtp')
  if family.extra_layers:
    out['num_nextn_predict_layers'] = num_predictors
  if num_predictors and family.predictor:
    out['mtp_num_hidden_layers'] = num_predictors
  out |= family.only
  return out | {alias: out[name] for alias, name in family.aliases.items() if name in out}


def _rope_fields(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the rope fields in both spellings: older readers know rope_theta and rope_scaling."""
  main = _rope_parameters(cfg.ropes[0], cfg, family)
  out = {'rope_theta': cfg.ropes[0].theta, 'rope_parameters': main}
  if not family.mixed:  # older readers do not know mixed families
    scaling = {k: v for k, v in main.items() if k != 'rope_theta'}
    out['rope_scaling'] = scaling if cfg.ropes[0].scaling else None
  if 'partial_rotary_factor' in family.fields:
    out['partial_rotary_factor'] = main['partial_rotary_factor']
  if 'rotary_dim' in family.fields:
    out['rotary_dim'] = cfg.rotary_dim or cfg.head_dim
  if family.rope_optional and -1 in cfg.layer_ropes:
    del out['rope_theta']
    out['rope_parameters'] = main | dict(rope_theta=None)
  if 'rope_interleave' in family.fields:
    out['rope_interleave'] = cfg.ropes[0].interleaved
  if ORIGINAL in family.fields and ORIGINAL in main:
    out[ORIGINAL] = main[ORIGINAL]
  if family.local_rope:
    out['rope_parameters'] = {FULL: main, LOCAL: _rope_parameters(cfg.ropes[-1], cfg, family)}
    out.setdefault(family.local_rope, cfg.ropes[-1].theta)
  return out


def _rope_parameters(rope: Rope, cfg: ModelConfig, family: Family) -> dict[str, Any]:
  params = {k: list(v) if isinstance(v, tuple) else v for k, v in rope.scaling}
  if params.get('rope_type') == 'dynamic':
    del params[ORIGINAL]
  if params.get('rope_type') == 'ntk_alpha':
    params = {'factor': 1.0, **params, 'rope_type': 'dynamic'}  # HunYuan's spelling
  if 'partial_rotary_factor' in family.fields:
    params['partial_rotary_factor'] = (cfg.rotary_dim or cfg.head_dim) / cfg.head_dim
  return {'rope_type': 'default', **params, 'rope_theta': rope.theta}


def _expert_fields(cfg: ModelConfig, family: Family) -> dict[str, Any]:
  """Returns the fields that describe a mixture of experts."""
  experts, fields = cfg.experts, family.experts
  if not experts or fields is None:
    return {fields.num: 0, 'num_experts_per_tok': 0} if fields else {}
  out = {
    fields.num: experts.num,
    fields.size: experts.size,
    'num_experts_per_tok': experts.top_k,
    'norm_topk_prob': experts.normalize,
    'swiglu_limit': experts.limit,
    'swiglu_alpha': experts.alpha,
    fields.shared: experts.shared,
    fields.first_dense: experts.first_dense,
    'n_group': experts.groups,
    'topk_group': experts.top_groups,
    'routed_scaling_factor': experts.scale,
    'moe_layer_end_index': cfg.num_layers - 1,
  }
  return {k: v for k, v in out.items() if k in family.fields}
